"""Ids of which no two are alike along some dims, as those that ``topk`` finds for a row: none goes to an expert twice.

It is noted which functions find such ids, and what keeps them distinct: views and parts of them, a number that is added
to all, and one number in the place of some (``ids.masked_fill(dropped, -1)``), which alone may then be there twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hap.capture.seen import Seen
from hap.capture.torch_private import pytree, untraced

_FINDING = frozenset({"topk", "sort", "argsort"})
_COPYING = frozenset({"contiguous", "detach", "clone", "to", "type", "type_as", "long", "int", "cpu", "cuda"})
_RESHAPING = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"})
_MOVING = frozenset({"permute", "transpose", "t", "T", "mT", "movedim", "moveaxis", "swapaxes", "swapdims", "expand"})
_CUTTING = frozenset({"getitem", "select", "narrow", "chunk", "split", "unbind"})
_WHOLE = (torch.int64, torch.int32)
_SHIFTING = {"add": 1, "radd": 1, "sub": -1}


class _Marked(NamedTuple):
    """``marks``, as large as the ids: where these differ, the ids do, but for the numbers ``but``. They are a view of
    0, 1, 2 ..., so along a dim, and along several together, they differ where they have strides."""

    ids: Seen
    marks: torch.Tensor
    but: frozenset[int]


class Distinct:
    """What is known of the ids of one trace."""

    def __init__(self) -> None:
        self._marked: dict[int, _Marked] = {}  # by the tensor's id

    def is_once(self, ids: torch.Tensor, dims: Collection[int], number: int) -> bool:
        """Whether it is known that this number is there once at most along all of these dims together."""
        found, dims = self._known(ids), [d for d in dims if ids.shape[d] > 1]
        return not dims or (found is not None and number not in found.but and all(found.marks.stride(d) for d in dims))

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any) -> None:
        """``func``, which changes nothing in place, made this."""
        own = getattr(func, "__name__", "")
        name = (getattr(func.__self__, "__name__", "") if own == "__get__" else own).strip("_")
        dim = _dim(name, args, kwargs)
        if dim is not None:
            self._note_first(found[1] if isinstance(found, tuple) else found, dim)
            return
        at = next((n for n, a in enumerate(args) if self._known(a) is not None), 0)
        known, others = self._known(args[at]), [a for n, a in enumerate(args) if n != at]
        others += [kwargs["value"]] if name == "masked_fill" and "value" in kwargs else []
        if known is None or (at and name != "where"):
            return
        if name in _CUTTING | _MOVING:
            if not any(isinstance(a, torch.Tensor) for a in pytree.tree_leaves((others, kwargs))):
                with untraced():
                    marks = func(known.marks, *others, **kwargs)
                of_each = zip(found, marks, strict=True) if isinstance(found, tuple) else [(found, marks)]
                for part, its in of_each:
                    self._keep(part, known, its, known.but)
        elif name in _RESHAPING:
            with untraced():
                self._keep(found, known, known.marks.reshape(found.shape), known.but)
        elif name in _COPYING:
            self._keep(found, known, known.marks, known.but)
        elif name in _SHIFTING and len(others) == 1 and type(others[0]) is int and not kwargs:
            self._keep(found, known, known.marks, frozenset(n + _SHIFTING[name] * others[0] for n in known.but))
        elif name in ("masked_fill", "where") and len(others) == 2 and type(others[1]) is int:
            self._keep(found, known, known.marks, known.but | {others[1]})

    def _note_first(self, ids: torch.Tensor, dim: int) -> None:
        if not ids.dim():
            return
        with untraced():
            marks = torch.arange(ids.shape[dim]).view(-1, *(1,) * (ids.dim() - 1 - dim % ids.dim())).expand(ids.shape)
        self._marked[id(ids)] = _Marked(Seen.now(ids), marks, frozenset())

    def _keep(self, found: Any, of: _Marked, marks: torch.Tensor, but: frozenset[int]) -> None:
        """Not of marks that were copied, as their strides say nothing, nor of numbers of fewer bits, as those may
        be alike."""
        if not isinstance(found, torch.Tensor) or found.shape != marks.shape or found.dtype not in _WHOLE:
            return
        if marks.untyped_storage().data_ptr() == of.marks.untyped_storage().data_ptr():
            self._marked[id(found)] = _Marked(Seen.now(found), marks, but)

    def _known(self, ids: Any) -> _Marked | None:
        found = self._marked.get(id(ids))
        return found if found is not None and found.ids.is_unchanged else None


def _dim(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Along which this function finds places that differ."""
    if name == "multinomial":
        return None if kwargs.get("replacement", len(args) > 2 and args[2]) else -1
    given = args[2:] if name == "topk" else args[1:]
    dim = kwargs.get("dim", given[0] if given else -1)
    return dim if name in _FINDING and type(dim) is int else None
