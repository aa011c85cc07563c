"""A plan that leaves devices out: what is told of them, and how its job is started, refused and run."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import hap
from hap import cli
from hap.api import planned_part
from hap.cluster import ClusterSpec
from hap.commands.launching import launch_arguments
from hap.guard import judge
from hap.plan import Plan
from hap.report.explain import explain
from hap.report.summary import summarize
from hap.search.subsets import without
from hap.starting import SCRIPT, how_to_start, in_words, left_out, parts, refusal, visible, with_all
from tests._support.ranks import run_ranks
from tests.report.plans import cluster_of_1024, thousand

HOST = """  - name: {0}
    devices: {1}
    link: {{bandwidth: 10GB/s, latency: 1us}}
    network: {{bandwidth: 1MB/s, latency: 1us}}
"""
DEVICE = (
    "{{name: {0}, count: {1}, tflops: {{float32: 0.{2:02d}, float64: 0.{2:02d}}}, memory: 1GB, "
    "memory_bandwidth: {2}00GB/s}}"
)
NEW, OLD = DEVICE.format("new", 2, 10), DEVICE.format("old", 1, 5)
TEXT = f"name: mixed\nbackend: gloo\nhosts:\n{HOST.format('a', f'[{NEW}]')}{HOST.format('b', f'[{OLD}]')}"
WHOLE = ClusterSpec.from_yaml(TEXT)
MODEL = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    return {"model": model, "example_inputs": (torch.zeros(4096, 64),), "loss_fn": lambda out: out.square().mean()}
"""


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def arguments() -> dict[str, Any]:
    return {"example_inputs": torch.zeros(4096, 64, dtype=torch.float64), "loss_fn": loss}


@cache
def fewer() -> Plan:
    """For the two new devices: every byte to the old one takes a microsecond."""
    return hap.plan(model(), WHOLE, **arguments(), leave_out=True)


def told(backend: str, devices: tuple[str, ...], missing: dict[int, str]) -> Plan:
    """A plan that says no more than who takes part."""
    solver = {"left_out": list(missing), "left_out_devices": list(missing.values()), "with_all_at_least_s": 1.5}
    made = fewer().provenance.model_copy(
        update={"solver": solver, "backend": backend, "world_size": len(devices)},
    )
    return fewer().model_copy(update={"provenance": made, "devices": devices})


def test_it_is_the_plan_for_a_cluster_of_the_others() -> None:
    alone = without(WHOLE, (2,))
    plan, other = fewer(), hap.plan(model(), alone, **arguments())
    assert plan.devices == ("a/new#0", "a/new#1")
    assert plan.provenance.cluster_fingerprint == alone.fingerprint == other.provenance.cluster_fingerprint
    assert (plan.strategies, plan.groups, plan.conversions) == (other.strategies, other.groups, other.conversions)
    assert plan.explanation is not None and other.explanation is not None
    assert plan.explanation.cluster == other.explanation.cluster
    assert planned_part(plan, WHOLE).fingerprint == alone.fingerprint
    assert planned_part(other, WHOLE) is WHOLE and planned_part(plan, alone) is alone


def test_nothing_is_left_out_unless_asked() -> None:
    plan = hap.plan(model(), WHOLE, **arguments())
    assert plan.world_size == 3 and not left_out(plan) and "left out:" not in summarize(plan) + explain(plan)


def test_the_text_names_who_is_left_out_what_all_would_take_and_how_to_start() -> None:
    plan = fewer()
    for text in (summarize(plan, planned_part(plan, WHOLE)), explain(plan)):
        lines = text.splitlines()
        at = lines.index(f"left out: b/old#0; {with_all(plan)}")
        assert lines[at + 1 : at + 3] == [
            "start the job on the others:",
            "  on a: torchrun --standalone --nproc-per-node 2 SCRIPT.py --cluster CLUSTER.yaml --plan X.plan.json",
        ]
    assert f"It leaves out b/old#0: {with_all(plan)}." in (said := explain(plan))
    assert "no plan of one axis for these devices, for all, or for all but the slowest kinds can take less than" in said


def test_on_several_hosts_each_has_its_command_and_sees_only_its_devices_that_take_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 0, 3 and 5 of six: the second and third device of host a, the first of host b, both of host c."""
    names = ("a/new#0", "a/new#1", "b/new#0", "c/new#0", "c/new#1")
    plan = told("nccl", names, {0: "a/old#0", 4: "b/old#1"})
    assert parts(plan) == (("a", (1, 2), 3), ("b", (0,), 2), ("c", (0, 1), 2))
    where = f"--master-addr a --master-port 29500 {SCRIPT}"
    assert how_to_start(plan) == [
        f"on a: CUDA_VISIBLE_DEVICES=1,2 torchrun --nnodes 3 --node-rank 0 --nproc-per-node 2 {where}",
        f"on b: CUDA_VISIBLE_DEVICES=0 torchrun --nnodes 3 --node-rank 1 --nproc-per-node 1 {where}",
        f"on c: torchrun --nnodes 3 --node-rank 2 --nproc-per-node 2 {where}",
    ]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [visible(plan, host) for host in ("a", "c", None)] == [{"CUDA_VISIBLE_DEVICES": "1,2"}, {}, {}]
    assert "CUDA" not in "".join(how_to_start(told("gloo", names, {0: "a/old#0", 4: "b/old#1"})))
    assert refusal(plan, 7) == (
        "the plan leaves out a/old#0 and b/old#1, and this job has 7 ranks: start 5, on "
        "a (2 ranks, of its devices 1, 2), b (1 rank, of its devices 0) and c (2 ranks) only"
    )


def test_many_hosts_that_start_alike_are_one_line() -> None:
    """Twelve hosts of two new devices, then nine old devices on a host of their own."""
    names = tuple(f"h{i}/new#{j}" for i in range(12) for j in range(2))
    plan = told("nccl", names, {24 + i: f"old/T4#{i}" for i in range(9)})
    (line,) = how_to_start(plan)
    assert line.startswith("on h0 to h11: torchrun --nnodes 12 --node-rank N (N from 0 to 11, in their order) ")
    assert in_words(plan) == "9 x old/T4"


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({}, "at least 1.5 s with nothing overlapped"),
        ({"with_all_step_s": 2.0}, "2 s with nothing overlapped"),
        ({"with_all_step_s": 2.0, "with_all_overlapped_s": 1.75}, "1.75 s as it is run"),
        ({"with_all_overlapped_s": 1.75, "with_all_glanced": True}, "1.75 s as it is run, at first glance"),
    ],
)
def test_what_all_would_take(known: dict[str, float], words: str) -> None:
    plan = told("gloo", ("a/new#0", "a/new#1"), {2: "b/old#0"})
    plan.provenance.solver.update(known)
    assert with_all(plan) == f"with it the step would take {words}"


@pytest.mark.parametrize("wrong", [{"left_out": 2}, {"left_out": [3]}, {"left_out_devices": []}, {"left_out": [True]}])
def test_a_plan_that_talks_nonsense_of_them_is_refused(wrong: dict[str, Any]) -> None:
    plan = told("gloo", ("a/new#0", "a/new#1"), {2: "b/old#0"})
    plan.provenance.solver.update(wrong)
    with pytest.raises(hap.PlanError, match="does not say which devices it leaves out"):
        left_out(plan)


def train(rank: int, text: str) -> list[Any]:
    """One step with the plan: by itself, with the whole cluster's description, with that of the others."""
    plan, found = Plan.from_json(text), list[Any]()
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(4096, 64, dtype=torch.float64, generator=generator)
    for cluster in (None, WHOLE, without(WHOLE, (2,))):
        try:
            program = hap.compile(model(), cluster, plan=plan, **arguments())
        except hap.HapError as e:
            found.append(f"{type(e).__name__}: {e}")
            continue
        value = program(*program.shard_batch((batch,)))
        value.backward()
        whole = {name: gradient.numpy() for name, gradient in program.full_gradients().items()}  # by value
        found.append((value.item(), whole))
    return found


def test_a_job_on_the_others_trains_like_one_device() -> None:
    generator = torch.Generator().manual_seed(1)
    batch, one = torch.randn(4096, 64, dtype=torch.float64, generator=generator), model()
    expected = loss(one(batch))
    expected.backward()
    for rank in run_ranks(2, train, fewer().to_json()):
        assert len(rank) == 3
        for value, gradients in rank:
            assert abs(value - expected.item()) < 1e-10 * expected.item()
            for name, p in one.named_parameters():
                assert p.grad is not None
                difference = torch.from_numpy(gradients[name]) - p.grad
                assert float(difference.abs().max()) < 1e-10 * float(p.grad.abs().max())


def test_a_job_on_all_devices_is_told_where_to_start() -> None:
    said = "PlanError: the plan leaves out b/old#0, and this job has 3 ranks: start 2, on a (2 ranks) only"
    (first, *others) = run_ranks(3, train, fewer().to_json())
    assert first[:2] == [said, said] and all(rank == first for rank in others)


def test_hap_run_on_a_host_starts_a_rank_for_each_of_its_devices() -> None:
    launched = launch_arguments(WHOLE, "a", "10.0.0.1:29501")
    place = "--nnodes 2 --node-rank 0 --nproc-per-node 2"
    assert " ".join(launched) == f"{place} --master-addr 10.0.0.1 --master-port 29501"
    assert launch_arguments(WHOLE, "b", "10.0.0.1:29501")[3:6] == ["1", "--nproc-per-node", "1"]
    with pytest.raises(hap.HapError, match="needs --master"):
        launch_arguments(WHOLE, "a", None)


def test_a_plan_for_some_devices_of_one_host_shows_its_ranks_only_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are shown to this process, where some are."""
    plan = told("nccl", ("a/new#0", "a/new#1"), {1: "a/old#0"})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible(plan, None) == visible(plan, "a") == {"CUDA_VISIBLE_DEVICES": "0,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,6,7")
    assert visible(plan, None) == {"CUDA_VISIBLE_DEVICES": "4,6"}
    assert how_to_start(plan)[0].startswith("on a: CUDA_VISIBLE_DEVICES=4,6 torchrun ")
    for few in ("", "4,5", "4,5,-1,6"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", few)
        with pytest.raises(hap.HapError, match=f"the plan is for 0,2 of the 3 GPUs of a, and .*='{few}' shows fewer"):
            visible(plan, None)
        assert how_to_start(plan)[0].startswith("on a: CUDA_VISIBLE_DEVICES=0,2 torchrun ")


def test_hap_run_with_the_plan_starts_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("all.yaml").write_text(TEXT)
    Path("other.yaml").write_text(TEXT.replace("1MB/s", "2MB/s"))
    Path("fewer.plan.json").write_text(fewer().to_json())
    said = "f\"{os.environ['RANK']} {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n\".encode()"
    Path("script.py").write_text(f"import os, sys; os.write(1, {said})")  # at once: ranks' lines do not mix
    asked = ["run", "--plan", "fewer.plan.json", "--cluster"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*asked, "all.yaml", "script.py", "--steps", "3"])
    given = ["--cluster", "all.yaml", "--plan", "fewer.plan.json", "--steps", "3"]
    assert ended.value.code in (0, None)
    assert sorted(capfd.readouterr().out.splitlines()) == [f"{rank} 2 {given}" for rank in range(2)]
    for arguments_, said in (
        (["all.yaml", "--host", "b"], "the plan leaves out all devices of host 'b': start nothing there"),
        (["all.yaml", "--host", "c"], "no host 'c' in the cluster (hosts: a)"),
        (["other.yaml"], "not for this 'mixed'"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main([*asked, *arguments_, "script.py"])
        assert ended.value.code == 2 and said in capfd.readouterr().err


def test_every_command_takes_such_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny_part.py").write_text(MODEL)
    Path("all.yaml").write_text(TEXT)
    Path("plans").mkdir()
    Path("plans/check.yaml").write_text(
        "x.plan.json: {model: ../tiny_part.py:build, cluster: ../all.yaml, leave_out: true}"
    )
    file, built = "plans/x.plan.json", "tiny_part.py:build"

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as exit_:
            cli.main(words)
        out, err = capsys.readouterr()
        assert not exit_.value.code, err
        return out

    planned = run("plan", built, "-c", "all.yaml", "--leave-out", "-o", file)
    assert "left out: b/old#0; with it the step would take " in planned
    assert f"  on a: torchrun --standalone --nproc-per-node 2 {SCRIPT}" in planned
    assert json.loads(run("plan", built, "-c", "all.yaml", "--leave-out", "--json")) == json.loads(
        Path(file).read_text()
    )
    assert "It leaves out b/old#0: " in run("explain", file)
    assert run("explain", file, built, "--node", "0.weight")
    run("report", file, "-o", "x.html")
    simulated = json.loads(run("simulate", file, built, "-c", "all.yaml", "--json"))
    assert simulated["devices"] == ["a/new#0", "a/new#1"]
    assert simulated["step_s"] == pytest.approx(Plan.load(file).predicted.as_run_s)
    assert run("check", "plans") == "x.plan.json: ok\n"
    run("program", file, built, "-o", "x.py")


def test_a_golden_plan_that_leaves_out_others_is_not_compared() -> None:
    golden = told("gloo", ("a/new#0", "a/new#1"), {2: "c/old#0"})
    said = "the golden plan leaves out c/old#0 of cluster 'mixed', this one b/old#0; update it"
    assert judge("x", golden, fewer(), max_step_regression=0.0, max_memory_regression=0.0).reasons == (said,)
    whole = hap.plan(model(), WHOLE, **arguments(), effort="quick")
    (reason,) = judge("x", golden, whole, max_step_regression=0.0, max_memory_regression=0.0).reasons
    assert reason == "the golden plan leaves out c/old#0 of cluster 'mixed', this one nothing; update it"


def test_of_a_thousand_devices_nothing_is_left_out() -> None:
    assert not left_out(thousand()) and planned_part(thousand(), cluster_of_1024()).world_size == 1024
