"""The program of strategies as a linear program, solved again and again from its last optimum.

With barriers and while memory does not bind, sizes change the objective of ``milp`` alone. Its linear relaxation is
nearly always integral (feasibility.md section 5), and then its optimum is the program's. So it is kept in a simplex
solver (GLOP): the first solution is found from nothing, every later one from the basis of the one before, of the last
one with the same options forced if there is one. The dual simplex does both, without presolve, which would take longer
than most solutions and hide the basis: half the seconds of primal steps from the last optimum.

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

import numpy as np
from ortools.math_opt import model_pb2, parameters_pb2, solution_pb2

from hap.fabric import Array
from hap.search.branches import INTEGRAL, RELAXED, Branches, Decision, Part
from hap.search.protos import HIGHS, KeptSolver, Solution, branching, solve_once, until

WORK = 4_000_000_000  # squared variables times relaxations of one program, before what is left is given to HiGHS
LARGE = 100  # relaxations that come to more than that: what was left to HiGHS took it minutes where memory is full
MOST = 300  # relaxations of a large one
NEAR = 1e-4  # of its objective, for each relaxation that was solved: near enough to the bound


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
        relaxed = model_pb2.ModelProto()
        relaxed.CopyFrom(proto)
        relaxed.variables.integers[:] = [False] * len(self.integers)
        self.solver = KeptSolver(relaxed)
        self.lower, self.upper = np.array(proto.variables.lower_bounds), np.array(proto.variables.upper_bounds)
        self.is_empty = False  # whether what was asked last is proved to have no point
        self.is_given_up = False  # whether none was met in time, and no more is to be asked
        self._bases: dict[bytes, solution_pb2.BasisProto] = {}  # of the last optimum for each upper bounds
        self._asked: tuple[bytes, bytes, float, int, float] | None = None  # last
        self._found: Solution | None = None

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
        where there is none, or none that is found in this way. ``start``: a basis to begin from, else that of the last
        optimum for these upper bounds, if there was one; ``gap``: relative; ``nodes``: of branch and bound, at most;
        ``below``: points that cost as much or more are none. Asked for the same again, nothing is solved."""
        upper = self.upper if upper is None else upper
        asked = cost.tobytes(), upper.tobytes(), gap, nodes, below
        if asked != self._asked:
            self._asked, self._found = asked, self._solve(cost, upper, start, gap, nodes, below)
        return self._found

    def _solve(
        self, cost: Array, upper: Array, start: solution_pb2.BasisProto | None, gap: float, nodes: int, below: float
    ) -> Solution | None:
        self.solver.limit(upper)
        self.solver.minimise(cost)
        limit = below + INTEGRAL * abs(below)  # where there is no point, the steps would go on to the end
        start = self._bases.get(upper.tobytes()) if start is None else start
        relaxed = self.solver.solve(until(RELAXED, limit), reduced=True, start=start)
        if self.solver.basis is not None:
            self._bases[upper.tobytes()] = self.solver.basis
        self.is_empty, self.is_given_up = self.solver.ended == "infeasible" or self._is_above(below), False
        if relaxed is None or not relaxed.is_optimal:
            return None
        if relaxed.objective >= below:
            self.is_empty = True
            return None
        between = np.minimum(np.abs(relaxed.values), np.abs(relaxed.values - 1)) > INTEGRAL
        if not (between & self.integers).any():
            return relaxed
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

    def _is_above(self, below: float) -> bool:
        """Whether the solver ended early, as it had proved that every point costs so much."""
        return self.solver.ended == "no_solution_found" and self.solver.proved >= below

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
        tree = Branches(self.solver, self.decisions, self.stakes, most, below, near, self.check)
        tree.search(Part(upper, relaxed.objective, relaxed, self.solver.basis))
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
