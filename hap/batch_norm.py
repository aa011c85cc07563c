"""Batch norm with global statistics, as operators whose results can be added up over ranks.

With x (N, C, ...), one channel c, n elements a channel in the *global* batch, and sums over all dims but C:

    mean = sum(x) / n            var = sum((x - mean)^2) / n           rstd = 1 / sqrt(var + eps)
    out  = (x - mean) * rstd * weight + bias

and, with g the gradient of out and h = (x - mean) * rstd,

    dbias = sum(g)               dweight = sum(g * h)
    dx    = rstd * weight * (g - dbias / n - h * dweight / n)

(Ioffe and Szegedy 2015). Capture writes a batch norm in these terms, so that a shard of the batch gives partial sums;
the two passes over x lose no digits. Statistics are (C,) in at least float32.
"""

from __future__ import annotations

import torch


def batch_norm_squares(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """sum((x - mean)^2) over all dims but 1: (C,)."""
    centred = x.to(mean.dtype) - _along_channels(mean, x)
    return (centred * centred).sum(_but_channels(x))


def batch_norm(
    x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """``out`` above, of x's shape and dtype."""
    found = _normalised(x, mean, rstd)
    if weight is not None:
        found = found * _along_channels(weight.to(found.dtype), x)
    if bias is not None:
        found = found + _along_channels(bias.to(found.dtype), x)
    return found.to(x.dtype)


def batch_norm_sums(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum(g), sum(g * h)) of this rank's elements: (C,) each, in the dtype of the statistics."""
    wide = grad.to(mean.dtype)
    return wide.sum(_but_channels(x)), (wide * _normalised(x, mean, rstd)).sum(_but_channels(x))


def batch_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    mean_grad: torch.Tensor,
    mean_grad_normalised: torch.Tensor,
) -> torch.Tensor:
    """``dx`` above, of x's shape and dtype, from dbias / n and dweight / n."""
    wide = grad.to(mean.dtype)
    wide = wide - _along_channels(mean_grad, x)
    wide = wide - _normalised(x, mean, rstd) * _along_channels(mean_grad_normalised, x)
    scale = rstd if weight is None else rstd * weight.to(rstd.dtype)
    return (wide * _along_channels(scale, x)).to(x.dtype)


def _normalised(x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    return (x.to(mean.dtype) - _along_channels(mean, x)) * _along_channels(rstd, x)


def _along_channels(per_channel: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return per_channel.reshape(1, -1, *(1,) * (x.dim() - 2))


def _but_channels(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]
