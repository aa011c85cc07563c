"""The rule of dropout: its mask is a function of the global position, so any dim may be sharded and sums pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hap.rules.notation import Call, Dim, Place, Row, Rule, partial_rows


def dropout(call: Call) -> Iterator[Row]:
    """``(x, seed, p, site, shard) -> out``; linear in x."""
    for dim, size in enumerate(call.output.shape):
        if size > 1:
            yield Row((Dim(dim), "R"), (Dim(dim),), (Place(4),))
    yield from partial_rows(call, ("PR",))


RULES: Mapping[str, Rule] = {"hap.dropout.default": dropout}
