"""Calls of several experts as one: the same functions, each of its own parameters, of rows that go to one of them each.

    linear(x[rows of e], W_e, b_e)      bmm(stack(W)[e of the row], x) + stack(b)[e of the row]
    x[rows of e] @ W_e                  the same, transposed
    norm(x[rows of e], w_e), ... * w_e  norm(x) * stack(w)[e of the row]

The first becomes ``hap.expert_mm`` (``experts``), so nothing is gathered when it runs. All other functions are of each
row alone, and are called as they are with all rows. Parameters that are parts of one tensor are not stacked again.

All is computed later than the user called it, so a call keeps what decided how it was to be made: whether gradients
were wanted, and autocast. Experts that differ in it are not called together.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from hap.capture.seen import Seen
from hap.capture.selected import SAFE, Selected, SelectionError

MATRIX = frozenset({"matmul", "mm"})
_UNDER = {"div": 1, "truediv": 1, "true_divide": 1, "rdiv": 0, "rtruediv": 0, "pow": 0}
_DEVIATIONS = frozenset({"var", "std"})
NORMS = (functional.layer_norm, functional.rms_norm)


class Unlike(SelectionError):
    """Experts that cannot be called together, but one after another."""


class State(NamedTuple):
    """What decides how functions are called: whether gradients are wanted, and autocast with its dtype."""

    grads: bool
    casts: bool
    dtype: torch.dtype

    @classmethod
    def now(cls) -> State:
        return cls(torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        casts = torch.autocast("cpu", dtype=self.dtype, enabled=self.casts, cache_enabled=False)
        with torch.set_grad_enabled(self.grads), casts:
            yield


@dataclass(frozen=True, eq=False)
class Read:
    """``source`` at a row's place along these ``dims`` of the ids, which are its first ones; then ``rest`` of an index.
    ``selected``: the same, where the mask selects it; ``is_owed``: the source, what was to be added to it before."""

    source: Seen
    dims: tuple[int, ...]
    rest: tuple[Any, ...] = ()
    selected: Selected | None = None
    is_owed: bool = False
    state: State = field(default_factory=State.now)


@dataclass(frozen=True, eq=False)
class Call:
    """A function of rows: among the arguments, in tuples and lists too, are other terms."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: State = field(default_factory=State.now)


@dataclass(frozen=True, eq=False)
class Part:
    """One of several that a call returns."""

    call: Call
    number: int

    @property
    def state(self) -> State:
        return self.call.state


Term = Read | Call | Part


def made_of(term: Any) -> list[Read | Seen]:
    """What is read for it, and what tensors are among its calls' arguments."""
    found, known, left = list[Read | Seen](), set[int](), [term]
    while left:
        one = left.pop()
        if isinstance(one, (Read, Seen)):
            if id(one) not in known:
                found.append(one)
        elif isinstance(one, (tuple, list)):
            left += one
        elif isinstance(one, (Part, Call)) and id(one) not in known:
            left += [one.call] if isinstance(one, Part) else [*one.args, *one.kwargs.values()]
        known.add(id(one))
    return found


def reads_in(term: Any) -> list[Read]:
    return [one for one in made_of(term) if isinstance(one, Read)]


def as_selected(term: Any, done: dict[int, Any]) -> Any:
    """A term's value, of what the mask selects. SelectionError where it cannot be."""
    if isinstance(term, Seen):
        return term.as_it_was
    if isinstance(term, (tuple, list)):
        return type(term)(as_selected(one, done) for one in term)
    if not isinstance(term, (Read, Call, Part)):
        return term
    if id(term) not in done:
        if isinstance(term, Read):
            done[id(term)] = term.selected
        elif isinstance(term, Part):
            done[id(term)] = as_selected(term.call, done)[term.number]
        else:
            args, kwargs = as_selected(term.args, done), {k: as_selected(a, done) for k, a in term.kwargs.items()}
            with term.state.again():
                done[id(term)] = Selected.__torch_function__(term.func, (Selected,), args, kwargs)
    return done[id(term)]


class Each:
    """A tensor of every expert; ``whole``: of which it is the part with the expert's number, if it is one."""

    def __init__(self, tensors: Sequence[torch.Tensor], whole: torch.Tensor | None) -> None:
        self.stacked = torch.stack(list(tensors)) if whole is None else whole


class Together:
    """``ids`` (...): the number of the expert of every row; those that have another number than these ``numbers`` are
    no rows of any. ``below``: what is known of how large ids are. ``parts``: of what a tensor is a part, and which."""

    def __init__(
        self,
        ids: torch.Tensor,
        numbers: Sequence[int],
        below: int | None,
        part_of: Callable[[torch.Tensor], tuple[torch.Tensor, int] | None],
    ) -> None:
        self.grid, self.numbers, self.part_of = tuple(ids.shape), tuple(numbers), part_of
        self._done: dict[tuple[int, ...], Any] = {}
        self._each: dict[tuple[int, ...], Each] = {}
        self._rows: dict[int, torch.Tensor] = {}  # by their id
        ids = ids.reshape(-1).to(torch.int64)
        self.is_any: torch.Tensor | None = None
        if self.numbers == tuple(range(len(numbers))):
            self.of_row = ids
            if below is None or below > len(numbers):
                self.is_any = (ids >= 0) & (ids < len(numbers))
                self.of_row = torch.where(self.is_any, ids, 0)
        else:
            is_one = [ids == number for number in numbers]
            self.is_any = torch.stack(is_one).any(0)
            self.of_row = sum((one.to(torch.int64) * n for n, one in enumerate(is_one)), torch.zeros_like(ids))

    def at_places(self, alike: Sequence[Term]) -> torch.Tensor:
        """(*places, ...) of what is the same term of every expert."""
        found: torch.Tensor = self._of(tuple(alike))
        return found.view(*self.grid, *found.shape[1:])

    def where_any(self, found: torch.Tensor, other: torch.Tensor | float) -> torch.Tensor:
        """``found`` (*places, ...), and the other at places of other experts."""
        if self.is_any is None:
            return found
        return torch.where(self.is_any.view(*self.grid, *(1,) * (found.dim() - len(self.grid))), found, other)

    def _of(self, alike: tuple[Term, ...]) -> Any:
        key = tuple(map(id, alike))
        if key not in self._done:
            found = self._done[key] = self._computed(alike)
            for one in found if isinstance(found, (tuple, list)) else (found,):
                self._of_all(one)
        return self._done[key]

    def _of_all(self, found: torch.Tensor) -> torch.Tensor:
        """It has a row for every place of the ids."""
        self._rows[id(found)] = found
        return found

    def _computed(self, alike: tuple[Term, ...]) -> Any:
        first = alike[0]
        if any(type(term) is not type(first) or term.state != first.state for term in alike):
            raise _unlike()
        if isinstance(first, Read):
            with first.state.again():
                return self._read(alike)
        if isinstance(first, Part):
            if any(term.number != first.number for term in alike):  # type: ignore[union-attr]
                raise _unlike()
            return self._of(tuple(term.call for term in alike))[first.number]  # type: ignore[union-attr]
        if any(term.func is not first.func or [*term.kwargs] != [*first.kwargs] for term in alike):  # type: ignore[union-attr]
            raise _unlike()
        args = self._argument(tuple(term.args for term in alike))  # type: ignore[union-attr]
        kwargs = {k: self._argument(tuple(term.kwargs[k] for term in alike)) for k in first.kwargs}  # type: ignore[union-attr]
        with first.state.again():
            return self._called(first.func, args, kwargs)

    def _read(self, alike: Sequence[Any]) -> torch.Tensor:
        dims, rest, source = alike[0].dims, alike[0].rest, alike[0].source.as_it_was
        if any(one.source.as_it_was is not source or one.dims != dims or one.rest != rest for one in alike):
            raise _unlike()
        inner = range(len(dims), source.dim())
        found = source.permute(*sorted(range(len(dims)), key=dims.__getitem__), *inner)
        behind = source.shape[len(dims) :]
        found = found.reshape(*(n if d in dims else 1 for d, n in enumerate(self.grid)), *behind)
        found = found.expand(*self.grid, *behind).reshape(-1, *behind).clone()  # as the source may be changed later
        return found[(slice(None), *rest)] if rest else found

    def _argument(self, given: tuple[Any, ...]) -> Any:
        """One for all experts, or ``Each``."""
        first = given[0]
        if all(isinstance(one, (Read, Call, Part)) for one in given):
            return self._of(given)
        if all(isinstance(one, Seen) for one in given):
            given = tuple(one.as_it_was for one in given)
            return given[0] if all(one is given[0] for one in given) else self._of_each(given)
        if any(type(one) is not type(first) for one in given):
            raise _unlike()
        if isinstance(first, (tuple, list)):
            if any(len(one) != len(first) for one in given):
                raise _unlike()
            return type(first)(self._argument(ones) for ones in zip(*given, strict=True))
        if any(one != first for one in given):
            raise _unlike()
        return first

    def _of_each(self, tensors: tuple[torch.Tensor, ...]) -> Each:
        if any(t.shape != tensors[0].shape or t.dtype != tensors[0].dtype for t in tensors):
            raise _unlike()
        key = tuple(map(id, tensors))
        if key not in self._each:
            with torch.enable_grad():  # others may be called with it than those that want none
                parts = [self.part_of(t) for t in tensors]
                whole = parts[0][0] if parts[0] is not None else None
                if any(p is None or p[0] is not whole for p in parts):
                    whole = None
                if whole is not None:
                    numbers = [number for _, number in parts]  # type: ignore[misc]
                    whole = whole if numbers == list(range(whole.shape[0])) else whole[numbers]
                self._each[key] = Each(tensors, whole)
        return self._each[key]

    def _called(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.is_any is not None:
            args = self._safe(getattr(func, "__name__", "").strip("_"), args, kwargs)
        if not any(isinstance(one, Each) for one in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "").strip("_")
        if func is functional.linear:
            return self._linear(*args, **kwargs)
        if name in MATRIX and isinstance(args[1], Each):
            weight = args[1].stacked[self.of_row]
            return torch.bmm(args[0].unsqueeze(1), weight).squeeze(1)
        if func in NORMS:
            return self._norm(func, *args, **kwargs)
        given = [a.stacked[0] if isinstance(a, Each) else a for a in (*args, *kwargs.values())]
        dims = max(a.dim() - 1 for a in given if isinstance(a, torch.Tensor) and self._is_of_rows(a))
        dtypes = [a.dtype for a in given if isinstance(a, torch.Tensor) and a.dim()]
        dtype = functools.reduce(torch.promote_types, dtypes)

        def of_rows(argument: Any) -> Any:
            found = self._of_rows(argument, dims)
            is_number = isinstance(argument, Each) and argument.stacked.dim() == 1 and dtype.is_floating_point
            return found.to(dtype) if is_number else found  # a number's own dtype tells nothing

        return func(*map(of_rows, args), **{k: of_rows(a) for k, a in kwargs.items()})

    def _safe(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Rows of no expert, whose gradient is 0, may not come where a derivative is infinite."""
        if name in _DEVIATIONS:
            raise SelectionError(f"{name} of rows for experts, where some rows may be for none of them")
        if (name in _UNDER or name in SAFE) and any(map(self._is_of_rows, kwargs.values())):
            raise SelectionError(f"{name} of rows for experts as an argument by name: give it by its position")
        at, value = (_UNDER[name], 1) if name in _UNDER else (0, SAFE.get(name))
        if value is None or at >= len(args) or not isinstance(args[at], torch.Tensor) or not self._is_of_rows(args[at]):
            return args
        is_any = self.is_any.view(-1, *(1,) * (args[at].dim() - 1))  # type: ignore[union-attr]
        return [*args[:at], self._of_all(torch.where(is_any, args[at], value)), *args[at + 1 :]]

    def _is_of_rows(self, found: Any) -> bool:
        """Not one of all experts alike that happens to be as long."""
        return id(found) in self._rows

    def _linear(self, input: torch.Tensor, weight: Any, bias: Any = None) -> torch.Tensor:
        if not isinstance(weight, Each):
            found = functional.linear(input, weight)
        else:
            found = torch.bmm(weight.stacked[self.of_row], input.unsqueeze(2)).squeeze(2)
        return found if bias is None else found + self._of_rows(bias, 1).to(found.dtype)  # which autocast may tell

    def _norm(
        self,
        func: Any,
        input: torch.Tensor,
        normalized_shape: Any,
        weight: Any = None,
        bias: Any = None,
        *others: Any,
        **named: Any,
    ) -> torch.Tensor:
        dims = input.dim() - 1
        if func is functional.rms_norm:  # has eps in the place of a bias
            others, bias = (bias, *others) if bias is not None else others, None
            found = functional.rms_norm(input, normalized_shape, None, *others, **named)
        else:
            found = functional.layer_norm(input, normalized_shape, None, None, *others, **named)
        dtype = found.dtype  # whatever those of the parameters are
        found = found if weight is None else found * self._of_rows(weight, dims)
        found = found if bias is None else found + self._of_rows(bias, dims)
        return found.to(dtype)

    def _of_rows(self, argument: Any, dims: int) -> Any:
        """What is of each expert as one for every row, with so many dims behind; anything else as it is."""
        if not isinstance(argument, Each):
            return argument
        shape = argument.stacked.shape[1:]
        if len(shape) > dims:
            raise SelectionError("a call of an expert with a parameter that has more dims than what it is called with")
        found = functional.embedding(self.of_row, argument.stacked.reshape(len(argument.stacked), -1))
        return found.view(-1, *(1,) * (dims - len(shape)), *shape)


def _unlike() -> Unlike:
    return Unlike("experts that are not alike")
