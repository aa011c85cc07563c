"""Dropout in one spelling: ``hap.dropout.default(x, seed, p, site, None)``, forward and backward.

Dropout of whole channels, and of what keeps mean and variance, are products with a dropout of ones.

The seed is an input of the step, ``SEED``, which whoever runs the graph gives: an int64 scalar, another one each step.
Sites are numbered in program order. A dropout whose mask is read by anything but its own backward keeps its name, and
rules refuse it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hap.capture.rewrite import Rewritten, rewrite
from hap.graph import Graph, Node, TensorMeta, Value

SEED = "seed"  # the target of the input node; the user's inputs are args.*, kwargs.* and targets.*
_FORWARD, _BACKWARD = "aten.native_dropout.default", "aten.native_dropout_backward.default"
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


def canonical_dropout(graph: Graph) -> Graph:
    """Every dropout whose mask serves only its backward; adds the seed if there is one."""
    mine = [n for n in graph.nodes if n.op == _FORWARD and n.args[2] and _is_private(graph, n)]
    if not mine:
        return graph
    sites = {node.name: site for site, node in enumerate(mine)}
    seed = Node("dropout_seed", "input", outputs=(TensorMeta((), torch.int64),), target=SEED)
    first = next(i for i, n in enumerate(graph.nodes) if not n.is_source)
    graph = replace(graph, nodes=(*graph.nodes[:first], seed, *graph.nodes[first:]))
    probabilities = {node.name: float(node.args[1]) for node in mine}

    def rule(node: Node, done: Rewritten) -> Node | None:
        owner = node.name if node.op == _FORWARD else node.args[1].node if node.op == _BACKWARD else ""
        if owner not in sites:
            return None
        args = (node.args[0], Value(seed.name), probabilities[owner], sites[owner], None)
        return replace(node, op=_OWN, args=args, kwargs=(), outputs=node.outputs[:1])

    return rewrite(graph, rule)


def _is_private(graph: Graph, node: Node) -> bool:
    mask = Value(node.name, 1)
    return all(user.op == _BACKWARD and at == 1 for user, at in graph.users.get(mask, ()))
