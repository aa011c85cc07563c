"""What follows from constants alone is known while a step is traced.

A trace has shapes and no values, so ``if t.mean() > 1`` and ``x[:, mask]`` have no graph. But what a model makes of
numbers, ``torch.tensor([3, 5]).max()`` or ``torch.ones(8, 8).triu() == 1``, is the same in every step. So beside every
tensor that is made of nothing else its value is kept, as PyTorch computes it of the values of what it was made of, and
where values are wanted

    a number, a truth or a list that is read     is the value's
    ``mask.nonzero()``, ``torch.unique(t)``      is a constant of the program
    ``x[:, mask]``                               is ``x`` at the places where the mask is set, which are constants
    ``x[:, :t]``, ``x.view(t, -1)``              has the number in the place of ``t``

All else is traced as it is written. Nothing is known of parameters, buffers and inputs, nor of what is drawn, or left
as memory was found: but that ``torch.rand(1) > 0`` is so, as what ``hap.rand`` draws lies between 0 and 1. A change in
place of what is known, by what is known, is made to the value, too; after any other change a tensor and its views,
which count their changes together, are no longer known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hap.capture.outside import Outside
from hap.capture.torch_private import ValuesWanted, as_constant, as_list, has_values, is_alias, pytree, untraced

MOST = 1 << 16  # elements: larger ones are hardly read
_READING = frozenset({"item", "tolist", "is_nonzero", "equal", "allclose", "__contains__", "__format__"})
_READING |= {f"__{kind}__" for kind in ("bool", "int", "float", "index", "complex")}
_AS_ARRAY = frozenset({"numpy", "__array__"})
# of these the argument at that place is asked for its shape and dtype alone
_UNREAD = {"ones_like": 0, "zeros_like": 0, "full_like": 0, "to": 1, "type_as": 1}
_UNREAD |= {"new_ones": 0, "new_zeros": 0, "new_full": 0, "new_tensor": 0}
_UNKNOWN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_UNKNOWN |= {"resize_", "resize_as_", "set_", "requires_grad_"}
_INDEXING = frozenset({"__getitem__", "__setitem__"})
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_REPEATED = (torch.repeat_interleave, torch.Tensor.repeat_interleave)
_SELECTED = (torch.masked_select, torch.Tensor.masked_select)
_UNIFORM = (torch.rand, torch.rand_like)
_MORE = frozenset({"gt", "ge", "__gt__", "__ge__"})
_LESS = frozenset({"lt", "le", "__lt__", "__le__"})


@dataclass
class _Value:
    """Of a tensor, as long as that has changed so often."""

    of: weakref.ref[torch.Tensor]
    value: torch.Tensor
    version: int


class Known:
    """What is known in one trace. ``outside``: of the model's own tensors, which change from step to step."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._values: dict[int, _Value] = {}  # by the tensor's id
        self._drawn: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # single ones, with how often it was changed

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """None where nothing is known of it."""
        found = self._values.get(id(tensor))
        if found is not None and found.of() is tensor and found.version == tensor._version:
            return found.value
        if not has_values(tensor) or tensor.requires_grad:
            return None
        return _copied(tensor) if tensor.numel() <= MOST and not self._outside.shares_memory(tensor) else None

    def all_of(self, arguments: Any) -> bool:
        """Whether there are tensors among them, all of them known."""
        found = list(_tensors(arguments))
        return bool(found) and all(self.value(t) is not None for t in found)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the function returns."""
        name = getattr(func, "__name__", "")
        if name in _INDEXING:
            args = args[0], self._index(args[1]), *args[2:]
        given = self._given(name, args, kwargs)
        if given is not None and name in _READING:
            return _computed(func, *given)
        if given is not None and name in _AS_ARRAY:
            array = _computed(func, *given).copy()
            array.flags.writeable = False  # nobody would see what is written there
            return array
        if given is not None and name == "__iter__":
            return iter(self.call(torch.Tensor.unbind, args, kwargs))
        if func is torch.Tensor.tolist:
            func = as_list
        before = [(t, t._version) for t in _tensors((args, kwargs))] if given is not None else []
        try:
            found = func(*args, **kwargs)
        except ValuesWanted:
            if given is not None:
                return pytree.tree_map_only(torch.Tensor, self._constant, _computed(func, *given))
            instead = self._instead(func, args, kwargs)
            if instead is None:
                raise
            return instead[0](*instead[1], **instead[2])
        if func == _DATA:
            self._forget(args[0])  # what is done to that is not counted as a change of this
        elif func in _UNIFORM:
            if found.numel() == 1:
                self._drawn[id(found)] = weakref.ref(found), found._version
        elif given is not None and (found is not None or name == "__setitem__"):
            self._note(func, given, found, before)
        elif self._drawn and (truth := self._surely(name, args)) is not None:
            with untraced():
                value = torch.full(found.shape, truth)
            self._keep(found, value)
        return found

    def _surely(self, name: str, args: tuple[Any, ...]) -> bool | None:
        """What comparing a chance with a number comes to; None where that is open."""
        if name not in _MORE | _LESS or len(args) != 2:
            return None
        of, version = self._drawn.get(id(args[0]), (None, 0))
        chance, number = of() if of is not None else None, args[1]
        if chance is None or chance is not args[0] or chance._version != version or isinstance(number, torch.Tensor):
            return None
        return (name in _MORE) == (number <= 0) if number <= 0 or number >= 1 else None

    def _given(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The arguments with values in the place of tensors; None where one is not known, or the result is not, though
        all are."""
        if name in _UNKNOWN or kwargs.get("generator") is not None:
            return None
        if (at := _UNREAD.get(name, len(args))) < len(args) and isinstance(args[at], torch.Tensor):
            args = *args[:at], _like(args[at]), *args[at + 1 :]
        leaves, structure = pytree.tree_flatten((args, kwargs))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, slice) and any(isinstance(end, torch.Tensor) for end in _ends(leaf)):
                return None
            if isinstance(leaf, torch.Tensor):
                value = self.value(leaf)
                if value is None:
                    return None
                leaves[i] = value
        found: tuple[Any, Any] = pytree.tree_unflatten(leaves, structure)
        return found

    def _note(self, func: Any, given: tuple[Any, Any], found: Any, before: Sequence[tuple[torch.Tensor, int]]) -> None:
        """The function returned this. ``before``: how often its arguments had been changed."""
        made = list(_tensors(found))
        if (found is not None and not made) or any(t.numel() > MOST for t in made):
            return
        try:
            value = _computed(func, *given)
        except RuntimeError:  # of 16 bits, say, for which a CPU lacks some functions: traced it is, but not known
            return
        for changed in (t for t, version in before if t._version != version):
            for one, tensor in self._sharing(changed):
                if is_alias(changed, tensor):
                    one.version = tensor._version
                else:  # as values they share memory, as they are traced they do not
                    del self._values[id(tensor)]
        for tensor, own in zip(made, _tensors(value), strict=False):
            self._keep(tensor, own)

    def _keep(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        assert type(value) is torch.Tensor, "computed, not traced"
        if value.shape == tensor.shape and value.dtype == tensor.dtype:
            gone = partial(self._gone, id(tensor))
            self._values[id(tensor)] = _Value(weakref.ref(tensor, gone), value, tensor._version)

    def _gone(self, key: int, of: weakref.ref[torch.Tensor]) -> None:
        if key in self._values and self._values[key].of is of:  # another tensor may have its id by now
            del self._values[key]

    def _sharing(self, tensor: torch.Tensor) -> list[tuple[_Value, torch.Tensor]]:
        """What is kept of all that lie in the memory of this one, itself included."""
        own = self._values.get(id(tensor))
        if own is None:
            return []
        alike = [one for one in self._values.values() if _memory(one.value) == _memory(own.value)]
        return [(one, of) for one in alike if (of := one.of()) is not None]

    def _forget(self, tensor: torch.Tensor) -> None:
        for _, one in self._sharing(tensor):
            self._values.pop(id(one))

    def _constant(self, value: torch.Tensor) -> torch.Tensor:
        found = as_constant(value)
        self._keep(found, value)
        return found

    def _instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any] | None:
        """A call that does the same, without wanting values; None if there is none."""
        if func in _REPEATED:
            return self._repeated(*args, **kwargs)
        if func in _SELECTED:
            return self._selected(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        numbers = [self._number(leaf) for leaf in leaves]
        if all(number is leaf for number, leaf in zip(numbers, leaves, strict=True)):
            return None
        return (func, *pytree.tree_unflatten(numbers, structure))

    def _repeated(self, input: torch.Tensor, repeats: Any, dim: int | None = None, **_: Any) -> Any:
        many = self.value(repeats) if isinstance(repeats, torch.Tensor) else None
        if many is None or dim is None:
            return None
        with untraced():
            places = torch.arange(input.shape[dim]).repeat_interleave(many)
        return torch.Tensor.index_select, (input, dim, self._constant(places)), {}

    def _selected(self, input: torch.Tensor, mask: torch.Tensor) -> Any:
        if (value := self.value(mask)) is None:
            return None
        shape = torch.broadcast_shapes(input.shape, mask.shape)
        return torch.Tensor.__getitem__, (input.expand(shape), self._places(value, shape)), {}

    def _places(self, mask: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, ...]:
        with untraced():
            found = mask.expand(shape).nonzero(as_tuple=True)
        return tuple(map(self._constant, found))

    def _index(self, index: Any) -> Any:
        """The same places: known numbers as numbers, and known masks as the places where they are set."""
        found = list[Any]()
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, slice):
                found.append(slice(*map(self._number, _ends(part))))
            elif (mask := self._mask(part)) is not None:
                found += self._places(mask, mask.shape)
            else:
                found.append(self._number(part))
        return tuple(found) if isinstance(index, tuple) or len(found) > 1 else found[0]

    def _mask(self, part: Any) -> torch.Tensor | None:
        """Of booleans, as a tensor, a list or an array; None for anything else, and for what is not known."""
        if isinstance(part, torch.Tensor):
            return self.value(part) if part.dtype == torch.bool and part.dim() else None
        leaves = pytree.tree_leaves(part) if isinstance(part, list) else []
        if (leaves and all(type(leaf) is bool for leaf in leaves)) or (
            isinstance(part, np.ndarray) and part.dtype == bool
        ):
            with untraced():
                return torch.as_tensor(part)
        return None

    def _number(self, argument: Any) -> Any:
        """Of a known tensor without dims, unless it is a truth; anything else as it is."""
        if isinstance(argument, torch.Tensor) and not argument.dim() and argument.dtype != torch.bool:
            value = self.value(argument)
            return argument if value is None else _computed(torch.Tensor.item, (value,), {})
        return argument


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Stands for one of which nothing but dtype and shape are read."""
    with untraced():
        return torch.zeros(tensor.shape if tensor.numel() <= MOST else (), dtype=tensor.dtype)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    with untraced():
        return tensor.clone()


def _computed(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What it returns of values; RuntimeError if it draws: what is drawn is another number in each step."""
    with untraced():
        state = torch.get_rng_state()
        found = func(*args, **kwargs)
        if not torch.equal(state, torch.get_rng_state()):
            torch.set_rng_state(state)
            raise RuntimeError("a draw")
    return found


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor))


def _ends(part: slice) -> tuple[Any, Any, Any]:
    return part.start, part.stop, part.step


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
