"""Rules of batch norm in the terms of ``hap.batch_norm``: x (N, C, ...), statistics (C,).

The sums are over every dim but the channels, so a shard of any of those gives partial sums; statistics that are whole
serve a shard of the batch or of the space, and channels go their own ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hap.rules.notation import Call, Dim, Row, Rule, Slot, partial_rows

_CHANNELS = 1


def _rows(call: Call, images: int, outputs: str) -> Iterator[Row]:
    """``images``: how many of the first arguments are as large as x; an output is such an ``i`` or a sum ``s``."""
    count = len(call.inputs)
    for dim in range(len(call.inputs[0].shape)):
        is_channel = dim == _CHANNELS
        statistics: Slot = Dim(0) if is_channel else "R"
        total: Slot = Dim(0) if is_channel else "P"
        inputs = tuple(Dim(dim) if i < images else statistics for i in range(count))
        yield Row(inputs, tuple(Dim(dim) if o == "i" else total for o in outputs))


def squares(call: Call) -> Iterator[Row]:
    """``(x, mean) -> sum((x - mean)^2)``."""
    yield from _rows(call, 1, "s")


def normalise(call: Call) -> Iterator[Row]:
    """``(x, mean, rstd, weight | None, bias | None) -> out``."""
    yield from _rows(call, 1, "i")


def sums(call: Call) -> Iterator[Row]:
    """``(grad, x, mean, rstd) -> (sum(grad), sum(grad * normalised x))``; linear in grad."""
    yield from _rows(call, 2, "ss")
    yield from partial_rows(call, ("PRRR",))


def backward(call: Call) -> Iterator[Row]:
    """``(grad, x, mean, rstd, weight | None, two means) -> dx``; linear in grad and the means together."""
    yield from _rows(call, 2, "i")
    yield from partial_rows(call, ("P" + "R" * (len(call.inputs) - 3) + "PP",))


RULES: Mapping[str, Rule] = {
    "hap.batch_norm_squares.default": squares,
    "hap.batch_norm.default": normalise,
    "hap.batch_norm_sums.default": sums,
    "hap.batch_norm_backward.default": backward,
}
