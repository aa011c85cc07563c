"""A linear program while it is written out: variables with what they cost, one row after another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from ortools.math_opt import model_pb2

from hap.search.milp import MS, SMALLEST
from hap.search.protos import KeptSolver, fill_matrix


class Rows:
    """Seconds are to be minimised. Variables are at least 0, and at most ``upper``."""

    def __init__(self) -> None:
        self.cost: list[float] = []  # in ms
        self.names: list[str] = []  # of the kinds of variables
        self.upper: dict[int, float] = {}
        self.row_names: list[str] = []
        self.row_bounds: list[tuple[float, float]] = []
        self.entries: list[tuple[int, int, float]] = []

    def _variable(self, name: str, seconds: float) -> int:
        self.names.append(name)
        self.cost.append(seconds * MS)
        return len(self.names) - 1

    def _row(self, name: str, lower: float, upper: float, terms: Sequence[tuple[int, float]]) -> int:
        row = len(self.row_names)
        self.entries += [(row, v, k) for v, k in terms]
        self.row_names.append(name)
        self.row_bounds.append((lower, upper))
        return row

    def _always(self) -> int:
        """A variable that is 1."""
        variable = self._variable("always", 0.0)
        self._row("always", 1.0, 1.0, [(variable, 1.0)])
        return variable

    @cached_property
    def solver(self) -> KeptSolver:
        return KeptSolver(self.program())

    def program(self) -> model_pb2.ModelProto:
        used = [i for i, c in enumerate(self.cost) if abs(c) >= SMALLEST]
        proto = model_pb2.ModelProto(name="relaxation")
        proto.variables.ids.extend(range(len(self.names)))
        proto.variables.lower_bounds.extend([0.0] * len(self.names))
        proto.variables.upper_bounds.extend([self.upper.get(v, np.inf) for v in range(len(self.names))])
        proto.variables.integers.extend([False] * len(self.names))
        proto.objective.linear_coefficients.ids.extend(used)
        proto.objective.linear_coefficients.values.extend([self.cost[i] for i in used])
        proto.linear_constraints.ids.extend(range(len(self.row_names)))
        proto.linear_constraints.lower_bounds.extend([lower for lower, _ in self.row_bounds])
        proto.linear_constraints.upper_bounds.extend([upper for _, upper in self.row_bounds])
        fill_matrix(proto, self.entries, np.zeros((0, len(self.names))), len(self.row_names))
        return proto
