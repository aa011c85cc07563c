"""Playing a step: blocking collectives as ``evaluate`` adds them up, overlapped ones by hand."""

import json
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hap.conversion import find_needs
from hap.cost_models import best_decomposition, evaluate, simulate
from hap.cost_models.sequence import Local
from hap.cost_models.timeline import Await, Issue, Timeline, play
from hap.plan import Strategy
from hap.report.trace import to_trace
from tests.cost_models.build import IDEAL, KEPT, P, R, cluster, data_parallel, relu_step

TWO = cluster([1000, 1000], tflops=[2e-9, 1e-9])  # 2 and 1 kFLOP/s; memory costs nothing, launches neither
SIZES = {"batch": (5, 3)}


def test_blocking_by_hand() -> None:
    """The stages of ``test_stages_by_hand``: 0.1 | 0.12 s, the loss reduced, 0.09 | 0.108 s, gw reduced."""
    found = simulate(relu_step(), data_parallel(), SIZES, TWO, model=IDEAL)
    reduced = sum(best_decomposition("all_reduce", n, P, R, SIZES, TWO)[1] for n in (4, 64))
    assert found.busy_s == pytest.approx((0.19, 0.228))
    assert found.exposed_s == pytest.approx((reduced, reduced))
    assert found.idle_s == pytest.approx((0.038, 0.0), abs=1e-12)
    path = [(s.name, s.rank) for s in found.critical_path[:7]]  # then the update, which costs nothing here
    assert path == [("a", 1), ("b", 1), ("loss", 1), ("loss", None), ("g", 1), ("gw", 1), ("gw", None)]


def test_nobody_waits_for_less_than_nothing() -> None:
    """0.3 - (0.1 + 0.2) is below 0 by what the sum is rounded by."""
    assert Timeline((), ("a",), 0.3, (0.1,), (0.2,)).idle_s == (0.0,) and 0.3 - 0.1 - 0.2 < 0


@given(st.integers(0, 8), st.booleans(), st.integers(0, 4))
def test_blocking_agrees_with_evaluate(share: int, sharded: bool, kept: int) -> None:
    sizes = {"batch": (share, 8 - share), "kept": (kept, 4 - kept)}
    strategies = data_parallel(sharded_parameter=sharded)
    on = cluster([100, 1], tflops=[2e-9, 1e-9], memory_bandwidth="10kB/s", launch="1ms", latency="1ms")
    played = simulate(relu_step(), strategies, sizes, on)
    added = evaluate(relu_step(), strategies, sizes, on)
    assert played.step_s == pytest.approx(added.step_s)
    assert played.busy_s == pytest.approx(added.compute_s)
    assert sum(s.seconds for s in played.critical_path) == pytest.approx(played.step_s)


def test_an_overlapped_collective_hides_behind_compute() -> None:
    """The loss is needed only at the end, so its all-reduce runs beside g and gw: 0.108 s on the slower rank."""
    strategies = data_parallel()
    (loss,) = [n for n in find_needs(relu_step(), strategies) if n.value.node == "loss"]
    blocking = simulate(relu_step(), strategies, SIZES, TWO, model=IDEAL)
    hidden = simulate(relu_step(), strategies, SIZES, TWO, model=IDEAL, overlapped=[loss])
    reduced = best_decomposition("all_reduce", 4, P, R, SIZES, TWO)[1]
    assert blocking.step_s - hidden.step_s == pytest.approx(reduced)
    assert hidden.exposed_s[1] == pytest.approx(best_decomposition("all_reduce", 64, P, R, SIZES, TWO)[1])


def test_collectives_share_one_stream() -> None:
    """On a slow link the loss is still on the wire when gw is ready: gw waits for it, overlapped or not."""
    slow = cluster([0.00001, 0.00001], tflops=[2e-9, 1e-9])  # 4 bytes take seconds
    (loss,) = [n for n in find_needs(relu_step(), data_parallel()) if n.value.node == "loss"]
    found = simulate(relu_step(), data_parallel(), SIZES, slow, model=IDEAL, overlapped=[loss])
    first, second = [s for s in found.spans if s.stream == "communication"]
    assert second.start_s == first.end_s and found.spans[second.after or 0] is first
    assert [s.name for s in found.critical_path] == ["a", "b", "loss", "loss", "gw"]


def test_an_overlapped_collective_is_waited_for_by_its_reader() -> None:
    """w sharded: its gather is issued at the start and awaited by a, the first node; nothing is gained or lost."""
    strategies = {**data_parallel(sharded_parameter=True), "w": Strategy((), (KEPT,))}
    sizes = {**SIZES, "kept": (3, 1)}
    needs = [n for n in find_needs(relu_step(), strategies) if n.collective == "all_gather"]
    blocking = simulate(relu_step(), strategies, sizes, TWO, model=IDEAL)
    hidden = simulate(relu_step(), strategies, sizes, TWO, model=IDEAL, overlapped=needs)
    assert hidden.step_s == pytest.approx(blocking.step_s)


def test_events_by_hand() -> None:
    """Ranks compute 1 and 2 s; a collective of 3 s runs beside 2 and 1 s of compute, then a second one behind it.

    The first starts when the slower rank issues it, at 2 s, and ends at 5 s. The second is issued at 3 s by both and
    has the wire from 5 to 6 s. Rank 0 waits from 3 to 6 s, of which the wire is busy all the time.
    """
    events = [
        Local("a", "forward", np.array([1.0, 2.0])),
        Issue("first", "x", "all_reduce", 3.0),
        Local("b", "backward", np.array([2.0, 1.0])),
        Issue("second", "y", "all_reduce", 1.0),
        Await("second"),
        Await("first"),
        Local("c", "update", np.array([0.5, 0.5])),
    ]
    found = play(events, ("left", "right"))
    assert found.step_s == 6.5 and found.busy_s == (3.5, 3.5)
    wire = [(s.name, s.start_s, s.end_s) for s in found.spans if s.stream == "communication"]
    assert wire == [("x", 2.0, 5.0), ("y", 5.0, 6.0)]
    assert [s.name for s in found.critical_path] == ["a", "x", "y", "c"]


def test_sums_over_hosts_have_a_stream_of_their_own() -> None:
    """Ranks are there at 1 and 2 s. From then on a sum over hosts lasts 4 s, beside it a collective 1 s: till 3 s. The
    next sum is issued at 3 s and has its stream from 6 to 7 s; a collective after it begins at once, at 3 s. Nobody
    waits for the last sum: the step ends with it, as with what is left on the wire."""
    events = [
        Local("a", "forward", np.array([1.0, 2.0])),
        Issue("h1", "x", "hosts_sum", 4.0, stream="hosts"),
        Issue("w1", "y", "all_reduce", 1.0),
        Await("w1"),
        Issue("h2", "z", "hosts_sum", 1.0, stream="hosts"),
        Issue("w2", "u", "all_reduce", 0.5),
        Await("w2"),
        Await("h1"),
        Local("b", "update", np.array([0.25, 0.5])),
    ]
    found = play(events, ("left", "right"))
    wire = [(s.name, s.start_s, s.end_s) for s in found.spans if s.stream == "communication"]
    assert wire == [("x", 2.0, 6.0), ("y", 2.0, 3.0), ("z", 6.0, 7.0), ("u", 3.0, 3.5)]
    assert [(s.rank, s.start_s) for s in found.spans if s.name == "b"] == [(0, 6.0), (1, 6.0)]
    assert found.step_s == 7.0 and found.busy_s == (1.25, 2.5) and found.exposed_s == (4.0, 4.0)
    assert [s.name for s in found.critical_path] == ["a", "x", "z"]


@pytest.mark.parametrize("stream", ["wire", "hosts"])
def test_what_is_not_awaited_ends_with_the_step_on_either_stream(stream: Literal["wire", "hosts"]) -> None:
    events = [Local("a", "forward", np.array([1.0])), Issue("h", "x", "any", 2.0, stream=stream)]
    assert play(events, ("only",)).step_s == 3.0
    assert play(events[:1], ("only",)).step_s == 1.0 and play([], ("only",)).step_s == 0.0


def test_a_rank_goes_on_when_it_has_what_it_needs() -> None:
    """A collective from 2 to 5 s; rank 0 has what it needs 2 s before the end, and computes from 3 s on, rank 1 from 5.
    The next one starts when both are there, at 6 s."""
    events = [
        Local("a", "forward", np.array([1.0, 2.0])),
        Issue("first", "x", "all_reduce", 3.0, ahead_s=np.array([2.0, 0.0])),
        Await("first"),
        Local("b", "backward", np.array([2.5, 1.0])),
        Issue("second", "y", "all_reduce", 1.0),
        Await("second"),
    ]
    found = play(events, ("left", "right"))
    assert [(s.rank, s.start_s, s.end_s) for s in found.spans if s.name == "b"] == [(0, 3.0, 5.5), (1, 5.0, 6.0)]
    assert found.step_s == 7.0 and found.exposed_s == (2.0, 4.0) and found.idle_s == (1.5, 0.0)


def test_the_trace_opens() -> None:
    """Every rank is a process; what a rank does by itself stands once, a collective once in every rank."""
    found = simulate(relu_step(), data_parallel(), SIZES, TWO, model=IDEAL)
    events = json.loads(to_trace(found, "relu"))["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == sum(1 if s.rank is not None else 2 for s in found.spans)
    assert max(e["ts"] + e["dur"] for e in complete) == pytest.approx(found.step_s * 1e6, abs=0.01)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rank 0: h0/custom#0",
        "rank 1: h1/custom#0",
    }
