"""Jobs of two axes: who is waited for, who stopped the job, on one clock, and beside a plan of two axes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import hap
from hap.cluster import ClusterSpec
from hap.diagnosis.clocks import offsets
from hap.diagnosis.expected import Expected
from hap.diagnosis.finding import Finding
from hap.diagnosis.hang import find_hang
from hap.diagnosis.run import Run
from hap.diagnosis.traffic import find_traffic
from hap.diagnosis.waits import Waits, find_waits
from hap.mesh_plan import MeshPlan
from hap.run_record import IN_ROUNDS, OTHER_KIND, PLAN, SUM_KIND, CallKind, RankRecord, RecordError, State, StepLine
from tests._support.jobs import CALLS, job, records, steady, with_states
from tests.report.test_mesh import HOST, of_two
from tests.test_cli import invoke
from tests.test_run_record import write

SUM, GATHER, CLIP, OTHER_SUM = 1, 2, 3, 4
KINDS = {
    SUM: CallKind(number=SUM, kind=SUM_KIND, decomposition=IN_ROUNDS, values=1, nbytes=1 << 20),
    GATHER: CallKind(number=GATHER, kind="all_gather", decomposition="pairs", values=2, nbytes=8192, scope="host"),
    CLIP: CallKind(number=CLIP, kind=OTHER_KIND, decomposition="-", values=1, nbytes=0, scope="host"),
    OTHER_SUM: CallKind(number=OTHER_SUM, kind=SUM_KIND, decomposition=IN_ROUNDS, values=1, nbytes=8),
}


def on_hosts(ranks: Sequence[RankRecord], hosts: Sequence[int]) -> tuple[RankRecord, ...]:
    """These ranks as those of the hosts of a mesh, in order."""
    numbers = [number for number, count in enumerate(hosts) for _ in range(count)]
    return tuple(
        r._replace(head=r.head.model_copy(update={"mesh_host": number}), kinds=KINDS)
        for r, number in zip(ranks, numbers, strict=True)
    )


# ---- waits


def waits(hosts: Sequence[int], *held_up_s: Sequence[tuple[int, float]]) -> Waits:
    """Of one step, in which ranks are held up by (kind, so long)."""
    n = len(held_up_s)
    run = Run(on_hosts(records(np.ones((1, n)), np.ones((1, n))), hosts), None)
    lines = []
    for told in held_up_s:
        calls = [(kind, 0, 0, round(1e6 * s)) for kind, s in told]
        part = ("forward", 0, 1)
        lines.append(StepLine(step=1, at_s=0, seconds=1, parts=(part,), wire_s=0, outside_wire_s=0, calls=tuple(calls)))
    found = find_waits(run.ranks, lines, run.hosts)
    assert found is not None
    return found


def test_ranks_are_waited_for_in_their_host_and_hosts_by_each_other() -> None:
    """Rank 1 is late to its host; both then come late, and together, to what rank 2 waits in."""
    found = waits((2, 1), [(GATHER, 0.5), (SUM, 0.1)], [(GATHER, 0.1), (SUM, 0.1)], [(SUM, 0.4)])
    assert found.waited_for_s == pytest.approx([0, 0.4, 0])
    assert found.shared_s == pytest.approx(0.1 + 0.1)
    late = waits((2, 1), [(GATHER, 0.1), (SUM, 0.5)], [(GATHER, 0.1), (SUM, 0.6)], [(SUM, 0.2)])
    assert late.waited_for_s == pytest.approx([0, 0, 0.3])


def test_hosts_wait_for_their_own_wires_at_the_same_time() -> None:
    quick, slow = [(GATHER, 0.1), (GATHER, 0.1), (SUM, 0.1)], [(GATHER, 0.5), (SUM, 0.1)]
    found = waits((2, 2), quick, quick, slow, slow)
    assert found.shared_s == pytest.approx(0.1 + 0.5)
    assert [meeting.ranks for meeting in found.meetings] == [(0, 1, 2, 3), (0, 1), (2, 3)]


@pytest.mark.parametrize("short", [[(SUM, 0.1)], [(GATHER, 0.1)]])
def test_ranks_of_a_meeting_come_equally_often_to_it(short: list[tuple[int, float]]) -> None:
    whole = [(GATHER, 0.1), (SUM, 0.1)]
    with pytest.raises(RecordError, match="step 1: ranks have come to the wire unequally often"):
        waits((2, 1), whole, short, [(SUM, 0.1)])
    with pytest.raises(RecordError, match="unequally often"):
        waits((2, 1), whole, whole, [(SUM, 0.1), (SUM, 0.1)])


def two_hosts(compute_s: np.ndarray, plan: MeshPlan | None = None) -> Run:
    """Hosts of two ranks and one. Of the calls of a step every second is of all, the others are the first host's."""
    ranks = on_hosts(job(compute_s, np.full_like(compute_s, 0.02)).ranks, (2, 1))

    def told(line: StepLine, alone: bool) -> StepLine:
        calls = [(1 + place % 2, *call[1:]) for place, call in enumerate(line.calls or ())]
        return line.model_copy(update={"calls": tuple(call for call in calls if not (alone and call[0] == GATHER))})

    named = (r.head.device if plan is None else plan.devices[rank] for rank, r in enumerate(ranks))
    return Run(
        tuple(
            r._replace(
                head=r.head.model_copy(update={"device": name}), steps=tuple(told(line, rank == 2) for line in r.steps)
            )
            for rank, (r, name) in enumerate(zip(ranks, named, strict=True))
        ),
        plan,
    )


def test_traffic_is_that_of_all_hosts() -> None:
    found = {row.kind: row for row in find_traffic(two_hosts(np.full((4, 3), 0.06))).rows}
    assert [found[kind].calls for kind in (SUM_KIND, "all_gather")] == [CALLS / 2, CALLS / 2]
    assert found["all_gather"].values == CALLS and found["all_gather"].nbytes == 8192 * CALLS / 2
    assert found["all_gather"].held_up_s == pytest.approx(CALLS / 2 * 0.01 * 2 / 3, rel=1e-3)  # by two of three ranks
    assert found["all_gather"].shared_s == pytest.approx(CALLS / 2 * 0.01, rel=1e-3)


# ---- hangs

NOW = 1000.0
WAITS, COMPUTES = 1, 0


def state(wire: int, world: int, entered: int, call: int = SUM, alive: float = NOW) -> State:
    return State(2, wire, 0, 7, entered, call, NOW - 60, alive, world)


def found(hosts: Sequence[int], *states: State, at: float = NOW + 1) -> list[tuple[str, tuple[int, ...]]]:
    return [(f.syndrome, f.ranks) for f in findings(hosts, *states, at=at)]


def findings(hosts: Sequence[int], *states: State, at: float = NOW + 1) -> tuple[Finding, ...]:
    run = job(*steady([0.1] * len(states), steps=4))
    return find_hang(with_states(Run(on_hosts(run.ranks, hosts), None), states, seen=at))


IN_HOST, IN_WORLD = state(WAITS, 5, 21, GATHER), state(WAITS, 6, 22)
OTHERS_IN_WORLD = state(WAITS, 6, 6)  # of a host that does less by itself


def test_who_computes_while_its_host_and_other_hosts_wait_is_named_alone() -> None:
    computes = state(COMPUTES, 5, 20, GATHER)
    assert found((2, 1), computes, IN_HOST, OTHERS_IN_WORLD) == [("non-communication hang", (0,))]
    assert found((1, 2), OTHERS_IN_WORLD, IN_HOST, computes) == [("non-communication hang", (2,))]
    assert found((2, 1), computes, IN_WORLD, OTHERS_IN_WORLD) == [("non-communication hang", (0,))]


def test_all_of_a_host_that_never_comes_are_named() -> None:
    computes = state(COMPUTES, 5, 20, GATHER)
    assert found((2, 1), computes, computes, OTHERS_IN_WORLD) == [("non-communication hang", (0, 1))]
    assert found((2, 1), IN_WORLD, IN_WORLD, state(COMPUTES, 5, 5)) == [("non-communication hang", (2,))]


def test_a_collective_of_one_host_that_does_not_end_is_that_hosts() -> None:
    (one,) = findings((2, 1), IN_HOST, IN_HOST, OTHERS_IN_WORLD)
    assert (one.syndrome, one.ranks) == ("communication hang", (0, 1))
    assert "all of a host, are in all_gather by pairs" in one.summary
    left = state(WAITS, 5, 20, GATHER)
    assert found((3, 1), IN_HOST, left, IN_HOST, OTHERS_IN_WORLD) == [("communication hang", (1,))]
    assert found((2, 1), IN_HOST, state(WAITS, 5, 21, CLIP), OTHERS_IN_WORLD) == [("desync", (1,))]


def test_a_sum_over_hosts_that_does_not_end_is_of_all() -> None:
    (one,) = findings((2, 1), IN_WORLD, IN_WORLD, OTHERS_IN_WORLD)
    assert (one.syndrome, one.ranks) == ("communication hang", (0, 1, 2))
    assert one.summary.startswith("all ranks are in hosts_sum by rounds")
    assert found((2, 1), IN_WORLD, IN_WORLD, state(WAITS, 7, 7)) == [("communication hang", (2,))]
    has_left = state(COMPUTES, 7, 7)  # and begun another one
    assert found((2, 1), IN_WORLD, IN_WORLD, has_left) == [("communication hang", (2,))]
    assert found((2, 1), IN_WORLD, IN_WORLD, state(WAITS, 6, 6, OTHER_SUM)) == [("desync", (2,))]


def test_who_has_begun_more_sums_may_still_be_the_one_that_stands() -> None:
    """Rank 3 has begun two sums that host 0 began, too, before it came to wait for the first of them."""
    computes, mate, waiting = state(COMPUTES, 8, 30, GATHER), state(WAITS, 8, 31, GATHER), state(WAITS, 9, 25)
    assert found((2, 2), waiting, waiting, mate, computes) == [("non-communication hang", (3,))]
    stands, its_mate = state(COMPUTES, 6, 20, GATHER), state(WAITS, 6, 21, GATHER)
    assert found((2, 2), stands, its_mate, waiting, waiting) == [("non-communication hang", (0,))]


def test_of_hosts_that_all_stand_elsewhere_each_is_looked_at() -> None:
    computes = state(COMPUTES, 5, 20, GATHER)
    assert found((2, 1), computes, IN_HOST, state(COMPUTES, 5, 5)) == [("non-communication hang", (0,))]
    (one,) = findings((2, 1), computes, computes, state(COMPUTES, 5, 5))
    assert one.ranks == (0, 1, 2) and one.summary.startswith("no rank has come to a collective")


def test_of_processes_that_all_went_at_once_the_one_that_was_waited_for_is_lost() -> None:
    computes = state(COMPUTES, 5, 20, GATHER)
    went = [s._replace(since=NOW - 0.3) for s in (computes, IN_HOST, OTHERS_IN_WORLD)]
    assert found((2, 1), *went, at=NOW + 60) == [("lost", (0,))]


# ---- clocks

SKEW = (0.0, 3.5, -0.25)


@pytest.mark.parametrize("nbytes", [8, 0])
def test_sums_over_hosts_tell_clocks_of_other_hosts(nbytes: int) -> None:
    """Ranks 1 and 2 are on a host whose clock says nothing. Nobody waits in a sum of nothing."""
    compute = np.array([np.roll([0.1, 0.3, 0.2], step) for step in range(6)])
    skewed = records(compute, np.full((6, 3), 0.02), 0.01, skew_s=SKEW, hosts=("a", "b", "b"))
    ranks = []
    for rank, r in enumerate(on_hosts(skewed, (1, 2))):
        rounds = (tuple((SUM, 1, c[2], c[2], c[2], c[3]) for c in line.calls or ()) for line in r.steps)
        lines = (line.model_copy(update={"calls": calls}) for line, calls in zip(r.steps, rounds, strict=True))
        kinds = {SUM: KINDS[SUM].model_copy(update={"nbytes": nbytes})}
        began = r.head.began - (SKEW[1] if rank else 0.0)  # of the one wrong clock
        ranks.append(r._replace(head=r.head.model_copy(update={"began": began}), steps=tuple(lines), kinds=kinds))
    told = offsets(Run(tuple(ranks), None), range(6))
    assert told[0] == (0.0, 0.0)
    for rank in (1, 2):
        residual_s = told[rank].residual_s
        if nbytes == 0:
            assert residual_s is None
        else:
            assert residual_s is not None and residual_s < 0.3
            assert told[rank].seconds == pytest.approx(SKEW[rank], abs=residual_s + 1e-4)


# ---- beside a plan


def test_what_is_expected_of_ranks_is_without_the_sums_over_hosts() -> None:
    plan, slower = of_two(2, 1), of_two(2, 1, network="500MB/s")
    expected = Expected.of(plan)
    assert plan.explanation is not None and expected.compute_s is not None and expected.wire_s is not None
    busy = [s for host in (0, 1) for s in plan.inside_of(host).predicted.compute_s]
    assert max(plan.explanation.sums_s) == pytest.approx(plan.predicted.sums_s, rel=1e-3)
    assert [b - s for b, s in zip(busy, plan.explanation.sums_s, strict=True)] == pytest.approx(expected.compute_s)
    assert all(0 < s < b for s, b in zip(expected.compute_s, busy, strict=True))
    assert Expected.of(slower).wire_s > expected.wire_s  # type: ignore[operator]
    assert expected.step_s == plan.predicted.as_run_s and expected.hosts == (2, 1) and not expected.is_measured
    assert [d.name for d in expected.cluster.devices] == list(plan.devices)  # type: ignore[union-attr]


def test_a_plan_that_tells_of_no_sums_expects_a_step_alone() -> None:
    plan = of_two(2, 1).model_copy(update={"explanation": None})
    assert Expected.of(plan) == Expected((2, 1), None, plan.predicted.as_run_s, None, False, None)


def left_one_out() -> MeshPlan:
    """Of three hosts the first, whose network is slow."""
    hosts = [
        HOST.format(name=name, gpu=gpu, tflops=tflops, count=count, network=network)
        for name, gpu, tflops, count, network in (
            ("far", "slow", 0.01, 2, "100kB/s"),
            ("near", "fast", 0.02, 2, "1GB/s"),
            ("next", "slow", 0.01, 1, "1GB/s"),
        )
    ]
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), torch.empty(481, 64)
    on = ClusterSpec.from_yaml(f"name: unequal\nbackend: gloo\nhosts:{''.join(hosts)}")
    return hap.plan_mesh(model, on, example_inputs=x, loss_fn=torch.sum, effort="quick", leave_out=True)


def test_a_straggler_is_found_and_goes_into_the_cluster_of_the_hosts_that_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = left_one_out()
    assert plan.left_out == ("far",)
    expected = Expected.of(plan).compute_s
    assert expected is not None
    # Ranks compute a thousand times as long as planned, so that a collective is short beside it; rank 1 twice that.
    compute = steady([1000 * s for s in expected])[0]
    compute[:, 1] *= 2
    run = two_hosts(compute, plan)
    write(tmp_path / "run", run.ranks)
    plan.save(tmp_path / "run" / PLAN)
    code, out, err = invoke(capsys, "diagnose", str(tmp_path / "run"), "-o", str(tmp_path / "found.yaml"), "--json")
    (straggler,) = [f for f in json.loads(out)["findings"] if f["ranks"]]
    assert code == 1 and (straggler["syndrome"], straggler["ranks"]) == ("compute straggler", [1])
    assert "rank 1 (near/fast#1)" in straggler["summary"] and "near/fast#1: 1/" in err
    found = ClusterSpec.load(tmp_path / "found.yaml")
    assert [d.host for d in found.devices] == ["near", "near", "next"]
    first, second, _ = (d.tflops["float32"] for d in found.devices)
    assert first / second == pytest.approx(straggler["factor"], rel=1e-3) == pytest.approx(2, rel=0.1)
