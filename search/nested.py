"""Which of several nested clusters to plan for, by what ``fewer`` knows of each.

    glance at the whole cluster, then at those without whole kinds, unless they are known to take longer than the
        shortest step seen (of a large graph in the order of the bounds)
    glance at the next smaller and the next larger one beside the shortest of these
    for those where nothing fits at first glance, the least bound first, and then for the whole cluster and the smaller
    ones whose glance is shorter than the whole's, the shortest as run first:
        plan it to its step as run, unless the least that it may be, by the rules of ``fewer`` and a closer look, is no
            shorter than the shortest step known (as run; of what is not planned yet, at first glance)
    from the shortest plan on, with ever fewer hosts of its slowest kind, and with ever more of the next slower one as
    long as that makes the plan shorter:
        glance, and plan, by the same rules
    take the plan with the shortest step as run; of equal ones that of the larger cluster

A smaller cluster whose glance is no shorter than the whole's by either clock is not planned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from hap.errors import InfeasibleError
from hap.search.fewer import Planned, Tried
from hap.search.least_bound import MOST_NODES
from hap.search.subsets import look_beside


def plan_nested(tried: Tried, plan: Callable[[int], None]) -> None:
    """Plan for those of the clusters that may have the shortest step. ``plan`` puts the plan of one of them into
    ``tried.planned``. InfeasibleError if nothing fits anywhere."""
    unfit = _glance_at_kinds(tried)
    if tried.glanced:
        first = min(tried.glanced, key=lambda n: (tried.glanced[n], n))
        tried.foresee(first, tried.glances[first])
        for number in tried.near(min(tried.glanced, key=lambda n: (tried.looks_s(n), n))):
            if not tried.takes_longer(number):
                tried.glance(number)
    promising = [n for n in tried.glanced if not n or tried.is_promising(n)]
    why: InfeasibleError | None = None
    unfit.sort(key=lambda n: (tried.searches[n].bound_s, n))
    promising.sort(key=lambda n: (tried.looks_s(n), n))
    every = [*unfit, *promising]  # a glance tells least of the unfit, and what they come to may rule out others
    for place, number in enumerate(every):
        others = [tried.known_s(n) for n in (*tried.planned, *tried.glanced) if n != number]
        if not tried.may_take_less(number, min(others, default=np.inf)):
            continue
        if number in tried.seen:
            tried.offer_closer(every[place + 1 :], tried.looks_s(number))
        refused = _plan(tried, plan, number)
        why = why or refused
    if not tried.planned:
        assert why is not None
        raise why
    look_beside(tried.order, range(tried.kinds), lambda: _best(tried)[0], partial(_go_on, tried, plan))


def _glance_at_kinds(tried: Tried) -> list[int]:
    """At the whole cluster and those without whole kinds. Where nothing fits that way."""
    numbers = list(range(tried.kinds))
    if len(tried.searches[0].problem.choices.graph.nodes) > MOST_NODES:  # a glance takes longer than all the bounds
        numbers.sort(key=lambda n: (tried.searches[n].bound_s, n))
    return [n for n in numbers if not tried.takes_longer(n) and not tried.glance(n)]


def _go_on(tried: Tried, plan: Callable[[int], None], number: int) -> bool | None:
    """Plan for a cluster beside the best one, if it may have the shortest step. Whether it has; None where it and those
    further on take too long, or nothing fits."""
    best_s = _best(tried)[1].as_run_s
    if number not in tried.planned:
        if tried.takes_longer(number) or not (number in tried.glances or tried.glance(number)):
            return None
        if tried.may_take_less(number, best_s):
            _plan(tried, plan, number)
    return number in tried.planned and tried.planned[number].as_run_s < best_s


def _best(tried: Tried) -> tuple[int, Planned]:
    chosen = tried.best()
    assert chosen is not None, "something is planned"
    return chosen


def _plan(tried: Tried, plan: Callable[[int], None], number: int) -> InfeasibleError | None:
    """Plan for one of the clusters, while bounds are asked for beside it. Why nothing fits, where that is so."""
    if number in tried.glances:
        tried.foresee(number, tried.glances[number])
    tried.foresee_as_run(number)
    try:
        plan(number)
    except InfeasibleError as e:
        return e
    return None
