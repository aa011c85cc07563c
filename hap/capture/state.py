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
    if new := [name for name, t in everything if id(t) not in first_names]:
        raise CaptureError(
            f"{new[0]} is another tensor whenever they are listed, as under PEFT's LoRA of nn.MultiheadAttention, "
            "which merges weights in every call: adapt layers that are called themselves"
        )
    tied = {name: first_names[id(t)] for name, t in everything if first_names[id(t)] != name}
    for name, parameter in parameters.items():
        _check(name, parameter, nn.Parameter)
    for name, buffer in buffers.items():
        _check(name, buffer, torch.Tensor, nn.Buffer)
    if not any(p.requires_grad for p in parameters.values()):
        raise CaptureError("the model has no trainable parameter")
    _check_memory(parameters, buffers)
    return ModelState(parameters, buffers, tied)


def _check(name: str, tensor: torch.Tensor, *kinds: type) -> None:
    if nn.parameter.is_lazy(tensor):
        raise CaptureError(f"{name} is not initialised yet: run the model once before capture")
    if type(tensor) not in kinds or tensor.layout != torch.strided:
        raise CaptureError(
            f"{name} is a {type(tensor).__name__} of layout {tensor.layout}: HAP takes plain dense tensors"
        )


def _check_memory(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
    """Two parameters in one memory would be trained apart and written over each other; a buffer in that of a trainable
    parameter would stay as it is. What lies beside each other in one storage shares nothing."""
    storages: dict[tuple[torch.device, int], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*parameters.items(), *buffers.items()):
        if tensor.device.type != "meta" and tensor.numel() > 0:
            key = (tensor.device, tensor.untyped_storage().data_ptr())
            storages.setdefault(key, []).append((name, tensor))
    order = {name: number for number, name in enumerate((*parameters, *buffers))}
    for found in storages.values():
        before: list[tuple[str, torch.Tensor]] = []  # that reach to where the next begins
        for name, tensor in sorted(found, key=lambda named: _span(named[1])):
            before = [(other, own) for other, own in before if _span(own)[1] > _span(tensor)[0]]
            for other, own in before:
                first, second = sorted((name, other), key=order.__getitem__)
                if first in parameters and _overlap(own, tensor):
                    _check_pair(first, second, parameters)
            before.append((name, tensor))


def _check_pair(first: str, second: str, parameters: Mapping[str, nn.Parameter]) -> None:
    """Of a parameter and another tensor in the same memory."""
    if second in parameters:
        raise CaptureError(
            f"{second} and {first} share memory but are two parameters: tie them as one, or give each its own"
        )
    if parameters[first].requires_grad:
        raise CaptureError(
            f"buffer {second} shares memory with parameter {first}, and would not change with it: "
            "read the parameter itself, or register a clone"
        )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage, whose spans overlap, have an element in common: columns of a matrix have
    none."""
    if (one.is_contiguous() and other.is_contiguous()) or one.itemsize != other.itemsize:
        return True
    first, end = min(_span(t)[0] for t in (one, other)), max(_span(t)[1] for t in (one, other))
    taken = torch.zeros((end - first) // one.itemsize, dtype=torch.bool)
    for tensor in (one, other):
        start = (_span(tensor)[0] - first) // one.itemsize
        place = taken.as_strided(tensor.shape, tensor.stride(), start)
        if place.any():
            return True
        place.fill_(True)
    return False


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where in its storage it begins and ends, in bytes."""
    extent = 1 + sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + extent * tensor.itemsize
