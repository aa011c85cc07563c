"""The pytest plug-in and ``hap check``: golden plans are written on demand, and guard step and memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hap import cli
from hap.errors import HapError
from hap.guard import check_folder, judge
from hap.mesh_plan import MeshPlan, load_plan
from hap.plan import Plan
from hap.testing import HapPlan
from tests.test_language import small_plan

pytest_plugins = ["pytester"]
CLUSTER = Path(__file__).with_name("unequal.yaml")
MODEL = """
import torch

def build(width=24):
    model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    return {"model": model, "example_inputs": (torch.zeros(32, 6),), "loss_fn": lambda out: out.square().mean()}
"""
FULLER = "memory of b grew by 100.0%, from 1 B to 2 B (at most 0.0% allowed)"
CHECK = "tiny.plan.json: {model: 'tiny.py:build', cluster: cluster.yaml, effort: quick}\n"


def tiny(width: int) -> dict[str, object]:
    model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    return {"model": model, "example_inputs": (torch.zeros(32, 6),), "loss_fn": lambda out: out.square().mean()}


def check(fixture: HapPlan, width: int = 24, **limits: object) -> Plan | MeshPlan:
    return fixture.check(cluster=CLUSTER, effort="quick", **tiny(width), **limits)  # type: ignore[arg-type]


def test_missing_then_written_then_guarded(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"no golden plan .*tiny\.plan\.json; run pytest --hap-update"):
        check(HapPlan(tmp_path / "plans", "tiny", update=False))
    written = check(HapPlan(tmp_path / "plans", "tiny", update=True))
    assert Plan.load(tmp_path / "plans" / "tiny.plan.json") == written
    assert check(HapPlan(tmp_path / "plans", "tiny", update=False)) == written


def test_a_wider_model_fails_in_the_words_of_diff(tmp_path: Path) -> None:
    check(HapPlan(tmp_path, "tiny", update=True))
    with pytest.raises(pytest.fail.Exception) as failure:
        check(HapPlan(tmp_path, "tiny", update=False), width=48)
    said = str(failure.value)
    assert "tiny.plan.json: WORSE" in said and "the step grew by" in said and "(at most 2.0% allowed)" in said
    assert "another model: Sequential" in said and "predicted step" in said and "pytest --hap-update" in said


def test_two_checks_in_one_test_need_names(tmp_path: Path) -> None:
    fixture = HapPlan(tmp_path, "tiny", update=True)
    check(fixture)
    check(fixture, name="again")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny-again.plan.json", "tiny.plan.json"]
    with pytest.raises(AssertionError, match="give the second check a name"):
        check(fixture)


def test_a_name_may_say_anything_and_stays_in_the_folder(tmp_path: Path) -> None:
    fixture = HapPlan(tmp_path / "plans", "tiny", update=True)
    for name in ("a/b", "../x"):
        check(fixture, name=name)
    assert sorted(p.name for p in (tmp_path / "plans").iterdir()) == ["tiny-..-x.plan.json", "tiny-a-b.plan.json"]


def test_the_cluster_beside_the_test_is_meant_wherever_pytest_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.yaml").write_text(CLUSTER.read_text())
    monkeypatch.chdir(tmp_path)
    fixture = HapPlan(tmp_path / "test" / "plans", "tiny", update=True)
    written = fixture.check(cluster="c.yaml", effort="quick", **tiny(24))  # type: ignore[arg-type]
    (tmp_path / "c.yaml").write_text("another: one")
    assert fixture.check(cluster="c.yaml", effort="quick", name="again", **tiny(24)) == written  # type: ignore[arg-type]
    (tmp_path / "d.yaml").write_text(CLUSTER.read_text())
    assert fixture.check(cluster="d.yaml", effort="quick", name="there", **tiny(24)) == written  # type: ignore[arg-type]


SHARED = {
    "test_a": """
        import pytest

        @pytest.mark.parametrize("case", ["x y", "x/y", "z"])
        def test_it(hap_plan, case):
            hap_plan.check(None, "c.yaml", None)
    """,
    "test_b": """
        class TestOne:
            def test_them(self, hap_plan):
                hap_plan.check(None, "c.yaml", None)

        class TestTwo:
            def test_them(self, hap_plan):
                hap_plan.check(None, "c.yaml", None)

            def test_it(self, hap_plan):
                hap_plan.check(None, "c.yaml", None, name="z")
    """,
    "test_c": """
        def test_them(hap_plan):
            hap_plan.check(None, "c.yaml", None)

        def test_it(hap_plan):
            hap_plan.check(None, "c.yaml", None, name="own")
    """,
    "elsewhere/test_d": """
        def test_them(hap_plan):
            hap_plan.check(None, "c.yaml", None)
    """,
}


def test_two_tests_that_ask_for_one_golden_plan_are_told(pytester: pytest.Pytester) -> None:
    """Names alike in two files or two classes, parameters that a file's name cannot tell apart, a check's name that
    makes a parameter of it. No test comes so far as to plan."""
    pytester.makepyfile(**SHARED)
    said = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-q", "-rN").stdout.str().splitlines()
    plans = f"{pytester.path}/plans"
    assert [line.removeprefix(f"{plans}/") for line in said if "is the golden plan of" in line] == [
        f"{file}.plan.json is the golden plan of {first}; rename {second}, or give its check a name of its own"
        for file, first, second in (
            ("test_it-x-y", "test_a.py::test_it[x y]", "test_a.py::test_it[x/y]"),
            ("test_them", "test_b.py::TestOne::test_them", "test_b.py::TestTwo::test_them"),
            ("test_it-z", "test_a.py::test_it[z]", "test_b.py::TestTwo::test_it"),
            ("test_them", "test_b.py::TestOne::test_them", "test_c.py::test_them"),
        )
    ]
    missing = [line.removeprefix("there is no golden plan ") for line in said if line.startswith("there is no")]
    assert sorted(line.partition(";")[0].removeprefix(f"{pytester.path}/") for line in missing) == [
        "elsewhere/plans/test_them.plan.json",
        *(f"plans/{name}.plan.json" for name in ("test_it-own", "test_it-x-y", "test_it-z", "test_them")),
    ]


def test_a_test_that_is_run_again_asks_for_its_own_plan_again(tmp_path: Path) -> None:
    asked: dict[Path, str] = {}
    for update in (True, False):
        check(HapPlan(tmp_path, "tiny", update, "test_it.py::test_it", asked))


@pytest.mark.long
def test_the_option_and_the_fixture_come_with_the_package(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import torch\n"
        "def test_it(hap_plan):\n"
        "    model = torch.nn.Linear(4, 1)\n"
        "    batch, loss = torch.zeros(8, 4), lambda y: y.mean()\n"
        f"    hap_plan.check(model, {str(CLUSTER)!r}, (batch,), loss_fn=loss, effort='quick')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert first.returncode == 1 and "run pytest --hap-update and commit it" in first.stdout
    assert "Traceback" not in first.stdout
    assert subprocess.run([*command, "--hap-update"], capture_output=True, cwd=tmp_path).returncode == 0
    assert (tmp_path / "plans" / "test_it.plan.json").is_file()


def changed(step_s: float = 2.0, memory: tuple[int, ...] = (1, 1, 1), cluster: str = "f") -> Plan:
    plan = small_plan()
    predicted = plan.predicted.model_copy(update={"step_s": step_s, "memory_bytes": memory})
    made = plan.provenance.model_copy(update={"cluster_fingerprint": cluster})
    return plan.model_copy(update={"predicted": predicted, "provenance": made})


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (changed(), None),
        (changed(step_s=2.04), None),
        (changed(step_s=2.05), "the step grew by 2.5%, from 2 s to 2.05 s (at most 2.0% allowed)"),
        (changed(step_s=1.0), None),
        (changed(memory=(1, 2, 1)), FULLER),
        (changed(memory=(1, 0, 0)), None),
        (changed(cluster="g"), "the golden plan is for cluster 'c' (f), this is 'c' (g); update it"),
    ],
)
def test_the_limits(found: Plan, reason: str | None) -> None:
    result = judge("x", small_plan(), found, max_step_regression=0.02, max_memory_regression=0.0)
    assert result.reasons == (() if reason is None else (reason,))


def test_the_step_of_a_plan_that_does_not_know_it_as_run_is_compared_with_nothing_overlapped() -> None:
    """A step as run of 1.5 s would hide that 2 s became 3 s."""
    golden, today = changed(), changed(step_s=3.0)
    today = today.model_copy(update={"predicted": today.predicted.model_copy(update={"overlapped_s": 1.5})})
    said = "the step with nothing overlapped grew by 50.0%, from 2 s to 3 s (at most 2.0% allowed)"
    result = judge("x", golden, today, max_step_regression=0.02, max_memory_regression=0.0)
    assert result.reasons == (said,)
    assert "predicted step" not in result.words and "with nothing overlapped  2 s  ->  3 s  +50.0%" in result.words


def test_a_device_beside_a_fuller_one_is_guarded_too() -> None:
    golden = changed(memory=(10, 2, 0))

    def reasons(allowed: float, *memory: int) -> tuple[str, ...]:
        found = changed(memory=memory)
        return judge("x", golden, found, max_step_regression=0.0, max_memory_regression=allowed).reasons

    assert reasons(0.4, 9, 3, 0) == ("memory of b grew by 50.0%, from 2 B to 3 B (at most 40.0% allowed)",)
    assert reasons(0.0, 9, 3, 1) == (
        "memory of c grew, from 0 B to 1 B (at most 0.0% allowed), and 1 other device grew too",
    )
    assert reasons(0.5, 10, 3, 0) == ()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.py").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text(CLUSTER.read_text())
    (tmp_path / "check.yaml").write_text(CHECK)
    return tmp_path


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(arguments))
    return int(exit_.value.code or 0)


def test_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", str(folder)) == 1
    assert "there is no golden plan" in capsys.readouterr().out
    assert run("check", str(folder), "--update") == 0
    assert capsys.readouterr().out == "tiny.plan.json: written\n"
    assert run("check", str(folder)) == 0
    assert capsys.readouterr().out == "tiny.plan.json: ok\n"
    (folder / "tiny.py").write_text(MODEL.replace("width=24", "width=48"))
    assert run("check", str(folder), "--json") == 1
    (result,) = json.loads(capsys.readouterr().out)
    assert not result["ok"] and result["reasons"][0].startswith("the step grew by")


def test_what_was_found_is_told_before_a_later_plan_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "check.yaml").write_text(CHECK + CHECK.replace("tiny.plan", "other.plan").replace(":build", ":nope"))
    failed = f"error: {folder}/tiny.py has no function 'nope'\n"
    for words, said in ((["--update"], "tiny.plan.json: written\n"), ([], "tiny.plan.json: ok\n")):
        assert run("check", str(folder), *words) == 2
        assert capsys.readouterr() == (said, failed)
    assert run("check", str(folder), "--json") == 2
    (result,) = json.loads(capsys.readouterr().out)
    assert result["ok"]


def test_plans_of_two_axes_are_guarded(folder: Path) -> None:
    (folder / "check.yaml").write_text(CHECK.replace("effort", "mesh: hosts, effort"))
    assert [str(r) for r in check_folder(folder, update=True)] == ["tiny.plan.json: written"]
    assert isinstance(load_plan(folder / "tiny.plan.json"), MeshPlan)
    assert [str(r) for r in check_folder(folder, update=False)] == ["tiny.plan.json: ok"]
    (folder / "check.yaml").write_text(CHECK)  # one axis now
    (result,) = check_folder(folder, update=False)
    assert "became a plan of one axis" in result.words
    (folder / "check.yaml").write_text(CHECK.replace("effort", "mesh: best, effort"))
    steps = [load_plan(folder / "tiny.plan.json").predicted.as_run_s]
    check_folder(folder, update=True)
    assert load_plan(folder / "tiny.plan.json").predicted.as_run_s <= steps[0]


def test_gradients_in_another_dtype_are_guarded(folder: Path) -> None:
    (folder / "check.yaml").write_text(CHECK.replace("effort", "reduce_dtype: bfloat16, effort"))
    check_folder(folder, update=True)
    assert load_plan(folder / "tiny.plan.json").provenance.reduce_dtype == "bfloat16"
    assert [str(r) for r in check_folder(folder, update=False)] == ["tiny.plan.json: ok"]
    written = check(HapPlan(folder / "plans", "narrow", update=True), reduce_dtype=torch.bfloat16)
    assert written.provenance.reduce_dtype == "bfloat16"
    (folder / "check.yaml").write_text(CHECK)
    (result,) = check_folder(folder, update=False)
    assert "gradients are exchanged in bfloat16; now in their own dtype" in result.words


def test_the_fixture_guards_plans_of_two_axes(tmp_path: Path) -> None:
    written = check(HapPlan(tmp_path, "tiny", update=True), mesh="hosts")
    assert isinstance(written, MeshPlan) and load_plan(tmp_path / "tiny.plan.json") == written
    assert check(HapPlan(tmp_path, "tiny", update=False), mesh="hosts") == written


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "expected X.plan.json"),
        ("{", r"cannot read \(not YAML, line 1: "),
        ("x.plan.json: {}\nx.plan.json: {}", r"cannot read \(not YAML, line 2: key 'x\.plan\.json' is given twice\)$"),
        (
            "x.plan.json: {model: 'm.py:f', cluster: c, effort: quick, effort: normal}",
            r"cannot read \(not YAML, line 1: key 'effort' is given twice\)$",
        ),
        (
            "x.plan.json: {model: 'm.py:f', cluster: c, batch: 8}",
            "x.plan.json: batch and seq go with hf; a model comes",
        ),
        ("x.plan.json: {model: 'm.py:f', cluster: c, seq: 8}", "x.plan.json: batch and seq go with hf; a model comes"),
        ("x.json: {cluster: c}", "no name such as gpt2.plan.json"),
        ("x.plan.json: {cluster: c, speed: 1}", "speed: Extra inputs"),
        ("x.plan.json: {model: 'm.py:f', cluster: c, mesh: rings}", "mesh: Input should be 'flat', 'hosts' or 'best'"),
        ("x.plan.json: {cluster: c}", "name one of model and hf"),
        ("x.plan.json: {model: 'm.py:f', cluster: c, max_step_regression: -1}", "max_step_regression"),
    ],
)
def test_what_check_yaml_may_not_say(folder: Path, text: str, says: str) -> None:
    (folder / "check.yaml").write_text(text)
    with pytest.raises(HapError, match=says):
        check_folder(folder, update=False)


def test_a_plan_that_nobody_guards(folder: Path) -> None:
    (folder / "other.plan.json").write_text("{}")
    with pytest.raises(HapError, match=r"other\.plan\.json is in the folder and not named"):
        check_folder(folder, update=False)
