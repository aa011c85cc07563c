"""Rules of operators that reduce or scan dims.

A sum over a sharded dim is partial; a maximum, a variance, a norm and a scan over one are not sums of their pieces (for
uneven pieces neither is a mean), so they leave the reduced dims whole. A sum, a mean and a cumulative sum of partial
values are partial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hap.rules.notation import Call, Dim, Row, Rule, partial_rows
from hap.rules.pointwise import Partials, all_partial, first_partial, never

Dims = Callable[[Call], tuple[int, ...]]


def all_dims(call: Call) -> tuple[int, ...]:
    return tuple(range(len(call.inputs[0].shape)))


def listed_dims(call: Call) -> tuple[int, ...]:
    """The dims at argument 1, a number or a list; all of them where it is None or empty."""
    ndim = len(call.inputs[0].shape)
    dims = call.argument(1, "dim")
    if dims is None or dims == () or dims == []:
        return all_dims(call)
    return tuple(d % ndim for d in ((dims,) if isinstance(dims, int) else dims))


def one_dim(position: int, default: int = 0) -> Dims:
    """The dim at that argument."""

    def dims(call: Call) -> tuple[int, ...]:
        return (call.dim_argument(position, len(call.inputs[0].shape), default=default),)

    return dims


def reduction(dims: Dims = listed_dims, *, sums: bool = False, partials: Partials = never) -> Rule:
    """Dims that are kept follow; with ``sums``, a reduced dim that is sharded gives partial outputs."""

    def rule(call: Call) -> Iterator[Row]:
        shape = call.inputs[0].shape
        reduced = dims(call)
        keeps = len(call.output.shape) == len(shape)
        for dim, size in enumerate(shape):
            if size == 1:
                continue
            if dim not in reduced:
                place = dim if keeps else dim - sum(1 for r in reduced if r < dim)
                yield Row((Dim(dim),), tuple(None if o is None else Dim(place) for o in call.outputs))
            elif sums:
                yield Row((Dim(dim),), ("P",))
        yield from partial_rows(call, partials(call))

    return rule


def along(position: int = 1, *, default: int = 0, partials: Partials = never) -> Rule:
    """Operators that need all of one dim (the argument at ``position``) and keep every shape: scans, softmax."""

    def rule(call: Call) -> Iterator[Row]:
        ndim = len(call.output.shape)
        kept = call.dim_argument(position, ndim, default=default)
        for dim in range(ndim):
            if dim != kept:
                yield Row(tuple(Dim(dim) for _ in call.inputs), tuple(Dim(dim) for _ in call.outputs))
        yield from partial_rows(call, partials(call))

    return rule


RULES: Mapping[str, Rule] = {
    "aten.sum.default": reduction(all_dims, sums=True, partials=all_partial),
    "aten.sum.dim_IntList": reduction(sums=True, partials=all_partial),
    "aten.mean.default": reduction(all_dims, partials=all_partial),
    "aten.mean.dim": reduction(partials=all_partial),
    "aten.var_mean.correction": reduction(),
    "aten.var.correction": reduction(),
    "aten.std.correction": reduction(),
    "aten.std_mean.correction": reduction(),
    "aten.amax.default": reduction(),
    "aten.amin.default": reduction(),
    "aten.max.dim": reduction(),
    "aten.min.dim": reduction(),
    "aten.argmax.default": reduction(),
    "aten.argmin.default": reduction(),
    "aten.any.dim": reduction(),
    "aten.any.dims": reduction(),
    "aten.all.dim": reduction(),
    "aten.all.dims": reduction(),
    "aten.prod.dim_int": reduction(),
    "aten.logsumexp.default": reduction(),
    "aten.prod.default": reduction(all_dims),
    "aten.trace.default": reduction(all_dims, partials=all_partial),
    "aten.max.default": reduction(all_dims),
    "aten.min.default": reduction(all_dims),
    "aten.any.default": reduction(all_dims),
    "aten.all.default": reduction(all_dims),
    "aten.cumsum.default": along(partials=all_partial),
    "aten.cumprod.default": along(),
    "aten._softmax.default": along(),
    "aten._log_softmax.default": along(),
    "aten._safe_softmax.default": along(),
    "aten._softmax_backward_data.default": along(2, partials=first_partial),
    "aten._log_softmax_backward_data.default": along(2, partials=first_partial),
    "aten.cummax.default": along(),
    "aten.cummin.default": along(),
    "aten.logcumsumexp.default": along(),
    "aten.sort.default": along(1, default=-1),
    "aten.sort.stable": along(1, default=-1),
    "aten.kthvalue.default": reduction(one_dim(2, -1)),
    "aten.median.dim": reduction(one_dim(1)),
    "aten.nanmedian.dim": reduction(one_dim(1)),
    "aten.mode.default": reduction(one_dim(1, -1)),
    "aten.median.default": reduction(all_dims),
    "aten.nanmedian.default": reduction(all_dims),
    "aten.topk.default": along(2, default=-1),
}
