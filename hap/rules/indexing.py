"""Rules of embeddings, gathers, scatters and indexing.

The indexed dim stays whole, as an index counts from its global start; the dims of the indices and the dims that are not
indexed may be sharded. What is added up by index is partial in the dims of the indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from hap.rules.notation import Call, Dim, Row, Rule, Slot, partial_rows, whole_slots


def embedding(call: Call) -> Iterator[Row]:
    """``embedding(weight (V, H), indices (...)) -> (..., H)``."""
    leading = len(call.inputs[1].shape)
    for dim in range(leading):
        yield Row(("R", Dim(dim)), (Dim(dim),))
    yield Row((Dim(1), "R"), (Dim(leading),))
    yield from partial_rows(call, ("PR",))


def embedding_backward(call: Call) -> Iterator[Row]:
    """``embedding_dense_backward(grad (..., H), indices (...), V, padding_idx, scale_by_freq) -> (V, H)``."""
    leading = len(call.inputs[1].shape)
    if not call.argument(4, "scale_grad_by_freq", False):
        for dim in range(leading):
            yield Row((Dim(dim), Dim(dim)), ("P",))
    yield Row((Dim(leading), "R"), (Dim(1),))
    yield from partial_rows(call, ("PR",))


def gather(call: Call) -> Iterator[Row]:
    """``gather(x, dim, index)``: other dims together where they are of one size; the index alone along ``dim``."""
    x, index = call.inputs[0].shape, call.inputs[1].shape
    indexed = call.dim_argument(1, len(x))
    for dim in range(len(x)):
        if dim == indexed:
            yield Row(("R", Dim(dim)), (Dim(dim),))
        elif x[dim] == index[dim]:
            yield Row((Dim(dim), Dim(dim)), (Dim(dim),))
    yield from partial_rows(call, ("PR",))


def scatter(adds: bool) -> Rule:
    """``scatter(x, dim, index, src | value)``, ``scatter_reduce``: dims other than ``dim`` in which all agree.
    ``adds``: scatter_add."""

    def rule(call: Call) -> Iterator[Row]:
        indexed = call.dim_argument(1, len(call.output.shape))
        for dim in range(len(call.output.shape)):
            if dim != indexed and len({m.shape[dim] for m in call.inputs}) == 1:
                yield Row(tuple(Dim(dim) for _ in call.inputs), (Dim(dim),))
        if adds:
            yield Row(("P", Dim(indexed), Dim(indexed)), ("P",))
            yield from partial_rows(call, ("PRP",))

    return rule


def index(call: Call) -> Iterator[Row]:
    """``index(x, [None, ..., i, j, ..., None])`` with integers at adjacent dims, which their common shape replaces.

    x's other dims follow; a dim of the common shape may be sharded while x is whole.
    """
    positions = _adjacent(call.argument(1, "indices"))
    indices = call.inputs[1:]
    if not positions or any(m.dtype.itemsize < 4 for m in indices):
        return
    first, count = positions[0], len(positions)
    common = max(len(m.shape) for m in indices)
    for dim in range(len(call.inputs[0].shape)):
        if dim not in positions:
            yield Row((Dim(dim), *whole_slots(count)), (Dim(dim if dim < first else dim - count + common),))
    for dim in range(common):
        slots = tuple(_broadcast(m.shape, dim - common, call.output.shape[first + dim]) for m in indices)
        if any(isinstance(slot, Dim) for slot in slots):
            yield Row(("R", *slots), (Dim(first + dim),))
    yield from partial_rows(call, ("P" + "R" * count,))


def _adjacent(indices: tuple[object, ...]) -> list[int]:
    """The dims of the tensors of indices; none where a dim between them is not indexed."""
    found = [i for i, item in enumerate(indices) if item is not None]
    return found if found and found[-1] - found[0] == len(found) - 1 else []


def _broadcast(shape: tuple[int, ...], dim: int, size: int) -> Slot:
    """The slot of a tensor when a dim (counted from the end) of the shape that it is broadcast to is sharded."""
    return Dim(len(shape) + dim) if len(shape) + dim >= 0 and shape[dim] == size > 1 else "R"


def index_put(call: Call) -> Iterator[Row]:
    """``index_put(x, [..., i, j, ...], values, accumulate)``: dims that are not indexed; accumulating, which is the
    gradient of ``index``, those of the indices, too. Values are broadcast."""
    positions = _adjacent(call.argument(1, "indices"))
    x, *indices, values = call.inputs
    if not positions or any(m.dtype.itemsize < 4 for m in indices):
        return
    first, count = positions[0], len(positions)
    common = torch.broadcast_shapes(*(m.shape for m in indices))
    written = (*x.shape[:first], *common, *x.shape[first + count :])
    accumulates = call.argument(3, "accumulate", False)
    if accumulates and values.shape != written:
        return
    for dim, size in enumerate(x.shape):
        if dim not in positions:
            moved = dim if dim < first else dim - count + len(common)
            value = _broadcast(values.shape, moved - len(written), size)
            yield Row((Dim(dim), *whole_slots(count), value), (Dim(dim),))
    if not accumulates:
        return
    for dim, size in enumerate(common):
        slots = tuple(_broadcast(m.shape, dim - len(common), size) for m in indices)
        yield Row(("P", *slots, Dim(first + dim)), ("P",))
    yield from partial_rows(call, ("P" + "R" * count + "P",))


def index_select(call: Call) -> Iterator[Row]:
    """``index_select(x, dim, indices (k,))``."""
    indexed = call.dim_argument(1, len(call.output.shape))
    for dim in range(len(call.output.shape)):
        yield Row(("R", Dim(0)) if dim == indexed else (Dim(dim), "R"), (Dim(dim),))
    yield from partial_rows(call, ("PR",))


def index_reduce(call: Call) -> Iterator[Row]:
    """``index_reduce(x, dim, index (k,), src, reduce)``: dims other than ``dim``."""
    indexed = call.dim_argument(1, len(call.output.shape))
    for dim in range(len(call.output.shape)):
        if dim != indexed:
            yield Row((Dim(dim), "R", Dim(dim)), (Dim(dim),))


def bucketize(call: Call) -> Iterator[Row]:
    """``bucketize(x, boundaries (k,))``."""
    for dim in range(len(call.output.shape)):
        yield Row((Dim(dim), "R"), (Dim(dim),))


def searchsorted(call: Call) -> Iterator[Row]:
    """``searchsorted(sorted (..., k), values (..., m))``: dims of the values, and of both but the last.
    None where a third tensor says in what order to look."""
    if len(call.inputs) != 2:
        return
    boundaries, values = call.inputs[0].shape, call.inputs[1].shape
    for dim in range(len(values)):
        alone = len(boundaries) == 1 or dim == len(values) - 1
        yield Row(("R" if alone else Dim(dim), Dim(dim)), (Dim(dim),))


def masked_scatter(call: Call) -> Iterator[Row]:
    """``masked_scatter(x, mask, source)``: which element of the source goes where, only the whole mask can tell."""
    yield from partial_rows(call, ("PRP",))


def masked_scatter_backward(call: Call) -> Iterator[Row]:
    """``masked_scatter_backward(grad, mask, sizes)``."""
    yield from partial_rows(call, ("PR",))


RULES: Mapping[str, Rule] = {
    "aten.embedding.default": embedding,
    "aten.embedding_dense_backward.default": embedding_backward,
    "aten.gather.default": gather,
    "aten.scatter.value": scatter(False),
    "aten.scatter.src": scatter(False),
    "aten.scatter_add.default": scatter(True),
    "aten.scatter_reduce.two": scatter(False),
    "aten.index_reduce.default": index_reduce,
    "aten.bucketize.Tensor": bucketize,
    "aten.searchsorted.Tensor": searchsorted,
    "aten.index.Tensor": index,
    "aten.index_put.default": index_put,
    "aten.index_select.default": index_select,
    "aten.masked_scatter.default": masked_scatter,
    "aten.masked_scatter_backward.default": masked_scatter_backward,
}
