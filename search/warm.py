"""The program of strategies as a linear program, solved again and again from its last optimum.

With barriers and while memory does not bind, sizes change the objective of ``milp`` alone. Its linear relaxation is
nearly always integral (feasibility.md section 5), and then its optimum is the program's. So it is kept in a simplex
solver (GLOP): the first solution is found from nothing, every later one from the basis of the one before. The dual
simplex does both, without presolve, which would take longer than most solutions and hide the basis: half the seconds
of primal steps from the last optimum.

Where a point is not integral, what is keeps its value and the rest is branched on: a small program, with an optimum U.
If that costs no more than ``gap`` above the relaxation's L, which is below every choice, it is the optimum to that
tolerance. Else everything is branched on but what reduced costs rule out. With d >= 0 the reduced cost of a variable
that is 0 in the relaxation, a point where it is 1 costs at least L + d: if that is above U it is 0 in every better
choice. In a choice not only the decisions are 0 or 1: they fix the flows, and a conversion is the largest of its flows,
or can be, since it costs no less than nothing and holds memory. Of what is left HiGHS' presolve removes most, where on
the whole program it takes ten times as long.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt import model_pb2

from hap.fabric import Array
from hap.search.protos import DUAL, HIGHS, OFF, KeptSolver, Solution, branching, seeded, solve_once

INTEGRAL = 1e-6  # a value this close to 0 or 1 is 0 or 1


class WarmProgram:
    """One set of rows and upper bounds; the objective changes from solution to solution. ``gap``: relative; ``nodes``:
    of branch and bound, at most."""

    def __init__(self, proto: model_pb2.ModelProto, gap: float = 1e-6, nodes: int = 1000) -> None:
        self.proto, self.gap, self.nodes = proto, gap, nodes
        self.integers = np.array(proto.variables.integers, dtype=bool)
        relaxed = model_pb2.ModelProto()
        relaxed.CopyFrom(proto)
        relaxed.variables.integers[:] = [False] * len(self.integers)
        self.solver = KeptSolver(relaxed)

    def solve(self, cost: Array) -> Solution | None:
        """The optimum for an objective (V,). None where there is none, or none that is found in this way."""
        self.solver.minimise(cost)
        relaxed = self.solver.solve(seeded(lp_algorithm=DUAL, presolve=OFF), reduced=True)
        if relaxed is None or not relaxed.is_optimal:
            return None
        between = np.minimum(np.abs(relaxed.values), np.abs(relaxed.values - 1)) > INTEGRAL
        return self._completed(cost, relaxed, between) if (between & self.integers).any() else relaxed

    def _completed(self, cost: Array, relaxed: Solution, between: NDArray[np.bool_]) -> Solution | None:
        """The integral part of a point kept, the rest branched on; where that costs too much, the best of all."""
        lower, upper = (np.array(b) for b in (self.proto.variables.lower_bounds, self.proto.variables.upper_bounds))
        kept = np.flatnonzero(self.integers & ~between)
        lower[kept] = upper[kept] = relaxed.values[kept].round()
        found = self._branched(cost, lower, upper)
        if found is None:
            return None
        if found.objective - relaxed.objective <= self.gap * abs(found.objective):
            return Solution(found.values, found.objective, relaxed.objective, relaxed.status)
        assert relaxed.reduced_costs is not None
        lower, upper = (np.array(b) for b in (self.proto.variables.lower_bounds, self.proto.variables.upper_bounds))
        worth = found.objective - relaxed.objective + INTEGRAL * abs(found.objective)
        upper[(upper == 1.0) & (relaxed.values < INTEGRAL) & (relaxed.reduced_costs > worth)] = 0.0
        return self._branched(cost, lower, upper)

    def _branched(self, cost: Array, lower: Array, upper: Array) -> Solution | None:
        """The best point between these bounds of the variables (V,)."""
        proto, used = model_pb2.ModelProto(), np.flatnonzero(cost)
        proto.CopyFrom(self.proto)
        proto.variables.lower_bounds[:], proto.variables.upper_bounds[:] = lower.tolist(), upper.tolist()
        proto.objective.linear_coefficients.ids[:] = used.tolist()
        proto.objective.linear_coefficients.values[:] = cost[used].tolist()
        return solve_once(proto, HIGHS, branching(self.gap, self.nodes))
