"""Strategies at fixed sizes: the MILP, asked again with less memory while the ledger finds more than it saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from hap.cost_models.memory import usable_bytes
from hap.fabric import Array
from hap.placement import GroupSizes
from hap.plan import Strategy
from hap.search.found import Found, best_of
from hap.search.limits import MIP_GAP, Limits
from hap.search.milp import Choice, choose
from hap.search.problem import Problem
from hap.search.tables import Prices

BEHIND = 1.05  # a start whose first round is this much slower than the best so far is given up
SHORTER = 1e-4  # of the bound: what one collective less is worth beside its own seconds
KEPT = 3  # prices
DEAR = 1.6  # times the step with memory without end: making calls again, or other shares, would come to less ...
FEW_NODES, FEW_VARIABLES = 1_000, 12_000  # ... and of a larger graph, or program, one that memory makes dear takes long
TIE = 0.01  # of the objective: what fits and is as near to what does not is near enough
LESS = 0.99  # of what a choice takes, after it was made twice
TIGHTENINGS = 3  # how often a MILP is solved again with less memory, when the ledger finds more than it had seen


@dataclass
class Chooser:
    """Asks for strategies; keeps what was solved, and the ``margin`` (N,) of memory that helped for the next sizes.
    ``check`` is called before every program, and during one that takes long, and may end the search by an exception."""

    problem: Problem
    limits: Limits
    check: Callable[[], None] = lambda: None
    milps: int = 0
    solved: dict[object, Choice | None] = field(default_factory=dict)
    priced: dict[object, Prices] = field(default_factory=dict)
    # for the judge: plans with their steps as run, and with their shares dealt out anew
    played: dict[object, float] = field(default_factory=dict)
    dealt_out: dict[object, Found] = field(default_factory=dict)
    compared: list[tuple[float, Found]] = field(default_factory=list)  # with their steps as run, of a small graph

    def __post_init__(self) -> None:
        self.margin: Array = np.zeros(self.problem.world_size)
        self.least_s = np.inf  # of all choices so far with memory without end, with nothing forced

    @cached_property
    def dear(self) -> float:
        """Times ``least_s``: choices that fit and cost more are none. Asked for when something does not fit: the
        program is written out then, if not before."""
        is_small = len(self.problem.choices.graph.nodes) <= FEW_NODES and self.problem.variables <= FEW_VARIABLES
        return np.inf if is_small else DEAR

    def strategies(
        self,
        sizes: GroupSizes,
        regather: bool,
        left_out: tuple[int, ...],
        *,
        forced: Mapping[int, tuple[int, ...]] | None = None,
        best: Found | None = None,
        barriers: bool = True,
        plain: bool = False,
        limited: bool = True,
    ) -> Found | None:
        """The MILP's choice at these sizes: the cheapest that fits, or where it is dear or far behind ``best``, if that
        fits, the cheapest with memory without end, and so if not ``limited``. None if there is none. ``plain``: with
        collectives at the price of their plainest form."""

        def ask(capacity: Array, below_s: float) -> Choice | None:
            return self._choose(sizes, regather, capacity, forced or {}, barriers, plain, below_s)

        free = ask(np.full(self.problem.world_size, np.inf), np.inf)
        if free is None:
            return None
        first = self._judged(free, sizes, regather, left_out)
        if first.fits or not limited:
            return first
        if not forced:
            self.least_s = min(self.least_s, free.objective_s)
        below_s = self.dear * (free.objective_s if forced else self.least_s)
        if best is not None and best.fits:
            below_s = BEHIND * best.cost[1]
        return self._fitting(
            first, ask, partial(self._judged, sizes=sizes, regather=regather, left_out=left_out), below_s
        )

    def _fitting(
        self,
        first: Found,
        ask: Callable[[Array, float], Choice | None],
        judged: Callable[[Choice], Found],
        below_s: float,
    ) -> Found:
        """The cheapest met that fits, or comes nearest to it. The program is given less memory by what the ledger finds
        above its rows, less than the last choice takes; where that was too little, half of what lies between."""
        devices = self.problem.cluster.devices
        usable = np.array([usable_bytes(d.memory_bytes) for d in devices], dtype=np.float64)
        met = {first.choice.picks: first}
        capacity, too_much, little = usable - self.margin, None, None
        for _ in range(TIGHTENINGS + 1):
            choice = ask(capacity, below_s)
            again = choice is not None and choice.picks in met
            found = None if choice is None else met.get(choice.picks) or judged(choice)
            if choice is None or found is None or found.fits:
                little = capacity
            else:
                over, above_s = np.maximum(0.0, np.array(found.evaluation.memory_bytes) - usable), choice.objective_s
                taken = capacity * choice.fullness  # at most
                too_much = taken * LESS if again else capacity
                less = too_much - over
                less = np.where((over > 0) & (taken <= less), taken - over, less)  # or it would do once more
            if choice is not None and found is not None:
                met[choice.picks] = found
                if found.fits:
                    self.margin, below_s = usable - capacity, choice.objective_s
            if too_much is None or (little is not None and below_s <= above_s * (1 + TIE)):
                break
            capacity = less if little is None else (too_much + little) / 2
        return best_of(met.values()) or first

    def unlimited(self, sizes: GroupSizes, *, forced: Mapping[int, tuple[int, ...]]) -> Mapping[str, Strategy] | None:
        """The same for parameters gathered once, as if memory had no end."""
        choice = self._choose(sizes, False, np.full(self.problem.world_size, np.inf), forced, True, False, np.inf)
        return None if choice is None else self.problem.classes.expand(choice.picks, self.problem.facts.candidates)

    def leaner(self, sizes: GroupSizes, part: float) -> Mapping[str, Strategy] | None:
        """The same for parameters gathered twice, at so much of the usable memory."""
        devices = self.problem.cluster.devices
        capacity = part * np.array([usable_bytes(d.memory_bytes) for d in devices], dtype=np.float64)
        choice = self._choose(sizes, True, capacity, {}, True, False, self.dear * self.least_s)
        return None if choice is None else self.problem.classes.expand(choice.picks, self.problem.facts.candidates)

    def _judged(self, choice: Choice, sizes: GroupSizes, regather: bool, left_out: tuple[int, ...]) -> Found:
        strategies = self.problem.classes.expand(choice.picks, self.problem.facts.candidates)
        evaluation = self.problem.judge(strategies, sizes, regather)
        return Found(strategies, sizes, regather, left_out, evaluation, choice, self.problem.recomputed)

    def _choose(
        self,
        sizes: GroupSizes,
        regather: bool,
        capacity: Array,
        forced: Mapping[int, tuple[int, ...]],
        barriers: bool,
        plain: bool,
        below_s: float,
    ) -> Choice | None:
        at = tuple(sizes.items()), regather, tuple(capacity.tolist()), plain
        key = at, tuple(forced.items()), barriers, below_s
        if key not in self.solved:
            self.check()
            self.milps += 1
            self.solved[key] = self._solve(self._prices(sizes, regather, capacity, plain), forced, barriers, below_s)
        return self.solved[key]

    def _solve(
        self, prices: Prices, forced: Mapping[int, tuple[int, ...]], barriers: bool, below_s: float
    ) -> Choice | None:
        return choose(
            prices.tables.skeleton,
            prices,
            forced=forced,
            barriers=barriers,
            nodes=self.limits.nodes,
            gap=MIP_GAP,
            warm=True,
            below_s=below_s,
            check=self.check,
        )

    def _prices(self, sizes: GroupSizes, regather: bool, capacity: Array, plain: bool) -> Prices:
        """The last few are kept: the same sizes are asked about with different options forced, and less memory."""
        key = (tuple(sizes.items()), regather, plain)
        if key not in self.priced:
            tables = self.problem.tables(regather)
            self.priced[key] = Prices(tables, sizes, capacity, SHORTER * self.problem.scale_s, plain)
            for old in list(self.priced)[:-KEPT]:
                del self.priced[old]
        known = self.priced[key]
        return known if np.array_equal(known.capacity_bytes, capacity) else known.holding(capacity)
