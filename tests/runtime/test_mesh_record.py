"""Recording jobs of two axes on real ranks: two hosts of two ranks and one, each with a program of its own."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hap
from hap.capture import capture
from hap.diagnosis.run import load_run
from hap.diagnosis.slow import Slow, find_slow
from hap.diagnosis.trace import to_trace
from hap.diagnosis.traffic import find_traffic
from hap.diagnosis.verdict import diagnose
from hap.errors import PlanError
from hap.mesh_plan import MeshExplanation, MeshPlan, load_plan, parse_plan
from hap.report.explanation import cluster_body
from hap.run_record import BUNDLED, IN_ROUNDS, OTHERS, PLAN, VARIABLE, read_folder
from hap.runtime.mesh import MeshProgram
from tests._support import gpt2
from tests._support.mesh import make_mesh
from tests._support.plans import replicated_plan
from tests._support.ranks import run_alike
from tests.runtime.test_mesh import CLUSTER, OUTPUTS, of_task, tasks

SIZES = (8, 8, 5, 8, 5, 8, 8, 5)


def compiled(text: str) -> MeshProgram:
    given = {"example_inputs": of_task(0, "class", 8), "outputs": OUTPUTS, "plan": parse_plan(text)}
    program = hap.compile(tasks(), **given)  # type: ignore[arg-type]
    assert isinstance(program, MeshProgram)
    return program


def train(program: MeshProgram, *, evaluates: bool) -> list[torch.Tensor]:
    """Batches of two sizes, and once an evaluation between them."""
    program.random_seed = 7
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    for step, size in enumerate(SIZES):
        optimizer.zero_grad()
        program(**program.shard_batch(of_task(step, "class", size))).backward()
        program.clip_grad_norm_(1.0)
        optimizer.step()
        if evaluates and step == 3:
            program.eval()
            with torch.no_grad():
                program(**program.shard_batch(of_task(step, "class", 8)))
            program.train()
    return [p.detach().clone() for p in program.parameters()]


def both_ways(rank: int, text: str, folder: str) -> tuple[bool, list[bool]]:
    """Whether a recorded run computes the same, and which of the program's communicators had a recorder during and
    after it: the programs of two sizes are made before it, that of evaluation is made meanwhile."""
    program = compiled(text)
    initial = copy.deepcopy(program.state_dict())
    alone = train(program, evaluates=False)
    program.load_state_dict(initial)
    with program.record(folder):
        recorded = train(program, evaluates=True)
        ends = [variant.built.comm for variant in program._variants._built.values()]
        seen = [end.observers.recorder is not None for end in ends]
    return all(map(torch.equal, alone, recorded)), [*seen, *(end.observers.recorder is not None for end in ends)]


def test_what_all_do_is_told_apart_from_what_ranks_of_a_host_do(tmp_path: Path) -> None:
    plan = make_mesh(capture(tasks(), of_task(0, "class", 8), outputs=OUTPUTS), (2, 1), (5, 3))
    for same, seen in run_alike(3, both_ways, plan.to_json(), str(tmp_path)):
        assert same and seen == [True] * 3 + [False] * 3
    ranks = read_folder(tmp_path)
    assert load_plan(tmp_path / PLAN) == plan
    assert [r.head.mesh_host for r in ranks] == [0, 0, 1] and [r.head.device for r in ranks] == list(plan.devices)
    assert all(len(r.steps) == len(SIZES) + 1 and len(r.probes[0].seconds) == 3 for r in ranks)
    for lines in zip(*(r.steps for r in ranks), strict=True):
        told = [[r.kind_of(call[0]) for call in line.calls or ()] for r, line in zip(ranks, lines, strict=True)]
        named = [[(k.kind, k.decomposition, k.nbytes) for k in kinds] for kinds in told]
        assert named[0] == named[1]
        assert [one for one, kind in zip(named[0], told[0], strict=True) if kind.scope == "world"] == named[2]
        marks = {(kind.decomposition, len(call) - 2) for kind, call in zip(told[2], lines[2].calls or (), strict=True)}
        assert marks <= {(IN_ROUNDS, 4), (BUNDLED, 6), (OTHERS.decomposition, 2)}  # twice two, and the lane's
    assert {kind.scope for kind in ranks[0].kinds.values()} == {"world", "host"}
    assert {kind.decomposition for kind in ranks[2].kinds.values()} == {IN_ROUNDS, BUNDLED}  # alone on its host
    first, mate, other = [r.state for r in ranks if r.state is not None]
    assert first.ended == 1 and first.world == mate.world == other.world > 0
    assert first.entered == mate.entered > other.entered == other.world
    run = load_run(tmp_path)
    assert run.hosts == ((0, 1), (2,)) and len(run.waits) == len(run.steps)
    assert {tuple(meeting.ranks for meeting in found.meetings) for found in run.waits.values()} == {((0, 1, 2), (0, 1))}
    assert diagnose(run).findings == ()  # the plan has steps of a second
    assert "hosts_sum by bundle" in to_trace(run)
    assert {"hosts_sum", "other", "all_gather"} <= {row.kind for row in find_traffic(run).rows}
    replicated_plan(gpt2.graph(), 3).save(tmp_path / "other.json")
    with pytest.raises(PlanError, match=r"a plan for hosts of \(3,\) ranks, and the records are of \(2, 1\)"):
        load_run(tmp_path, tmp_path / "other.json")


class Busy:
    """Computes for so long before the first use of the wire after it was told to."""

    def __init__(self) -> None:
        self.left_s = 0.0

    def settle(self) -> None:
        time.sleep(self.left_s)
        self.left_s = 0.0

    def resume(self) -> None:
        pass


def faulty(rank: int, text: str, folder: str, compute_s: dict[int, float], data_s: dict[int, float]) -> None:
    os.environ[VARIABLE] = folder  # as ``hap run --record`` sets it
    given: dict[str, Any] = {"example_inputs": (gpt2.batch(),), "example_targets": gpt2.batch()}
    program = hap.compile(gpt2.build(), plan=parse_plan(text), loss_fn=gpt2.lm_loss, **given)
    assert VARIABLE not in os.environ
    optimizer, busy = torch.optim.SGD(program.parameters(), lr=0.1), Busy()
    program.set_pace(busy)
    inputs, targets = program.shard_batch((gpt2.batch(),), gpt2.batch())
    for _ in range(12):
        busy.left_s = compute_s.get(rank, 0.06)
        optimizer.zero_grad()
        program(*inputs, targets=targets).backward()
        program.clip_grad_norm_(1.0)
        optimizer.step()
        time.sleep(data_s.get(rank, 0.01))
    recorder = program._comm.observers.recorder
    assert recorder is not None
    recorder.close()


def planned() -> MeshPlan:
    """All ranks take 0.1 s by themselves, beside sums over hosts of 0.05 s."""
    plan = make_mesh(gpt2.graph(), (2, 1), (5, 3))
    inside = [
        one.model_copy(update={"predicted": one.predicted.model_copy(update={"compute_s": (0.15,) * one.world_size})})
        for one in plan.inside
    ]
    told = MeshExplanation(cluster=cluster_body(hap.ClusterSpec.from_yaml(CLUSTER)), sums_s=(0.05,) * 3)
    return plan.model_copy(update={"inside": tuple(inside), "explanation": told})


@pytest.mark.parametrize(
    ("compute_s", "data_s", "syndrome", "rank"),
    [
        ({}, {2: 0.3}, "late between steps", 2),
        pytest.param({1: 0.3}, {}, "compute straggler", 1, marks=pytest.mark.long),
    ],
)
def test_the_rank_that_keeps_hosts_waiting_is_found(
    compute_s: dict[int, float], data_s: dict[int, float], syndrome: str, rank: int, tmp_path: Path
) -> None:
    plan = planned()
    run_alike(3, faulty, plan.to_json(), str(tmp_path), compute_s, data_s)
    run = load_run(tmp_path)
    assert run.expected is not None and run.expected.compute_s == pytest.approx((0.1,) * 3)
    slow = Slow.of(run)
    (found,) = (f for f in find_slow(slow) if f.ranks)
    assert (found.syndrome, found.ranks) == (syndrome, (rank,))
    assert slow.waited_for_s[rank] > 0.15 > 0.1 > np.delete(slow.waited_for_s, rank).max()
    assert found in diagnose(run).findings
