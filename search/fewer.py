"""A search that may leave out whole kinds of devices: which of several nested clusters to plan for.

Without its slowest kind of device, its two slowest, ... a cluster leaves other, smaller ones (``subsets``). Each is a
problem of its own with a proved bound of its own, so they need not all be searched: they are taken in the order of
their bounds, and as soon as a plan is shorter than the next bound, no other cluster can do better. The least of all
bounds is below every plan on every one of them.

    best := nothing
    for every cluster, least bound first:
        stop if bound >= best                       proved: this one and all after it are worse
        glance at it, or search it, where at first glance nothing fits
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hap.cluster import ClusterSpec
from hap.errors import InfeasibleError, PlanError
from hap.search.cases import bound_by_cases
from hap.search.found import Found, best_of
from hap.search.recompute import run_or_repeat
from hap.search.subsets import LeftOut, slowest_kinds, without

if TYPE_CHECKING:
    from hap.search.planner import Search

MOST_NODES = 3_000  # of a graph for which cases are looked at
NEAR = 0.005  # of the step: a bound as near as that is not raised


class Picked(NamedTuple):
    """The search to go on with, its best plan if it was made already, and what was left out, if anything."""

    search: Search
    best: Found | None
    left_out: LeftOut | None


def pick_devices(search: Search, tried: list[Search]) -> Picked:
    """The cluster whose plan is the shortest at first glance. ``tried`` is filled with the searches of all clusters.

    PlanError where shares are pinned to ranks, or devices were measured: of these no bound is proved. InfeasibleError
    if nothing fits anywhere.
    """
    nested = _nested(search)
    tried[:] = searches = [one for _, one in nested]
    bounds = [_bound_s(one) for one in searches]
    seconds: dict[int, float] = {}
    complete: dict[int, Found] = {}
    for number in sorted(range(len(searches)), key=bounds.__getitem__):
        if bounds[number] >= min(seconds.values(), default=float("inf")):
            break
        glanced = searches[number].glance()
        if glanced is not None and glanced.fits:
            seconds[number] = glanced.cost[1]
            continue
        try:
            searches[number], complete[number] = run_or_repeat(searches[number])
        except InfeasibleError:
            continue
        seconds[number] = complete[number].cost[1]
    if not seconds:
        search.run()  # says why
        raise AssertionError("nothing fitted, and now something does")
    best = min(seconds, key=lambda number: (seconds[number], number))
    ranks, left = nested[best][0], None
    if ranks:
        kinds = Counter(search.problem.cluster.devices[r].gpu for r in ranks)
        left = LeftOut(ranks, tuple(kinds.items()), seconds.get(0), bounds[0])
    return Picked(searches[best], complete.get(best), left)


def _nested(search: Search) -> list[tuple[tuple[int, ...], Search]]:
    """(ranks left out, the search of what is left): of the whole cluster first."""
    problem = search.problem
    if problem.pins.sizes or problem.pins.ratios is not None:
        raise PlanError("shares are pinned to ranks; no device can be left out of the plan")
    if type(problem.cluster) is not ClusterSpec or search.bound_s is None:
        raise PlanError("devices that were measured cannot be left out of the plan; name fewer in the cluster file")
    nested: list[tuple[tuple[int, ...], Search]] = [((), search)]
    for ranks in slowest_kinds(problem.cluster.devices, problem.whole_s.tolist()):
        smaller = problem.on(without(problem.cluster, ranks))
        nested.append((ranks, replace(search, problem=smaller)))
    return nested


def _bound_s(search: Search) -> float:
    assert search.bound_s is not None
    return search.bound_s


def least_bound_s(tried: Sequence[Search], step_s: float | None = None) -> float | None:
    """Below all plans of all searches. With ``step_s``, what was found: the least bound is raised case by case where
    it is not near that, as long as it is the least."""
    bounds = [one.bound_s for one in tried]
    known = [b for b in bounds if b is not None]
    if len(known) < len(bounds) or step_s is None:
        return min(known, default=None)
    left = {i for i, one in enumerate(tried) if len(one.problem.choices.graph.nodes) <= MOST_NODES}
    while True:
        least = min(range(len(known)), key=known.__getitem__)
        if least not in left or known[least] >= step_s * (1 - NEAR):
            return known[least]
        left.remove(least)
        known[least] = bound_by_cases(tried[least].problem.facts, known[least], step_s)


def best_met(tried: Sequence[Search]) -> tuple[Search, Found | None]:
    """Of all that searches have met, the best that fits, and its search; the first search if there is none."""
    pairs = [(one, best_of(f for f in one.met if f.fits)) for one in tried]
    return min(((one, f) for one, f in pairs if f is not None), key=lambda p: p[1].cost, default=(tried[0], None))
