"""Rules of products with experts: rows, columns, what is contracted, and the experts themselves may be sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hap.rules.notation import Call, Dim, Place, Row, Rule, Scale, partial_rows


def expert_mm(call: Call) -> Iterator[Row]:
    """``(x (S, K), weight (E, K, N), ids (S,), place) -> (S, N)``; a rank's experts add zeros for others' rows."""
    yield Row((Dim(0), "R", Dim(0)), (Dim(0),))
    yield Row((Dim(1), Dim(1), "R"), ("P",))
    yield Row(("R", Dim(2), "R"), (Dim(1),))
    yield Row(("R", Dim(0), "R"), ("P",), (Place(3, of_input=1),))
    yield from partial_rows(call, ("PRR", "RPR"))


def expert_mm_weight(call: Call) -> Iterator[Row]:
    """``(x (S, K), grad (S, N), ids (S,), experts, place) -> (E, K, N)``."""
    yield Row((Dim(0), Dim(0), Dim(0)), ("P",))
    yield Row((Dim(1), "R", "R"), (Dim(1),))
    yield Row(("R", Dim(1), "R"), (Dim(2),))
    yield Row(("R", "R", "R"), (Dim(0),), (Scale(3), Place(4)))
    yield from partial_rows(call, ("PRR", "RPR"))


RULES: Mapping[str, Rule] = {
    "hap.expert_mm.default": expert_mm,
    "hap.expert_mm_weight.default": expert_mm_weight,
}
