"""Bad input: one clear line, exit code 2 from the command line, a ``ValueError`` from Python, never a traceback."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hap import api, cli, errors
from hap.build import build_from
from hap.cluster import ClusterSpec
from hap.plan import Plan
from tests._support.ranks import run_ranks

CLUSTER = """
name: pair
backend: gloo
hosts:
  - name: left
    devices: [{name: fast, tflops: {float32: 0.02}, memory: 1GB, memory_bandwidth: 10GB/s}]
    network: {bandwidth: 10Gbit/s, latency: 50us}
  - name: right
    devices: [{name: slow, tflops: {float32: 0.01}, memory: 1GB, memory_bandwidth: 5GB/s}]
    network: {bandwidth: 10Gbit/s, latency: 50us}
"""

MODELS = """
import torch
from torch import nn


@torch.library.custom_op("hap_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda context, gradient: gradient * 2)


class Twice(nn.Module):
    def forward(self, x):
        return twice(x)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, x):
        if x.sum() > 0:  # the guilty line
            x = -x
        return self.linear(x)


def square(out):
    return out.square().mean()


def tiny(width=64):
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 1))
    return {"model": model, "example_inputs": (torch.zeros(2048, 64),), "loss_fn": square}


def other():
    return tiny(width=65)


def huge():
    with torch.device("meta"):
        model = nn.Linear(1 << 15, 1 << 15)  # 4 GiB; with gradient and AdamW state 16
    return {"model": model, "example_inputs": (torch.zeros(2, 1 << 15),), "loss_fn": square}


def branches():
    return {"model": Branches(), "example_inputs": (torch.zeros(8, 6),), "loss_fn": square}


def no_rule():
    model = nn.Sequential(nn.Linear(6, 4), Twice())
    return {"model": model, "example_inputs": (torch.zeros(8, 6),), "loss_fn": square}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    (folder / "models.py").write_text(MODELS)
    (folder / "cluster.yaml").write_text(CLUSTER)
    return folder


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


@pytest.fixture
def plan_file(place: Path) -> Path:
    path = place / "tiny.plan.json"
    if not path.exists():
        cli.app(["plan", "models.py:tiny", "--cluster", "cluster.yaml", "-o", str(path)], standalone_mode=False)
    return path


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command prints; asserts exit code 2, nothing on stdout, no traceback."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert exit_.value.code == 2
    assert out == ""
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    return err.removeprefix("error: ").rstrip()


def test_every_error_is_a_value_error() -> None:
    raised = [e for e in vars(errors).values() if isinstance(e, type)]
    assert raised and all(issubclass(e, ValueError) for e in raised)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("{name: fast, tflops: {float32: 0.02},", "{gpu: V100-17GB,", ("left", "unknown GPU type 'V100-17GB'", "V100")),
        ("memory_bandwidth: 10GB/s", "memory_bandwidth: -10GB/s", ("left", "memory_bandwidth", "-10GB/s")),
        ("bandwidth: 10Gbit/s, latency: 50us}\n  - name: right", "bandwidth: -1Gbit/s, latency: 50us}\n  - name: right",
         ("left", "bandwidth", "-1Gbit/s")),
        ("    network: {bandwidth: 10Gbit/s, latency: 50us}\n  - name: right", "  - name: right",
         ("host 'left' has no network", "right")),
    ],
    ids=["unknown GPU", "negative memory bandwidth", "negative link bandwidth", "a host with no link"],
)  # fmt: skip
def test_clusters(
    before: str, after: str, said: tuple[str, ...], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert CLUSTER.count(before) == 1
    (place / "bad.yaml").write_text(CLUSTER.replace(before, after))
    line = refusal(capsys, "plan", "models.py:tiny", "--cluster", "bad.yaml")
    for words in ("bad.yaml", *said):
        assert words in line
    with pytest.raises(errors.ClusterError):
        ClusterSpec.load("bad.yaml")


def test_a_model_that_fits_no_share(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "plan", "models.py:huge", "--cluster", "cluster.yaml")
    assert "parameters, their gradients and adamw state need 17" in line and "the 2 devices hold" in line


def test_data_dependent_control_flow_names_the_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = MODELS.splitlines().index("        if x.sum() > 0:  # the guilty line") + 1
    line = refusal(capsys, "plan", "models.py:branches", "--cluster", "cluster.yaml")
    assert f"models.py:{number}" in line and "if x.sum() > 0" in line


def test_an_operator_without_a_rule_names_it_its_module_and_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "plan", "models.py:no_rule", "--cluster", "cluster.yaml")
    for words in ("hap_test.twice.default", "1", "register_rule"):
        assert words in line


def test_a_plan_for_another_model(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "model" in refusal(capsys, "program", str(plan_file), "models.py:other")


@pytest.fixture
def three_ranks() -> Iterator[None]:
    """A process group of three ranks of which only this one exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("three_ranks")
def test_more_ranks_than_devices() -> None:
    cluster = ClusterSpec.load("cluster.yaml")
    with pytest.raises(errors.ClusterError, match="3 ranks, but cluster 'pair' describes only 2 devices"):
        api.compile(torch.nn.Linear(6, 1), cluster, example_inputs=(torch.zeros(8, 6),), loss_fn=torch.sum)


def compile_for_another_cluster(rank: int, folder: str) -> str:
    """What a rank is told that compiles with the plan of ``cluster.yaml`` for a cluster with one number changed."""
    built = build_from(f"{folder}/models.py:tiny")
    other = ClusterSpec.from_yaml(CLUSTER.replace("float32: 0.02", "float32: 0.03"))
    try:
        api.compile(
            built.model,
            other,
            example_inputs=built.example_inputs,
            loss_fn=built.loss_fn,
            plan=f"{folder}/tiny.plan.json",
        )
    except errors.PlanError as e:
        return str(e)
    return "compiled"


def test_a_plan_for_another_cluster(plan_file: Path) -> None:
    said = run_ranks(2, compile_for_another_cluster, str(plan_file.parent))
    line = r"the plan is for cluster 'pair' \([0-9a-f]{12}\), not for this 'pair' \([0-9a-f]{12}\); plan again"
    assert len(said) == 2 and all(re.fullmatch(line, each) for each in said)


@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_a_truncated_plan(part: float, plan_file: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = plan_file.read_text()
    (place / "cut.plan.json").write_text(text[: int(part * len(text))])
    assert "cut.plan.json: not a complete plan file" in refusal(capsys, "explain", "cut.plan.json")


@pytest.mark.parametrize("edit", ["sizes", "field", "version", "prediction"])
def test_a_plan_edited_by_hand(edit: str, plan_file: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = json.loads(plan_file.read_text())
    match edit:
        case "sizes":
            group = next(iter(body["groups"].values()))
            group["sizes"] = [group["n"], 0]
        case "field":
            body["speed"] = "fast"
        case "version":
            body["schema_version"] = 99
        case "prediction":
            body["predicted"]["step_s"] /= 2
    (place / "edited.plan.json").write_text(json.dumps(body))
    line = refusal(capsys, "explain", "edited.plan.json")
    said = {"field": "speed", "version": "schema version 99"}.get(edit, "does not match its checksum")
    assert "edited.plan.json" in line and said in line
    with pytest.raises(errors.PlanError):
        Plan.load("edited.plan.json")
