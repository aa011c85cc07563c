"""Programs and solutions as MathOpt's messages: no Python object per variable, row or status, which takes longer than
many a solution. ``KeptSolver`` stays with one program whose objective and upper bounds change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ortools.math_opt import (
    callback_pb2,
    model_parameters_pb2,
    model_pb2,
    model_update_pb2,
    parameters_pb2,
    result_pb2,
    solution_pb2,
    sparse_containers_pb2,
)
from ortools.math_opt.core.python import solver
from ortools.math_opt.solvers import highs_pb2

from hap.fabric import Array

SEED = 20240601
GOING_ROUND = 10  # steps of the simplex method for every row and variable: programs take less than one
GLOP, HIGHS = parameters_pb2.SOLVER_TYPE_GLOP, parameters_pb2.SOLVER_TYPE_HIGHS
DUAL, OFF = parameters_pb2.LP_ALGORITHM_DUAL_SIMPLEX, parameters_pb2.EMPHASIS_OFF


class Solution(NamedTuple):
    """The best point (V,), its objective, what was proved of it, in what state the solver ended, and where they were
    asked for the reduced costs (V,)."""

    values: Array
    objective: float
    bound: float
    status: str
    reduced_costs: Array | None = None

    @property
    def is_optimal(self) -> bool:
        return self.status == "optimal"


def seeded(**options: object) -> parameters_pb2.SolveParametersProto:
    return parameters_pb2.SolveParametersProto(random_seed=SEED, **options)


DUAL_STEPS = seeded(lp_algorithm=DUAL, presolve=OFF)


def branching(gap: float, nodes: int) -> parameters_pb2.SolveParametersProto:
    """For HiGHS: until so near to the optimum, relatively, or so many nodes have been looked at."""
    highs = highs_pb2.HighsOptionsProto()
    highs.string_options["parallel"] = "off"
    return seeded(relative_gap_tolerance=gap, node_limit=nodes, highs=highs)


def dual_steps(**options: object) -> parameters_pb2.SolveParametersProto:
    """GLOP's dual steps without presolve, by prices that favour rows of small norms: from nothing half the seconds."""
    found = seeded(lp_algorithm=DUAL, presolve=OFF, **options)
    found.glop.dual_price_prioritize_norm = True
    return found


def until(parameters: parameters_pb2.SolveParametersProto, limit: float) -> parameters_pb2.SolveParametersProto:
    """The same for GLOP's dual steps, each of which raises what is proved: no further than to the proof that every
    point costs more than ``limit``."""
    if limit == np.inf:
        return parameters
    found = parameters_pb2.SolveParametersProto()
    found.CopyFrom(parameters)
    found.glop.objective_upper_limit = limit
    return found


class KeptSolver:
    """One program in a solver, solved again from where it ended last."""

    def __init__(self, proto: model_pb2.ModelProto, kind: int = GLOP) -> None:
        self.width = len(proto.variables.ids)
        self.cost = np.zeros(self.width)
        linear = proto.objective.linear_coefficients
        self.cost[list(linear.ids)] = list(linear.values)
        self.upper = np.array(proto.variables.upper_bounds)
        self.basis: solution_pb2.BasisProto | None = None  # of the last solution of a linear program
        self.ended = ""  # in what state it was left last
        self.steps = 0  # of the simplex method, then
        self.proved = -np.inf  # what no point was below then
        self._most = 1 + GOING_ROUND * (self.width + len(proto.linear_constraints.ids)) if kind == GLOP else None
        self._solver = solver.new(kind, proto, parameters_pb2.SolverInitializerProto())

    def minimise(self, cost: Array) -> None:
        """Another objective (V,)."""
        changed = np.flatnonzero(cost != self.cost)
        self.cost = cost
        if len(changed):
            update = model_update_pb2.ModelUpdateProto()
            update.objective_updates.linear_coefficients.ids.extend(changed.tolist())
            update.objective_updates.linear_coefficients.values.extend(cost[changed].tolist())
            self._update(update, "an objective")

    def limit(self, upper: Array) -> None:
        """Other upper bounds (V,)."""
        changed = np.flatnonzero(upper != self.upper)
        self.upper = upper
        if len(changed):
            update = model_update_pb2.ModelUpdateProto()
            update.variable_updates.upper_bounds.ids.extend(changed.tolist())
            update.variable_updates.upper_bounds.values.extend(upper[changed].tolist())
            self._update(update, "bounds")

    def _update(self, update: model_update_pb2.ModelUpdateProto, what: str) -> None:
        if not self._solver.update(update):  # no assertion: it is done under ``python -O``, too
            raise AssertionError(f"{what} can be changed in place")

    def solve(
        self,
        parameters: parameters_pb2.SolveParametersProto,
        *,
        reduced: bool = False,
        start: solution_pb2.BasisProto | None = None,
    ) -> Solution | None:
        """None where no feasible point was found. ``reduced``: with reduced costs, of a linear program; ``start``: the
        basis to begin from. Where many points cost the same, GLOP's steps may lead in a circle: then once more, with
        costs that differ a little while it is under way."""
        wanted = model_parameters_pb2.ModelSolveParametersProto()
        wanted.variable_values_filter.skip_zero_values = True
        wanted.dual_values_filter.filter_by_ids = True  # nothing of them is read
        if reduced:
            wanted.reduced_costs_filter.skip_zero_values = True
        else:
            wanted.reduced_costs_filter.filter_by_ids = True
        if start is not None:
            wanted.initial_basis.CopyFrom(start)
        result = self._ask(parameters, wanted)
        if self._most is not None and result.solve_stats.simplex_iterations >= self._most:
            again = parameters_pb2.SolveParametersProto()
            again.CopyFrom(parameters)
            again.lp_algorithm, again.glop.perturb_costs_in_dual_simplex = DUAL, True
            again.glop.ClearField("objective_upper_limit")  # which is of costs as they are
            result = self._ask(again, wanted)
        self.basis = next((s.basis for s in result.solutions if s.HasField("basis")), None)
        self.ended, self.proved = _reason(result), result.termination.objective_bounds.dual_bound
        self.steps = result.solve_stats.simplex_iterations
        return _solution(result, self.width)

    def _ask(
        self, parameters: parameters_pb2.SolveParametersProto, wanted: model_parameters_pb2.ModelSolveParametersProto
    ) -> result_pb2.SolveResultProto:
        if self._most is not None and not parameters.HasField("iteration_limit"):
            limited = parameters_pb2.SolveParametersProto()
            limited.CopyFrom(parameters)
            limited.iteration_limit = self._most
            parameters = limited
        registration = callback_pb2.CallbackRegistrationProto()
        return self._solver.solve(parameters, wanted, None, registration, None, None)


def solve_once(
    proto: model_pb2.ModelProto, kind: int = GLOP, parameters: parameters_pb2.SolveParametersProto | None = None
) -> Solution | None:
    """None where no feasible point was found."""
    return KeptSolver(proto, kind).solve(seeded() if parameters is None else parameters)


def with_rows(basis: solution_pb2.BasisProto, first: int, count: int) -> solution_pb2.BasisProto:
    """The same where so many more rows hold with room to spare, from row ``first`` on."""
    found = solution_pb2.BasisProto()
    found.CopyFrom(basis)
    found.constraint_status.ids.extend(range(first, first + count))
    found.constraint_status.values.extend([solution_pb2.BASIS_STATUS_BASIC] * count)
    return found


def fill_matrix(
    proto: model_pb2.ModelProto, entries: Sequence[tuple[int, int, float]], dense: Array, first: int
) -> None:
    """Sparse entries, then ``dense`` rows from row ``first`` on; sorted by row and column, equal places added up."""
    matrix, width = proto.linear_constraint_matrix, len(proto.variables.ids)
    table = np.array(entries, dtype=np.float64).reshape(len(entries), 3)
    places, inverse = np.unique(
        table[:, 0].astype(np.int64) * width + table[:, 1].astype(np.int64), return_inverse=True
    )
    values = np.bincount(inverse, weights=table[:, 2], minlength=len(places))
    kept = values != 0.0
    rows, columns = np.nonzero(dense)
    matrix.row_ids.extend([*(places[kept] // width).tolist(), *(rows + first).tolist()])
    matrix.column_ids.extend([*(places[kept] % width).tolist(), *columns.tolist()])
    matrix.coefficients.extend([*values[kept].tolist(), *dense[rows, columns].tolist()])


def _solution(result: result_pb2.SolveResultProto, width: int) -> Solution | None:
    feasible = solution_pb2.SOLUTION_STATUS_FEASIBLE
    found = [s for s in result.solutions if s.primal_solution.feasibility_status == feasible]
    if not found:
        return None
    point = found[0].primal_solution
    return Solution(
        _dense(point.variable_values, width),
        point.objective_value,
        result.termination.objective_bounds.dual_bound,
        _reason(result),
        _dense(found[0].dual_solution.reduced_costs, width) if found[0].HasField("dual_solution") else None,
    )


def _reason(result: result_pb2.SolveResultProto) -> str:
    return result_pb2.TerminationReasonProto.Name(result.termination.reason).removeprefix("TERMINATION_REASON_").lower()


def _dense(sparse: sparse_containers_pb2.SparseDoubleVectorProto, width: int) -> Array:
    values = np.zeros(width)
    values[list(sparse.ids)] = list(sparse.values)
    return values
