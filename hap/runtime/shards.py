"""Parameters that are shards know it, and so does what ``optimizer.state_dict()`` of such parameters returns.

That is of the shares that this rank holds, and of no others. Written by rank 0 and read by all, as scripts for whole
models do, every rank would go on with rank 0's moments, without an error where shares are equal. So what is saved of an
optimizer that has shards says of which they are, and what is loaded must be of the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hap.codegen.layout import Layout
from hap.errors import ProgramError

KEY = "hap_shards"  # beside "state" and "param_groups": plain numbers and strings, as torch.load takes them
_SHARD = "_hap_shard"  # the attribute
_ON_HOSTS = "_hap_shards_on_hosts"
_INSTEAD = "optimizer.state_dict() is of one rank's shares: program.save_checkpoint(directory, optimizer) is for all"


class Share(NamedTuple):
    """The parameter that this rank, number ``rank``, has a part of."""

    name: str
    rank: int
    layout: Layout

    @property
    def has_owner(self) -> bool:
        """One rank has all of it."""
        return max(self.layout.sizes) == sum(self.layout.sizes)


def mark(parameter: torch.Tensor, share: Share) -> None:
    setattr(parameter, _SHARD, share)


def share_of(parameter: torch.Tensor) -> Share | None:
    """None of one that is whole, or no program's."""
    return getattr(parameter, _SHARD, None)


def mark_on_hosts(parameter: torch.Tensor, name: str, layouts: Sequence[Layout]) -> None:
    """Of a program of two axes: how the parameter lies in the hosts that have it in shards."""
    setattr(parameter, _ON_HOSTS, tuple(Share(name, 0, layout) for layout in layouts))


def shares_anywhere(parameter: torch.Tensor) -> tuple[Share, ...]:
    """``share_of``, or of two axes the first rank's of every host that has it in shards: alike on all ranks, so that
    what must not have shards is refused on all, those of hosts that have the parameter whole among them."""
    own = share_of(parameter)
    found: tuple[Share, ...] = getattr(parameter, _ON_HOSTS, () if own is None else (own,))
    return found


def is_of_two_axes(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, _ON_HOSTS)


def stamp(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Say which shares it is of, if of any."""
    if any(found := _stamps(optimizer)):
        state_dict[KEY] = found


def check_loaded(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """ProgramError for the state of other shares than the optimizer has, as far as it says so, and by shapes."""
    own, given = _stamps(optimizer), state_dict.get(KEY)
    if given is None:
        if any(own):
            _check_unsaid(optimizer, state_dict)
        return
    for mine, other, kept in zip(own, map(_plain, given), _states(state_dict), strict=False):
        if mine == other or not any(isinstance(value, torch.Tensor) and value.dim() for value in kept.values()):
            continue  # nothing of what is dealt out is in it
        if mine is None or other is None or (mine[0], mine[2:]) != (other[0], other[2:]):
            name = (mine or other)[0]
            raise ProgramError(f"this optimizer state is of {name} dealt out in another way than here: {_INSTEAD}")
        raise ProgramError(f"this optimizer state is rank {other[1]}'s, and this is rank {mine[1]}: {_INSTEAD}")


def _states(state_dict: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What is kept of every parameter, in their order."""
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    return [state_dict["state"].get(number, {}) for number in numbers]


def _plain(stamp: Any) -> Any:
    """A stamp as it was written, whatever became of its tuples."""
    return stamp and tuple(tuple(part) if isinstance(part, list) else part for part in stamp)


def _check_unsaid(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Of what was saved without saying what it is of: a warning, if shapes are right."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    known = type(optimizer).__module__.startswith("torch.optim")  # of others nobody knows what they keep
    for parameter, kept in zip(parameters, _states(state_dict) if known else (), strict=False):
        share = share_of(parameter)
        for value in kept.values() if share is not None else ():
            if isinstance(value, torch.Tensor) and value.dim() == parameter.dim() and value.shape != parameter.shape:
                raise ProgramError(
                    f"this optimizer state has {tuple(value.shape)} for {share and share.name}, of which this rank has "
                    f"{tuple(parameter.shape)}: {_INSTEAD}"
                )
    if state_dict["state"]:
        warnings.warn(f"this optimizer state does not say whose shares it is of: {_INSTEAD}", stacklevel=4)


def _stamps(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Of every parameter (name, rank, dim, outer, unit, sizes), None if it is whole."""
    found = [share_of(p) for group in optimizer.param_groups for p in group["params"]]
    return [share and (share.name, share.rank, *share.layout) for share in found]
