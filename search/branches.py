"""Branch and bound over decisions, by a linear relaxation that a simplex solver keeps.

Where memory is nearly full the relaxation mixes the options of every layer, a third of one that is fast and two thirds
of one that is lean, and is as much as a sixth below the best choice: rows of memory are knapsacks. A solver that knows
nothing of the program looks for cuts and for points for seconds before it branches; yet few decisions matter, and once
they are taken the rest is nearly whole. So they are branched on here, in two, each half solved by a few dual simplex
steps from the basis of the one before: bounds alone change, so that every basis stays dual feasible.

    in two      of a decision, the option with the largest x[i] is taken, or it is not
    decision    the one that is expected to raise the bounds of its halves most, in product. A half's bound rises by
                what it rose by when the decision was branched on before, for each 1 that its x[i] was from whole; of a
                decision that never was, by the mean of all such rises over their stakes, times its own. The stake says
                how unlike those options are that are mixed: with w[i] what option i takes of the row that it takes
                most of, sum_i x[i] |w[i] - sum_j x[j] w[j]|
    next        the half with the lower bound while that is below the best point, else the part with the lowest
    ruled out   with U the best point's objective, L and d a part's bound and reduced costs: what is 0 and has L + d > U

A part whose bound is not below U, to ``EXACT`` of it, is closed. No choice is below the least bound of all parts, open
or closed. Of a large program that takes too long: there U is ``near`` enough if it is so near to the bound, for each
relaxation that was solved; and where there is no U after ``DIVE`` relaxations one is looked for at any price: of the
decision that mixes what is most unlike, of what it mixes the option that takes least is taken, until all are whole.
Where relaxations take many steps, each ``STEPS`` of them count as one.

A half that is far from what it is half of, as where what is taken goes with nothing else, takes the dual simplex
method long, and mostly ends as no better than the best point. So it is put off after ``PATIENCE`` steps with the bound
that these have proved, and gone on with only where it would be next; and each ends where it is proved to be closed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt import parameters_pb2, solution_pb2

from hap.fabric import Array
from hap.search.protos import KeptSolver, Solution, dual_steps, until

Decision = NDArray[np.int64]  # the variables of which exactly one is 1
INTEGRAL = 1e-6  # a value this close to 0 or 1 is 0 or 1
EXACT = 1e-6  # of the objective: a part that can gain less is closed
LEAST = 1e-5  # of a part's bound: a half is taken to rise by no less, so that the other one counts
NEAR = 1e-3  # from whole: a rise for each 1 is not told from less
DIVE = 50  # relaxations
STEPS = 200  # of the simplex method: about what a relaxation takes
PATIENCE = 400  # steps of a half, before it is put off
NO_POINT = 0.1  # of a part's bound: a half without a point is taken to rise by so much, or to the best point
RELAXED = dual_steps()  # presolve would take longer than most solutions, and hide the basis
BEGUN = dual_steps(iteration_limit=PATIENCE)


@dataclass(frozen=True)
class Part:
    """All choices within these upper bounds (V,), what none of them is below, their relaxation, unless that was put
    off, and the basis that the simplex method ended at."""

    upper: Array
    bound: float
    relaxed: Solution | None
    basis: solution_pb2.BasisProto | None = None

    @property
    def known(self) -> Solution:
        """The relaxation, where it was not put off."""
        assert self.relaxed is not None, "a part that is next is gone on with before it is looked at"
        return self.relaxed


class Rises:
    """By how much the bounds of halves rose for each 1 from whole: how often, and in sum, of every decision (2, D)."""

    def __init__(self, decisions: int) -> None:
        self.times, self.total = np.zeros((2, decisions)), np.zeros((2, decisions))
        self.stakes = np.zeros((2, decisions))  # when they were branched on first

    def add(self, half: int, decision: int, rise: float, from_whole: float, stake: float) -> None:
        if not self.times[half, decision]:
            self.stakes[half, decision] = stake
        self.times[half, decision] += 1.0
        self.total[half, decision] += rise / max(from_whole, NEAR)

    def expected(self, from_whole: Array, stakes: Array) -> Array:
        """(2, D) for ``from_whole`` (2, D) and ``stakes`` (D,); the stake, where nothing is known of any decision."""
        means, all_stakes = self.total / np.maximum(self.times, 1.0), self.stakes.sum()
        by_stake = stakes * (means.sum() / all_stakes if all_stakes else 1.0)
        return from_whole * np.where(self.times > 0.0, means, by_stake)


@dataclass
class Branches:
    """``stakes`` (V,): what each variable takes of the row that it takes most of, as a part of that row's limit. No
    point that costs ``below`` or more is one. After ``most`` relaxations no further one is solved. ``near``: of the
    objective, for each relaxation: what is near enough; 0 where the best is asked for. ``check`` is called before every
    two of them and may end the search by an exception. ``best`` is the best point met, and no choice is below the
    lesser of its objective and ``bound``."""

    solver: KeptSolver
    decisions: Sequence[Decision]
    stakes: Array
    most: int
    below: float = np.inf
    near: float = 0.0
    check: Callable[[], None] = lambda: None
    best: Solution | None = None
    bound: float = np.inf
    solved: int = 0
    _open: list[tuple[float, int, Part]] = field(default_factory=list)

    def __post_init__(self) -> None:
        widest = max(len(d) for d in self.decisions)
        self._rises, self._dived, self._steps = Rises(len(self.decisions)), False, 0
        self._near: list[Part] = []  # whose optima are few steps from where the solver is
        self._pushed = 0
        self._options = np.array([np.pad(d, (0, widest - len(d)), mode="edge") for d in self.decisions])  # (D, options)
        self._are = np.arange(widest) < np.array([[len(d)] for d in self.decisions])
        self._takes = self.stakes[self._options]

    def search(self, root: Part) -> None:
        """The best choice of ``root``."""
        part: Part | None = root
        self._near = [root]
        while part is not None and not self._is_enough(part):
            part = self._next(part)
            late = self.near > 0.0 and self.best is None and self._effort >= DIVE and not self._dived
            if late and part is not None and part.relaxed is not None:
                self._dive(part)
        self.bound = self._least(part)

    @property
    def _effort(self) -> int:
        """In relaxations."""
        return max(self.solved, self._steps // STEPS) if self.near else self.solved

    def _is_enough(self, part: Part) -> bool:
        enough = self.near * self._effort
        near = self.best is not None and self.best.objective - self._least(part) <= enough * abs(self.best.objective)
        return self._effort >= self.most or (self.near > 0.0 and near)

    def _dive(self, part: Part) -> None:
        """A point of ``part``, if it is met by taking what takes least."""
        self._dived, at = True, part
        while not (whole := self._whole(at.known.values)).all():
            self.check()
            x = np.where(self._are, at.known.values[self._options], 0.0)
            number = int(np.where(whole, -1.0, self._mixed(x)).argmax())
            option = int(np.where(x[number] > INTEGRAL, self._takes[number], np.inf).argmin())
            upper = at.upper.copy()
            upper[self.decisions[number]] = 0.0
            upper[self.decisions[number][option]] = 1.0
            solved = self._part(upper, at)
            if solved is None or solved.bound >= self._worth:
                return
            at = solved
        self.best = at.known

    def _least(self, part: Part | None) -> float:
        """What no choice but the best is below, while ``part`` is next."""
        first = self._open[0][0] if self._open else np.inf
        return min(self.bound, first, np.inf if part is None else part.bound)

    def _next(self, part: Part) -> Part | None:
        """After ``part``, which is closed, divided, or gone on with: the part to go on with."""
        if not self._is_done(part):
            if part.relaxed is None:
                self._push(self._resumed(part))
            else:
                halves = sorted(self._divided(part), key=lambda half: (half.relaxed is None, half.bound))
                if halves and halves[0].relaxed is not None:
                    self._push(halves[1:])
                    return halves[0]
                self._push(halves)
        return heapq.heappop(self._open)[2] if self._open else None

    def _push(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._pushed += 1
            heapq.heappush(self._open, (part.bound, self._pushed, part))

    def _is_done(self, part: Part) -> bool:
        """Whether nothing in it is better than the best, which it may be itself."""
        if part.bound < self._worth:
            if part.relaxed is None or not self._whole(part.relaxed.values).all():
                return False
            self.best = part.relaxed
        self.bound = min(self.bound, part.bound)
        return True

    def _resumed(self, part: Part) -> list[Part]:
        """What was put off, with its relaxation; nothing, if it is closed."""
        self.check()
        solved = self._part(part.upper, part)
        return [] if solved is None else [solved]

    @property
    def _limit(self) -> float:
        """What the best point costs; until there is one, what none may cost."""
        return self.below if self.best is None else self.best.objective

    @property
    def _worth(self) -> float:
        """Only parts whose bound is below this are divided."""
        return self.below if self.best is None else self.best.objective - EXACT * abs(self.best.objective)

    def _divided(self, part: Part) -> list[Part]:
        """Its halves that have a point."""
        self.check()
        number, option, stake = self._chosen(part)
        upper, x = self._without_dearer(part), float(part.known.values[option])
        taken, left = upper.copy(), upper.copy()
        taken[self.decisions[number]] = 0.0
        taken[option], left[option] = 1.0, 0.0
        found = []
        for half, bounds, from_whole in ((0, taken, 1.0 - x), (1, left, x)):
            solved = self._part(bounds, part, BEGUN)
            rise = self._most_rise(part) if solved is None else solved.bound - part.bound
            self._rises.add(half, number, rise, from_whole, stake)
            found += [] if solved is None else [solved]
        return found

    def _whole(self, values: Array) -> NDArray[np.bool_]:
        """Which decisions are taken (D,)."""
        x = values[self._options]
        return (np.minimum(x, 1.0 - x) <= INTEGRAL).all(axis=1)

    def _chosen(self, part: Part) -> tuple[int, int, float]:
        """The decision to branch on, its option with the largest value, and how unlike those are that are mixed."""
        x = np.where(self._are, part.known.values[self._options], 0.0)
        mixed = self._mixed(x)
        option, largest = x.argmax(axis=1), x.max(axis=1)
        stakes = mixed / np.maximum(2.0 * largest * (1.0 - largest), NEAR)
        enough = self._limit - part.bound
        rises = np.minimum(self._rises.expected(np.array([1.0 - largest, largest]), stakes), enough)
        worth = np.maximum(rises, LEAST * abs(part.bound)).prod(axis=0)
        worth[self._whole(part.known.values)] = -1.0
        chosen = int(np.lexsort((-mixed.round(9), -worth.round(12)))[0])
        return chosen, int(self._options[chosen, option[chosen]]), float(stakes[chosen])

    def _mixed(self, x: Array) -> Array:
        """How unlike those options are that every decision mixes (D,): values (D, options)."""
        mixed: Array = (x * np.abs(self._takes - (x * self._takes).sum(axis=1, keepdims=True))).sum(axis=1)
        return mixed

    def _most_rise(self, part: Part) -> float:
        """What the bound of a half without a point is taken to have risen by."""
        far = NO_POINT * abs(part.bound)
        return far if self._limit == np.inf else max(far, self._limit - part.bound)

    def _without_dearer(self, part: Part) -> Array:
        if self._limit == np.inf:
            return part.upper
        x, reduced = part.known.values, part.known.reduced_costs
        assert reduced is not None
        worth = self._limit - part.bound + INTEGRAL * abs(self._limit)
        return np.where((part.upper == 1.0) & (x < INTEGRAL) & (reduced > worth), 0.0, part.upper)

    def _part(
        self, upper: Array, whole: Part, parameters: parameters_pb2.SolveParametersProto = RELAXED
    ) -> Part | None:
        """The choices of ``whole`` within these bounds; None if there are none, or none that may be better than the
        best, or if the simplex method fails, and then all that is known of them is what is known of ``whole``."""
        start = None if any(whole is part for part in self._near) else whole.basis
        self.solver.limit(upper)
        self.solved += 1
        relaxed = self.solver.solve(until(parameters, self._worth), reduced=True, start=start)
        self._steps += self.solver.steps
        basis, ended = self.solver.basis, self.solver.ended
        self._near = [whole] if self.solver.steps <= STEPS else []
        if relaxed is not None and relaxed.is_optimal:
            part = Part(upper, relaxed.objective, relaxed, basis)
            self._near.append(part)
            return part
        if ended == "infeasible":
            return None
        proved = max(whole.bound, self.solver.proved) if ended == "no_solution_found" else whole.bound
        if parameters is BEGUN and proved < self._worth and self.solver.steps >= PATIENCE:
            return Part(upper, proved, None, basis)
        self.bound = min(self.bound, proved)
        return None
