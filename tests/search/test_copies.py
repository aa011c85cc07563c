"""A basis for a program that has a part twice: priced like what it is a copy of, at the same point."""

from __future__ import annotations

import pytest
from ortools.math_opt import solution_pb2

from hap.search.copies import with_copies
from hap.search.milp import MS
from hap.search.protos import DUAL, OFF, seeded
from hap.search.rows import Rows

BASIC = solution_pb2.BASIS_STATUS_BASIC
STEPS = seeded(lp_algorithm=DUAL, presolve=OFF)
PRICES_MS = {(0, 0): 3.0, (0, 1): 5.0, (1, 0): 2.0, (1, 1): 7.0, (2, 0): 4.0, (2, 1): 1.0}  # from, to


class Twice(Rows):
    """Three places make one each, two take half of it all, at a price for every way; and there is all of it again, half
    as dear, whose part of what is made is free."""

    def __init__(self) -> None:
        super().__init__()
        (own, rows, made), (other, others, again) = self._part(1.0), self._part(0.5)
        self.copies, self.copied = dict(zip(other, own, strict=True)), dict(zip(others, rows, strict=True))
        for one, two in zip(made, again, strict=True):
            self._row("one", 1.0, 1.0, [(one, 1.0), (two, 1.0)])

    def _part(self, dear: float) -> tuple[list[int], list[int], list[int]]:
        """Its variables, its rows, and the variables of what is made."""
        ways = {way: self._variable("way", dear * price / MS) for way, price in PRICES_MS.items()}
        made = [self._variable("made", 0.0) for _ in range(3)]
        rows = [self._row("made", 0.0, 0.0, [(made[i], 1.0), *((ways[i, j], -1.0) for j in (0, 1))]) for i in range(3)]
        taken = [(v, -0.5) for v in made]
        rows += [self._row("taken", 0.0, 0.0, [*((ways[i, j], 1.0) for i in range(3)), *taken]) for j in (0, 1)]
        return [*ways.values(), *made], rows, made

    def without_the_copy(self) -> solution_pb2.BasisProto:
        """The basis of the optimum that takes nothing of it."""
        free = self.solver.upper
        limited = free.copy()
        limited[list(self.copies)] = 0.0
        self.solver.limit(limited)
        solved = self.solver.solve(STEPS)
        self.solver.limit(free)
        assert solved is not None and self.solver.basis is not None
        assert solved.objective == pytest.approx(2 + 1 + (3 + 5) / 2)
        return self.solver.basis


def basics(basis: solution_pb2.BasisProto) -> tuple[set[int], set[int]]:
    """The variables and the rows that are basic."""
    found = (basis.variable_status, basis.constraint_status)
    variables, rows = ({i for i, s in zip(of.ids, of.values, strict=True) if s == BASIC} for of in found)
    return variables, rows


def test_the_copy_is_priced_like_what_it_is_a_copy_of() -> None:
    """Of its variables those are basic that are so there, one for every row that is no more; all others are as they
    were. One of the rows follows from the others, in either part, so one of the copy's stays with its slack."""
    program = Twice()
    before = program.without_the_copy()
    variables, rows = basics(before)
    assert not variables & set(program.copies) and set(program.copied) <= rows
    after = with_copies(before, program.copies, program.copied, program.entries)
    now, left = basics(after)
    copied, twins = now & set(program.copies), {program.copies[v] for v in now & set(program.copies)}
    assert now - copied == variables and twins <= variables
    assert len(copied) == len(rows - left) == len(program.copied) - 1
    assert rows - left <= set(program.copied)


def test_the_optimum_is_the_same_from_there() -> None:
    """All goes by the copy, at half the price."""
    program = Twice()
    start = with_copies(program.without_the_copy(), program.copies, program.copied, program.entries)
    from_there, from_nothing = program.solver.solve(STEPS, start=start), Twice().solver.solve(STEPS)
    assert from_there is not None and from_nothing is not None and from_there.is_optimal
    assert from_there.objective == pytest.approx(3.5) == from_nothing.objective


def test_a_basis_that_has_taken_some_of_the_copy_is_left_as_it_is() -> None:
    program = Twice()
    assert program.solver.solve(STEPS) is not None and program.solver.basis is not None
    assert with_copies(program.solver.basis, program.copies, program.copied, program.entries) is program.solver.basis
