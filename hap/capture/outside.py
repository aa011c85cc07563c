"""A model's parameters and buffers where they are not reached as attributes of its modules: by a loss function that
closes over the model, such as one that adds the norm of its weights, by hooks, and from a list that a module keeps.

What is traced is a copy of the model. Whoever holds the model itself would read the values that it has, built into the
program as constants, without a gradient and for ever the same. So wherever PyTorch is called with one of the model's
own tensors, the copy's takes its place; and where that cannot be seen, it is refused. What the copy's forward leaves in
attributes, such as a term of the loss, the model has while its loss function is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hap.capture.state import ModelState
from hap.capture.torch_private import is_alias
from hap.errors import CaptureError

_INTERNAL = frozenset(vars(nn.Module()))
Hook = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class Outside:
    """A model, and its own tensors by ``id``, with their names. Nothing is kept alive by it."""

    model: weakref.ref[nn.Module]
    tensors: Mapping[int, tuple[weakref.ref[torch.Tensor], str]]

    @classmethod
    def of(cls, model: nn.Module, state: ModelState) -> Outside:
        return cls(weakref.ref(model), {}).and_of({**state.parameters, **state.buffers})

    def and_of(self, named: Mapping[str, torch.Tensor]) -> Outside:
        """With those of the copy, which a module may keep in a list, or a dict, beside its attributes."""
        more = {id(tensor): (weakref.ref(tensor), name) for name, tensor in named.items()}
        return Outside(self.model, {**self.tensors, **more})

    def name_of(self, tensor: torch.Tensor) -> str | None:
        known, name = self.tensors.get(id(tensor), (None, None))
        return name if known is not None and known() is tensor else None

    def inside(self, found: Any, state: Mapping[str, torch.Tensor]) -> Any:
        """An argument with the model's own tensors replaced by those of ``state``."""
        if isinstance(found, torch.Tensor):
            name = self.name_of(found)
            return found if name is None else state[name]
        if type(found) in (tuple, list):
            return type(found)(self.inside(item, state) for item in found)
        if type(found) is dict:
            return {key: self.inside(item, state) for key, item in found.items()}
        return found

    def shares_memory(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in the memory of one of them."""
        of = (known() for known, _ in self.tensors.values())
        return any(own is not None and own.device == tensor.device and is_alias(own, tensor) for own in of)

    @contextmanager
    def lent(self, copied: nn.Module) -> Iterator[None]:
        """While active, the model's modules have the tensors, numbers and containers that those of its copy have."""
        model, before = self.model(), list[tuple[dict[str, Any], dict[str, Any]]]()
        own = {} if model is None else dict(model.named_modules())
        try:
            for name, module in copied.named_modules():
                if name in own:
                    attributes = vars(own[name])
                    before.append((attributes, dict(attributes)))
                    attributes.update({k: v for k, v in vars(module).items() if k not in _INTERNAL and _is_lent(v)})
            yield
        finally:
            for attributes, kept in before:
                attributes.clear()
                attributes.update(kept)

    def turn(self, copied: nn.Module) -> None:
        """The model's modules are in the modes that those of its copy are in."""
        modes = {name: module.training for name, module in copied.named_modules()}
        for name, module in () if (model := self.model()) is None else model.named_modules():
            module.training = modes.get(name, module.training)

    def check_constant(self, constant: torch.Tensor, changing: Collection[str]) -> None:
        """CaptureError for what does not stay as it is: memory of those that are ``changing``, or what needs
        gradients."""
        if constant.device.type != "meta":
            for known, name in self.tensors.values():
                own = known()
                if name in changing and own is not None and own.device == constant.device and is_alias(own, constant):
                    raise CaptureError(
                        f"{name} is read outside of the model's forward where the program cannot follow: "
                        "read it from the model itself each time, not from what was taken of it before"
                    )
        if constant.requires_grad:
            raise CaptureError(
                f"a tensor of shape {tuple(constant.shape)} that needs gradients is no parameter of the model, and "
                "would get none: make what it belongs to a part of the model"
            )


def _is_lent(value: object) -> bool:
    return isinstance(value, (torch.Tensor, int, float, list, tuple, dict))


def hooks_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[Hook, ...]]:
    """What ``register_hook`` was called with, by parameter. CaptureError for hooks that run when ``.grad`` is there."""
    for name, parameter in parameters.items():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"{name} has a hook that runs once its gradient is accumulated: register it on the program's parameter"
            )
    hooks = {name: getattr(parameter, "_backward_hooks", None) for name, parameter in parameters.items()}
    return {name: tuple(found.values()) for name, found in hooks.items() if found}
