"""A plan with other strategies for some of its nodes, judged anew."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from hap.placement import GroupSizes, Sizes
from hap.plan import Strategy
from hap.search.found import Found, used_groups
from hap.search.problem import Problem
from hap.search.rounding import round_shares


def changed(problem: Problem, best: Found, strategies: Mapping[str, Strategy]) -> Found:
    """``best`` with these strategies of some nodes; groups that it did not use are dealt out evenly."""
    every, sizes = {**best.strategies, **strategies}, sizes_with(problem, best, strategies)
    evaluation = problem.facts.evaluator.evaluate(
        every,
        sizes,
        regather=best.regather,
        kept=best.kept,
        recomputed=best.repeated,
        postponed=best.postponed,
    )
    return replace(best, strategies=every, sizes=sizes, evaluation=evaluation)


def sizes_with(problem: Problem, best: Found, strategies: Mapping[str, Strategy]) -> GroupSizes:
    """Of all groups, those that these strategies of some nodes use and ``best`` does not dealt out evenly."""
    new = [name for name in used_groups(strategies.values()) if name not in best.groups]
    return {**best.sizes, **{name: sizes_of(problem, best, name, best.groups) for name in new}}


def sizes_of(problem: Problem, best: Found, group: str, used: Collection[str]) -> Sizes:
    """Those of the plan, which uses the groups ``used``; of a group that it does not use even ones, unless they are
    pinned."""
    if group in used or group in problem.fixed:
        return best.sizes[group]
    even = [0.0 if r in best.left_out else 1.0 for r in range(problem.world_size)]
    return round_shares(even, problem.choices.groups[group].n)
