"""One training step in one process by PyTorch itself, and how far another's results are from it.

Random numbers are the one thing that it shares with HAP: where PyTorch would draw, it gets what ``hap.dropout`` and
``hap.draws`` give this site of this seed. What is made of them is PyTorch's own code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.zoo_models.case import Case
from hap.capture.inputs import step_inputs
from hap.draws import rand, randint, randn
from hap.dropout import keep_mask

ZERO = 1e-13  # of the model's largest gradient: what is smaller is zero in exact arithmetic, and rounding here


@dataclass(frozen=True)
class Outcome:
    """What a step leaves, whole: the loss, gradients by parameter, and afterwards buffers (those that state dicts hold)
    and frozen parameters."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


class SameDraws(TorchDispatchMode):
    """What PyTorch draws becomes a function of (seed, number of the draw), as ``hap.dropout`` and ``hap.draws`` draw.

    What it draws with ``bernoulli_(number)`` is a dropout's mask. Draws from a generator are left alone.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.site = torch.tensor(seed), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = func(*args, **(kwargs or {}))
        if func not in _DRAWN or (kwargs or {}).get("generator") is not None:
            return drawn
        wanted = _DRAWN[func](_Site(self.seed, self.site, drawn), *args)
        self.site += 1
        return drawn.copy_(wanted)


class _Site(NamedTuple):
    """A draw: of what seed, its number, and a tensor like the one that is drawn."""

    seed: torch.Tensor
    number: int
    like: torch.Tensor

    def rand(self) -> torch.Tensor:
        return rand(self.like.shape, self.seed, self.number, None, dtype=self.like.dtype)

    def randn(self) -> torch.Tensor:
        return randn(self.like.shape, self.seed, self.number, None, dtype=self.like.dtype)

    def randint(self, low: int, high: int) -> torch.Tensor:
        return randint(self.like.shape, low, high, self.seed, self.number, None, dtype=self.like.dtype)


def _mask(site: _Site, x: torch.Tensor, keep: float = 0.5) -> torch.Tensor:
    return keep_mask(x.shape, site.seed, 1 - keep, site.number)


def _one_class(site: _Site, chances: torch.Tensor, count: int, replaced: bool = False) -> torch.Tensor:
    assert count == 1, "of several classes the reference knows nothing"
    times = -rand(chances.shape, site.seed, site.number, None, dtype=chances.dtype).log()
    return (times / chances).argmin(-1, keepdim=True)


_ATEN = torch.ops.aten
_DRAWN: Mapping[Any, Callable[..., torch.Tensor]] = {
    _ATEN.bernoulli_.float: _mask,
    _ATEN.bernoulli.default: lambda site, p: site.rand() < p,
    _ATEN.exponential_.default: lambda site, x, rate=1.0: -site.rand().log() / rate,
    _ATEN.multinomial.default: _one_class,
    _ATEN.normal_.default: lambda site, x, mean=0.0, deviation=1.0: site.randn() * deviation + mean,
    _ATEN.normal.float_float: lambda site, mean, deviation, size: site.randn() * deviation + mean,
    _ATEN.rand.default: lambda site, size: site.rand(),
    _ATEN.rand.generator: lambda site, size: site.rand(),
    _ATEN.rand_like.default: lambda site, like: site.rand(),
    _ATEN.randint.default: lambda site, high, size: site.randint(0, high),
    _ATEN.randint.low: lambda site, low, high, size: site.randint(low, high),
    _ATEN.randn.default: lambda site, size: site.randn(),
    _ATEN.randn.generator: lambda site, size: site.randn(),
    _ATEN.randn_like.default: lambda site, like: site.randn(),
    _ATEN.uniform_.default: lambda site, x, low=0.0, high=1.0: site.rand() * (high - low) + low,
}


def one_device(case: Case, seed: int) -> Outcome:
    """The step on a copy of the case's model; the seed is that of its random numbers."""
    model, call = copy.deepcopy(case.model), step_inputs(case.inputs, case.targets)
    with SameDraws(seed):
        loss = case.loss_fn(model(*call.args, **call.kwargs), *call.targets)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(loss.detach(), gradients, kept(model))


def kept(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that state dicts hold, and frozen parameters."""
    stored = model.state_dict()
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return frozen | {name: stored[name] for name, _ in model.named_buffers() if name in stored}


def worst_error(found: Outcome, expected: Outcome) -> tuple[float, str]:
    """The largest of the ``errors``, and where it is."""
    found_errors = errors(found, expected)
    worst = max(found_errors, key=found_errors.__getitem__)
    return found_errors[worst], worst


def errors(found: Outcome, expected: Outcome) -> dict[str, float]:
    """Of each tensor, relative to its own largest element; infinite if one is missing.

    Only a gradient that is zero in exact arithmetic (a bias in front of a batch norm, keys' bias in attention) has no
    size of its own: one below ``ZERO`` of the model's largest must be found below that, too, or its error is infinite.
    So is a batch norm's running mean of what a norm before it has centred, whose size is its running deviation's.
    """
    pairs = {"loss": (found.loss, expected.loss)}
    for kind in ("gradients", "buffers"):
        mine, theirs = getattr(found, kind), getattr(expected, kind)
        if mine.keys() != theirs.keys():
            return {f"{kind} of {sorted(mine.keys() ^ theirs.keys())[:3]}": float("inf")}
        pairs |= {name: (mine[name], theirs[name]) for name in theirs}
    rounding = dict.fromkeys(
        expected.gradients, ZERO * max(g.abs().max().item() for g in expected.gradients.values() if g.numel())
    )
    for name in expected.buffers:
        variance = expected.buffers.get(f"{name.removesuffix('running_mean')}running_var")
        if name.endswith("running_mean") and variance is not None:
            rounding[name] = ZERO * variance.max().item() ** 0.5
    return {name: _error(a, b, rounding.get(name, 0.0)) for name, (a, b) in pairs.items()}


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
