"""Dropout in one spelling: ``hap.dropout.default(x, seed, p, site, None)``, forward and backward.

Dropout of whole channels, and of what keeps mean and variance, are products with a dropout of ones. A dropout whose
mask is read by anything but its own backward keeps its name, and rules refuse it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hap.graph import Graph, Node, Value

FORWARD, BACKWARD = "aten.native_dropout.default", "aten.native_dropout_backward.default"
_OWN = "hap.dropout.default"


class ByDropout(TorchFunctionMode):
    """While active, the other kinds of dropout call ``dropout``, which draws the mask that they would draw; in place,
    ``dropout`` does, too, as PyTorch would spell that in another way."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = func is functional.dropout and not kwargs["inplace"]
        if func in _KINDS and not plain and kwargs["training"] and 0 < kwargs["p"] <= 1:
            kind, batched = _KINDS[func]
            (x,) = args
            if x.dim() in (batched, batched - 1) or not batched:
                alone = x.dim() == batched - 1
                found = kind(x.unsqueeze(0), kwargs["p"]).squeeze(0) if alone else kind(x, kwargs["p"])
                return x.copy_(found) if kwargs["inplace"] else found
        return func(*args, **(kwargs or {}))


def _channels(x: torch.Tensor, p: float) -> torch.Tensor:
    """``nn.Dropout1d`` to ``nn.Dropout3d``: x (n, channels, ...) with whole channels dropped."""
    return x * functional.dropout(_one_per_channel(x), p)


def _one_per_channel(x: torch.Tensor) -> torch.Tensor:
    return x.new_ones(*x.shape[:2], *(1 for _ in x.shape[2:]))


def _alpha(x: torch.Tensor, p: float) -> torch.Tensor:
    return _saturated(x, torch.ones_like(x), p)


def _alpha_channels(x: torch.Tensor, p: float) -> torch.Tensor:
    return _saturated(x, _one_per_channel(x), p)


def _saturated(x: torch.Tensor, ones: torch.Tensor, p: float) -> torch.Tensor:
    """``nn.AlphaDropout``: what is dropped becomes SELU's limit; then scaled and shifted to mean 0 and variance 1."""
    if p == 1:
        return x * 0
    limit = 1.7580993408473766  # of ATen's Dropout.cpp
    scale = ((limit**2 * p + 1) * (1 - p)) ** -0.5
    kept = functional.dropout(ones, p) != 0
    return torch.where(kept, x, -limit) * scale + limit * scale * p


_KINDS: dict[Any, tuple[Callable[[torch.Tensor, float], torch.Tensor], int]] = {  # and the dims of a batch, if asked
    functional.dropout: (functional.dropout, 0),
    functional.dropout1d: (_channels, 3),
    functional.dropout2d: (_channels, 0),
    functional.dropout3d: (_channels, 5),
    functional.alpha_dropout: (_alpha, 0),
    functional.feature_alpha_dropout: (_alpha_channels, 0),
}


def is_private(graph: Graph, node: Node) -> bool:
    """Whether this is a dropout whose mask serves only its backward."""
    if node.op != FORWARD or not node.args[2]:
        return False
    mask = Value(node.name, 1)
    return all(user.op == BACKWARD and at == 1 for user, at in graph.users.get(mask, ()))


def spell_dropout(node: Node, p: float, seed: Value, site: int) -> Node:
    """A dropout, or the backward of one, of probability ``p``."""
    return replace(node, op=_OWN, args=(node.args[0], seed, p, site, None), kwargs=(), outputs=node.outputs[:1])
