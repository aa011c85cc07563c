"""A plan with other strategies for some of its nodes, played and judged anew."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hap.cost_models.evaluate import Prepared
from hap.cost_models.sequence import ConversionCost
from hap.order import Postponed
from hap.placement import GroupSizes, Sizes
from hap.plan import Strategy
from hap.search.found import Found, used_groups
from hap.search.problem import Problem
from hap.search.rounding import round_shares


@dataclass(frozen=True, eq=False)
class Change:
    """``best`` with other strategies: what is played of it (``tempo.Playable``), and judged only if that is asked for.
    ``strategies`` and ``sizes``: of all nodes and groups."""

    problem: Problem
    best: Found
    strategies: Mapping[str, Strategy]
    sizes: GroupSizes

    @classmethod
    def of(
        cls, problem: Problem, best: Found, strategies: Mapping[str, Strategy], shares: Sequence[float] | None = None
    ) -> Change:
        """With these strategies of some nodes; groups that ``best`` did not use are dealt out evenly, or by the ranks'
        ``shares``."""
        every = {**best.strategies, **strategies}
        return cls(problem, best, every, sizes_with(problem, best, strategies, shares))

    @property
    def regather(self) -> bool:
        return self.best.regather

    @property
    def kept(self) -> frozenset[str]:
        return self.best.kept

    @property
    def repeated(self) -> tuple[str, ...]:
        return self.best.repeated

    @property
    def postponed(self) -> Postponed:
        return self.best.postponed

    @cached_property
    def groups(self) -> tuple[str, ...]:
        return used_groups(self.strategies.values())

    @cached_property
    def _prepared(self) -> Prepared:
        return self.problem.facts.evaluator.prepare(
            self.strategies,
            regather=self.regather,
            kept=self.kept,
            recomputed=self.repeated,
            postponed=self.postponed,
        )

    @cached_property
    def conversions(self) -> tuple[ConversionCost, ...]:
        return self.problem.facts.evaluator.conversions(self._prepared, self.sizes)

    @cached_property
    def found(self) -> Found:
        """Judged."""
        evaluation = self.problem.facts.evaluator.at_sizes(self._prepared, self.sizes)
        return replace(self.best, strategies=self.strategies, sizes=self.sizes, evaluation=evaluation)


def changed(
    problem: Problem, best: Found, strategies: Mapping[str, Strategy], shares: Sequence[float] | None = None
) -> Found:
    """``Change.of`` these, judged."""
    return Change.of(problem, best, strategies, shares).found


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
