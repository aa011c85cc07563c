"""An optimizer's step beside the program: what it goes by is settled before, in the program's own thread, and what it
came to is taken over there.

The user may set options, step a scheduler or zero gradients at any time. So another optimizer of the same kind steps,
for copies of the parameters and by copies of the options as they were when it was prepared: the same on all ranks,
whenever a thread gets to it. What it has written to the options counts where the user has written nothing since.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from hap.capture.torch_private import no_trace
from hap.errors import ProgramError
from hap.runtime.elementwise import ask

_OWN = frozenset({"param_groups", "state", "step"})  # attributes that are not the same


class _Option(NamedTuple):
    """As the user has it and as it was given on, with tensors' versions."""

    here: Any
    version: int
    given: Any
    given_version: int


class StandIn:
    """See the module docstring. ``copies``: each of the optimizer's parameters, with the one that stands for it."""

    def __init__(self, optimizer: torch.optim.Optimizer, copies: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """ProgramError for an optimizer that would step for others all the same."""
        self._optimizer, self._copies = optimizer, copies
        self._mine: torch.optim.Optimizer = object.__new__(type(optimizer))
        self._attributes: dict[str, Any] = {}
        self._options: list[dict[str, _Option]] = []
        kept = {key: value for key, value in vars(optimizer).items() if key not in _OWN}
        if any(_reaches(value, copies) for value in kept.values()):
            raise ProgramError(
                f"{type(optimizer).__name__} keeps an optimizer or parameters of its own, and ACCO updates copies: use "
                "one that goes by its param_groups"
            )
        step = vars(optimizer).get("step")  # a scheduler puts one there that counts, and calls the class's
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
            raise ProgramError("ACCO calls the step() of the optimizer's class, and this one's was replaced")
        self.prepare()

    def prepare(self) -> None:
        """For the next ``step``: the options are those of now."""
        optimizer, mine = self._optimizer, self._mine
        self._attributes = {key: value for key, value in vars(optimizer).items() if key not in _OWN}
        self._state = optimizer.state
        self._options, groups = [], []
        for group in optimizer.param_groups:
            found = _copied({key: option for key, option in group.items() if key != "params"})
            self._options.append({k: _Option(group[k], _version(group[k]), v, _version(v)) for k, v in found.items()})
            groups.append({"params": [self._copies[p] for p in group["params"]], **found})
        state = {self._copies.get(key, key): kept for key, kept in optimizer.state.items()}
        vars(mine).clear()
        vars(mine).update(self._attributes, param_groups=groups, state=defaultdict(dict, state))
        ask(mine)  # here, as it draws from the program's own random numbers

    def step(self, *, keeps: bool = True) -> None:
        """In any thread, by the copies' gradients. If it ``keeps`` nothing, the optimizer's state stays as it is."""
        state = self._mine.state
        if not keeps:
            for key, kept in state.items():
                state[key] = _copied(kept)
        with no_trace:
            self._mine.step()

    def take_over(self) -> None:
        """What the last step has kept is the optimizer's. ProgramError if that was given another state meanwhile."""
        optimizer, mine = self._optimizer, self._mine
        if optimizer.state is not self._state:
            raise ProgramError("the optimizer was given another state beside ACCO's step: acco.finish() before that")
        originals = {copied: parameter for parameter, copied in self._copies.items()}
        for parameter, kept in mine.state.items():
            optimizer.state[originals.get(parameter, parameter)] = kept
        for group, options, found in zip(optimizer.param_groups, self._options, mine.param_groups, strict=False):
            for key, value in found.items():
                if key != "params" and _is_newer(options.get(key), group.get(key), value):
                    _put(group, key, value)
        for key, value in vars(mine).items():
            if key not in _OWN and self._attributes.get(key) is not value:
                setattr(optimizer, key, value)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers ask it


def _is_newer(option: _Option | None, here: Any, value: Any) -> bool:
    """Whether the step wrote to an option, and the user did not."""
    if option is None:
        return here is None
    if here is not option.here or _version(here) != option.version:
        return False
    return value is not option.given or _version(value) != option.given_version or isinstance(value, (list, dict, set))


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    here = group.get(key)
    if isinstance(here, torch.Tensor) and isinstance(value, torch.Tensor) and here.shape == value.shape:
        with torch.no_grad():
            here.copy_(value)  # others may hold it
    else:
        group[key] = value


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _copied(kept: Mapping[str, Any]) -> dict[str, Any]:
    """With copies of what may be written in place."""
    tensors = {key: value.clone() for key, value in kept.items() if isinstance(value, torch.Tensor)}
    containers = {key: copy.deepcopy(value) for key, value in kept.items() if isinstance(value, (list, dict, set))}
    return {**kept, **tensors, **containers}


def _reaches(value: Any, parameters: Mapping[torch.Tensor, torch.Tensor]) -> bool:
    if isinstance(value, Mapping):
        return any(_reaches(part, parameters) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_reaches(part, parameters) for part in value)
    return isinstance(value, torch.optim.Optimizer) or (isinstance(value, torch.Tensor) and value in parameters)
