"""A plan with other strategies for some of its nodes, judged anew."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from hap.placement import GroupSizes, Sizes
from hap.plan import Strategy
from hap.search.assemble import used_groups
from hap.search.found import Found
from hap.search.problem import Problem
from hap.search.rounding import round_shares


def changed(problem: Problem, best: Found, strategies: Mapping[str, Strategy]) -> Found:
    """``best`` with these strategies of some nodes; groups that it did not use are dealt out evenly."""
    every = {**best.strategies, **strategies}
    sizes = sizes_with(problem, best, every)
    evaluator = problem.facts.evaluator
    needs = evaluator.needs(every, regather=best.regather, kept=best.kept, recomputed=best.repeated)
    evaluation = evaluator.evaluate(every, sizes, needs, best.repeated)
    return replace(best, strategies=every, sizes=sizes, evaluation=evaluation)


def sizes_with(problem: Problem, best: Found, strategies: Mapping[str, Strategy]) -> GroupSizes:
    """Of all groups, those that these strategies use and ``best`` does not dealt out evenly."""
    found, used = dict(best.sizes), frozenset(used_groups(best.strategies.values()))
    for name in used_groups(strategies.values()):
        found[name] = sizes_of(problem, best, name, used)
    return found


def sizes_of(problem: Problem, best: Found, group: str, used: Collection[str]) -> Sizes:
    """Those of the plan, which uses the groups ``used``; of a group that it does not use even ones, unless they are
    pinned."""
    if group in used or group in problem.fixed:
        return best.sizes[group]
    even = [0.0 if r in best.left_out else 1.0 for r in range(problem.world_size)]
    return round_shares(even, problem.choices.groups[group].n)
