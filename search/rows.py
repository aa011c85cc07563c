"""A linear program while it is written out: variables with what they cost, one row after another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from ortools.math_opt import model_pb2

from hap.search.milp import MS, SMALLEST
from hap.search.protos import KeptSolver, fill_matrix


class Rows:
    """Seconds are to be minimised. Variables are at least 0, and at most ``upper``. ``begun``: variables and rows that
    are there already, and cost nothing; ``entries`` are of the rows after them."""

    def __init__(self, begun: Rows | None = None) -> None:
        self.begun = begun
        self.cost: list[float] = [] if begun is None else [0.0] * len(begun.names)  # in ms
        self.names: list[str] = [] if begun is None else list(begun.names)  # of the kinds of variables
        self.upper: dict[int, float] = {} if begun is None else dict(begun.upper)
        self.row_names: list[str] = [] if begun is None else list(begun.row_names)
        self.row_bounds: list[tuple[float, float]] = [] if begun is None else list(begun.row_bounds)
        self.entries: list[tuple[int, int, float]] = []

    @property
    def shape(self) -> tuple[int, int]:
        """How many variables and rows."""
        return len(self.names), len(self.row_names)

    def _variable(self, name: str, seconds: float = 0.0) -> int:
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
        variable = self._variable("always")
        self._row("always", 1.0, 1.0, [(variable, 1.0)])
        return variable

    @cached_property
    def solver(self) -> KeptSolver:
        return KeptSolver(self.program())

    def program(self) -> model_pb2.ModelProto:
        proto = model_pb2.ModelProto(name="relaxation")
        proto.CopyFrom(self._rows)
        used = [i for i, c in enumerate(self.cost) if abs(c) >= SMALLEST]
        proto.objective.linear_coefficients.ids.extend(used)
        proto.objective.linear_coefficients.values.extend([self.cost[i] for i in used])
        return proto

    @cached_property
    def _rows(self) -> model_pb2.ModelProto:
        """The program, of which nothing costs anything. Asked for once no more is added."""
        proto = model_pb2.ModelProto(name="relaxation")
        if self.begun is not None:
            proto.CopyFrom(self.begun._rows)
        variables, rows = len(proto.variables.ids), len(proto.linear_constraints.ids)
        proto.variables.ids.extend(range(variables, len(self.names)))
        proto.variables.lower_bounds.extend([0.0] * (len(self.names) - variables))
        proto.variables.upper_bounds.extend([self.upper.get(v, np.inf) for v in range(variables, len(self.names))])
        proto.variables.integers.extend([False] * (len(self.names) - variables))
        proto.linear_constraints.ids.extend(range(rows, len(self.row_names)))
        proto.linear_constraints.lower_bounds.extend([lower for lower, _ in self.row_bounds[rows:]])
        proto.linear_constraints.upper_bounds.extend([upper for _, upper in self.row_bounds[rows:]])
        fill_matrix(proto, self.entries, np.zeros((0, len(self.names))), len(self.row_names))
        return proto
