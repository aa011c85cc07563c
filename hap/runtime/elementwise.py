"""Optimizers that look at more than one element at a time must not be given shards: no rank sees the whole.

``torch.optim.Muon``, ``Adafactor`` and ``LBFGS``, LAMB, Shampoo and others make an update from whole parameters. A rank
that holds a shard would step without an error, and train another model than one device does. So before a step of any
optimizer that was given shards of a program it is asked, once, whether it treats every element by itself: of torch's
own that is known, of others it is tried out, on a small matrix and on its pieces. Muon may have what one rank owns.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hap.codegen.layout import Layout
from hap.errors import ProgramError

_OPTIM = torch.optim
ELEMENTWISE = frozenset(
    {_OPTIM.SGD, _OPTIM.Adam, _OPTIM.AdamW, _OPTIM.Adamax, _OPTIM.NAdam, _OPTIM.RAdam, _OPTIM.ASGD, _OPTIM.Rprop}
    | {_OPTIM.Adagrad, _OPTIM.Adadelta, _OPTIM.RMSprop}
)
ONE_BY_ONE = frozenset({_OPTIM.Muon})  # parameters: such as one rank has whole, and the others nothing of, will do
PLANNED = {_OPTIM.Muon: "muon", _OPTIM.Adafactor: "adafactor"}  # names that ``hap.plan(optimizer=...)`` knows
SHAPE, ROWS, COLUMNS = (6, 10), (2, 4), (7, 3)  # of the matrix that is tried, and how it is cut
NEAR = 1e-6  # of an update; what is made from other elements differs by much more
_SHARD = "_hap_shard"  # the attribute that names a shard's parameter


class _Shard(NamedTuple):
    """The parameter that a rank has a part of; ``has_owner``: one rank has all of it."""

    name: str
    has_owner: bool


_asked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # with so many parameters
_hooked: list[Any] = []


def mark_shards(shares: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout | None]) -> None:
    """What a rank holds of each of these parameters. From now on optimizers are looked at."""
    for name, layout in layouts.items():
        if layout is not None:
            has_owner = max(layout.sizes) == sum(layout.sizes)
            setattr(shares[name], _SHARD, _Shard(name, has_owner))
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if _asked.get(optimizer) == len(parameters):
        return
    held = [shard for p in parameters if (shard := getattr(p, _SHARD, None))]
    shards = [s.name for s in held if not (s.has_owner and type(optimizer) in ONE_BY_ONE)]
    if shards:
        _check(optimizer, shards)
    _asked[optimizer] = len(parameters)


def _check(optimizer: torch.optim.Optimizer, shards: list[str]) -> None:
    kind, name = type(optimizer), type(optimizer).__name__
    verdict = is_elementwise(optimizer)
    if verdict is None:
        warnings.warn(
            f"{name} could not be tried out: if it makes an update from more than single elements, it must not be "
            f"given shards, such as {shards[0]}; pins=hap.Pins(placements={{'*': 'R'}}) keeps parameters whole",
            stacklevel=2,
        )
    elif not verdict:
        ours = PLANNED.get(kind)
        remedy = f"optimizer={ours!r}" if ours else "pins=hap.Pins(placements={'*': 'R'})"
        more = f" and {len(shards) - 1} more" if len(shards) > 1 else ""
        raise ProgramError(
            f"{name} makes an update from whole parameters, and {shards[0]}{more} are in shards: plan with {remedy}"
        )


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether it treats every element of a parameter by itself; None if it cannot be tried out."""
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        return True
    if kind in PLANNED or kind is torch.optim.LBFGS:
        return False
    try:
        with torch.random.fork_rng(devices=[]):
            whole = _stepped(optimizer, [SHAPE])
            pieces = [_stepped(optimizer, [(n, SHAPE[1]) for n in ROWS], 0)]
            pieces.append(_stepped(optimizer, [(SHAPE[0], n) for n in COLUMNS], 1))
    except Exception:  # of somebody else's class: whatever it is, nothing was found out
        return None
    moved = (whole - _matrix(0)).abs().max()
    return None if moved == 0 else all(bool((found - whole).abs().max() <= NEAR * moved) for found in pieces)


def _stepped(optimizer: torch.optim.Optimizer, shapes: list[tuple[int, int]], dim: int = 0) -> torch.Tensor:
    """The matrix after two steps of optimizers like this one, each for a piece of it."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    options = {k: v for k, v in optimizer.defaults.items() if takes_all or k in accepted}
    if options.get("lr") == 0:  # at the beginning of a warm-up
        options["lr"] = 1e-3
    lengths = [shape[dim] for shape in shapes]
    parts = [nn.Parameter(part.clone()) for part in _matrix(0).split(lengths, dim)]
    each = [type(optimizer)([part], **options) for part in parts]
    for step in (1, 2):
        for one, part, gradient in zip(each, parts, _matrix(step).split(lengths, dim), strict=True):
            part.grad = gradient.clone()
            one.step()
    return torch.cat([part.detach() for part in parts], dim)


def _matrix(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
