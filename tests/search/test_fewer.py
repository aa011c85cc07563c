"""A plan that may leave devices out: which it does, what it says of them, and what its bound is below."""

import itertools

import pytest

from hap.cluster import ClusterSpec
from hap.errors import InfeasibleError, PlanError
from hap.plan import Plan
from hap.search import plan_graph
from hap.search.fewer import best_met, least_bound_s, pick_devices
from hap.search.limits import LIMITS
from hap.search.pins import Pins
from hap.search.planner import Search
from hap.search.prices import Facts
from hap.search.problem import Problem
from hap.search.relaxation import lower_bound
from hap.search.subsets import LeftOut
from tests.search.models import cluster, mlp

MODEL = mlp(batch=4096, width=512)
HOST = """  - name: {0}
    devices: {1}
    link: {{bandwidth: 50GB/s, latency: 1us}}
    network: {{bandwidth: {2}, latency: 1us}}
"""
NEW = "[{name: new, count: 2, tflops: {float32: 10}, memory: 16GB, memory_bandwidth: 2000GB/s}]"
OLD = "[{name: old, count: 1, tflops: {float32: 5}, memory: 16GB, memory_bandwidth: 1000GB/s}]"


def mixed(network: str) -> ClusterSpec:
    """Two new devices, and an old one behind a network of this rate."""
    return ClusterSpec.from_yaml(f"name: all\nhosts:\n{HOST.format('a', NEW, network)}{HOST.format('b', OLD, network)}")


def bound_s(devices: ClusterSpec) -> float:
    found = lower_bound(Facts(MODEL.graph, MODEL.strategies, devices, "adamw"))
    assert found is not None
    return found.seconds


def alone() -> ClusterSpec:
    return ClusterSpec.from_yaml(f"name: all\nhosts:\n{HOST.format('a', NEW, '1GB/s')}")


def test_plans_for_the_devices_that_are_faster_alone() -> None:
    """The old device computes half as fast as a new one, but every gradient passes its network."""
    plan = plan_graph(MODEL, mixed("0.1GB/s"), leave_out=True)
    assert plan.devices == ("a/new#0", "a/new#1") and plan.world_size == 2
    assert plan.predicted.step_s == pytest.approx(plan_graph(MODEL, alone()).predicted.step_s)
    assert plan.predicted.step_s < plan_graph(MODEL, mixed("0.1GB/s")).predicted.step_s
    assert plan.provenance.solver["left_out"] == [2]
    assert "; the 1 old is left out, with it the step would take " in plan.predicted.tight


def test_takes_all_that_are_worth_it() -> None:
    """The same plan as if none could be left out, with a bound that is below those of fewer devices, too."""
    devices = mixed("50GB/s")
    plan, whole = plan_graph(MODEL, devices, leave_out=True), plan_graph(MODEL, devices)
    assert "left_out" not in plan.provenance.solver and "left out" not in plan.predicted.tight
    assert (plan.strategies, plan.sizes, plan.devices) == (whole.strategies, whole.sizes, whole.devices)


@pytest.mark.parametrize("network", ["0.1GB/s", "3GB/s", "50GB/s"])
def test_the_bound_is_below_those_of_all_choices_of_devices(network: str) -> None:
    """Each may be raised by cases, no further than the step."""
    tried: list[Search] = []
    best = pick_devices(search(mixed(network)), tried).search.run()
    least = min(bound_s(mixed(network)), bound_s(alone()))
    assert least_bound_s(tried) == pytest.approx(least)
    raised = least_bound_s(tried, best.cost[1])
    assert raised is not None and least <= raised * (1 + 1e-9) and raised <= best.cost[1]


def test_no_choice_of_devices_is_better() -> None:
    """Three kinds of devices, each choice searched."""
    kinds = ((10, "16GB"), (9, "16GB"), (1, "16GB"))
    for network in ("0.3GB/s", "3GB/s", "50GB/s"):
        least = min(plan_graph(MODEL, cluster(*kinds[:n], network=network)).predicted.step_s for n in (1, 2, 3))
        plan = plan_graph(MODEL, cluster(*kinds, network=network), leave_out=True)
        assert plan.predicted.step_s == pytest.approx(least, rel=0.01)


def search(devices: ClusterSpec, pins: Pins | None = None) -> Search:
    return Search(Problem.state(MODEL, devices, "adamw", pins or Pins()), LIMITS["normal"])


def test_what_is_proved_to_be_worse_is_not_searched() -> None:
    """One device alone computes for longer than both need together."""
    tried: list[Search] = []
    picked = pick_devices(search(cluster((10, "16GB"), (9, "16GB"), network="50GB/s")), tried)
    assert picked.left_out is None and picked.search is tried[0]
    assert [bool(one.met) for one in tried] == [True, False]


def test_where_only_all_together_can_hold_the_model_none_is_left_out() -> None:
    """Two layers of 1024 x 1024 parameters of 4 bytes, with gradients and two moments: 34 MB."""
    small = mlp(batch=64, width=1024)
    with pytest.raises(InfeasibleError):
        plan_graph(small, cluster((10, "36MB")))
    plan = plan_graph(small, cluster((10, "36MB"), (1, "36MB"), network="0.1GB/s"), leave_out=True)
    assert plan.world_size == 2
    with pytest.raises(InfeasibleError):
        plan_graph(small, cluster((10, "18MB"), (1, "18MB"), network="0.1GB/s"), leave_out=True)


def test_pinned_and_measured_ranks_cannot_be_left_out() -> None:
    with pytest.raises(PlanError, match="shares are pinned to ranks"):
        plan_graph(MODEL, mixed("1GB/s"), pins=Pins(ratios=(1.0, 1.0, 1.0)), leave_out=True)


def test_the_best_of_what_was_met_is_found_among_all_searches() -> None:
    one, other = search(mixed("1GB/s")), search(alone())
    assert best_met([one, other]) == (one, None)
    other.glance()
    assert best_met([one, other])[0] is other


def test_says_what_is_known_of_all_together() -> None:
    known = LeftOut((2,), (("old", 1),), 2.0, 1.5)
    assert str(known) == "the 1 old is left out, with it the step would take 2s"
    proved = LeftOut((1, 2), (("old", 2),), None, 1.5)
    assert str(proved) == "the 2 old are left out, with them the step would take at least 1.5s"
    assert proved.figures() == {"left_out": [1, 2], "with_all_at_least_s": 1.5}


def test_a_plan_on_fewer_devices_is_the_same_every_time() -> None:
    plans: list[Plan] = [plan_graph(MODEL, mixed("0.1GB/s"), leave_out=True) for _ in range(2)]
    assert all(a.to_json() == b.to_json() for a, b in itertools.pairwise(plans))
