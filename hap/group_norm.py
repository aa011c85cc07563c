"""Group norm as PyTorch has it, on contiguous tensors: what eager PyTorch sees to before it calls these kernels.

Given a tensor of other strides, such as a transposed one or the expanded gradient of a sum, the forward kernel refuses,
and the backward kernel gives wrong gradients without a word.
"""

from __future__ import annotations

import torch

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    c: int,
    hw: int,
    groups: int,
    eps: float,
) -> Tensors:
    """(out, mean (n, groups), rstd) of x (n, c, ...) with hw elements a channel."""
    given = (None if t is None else t.contiguous() for t in (x, weight, bias))
    found: Tensors = torch.ops.aten.native_group_norm.default(*given, n, c, hw, groups, eps)
    return found


def group_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    n: int,
    c: int,
    hw: int,
    groups: int,
    mask: list[bool],
) -> Tensors:
    """(dx, dweight, dbias) of ``group_norm``, those that ``mask`` asks for."""
    given = (None if t is None else t.contiguous() for t in (grad, x, mean, rstd, weight))
    found: Tensors = torch.ops.aten.native_group_norm_backward.default(*given, n, c, hw, groups, mask)
    return found
