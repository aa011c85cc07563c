"""Rules of convolutions and the normalisations of images, on (N, C, spatial...).

The batch may be sharded; the spatial dims stay whole, since a window reaches over their cuts. The channels of a
convolution stay whole because a share may be zero and its kernels refuse a tensor without channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hap.rules.notation import Call, Dim, Row, Rule, Scale, Slot, partial_rows, whole_slots

_BATCH = 0


def convolution(call: Call) -> Iterator[Row]:
    """``(x, weight, bias | None, ..., transposed, output_padding, groups)``."""
    biased = len(call.inputs) == 3
    if len(call.inputs[0].shape) == len(call.inputs[1].shape):
        yield Row((Dim(_BATCH), *whole_slots(1 + biased)), (Dim(_BATCH),))
    yield from partial_rows(call, ("RPP",) if biased else ("PR", "RP"))


def convolution_backward(call: Call) -> Iterator[Row]:
    """``(grad, x, weight, bias_sizes, ...) -> (dx, dweight, dbias)``; linear in grad."""
    yield Row((Dim(_BATCH), Dim(_BATCH), "R"), _gradients(call))
    yield from partial_rows(call, ("PRR",))


def group_norm(call: Call) -> Iterator[Row]:
    """``(x, weight | None, bias | None, N, C, HxW, groups, eps) -> (out, mean (N, groups), rstd)``."""
    yield Row((Dim(_BATCH), *whole_slots(len(call.inputs) - 1)), (Dim(_BATCH),) * 3, (Scale(3),))


def group_norm_backward(call: Call) -> Iterator[Row]:
    """``(grad, x, mean, rstd, weight | None, N, C, HxW, groups, mask) -> (dx, dweight, dbias)``; linear in grad."""
    inputs = (*(Dim(_BATCH),) * 4, *whole_slots(len(call.inputs) - 4))
    yield Row(inputs, _gradients(call), (Scale(5),))
    yield from partial_rows(call, ("P" + "R" * (len(call.inputs) - 1),))


def _gradients(call: Call) -> tuple[Slot | None, ...]:
    """The slots of (dx, dweight, dbias) when the batch is sharded, None where the call does not compute one."""
    slots: tuple[Slot, ...] = (Dim(_BATCH), "P", "P")
    return tuple(None if meta is None else slot for meta, slot in zip(call.outputs, slots, strict=True))


RULES: Mapping[str, Rule] = {
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_backward,
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
}
