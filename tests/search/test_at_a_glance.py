"""A quick search: what the first look finds, and what is changed last."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hap.cluster import ClusterSpec
from hap.plan import Plan
from hap.search import Pins, plan_graph, planner
from hap.search.found import Found
from hap.search.judge import as_run_s, finest
from hap.search.least_bound import LeastBound
from hap.search.limits import LIMITS
from hap.search.planner import Search
from hap.search.problem import Problem
from hap.search.strategies import Chooser
from tests.search.models import cluster
from tests.search.test_fewer import MODEL, mixed
from tests.search.test_keeping import model
from tests.search.test_mixing import DEEP, SLOW
from tests.search.test_recompute import found, needed


@pytest.fixture(autouse=True)
def at_a_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small graphs, too."""
    monkeypatch.setattr(planner, "SMALL", 0)


def quick(devices: ClusterSpec, *, leave_out: bool = True) -> Plan:
    return plan_graph(MODEL, devices, effort="quick", leave_out=leave_out)


# ------------------------------------------------------------------------------------------------ which cluster


@pytest.mark.parametrize("network", ["0.1GB/s", "2GB/s", "50GB/s"])
def test_a_small_model_gets_the_plan_of_a_whole_search(network: str) -> None:
    """On the devices that it is best without, and as short; with a bound that was not raised."""
    plan, whole = quick(mixed(network)), plan_graph(MODEL, mixed(network), leave_out=True)
    assert plan.devices == whole.devices
    assert plan.predicted.as_run_s == pytest.approx(whole.predicted.as_run_s, rel=0.01)
    assert plan.predicted.lower_bound_s is not None and whole.predicted.lower_bound_s is not None
    assert plan.predicted.lower_bound_s <= whole.predicted.lower_bound_s * (1 + 1e-9)
    assert plan.predicted.overlapped_bound_s == pytest.approx(whole.predicted.overlapped_bound_s)


def test_says_who_is_left_out_and_what_they_would_cost_at_a_glance() -> None:
    plan = quick(mixed("0.1GB/s"))
    assert plan.provenance.solver["left_out"] == [2] and plan.provenance.solver["with_all_glanced"] is True
    assert "; the 1 old is left out, with it the step would take " in plan.predicted.tight
    assert "at first glance" in plan.predicted.tight


# ------------------------------------------------------------------------------------------------ what is not done


def test_no_bound_is_raised_and_no_other_program_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("of a whole search")

    for room, name in ((LeastBound, "raised_s"), (LeastBound, "massed_s")):
        monkeypatch.setattr(room, name, never)
    for name in ("finest", "polish", "without_barriers", "advise"):
        monkeypatch.setattr(planner, name, never)
    for leave_out in (False, True):
        assert quick(mixed("2GB/s"), leave_out=leave_out).predicted.lower_bound_s is not None


def test_the_first_look_s_plan_is_changed_like_that_of_a_whole_search() -> None:
    """Some parameters whole and some in shards; never longer than what the first look has."""
    search = Search(Problem.state(DEEP, SLOW, "adamw", Pins()), LIMITS["quick"])
    first = search.glance()
    assert first is not None and first.fits
    plan = plan_graph(DEEP, SLOW, effort="quick")
    assert plan.predicted.as_run_s < 0.98 * as_run_s(search.chooser, first)


def test_what_fits_only_if_parameters_are_gathered_twice_is_found_at_a_glance() -> None:
    devices = cluster(*[(10, "120MB")] * 4, network="1GB/s")
    searches = [Search(Problem.state(model(), devices, "adamw", Pins()), LIMITS[e]) for e in ("quick", "normal")]
    hasty, patient = (search.glance() for search in searches)
    assert hasty is not None and hasty.fits and hasty.regather
    assert patient is not None and not patient.fits


def test_what_fits_only_if_calls_are_repeated_is_found_and_no_more_is_repeated_than_needs_be() -> None:
    room = int(0.8 * needed())
    plans = [
        plan_graph(found(), cluster((10, f"{room * 10 // 9 + 1}B")), effort=effort) for effort in ("quick", "normal")
    ]
    assert plans[0].recomputed and plans[0].recomputed == plans[1].recomputed
    assert max(plans[0].predicted.memory_bytes) <= room


def test_a_graph_that_is_too_large_to_be_played_is_compared_with_nothing_overlapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "LIMITS", {"quick": replace(LIMITS["quick"], played=0)})
    search = Search(Problem.state(MODEL, mixed("0.1GB/s"), "adamw", Pins()), planner.LIMITS["quick"])
    assert not search.at_a_glance and replace(search, limits=LIMITS["quick"]).at_a_glance
    plan = quick(mixed("0.1GB/s"))
    assert plan.world_size == 2 and plan.predicted.overlapped_s is None


def test_of_a_small_graph_the_candidates_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are found at once; many of them are shorter where latencies count."""
    compared: list[float] = []

    def watched(chooser: Chooser, best: Found, met: Sequence[Found]) -> tuple[Found, float]:
        compared.append(finest(chooser, best, met)[1])
        return finest(chooser, best, met)

    monkeypatch.setattr(planner, "finest", watched)
    monkeypatch.setattr(planner, "SMALL", len(MODEL.graph.nodes) - 1)
    quick(mixed("50GB/s"))
    assert not compared
    monkeypatch.setattr(planner, "SMALL", len(MODEL.graph.nodes))
    plan = quick(mixed("50GB/s"))
    assert compared and plan.predicted.as_run_s <= compared[0]


def test_the_same_plan_every_time() -> None:
    assert len({quick(mixed("2GB/s")).to_json() for _ in range(2)}) == 1
