"""Rules of matrix products: letters are dims, a letter absent on the right is contracted, so its shards give sums."""

from __future__ import annotations

from collections.abc import Mapping

from hap.rules.notation import Rule, einsum

RULES: Mapping[str, Rule] = {
    "aten.mm.default": einsum("m k, k n -> m n"),
    "aten.bmm.default": einsum("b m k, b k n -> b m n"),
    "aten.mv.default": einsum("m k, k -> m"),
    "aten.dot.default": einsum("k, k ->"),
    "aten.vdot.default": einsum("k, k ->"),
}
