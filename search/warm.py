"""The program of strategies as a linear program, solved again and again from its last optimum.

With barriers and while memory does not bind, sizes change the objective of ``milp`` alone. Its linear relaxation is
nearly always integral (feasibility.md section 5), and then its optimum is the program's. So it is kept in a simplex
solver (GLOP): the first solution is found from nothing, every later one from the basis of the one before. The dual
simplex does both, without presolve, which would take longer than most solutions and hide the basis: half the seconds
of primal steps from the last optimum. Where a point is not integral, ``milp.choose`` branches, as without this.
"""

from __future__ import annotations

import numpy as np
from ortools.math_opt import model_pb2

from hap.fabric import Array
from hap.search.protos import DUAL, OFF, KeptSolver, Solution, seeded

INTEGRAL = 1e-6  # a value this close to 0 or 1 is 0 or 1


class WarmProgram:
    """One set of rows and upper bounds; the objective changes from solution to solution."""

    def __init__(self, proto: model_pb2.ModelProto) -> None:
        self.integers = np.array(proto.variables.integers, dtype=bool)
        relaxed = model_pb2.ModelProto()
        relaxed.CopyFrom(proto)
        relaxed.variables.integers[:] = [False] * len(self.integers)
        self.solver = KeptSolver(relaxed)

    def solve(self, cost: Array) -> Solution | None:
        """The optimum for an objective (V,). None where there is none, or none that is integral."""
        self.solver.minimise(cost)
        found = self.solver.solve(seeded(lp_algorithm=DUAL, presolve=OFF))
        if found is None or not found.is_optimal:
            return None
        decided = found.values[self.integers]
        between = np.minimum(np.abs(decided), np.abs(decided - 1)) > INTEGRAL
        return None if between.any() else found
