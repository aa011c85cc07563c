"""A plan with other strategies for some of its nodes, judged anew."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from hap.placement import GroupSizes, Sizes
from hap.plan import Strategy
from hap.search.found import Found, used_groups
from hap.search.problem import Problem
from hap.search.rounding import round_shares


def changed(
    problem: Problem, best: Found, strategies: Mapping[str, Strategy], shares: Sequence[float] | None = None
) -> Found:
    """``best`` with these strategies of some nodes; groups that it did not use are dealt out evenly, or by the ranks'
    ``shares``."""
    every, sizes = {**best.strategies, **strategies}, sizes_with(problem, best, strategies, shares)
    evaluation = problem.facts.evaluator.evaluate(
        every,
        sizes,
        regather=best.regather,
        kept=best.kept,
        recomputed=best.repeated,
        postponed=best.postponed,
    )
    return replace(best, strategies=every, sizes=sizes, evaluation=evaluation)


def sizes_with(
    problem: Problem, best: Found, strategies: Mapping[str, Strategy], shares: Sequence[float] | None = None
) -> GroupSizes:
    """Of all groups, those that these strategies of some nodes use and ``best`` does not dealt out evenly, or by
    ``shares`` of the ranks."""
    new = [name for name in used_groups(strategies.values()) if name not in best.groups]
    return {**best.sizes, **{name: sizes_of(problem, best, name, best.groups, shares) for name in new}}


def sizes_of(
    problem: Problem, best: Found, group: str, used: Collection[str], shares: Sequence[float] | None = None
) -> Sizes:
    """Those of the plan, which uses the groups ``used``; of a group that it does not use even ones, or by ``shares``,
    unless they are pinned."""
    if group in used or group in problem.fixed:
        return best.sizes[group]
    ranks = range(problem.world_size)
    dealt = [0.0 if r in best.left_out else 1.0 if shares is None else shares[r] for r in ranks]
    if not any(dealt):  # all of it would lie where nobody is
        dealt = [0.0 if r in best.left_out else 1.0 for r in ranks]
    return round_shares(dealt, problem.choices.groups[group].n)
