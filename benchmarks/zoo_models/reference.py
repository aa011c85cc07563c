"""One training step in one process by PyTorch itself, and how far another's results are from it.

Dropout is PyTorch's own code with its random numbers replaced: where it would draw a mask, it gets the one that
``hap.dropout`` gives this site of this seed, so the two runs drop the same elements and nothing else is shared.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.zoo_models.case import Case
from hap.capture.inputs import step_inputs
from hap.dropout import keep_mask

ZERO = 1e-13  # of the model's largest gradient: what is smaller is zero in exact arithmetic, and rounding here


@dataclass(frozen=True)
class Outcome:
    """What a step leaves, whole: the loss, gradients by parameter, buffers afterwards (those that state dicts hold)."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


class SameMasks(TorchDispatchMode):
    """Draws of dropout masks become ``keep_mask`` of (seed, number of the draw)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.site = torch.tensor(seed), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.bernoulli_.float:
            return func(*args, **(kwargs or {}))
        x, keep = args if len(args) == 2 else (*args, 0.5)
        mask = keep_mask(x.shape, self.seed, 1 - keep, self.site)
        self.site += 1
        return x.copy_(mask)


def one_device(case: Case, seed: int) -> Outcome:
    """The step on a copy of the case's model; the seed is dropout's."""
    model, call = copy.deepcopy(case.model), step_inputs(case.inputs, case.targets)
    with SameMasks(seed):
        loss = case.loss_fn(model(*call.args, **call.kwargs), *call.targets)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    stored = model.state_dict()
    buffers = {name: stored[name] for name, _ in model.named_buffers() if name in stored}
    return Outcome(loss.detach(), gradients, buffers)


def worst_error(found: Outcome, expected: Outcome) -> tuple[float, str]:
    """The largest error and where it is: of each tensor, relative to its own largest element; infinite if one is
    missing.

    Only a gradient that is zero in exact arithmetic (a bias in front of a batch norm, keys' bias in attention) has no
    size of its own: one below ``ZERO`` of the model's largest must be found below that, too, or its error is infinite.
    """
    pairs = {"loss": (found.loss, expected.loss)}
    for kind in ("gradients", "buffers"):
        mine, theirs = getattr(found, kind), getattr(expected, kind)
        if mine.keys() != theirs.keys():
            return float("inf"), f"{kind} of {sorted(mine.keys() ^ theirs.keys())[:3]}"
        pairs |= {name: (mine[name], theirs[name]) for name in theirs}
    rounding = ZERO * max(g.abs().max().item() for g in expected.gradients.values() if g.numel())
    errors = {name: _error(a, b, rounding if name in expected.gradients else 0.0) for name, (a, b) in pairs.items()}
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def _error(found: torch.Tensor, expected: torch.Tensor, rounding: float) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if torch.equal(found, expected):
        return 0.0
    ours, theirs = found.to(torch.complex128), expected.to(torch.complex128)
    scale = theirs.abs().max().item()
    if scale <= rounding:
        return 0.0 if ours.abs().max().item() <= rounding else float("inf")
    error = (ours - theirs).abs().max().item()
    return error / scale if error == error else float("inf")
