"""Rules of operators that rearrange dims without touching elements: view, permutations, squeeze, expand.

**Views.** With L the product of the sizes before a dim and R after it, the element ``(o, i, u)`` of a sharded dim has
its atom at flat position ``(l*outer + o, i, u*R + r)``: in the flat index the atom is ``(L*outer, n, unit*R)``. In a
dim of the output with its own L' and R' the same atom is ``(L*outer/L', n, unit*R/R')``, if that is whole and fills
the dim. So a view has one row per pair of an input dim and an output dim, with the two ratios as scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction

from hap.rules.notation import Call, Dim, Row, Rule, Shape, partial_rows

Sizes = Sequence[int]
Places = Sequence[int | None]


def view(call: Call) -> Iterator[Row]:
    source, target = call.inputs[0].shape, call.output.shape
    where = call.find(1, "size" if call.node.op != "aten.reshape.default" else "shape")
    assert where is not None, f"{call.node.op} without a size"
    yield from partial_rows(call, ("P",))
    if 0 in source:
        return
    for dim in range(len(source)):
        for out in range(len(target)):
            if _overlap(source, dim, target, out):
                slot = Dim(out, *_ratios(source, dim, target, out))
                yield Row((Dim(dim),), (slot,), (Shape(where, 0),))


def _ratios(source: Sizes, dim: int, target: Sizes, out: int) -> tuple[Fraction, Fraction]:
    before = Fraction(math.prod(source[:dim]), math.prod(target[:out]))
    after = Fraction(math.prod(source[dim + 1 :]), math.prod(target[out + 1 :]))
    return before, after


def _overlap(source: Sizes, dim: int, target: Sizes, out: int) -> bool:
    """Whether the two dims share a range of strides in which an atom of two or more could lie."""
    low = max(math.prod(source[dim + 1 :]), math.prod(target[out + 1 :]))
    high = min(math.prod(source[dim:]), math.prod(target[out:]))
    return high >= 2 * low


def is_split_off(source: Sizes, target: Sizes, out: int) -> bool:
    """Whether a view makes dim ``out`` from a part of one larger dim of the source, as heads are."""
    low, high = math.prod(target[out + 1 :]), math.prod(target[out:])
    return any(
        math.prod(source[dim + 1 :]) <= low and high <= math.prod(source[dim:]) and size > target[out]
        for dim, size in enumerate(source)
    )


def moved(dims: Callable[[Call], Places]) -> Rule:
    """``dims(call)[d]`` is where dim ``d`` of the argument goes, None if it vanishes or must stay whole."""

    def rule(call: Call) -> Iterator[Row]:
        for dim, out in enumerate(dims(call)):
            if out is not None:
                yield Row((Dim(dim),), (Dim(out),))
        yield from partial_rows(call, ("P",))

    return rule


def _permute(call: Call) -> list[int]:
    order = [d % len(call.output.shape) for d in call.argument(1, "dims")]
    return [order.index(d) for d in range(len(order))]


def _transpose(call: Call) -> list[int]:
    ndim = len(call.output.shape)
    a, b = (call.dim_argument(i, ndim, f"dim{i - 1}") for i in (1, 2))
    return [b if d == a else a if d == b else d for d in range(ndim)]


def _t(call: Call) -> list[int]:
    return list(reversed(range(len(call.output.shape))))


def _unsqueeze(call: Call) -> list[int]:
    ndim = len(call.output.shape)
    new = call.dim_argument(1, ndim)
    return [d if d < new else d + 1 for d in range(ndim - 1)]


def _squeeze(call: Call) -> list[int | None]:
    """``squeeze(x, dims)``. A named dim that is not of size 1 stays whole: a share of one would vanish on its rank."""
    shape = call.inputs[0].shape
    dims = call.argument(1, "dim")
    named = [d % len(shape) for d in ((dims,) if isinstance(dims, int) else dims)]
    gone = [d for d in named if shape[d] == 1]
    return [None if d in named else d - sum(1 for g in gone if g < d) for d in range(len(shape))]


def squeeze_all(call: Call) -> Iterator[Row]:
    """``squeeze(x)`` drops whatever has size 1 on its rank, a share of one too: every dim stays whole."""
    yield from partial_rows(call, ("P",))


def expand(call: Call) -> Iterator[Row]:
    """A dim that is there follows; a dim that is broadcast from a whole argument may be born sharded."""
    source, target = call.inputs[0].shape, call.output.shape
    where = call.find(1, "size")
    assert where is not None, "expand without a size"
    new = len(target) - len(source)
    for dim, size in enumerate(target):
        if size > 1:
            follows = dim >= new and source[dim - new] == size
            yield Row((Dim(dim - new) if follows else "R",), (Dim(dim),), (Shape(where, 0),))
    yield from partial_rows(call, ("P",))


def repeat(call: Call) -> Iterator[Row]:
    """A dim repeated once follows; the others stay whole."""
    times = call.argument(1, "repeats")
    new = len(times) - len(call.inputs[0].shape)
    for dim, count in enumerate(times):
        if dim >= new and count == 1:
            yield Row((Dim(dim - new),), (Dim(dim),))
    yield from partial_rows(call, ("P",))


def reordered(position: int) -> Rule:
    """``flip`` and ``roll``: elements move within the dims listed at ``position``; the others follow."""

    def rule(call: Call) -> Iterator[Row]:
        ndim = len(call.output.shape)
        dims = call.argument(position, "dims", ())
        touched = [d % ndim for d in dims] or list(range(ndim))
        for dim in range(ndim):
            if dim not in touched:
                yield Row((Dim(dim),), (Dim(dim),))
        yield from partial_rows(call, ("P",))

    return rule


def triangle(call: Call) -> Iterator[Row]:
    """``tril`` and ``triu``: every dim but the last two."""
    for dim in range(len(call.output.shape) - 2):
        yield Row((Dim(dim),), (Dim(dim),))
    yield from partial_rows(call, ("P",))


def diagonal(call: Call) -> Iterator[Row]:
    """``diagonal(x, offset, dim1, dim2)``: the two dims become one, the last; the others follow."""
    yield from _diagonal(call, len(call.inputs[0].shape), first=2)


def diag_embed(call: Call) -> Iterator[Row]:
    """``diag_embed(x, offset, dim1, dim2)``: x's last dim becomes the diagonal of two new ones."""
    for row in _diagonal(call, len(call.output.shape), first=2, last=-2):
        yield Row(row.outputs, row.inputs)  # type: ignore[arg-type]


def diagonal_backward(call: Call) -> Iterator[Row]:
    """``diagonal_backward(grad, input_sizes, offset, dim1, dim2)``: zeros with grad on the diagonal."""
    for row in _diagonal(call, len(call.output.shape), first=3):
        follows = isinstance(row.inputs[0], Dim)
        yield Row(row.outputs, row.inputs, (Shape(1, 0),) if follows else ())  # type: ignore[arg-type]


def _diagonal(call: Call, ndim: int, *, first: int, last: int = 0) -> Iterator[Row]:
    """Rows square -> diagonal; ``first`` is the position of dim1, ``last`` the default of both dims, less 0 and 1."""
    square = {call.dim_argument(first + i, ndim, f"dim{i + 1}", last + i) for i in (0, 1)}
    for place, dim in enumerate(d for d in range(ndim) if d not in square):
        yield Row((Dim(dim),), (Dim(place),))
    yield from partial_rows(call, ("P",))


def unfold(call: Call) -> Iterator[Row]:
    """``unfold(x, dim, size, step)``: windows along one dim, which stays whole; their elements are a new last dim."""
    ndim = len(call.inputs[0].shape)
    yield from moved(lambda _: [None if d == call.dim_argument(1, ndim, "dimension") else d for d in range(ndim)])(call)


def unfold_backward(call: Call) -> Iterator[Row]:
    """``unfold_backward(grad, input_sizes, dim, size, step)``: the windows added up where they were cut."""
    ndim = len(call.output.shape)
    for dim in range(ndim):
        if dim != call.dim_argument(2, ndim):
            yield Row((Dim(dim),), (Dim(dim),), (Shape(1, 0),))
    yield from partial_rows(call, ("P",))


RULES: Mapping[str, Rule] = {
    "aten.view.default": view,
    "aten._unsafe_view.default": view,
    "aten.reshape.default": view,
    "aten.permute.default": moved(_permute),
    "aten.transpose.int": moved(_transpose),
    "aten.t.default": moved(_t),
    "aten.unsqueeze.default": moved(_unsqueeze),
    "aten.squeeze.default": squeeze_all,
    "aten.squeeze.dim": moved(_squeeze),
    "aten.squeeze.dims": moved(_squeeze),
    "aten.expand.default": expand,
    "aten.repeat.default": repeat,
    "aten.flip.default": reordered(1),
    "aten.roll.default": reordered(2),
    "aten.tril.default": triangle,
    "aten.triu.default": triangle,
    "aten.diagonal.default": diagonal,
    "aten.diagonal_backward.default": diagonal_backward,
    "aten.diag_embed.default": diag_embed,
    "aten.unfold.default": unfold,
    "aten.unfold_backward.default": unfold_backward,
}
