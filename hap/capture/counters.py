"""Numbers that a model keeps in Python and changes as it goes: a program's calls have those of the step it was made of.

A temperature that falls from step to step, a count of calls, are seen where they are attributes of a module, or of
the loss function, or lie in lists, dicts and plain objects that these have, not too deep and not too many of them. A
count that nothing reads does no harm, and a cache that knows for what length it was made changes once: so where a
number has changed, the step is traced once more, and refused if that comes to another one.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hap.errors import CaptureError
from hap.graph import Graph

_DEPTH = 3  # of containers and objects in each other, those of a module being the first
_MOST = 1000  # items of one of them
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def steady(traced: Callable[[], Graph], modules: Sequence[object], subject: str) -> Graph:
    """What ``traced`` returns, if it does so again where it has changed numbers of ``modules``. CaptureError."""
    before = _numbers(modules)
    graph = traced()
    changed = [name for name, number in _numbers(modules).items() if before.get(name, number) != number]
    if changed and traced().fingerprint != graph.fingerprint:
        raise CaptureError(
            f"cannot capture {subject}: the forward pass changes the number {changed[0]!r}, and the step with it, "
            "but a program's steps are all alike: keep it in a buffer"
        )
    return graph


def _numbers(roots: Sequence[object]) -> dict[str, float]:
    """By their names, as ``decoder.state.tau``."""
    named = {id(module) for root in roots if isinstance(root, nn.Module) for module in root.modules()}
    known: set[int] = set()  # of what was looked into, by id
    found: dict[str, float] = {}
    for root in roots:
        for name, one in root.named_modules() if isinstance(root, nn.Module) else (("", root),):
            found.update((number.lstrip("."), value) for number, value in _inside(name, one, 0, known, named))
    return found


def _inside(name: str, one: Any, depth: int, known: set[int], named: set[int]) -> Iterator[tuple[str, float]]:
    """The numbers in a module, which is at depth 0, a container or an object. Those that are ``named`` come at depth 0
    themselves, and not inside of others."""
    if id(one) in known or (depth > 0 and id(one) in named):
        return
    known.add(id(one))
    items = _items(one)
    for key, value in items.items() if depth == 0 or len(items) <= _MOST else ():
        if isinstance(value, (int, float)):
            yield f"{name}.{key}", value
        elif depth < _DEPTH:
            yield from _inside(f"{name}.{key}", value, depth + 1, known, named)


def _items(one: Any) -> Mapping[Any, Any]:
    """What is in it. Tensors are no containers."""
    if isinstance(one, dict):
        return one
    if isinstance(one, (list, tuple)):
        return dict(enumerate(one))
    if isinstance(one, (torch.Tensor, *_CODE)):
        return {}
    return getattr(one, "__dict__", {})
