"""Rules of complex numbers: as pairs of real ones, their conjugates, and Fourier transforms.

A transform needs the whole of the dims that it transforms; all are linear over the real numbers, so sums pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hap.rules.notation import Call, Dim, Row, Rule, partial_rows
from hap.rules.pointwise import all_partial, first_partial, pointwise


def pairs(call: Call) -> Iterator[Row]:
    """``view_as_complex((..., 2)) -> (...)`` and back: the pair stays whole."""
    for dim in range(min(len(call.inputs[0].shape), len(call.output.shape))):
        yield Row((Dim(dim),), (Dim(dim),))
    yield from partial_rows(call, ("P",))


def transform(call: Call) -> Iterator[Row]:
    """``_fft_r2c(x, dims, ...)`` and its kin."""
    rank = len(call.output.shape)
    transformed = {dim % rank for dim in call.argument(1, "dim")}
    for dim in range(rank):
        if dim not in transformed:
            yield Row((Dim(dim),), (Dim(dim),))
    yield from partial_rows(call, ("P",))


RULES: Mapping[str, Rule] = {
    "aten.view_as_complex.default": pairs,
    "aten.view_as_real.default": pairs,
    "aten.conj_physical.default": pointwise(all_partial),
    "aten.complex.default": pointwise(all_partial),
    "aten.polar.default": pointwise(first_partial),
    "aten._fft_r2c.default": transform,
    "aten._fft_c2r.default": transform,
    "aten._fft_c2c.default": transform,
}
