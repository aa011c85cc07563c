"""Rules of operators that cut a dim into parts or join parts: split, cat, slice, select, stack, pad.

Along the cut dim a row exists where the cuts fall on whole blocks: with g the greatest common divisor of every cut and
of the size, the dim is ``size/g`` blocks of g, a part of p elements is ``p/g`` blocks, and an atom inside the block
(its ``outer`` a multiple of the number of blocks) is carried along. So a fused QKV of 144 split in three has blocks of
48: (3, 6, 8) becomes (1, 6, 8) in each part. The other dims follow. All are linear, so partial passes through.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction

from hap.rules.notation import Call, Dim, Edit, Row, Rule, Scale, Shape, Slot, partial_rows


def _blocks(dim: int, size: int, block: int) -> Dim:
    return Dim(dim, outer=Fraction(size, block))


def _follow(call: Call, skipped: int) -> Iterator[Row]:
    """Rows for every dim but ``skipped`` of an operator that keeps the number of dims."""
    for dim in range(len(call.inputs[0].shape)):
        if dim != skipped:
            yield Row(tuple(Dim(dim) for _ in call.inputs), tuple(Dim(dim) for _ in call.outputs))
    yield from partial_rows(call, ("P" * len(call.inputs),))


def split_sizes(call: Call) -> Iterator[Row]:
    """``split_with_sizes(x, sizes, dim)``."""
    shape = call.inputs[0].shape
    dim = call.dim_argument(2, len(shape))
    sizes = call.argument(1, "split_sizes")
    block = math.gcd(*sizes)
    where = call.find(1, "split_sizes")
    assert where is not None
    if block > 1:
        outputs = tuple(_blocks(dim, size, block) if size else None for size in sizes)
        if None not in outputs:
            yield Row((_blocks(dim, shape[dim], block),), outputs, (Scale(where),))
    yield from _follow(call, dim)


def split(call: Call) -> Iterator[Row]:
    """``split(x, size, dim)``: the cut dim stays whole, as a share of zero would give one part and not many."""
    yield from _follow(call, call.dim_argument(2, len(call.inputs[0].shape)))


def cat(call: Call) -> Iterator[Row]:
    """``cat(tensors, dim)``; empty tensors of any number of dims are ignored by the operator and stay whole."""
    shape = call.output.shape
    dim = call.dim_argument(1, len(shape))
    sizes = [math.prod(m.shape) and m.shape[dim] for m in call.inputs]
    block = math.gcd(*sizes)
    if block > 1:
        slots: list[Slot] = [_blocks(dim, size, block) if size else "R" for size in sizes]
        yield Row(tuple(slots), (_blocks(dim, shape[dim], block),))
    for other in range(len(shape)):
        if other != dim:
            yield Row(tuple(Dim(other) if size else "R" for size in sizes), (Dim(other),))
    yield from partial_rows(call, ("P" * len(call.inputs),))


def stack(call: Call) -> Iterator[Row]:
    new = call.dim_argument(1, len(call.output.shape))
    for dim in range(len(call.inputs[0].shape)):
        yield Row(tuple(Dim(dim) for _ in call.inputs), (Dim(dim if dim < new else dim + 1),))
    yield from partial_rows(call, ("P" * len(call.inputs),))


def slice_(call: Call) -> Iterator[Row]:
    """``slice(x, dim, start, end, step)``."""
    shape = call.inputs[0].shape
    dim = call.dim_argument(1, len(shape))
    yield from _slice_along(call, dim, shape[dim], first=2, whole=call.inputs[0].shape, part=call.output.shape)
    yield from _follow(call, dim)


def slice_backward(call: Call) -> Iterator[Row]:
    """``slice_backward(grad, input_sizes, dim, start, end, step)``: zeros of ``input_sizes`` with grad in the slice."""
    shape = call.output.shape
    dim = call.dim_argument(2, len(shape))
    sizes = Shape(1, 0)
    for row in _slice_along(call, dim, shape[dim], first=3, whole=call.output.shape, part=call.inputs[0].shape):
        yield Row(row.outputs, row.inputs, (sizes, *row.edits))  # type: ignore[arg-type]
    for other in range(len(shape)):
        if other != dim:
            yield Row((Dim(other),), (Dim(other),), (sizes,))
    yield from partial_rows(call, ("P",))


def _slice_along(
    call: Call, dim: int, size: int, *, first: int, whole: tuple[int, ...], part: tuple[int, ...]
) -> Iterator[Row]:
    """The row whole -> part along the sliced dim; ``first`` is the position of ``start``."""
    if call.argument(first + 2, "step", 1) != 1 or part[dim] == 0:
        return
    start, end = call.argument(first, "start"), call.argument(first + 1, "end")
    begin = min(size, start + size if start is not None and start < 0 else start or 0)
    block = math.gcd(begin, part[dim], size)
    if block == 1:
        return
    edits: list[Edit] = []
    for position, name, value in ((first, "start", start), (first + 1, "end", end)):
        where = call.find(position, name)
        if where is not None and value is not None and value < size:
            edits.append(Scale(where))
    yield Row((_blocks(dim, whole[dim], block),), (_blocks(dim, part[dim], block),), tuple(edits))


def select(call: Call) -> Iterator[Row]:
    """``select(x, dim, index)``: the other dims."""
    ndim = len(call.inputs[0].shape)
    gone = call.dim_argument(1, ndim)
    for dim in range(ndim):
        if dim != gone:
            yield Row((Dim(dim),), tuple(Dim(dim if dim < gone else dim - 1) for _ in call.outputs))
    yield from partial_rows(call, ("P",))


def unbind(call: Call) -> Iterator[Row]:
    yield from select(call)


def select_backward(call: Call) -> Iterator[Row]:
    """``select_backward(grad, input_sizes, dim, index)``."""
    gone = call.dim_argument(2, len(call.output.shape))
    for dim in range(len(call.output.shape)):
        if dim != gone:
            yield Row((Dim(dim if dim < gone else dim - 1),), (Dim(dim),), (Shape(1, 0),))
    yield from partial_rows(call, ("P",))


def slice_scatter(call: Call) -> Iterator[Row]:
    """``slice_scatter(x, src, dim, start, end, step)``: x with ``src`` in the slice; the other dims."""
    yield from _follow(call, call.dim_argument(2, len(call.output.shape)))


def select_scatter(call: Call) -> Iterator[Row]:
    """``select_scatter(x, src, dim, index)``: x with ``src``, which lacks the dim, at the index; the other dims."""
    gone = call.dim_argument(2, len(call.output.shape))
    for dim in range(len(call.output.shape)):
        if dim != gone:
            yield Row((Dim(dim), Dim(dim if dim < gone else dim - 1)), (Dim(dim),))
    yield from partial_rows(call, ("PP",))


def pad(call: Call) -> Iterator[Row]:
    """``constant_pad_nd(x, pad, value)``: dims that are not padded; linear where the value is zero."""
    padding = call.argument(1, "pad")
    ndim = len(call.output.shape)
    for dim in range(ndim):
        behind = 2 * (ndim - 1 - dim)
        if not any(padding[behind : behind + 2]):
            yield Row((Dim(dim),), (Dim(dim),))
    if call.argument(2, "value", 0) == 0:
        yield from partial_rows(call, ("P",))


def gated(call: Call) -> Iterator[Row]:
    """``glu(x, dim)``: one half of x along the dim by the other."""
    shape = call.inputs[0].shape
    dim = call.dim_argument(1, len(shape), default=-1)
    yield Row((_blocks(dim, shape[dim], shape[dim] // 2),), (Dim(dim),))
    for other in range(len(shape)):
        if other != dim:
            yield Row((Dim(other),), (Dim(other),))


def gated_backward(call: Call) -> Iterator[Row]:
    """``glu_backward(grad, x, dim)``; linear in grad."""
    shape = call.inputs[1].shape
    dim = call.dim_argument(2, len(shape), default=-1)
    halves = _blocks(dim, shape[dim], shape[dim] // 2)
    yield Row((Dim(dim), halves), (halves,))
    for other in range(len(shape)):
        if other != dim:
            yield Row((Dim(other), Dim(other)), (Dim(other),))
    yield from partial_rows(call, ("PR",))


RULES: Mapping[str, Rule] = {
    "aten.split_with_sizes.default": split_sizes,
    "aten.split.Tensor": split,
    "aten.cat.default": cat,
    "aten.stack.default": stack,
    "aten.slice.Tensor": slice_,
    "aten.slice_backward.default": slice_backward,
    "aten.select.int": select,
    "aten.unbind.int": unbind,
    "aten.select_backward.default": select_backward,
    "aten.slice_scatter.default": slice_scatter,
    "aten.select_scatter.default": select_scatter,
    "aten.constant_pad_nd.default": pad,
    "aten.glu.default": gated,
    "aten.glu_backward.default": gated_backward,
}
