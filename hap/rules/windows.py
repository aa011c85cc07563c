"""Rules of pooling, padding and sampling on (N, C, spatial...): what lies beside what matters.

The batch may be sharded; the spatial dims stay whole, since a window reaches over their cuts, and so do channels, as a
share may be zero and many of these kernels refuse, or die of, a tensor without channels. Sampling at given places may
be cut along the places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hap.rules.notation import Call, Dim, Row, Rule, Shape, partial_rows

_BATCH = 0


def window(spatial: int, *, linear: bool) -> Rule:
    """Windows over the last ``spatial`` dims of every tensor with as many; others have the batch first, too.
    ``linear``: in the first argument, as an average, a padding and every backward are."""

    def rule(call: Call) -> Iterator[Row]:
        if len(call.inputs[0].shape) == spatial + 2:
            yield Row(tuple(Dim(_BATCH) for _ in call.inputs), tuple(Dim(_BATCH) for _ in call.outputs))
        if linear:
            yield from partial_rows(call, ("P" + "R" * (len(call.inputs) - 1),))

    return rule


def columns(batched: int) -> Rule:
    """``im2col`` (``F.unfold``) and ``col2im`` (``F.fold``), whose argument has ``batched`` dims with a batch."""

    def rule(call: Call) -> Iterator[Row]:
        if len(call.inputs[0].shape) == batched:
            yield Row((Dim(_BATCH),), (Dim(_BATCH),))
        yield from partial_rows(call, ("P",))

    return rule


def resized(call: Call) -> Iterator[Row]:
    """``upsample(x, output_size, ...)``."""
    yield Row((Dim(_BATCH),), (Dim(_BATCH),))
    yield from partial_rows(call, ("P",))


def resized_backward(call: Call) -> Iterator[Row]:
    """``upsample_backward(grad, output_size, input_size, ...)``."""
    yield Row((Dim(_BATCH),), (Dim(_BATCH),), (Shape(2, 0),))
    yield from partial_rows(call, ("P",))


def sampled(call: Call) -> Iterator[Row]:
    """``grid_sampler(x (N, C, ...), grid (N, *places, dims), ...) -> (N, C, *places)``; linear in x."""
    yield Row((Dim(_BATCH), Dim(_BATCH)), (Dim(_BATCH),))
    for dim in range(1, len(call.inputs[1].shape) - 1):
        yield Row(("R", Dim(dim)), (Dim(dim + 1),))
    yield from partial_rows(call, ("PR",))


def sampled_backward(call: Call) -> Iterator[Row]:
    """``grid_sampler_backward(grad, x, grid, ...) -> (dx, dgrid)``; linear in grad."""
    dx, dgrid = call.outputs
    yield Row((Dim(_BATCH),) * 3, (None if dx is None else Dim(_BATCH), None if dgrid is None else Dim(_BATCH)))
    for dim in range(1, len(call.inputs[2].shape) - 1):
        outputs = (None if dx is None else "P", None if dgrid is None else Dim(dim))
        yield Row((Dim(dim + 1), "R", Dim(dim)), outputs)  # type: ignore[arg-type]
    yield from partial_rows(call, ("PRR",))


def _both(name: str, spatial: int, *, linear: bool) -> dict[str, Rule]:
    return {
        f"aten.{name}.default": window(spatial, linear=linear),
        f"aten.{name}_backward.default": window(spatial, linear=True),
    }


RULES: Mapping[str, Rule] = {
    **_both("max_pool2d_with_indices", 2, linear=False),
    **_both("max_pool3d_with_indices", 3, linear=False),
    **_both("avg_pool2d", 2, linear=True),
    **_both("avg_pool3d", 3, linear=True),
    **_both("_adaptive_avg_pool2d", 2, linear=True),
    **_both("_adaptive_avg_pool3d", 3, linear=True),
    **_both("adaptive_max_pool2d", 2, linear=False),
    **_both("adaptive_max_pool3d", 3, linear=False),
    **_both("fractional_max_pool2d", 2, linear=False),
    **_both("fractional_max_pool3d", 3, linear=False),
    **_both("reflection_pad1d", 1, linear=True),
    **_both("reflection_pad2d", 2, linear=True),
    **_both("reflection_pad3d", 3, linear=True),
    **_both("replication_pad1d", 1, linear=True),
    **_both("replication_pad2d", 2, linear=True),
    **_both("replication_pad3d", 3, linear=True),
    "aten.max_unpool2d.default": window(2, linear=True),
    "aten.max_unpool3d.default": window(3, linear=True),
    "aten.im2col.default": columns(4),
    "aten.col2im.default": columns(3),
    "aten._upsample_bilinear2d_aa.default": resized,
    "aten._upsample_bilinear2d_aa_backward.default": resized_backward,
    "aten._upsample_bicubic2d_aa.default": resized,
    "aten._upsample_bicubic2d_aa_backward.default": resized_backward,
    "aten.grid_sampler_2d.default": sampled,
    "aten.grid_sampler_2d_backward.default": sampled_backward,
    "aten.grid_sampler_3d.default": sampled,
    "aten.grid_sampler_3d_backward.default": sampled_backward,
}
