"""What a builder of the zoo gives: a model with one global batch and a loss, at its published or a small size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Size = Literal["real", "small"]


@dataclass(frozen=True)
class Case:
    """One training step: ``loss_fn(model(inputs), *targets)``. Shapes are those of the global batch."""

    model: nn.Module
    inputs: Any
    loss_fn: Callable[..., torch.Tensor]
    targets: Any


@dataclass(frozen=True)
class ZooModel:
    """``build("real")`` is on ``meta``, at the published size; ``build("small")`` is in float64 with fixed weights."""

    name: str
    title: str
    make: Callable[[Size], Case]

    def build(self, size: Size, seed: int = 0) -> Case:
        with _place(size, seed):
            return self.make(size)


class Float64(TorchFunctionMode):
    """While active, what asks for float32 gets float64: some models normalise in float32 whatever their own dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(_wider, args), **{k: _wider(v) for k, v in (kwargs or {}).items()})


def _wider(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


class Output(nn.Module):
    """A Hugging Face model whose output is one tensor: the loss is then ours, in the model's own dtype.

    A model in float64 runs in float64 throughout.
    """

    def __init__(self, model: nn.Module, name: str = "logits", **constants: Any) -> None:
        super().__init__()
        self.model, self.name, self.constants = model, name, constants

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        wide = next(self.parameters()).dtype == torch.float64
        with Float64() if wide else contextlib.nullcontext():
            found: torch.Tensor = getattr(self.model(**inputs, **self.constants), self.name)
        return found


@contextlib.contextmanager
def _place(size: Size, seed: int) -> Iterator[None]:
    """Real models own no memory; small ones are float64 with weights and batches that follow from the seed."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if size == "real":
            with torch.device("meta"):
                yield
            return
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    """Random token ids; on ``meta`` only their shape."""
    return torch.randint(0, vocabulary, shape)


def class_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy: logits (..., classes), labels (...); the label -100 counts for nothing."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token: logits (B, S, V), labels (B, S)."""
    return class_loss(logits[:, :-1], labels[:, 1:])


def smoothed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``class_loss`` with label smoothing 0.1."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.1)
