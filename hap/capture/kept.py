"""What Python code keeps beside tensors that have names: numbers, words and containers that its next call may read.

They are seen where they are attributes of a module, of the loss function or of their classes, in lists, dicts, arrays
and plain objects that these have, in what functions close over, their defaults, and in globals that they name: not too
deep, and not too many of them. Afterwards all can be put back as it was.
"""

from __future__ import annotations

import functools
import itertools
import re
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hap.capture.torch_private import has_values

_DEPTH = 3  # of containers and objects in each other, those of a module being the first
_MOST = 1000  # items of one of them
_LIBRARIES = frozenset({"torch", "numpy", "builtins", "hap", "collections", "functools", "itertools", "logging"})
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_PLAIN = (int, float, complex, str, bytes, type(None))
_LRU = type(functools.lru_cache(len))
_NOTHING = object()


class Followed:
    """A module's own ``forward`` in a trace, which ``__wrapped__`` is."""

    __wrapped__: Any


class _Cells(dict[str, Any]):
    """Of a function, by their names."""


class _Globals(dict[str, Any]):
    """``table``: of a function; what that names of it is inside."""

    table: dict[str, Any]


class Kept:
    """What ``roots`` have just now. ``parts``: each container with what is in it; ``marks``: by names as
    ``decoder.state.tau``, what tells one state from another; ``caches``: functions under ``functools.lru_cache``.
    ``code``: that of functions and classes, too."""

    def __init__(self, roots: Sequence[object], *, code: bool = True) -> None:
        self._code, self._known = code, set[int]()  # of what was looked into, by id
        self.parts: list[tuple[Any, dict[Any, Any]]] = []
        self.marks: dict[str, Any] = {}
        self.caches: list[Any] = []
        self._alive: list[object] = []  # an id is one thing's as long as that lives
        self._named = {id(module) for root in roots if isinstance(root, nn.Module) for module in root.modules()}
        for root in roots:
            for name, one in root.named_modules() if isinstance(root, nn.Module) else (("", root),):
                self._look(name, one, 0)

    def changed(self, now: Kept) -> list[str]:
        """The names of what is another one in ``now``."""
        names = dict.fromkeys((*now.marks, *self.marks))
        return [n for n in names if not _is_it(self.marks.get(n, _NOTHING), now.marks.get(n, _NOTHING))]

    def traced_in(self, now: Kept) -> list[str]:
        """The names of what is a tensor of a trace in ``now``, and was none; those of modules by their own."""
        made = [n for n in self.changed(now) if now.marks.get(n) is torch.Tensor]
        return [re.sub(r"\b_(parameters|buffers|modules)\.", "", n) for n in made]

    def restore(self) -> None:
        """All that has changed is as it was, but for code."""
        for container, contents in self.parts:
            if not isinstance(container, tuple):
                _restore(container, contents)

    def inside(self, container: Any, key: Any) -> Any:
        """What is at the key of a container, None if it was not there."""
        found = (contents.get(key) for of, contents in self.parts if of is container)
        return next(found, None)

    def _look(self, name: str, one: Any, depth: int) -> None:
        """Modules come at depth 0 themselves, and not inside of others."""
        if id(one) in self._known or (depth > 0 and id(one) in self._named):
            return
        self._known.add(id(one))
        self._alive.append(one)
        if isinstance(one, _LRU):
            self.caches.append(one)
        for container, contents in _parts(one, self._code):
            if depth > 0 and len(contents) > _MOST:
                continue
            self.parts.append((container, contents))
            self._alive.append(container)
            for key, value in contents.items():
                called = f"{name}.{key}".lstrip(".") if key != "" else name
                self.marks[called] = _mark(value)
                if depth < _DEPTH and not isinstance(value, _PLAIN):
                    self._look(called, value, depth + (key != ""))


def put(container: Any, key: Any, value: Any) -> None:
    """In the place of what ``Kept.parts`` has there."""
    if isinstance(container, _Cells):
        container[key].cell_contents = value
    elif isinstance(container, _Globals):
        container.table[key] = value
    elif isinstance(container, type):
        setattr(container, key, value)
    elif not isinstance(container, (tuple, set, frozenset)):
        container[key] = value


def _restore(container: Any, contents: Mapping[Any, Any]) -> None:
    now = dict(_contents(container))
    if now.keys() == contents.keys() and all(_is_it(now[key], value) for key, value in contents.items()):
        return
    if isinstance(container, np.ndarray):
        container.flat[:] = list(contents.values())
    elif isinstance(container, list):
        container[:] = contents.values()
    elif isinstance(container, (deque, set)):
        container.clear()
        (container.extend if isinstance(container, deque) else container.update)(contents.values())
    else:
        for key, value in contents.items():
            if not (_is_it(now.get(key, _NOTHING), value) or isinstance(value, _CODE)):
                put(container, key, value)
        for key in now.keys() - contents.keys():
            if not isinstance(container, (_Cells, _Globals)) and not isinstance(now[key], _CODE):
                delattr(container, key) if isinstance(container, type) else container.pop(key)


def _parts(one: Any, code: bool) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """The containers that it is made of, each with what is in it. Tensors are none."""
    if isinstance(one, (dict, list, tuple, set, frozenset, deque, np.ndarray)):
        yield one, _contents(one)
    elif isinstance(one, types.MethodType):
        yield (), {"": one.__self__}
        if code:
            yield (), {"": one.__func__}
    elif isinstance(one, functools.partial):
        yield (), {"": one.func, "args": one.args, "keywords": one.keywords}
    elif isinstance(one, (_LRU, Followed)):
        if code:
            yield (), {"": one.__wrapped__}
    elif isinstance(one, types.FunctionType):
        if code:
            yield from _parts_of_function(one)
    elif isinstance(one, type):
        if code and _is_users(one):
            yield one, _contents(one)
            yield (), _called(one)
    elif not isinstance(one, (torch.Tensor, *_CODE)) and isinstance(getattr(one, "__dict__", None), dict):
        yield vars(one), dict(vars(one))
        if code:
            yield (), {"": type(one)}


def _parts_of_function(one: types.FunctionType) -> Iterator[tuple[Any, dict[Any, Any]]]:
    if not _is_users(one):
        return
    cells = _Cells(zip(one.__code__.co_freevars, one.__closure__ or (), strict=True))
    named = _Globals()
    named.table = one.__globals__
    named.update((n, None) for n in names_in(one.__code__) if n in one.__globals__)
    arguments = one.__code__.co_varnames[: one.__code__.co_argcount]
    defaults = one.__defaults__ or ()
    yield cells, _contents(cells)
    yield (), dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    for table in (one.__kwdefaults__ or {}, vars(one)):
        yield table, dict(table)
    yield named, _contents(named)


def _contents(container: Any) -> dict[Any, Any]:
    if isinstance(container, _Cells):
        return {n: cell.cell_contents for n, cell in container.items() if cell != types.CellType()}
    if isinstance(container, _Globals):
        return {n: container.table[n] for n in container if _is_data(container.table.get(n, _NOTHING))}
    if isinstance(container, type):
        return {n: v for n, v in vars(container).items() if not n.startswith("__") and _is_data(v)}
    if isinstance(container, np.ndarray):
        small = container.dtype.kind in "biuf" and container.size <= _MOST
        return dict(enumerate(container.ravel().tolist())) if small else {}
    if isinstance(container, dict):
        return dict(dict.items(container))  # as they lie there: some make something of what they hand out
    if isinstance(container, (set, frozenset)):
        return {item: item for item in container}
    return dict(enumerate(container))


def _is_data(value: Any) -> bool:
    """Of globals and classes nothing else is looked at, but functions for what they name themselves."""
    return isinstance(value, (*_PLAIN, dict, list, deque, set, np.ndarray, itertools.count, _LRU, nn.Module)) or (
        isinstance(value, types.FunctionType) and _is_users(value)
    )


def _called(of: type) -> dict[Any, Any]:
    """The methods that its objects' calls come to, as far as their names say."""
    names, found = ["forward", "__call__"], dict[Any, Any]()
    while names:
        name = names.pop()
        function = getattr(of, name, None)
        if name not in found and isinstance(function, types.FunctionType) and _is_users(function):
            found[name] = function
            names += names_in(function.__code__)
    return found


def names_in(code: types.CodeType) -> list[str]:
    """Globals and attributes that it names, and so do functions inside of it."""
    inner = (names_in(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return [*code.co_names, *itertools.chain(*inner)]


def _is_users(one: Any) -> bool:
    return (one.__module__ or "").partition(".")[0] not in _LIBRARIES


def _mark(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"one at {id(value)}" if has_values(value) else torch.Tensor
    return f"one at {id(value)}" if isinstance(value, (nn.Module, types.FunctionType)) else type(value)


def _is_it(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)


def tensors_in(parts: Iterable[tuple[Any, dict[Any, Any]]]) -> Iterator[tuple[Any, Any, Any]]:
    """Containers with the keys at which they have tensors, or tuples with tensors."""
    for container, contents in parts:
        for key, value in contents.items():
            if isinstance(value, torch.Tensor) or (
                type(value) is tuple and any(isinstance(item, torch.Tensor) for item in value)
            ):
                yield container, key, value


def bind_anew(copied: nn.Module, memo: dict[int, Any]) -> None:
    """Of a copy made by ``copy.deepcopy`` with this memo, which leaves functions as they are: what those close over,
    and their defaults, are the copy's."""
    done: dict[int, Any] = {}
    for container, contents in Kept((copied,), code=False).parts:
        for key, value in contents.items():
            if isinstance(value, (types.FunctionType, types.MethodType, tuple)):
                new = _bound_anew(value, memo, done)
                if new is not value:
                    put(container, key, new)


def _bound_anew(value: Any, memo: Mapping[int, Any], done: dict[int, Any]) -> Any:
    """The copy of it, itself if it has none. ``done``: of functions and cells, by id."""
    if id(value) in memo or id(value) in done:
        return memo.get(id(value), done.get(id(value)))
    if isinstance(value, types.MethodType):
        function, own = (_bound_anew(one, memo, done) for one in (value.__func__, value.__self__))
        return value if function is value.__func__ and own is value.__self__ else types.MethodType(function, own)
    if type(value) is tuple:
        items = tuple(_bound_anew(item, memo, done) for item in value)
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    if not isinstance(value, types.FunctionType):
        return value
    done[id(value)] = value  # meanwhile
    cells = tuple(_cell_anew(cell, memo, done) for cell in value.__closure__ or ())
    defaults = _bound_anew(value.__defaults__, memo, done)
    keywords = {k: _bound_anew(v, memo, done) for k, v in (value.__kwdefaults__ or {}).items()}
    is_same = all(keywords[k] is v for k, v in (value.__kwdefaults__ or {}).items()) and defaults is value.__defaults__
    if is_same and all(a is b for a, b in zip(cells, value.__closure__ or (), strict=True)):
        return value
    new = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
    new.__kwdefaults__ = keywords or None
    new.__qualname__, new.__doc__ = value.__qualname__, value.__doc__
    vars(new).update(vars(value))
    done[id(value)] = new
    return new


def _cell_anew(cell: types.CellType, memo: Mapping[int, Any], done: dict[int, Any]) -> types.CellType:
    if id(cell) not in done and cell != types.CellType():
        content = _bound_anew(cell.cell_contents, memo, done)
        done[id(cell)] = cell if content is cell.cell_contents else types.CellType(content)
    found: types.CellType = done.get(id(cell), cell)
    return found
