"""``mask.nonzero()``, ``torch.where(mask)``: the places where a mask of booleans is set.

How many there are, no graph of static shapes can say. What is read at all of them is what the mask selects:

    x[mask.nonzero(as_tuple=True)], x[torch.where(mask)]        x[mask]
    i = mask.nonzero().squeeze(1); x[i], x.index_select(0, i)   x[mask], of one dim

and that goes on as ``Selected``. All other uses of places are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from hap.capture.selected import SelectionError


class Place:
    """Along ``dim`` where ``mask`` is set; ``dim`` None: along all of its dims, as one tensor (n, dims). ``of``: what
    was asked about, the mask or numbers."""

    def __init__(self, mask: torch.Tensor, dim: int | None, of: torch.Tensor | None = None) -> None:
        self.mask, self.dim, self.version = mask, dim, mask._version  # changes in place
        self.of = mask if of is None else of

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse(getattr(func, "__name__", str(func)).strip("_"))

    def __getitem__(self, index: Any) -> Place:
        rows, dim = index if isinstance(index, tuple) and len(index) == 2 else (None, None)
        of_all = rows is ... or (isinstance(rows, slice) and rows == slice(None))
        if self.dim is None and of_all and type(dim) is int and -self.mask.dim() <= dim < self.mask.dim():
            return Place(self.unchanged, dim % self.mask.dim(), self.of)
        _refuse("a part")

    def squeeze(self, dim: int | None = None) -> Place:
        """Without ``dim`` a single place would have none."""
        return self._of_one_dim("squeeze", dim in (1, -1))

    def flatten(self) -> Place:
        return self._of_one_dim("flatten", True)

    def view(self, *sizes: Any) -> Place:
        return self._of_one_dim("view", sizes in ((-1,), ((-1,),)))

    reshape = view

    @property
    def unchanged(self) -> torch.Tensor:
        """The mask."""
        if self.version != self.mask._version:
            raise SelectionError("places of a mask that was changed in place since: change a copy of it")
        return self.mask

    def _of_one_dim(self, name: str, fits: bool) -> Place:
        if self.dim is None and self.mask.dim() == 1 and fits:
            return Place(self.unchanged, 0, self.of)
        _refuse(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(name)

    def __iter__(self) -> Any:
        _refuse("a loop")

    def __len__(self) -> int:
        _refuse("the number")

    def __bool__(self) -> bool:
        _refuse("the truth")


def _refuse(name: str) -> NoReturn:
    remedy = "read with all of them, as x[mask], or use torch.where with three arguments"
    if name in ("numel", "size", "shape", "the number"):
        remedy = "where there are none nothing is read or written, so a check whether there are any can be left out"
    raise SelectionError(f"{name} of the places where a mask is set, a tensor whose size depends on values: {remedy}")


def _operator(name: str) -> Callable[..., NoReturn]:
    return lambda *args: _refuse(name)


_OPERATORS = "add radd sub rsub mul rmul truediv floordiv mod neg invert eq ne lt le gt ge int index"
for _name in _OPERATORS.split():
    setattr(Place, f"__{_name}__", _operator(_name))
Place.__hash__ = object.__hash__  # type: ignore[method-assign]


def places(mask: torch.Tensor, as_tuple: bool) -> tuple[Place, ...] | Place | None:
    """Where a mask, or what is not zero, is set; None for a tensor without dims."""
    if not isinstance(mask, torch.Tensor) or not mask.dim():
        return None
    of, mask = mask, mask if mask.dtype == torch.bool else mask != 0
    return tuple(Place(mask, dim, of) for dim in range(mask.dim())) if as_tuple else Place(mask, None, of)


def as_mask(index: Any) -> Any:
    """The mask in place of its places, of all its dims in order; an index without places as it is."""
    given = index if isinstance(index, tuple) else (index,)
    found = [i for i in given if isinstance(i, Place)]
    if not found:
        return index
    mask = found[0].unchanged
    if len({id(one.mask) for one in found}) > 1 or [one.dim for one in found] != list(range(mask.dim())):
        raise SelectionError(
            "an index by places of a mask, but not by all of its dims in order: a tensor whose size depends on values"
        )
    first = next(n for n, i in enumerate(given) if isinstance(i, Place))
    if not all(isinstance(i, Place) for i in given[first : first + len(found)]):
        raise SelectionError("an index by the places of a mask, with something else between their dims")
    others = (*given[:first], mask, *given[first + len(found) :])
    return mask if len(others) == 1 else others


def holds_places(arguments: Sequence[Any]) -> bool:
    return any(isinstance(a, Place) or (isinstance(a, (tuple, list)) and holds_places(a)) for a in arguments)
