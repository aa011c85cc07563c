"""Recurrent layers as they are outside of a trace: with the dropout between layers, and states of the right shape.

While it traces, torch takes ``nn.LSTM`` and its kin apart with Python decompositions, which lose the dropout between
layers without a word: torch 2.13's ``_rnn_helper`` compares the number of layers with the layer's own the wrong way
round. So a stack that drops out is called here one layer at a time, with a dropout between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_STACKS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class LayerByLayer(TorchFunctionMode):
    """While active, calls of recurrent stacks with dropout run as one call per layer. Packed sequences are left."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _STACKS and not kwargs and len(args) == 9 and isinstance(args[2], (list, tuple)):
            num_layers, dropout, train = args[4:7]
            found = _layers(func, *args) if num_layers > 1 and dropout > 0 and train else func(*args)
            return found if func is not torch.lstm else (found[0], *map(_shaped, found[1:], args[1]))
        return func(*args, **(kwargs or {}))


def _shaped(state: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return state if state.shape == before.shape else state.view(before.shape)


def _layers(
    func: Any,
    x: torch.Tensor,
    state: Any,
    weights: Sequence[torch.Tensor],
    biased: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """The arguments and results of ``torch.lstm`` (state: h and c) and ``torch.gru`` (state: h)."""
    several = isinstance(state, (tuple, list))
    states = tuple(state) if several else (state,)
    directions, per_layer = 2 if bidirectional else 1, len(weights) // num_layers
    x = x.transpose(0, 1) if batch_first else x
    found = []
    for layer in range(num_layers):
        own = [s[layer * directions : (layer + 1) * directions] for s in states]
        part = weights[layer * per_layer : (layer + 1) * per_layer]
        x, *new = func(x, own if several else own[0], part, biased, 1, 0.0, train, bidirectional, False)
        found.append(new)
        if layer < num_layers - 1:
            x = torch.nn.functional.dropout(x, dropout)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.cat(parts) for parts in zip(*found, strict=True))
