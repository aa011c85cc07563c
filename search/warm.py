"""The program of strategies as a linear program, solved again and again from its last optimum.

With barriers and while memory does not bind, sizes change the objective of ``milp`` alone. Its linear relaxation is
nearly always integral (feasibility.md section 5), and then its optimum is the program's. So it is kept in a simplex
solver (GLOP): the first solution is found from nothing, every later one from the basis of the one before. The dual
simplex does both, without presolve, which would take longer than most solutions and hide the basis: half the seconds
of primal steps from the last optimum. Where a point is not integral, what is keeps its value and the rest is branched
on: a small program. If that costs no more than ``gap`` above the relaxation, which is below every choice, it is the
optimum to that tolerance; else ``milp.choose`` branches on everything, as without this.
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
        found = self.solver.solve(seeded(lp_algorithm=DUAL, presolve=OFF))
        if found is None or not found.is_optimal:
            return None
        between = np.minimum(np.abs(found.values), np.abs(found.values - 1)) > INTEGRAL
        return self._completed(cost, found, between) if (between & self.integers).any() else found

    def _completed(self, cost: Array, relaxed: Solution, between: NDArray[np.bool_]) -> Solution | None:
        """The integral part of a point kept, the rest branched on."""
        proto, kept = model_pb2.ModelProto(), np.flatnonzero(self.integers & ~between)
        proto.CopyFrom(self.proto)
        lower, upper = (np.array(b) for b in (proto.variables.lower_bounds, proto.variables.upper_bounds))
        lower[kept] = upper[kept] = relaxed.values[kept].round()
        proto.variables.lower_bounds[:], proto.variables.upper_bounds[:] = lower.tolist(), upper.tolist()
        used = np.flatnonzero(cost)
        proto.objective.linear_coefficients.ids[:] = used.tolist()
        proto.objective.linear_coefficients.values[:] = cost[used].tolist()
        found = solve_once(proto, HIGHS, branching(self.gap, self.nodes))
        if found is None or found.objective - relaxed.objective > self.gap * abs(found.objective):
            return None
        return Solution(found.values, found.objective, relaxed.objective, relaxed.status)
