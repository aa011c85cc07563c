"""A program in a solver whose steps do not come to an end is solved once more."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from hap.search.protos import KeptSolver, dual_steps, until


def program() -> model_pb2.ModelProto:
    """8 rows, each of two neighbours: several steps."""
    model = mathopt.Model()
    x = [model.add_variable(lb=0.0) for _ in range(9)]
    for i, (a, b) in enumerate(pairwise(x)):
        model.add_linear_constraint(a + b >= i + 1)
    model.minimize(sum((1 + i % 3) * v for i, v in enumerate(x)))
    return model.export_model()


@pytest.mark.parametrize("limit", [float("inf"), 1.0])
def test_once_more_without_the_limit_that_was_of_the_costs_as_they_are(limit: float) -> None:
    expected = KeptSolver(program()).solve(dual_steps())
    solver, asked = KeptSolver(program()), list[Any]()
    ask = solver._ask

    def limited_at_first(parameters: Any, wanted: Any) -> Any:
        asked.append(parameters)
        solver._most = 1 if len(asked) == 1 else 1_000
        return ask(parameters, wanted)

    solver._ask = limited_at_first  # type: ignore[method-assign]
    found = solver.solve(until(dual_steps(), limit))
    assert [p.glop.perturb_costs_in_dual_simplex for p in asked] == [False, True] and solver.steps > 1
    assert expected is not None and found is not None and found.is_optimal
    assert found.objective == pytest.approx(expected.objective)
