"""Rules of normalisation: what is normalised over stays whole, all else may be sharded.

The gradients of weight and bias are sums over what is sharded, hence partial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hap.rules.notation import Call, Dim, Row, Rule, Slot, partial_rows, whole_slots


def layer_norm(call: Call) -> Iterator[Row]:
    """``(x, normalized_shape, weight, bias, eps) -> (out, mean, rstd)``."""
    leading = len(call.inputs[0].shape) - len(call.argument(1, "normalized_shape"))
    for dim in range(leading):
        yield Row((Dim(dim), *whole_slots(len(call.inputs) - 1)), (Dim(dim),) * 3)


def layer_norm_backward(call: Call) -> Iterator[Row]:
    """``(grad, x, normalized_shape, mean, rstd, weight, bias, mask) -> (dx, dweight, dbias)``; linear in grad."""
    leading = len(call.inputs[0].shape) - len(call.argument(2, "normalized_shape"))
    for dim in range(leading):
        yield Row((*(Dim(dim),) * 4, *whole_slots(len(call.inputs) - 4)), _gradients(call, dim))
    yield from partial_rows(call, ("P" + "R" * (len(call.inputs) - 1),))


def _gradients(call: Call, dim: int) -> tuple[Slot | None, ...]:
    """The slots of (dx, dweight, dbias): x's gradient lies as x does, the others are sums over ``dim``."""
    dx, *rest = call.outputs
    return (None if dx is None else Dim(dim), *(None if meta is None else "P" for meta in rest))


RULES: Mapping[str, Rule] = {
    "aten.native_layer_norm.default": layer_norm,
    "aten.native_layer_norm_backward.default": layer_norm_backward,
}
