"""A basis to begin from, for a linear program that has a part twice: made of one that has taken nothing of the copy.

Where an optimum was found with all variables of the copy at 0, the rows of the copy hold trivially, and what their
prices are is left open: the solver leaves each to its slack, at a price of 0. So far from those of the rows that they
are copies of, they have to be brought there one step at a time. Here the copy is priced like what it is a copy of:
of its variables those are basic that are so there, as far as they are independent of each other. Nothing but what is at
0 becomes basic, so the point is the same.

They are chosen one by one, so that what is chosen is triangular: a variable that is in one more row than is covered
yet covers that row; where there is none, a row is left to its slack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from ortools.math_opt import solution_pb2

BASIC, AT_LOWER = solution_pb2.BASIS_STATUS_BASIC, solution_pb2.BASIS_STATUS_AT_LOWER_BOUND


def with_copies(
    basis: solution_pb2.BasisProto,
    variables: Mapping[int, int],
    rows: Mapping[int, int],
    entries: Iterable[tuple[int, int, float]],
) -> solution_pb2.BasisProto:
    """The basis with the ``variables`` and ``rows`` of the copy, which it has taken nothing of, like those that they
    are copies of. ``entries``: of the program: row, variable, coefficient. A basis that has taken some is left as it
    is."""
    of_variable, of_row = list(basis.variable_status.values), list(basis.constraint_status.values)
    assert list(basis.variable_status.ids) == list(range(len(of_variable))), "every variable has a status"
    assert list(basis.constraint_status.ids) == list(range(len(of_row))), "every row has a status"
    if any(of_variable[v] == BASIC for v in variables) or any(of_row[r] != BASIC for r in rows):
        return basis
    columns: dict[int, list[int]] = {}
    for row, v, _ in entries:
        if row in rows and v in variables and of_variable[variables[v]] == BASIC:
            columns.setdefault(v, []).append(row)
    uncovered = [row for row, twin in rows.items() if of_row[twin] != BASIC]
    chosen = _triangular(columns, uncovered)
    for row in uncovered:
        if row in chosen:
            of_row[row] = of_row[rows[row]]
    covering = set(chosen.values())
    for v in variables:
        of_variable[v] = BASIC if v in covering else AT_LOWER
    found = solution_pb2.BasisProto()
    found.CopyFrom(basis)
    found.variable_status.values[:] = of_variable
    found.constraint_status.values[:] = of_row
    return found


def _triangular(columns: Mapping[int, Sequence[int]], uncovered: Sequence[int]) -> dict[int, int]:
    """Row -> the variable that covers it. ``columns``: the rows of each variable."""
    are_open, readers = set(uncovered), dict[int, list[int]]()
    many = dict[int, int]()  # of a variable's rows are open
    for v, rows in columns.items():
        mine = are_open.intersection(rows)
        many[v] = len(mine)
        for row in mine:
            readers.setdefault(row, []).append(v)
    ready, found = deque(v for v, count in many.items() if count == 1), dict[int, int]()

    def close(row: int) -> None:
        are_open.remove(row)
        for v in readers.get(row, ()):
            many[v] -= 1
            if many[v] == 1:
                ready.append(v)

    for unless_covered in uncovered:
        while ready:
            v = ready.popleft()
            if many[v] == 1:
                row = next(row for row in columns[v] if row in are_open)
                found[row] = v
                close(row)
        if unless_covered in are_open:
            close(unless_covered)
    return found
