"""The ``hap`` command: its surface and its refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from hap import cli
from hap.cluster import ClusterSpec
from hap.commands.launching import KEEPS_MEMORY, environment
from hap.mesh_plan import parse_plan
from hap.plan import Plan

MODEL = ["--hf", "--batch", "--seq"]
SURFACE = {
    "version": ["--json"],
    "plan": [
        *(
            "-c",
            "--cluster",
            *MODEL,
            "--optimizer",
            "--effort",
            "--gradient-accumulation-steps",
            "--reduce-dtype",
            "--budget-s",
            "--method",
            "--leave-out",
            "--mesh",
            "--profile",
            "--add",
            "--without",
            "--link",
        ),
        *("-o", "--out", "--json"),
    ],
    "explain": [*MODEL, "--node", "--json"],
    "diff": ["--json"],
    "advise": ["-c", "--cluster", *MODEL, "--optimizer", "--effort", "--json"],
    "diagnose": ["--plan", "-o", "--out", "--trace", "--collectives", "--json"],
    "report": ["--run", "-o", "--out", "--json"],
    "check": ["--update", "--json"],
    "program": [*MODEL, "--host", "-o", "--out", "--json"],
    "simulate": ["-c", "--cluster", *MODEL, "--profile", "-o", "--out", "--json"],
    "profile": [
        *("-c", "--cluster", *MODEL, "-o", "--out", "--cluster-out", "--optimizer", "--emulate", "--testbed", "--json")
    ],
    "rules": [],
    "rules check": [*MODEL, "--op", "--json"],
    "rules discover": [*MODEL, "--op", "--json"],
    "run": ["-c", "--cluster", "--plan", "--host", "--master", "--record", "--json"],
}

ONE = (
    "name: one\nbackend: gloo\nhosts: [{name: a, devices: [{name: d, tflops: {float32: 1}, memory: 1GB, "
    "memory_bandwidth: 1GB/s}]}]\n"
)
TWO = """
name: two
backend: gloo
hosts:
  - name: big
    devices: [{name: d, count: 2, tflops: {float32: 0.002}, memory: 1GB, memory_bandwidth: 1GB/s}]
    link: {bandwidth: 1GB/s, latency: 50us}
    network: {bandwidth: 1Gbit/s, latency: 100us}
  - name: small
    devices: [{name: d, tflops: {float32: 0.001}, memory: 1GB, memory_bandwidth: 1GB/s}]
    network: {bandwidth: 1Gbit/s, latency: 100us}
"""
TRAIN = """
import argparse, pathlib, sys, torch
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import hap
from hap.build import build_from

parser = argparse.ArgumentParser()
parser.add_argument("--cluster")
parser.add_argument("--plan")
given = parser.parse_args()
built = build_from(str(pathlib.Path(__file__).parent / "tiny_model.py:build"))
batch = torch.arange(48.0).reshape(8, 6) / 48
program = hap.compile(
    built.model, given.cluster, plan=given.plan, example_inputs=built.example_inputs, loss_fn=built.loss_fn
)
loss = program(*program.shard_batch((batch,)))
loss.backward()
built.model.load_state_dict(program.state_dict())
alone = built.loss_fn(built.model(batch))
print(f"difference {abs(float(loss.detach() - alone.detach())):.5f}", flush=True)
torch.distributed.destroy_process_group()
"""
TINY = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return {"model": model, "example_inputs": (torch.zeros(8, 6),), "loss_fn": lambda out: out.square().mean()}
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_model.py"
    path.write_text(TINY)
    return path


def invoke(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command in this process."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def surface(group: Any, prefix: str = "") -> dict[str, list[str]]:
    """The options of every command, those of commands inside commands too."""
    found: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        found[prefix + name] = sorted(o for p in command.params if p.param_type_name == "option" for o in p.opts)
        if hasattr(command, "commands"):
            found |= surface(command, f"{prefix}{name} ")
    return found


def test_the_surface_is_what_it_was() -> None:
    found = surface(typer.main.get_command(cli.app))
    assert found == {name: sorted(options) for name, options in SURFACE.items()}


@pytest.mark.parametrize("command", SURFACE)
def test_every_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = invoke(capsys, *command.split(), "--help")
    assert code == 0
    assert f"Example:  hap {command}" in out


def test_every_command_prints_json() -> None:
    assert [name for name, options in SURFACE.items() if "--json" not in options] == ["rules"]  # which only has others


def test_rules_check_proves_one_operator_and_names_what_is_missing(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = invoke(capsys, "rules", "check", f"{script}:build", "--op", "aten.mm.default")
    assert code == 0 and "aten.mm.default" in out and "proved" in out
    code, _, err = invoke(capsys, "rules", "check", f"{script}:build", "--op", "aten.nope.default")
    assert code == 2 and err.startswith("error: ") and "call 'aten.nope.default'" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget-s", "0"], "error: the budget must be a number of seconds above 0, not 0"),
        (["--budget-s", "1e-9"], "error: no plan was found within the budget of 1ns; give more, or no budget"),
        (
            ["--budget-s", "9", "--without", "a"],
            "error: --add, --without and --link compare clusters; leave out --out, --mesh, --profile, --budget-s, "
            "--method and --leave-out",
        ),
        (["--budget-s", "9", "--mesh", "best"], "error: --mesh best goes without --profile, --budget-s and --method"),
        (["--mesh", "hosts"], "error: cluster 'one' has one host: there is no second axis, between hosts"),
        (
            ["--gradient-accumulation-steps", "0"],
            "error: --gradient-accumulation-steps 0: expected a number from 1 on, or best",
        ),
        (
            ["--gradient-accumulation-steps", "best", "--without", "a"],
            "error: --add, --without and --link compare clusters for one number of batches; name it",
        ),
    ],
)
def test_a_budget_that_cannot_be_kept_is_one_line(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    (tmp_path / "c.yaml").write_text(ONE)
    code, out, err = invoke(capsys, "plan", f"{script}:build", "-c", f"{tmp_path}/c.yaml", *options)
    assert (code, out, err) == (2, "", f"{said}\n")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("hap ex", {"explain"}), ("hap plan --wi", {"--without"}), ("hap rules ", {"check", "discover"})],
)
def test_completion_in_a_shell(typed: str, offered: set[str]) -> None:
    """As bash asks: the line so far in variables, one candidate a line in return."""
    environment = {
        **os.environ,
        "_HAP_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split(" ")) - 1),
    }
    code = "import hap.cli; hap.cli.main([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert offered <= set(done.stdout.split()) and len(done.stdout.split()) <= 2, done


def test_program_simulate_and_run_print_json(script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(ONE)
    code, _, _ = invoke(capfd, "plan", f"{script}:build", "-c", f"{tmp_path}/c.yaml", "-o", f"{tmp_path}/x.plan.json")
    assert code == 0
    code, out, _ = invoke(capfd, "program", f"{tmp_path}/x.plan.json", f"{script}:build", "--json")
    body = json.loads(out)
    assert code == 0 and body["out"] is None and "def forward" in body["source"]
    trace = ["-c", f"{tmp_path}/c.yaml", "-o", f"{tmp_path}/trace.json"]
    code, out, _ = invoke(capfd, "simulate", f"{tmp_path}/x.plan.json", f"{script}:build", *trace, "--json")
    assert code == 0 and json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert json.loads(out)["step_s"] == pytest.approx(Plan.load(tmp_path / "x.plan.json").predicted.as_run_s)
    (tmp_path / "script.py").write_text("import sys; print('said'); sys.exit(0)")
    code, out, err = invoke(capfd, "run", "--json", "--cluster", f"{tmp_path}/c.yaml", f"{tmp_path}/script.py")
    body = json.loads(out)
    assert (code, body["exit_code"]) == (0, 0) and "said" in err and body["seconds"] > 0


def test_a_plan_for_steps_of_several_batches_says_so_everywhere(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(TWO)
    path = f"{tmp_path}/x.plan.json"
    made = ["plan", f"{script}:build", "-c", f"{tmp_path}/c.yaml", "-o", path, "--gradient-accumulation-steps"]
    code, out, _ = invoke(capfd, *made, "4")
    assert code == 0 and "a step has 4 batches, whose gradients are added up" in out
    assert Plan.load(path).gradient_accumulation_steps == 4
    code, out, _ = invoke(capfd, "explain", path)
    assert code == 0 and "A step has 4 batches; each is predicted to take" in out
    code, out, _ = invoke(capfd, "simulate", path, f"{script}:build", "-c", f"{tmp_path}/c.yaml")
    assert code == 0 and out.startswith("of a step of 4 batches the last:\nstep ")
    code, _, _ = invoke(capfd, "report", path)
    assert code == 0 and "the last of a step&#x27;s 4 batches" in (tmp_path / "x.html").read_text().replace(
        "'", "&#x27;"
    )
    assert invoke(capfd, *made, "best")[0] == 0 and 8 % Plan.load(path).gradient_accumulation_steps == 0


def test_a_plan_whose_gradients_travel_in_another_dtype_says_so_everywhere_and_needs_not_be_told_again(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(TWO)
    path, plain = f"{tmp_path}/x.plan.json", f"{tmp_path}/plain.plan.json"
    model = [f"{script}:build", "-c", f"{tmp_path}/c.yaml"]
    assert invoke(capfd, "plan", *model, "-o", plain)[0] == 0 and "reduce_dtype" not in Path(plain).read_text()
    code, out, _ = invoke(capfd, "plan", *model, "-o", path, "--reduce-dtype", "bfloat16")
    assert code == 0 and "gradients are exchanged in bfloat16" in out
    assert Plan.load(path).provenance.reduce_dtype == "bfloat16"
    code, out, _ = invoke(capfd, "explain", path)
    assert code == 0 and "Gradients are exchanged in bfloat16." in out
    code, out, _ = invoke(capfd, "diff", plain, path)
    assert code == 0 and "gradients are exchanged in their own dtype; now in bfloat16" in out
    code, out, _ = invoke(capfd, "program", path, f"{script}:build")
    assert code == 0 and "torch.bfloat16" in out
    assert invoke(capfd, "simulate", path, *model)[0] == 0
    assert invoke(capfd, "explain", path, f"{script}:build", "--node", "0.weight")[0] == 0
    changed = ["plan", *model, "--without", "small", "--reduce-dtype", "bfloat16"]
    assert invoke(capfd, *changed)[0] == 0
    code, out, _ = invoke(capfd, "plan", *model, "--mesh", "hosts", "--reduce-dtype", "float16")
    assert code == 0 and "a mesh of two axes" in out and out.count("gradients are exchanged in float16") == 2


def test_a_plan_of_two_axes_is_made_explained_written_and_run(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(TWO)
    made = ["plan", f"{script}:build", "-c", f"{tmp_path}/c.yaml", "--mesh", "hosts", "-o", f"{tmp_path}/m.plan.json"]
    code, out, _ = invoke(capfd, *made)
    assert code == 0 and "2 hosts, 3 ranks, a mesh of two axes" in out and "plan 1, inside small" in out
    code, said, _ = invoke(capfd, "explain", f"{tmp_path}/m.plan.json")
    assert code == 0 and said == out
    code, out, _ = invoke(capfd, "explain", f"{tmp_path}/m.plan.json", "--json")
    assert sum(h["batch"] for h in json.loads(out)["hosts"]) == 8
    code, out, _ = invoke(capfd, "program", f"{tmp_path}/m.plan.json", f"{script}:build", "--host", "small")
    assert code == 0 and "comm.over_hosts(" in out and "torchrun" not in out and "__main__" not in out
    code, _, err = invoke(capfd, "program", f"{tmp_path}/m.plan.json", f"{script}:build", "--host", "none")
    assert (code, err) == (2, "error: the plan has no host 'none' (hosts: big, small)\n")
    code, _, _ = invoke(capfd, "report", f"{tmp_path}/m.plan.json")
    assert code == 0 and "Plan 1, inside small" in (tmp_path / "m.html").read_text()
    assert invoke(capfd, "diff", *[f"{tmp_path}/m.plan.json"] * 2)[:2] == (0, "the same plan\n")
    trace = ["-c", f"{tmp_path}/c.yaml", "-o", f"{tmp_path}/trace.json"]
    code, out, _ = invoke(capfd, "simulate", f"{tmp_path}/m.plan.json", f"{script}:build", *trace)
    assert code == 0 and out.count("computes") == 3 and "hosts_sum" in (tmp_path / "trace.json").read_text()
    (tmp_path / "p.json").write_text("{}")
    code, _, err = invoke(
        capfd, "simulate", f"{tmp_path}/m.plan.json", f"{script}:build", *trace, "--profile", "p.json"
    )
    assert (code, err.count("\n")) == (2, 1) and "play it without a profile" in err
    (tmp_path / "train.py").write_text(TRAIN)
    run = ["run", "--cluster", f"{tmp_path}/c.yaml", "--plan", f"{tmp_path}/m.plan.json", f"{tmp_path}/train.py"]
    code, out, err = invoke(capfd, *run)
    assert code == 0, err
    assert out.count("difference 0.0") == 3


def test_the_better_of_both_meshes_is_taken(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(TWO)
    steps = {}
    for mesh in ("flat", "hosts", "best"):
        code, out, _ = invoke(capsys, "plan", f"{script}:build", "-c", f"{tmp_path}/c.yaml", "--mesh", mesh, "--json")
        assert code == 0
        steps[mesh] = parse_plan(out).predicted.as_run_s
    assert steps["best"] == min(steps["flat"], steps["hosts"]) and steps["flat"] != steps["hosts"]


def test_profile_prints_json_or_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hap.commands.clocks import tell
    from tests.cost_models.test_profile import made

    tell(made(), tmp_path / "p.json", as_json=True)
    body = json.loads(capsys.readouterr().out)
    assert body["out"] == str(tmp_path / "p.json") and body["fingerprint"] == made().fingerprint
    assert [r["device"] for r in body["ranks"]] == [r.device for r in made().ranks]


def test_exit_codes_are_documented() -> None:
    text = (Path(__file__).parents[1] / "docs" / "ci.md").read_text()
    assert all(f"| {code} | " in text for code in (0, 1, 2))


def test_run_passes_on_what_torchrun_or_hap_would_take_for_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:])")
    (tmp_path / "c.yaml").write_text(ONE)
    cluster, its_own = ["--cluster", f"{tmp_path}/c.yaml"], ["--log", "x", "--nnodes", "7", "--json", "--host", "y"]
    code, out, _ = invoke(capfd, "run", *cluster, f"{tmp_path}/script.py", *its_own)
    assert (code, out.strip()) == (0, str([*cluster, *its_own]))
    code, _, err = invoke(capfd, "run", "--clutser", "c.yaml", f"{tmp_path}/script.py")
    assert code == 2 and "No such option" in err


def test_version_and_module_entry() -> None:
    from hap import __version__

    for words in (["version"], ["--version"]):
        done = subprocess.run([sys.executable, "-m", "hap", *words], capture_output=True, text=True, check=True)
        assert done.stdout == f"{__version__}\n"


def test_help_does_not_import_torch() -> None:
    code = "import sys, hap.cli\ntry:\n    hap.cli.main(['--help'])\nfinally:\n    assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_refusal_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = invoke(capsys, "explain", "no-such.plan.json")
    assert (code, out) == (2, "")
    assert err.startswith("error: no-such.plan.json: cannot read plan") and err.count("\n") == 1


def test_unexpected_exceptions_keep_their_traceback(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def build():\n    return 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        cli.main(["plan", f"{broken}:build", "--cluster", "cluster.yaml"])


@pytest.mark.parametrize("arguments", [[], ["x.py:build", "--hf", "gpt2"]])
def test_exactly_one_model(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = invoke(capsys, "plan", "--cluster", "c.yaml", *arguments)
    assert (code, err) == (2, "error: name one model: either FILE.py:FUNCTION or --hf NAME\n")


@pytest.mark.parametrize("size", ["--batch", "--seq"])
@pytest.mark.parametrize("command", [name for name, options in SURFACE.items() if "--hf" in options])
def test_sizes_are_for_models_of_hugging_face(
    command: str, size: str, script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A function's example inputs are its own, so they would say nothing there, nor where no model is named."""
    refused = "error: --batch and --seq go with --hf; FILE.py:FUNCTION returns its own example inputs\n"
    (tmp_path / "c.yaml").write_text(ONE)
    plan = f"{tmp_path}/x.plan.json"
    if "--node" in SURFACE[command] or command in ("program", "simulate"):
        assert invoke(capsys, "plan", f"{script}:build", "-c", f"{tmp_path}/c.yaml", "-o", plan)[0] == 0
    given = {"explain": [plan, "--node", "0.weight"], "program": [plan], "simulate": [plan]}.get(command, [])
    cluster = ["-c", f"{tmp_path}/c.yaml"] if "-c" in SURFACE[command] else []
    assert invoke(capsys, *command.split(), *given, f"{script}:build", *cluster, size, "4") == (2, "", refused)
    if command in ("profile", "rules check", "rules discover"):  # which take a model of HAP's own without one
        assert invoke(capsys, *command.split(), *cluster, size, "4") == (2, "", refused)


@pytest.mark.parametrize("given", [["x.py:build"], ["--hf", "gpt2"], ["--batch", "4"], ["--seq", "4"]])
def test_a_plan_is_explained_without_its_model(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = invoke(capsys, "explain", "x.plan.json", *given)
    said = "FILE.py:FUNCTION, --hf, --batch and --seq go with --node; a plan says the rest without its model"
    assert (code, out, err) == (2, "", f"error: {said}\n")


def test_ranks_on_cpus_keep_their_memory_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a profile is measured, too, so that both are of the same."""
    on_cpus = ClusterSpec.from_yaml(ONE)
    on_gpus = ClusterSpec.from_yaml("name: g\nbackend: nccl\nhosts:\n  - {name: a, devices: [{gpu: T4}]}\n")
    for name in (*KEEPS_MEMORY, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert environment(on_cpus).items() >= {**KEEPS_MEMORY, "OMP_NUM_THREADS": "1"}.items()
    assert not KEEPS_MEMORY.keys() & environment(on_gpus).keys()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert environment(on_cpus)["MALLOC_TRIM_THRESHOLD_"] == "1"
