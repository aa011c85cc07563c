"""A candidate plan with its judgement, and how two of them compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hap.cost_models.evaluate import Evaluation
from hap.placement import GroupSizes
from hap.plan import Recomputed, Strategy
from hap.search.milp import Choice


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
