"""Masks that are made twice: ``x[labels != -100], labels[labels != -100]``.

What masks select goes together if it is the same tensor that selects it (``selected``), and to its writer it is the
same one if it says the same. So the comparisons and views that masks are made of are written down while a model is
traced, with what they were made of and how often that had been changed in place; what is made once more of the same,
unchanged, is taken for the first one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

_COMPARING = "eq ne lt le gt ge isnan isfinite isinf"
_JOINING = "and or xor invert logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_not"
_ARRANGING = "getitem view reshape flatten unflatten squeeze unsqueeze transpose permute t contiguous bool detach"
_PURE = frozenset(f"{_COMPARING} {_JOINING} {_ARRANGING}".split())


class _Made(NamedTuple):
    """A tensor, what it was made of, the first one made of that, and how often either had been changed by then."""

    tensor: torch.Tensor
    of: tuple[Any, ...]  # held, so that no other tensor gets the id of one
    version: int
    first: torch.Tensor
    first_version: int

    @property
    def is_unchanged(self) -> bool:
        return self.tensor._version == self.version and self.first._version == self.first_version


class Sames:
    """What was made in one trace."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}  # by the tensor's id
        self._first: dict[object, _Made] = {}  # by what it was made of

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
        """``func`` made this."""
        own = getattr(func, "__name__", "")
        name = own.strip("_")
        if name not in _PURE or (own.endswith("_") and not own.endswith("__")):
            return
        if not isinstance(found, torch.Tensor) or any(found is a for a in args) or "out" in kwargs:
            return
        key = self._key((name, args, tuple(sorted(kwargs.items()))))
        if key is None:
            return
        first = self._first.get(key)
        if first is None or not first.is_unchanged:
            first = self._first[key] = _Made(found, (args, kwargs), found._version, found, found._version)
        self._made[id(found)] = _Made(found, (args, kwargs), found._version, first.tensor, first.first_version)

    def first(self, argument: Any) -> Any:
        """The first tensor that was made of the same, of one or of each in a tuple; what is none as it is."""
        if isinstance(argument, tuple):
            return tuple(map(self.first, argument))
        made = self._made.get(id(argument)) if isinstance(argument, torch.Tensor) else None
        return argument if made is None or not made.is_unchanged else made.first

    def _key(self, argument: Any) -> object | None:
        """Equal for what says the same; None for what nothing is known of."""
        if isinstance(argument, torch.Tensor):
            first = self.first(argument)
            return id(first), first._version
        if isinstance(argument, (tuple, list, torch.Size)):
            parts = [self._key(a) for a in argument]
            return None if any(p is None for p in parts) else (tuple, *parts)
        if isinstance(argument, slice):
            return self._key((slice.__name__, argument.start, argument.stop, argument.step))
        if argument is None or argument is ... or isinstance(argument, (bool, int, float, str, torch.dtype)):
            return type(argument), argument
        return None
