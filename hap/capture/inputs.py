"""What the training step is called with, as named tensors: ``args.0``, ``kwargs.labels``, ``targets.0``.

A *path* is the door a tensor comes in by (``args``, ``kwargs`` or ``targets``), then positions and keys, joined by
dots; tuples, lists and mappings may nest (``args.0.mask``). Everything that is not a tensor is part of the program: a
bool, number, string or None in the example inputs is a constant of the capture, and a call that changes it needs a
capture of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hap.errors import CaptureError

_CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class StepInputs:
    """One call of the step: ``model(*args, **kwargs)``, then ``loss_fn(output, *targets)``."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Any, ...]

    @cached_property
    def named(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """Every tensor with its path: args, then kwargs by sorted key, then targets. Keyword order is no order."""
        doors = (("args", self.args), ("kwargs", _sorted(self.kwargs)), ("targets", self.targets))
        return tuple(found for door, tree in doors for found in _tensors(tree, door))

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Everything that is no tensor, by its path."""
        doors = (("args", self.args), ("kwargs", self.kwargs), ("targets", self.targets))
        return {path: item for door, tree in doors for path, item in _leaves(tree, door) if not _is_tensor(item)}

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> StepInputs:
        """The same call with its tensors replaced, in the order of ``named``."""
        by_path = {path: tensor for (path, _), tensor in zip(self.named, tensors, strict=True)}
        return StepInputs(
            _replace(self.args, "args", by_path),
            _replace(self.kwargs, "kwargs", by_path),
            _replace(self.targets, "targets", by_path),
        )


def step_inputs(example_inputs: Any, example_targets: Any = None) -> StepInputs:
    """Read the accepted forms: a tensor, a tuple or list of positionals, a mapping of keywords, or ``(args, kwargs)``.

    A pair of a tuple (or list) and a mapping is always read as ``(args, kwargs)``. Targets are a tensor, or a tuple or
    list of positionals for the loss function. CaptureError for a tensor that requires grad, and for an object that is
    neither a tensor, a plain constant nor a tuple, list or mapping of them.
    """
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        kwargs = example_inputs
    elif isinstance(example_inputs, (tuple, list)):
        args = tuple(example_inputs)
        if len(args) == 2 and isinstance(args[0], (tuple, list)) and isinstance(args[1], Mapping):
            args, kwargs = tuple(args[0]), args[1]
    elif example_inputs is not None:
        args = (example_inputs,)
    if not isinstance(example_targets, (tuple, list)):
        example_targets = () if example_targets is None else (example_targets,)
    inputs = StepInputs(args, {str(k): v for k, v in kwargs.items()}, tuple(example_targets))
    _check_inputs(inputs)
    return inputs


def input_paths(example_inputs: Any, example_targets: Any = None) -> list[tuple[str, torch.Tensor]]:
    """``(path, tensor)`` of every tensor in a call, in the order of the graph's ``input`` nodes."""
    return list(step_inputs(example_inputs, example_targets).named)


def _check_inputs(inputs: StepInputs) -> None:
    seen: dict[str, torch.Tensor] = {}
    for path, tensor in inputs.named:
        if tensor.requires_grad:
            raise CaptureError(
                f"input {path} requires grad; HAP computes gradients of parameters only: detach it, and if the model "
                "differentiates by it, let the forward pass call its requires_grad_()"
            )
        if tensor.layout != torch.strided:
            raise CaptureError(f"input {path} has layout {tensor.layout}; HAP takes dense tensors")
        if path in seen:
            raise CaptureError(f"two inputs have the path {path}: rename one of the keys")
        seen[path] = tensor


def _sorted(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: mapping[key] for key in sorted(mapping)}


def _is_tensor(item: Any) -> bool:
    return isinstance(item, torch.Tensor)


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(tree, (tuple, list)):
        for position, item in enumerate(tree):
            yield from _leaves(item, f"{path}.{position}")
    else:
        yield path, tree


def _tensors(tree: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    for leaf, item in _leaves(tree, path):
        if isinstance(item, torch.Tensor):
            yield leaf, item
        elif not isinstance(item, _CONSTANTS):
            kind = type(item).__name__
            raise CaptureError(
                f"input {leaf} is a {kind}; HAP takes tensors, plain constants and tuples, lists or dicts"
            )


def _replace(tree: Any, path: str, by_path: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return by_path[path]
    if isinstance(tree, Mapping):
        return {key: _replace(item, f"{path}.{key}", by_path) for key, item in tree.items()}
    if isinstance(tree, (tuple, list)):
        items = [_replace(item, f"{path}.{position}", by_path) for position, item in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree
