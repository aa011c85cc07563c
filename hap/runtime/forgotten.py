"""What is done to the model that was compiled, and not to its program, would be lost without a word.

A program has parameters of its own, this rank's shares. So before an optimizer's step it is asked whether all that it
has are parameters of models that were compiled, and none of them has a gradient; and before a program's first step
whether its model's parameters were written to since then, as by ``model.load_state_dict``.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hap.errors import ProgramError

_compiled: dict[int, weakref.ref[torch.Tensor]] = {}  # by id
_hooked: list[Any] = []


class Written:
    """Whether somebody has written to a model's parameters and buffers since this was made. Holds none of them."""

    def __init__(self, model: nn.Module) -> None:
        named = (*model.named_parameters(), *model.named_buffers())
        self._seen = [
            (name, weakref.ref(tensor), tensor._version) for name, tensor in named if not tensor.is_inference()
        ]

    def forget(self) -> None:
        """The program has been given values since."""
        self._seen = []

    def warn(self) -> None:
        """Once, if so."""
        seen = self._seen
        self.forget()
        changed = [name for name, known, version in seen if (t := known()) is not None and t._version != version]
        if changed:
            warnings.warn(
                f"{changed[0]} of the model was written to after it was compiled and before its program's first step, "
                "which goes by the program's own: give it to program.load_state_dict()",
                stacklevel=5,  # of torch's own are two
            )


def note_compiled(model: nn.Module) -> None:
    """From now on optimizers are asked for its parameters. Nothing is kept alive by it."""
    for number in [number for number, known in _compiled.items() if known() is None]:
        del _compiled[number]
    _compiled.update({id(parameter): weakref.ref(parameter) for parameter in model.parameters()})
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args[1:] or kwargs:
        return  # a closure makes the gradients
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p.grad is None and _is_compiled(p) for p in parameters):
        raise ProgramError(
            f"{type(optimizer).__name__} has parameters of a model that was compiled, none of which has a gradient: "
            "make it of program.parameters()"
        )


def _is_compiled(parameter: torch.Tensor) -> bool:
    known = _compiled.get(id(parameter))
    return known is not None and known() is parameter
