"""A plan that may leave devices out: which it does, what it says of them, and what its bound is below."""

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.planning_cases import captured
from benchmarks.planning_cases import cluster as planned_cluster
from hap.cluster import ClusterSpec
from hap.errors import InfeasibleError, PlanError
from hap.plan import Plan
from hap.rules.choices import choices
from hap.search import plan_graph, planner
from hap.search.fewer import Planned, Tried
from hap.search.found import Found
from hap.search.least_bound import MOST_NODES
from hap.search.limits import LIMITS, Effort, Limits
from hap.search.nested import plan_nested
from hap.search.pins import Pins
from hap.search.planner import Search
from hap.search.problem import Problem
from hap.search.strategies import Chooser
from hap.search.subsets import Kind, LeftOut, without
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


def alone() -> ClusterSpec:
    return ClusterSpec.from_yaml(f"name: all\nhosts:\n{HOST.format('a', NEW, '1GB/s')}")


def test_plans_for_the_devices_that_are_faster_alone() -> None:
    """The old device computes half as fast as a new one, but every gradient passes its network."""
    plan = plan_graph(MODEL, mixed("0.1GB/s"), leave_out=True)
    assert plan.devices == ("a/new#0", "a/new#1") and plan.world_size == 2
    assert plan.predicted.step_s == pytest.approx(plan_graph(MODEL, alone()).predicted.step_s)
    assert plan.predicted.step_s < plan_graph(MODEL, mixed("0.1GB/s")).predicted.step_s
    solver = plan.provenance.solver
    assert solver["left_out"] == [2] and solver["left_out_devices"] == ["b/old#0"]
    assert "; the 1 old is left out, with it the step would take " in plan.predicted.tight


def test_takes_all_that_are_worth_it() -> None:
    """The same plan as if none could be left out, with a bound that is below those of fewer devices, too."""
    devices = mixed("50GB/s")
    plan, whole = plan_graph(MODEL, devices, leave_out=True), plan_graph(MODEL, devices)
    assert "left_out" not in plan.provenance.solver and "left out" not in plan.predicted.tight
    assert (plan.strategies, plan.sizes, plan.devices) == (whole.strategies, whole.sizes, whole.devices)


@pytest.mark.parametrize("network", ["0.1GB/s", "1GB/s", "2GB/s", "3GB/s", "6GB/s", "50GB/s"])
def test_no_plan_is_longer_as_run_than_that_for_all(network: str) -> None:
    """From a network on which the old device costs more than it brings to one on which it helps."""
    plan, whole = plan_graph(MODEL, mixed(network), leave_out=True), plan_graph(MODEL, mixed(network))
    assert plan.predicted.overlapped_s is not None and whole.predicted.overlapped_s is not None
    assert plan.predicted.overlapped_s <= whole.predicted.overlapped_s
    if plan.world_size == 3:  # the same, but for what costs the same: a gradient viewed before it is summed, or behind
        assert (plan.predicted.overlapped_s, plan.sizes) == (whole.predicted.overlapped_s, whole.sizes)
        assert plan.predicted.step_s == whole.predicted.step_s
        other = {name for name, chosen in plan.strategies.items() if whole.strategies[name] != chosen}
        assert all(MODEL.graph.by_name[name].op == "aten.view.default" for name in other)
    elif "with_all_overlapped_s" in plan.provenance.solver:
        with_all_s, sought_s = plan.provenance.solver["with_all_overlapped_s"], whole.predicted.overlapped_s
        if plan.provenance.solver.get("with_all_glanced"):
            assert sought_s <= with_all_s
        else:
            assert with_all_s == sought_s


def test_one_plan_of_all_begins_with_everything_on_the_fastest() -> None:
    """Who stores nothing, either, sends nothing: with a part of the parameters there it is more than twice the step."""
    whole, fewer = plan_graph(MODEL, mixed("1GB/s")), plan_graph(MODEL, mixed("1GB/s"), leave_out=True)
    assert fewer.world_size == 2 and whole.predicted.as_run_s < 2 * fewer.predicted.as_run_s


def test_no_choice_of_devices_is_better() -> None:
    """Three kinds of devices, each choice searched."""
    kinds = ((10, "16GB"), (9, "16GB"), (1, "16GB"))
    for network in ("0.3GB/s", "3GB/s", "50GB/s"):
        least = min(plan_graph(MODEL, cluster(*kinds[:n], network=network)).predicted.step_s for n in (1, 2, 3))
        plan = plan_graph(MODEL, cluster(*kinds, network=network), leave_out=True)
        assert plan.predicted.step_s == pytest.approx(least, rel=0.01)


def search(devices: ClusterSpec, pins: Pins | None = None) -> Search:
    return Search(Problem.state(MODEL, devices, "adamw", pins or Pins()), LIMITS["normal"])


def nested(devices: ClusterSpec) -> Tried:
    tried = Tried([search(devices)])
    tried.nest()
    return tried


@dataclass
class Stub:
    """A search of which only the figures count that ``plan_nested`` looks at. ``glance_s``: None where nothing fits;
    ``seen_s``: the same as run, None where it is not played, and ``closer_s`` by a closer look; ``floor_s``: asked
    before the bound; ``free_s``: of what was met and does not fit."""

    bound_s: float
    glance_s: float | None
    seen_s: float | None = None
    looked: bool = False
    nodes: int = 0
    floor_s: float = 0.0
    free_s: float = np.inf
    closer_s: float = np.inf
    looked_closer: bool = False
    effort: Effort = "normal"

    @property
    def limits(self) -> Limits:
        return LIMITS[self.effort]

    @property
    def met(self) -> list[Any]:
        return [SimpleNamespace(fits=False, cost=(1, self.free_s)), self.glance()]

    @property
    def problem(self) -> Any:
        """Three devices that need 2, 2 and 4 s for the whole step alone; a graph of so many ``nodes``."""
        graph = SimpleNamespace(nodes=range(self.nodes))
        return SimpleNamespace(whole_s=np.array([2.0, 2.0, 4.0]), choices=SimpleNamespace(graph=graph))

    def glance(self) -> Any:
        self.looked = True
        return None if self.glance_s is None else SimpleNamespace(fits=True, cost=(0, self.glance_s))

    def look(self, found: Any) -> tuple[Any, float] | None:
        return None if self.seen_s is None else ("what was seen", self.seen_s)

    def look_closer_s(self, found: Any, seconds: float) -> float:
        assert not self.looked_closer and found == "what was seen"
        self.looked_closer = True
        return min(seconds, self.closer_s)


def chosen(whole: Stub, others: Stub, *as_run_s: float | None) -> tuple[list[int], int]:
    """(clusters planned, the one taken) where the plans of all devices and of the first two take so long as run; None
    where nothing fits after all. All compute for at least 0.9 / (1/2 + 1/2 + 1/4) = 0.72 s, two for 0.9 s."""
    searches: Any = [whole, others]
    tried, asked = Tried(searches, [(), (2,)]), list[int]()

    def plan(number: int) -> None:
        asked.append(number)
        seconds = as_run_s[number]
        if seconds is None:
            raise InfeasibleError(f"cluster {number} is too small")
        tried.planned[number] = Planned(searches[number], cast(Any, None), seconds)

    plan_nested(tried, plan)
    best = tried.best()
    assert best is not None
    return asked, best[0]


def test_of_a_large_graph_the_cluster_with_the_least_bound_is_looked_at_first_and_maybe_alone() -> None:
    """Two devices take 2 s at a glance, all of them 2.5 s at least: these are never looked at. A small graph's are."""
    for nodes, looked in ((MOST_NODES + 1, False), (MOST_NODES, True)):
        whole, others = Stub(2.5, 3.0, nodes=nodes), Stub(1.5, 2.0)
        assert chosen(whole, others, 3.0, 1.4) == ([1], 1)
        assert (whole.looked, others.looked) == (looked, True)


def test_the_shorter_of_two_plans_as_run_is_taken_whatever_the_other_clock_says() -> None:
    """At a glance two devices are faster, and planned first. Of equals the plan for more devices is taken."""
    assert chosen(Stub(1.5, 3.0), Stub(1.5, 2.0), 1.6, 1.8) == ([1, 0], 0)
    assert chosen(Stub(1.5, 3.0), Stub(1.5, 2.0), 1.9, 1.8) == ([1, 0], 1)
    assert chosen(Stub(1.5, 3.0), Stub(1.5, 2.0), 1.8, 1.8) == ([1, 0], 0)


def test_the_plan_that_looks_shorter_as_it_is_run_is_made_first() -> None:
    """As run, all devices take 1.68 s at a glance and the two 1.7 s, though with nothing overlapped they are faster."""
    assert chosen(Stub(1.5, 3.0, 1.68), Stub(1.5, 2.0, 1.7), 1.66, 1.7) == ([0, 1], 0)
    assert chosen(Stub(1.5, 3.0, 1.72), Stub(1.5, 2.0, 1.7), 1.6, 1.7) == ([1, 0], 0)


def test_nothing_is_planned_that_is_too_long_at_a_glance() -> None:
    """Half of a step with nothing overlapped, 0.95 of one as run, is longer than the other's plan."""
    assert chosen(Stub(1.5, 4.1), Stub(1.5, 2.0), None, 1.9) == ([1], 1)
    assert chosen(Stub(1.5, 3.9), Stub(1.5, 2.0), 1.95, 1.96) == ([1, 0], 0)
    assert chosen(Stub(1.5, 3.9, 2.1), Stub(1.5, 2.0), None, 1.96) == ([1], 1)
    assert chosen(Stub(1.5, 3.9, 2.05), Stub(1.5, 2.0), 1.95, 1.96) == ([1, 0], 0)
    assert chosen(Stub(1.5, 3.9, 1.6), Stub(1.5, 2.0, 1.9), 1.6, None) == ([0], 0)


def test_where_a_glance_does_not_decide_it_is_looked_at_more_closely() -> None:
    """A whole search rarely comes to less than 0.85 of a glance, and than 0.95 of a closer look; two devices' plan is
    known when it is asked about all of them."""
    for seen_s, closer_s, looked, planned in (
        (2.05, np.inf, False, True),  # 1.95 s may be expected
        (2.1, 2.0, True, True),
        (2.1, 2.08, True, False),
        (2.4, 1.0, False, False),  # more than 1.96 s
    ):
        whole = Stub(1.5, 3.9, seen_s, closer_s=closer_s)
        assert chosen(whole, Stub(1.5, 2.0), 1.95, 1.96) == (([1, 0], 0) if planned else ([1], 1))
        assert whole.looked_closer == looked
    for whole_s, looked in ((0.89, False), (0.91, True)):  # two devices compute for 0.9 s
        two = Stub(0.9, 1.7, 1.0, closer_s=0.92)
        assert chosen(Stub(0.8, 1.75, whole_s), two, whole_s, 0.93) == ([0, 1] if looked else [0], 0)
        assert two.looked_closer == looked


def test_a_quick_search_plans_instead_of_a_closer_look() -> None:
    """What may come to less than 1.96 s if a plan may come to 0.9 of a glance."""
    for seen_s, planned in ((2.05, True), (2.17, True), (2.18, False)):
        whole, two = Stub(1.5, 3.9, seen_s, effort="quick"), Stub(1.5, 2.0, effort="quick")
        assert chosen(whole, two, 1.95, 1.96) == (([1, 0], 0) if planned else ([1], 1))
        assert not whole.looked_closer


@pytest.mark.long
def test_a_plan_that_is_far_shorter_than_its_glance_is_not_missed() -> None:
    """A mixture of experts: at a glance four devices look slower than two, by a closer look they are not."""
    found, devices = choices(captured("hap_bert_moe", 4)), planned_cluster("mix-4")
    plan, whole = (plan_graph(found, devices, leave_out=leave_out) for leave_out in (True, False))
    assert plan.predicted.as_run_s <= whole.predicted.as_run_s * 1.001


def test_fewer_devices_may_be_faster_by_either_clock() -> None:
    """Which is not told by the other: with nothing overlapped two devices take longer."""
    assert chosen(Stub(1.5, 3.0, 2.9), Stub(1.6, 3.1, 2.0), None, 2.0) == ([1], 1)
    assert chosen(Stub(1.5, 3.0, 2.9), Stub(1.6, 3.1, 2.95), 2.9, None) == ([0], 0)


def test_what_memory_made_longer_may_become_much_shorter() -> None:
    """As run two devices take 1.7 s at a glance, all of them 1.68 s; with memory without end it would be 1.36 s."""
    assert chosen(Stub(1.5, 3.0, 1.68), Stub(1.5, 2.0, 1.7, free_s=1.6), 1.66, 1.4) == ([1], 1)
    assert chosen(Stub(1.5, 3.0, 1.68), Stub(1.5, 2.0, 1.7, free_s=1.6), 1.66, 1.7) == ([1, 0], 0)
    assert chosen(Stub(1.5, 3.0, 1.68), Stub(1.5, 2.0, 1.8, free_s=1.99), 1.66, 1.6) == ([0], 0)


def test_fewer_devices_are_not_planned_where_they_cannot_be_faster() -> None:
    """Proved, by the bound or as they compute for 0.9 s; not faster at a glance; computing for longer than the whole
    cluster's step."""
    assert chosen(Stub(1.5, 3.0), proved := Stub(3.1, 3.2), 2.5, None) == ([0], 0)
    assert chosen(Stub(0.5, 0.9), busy := Stub(0.5, 0.9), 0.8, None) == ([0], 0)
    assert not proved.looked and not busy.looked
    assert chosen(Stub(0.5, 1.1), floored := Stub(0.0, 1.0, floor_s=1.1), 0.9, None) == ([0], 0)
    assert not floored.looked
    assert chosen(Stub(1.5, 3.0), Stub(1.6, 3.1), 2.5, None) == ([0], 0)
    assert chosen(Stub(0.8, 1.75, 0.89), Stub(0.9, 1.7, 1.0), 0.89, None) == ([0], 0)
    assert chosen(Stub(0.8, 1.75, 0.91), Stub(0.9, 1.7, 0.95), 0.91, 0.905) == ([0, 1], 1)


def test_what_does_not_fit_at_a_glance_is_planned_whole() -> None:
    """And first: two devices' plan may be shorter than all can be expected to take, 0.95 of 2.55 s as run."""
    assert chosen(Stub(1.5, None), Stub(1.6, 2.0), None, 1.9) == ([0, 1], 1)
    assert chosen(Stub(1.5, 3.0), Stub(1.6, None), 2.5, 2.4) == ([1, 0], 1)
    assert chosen(Stub(1.5, 3.0, 2.55), Stub(1.6, None), None, 2.4) == ([1], 1)
    assert chosen(Stub(1.5, 3.0, 2.5), Stub(1.6, None), 2.5, 2.4) == ([1, 0], 1)
    with pytest.raises(InfeasibleError, match="cluster 0 is too small"):
        chosen(Stub(1.5, None), Stub(1.6, None), None, None)


def test_of_what_does_not_fit_at_a_glance_the_least_bound_comes_first() -> None:
    """All devices take 4 s at least, of which half is longer than the plan of two."""
    assert chosen(Stub(4.0, None), Stub(1.6, None), None, 1.9) == ([1], 1)


def test_a_step_that_overlaps_may_be_shorter_than_one_whose_bound_is_less() -> None:
    """With nothing overlapped all devices take 2.5 s at least, two of them 2 s; as run they take 1.4 s and 2 s. What
    takes more than twice the shortest step as run is not looked at."""
    whole, others = Stub(2.5, 3.0, 1.4, nodes=MOST_NODES + 1), Stub(1.5, 2.0, 2.0)
    assert chosen(whole, others, 1.4, None) == ([0], 0) and whole.looked
    whole = Stub(4.1, 4.2, 1.4, nodes=MOST_NODES + 1)
    assert chosen(whole, Stub(1.5, 2.0, 2.0), None, 2.0) == ([1], 1) and not whole.looked


def host_by_host(as_run_s: list[float | None], *searches: Stub) -> tuple[list[int], int]:
    """The same of five clusters, the whole one, that without a kind, two between these and one that is smaller."""
    tried, asked = Tried(cast(Any, list(searches)), [(), (2,), (), (), (2,)], [0, 2, 3, 1, 4]), list[int]()
    tried.kinds = 2

    def plan(number: int) -> None:
        asked.append(number)
        seconds = as_run_s[number]
        if seconds is None:
            raise InfeasibleError(f"cluster {number} is too small")
        tried.planned[number] = Planned(cast(Any, searches[number]), cast(Any, None), seconds)

    plan_nested(tried, plan)
    best = tried.best()
    assert best is not None
    return asked, best[0]


def stubs(*seen_s: float | None) -> list[Stub]:
    """Of clusters in which all can be played, and which are so much longer with nothing overlapped as they have
    devices more."""
    return [Stub(0.1, None if s is None else s + more, s) for s, more in zip(seen_s, (4, 0, 2, 1, 0), strict=True)]


def test_hosts_of_a_kind_are_left_out_or_added_as_long_as_that_helps() -> None:
    """Numbers in the order of size are 0, 2, 3, 1, 4."""
    as_run_s: list[float | None] = [3.0, 2.0, 1.6, 1.7, 1.5]
    assert host_by_host(as_run_s, *stubs(*as_run_s)) == ([4], 4)  # beside 1, and shorter
    as_run_s = [3.0, 2.0, 1.6, 1.7, 2.2]
    assert host_by_host(as_run_s, *stubs(*as_run_s)) == ([3, 2], 2)  # 3 is beside 1, 2 beside 3
    as_run_s = [3.0, 2.0, 1.6, 2.1, 2.2]
    assert host_by_host(as_run_s, *stubs(*as_run_s)) == ([1, 3], 1)  # at its glance 3 may come to less: it does not
    as_run_s = [3.0, 2.0, 1.6, 2.2, 2.2]
    assert host_by_host(as_run_s, *stubs(*as_run_s)) == ([1], 1)  # and so 2 is not seen
    as_run_s = [3.0, 2.0, 1.6, None, 2.2]
    assert host_by_host(as_run_s, *stubs(*as_run_s)) == ([1], 1)  # nor beyond what does not fit


@pytest.mark.parametrize(("network", "hosts"), [("0.01GB/s", 1), ("1GB/s", None), ("50GB/s", 4)])
def test_of_hosts_that_are_alike_as_many_are_taken_as_are_worth_it(network: str, hosts: int | None) -> None:
    """No number of them has a shorter plan, and the bound is below all of these."""
    devices = ClusterSpec.from_yaml("name: all\nhosts:\n" + "".join(HOST.format(h, NEW, network) for h in "abcd"))
    plan = plan_graph(MODEL, devices, leave_out=True)
    alone = [plan_graph(MODEL, without(devices, range(2 * count, 8))) for count in (1, 2, 4)]
    assert plan.predicted.as_run_s == pytest.approx(min(p.predicted.as_run_s for p in alone), rel=0.01)
    assert plan.predicted.lower_bound_s <= min(plan.predicted.step_s, alone[-1].predicted.step_s)
    if hosts is not None:
        assert plan.world_size == 2 * hosts
    if plan.world_size < 8:
        assert plan.provenance.solver["left_out"] == list(range(plan.world_size, 8))
        assert f"{8 - plan.world_size} of the 8 new are left out, with them the step" in plan.predicted.tight
        assert plan.predicted.overlapped_bound_s is not None
        assert plan.predicted.overlapped_bound_s <= plan.predicted.as_run_s


def test_where_nothing_is_played_no_plan_is_shorter_than_its_bound() -> None:
    """Two devices take 2 s with nothing overlapped, all of them 2.5 s at least; half of that does not count."""
    searches: Any = [Stub(2.5, None), Stub(1.5, None)]
    tried, asked = Tried(searches, [(), (2,)]), list[int]()

    def plan(number: int) -> None:
        asked.append(number)
        tried.planned[number] = Planned(searches[number], cast(Any, SimpleNamespace(cost=(0, 2.0))), None)

    plan_nested(tried, plan)
    assert asked == [1]


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
    tried = nested(mixed("1GB/s"))
    assert tried.best() is None
    tried.searches[1].glance()
    best = tried.best()
    assert best is not None and best[0] == 1 and best[1].search is tried.searches[1]


def test_says_what_is_known_of_all_together() -> None:
    one = LeftOut((2,), (Kind("old", 1, 1),), ("b/old#0",), 1.5)
    words = "the 1 old is left out, with it the step would take"
    assert str(one) == f"{words} at least 1.5s with nothing overlapped"
    assert str(replace(one, with_all_s=2.0)) == f"{words} 2s with nothing overlapped"
    played = replace(one, with_all_s=2.0, overlapped_s=1.75)
    assert str(played) == f"{words} 1.75s as it is run"
    assert str(replace(played, glanced=True)) == f"{words} 1.75s as it is run, at first glance"
    assert "with_all_glanced" not in played.figures() and replace(played, glanced=True).figures()["with_all_glanced"]
    two = LeftOut((1, 2), (Kind("old", 2, 2),), ("b/old#0", "b/old#1"), 1.5)
    assert str(two) == "the 2 old are left out, with them the step would take at least 1.5s with nothing overlapped"
    assert two.figures() == {
        "left_out": [1, 2],
        "left_out_devices": ["b/old#0", "b/old#1"],
        "with_all_at_least_s": 1.5,
    }


def test_an_interrupted_search_still_says_who_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C once the two devices are planned, before they are played."""

    def played(chooser: Chooser, best: Found, _: object) -> tuple[Found, float]:
        if chooser.problem.world_size == 3:
            return best, 1.0  # longer than anything here
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "finest", played)
    plan = plan_graph(MODEL, mixed("0.1GB/s"), leave_out=True)
    assert plan.provenance.solver["stopped"] and plan.provenance.solver["left_out"] == [2] and plan.world_size == 2


def test_a_plan_on_fewer_devices_is_the_same_every_time() -> None:
    plans: list[Plan] = [plan_graph(MODEL, mixed("0.1GB/s"), leave_out=True) for _ in range(2)]
    assert all(a.to_json() == b.to_json() for a, b in itertools.pairwise(plans))


def test_the_shortest_step_that_was_met_is_told_where_another_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = nested(mixed("3GB/s"))
    best = tried.searches[0].run()
    fitting = [f.cost[1] for search in tried.searches for f in search.met if f.fits]
    assert tried.least_step_s() == min(fitting) <= best.cost[1]
    plan = plan_graph(MODEL, mixed("3GB/s"), leave_out=True)
    assert "least_step_s" not in plan.provenance.solver
    shorter = 0.98 * plan.predicted.step_s
    monkeypatch.setattr(Tried, "least_step_s", lambda self: shorter)
    told = plan_graph(MODEL, mixed("3GB/s"), leave_out=True)
    assert told.provenance.solver["least_step_s"] == shorter and told.strategies == plan.strategies
