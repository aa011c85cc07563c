"""A candidate plan with its judgement, and how two of them compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter

from hap.cost_models.evaluate import Evaluation
from hap.cost_models.sequence import ConversionCost
from hap.order import Postponed
from hap.placement import GroupSizes
from hap.plan import Recomputed, Strategy
from hap.search.milp import Choice


def used_groups(strategies: Iterable[Strategy]) -> tuple[str, ...]:
    """The groups that some chosen placement shards, in order of first appearance."""
    return tuple(dict.fromkeys(chain.from_iterable(map(attrgetter("groups"), strategies))))


@dataclass(frozen=True)
class Found:
    """One candidate plan, judged. ``left_out``: ranks that were denied any share. ``kept``: the parameters whose
    gathered copies stay between the passes, though with ``regather`` the others' do not."""

    strategies: Mapping[str, Strategy]
    sizes: GroupSizes
    regather: bool
    left_out: tuple[int, ...]
    evaluation: Evaluation
    choice: Choice
    recomputed: tuple[Recomputed, ...] = ()  # what ``evaluation`` repeats
    kept: frozenset[str] = frozenset()
    postponed: Postponed = field(default_factory=dict)  # for which ``evaluation`` knows the memory

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Those that its strategies shard anything in, in order of first appearance."""
        return used_groups(self.strategies.values())

    def picks(self, candidates: Mapping[str, Sequence[Strategy]]) -> tuple[int, ...]:
        """Of every node, in their order, which of its candidates it has."""
        return tuple([options.index(self.strategies[name]) for name, options in candidates.items()])

    @property
    def conversions(self) -> tuple[ConversionCost, ...]:
        return self.evaluation.conversions

    @property
    def repeated(self) -> tuple[str, ...]:
        """The nodes whose calls are made twice."""
        return tuple(name for r in self.recomputed for name in r.calls)

    @property
    def cost(self) -> tuple[float, float]:
        """(bytes that do not fit, seconds)."""
        return overflow_bytes(self.evaluation), self.evaluation.step_s

    @property
    def fits(self) -> bool:
        return self.cost[0] == 0


def overflow_bytes(evaluation: Evaluation) -> int:
    """Bytes beyond the usable memory, over all ranks."""
    pairs = zip(evaluation.memory_bytes, evaluation.usable_bytes, strict=True)
    return sum(max(0, used - usable) for used, usable in pairs)


def best_of(found: Iterable[Found | None]) -> Found | None:
    """The cheapest, the first of equals."""
    return min((f for f in found if f is not None), key=lambda f: f.cost, default=None)
