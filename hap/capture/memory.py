"""``x.data = value``: a program has values and no memory, so what is given another tensor's memory is written to.

PyTorch's trace does not see the assignment: the tensor would keep its old value, without a word. Of a buffer, or of a
frozen parameter such as an encoder's that follows another one, it is a write like any other, and so an update. As a
write it is no other only as long as nobody else holds the memory of either: two tensors in one memory change together
from then on, and a view of the one that was written to would change with it. Values that lie in memory of the step's
own state or inputs, and assignments to any other tensor, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hap.capture.torch_private import is_alias
from hap.errors import CaptureError

SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def set_data(tensor: torch.Tensor, value: Any, state: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """``state``: parameters and buffers. CaptureError where the assignment is not the same as a write."""
    if not isinstance(value, torch.Tensor) or not any(tensor is known for known in state):
        raise CaptureError(
            "an assignment to .data of a tensor that is no parameter or buffer of the model: make a new tensor, "
            "x + (value - x).detach() if gradients are to pass it by"
        )
    if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        raise CaptureError(
            f".data of shape {tuple(value.shape)} and {value.dtype} is assigned to a parameter or buffer of shape "
            f"{tuple(tensor.shape)} and {tensor.dtype}"
        )
    if is_alias(value, tensor) and _layout(value) == _layout(tensor):
        return  # its own memory, as after ``x.data += 1``
    if any(is_alias(value, known) for known in (*state, *inputs)):
        raise CaptureError(
            "the memory of a parameter, buffer or input is assigned to .data of another, and both would change "
            "together from then on: assign a clone"
        )
    tensor.data.copy_(value)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.stride()
