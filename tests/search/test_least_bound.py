"""The least bound of nested clusters: below all of them, raised where it is far below the plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import pytest

from hap.cluster import ClusterSpec
from hap.rules.choices import Choices
from hap.search import fewer, plan_graph
from hap.search.beside import Beside
from hap.search.fewer import Tried
from hap.search.found import Found
from hap.search.least_bound import LOOSE, Aim, LeastBound
from hap.search.limits import LIMITS
from hap.search.masses import Masses
from hap.search.pins import Pins
from hap.search.planner import Search
from hap.search.prices import Facts
from hap.search.problem import Problem
from hap.search.relaxation import lower_bound
from tests.search.models import gpt2, mixer, mlp
from tests.search.test_beside import FORKS
from tests.search.test_fewer import MODEL, alone, mixed, nested
from tests.search.test_masses import hosts


def aim_at(search: Search, found: Found) -> Aim:
    return Aim.at(0, found, search.problem.facts.candidates)


def bound_s(found: Choices, devices: object) -> float:
    return lower_bound(Facts(found.graph, found.strategies, cast(Any, devices), "adamw")).seconds


@pytest.mark.parametrize("network", ["0.1GB/s", "3GB/s", "50GB/s"])
def test_it_is_below_those_of_all_choices_of_devices(network: str) -> None:
    """Each may be raised by cases, no further than the step."""
    tried = nested(mixed(network))
    best = tried.searches[0].run()
    least = min(bound_s(MODEL, mixed(network)), bound_s(MODEL, alone()))
    assert LeastBound(tried.searches).least_s(0) == pytest.approx(least)
    raised = LeastBound(tried.searches).raised_s(aim_at(tried.searches[0], best))
    assert least <= raised * (1 + 1e-9) and raised <= best.cost[1]


def exchanging() -> Tried:
    """A layer of GPT-2 on eight hosts, the last two half as fast: exchanges, free in the relaxation, make up a good
    part of a step."""
    devices = hosts(*[(1, 1)] * 6, *[(0.5, 1)] * 2, network="2GB/s")
    tried = Tried([Search(Problem.state(gpt2(layers=1), devices, "adamw", Pins()), LIMITS["normal"])])
    tried.nest()
    return tried


def test_where_exchanges_make_up_the_step_it_is_raised() -> None:
    tried = exchanging()
    best = tried.searches[0].run()
    least = min(search.bound_s for search in tried.searches[: tried.kinds])
    assert 1.1 * least < tried.least_bound.raised_s(aim_at(tried.searches[0], best)) <= best.cost[1]
    assert LeastBound(tried.searches).least_s(0) == least


def three_kinds() -> ClusterSpec:
    return hosts(*[(1, 1)] * 4, *[(0.7, 1)] * 2, *[(0.5, 1)] * 2, network="1GB/s")


@pytest.mark.parametrize("apart", [pytest.param(True, marks=FORKS), pytest.param(False, marks=pytest.mark.long)])
def test_of_three_clusters_a_second_process_is_asked_about_the_last(apart: bool) -> None:
    """Where exchanges make up a good part of the step of each; and what comes of it is the same."""
    tried = Tried([Search(Problem.state(gpt2(layers=1), three_kinds(), "adamw", Pins()), LIMITS["normal"])])
    tried.nest()
    aim = aim_at(tried.searches[0], tried.searches[0].run())
    assert tried.kinds == 3 and max(tried.least_bound.bound_s(n) for n in range(3)) < LOOSE * aim.step_s
    alone_s = LeastBound(tried.searches, 3).raised_s(aim)
    second = Beside(LeastBound(tried.searches, 3), apart=apart)
    try:
        shared_s = LeastBound(tried.searches, 3, second).raised_s(aim)
    finally:
        second.close()
    last = max(range(3), key=tried.least_bound.bound_s)
    assert [(q.method, q.arguments[0]) for q in second._asked] == [("learn", last), ("massed_s", last)]
    assert shared_s == pytest.approx(alone_s, rel=1e-6) and shared_s > 1.1 * LeastBound(tried.searches, 3).least_s(0)


@pytest.mark.parametrize(
    ("devices", "asks"), [(three_kinds(), True), (hosts((1, 1), (0.5, 1), network="2GB/s"), False)]
)
def test_of_fewer_clusters_there_is_no_second_process(
    devices: ClusterSpec, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fewer, "FEWEST_NODES", 0)
    tried = Tried([Search(Problem.state(mlp(64, 64), devices, "adamw", Pins()), LIMITS["normal"])])
    try:
        tried.nest()
        assert (tried.second is not None) == asks
    finally:
        tried.close()
    assert tried.second is None or not tried.second.is_apart


def test_a_bound_begun_where_another_ended_is_the_bound_begun_from_nothing() -> None:
    tried = exchanging()
    facts = [search.problem.facts for search in tried.searches[: tried.kinds]]
    together = Masses()
    for one in facts:
        alone_s = Masses().bound_s(one, 0.0)
        assert together.bound_s(one, 0.0) == pytest.approx(alone_s, rel=1e-6) and alone_s > 0.0


@pytest.mark.long
def test_of_more_than_is_enough_no_more_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the least of all any less for it, and whoever asks for more gets it."""
    tried = exchanging()
    facts, best = tried.searches[0].problem.facts, tried.searches[0].run()
    whole_s = Masses().bound_s(facts, 0.0)
    for part in (0.8, 0.95, 1.2):
        found_s = Masses().bound_s(facts, 0.0, part * whole_s)
        assert min(part, 1.0) * whole_s <= found_s * (1 + 1e-9) and found_s <= whole_s * (1 + 1e-6)
    bounds, aim = LeastBound(tried.searches), aim_at(tried.searches[0], best)
    found_s = bounds.massed_s(0, 0.8 * whole_s)
    assert found_s < 0.99 * whole_s and bounds.massed_s(0, 0.7 * whole_s) == found_s
    assert bounds.massed_s(0, 2.0 * whole_s) == pytest.approx(whole_s, rel=1e-5)
    raised_s, massed_s = LeastBound(tried.searches).raised_s(aim), LeastBound.massed_s
    monkeypatch.setattr(LeastBound, "massed_s", lambda self, number, _: massed_s(self, number, float("inf")))
    assert raised_s == pytest.approx(LeastBound(tried.searches).raised_s(aim), rel=1e-6)


def test_proofs_tell_all_that_masses_prove() -> None:
    """Though a bound is near enough before, and then no box is looked at."""
    alone = exchanging().searches[:1]
    best = alone[0].run()
    whole_s = Masses().bound_s(alone[0].problem.facts, 0.0)
    near = aim_at(alone[0], best)._replace(step_s=1.016 * whole_s)
    enough_s, all_s, *boxes = LeastBound(alone).proofs(near, 10)
    assert 0.98 * near.step_s <= enough_s <= all_s and not boxes
    assert all_s == pytest.approx(whole_s, rel=1e-5)


def test_an_interrupt_while_the_bound_is_raised_keeps_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bound as it was, and it says that it was stopped."""
    found, devices = mlp(batch=4096, width=512), mixed("3GB/s")
    whole = plan_graph(found, devices, leave_out=True)

    def interrupted(self: Tried) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tried, "raised_bound_s", interrupted)
    plan = plan_graph(found, devices, leave_out=True)
    assert (plan.strategies, plan.sizes, plan.devices) == (whole.strategies, whole.sizes, whole.devices)
    assert plan.provenance.solver["stopped"] is True
    assert plan.predicted.lower_bound_s == pytest.approx(min(bound_s(found, devices), bound_s(found, alone())))


@pytest.mark.parametrize("leave_out", [False, True])
def test_thorough_finds_the_same_plan_and_proves_more(leave_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where there is a second process, and if it is interrupted, what was proved until then."""
    found, devices = mixer(2, 64, 512), hosts((1, 1), (1, 1), network="1GB/s")
    normal = plan_graph(found, devices, leave_out=leave_out)
    thorough = plan_graph(found, devices, leave_out=leave_out, effort="thorough")
    alike = {"lower_bound_s": None}
    assert thorough.model_copy(update={"predicted": thorough.predicted.model_copy(update=alike)}) == normal.model_copy(
        update={"predicted": normal.predicted.model_copy(update=alike)}
    )
    least, more = normal.predicted.lower_bound_s, thorough.predicted.lower_bound_s
    assert least is not None and more is not None and 1.02 * least < more <= thorough.predicted.step_s
    with monkeypatch.context() as patched:
        patched.setattr("hap.search.fewer.FEWEST_NODES", 0)
        assert plan_graph(found, devices, leave_out=leave_out, effort="thorough") == thorough

    proofs = LeastBound.proofs

    def interrupted(self: LeastBound, aim: Aim, most: int) -> Iterator[float]:
        yield from itertools.islice(proofs(self, aim, most), 12)
        raise KeyboardInterrupt

    monkeypatch.setattr(LeastBound, "proofs", interrupted)
    stopped = plan_graph(found, devices, leave_out=leave_out, effort="thorough")
    assert stopped.provenance.solver["stopped"] is True and stopped.strategies == normal.strategies
    assert stopped.predicted.lower_bound_s is not None and least <= stopped.predicted.lower_bound_s <= more
