"""The CTC loss of a batch of padded sequences, and its gradient, as operators that can be cut along the batch.

PyTorch's own keeps a table for the backward pass whose size is that of the longest target, which only values tell. Here
nothing is kept: the backward pass is the loss computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def ctc(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """``log_probs`` (T, N, C), ``targets`` (N, S), lengths (N,) -> the loss of each sequence (N,)."""
    if log_probs.shape[1] == 0:
        return log_probs.new_zeros(0)
    return functional.ctc_loss(
        log_probs, targets, input_lengths, target_lengths, blank, reduction="none", zero_infinity=zero_infinity
    )


def ctc_backward(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """The gradient of ``log_probs`` (T, N, C) from that of the losses (N,), as PyTorch has it: that of what went into
    the log-softmax they come from."""
    if log_probs.shape[1] == 0:
        return torch.zeros_like(log_probs)
    with torch.enable_grad():
        given = log_probs.detach().requires_grad_()
        losses = ctc(given, targets, input_lengths, target_lengths, blank, zero_infinity)
        (found,) = torch.autograd.grad(losses, given, grad)
    return found


_traced = torch.library.custom_op("hap::ctc", ctc, mutates_args=())
_traced_backward = torch.library.custom_op("hap::ctc_backward", ctc_backward, mutates_args=())


@_traced.register_fake
def _(log_probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@_traced_backward.register_fake
def _(grad: torch.Tensor, log_probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(log_probs)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: torch.Tensor) -> Any:
    found = _traced_backward(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return found, None, None, None, None, None


_traced.register_autograd(_backward, setup_context=_keep)


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor | None:
    """``torch.nn.functional.ctc_loss`` by these operators; None for targets that are not padded to one length."""
    if log_probs.dim() != 3 or targets.dim() != 2 or reduction not in ("none", "mean", "sum"):
        return None
    lengths = [torch.as_tensor(given, device=log_probs.device) for given in (input_lengths, target_lengths)]
    losses: torch.Tensor = _traced(log_probs, targets, *lengths, blank, zero_infinity)
    if reduction == "mean":
        return (losses / lengths[1].clamp(min=1)).mean()
    return losses.sum() if reduction == "sum" else losses
