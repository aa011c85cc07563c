"""Optimizers that look at more than one element at a time must not be given shards: no rank sees the whole.

``torch.optim.Muon``, ``Adafactor`` and ``LBFGS``, LAMB, Shampoo and others make an update from whole parameters. A rank
that holds a shard would step without an error, and train another model than one device does. (Of two axes all ranks
refuse what any host has in shards: alone, one host would have the others wait for ever.) So before a step of any
optimizer that was given shards of a program it is asked, once, whether it treats every element by itself: of torch's
own that is known, of others it is tried out, on a small matrix and on its pieces, and for a few steps on a larger one,
as some look beyond elements in large matrices alone. Muon may have what one rank owns.

``torch.nn.utils.clip_grad_norm_`` would scale every rank's shards by a norm of that rank's own, and what all hold whole
by as many different ones: it is refused for shards of a program, which has ``clip_grad_norm_`` of its own. So is
``torch.amp.GradScaler``, by which ranks would not skip the same steps.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hap.capture.torch_private import watch_clipping, watch_optimizer_states, watch_scaling
from hap.codegen.layout import Layout
from hap.errors import ProgramError
from hap.runtime.scaler import GradScaler
from hap.runtime.shards import Share, check_loaded, is_of_two_axes, mark, mark_on_hosts, shares_anywhere, stamp

_OPTIM = torch.optim
ELEMENTWISE = frozenset(
    {_OPTIM.SGD, _OPTIM.Adam, _OPTIM.AdamW, _OPTIM.Adamax, _OPTIM.NAdam, _OPTIM.RAdam, _OPTIM.ASGD, _OPTIM.Rprop}
    | {_OPTIM.Adagrad, _OPTIM.Adadelta, _OPTIM.RMSprop}
)
ONE_BY_ONE = frozenset({_OPTIM.Muon})  # parameters: such as one rank has whole, and the others nothing of, will do
PLANNED = {_OPTIM.Muon: "muon", _OPTIM.Adafactor: "adafactor"}  # names that ``hap.plan(optimizer=...)`` knows
LENGTHS = ("lr", "initial_lr")
WANDERING = 0.3
NEAR = 1e-6  # of an update; what is made from other elements differs by much more


class _Trial(NamedTuple):
    """A matrix of this shape, cut into rows and into columns, for so many steps."""

    shape: tuple[int, int]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    steps: int


TRIALS = (
    _Trial((6, 10), (2, 4), (7, 3), 32),  # some precondition from the twentieth step on
    _Trial((256, 384), (160, 96), (284, 100), 3),  # some keep sums of rows and columns from 32 or 128 of them on
)
_asked: weakref.WeakKeyDictionary[torch.optim.Optimizer, object] = weakref.WeakKeyDictionary()  # with such groups
_hooked: list[Any] = []


def mark_shards(shares: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout | None], rank: int) -> None:
    """What a rank holds of each of these parameters. From now on optimizers are looked at."""
    for name, layout in layouts.items():
        if layout is not None and len(layout.sizes) > 1:
            mark(shares[name], Share(name, rank, layout))
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(ask))
        watch_clipping(_before_clipping)
        watch_scaling(_before_scaling)
        watch_optimizer_states(stamp, check_loaded)


def mark_shards_on_hosts(shares: Mapping[str, torch.Tensor], layouts: Mapping[str, Sequence[Layout]]) -> None:
    """Of two axes: what lies in shards in some host, on every rank."""
    for name, on_hosts in layouts.items():
        mark_on_hosts(shares[name], name, on_hosts)


def _before_scaling(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if not isinstance(scaler, GradScaler) and any(map(shares_anywhere, parameters)):
        raise ProgramError(
            "torch.amp.GradScaler looks at this rank's gradients alone, and ranks would not skip the same steps: use "
            "program.grad_scaler()"
        )


def _before_clipping(parameters: Sequence[torch.Tensor]) -> None:
    shard = next((shard for p in parameters for shard in shares_anywhere(p)), None)
    if shard is not None:
        raise ProgramError(
            f"torch.nn.utils.clip_grad_norm_ sees a rank's part of {shard.name} alone, and every rank would clip "
            "by another norm: call program.clip_grad_norm_"
        )


def ask(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Once for its groups. ProgramError if it must not have what it was given; random numbers are drawn meanwhile, as
    if none were."""
    groups = [(len(group["params"]), bool(group.get("weight_decay"))) for group in optimizer.param_groups]
    if _asked.get(optimizer) == groups:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = [shard for p in parameters for shard in shares_anywhere(p)]
    shards = [s.name for s in held if not (s.has_owner and type(optimizer) in ONE_BY_ONE)]
    if shards:
        axis = "one axis and " if any(map(is_of_two_axes, parameters)) else ""  # pins are for that
        _check(optimizer, list(dict.fromkeys(shards)), f"{axis}pins=hap.Pins(placements={{'*': 'R'}})")
    _asked[optimizer] = groups


def _check(optimizer: torch.optim.Optimizer, shards: list[str], whole: str) -> None:
    """``whole``: what to plan with to have all parameters whole."""
    kind, name = type(optimizer), type(optimizer).__name__
    if any(of.__name__ == "ZeroRedundancyOptimizer" for of in kind.__mro__):
        raise ProgramError(
            f"{name} deals out parameters by itself, and {shards[0]} is in shards already: leave it out, and give "
            "program.parameters() to the optimizer inside of it"
        )
    verdict = is_elementwise(optimizer)
    if verdict is None:
        warnings.warn(
            f"{name} could not be tried out: if it makes an update from more than single elements, it must not be "
            f"given shards, such as {shards[0]}; plan with {whole} to keep parameters whole",
            stacklevel=2,
        )
    elif not verdict:
        ours = PLANNED.get(kind)
        remedy = f"optimizer={ours!r}" if ours else whole
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
    for trial in TRIALS:
        found = [_are_pieces_alike(optimizer, group, trial) for group in _unlike(optimizer)]
        if False in found or None in found:
            return False if False in found else None
    return True


def _unlike(optimizer: torch.optim.Optimizer) -> Iterable[Mapping[str, Any]]:
    """The options of groups of parameters that differ, by more than how far a step goes."""
    found: dict[str, Mapping[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k != "params"}
        if options.get("lr") == 0:  # at the beginning of a warm-up
            options["lr"] = 1e-3
        found.setdefault(repr(sorted((k, repr(v)) for k, v in options.items() if k not in LENGTHS)), options)
    return found.values()


def _are_pieces_alike(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], trial: _Trial) -> bool | None:
    """Whether a matrix that is cut ends where it ends in one piece; None if it does not move, or that fails."""
    try:
        with torch.random.fork_rng(devices=[]):
            whole = _stepped(optimizer, options, trial, trial.shape[:1], 0)
            pieces = [_stepped(optimizer, options, trial, *cut) for cut in ((trial.rows, 0), (trial.columns, 1))]
    except Exception:  # of somebody else's class: whatever it is, nothing was found out
        return None
    moved = (whole - _matrix(trial, 0)).abs().max()
    return None if moved == 0 else all(bool((found - whole).abs().max() <= NEAR * moved) for found in pieces)


def _stepped(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], trial: _Trial, lengths: Sequence[int], dim: int
) -> torch.Tensor:
    """The matrix after some steps of optimizers like this one, each for a piece of it. Gradients go one way, as those
    need that find out how far to step, and not by the same length, as others scale them by what they were."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    defaults = {k: v for k, v in {**optimizer.defaults, **options}.items() if takes_all or k in accepted}
    parts = [nn.Parameter(part.clone()) for part in _matrix(trial, 0).split(list(lengths), dim)]
    each = [type(optimizer)([{**options, "params": [part]}], **defaults) for part in parts]
    for one in each:
        if callable(mode := getattr(one, "train", None)):  # schedule-free ones have modes
            mode()
    for step in range(2, 2 + trial.steps):
        whole = (_matrix(trial, 1) + WANDERING * _matrix(trial, step)) * (1 + step % 3)
        for one, part, gradient in zip(each, parts, whole.split(list(lengths), dim), strict=True):
            part.grad = gradient.clone()
            one.step()
    return torch.cat([part.detach() for part in parts], dim)


def _matrix(trial: _Trial, seed: int) -> torch.Tensor:
    return torch.randn(trial.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
