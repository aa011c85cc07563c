"""What is done to the model that was compiled, and not to its program, would be lost without a word.

A program has parameters of its own, this rank's shares. So before an optimizer's step it is asked whether all that it
has are parameters of models that were compiled, and none of them has a gradient; and before a program's step whether
its model's parameters were written to since then, as by ``model.load_state_dict``, or what it knows as a constant, a
number that its loss function reads, or the copies that its ``state_dict`` returns.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hap.capture.origins import Number, Origin
from hap.errors import ProgramError

_compiled: dict[int, weakref.ref[torch.Tensor]] = {}  # by id
_hooked: list[Any] = []
SMALL = 1 << 20  # bytes of a copy that is kept, to be looked at


class Forgotten:
    """Whether somebody has written where a program does not look: to its model's parameters and buffers, to tensors
    that the step has as constants, into copies that it handed out. Holds none of the model's."""

    def __init__(self, model: nn.Module) -> None:
        named = (*model.named_parameters(), *model.named_buffers())
        self._model = [(n, weakref.ref(tensor), tensor._version) for n, tensor in named if not tensor.is_inference()]
        self._origins: Sequence[Origin | Number] = ()
        self._copy: tuple[str, torch.Tensor, weakref.ref[torch.Tensor], int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Forgotten:
        """Of a copied program, which is not what the model's values were meant for."""
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__, _model=[], _copy=None)
        return found

    def follow(self, origins: Sequence[Origin | Number]) -> None:
        """These must stay as they are."""
        self._origins = origins

    def loaded(self) -> None:
        """The program has been given values."""
        self._model, self._copy = [], None

    def handed_out(self, copies: Mapping[str, torch.Tensor]) -> None:
        """By ``state_dict()``: copies, of which one is looked at, the smallest. The model may be given them."""
        self._warn_of_copy(stacklevel=4)
        self._model = []
        name = min((n for n, t in copies.items() if t.numel()), key=lambda n: copies[n].nbytes, default=None)
        if name is not None and copies[name].nbytes <= SMALL and not copies[name].is_inference():
            copy = copies[name]
            self._copy = name, copy.detach(), weakref.ref(copy), copy._version

    def look(self, stacklevel: int) -> None:
        """Before a step. ProgramError for a constant, or a number, that has changed; the others are warned of."""
        for origin in self._origins:
            if origin.has_changed():
                if isinstance(origin, Number):
                    raise ProgramError(
                        f"{origin.name}, which the loss function reads, has changed since the program was compiled: it "
                        f"computes with {origin.content}: give it to the loss as a target, in a tensor"
                    )
                what = f"{origin.name}" if origin.name else f"a tensor of shape {tuple(origin.content.shape)}"
                raise ProgramError(
                    f"{what}, which is no parameter or buffer of the model, has changed since the program was compiled "
                    "with its values: make it a buffer, or what it belongs to (a teacher, a target network) a part of "
                    "the model, or give it as an input"
                )
        self._warn_of_copy(stacklevel)
        self._warn_of_model(stacklevel)

    def _warn_of_model(self, stacklevel: int) -> None:
        """Before the first step. Later on who trains the model, too, or evaluates it, may write to it."""
        seen, self._model = self._model, []
        changed = [name for name, known, version in seen if getattr(known(), "_version", version) != version]
        if changed:
            warnings.warn(
                f"{changed[0]} of the model was written to after it was compiled and before its program's first step, "
                "which goes by the program's own: give it to program.load_state_dict()",
                stacklevel=stacklevel,
            )

    def _warn_of_copy(self, stacklevel: int) -> None:
        """Once, of one that was written to and that nobody has any more."""
        if self._copy is None or self._copy[2]() is not None:
            return
        (name, copy, _, version), self._copy = self._copy, None
        if copy._version != version:
            warnings.warn(
                f"{name} of what program.state_dict() returned was written to, which is a copy: write to "
                "program.parameters(), average by torch.optim.swa_utils.AveragedModel, or load_state_dict() it",
                stacklevel=stacklevel,
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
