"""Rules of convolutions and the normalisations of images, on (N, C, spatial...).

The batch may be sharded; the spatial dims stay whole, since a window reaches over their cuts. The channels of a
convolution stay whole because a share may be zero and its kernels refuse a tensor without channels; but for those that
have the batch in their groups, ``hap.convolution``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction

from hap.graph import TensorMeta
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


def grouped(call: Call) -> Iterator[Row]:
    """``hap.convolution``: its groups, too, each with its own channels."""
    yield from convolution(call)
    x, weight, out = _groups(call.inputs[0], call, 8), _stored(call, 1, 8), _groups(call.output, call, 8)
    bias = (replace(out, dim=0),) * (len(call.inputs) - 2)
    yield Row((x, weight, *bias), (out,), (Scale(8),))


def grouped_backward(call: Call) -> Iterator[Row]:
    """``hap.convolution_backward``."""
    yield from convolution_backward(call)
    grad, x, weight = _groups(call.inputs[0], call, 9), _groups(call.inputs[1], call, 9), _stored(call, 2, 9)
    slots = (x, weight, replace(grad, dim=0))
    outputs = tuple(None if meta is None else slot for meta, slot in zip(call.outputs, slots, strict=True))
    sizes = (Scale(3),) if call.node.args[3] else ()
    yield Row((grad, x, weight), outputs, (*sizes, Scale(9)))


def group_norm(call: Call) -> Iterator[Row]:
    """``(x, weight | None, bias | None, N, C, HxW, groups, eps) -> (out, mean (N, groups), rstd)``."""
    yield Row((Dim(_BATCH), *whole_slots(len(call.inputs) - 1)), (Dim(_BATCH),) * 3, (Scale(3),))


def group_norm_backward(call: Call) -> Iterator[Row]:
    """``(grad, x, mean, rstd, weight | None, N, C, HxW, groups, mask) -> (dx, dweight, dbias)``; linear in grad."""
    inputs = (*(Dim(_BATCH),) * 4, *whole_slots(len(call.inputs) - 4))
    yield Row(inputs, _gradients(call), (Scale(5),))
    yield from partial_rows(call, ("P" + "R" * (len(call.inputs) - 1),))


def _groups(image: TensorMeta, call: Call, position: int) -> Dim:
    """The channels of (N, C, ...), so many to each of the groups whose number is the argument at ``position``."""
    return Dim(1, unit=Fraction(image.shape[1], call.node.args[position]))


def _stored(call: Call, weight: int, position: int) -> Dim:
    """A weight's first dim: the channels that come out, or if transposed those that go in."""
    return Dim(0, unit=Fraction(call.inputs[weight].shape[0], call.node.args[position]))


def _gradients(call: Call) -> tuple[Slot | None, ...]:
    """The slots of (dx, dweight, dbias) when the batch is sharded, None where the call does not compute one."""
    slots: tuple[Slot, ...] = (Dim(_BATCH), "P", "P")
    return tuple(None if meta is None else slot for meta, slot in zip(call.outputs, slots, strict=True))


RULES: Mapping[str, Rule] = {
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_backward,
    "hap.convolution.default": grouped,
    "hap.convolution_backward.default": grouped_backward,
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
}
