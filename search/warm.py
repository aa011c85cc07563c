"""The program of strategies as a linear program, solved again and again from its last optimum.

With barriers and while memory does not bind, sizes change the objective of ``milp`` alone. Its linear relaxation is
nearly always integral, and then its optimum is the program's. So it is kept in simplex
solvers (GLOP): the first solution is found from nothing, every later one from the basis of the one whose objective was
most like it, whatever its scale. The dual simplex does both, without presolve, which would take longer than most
solutions and hide the basis: half the seconds of primal steps from the last optimum. Before its first step it weighs
all rows of a basis, which takes as long as many steps do, unless the solver is there already and only bounds have
changed. So the last few objectives each have a solver of their own.

Where only points below some cost are asked for, the dual steps, which raise what is proved, end once that is more.

Where a point is not integral, what is keeps its value and the rest is branched on: a small program, with an optimum U.
If that costs no more than ``gap`` above the relaxation's L, which is below every choice, it is the optimum to that
tolerance. Else everything is branched on but what reduced costs rule out. With d >= 0 the reduced cost of a variable
that is 0 in the relaxation, a point where it is 1 costs at least L + d: if that is above U it is 0 in every better
choice. In a choice not only the decisions are 0 or 1: they fix the flows, and a conversion is the largest of its flows,
or can be, since it costs no less than nothing and holds memory. Of what is left HiGHS' presolve removes most, where on
the whole program it takes ten times as long.

Where the decisions are named, as they are of programs with rows of memory, they are branched on first, with the same
solver (``branches``). That nearly always ends with the optimum; what it leaves open goes to HiGHS as above, with U the
best point that it met. Of a large program that would take minutes: there the best point is taken that is near enough,
or is met in time, and HiGHS is asked only if there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from ortools.math_opt import model_pb2, parameters_pb2, solution_pb2

from hap.fabric import Array
from hap.search.branches import INTEGRAL, RELAXED, Branches, Decision, Part
from hap.search.protos import HIGHS, KeptSolver, Solution, branching, solve_once, until

WORK = 4_000_000_000  # squared variables times relaxations of one program, before what is left is given to HiGHS
LARGE = 100  # relaxations that come to more than that: what was left to HiGHS took it minutes where memory is full
MOST = 300  # relaxations of a large one
KEPT = 3  # solvers of a program: it takes a while to make one
TINY = 1e-12  # of an objective: nothing costs anything
NEAR = 1e-4  # of its objective, for each relaxation that was solved: near enough to the bound


class Ended(NamedTuple):
    """The basis of an optimum, and what it was for: objective (V,) and upper bounds (V,)."""

    cost: Array
    upper: Array
    basis: solution_pb2.BasisProto

    def is_unlike(self, cost: Array, upper: Array) -> tuple[float, int]:
        """How much another objective is unlike this one, whatever its scale, and how many of its bounds."""
        scale = float((self.cost * cost).sum()) / max(float((self.cost * self.cost).sum()), TINY)
        return float(np.abs(cost - scale * self.cost).sum()), int((upper != self.upper).sum())


class Answer(NamedTuple):
    """What was found; if that is nothing, whether there is proved to be none, or it was given up; and the basis of the
    relaxation's optimum."""

    found: Solution | None
    is_empty: bool
    is_given_up: bool
    basis: solution_pb2.BasisProto | None


class WarmProgram:
    """One set of rows; the objective and the upper bounds change from solution to solution. ``decisions``: all integer
    variables in sets of which exactly one is 1, and the ``stakes`` (V,), if they are to be branched on here (see
    ``branches``). ``check`` is called while they are, and may end it by an exception."""

    def __init__(
        self,
        proto: model_pb2.ModelProto,
        decisions: Sequence[Decision] = (),
        stakes: Array | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.proto, self.decisions, self.stakes, self.check = proto, decisions, stakes, check
        self.integers = np.array(proto.variables.integers, dtype=bool)
        assert not decisions or (np.sort(np.concatenate(decisions)) == np.flatnonzero(self.integers)).all()
        self.relaxed = model_pb2.ModelProto()
        self.relaxed.CopyFrom(proto)
        self.relaxed.variables.integers[:] = [False] * len(self.integers)
        self.lower, self.upper = np.array(proto.variables.lower_bounds), np.array(proto.variables.upper_bounds)
        self.is_empty = False  # whether what was asked last is proved to have no point
        self.is_given_up = False  # whether none was met in time, and no more is to be asked
        self.basis: solution_pb2.BasisProto | None = None  # of the relaxation's optimum
        self._solvers: list[KeptSolver] = []  # the one that was asked last is the last
        self._ended: list[Ended] = []
        self._known: dict[tuple[bytes, bytes, float, int, float], Answer] = {}

    def solve(
        self,
        cost: Array,
        upper: Array | None = None,
        *,
        start: solution_pb2.BasisProto | None = None,
        gap: float = 1e-6,
        nodes: int = 1000,
        below: float = np.inf,
    ) -> Solution | None:
        """The optimum for an objective (V,) and upper bounds (V,), those of the program if there are no others. None
        where there is none, or none that is found in this way. ``start``: a basis to begin from, if it is not to be
        chosen here; ``gap``: relative; ``nodes``: of branch and bound, at most; ``below``: points that cost as much or
        more are none. Asked for the same again, nothing is solved."""
        upper = self.upper if upper is None else upper
        asked = cost.tobytes(), upper.tobytes(), gap, nodes, below
        if asked not in self._known:
            found = self._solve(cost, upper, start, gap, nodes, below)
            self._known[asked] = Answer(found, self.is_empty, self.is_given_up, self.basis)
        found, self.is_empty, self.is_given_up, self.basis = self._known[asked]
        return found

    def _solve(
        self, cost: Array, upper: Array, start: solution_pb2.BasisProto | None, gap: float, nodes: int, below: float
    ) -> Solution | None:
        solver, is_there = self._solver(cost)
        solver.limit(upper)
        solver.minimise(cost)
        limit = below + INTEGRAL * abs(below)  # where there is no point, the steps would go on to the end
        start = self._nearest(cost, upper) if start is None and not is_there else start
        relaxed = solver.solve(until(RELAXED, limit), reduced=bool(self.decisions), start=start)
        self.basis = solver.basis
        if self.basis is not None:
            self._ended.append(Ended(cost, upper, self.basis))
        self.is_empty, self.is_given_up = solver.ended == "infeasible" or self._is_above(below), False
        if relaxed is None or not relaxed.is_optimal:
            return None
        if relaxed.objective >= below:
            self.is_empty = True
            return None
        between = np.minimum(np.abs(relaxed.values), np.abs(relaxed.values - 1)) > INTEGRAL
        if not (between & self.integers).any():
            return relaxed
        if not self.decisions:  # which is rare enough to ask for its reduced costs, too, only then
            relaxed = solver.solve(until(RELAXED, limit), reduced=True)
            assert relaxed is not None and relaxed.is_optimal, "no step is left to be made"
        kept = self.integers & ~between
        whole, branch = relaxed.values.round(), partial(self._branched, cost, branching(gap, nodes))
        found, bound = self._by_decisions(upper, relaxed, below)
        is_open = found is None and not self.is_empty
        self.is_given_up = is_open and bool(self.decisions) and self._is_large and below < np.inf
        if is_open and not self.is_given_up:
            found = branch(np.where(kept, whole, self.lower), np.where(kept, whole, upper))
        if found is None:
            return None
        if found.objective - bound <= gap * abs(found.objective):
            return Solution(found.values, found.objective, min(bound, found.objective), relaxed.status)
        if self.decisions and self._is_large:
            return found._replace(bound=bound, status="feasible")
        assert relaxed.reduced_costs is not None
        worth = found.objective - relaxed.objective + INTEGRAL * abs(found.objective)
        ruled_out = (upper == 1.0) & (relaxed.values < INTEGRAL) & (relaxed.reduced_costs > worth)
        rest = branch(self.lower, np.where(ruled_out, 0.0, upper))
        if rest is None:
            return found._replace(bound=bound, status="feasible")
        best = min(rest, found, key=lambda point: point.objective)
        return best._replace(bound=min(max(rest.bound, bound), best.objective), status=rest.status)

    def _solver(self, cost: Array) -> tuple[KeptSolver, bool]:
        """The solver for this objective, and whether it ended at an optimum for it; if there is none, another one, or
        if these are enough the one that was asked longest ago."""
        there = [s for s in self._solvers if s.basis is not None and np.array_equal(s.cost, cost)]
        if there:
            self._solvers.remove(there[0])
        full = len(self._solvers) == KEPT
        found = there[0] if there else self._solvers.pop(0) if full else KeptSolver(self.relaxed)
        self._solvers.append(found)
        return found, bool(there)

    def _nearest(self, cost: Array, upper: Array) -> solution_pb2.BasisProto | None:
        """The basis of the optimum for the most alike objective, of equal ones for the most alike upper bounds, of
        these the last. None if there was none."""
        found = min(reversed(self._ended), key=lambda ended: ended.is_unlike(cost, upper), default=None)
        return None if found is None else found.basis

    def _is_above(self, below: float) -> bool:
        """Whether the solver ended early, as it had proved that every point costs so much."""
        solver = self._solvers[-1]
        return solver.ended == "no_solution_found" and solver.proved >= below

    @property
    def _is_large(self) -> bool:
        return len(self.upper) ** 2 * LARGE > WORK

    def _by_decisions(self, upper: Array, relaxed: Solution, below: float) -> tuple[Solution | None, float]:
        """The best point that ``Branches`` finds, and what no point is below; None where there are no decisions, and
        where there is no point, which ``is_empty`` then says."""
        if not self.decisions:
            return None, relaxed.objective
        assert self.stakes is not None
        most, near = (MOST, NEAR) if self._is_large else (WORK // len(upper) ** 2, 0.0)
        tree = Branches(self._solvers[-1], self.decisions, self.stakes, most, below, near, self.check)
        tree.search(Part(upper, relaxed.objective, relaxed, self.basis))
        self.is_empty = tree.best is None and tree.bound >= below
        return tree.best, tree.bound

    def _branched(
        self, cost: Array, parameters: parameters_pb2.SolveParametersProto, lower: Array, upper: Array
    ) -> Solution | None:
        """The best point between these bounds of the variables (V,)."""
        proto, used = model_pb2.ModelProto(), np.flatnonzero(cost)
        proto.CopyFrom(self.proto)
        proto.variables.lower_bounds[:], proto.variables.upper_bounds[:] = lower.tolist(), upper.tolist()
        proto.objective.linear_coefficients.ids[:] = used.tolist()
        proto.objective.linear_coefficients.values[:] = cost[used].tolist()
        return solve_once(proto, HIGHS, parameters)
