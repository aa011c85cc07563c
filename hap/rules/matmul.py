"""Rules of matrix products: letters are dims, a letter absent on the right is contracted, so its shards give sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hap.rules.notation import Call, Dim, Row, Rule, einsum


def inverse(call: Call) -> Iterator[Row]:
    """``inv_ex(x (..., n, n)) -> (inverse, info (...))``."""
    for dim in range(len(call.output.shape) - 2):
        yield Row((Dim(dim),), (Dim(dim), Dim(dim)))


RULES: Mapping[str, Rule] = {
    "aten.mm.default": einsum("m k, k n -> m n"),
    "aten.bmm.default": einsum("b m k, b k n -> b m n"),
    "aten.mv.default": einsum("m k, k -> m"),
    "aten.dot.default": einsum("k, k ->"),
    "aten.vdot.default": einsum("k, k ->"),
    "aten.linalg_inv_ex.default": inverse,
}
