"""Masks of experts: ``ids == e``, or a part of ``one_hot(ids)``, as they are made while a model is traced.

Beside them it is noted how large ids can be, as those from ``topk`` number the scores, whether some may be alike
(``distinct``), and which parameters are parts of one tensor, as experts' often are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch

from hap.capture.distinct import Distinct
from hap.capture.seen import Seen

_INDICES = frozenset({"topk", "sort", "max", "min"})  # the second of their results
_ONLY_INDICES = frozenset({"argmax", "argmin", "argsort", "multinomial"})
_ARRANGING = frozenset({"view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "t"})
_ARRANGING |= {"contiguous", "detach", "to", "long"}
_COPYING = frozenset({"bool", "to", "long", "int", "contiguous", "clone"})


class Route(NamedTuple):
    """A mask that is set where ``ids`` are ``number``; ``axes``: its dims, as dims of ``ids``."""

    mask: Seen
    ids: Seen
    number: int
    axes: tuple[int, ...]

    def is_of(self, other: Route) -> bool:
        """Whether it is of the same rows."""
        same = self.ids.tensor is other.ids.tensor and self.ids.version == other.ids.version
        return self.number == other.number and same


class _Hot(NamedTuple):
    """A one-hot tensor of ``ids``: of every dim, which it is of ``ids``, and -1 for the experts'."""

    tensor: Seen
    ids: Seen
    axes: tuple[int, ...]


class _Below(NamedTuple):
    """Numbers that are all less than ``limit``."""

    ids: Seen
    limit: int


class _Slice(NamedTuple):
    part: torch.Tensor
    whole: torch.Tensor
    number: int


class Routes:
    """``first``: the first tensor that was made of the same; ``is_known``: whether all that a tensor says is known, and
    so how many rows it selects."""

    def __init__(self, first: Callable[[Any], Any], is_known: Callable[[torch.Tensor], bool]) -> None:
        self._first, self._is_known = first, is_known
        self._masks: dict[int, Route] = {}  # by the mask's id, as all here is by that of a tensor
        self._hot: dict[int, _Hot] = {}
        self._below: dict[int, _Below] = {}
        self._distinct = Distinct()
        self._slices: dict[int, _Slice] = {}

    def of(self, mask: torch.Tensor) -> Route | None:
        """None too where the mask or the ids were changed since."""
        route = self._masks.get(id(mask))
        return route if route is not None and route.mask.is_unchanged and route.ids.is_unchanged else None

    def limit(self, ids: torch.Tensor) -> int | None:
        found = self._below.get(id(ids))
        return found.limit if found is not None and found.ids.is_unchanged else None

    def is_once(self, route: Route, dims: Collection[int]) -> bool:
        """Whether it is known that the mask is set once at most along all of these dims of the ids together."""
        return self._distinct.is_once(route.ids.tensor, dims, route.number)

    def part_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
        found = self._slices.get(id(tensor))
        return None if found is None else (found.whole, found.number)

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Any) -> None:
        """``func`` made this."""
        own = getattr(func, "__name__", "")
        name, x = own.strip("_"), args[0] if args else None
        if not isinstance(x, torch.Tensor) or (own.endswith("_") and not own.endswith("__")):
            return
        if isinstance(found, torch.Tensor):
            self._note_mask(name, x, args[1:], kwargs, found)
        self._note_below(name, x, args[1:], kwargs, found)
        self._distinct.note(func, args, kwargs, found)

    def _note_mask(
        self, name: str, x: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: torch.Tensor
    ) -> None:
        hot = self._hot.get(id(x))
        if name in ("eq", "one_hot") and self._is_known(x):
            return
        if name == "eq" and len(args) == 1 and type(args[0]) is int and _is_whole_numbers(x):
            ids: torch.Tensor = self._first(x)
            self._masks[id(found)] = Route(Seen.now(found), Seen.now(ids), args[0], tuple(range(x.dim())))
        elif name == "one_hot":
            self._hot[id(found)] = _Hot(Seen.now(found), Seen.now(self._first(x)), (*range(x.dim()), -1))
        elif hot is not None and hot.tensor.is_unchanged and hot.ids.is_unchanged:
            self._note_hot(hot, name, args, kwargs, found)
        elif name == "getitem" and type(args[0]) is int and x.dim() > 1 and not _is_cut_off(x):
            self._slices[id(found)] = _Slice(found, x, args[0] % x.shape[0])

    def _note_hot(
        self, hot: _Hot, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: torch.Tensor
    ) -> None:
        if name == "permute":
            dims = kwargs.get("dims", args[0] if args and isinstance(args[0], (tuple, list)) else args)
            self._hot[id(found)] = hot._replace(tensor=Seen.now(found), axes=tuple(hot.axes[d] for d in dims))
        elif name == "transpose" and len(args) == 2:
            axes = list(hot.axes)
            axes[args[0]], axes[args[1]] = axes[args[1]], axes[args[0]]
            self._hot[id(found)] = hot._replace(tensor=Seen.now(found), axes=tuple(axes))
        elif name in _COPYING:
            self._hot[id(found)] = hot._replace(tensor=Seen.now(found))
        elif name == "getitem":
            number = args[0][-1] if isinstance(args[0], tuple) and args[0][:-1] == (...,) else args[0]
            at = 0 if number is args[0] else -1
            if type(number) is int and number >= 0 and hot.axes[at] == -1:
                axes_left = tuple(a for a in hot.axes if a != -1)
                self._masks[id(found)] = Route(Seen.now(found), hot.ids, number, axes_left)

    def _note_below(
        self, name: str, x: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Any
    ) -> None:
        ids, limit = found, None
        if name in _INDICES and isinstance(found, tuple):
            given = args[1:] if name == "topk" else args
            ids, limit = found[1], _size_along(x, kwargs.get("dim", given[0] if given else -1))
        elif name in _ONLY_INDICES and isinstance(found, torch.Tensor):
            limit = _size_along(x, -1 if name == "multinomial" else kwargs.get("dim", args[0] if args else None))
        elif name in _ARRANGING and isinstance(found, torch.Tensor):
            known = self._below.get(id(x))
            limit = known.limit if known is not None and known.ids.is_unchanged else None
        if limit is not None:
            self._below[id(ids)] = _Below(Seen.now(ids), limit)


def _is_cut_off(x: torch.Tensor) -> bool:
    """Whether what is made of it now has none of the gradients that it gets itself."""
    return x.requires_grad and not torch.is_grad_enabled()


def _is_whole_numbers(x: torch.Tensor) -> bool:
    return not x.dtype.is_floating_point and not x.dtype.is_complex and x.dtype != torch.bool


def _size_along(x: torch.Tensor, dim: Any) -> int | None:
    return x.shape[dim] if type(dim) is int and x.dim() else None
