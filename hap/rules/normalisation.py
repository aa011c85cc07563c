"""Rules of normalisation: what is normalised over stays whole, all else may be sharded.

The gradients of weight and bias are sums over what is sharded, hence partial. BatchNorm's statistics run over the batch,
so only its channels may be sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hap.rules.notation import Call, Dim, Row, Rule, Slot, partial_rows


def layer_norm(call: Call) -> Iterator[Row]:
    """``(x, normalized_shape, weight, bias, eps) -> (out, mean, rstd)``."""
    leading = len(call.inputs[0].shape) - len(call.argument(1, "normalized_shape"))
    for dim in range(leading):
        yield Row((Dim(dim), *_whole(len(call.inputs) - 1)), (Dim(dim),) * 3)


def layer_norm_backward(call: Call) -> Iterator[Row]:
    """``(grad, x, normalized_shape, mean, rstd, weight, bias, output_mask) -> (dx, dweight, dbias)``; linear in grad."""
    leading = len(call.inputs[0].shape) - len(call.argument(2, "normalized_shape"))
    for dim in range(leading):
        outputs = tuple(None if meta is None else (Dim(dim) if i == 0 else "P") for i, meta in enumerate(call.outputs))
        yield Row((Dim(dim),) * 4 + _whole(len(call.inputs) - 4), outputs)  # type: ignore[arg-type]
    yield from partial_rows(call, ("P" + "R" * (len(call.inputs) - 1),))


def rms_norm(call: Call) -> Iterator[Row]:
    """``(x, normalized_shape, weight | None, eps) -> (out, rstd)``."""
    leading = len(call.inputs[0].shape) - len(call.argument(1, "normalized_shape"))
    for dim in range(leading):
        yield Row((Dim(dim), *_whole(len(call.inputs) - 1)), (Dim(dim),) * 2)


def rms_norm_backward(call: Call) -> Iterator[Row]:
    """``(grad, x, normalized_shape, rstd, weight | None, output_mask) -> (dx, dweight)``; linear in grad."""
    leading = len(call.inputs[0].shape) - len(call.argument(2, "normalized_shape"))
    for dim in range(leading):
        outputs = tuple(None if meta is None else (Dim(dim) if i == 0 else "P") for i, meta in enumerate(call.outputs))
        yield Row((Dim(dim),) * 3 + _whole(len(call.inputs) - 3), outputs)  # type: ignore[arg-type]
    yield from partial_rows(call, ("P" + "R" * (len(call.inputs) - 1),))


def _whole(count: int) -> tuple[Slot, ...]:
    return ("R",) * count


RULES: Mapping[str, Rule] = {
    "aten.native_layer_norm.default": layer_norm,
    "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten._fused_rms_norm.default": rms_norm,
    "aten._fused_rms_norm_backward.default": rms_norm_backward,
}
