"""A model's parameters and buffers, each once, and which other names they go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hap.errors import CaptureError


@dataclass(frozen=True)
class ModelState:
    """First names in registration order. ``tied`` maps every further name (of a parameter or buffer) to the first."""

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]


def model_state(model: nn.Module) -> ModelState:
    """CaptureError for what is no plain dense tensor: lazy, sharded, sparse or quantised parameters."""
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    first_names = {id(t): name for name, t in (*parameters.items(), *buffers.items())}
    everything = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    tied = {name: first_names[id(t)] for name, t in everything if first_names[id(t)] != name}
    for name, parameter in parameters.items():
        _check(name, parameter, nn.Parameter)
    for name, buffer in buffers.items():
        _check(name, buffer, torch.Tensor, nn.Buffer)
    if not any(p.requires_grad for p in parameters.values()):
        raise CaptureError("the model has no trainable parameter")
    _check_storage(parameters)
    return ModelState(parameters, buffers, tied)


def _check(name: str, tensor: torch.Tensor, *kinds: type) -> None:
    if nn.parameter.is_lazy(tensor):
        raise CaptureError(f"{name} is not initialised yet: run the model once before capture")
    if type(tensor) not in kinds or tensor.layout != torch.strided:
        raise CaptureError(
            f"{name} is a {type(tensor).__name__} of layout {tensor.layout}: HAP takes plain dense tensors"
        )


def _check_storage(parameters: Mapping[str, nn.Parameter]) -> None:
    """Two parameters in one storage would be trained apart and written over each other."""
    owners: dict[tuple[torch.device, int], str] = {}
    for name, parameter in parameters.items():
        if parameter.device.type == "meta" or parameter.numel() == 0:
            continue
        key = (parameter.device, parameter.data_ptr())
        if key in owners:
            raise CaptureError(f"{name} and {owners[key]} share memory but are two parameters: tie them as one")
        owners[key] = name
