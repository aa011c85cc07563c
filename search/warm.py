"""The program of strategies as a linear program, solved again and again from its last optimum.

With barriers and while memory does not bind, sizes change the objective of ``milp`` alone. Its linear relaxation is
nearly always integral (feasibility.md section 5), and then its optimum is the program's. So it is kept in a simplex
solver (GLOP): the first solution is found from nothing, every later one from the basis of the one before, which stays
feasible. Where a point is not integral, ``milp.choose`` branches, as without this.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from hap.fabric import Array

SEED = 20240601
INTEGRAL = 1e-6  # a value this close to 0 or 1 is 0 or 1


class Point(NamedTuple):
    """An optimal integral point: ``values`` (V,), the objective and its proved bound."""

    values: Array
    objective: float
    bound: float


class WarmProgram:
    """One set of rows and upper bounds; the objective changes from solution to solution."""

    def __init__(self, proto: model_pb2.ModelProto) -> None:
        count = len(proto.variables.ids)
        self.integers = np.array(proto.variables.integers, dtype=bool)
        relaxed = model_pb2.ModelProto()
        relaxed.CopyFrom(proto)
        del relaxed.variables.integers[:]
        relaxed.variables.integers.extend([False] * count)
        self.cost = _objective(relaxed)
        self.model = mathopt.Model.from_model_proto(relaxed)
        self.variables = list(self.model.variables())
        self.solver = mathopt.IncrementalSolver(self.model, mathopt.SolverType.GLOP)
        self.solved = False

    def solve(self, cost: Array) -> Point | None:
        """The optimum for an objective (V,). None where there is none, or none that is integral."""
        objective = self.model.objective
        for i in np.flatnonzero(cost != self.cost).tolist():
            objective.set_linear_coefficient(self.variables[i], float(cost[i]))
        self.cost = cost
        nothing = mathopt.SparseVectorFilter(filtered_items=())  # type: ignore[var-annotated]
        wanted = mathopt.ModelSolveParameters(
            variable_values_filter=mathopt.SparseVectorFilter(skip_zero_values=True),
            dual_values_filter=nothing,
            reduced_costs_filter=nothing,
        )
        simplex = mathopt.LPAlgorithm.PRIMAL_SIMPLEX if self.solved else mathopt.LPAlgorithm.DUAL_SIMPLEX
        parameters = mathopt.SolveParameters(random_seed=SEED, lp_algorithm=simplex)
        result = self.solver.solve(params=parameters, model_params=wanted)
        if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
            return None
        self.solved = True
        values = np.zeros(len(self.variables))
        for variable, value in result.variable_values().items():
            values[variable.id] = value
        decided = values[self.integers]
        if (np.minimum(np.abs(decided), np.abs(decided - 1)) > INTEGRAL).any():
            return None
        return Point(values, result.objective_value(), result.dual_bound())


def _objective(proto: model_pb2.ModelProto) -> Array:
    """(V,)"""
    cost = np.zeros(len(proto.variables.ids))
    linear = proto.objective.linear_coefficients
    cost[list(linear.ids)] = list(linear.values)
    return cost
