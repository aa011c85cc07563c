"""Convolutions whose groups ranks deal out, which a model has that puts its batch into them. PyTorch's kernels refuse a
rank that has none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """``aten.convolution``."""
    how, run = (stride, padding, dilation, transposed, output_padding), torch.ops.aten.convolution.default
    if groups:
        found: torch.Tensor = run(x, weight, bias, *how, groups)
        return found
    one = x.new_empty((len(x), 1 if transposed else weight.shape[1], *x.shape[2:]), device="meta")
    like = run(one, weight.new_empty((1, *weight.shape[1:]), device="meta"), None, *how, 1)
    return x.new_empty((len(x), 0, *like.shape[2:]))


def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Sequence[int] | None, *how: object
) -> Gradients:
    """``aten.convolution_backward``; ``how`` ends in the groups and in which gradients are asked for."""
    *_, groups, mask = how
    assert isinstance(mask, (list, tuple))
    if groups:
        found: Gradients = torch.ops.aten.convolution_backward.default(grad, x, weight, bias_sizes, *how)
        return found
    dx, dweight, dbias = (t if asked else None for t, asked in zip((x, weight, grad.new_empty(0)), mask, strict=True))
    return dx, dweight, dbias
