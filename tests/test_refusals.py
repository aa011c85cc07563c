"""What the ``hap`` command refuses before it works long, and what it says where a file cannot be written."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hap.commands import clocks
from hap.cost_models.profile import ProfileError
from hap.errors import PlanError
from tests.cost_models.test_profile import made
from tests.report.test_mesh import of_two
from tests.search.test_bound_measured import PLAIN, measured
from tests.test_cli import ONE, TINY, invoke
from tests.test_language import small_plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a cluster, a model and a plan, and pytest started there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "c.yaml").write_text(ONE)
    (tmp_path / "tiny_model.py").write_text(TINY)
    small_plan().save(tmp_path / "x.plan.json")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "plan tiny_model.py:build -c c.yaml",
        "program x.plan.json tiny_model.py:build",
        "simulate x.plan.json tiny_model.py:build -c c.yaml",
        "report x.plan.json",
        "profile -c c.yaml",
        "profile -c c.yaml --testbed",
        "diagnose runs",
    ],
)
@pytest.mark.parametrize(
    ("out", "said"),
    [("nowhere/x", "nowhere/x: cannot write (no folder nowhere)"), ("there", "there: cannot write (a folder)")],
)
def test_where_nothing_can_be_written_no_work_is_begun(
    command: str, out: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "there").mkdir()
    for work in ("hap.axes.plan_axes", "hap.api.simulate", "hap.api.python_source", "hap.diagnosis.run.load_run"):
        monkeypatch.setattr(work, lambda *_, **__: pytest.fail("began to work"))
    for work in ("_launch", "_on_testbed"):
        monkeypatch.setattr(clocks, work, lambda *_: pytest.fail("began to work"))
    assert invoke(capsys, *command.split(), "-o", out) == (2, "", f"error: {said}\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("tiny_model.py:nope -c c.yaml", "tiny_model.py has no function 'nope'"),
        ("-c c.yaml --optimizer lion", "unknown optimizer 'lion' (known: "),
        ("-c c.yaml --testbed --emulate", "--testbed plays the cluster's devices itself: leave out --emulate"),
        (
            "-c c.yaml --cluster-out d.yaml",
            "--cluster-out is where a discovered cluster goes, and --cluster names one that is known",
        ),
    ],
)
def test_a_profile_that_no_rank_could_make_is_not_begun(
    options: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("launched"))
    code, out, err = invoke(capsys, "profile", *options.split())
    assert (code, out) == (2, "") and err.startswith(f"error: {said}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("c.yaml", "record: c.yaml: cannot make this folder (File exists)"),
        ("c.yaml/1", "record: c.yaml/1: cannot make this folder (Not a directory)"),
        ("old", "record: old has records of another run; name a new folder"),
    ],
)
def test_a_run_that_cannot_be_recorded_is_not_launched(
    place: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "old").mkdir()
    (folder / "old" / "rank-0000.jsonl").touch()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("launched"))
    asked = ["run", "-c", "c.yaml", "--record", place, "tiny_model.py"]
    assert invoke(capsys, *asked) == (2, "", f"error: {said}\n")


def test_a_plan_is_no_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = invoke(capsys, "plan", "tiny_model.py:build", "-c", "c.yaml", "--profile", "x.plan.json")
    assert (code, err) == (2, "error: x.plan.json: a plan, not a profile file\n")


def test_master_goes_with_host(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = invoke(capsys, "run", "-c", "c.yaml", "--master", "10.0.0.1:29500", "tiny_model.py")
    assert (code, err) == (2, "error: --master goes with --host\n")


def test_golden_plans_that_cannot_be_written_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "plans").mkdir()
    entry = "{model: ../tiny_model.py:build, cluster: ../c.yaml, effort: quick}"
    (folder / "plans" / "check.yaml").write_text(f"tiny.plan.json: {entry}\n")
    (folder / "plans" / "tiny.plan.json").mkdir()
    code, _, err = invoke(capsys, "check", "plans", "--update")
    assert (code, err) == (2, "error: plans/tiny.plan.json: cannot write (Is a directory)\n")


def test_what_cannot_be_saved_says_so(tmp_path: Path) -> None:
    for plan in (small_plan(), of_two(2, 1)):
        with pytest.raises(PlanError, match=r"nowhere/x\.json: cannot write \(No such file or directory\)$"):
            plan.save(tmp_path / "nowhere" / "x.json")
    with pytest.raises(ProfileError, match=r"nowhere/x\.json: cannot write \(No such file or directory\)$"):
        made().save(tmp_path / "nowhere" / "x.json")


def test_a_plan_played_by_other_speeds_than_it_was_made_with_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "plain.yaml").write_text(PLAIN.to_yaml())
    for seed in range(2):
        measured(seed).profile.save(folder / f"{seed}.json")
    for name, given in (("m", ["--profile", "0.json"]), ("p", [])):
        assert invoke(capsys, "plan", "tiny_model.py:build", "-c", "plain.yaml", "-o", f"{name}.json", *given)[0] == 0
    lines = {
        ("m", ""): r"m.json: made with a profile \(\w{12}\), and played by the description: give --profile for .*\n",
        ("m", "0.json"): "",
        ("m", "1.json"): r"m.json: made with another profile \(\w{12}\), and played by that of 1.json\n",
        ("p", ""): "",
        ("p", "0.json"): r"p.json: made without a profile, and played by that of 0.json\n",
    }
    for (name, profile), said in lines.items():
        options = ["--profile", profile] if profile else []
        code, out, err = invoke(capsys, "simulate", f"{name}.json", "tiny_model.py:build", "-c", "plain.yaml", *options)
        assert code == 0 and out.startswith("step ") and re.fullmatch(said, err), err
