"""Where the constants of a step come from: tensors of the user's that are none of the model's parameters and buffers.

A teacher that a loss function closes over, class weights that a module keeps in an attribute: a program has the values
that they had. So it is known of each which tensor it was, and whether that has been written to, or replaced, since. So
is whether numbers have changed that the loss function's own code names: a weight that a schedule moves.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hap.capture.kept import names_in
from hap.capture.torch_private import is_traced


class Origin:
    """One constant's: ``content`` is a copy of what it had. Keeps nothing of the user's alive."""

    def __init__(self, tensor: torch.Tensor, content: torch.Tensor, owner: nn.Module | None, name: str) -> None:
        """``name``: the attribute of ``owner`` that it is, if it is one."""
        self.content, self.name = content, name
        self._owner = None if owner is None else weakref.ref(owner)
        self._seen(tensor)

    def has_changed(self) -> bool:
        """Whether it has other values than it had."""
        tensor = self._tensor() if self._owner is None else _tables(self._owner()).get(self.name)
        if not isinstance(tensor, torch.Tensor):
            return False  # nobody has it any more
        if tensor is self._tensor() and not tensor.is_inference() and _state(tensor) == self._state:
            return False
        same = tensor.shape == self.content.shape and tensor.dtype == self.content.dtype
        if same and torch.equal(tensor.detach().cpu(), self.content):
            self._seen(tensor)
            return False
        return same or self._owner is None  # what was replaced by another shape is a cache that grew

    def _seen(self, tensor: torch.Tensor) -> None:
        self._tensor, self._state = weakref.ref(tensor), None if tensor.is_inference() else _state(tensor)


class Number:
    """One that the loss function reads, as ``read`` does: a global, what it closes over, or of an object there."""

    def __init__(self, name: str, read: Callable[[], Any]) -> None:
        self.name, self.content, self._read = name, read(), read

    def has_changed(self) -> bool:
        now = self._read()
        return isinstance(now, (int, float)) and now != self.content and now == now


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr()


class Origins(tuple[Origin | Number, ...]):
    """Of all constants of a graph. They are of this process: what is pickled has none."""

    def __reduce__(self) -> Any:
        return Origins, ()


def origins_of(constants: Sequence[tuple[torch.Tensor, torch.Tensor]], roots: Sequence[object]) -> Origins:
    """Of pairs of what a trace had and a copy of it; ``roots``: the model, and the loss function, in whose modules it
    may be an attribute, of which the trace had an alias, or a copy on the CPU."""
    kept = list(_attributes(roots))
    found = []
    for tensor, content in constants:
        if not _is_plain(tensor):
            continue
        own = next(((own, owner, name) for own, owner, name in kept if _is_same(own, tensor)), (tensor, None, ""))
        found.append(Origin(own[0], content, *own[1:]))
    return Origins(found)


def numbers_of(loss_fn: object) -> Iterator[Number]:
    """Those that its code names, and none that is only near: others may change as they like."""
    call = loss_fn if inspect.isroutine(loss_fn) else getattr(type(loss_fn), "forward", type(loss_fn).__call__)
    function = getattr(call, "__func__", call)
    if not isinstance(function, types.FunctionType) or (function.__module__ or "").startswith("torch."):
        return
    own = getattr(loss_fn, "__self__", None if call is loss_fn else loss_fn)
    names = dict.fromkeys(names_in(function.__code__))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    near: dict[str, Callable[[], Any]] = {"": lambda: own}
    near |= {name: partial(getattr, cell, "cell_contents", None) for name, cell in cells.items()}
    near |= {n: partial(function.__globals__.get, n) for n in names if n in function.__globals__}
    for name, read in near.items():
        one = read()
        if isinstance(one, (int, float)):
            yield Number(name, read)
        for key in names if isinstance(getattr(one, "__dict__", None), dict) else ():
            inside = partial(_attribute, read, key)
            if key != "training" and isinstance(inside(), (int, float)):  # that is the program's own
                yield Number(f"{name}.{key}".lstrip("."), inside)


def _attribute(read: Callable[[], Any], name: str) -> Any:
    """Its own, or its class's: nothing is computed."""
    one = read()
    return getattr(one, "__dict__", {}).get(name, getattr(type(one), "__dict__", {}).get(name))


def _is_plain(tensor: torch.Tensor) -> bool:
    if is_traced(tensor):  # what a trace has left
        return False
    return not tensor.is_meta and not tensor.is_inference() and tensor.layout == torch.strided


def _attributes(roots: Sequence[object]) -> Iterator[tuple[torch.Tensor, nn.Module, str]]:
    for root in roots:
        for module in root.modules() if isinstance(root, nn.Module) else ():
            for name, value in _tables(module).items():
                if isinstance(value, torch.Tensor) and _is_plain(value):
                    yield value, module, name


def _tables(module: nn.Module | None) -> dict[str, Any]:
    return {} if module is None else {**vars(module), **module._parameters, **module._buffers}


def _is_same(own: torch.Tensor, tensor: torch.Tensor) -> bool:
    if own.shape != tensor.shape or own.dtype != tensor.dtype:
        return False
    if own.device == tensor.device:
        return own.data_ptr() == tensor.data_ptr()
    return torch.equal(own.detach().cpu(), tensor.detach().cpu())
