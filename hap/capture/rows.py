"""Rows that are sent to one expert. No graph of static shapes can say how many there are, so what is made of them is
written down as terms (``together``), to be computed for the rows of all experts at once.

Only functions of each row alone are. Rows that were read by all dims of a mask in order can be what the mask selects,
too (``selected``), and are that where another function is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hap.capture.routes import Route
from hap.capture.seen import Seen
from hap.capture.selected import OF_PLACES, SAFE, Selected, SelectionError
from hap.capture.together import MATRIX, NORMS, Call, Part, Read, Term, as_selected, reads_in

_MORE = """
    celu clamp_max clamp_min div dropout elu hardsigmoid hardswish hardtanh leaky_relu maximum minimum mish pow rdiv
    relu6 rpow rtruediv selu truediv true_divide
"""
_ELEMENTS = OF_PLACES | frozenset(SAFE) | frozenset(_MORE.split())
_COMPARING = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_CASTS: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
    "int": torch.int32,
    "long": torch.int64,
}
_SHARING = frozenset({*_CASTS, "to", "type_as", "contiguous", "detach", "dropout"})  # memory, maybe
_ALONG = frozenset({"softmax", "log_softmax", "normalize"})
_OVER = frozenset({"sum", "mean", "amax", "amin", "norm", "var", "std"})
_CHANGING = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__"})
_CUTTING = frozenset({"chunk", "split"})
_VIEWS = frozenset({"getitem", "view", "reshape", "unsqueeze", "squeeze"})


class Rows:
    """(rows, *behind) of one expert. ``lead``: there is a dim of size 1 before the rows'."""

    def __init__(
        self,
        route: Route,
        term: Term,
        behind: Sequence[int],
        dtype: torch.dtype | None,
        *,
        lead: bool = False,
    ) -> None:
        self.route, self.term = route, term
        self.behind, self.lead, self._dtype = tuple(behind), lead, dtype
        self._is_shared = False  # memory, maybe, with other rows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of = list(rows_in((*args, *kwargs.values())))
        try:
            found = _written_down(func, tuple(args), dict(kwargs), of)
        except SelectionError as refused:
            try:
                args, kwargs = (_with(given, Rows.selected) for given in (tuple(args), dict(kwargs)))
            except SelectionError:
                raise refused from None
            return Selected.__torch_function__(func, (Selected,), args, kwargs)
        return found

    def like(self, term: Term, behind: Sequence[int], dtype: torch.dtype | None, *, lead: bool = False) -> Rows:
        return Rows(self.route, term, behind, dtype, lead=lead)

    def selected(self) -> Selected:
        """The same as what the mask selects. SelectionError where they were read in another way."""
        is_read = all(read.selected is not None for read in reads_in(self.term))
        found = as_selected(self.term, {}) if is_read and not self.lead else None
        if not isinstance(found, Selected):
            raise _refused("a use")
        return found

    @property
    def dtype(self) -> torch.dtype:
        if self._dtype is None:
            raise SelectionError("the dtype of what an expert makes of rows of several dtypes")
        return self._dtype

    @property
    def ndim(self) -> int:
        return 1 + len(self.behind) + self.lead

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> int:
        if dim is None:
            raise _refused("size")
        return self.behind[_behind(self, dim)]

    @property
    def shape(self) -> _Sizes:
        return _Sizes(self)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(torch.Tensor, name)
        if name in ("device", "is_cuda", "layout") or (name == "requires_grad" and isinstance(self.term, Read)):
            return getattr(reads_in(self.term)[0].source.tensor, name)
        if not callable(attribute):
            raise _refused(name)
        return lambda *args, **kwargs: Rows.__torch_function__(attribute, (Rows,), (self, *args), kwargs)


class _Sizes:
    """Of rows: those behind are known."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int:
            return self._rows.size(index)
        if isinstance(index, slice) and index.stop is None and index.step is None and index.start not in (None, 0):
            return self._rows.behind[_behind(self._rows, index.start) :]
        raise _refused("shape")

    def __getattr__(self, name: str) -> Any:
        raise _refused("shape")

    def __iter__(self) -> Any:
        raise _refused("shape")

    def __len__(self) -> int:
        return self._rows.ndim


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: Rows, *args: Any) -> Any:
        return Rows.__torch_function__(getattr(torch.Tensor, name), (Rows,), (self, *args))

    return operator


_OPERATORS = "add radd sub rsub mul rmul truediv rtruediv neg abs pow rpow eq ne lt le gt ge"
for _name in f"{_OPERATORS} iadd isub imul itruediv getitem setitem len iter bool matmul rmatmul".split():
    setattr(Rows, f"__{_name}__", _operator(f"__{_name}__"))
Rows.__hash__ = object.__hash__  # type: ignore[method-assign]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def rows_in(arguments: Any) -> Iterator[Rows]:
    for a in arguments:
        if isinstance(a, Rows):
            yield a
        elif isinstance(a, (tuple, list)):
            yield from rows_in(a)


def indexed(behind: Sequence[int], rest: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes of what an index without tensors leaves of these."""
    if any(isinstance(i, torch.Tensor) or not (i is None or i is ... or isinstance(i, (int, slice))) for i in rest):
        raise SelectionError("rows for an expert with another index beside their places")
    try:
        return np.broadcast_to(np.zeros(()), tuple(behind))[rest].shape if rest else tuple(behind)
    except IndexError as e:
        raise SelectionError(f"rows for an expert: {e}") from e


def _refused(name: str) -> SelectionError:
    return SelectionError(f"{name} of the rows that are sent to one expert, whose number depends on values")


# -- what is written down --------------------------------------------------------------------------------------------


def _written_down(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], of: Sequence[Rows]) -> Any:
    own = getattr(func, "__name__", str(func))
    name, one = own.strip("_"), of[0]
    if any(not one.route.is_of(other.route) for other in of):
        raise SelectionError(f"{name} of rows that are sent to several experts")
    changes = own in _CHANGING or (own.endswith("_") and not own.endswith("__"))
    if kwargs.pop("inplace", False) or changes:
        found = _written_down(_out_of_place(own) if changes else func, args, kwargs, of)
        if args[0] is not one or one._is_shared or found.behind != one.behind:
            raise SelectionError(f"{own} of rows that are sent to one expert: the same function out of place")
        if one._dtype is None:
            raise SelectionError(f"{own} of rows of several dtypes: the same function out of place")
        if one.term.state.grads and not torch.is_grad_enabled():  # the gradient would be that of what was there before
            raise SelectionError(f"{own} without gradients of rows that have some: the same function out of place")
        one.term = found.term if found._dtype == one._dtype else Call(torch.Tensor.to, (found.term, one._dtype), {})
        return one
    if "out" in kwargs:
        raise _refused(name)
    if name in _VIEWS:
        return _arranged(func, name, one, args[1:], kwargs)
    if any(other.lead for other in of):
        raise SelectionError("rows for an expert with a dim before them: take it away with view(-1, size)")
    behind = _sizes(func, name, one, args, kwargs, of)
    term = Call(func, _with(args, _term, Seen.now), _with(kwargs, _term, Seen.now))
    if name in _CUTTING:
        return _parts(one, name, term, args, kwargs)
    found = one.like(term, behind, _dtype(func, name, one, args, kwargs, of))
    if name in _SHARING and (found._dtype is None or found._dtype == one._dtype):
        one._is_shared = found._is_shared = True
    return found


def _out_of_place(own: str) -> Any:
    """The same function without the change."""
    if own in _CHANGING:
        return getattr(torch.Tensor, f"__{own[3:]}")
    found = getattr(torch.Tensor, own[:-1], None) or getattr(functional, own[:-1], None)
    if found is None:
        raise _refused(own)
    return found


def _sizes(
    func: Any, name: str, one: Rows, args: tuple[Any, ...], kwargs: dict[str, Any], of: Sequence[Rows]
) -> tuple[int, ...]:
    """Behind the rows."""
    others = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    first = bool(args) and args[0] is one
    if func is functional.linear and first:
        (size,), weight = _one_dim(one), args[1] if len(args) > 1 else kwargs["weight"]
        if len(of) > 1 or weight.dim() != 2 or weight.shape[1] != size:
            raise SelectionError("linear of rows for an expert whose sizes do not go together")
        return (weight.shape[0],)
    if name in MATRIX and first and len(of) == 1:
        (size,) = _one_dim(one)
        if args[1].dim() != 2 or args[1].shape[0] != size:
            raise SelectionError("a product of rows for an expert with what is no matrix of as many rows as they have")
        return (args[1].shape[1],)
    if func in NORMS and first and len(of) == 1:
        shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        if tuple(one.behind[-len(shape) :]) != tuple(shape):
            raise SelectionError(f"{name} along the rows for an expert")
        return one.behind
    if name in ("to", "type_as") and first:
        return one.behind
    if name in _ELEMENTS:
        if any(len(r.behind) != len(one.behind) for r in of) or any(t.dim() > len(one.behind) for t in others):
            raise SelectionError(f"{name} of rows for an expert and of something with another number of dims")
        try:
            return tuple(np.broadcast_shapes(*(r.behind for r in of), *(tuple(t.shape) for t in others)))
        except ValueError as e:
            raise SelectionError(f"{name} of rows for an expert: {e}") from e
    if name in _ALONG and first and len(of) == 1:
        dim = (
            args[1] if len(args) > 1 and name != "normalize" else kwargs.get("dim", 1 if name == "normalize" else None)
        )
        _behind(one, dim)
        return one.behind
    if name in _OVER and first and len(of) == 1 and set(kwargs) <= {"dim", "keepdim", "dtype", "p"}:
        dims = kwargs.get("dim", args[1] if len(args) > 1 and name != "norm" else None)
        dims = {_behind(one, d) for d in (dims if isinstance(dims, (tuple, list)) else (dims,))}
        keeps = kwargs.get("keepdim", args[2] if len(args) > 2 and name in ("sum", "mean", "amax", "amin") else False)
        kept = [(1 if d in dims else n) for d, n in enumerate(one.behind) if keeps or d not in dims]
        return tuple(kept)
    if name == "cat" and len(of) == len(args[0]):
        dim = _behind(one, args[1] if len(args) > 1 else kwargs.get("dim", 0))
        return tuple(sum(r.behind[d] for r in of) if d == dim else n for d, n in enumerate(one.behind))
    if name in _CUTTING and first:
        return one.behind
    raise _refused(name)


def _one_dim(one: Rows) -> tuple[int, ...]:
    if len(one.behind) != 1:
        raise SelectionError("a product of rows for an expert that have several dims each")
    return one.behind


def _behind(one: Rows, dim: Any) -> int:
    """A dim, as one of those behind the rows."""
    count = len(one.behind)
    found = dim - 1 - one.lead if type(dim) is int and dim >= 0 else dim + count if type(dim) is int else -1
    if not 0 <= found < count:
        raise SelectionError("a call along the rows that are sent to one expert, whose number depends on values")
    return found


def _dtype(func: Any, name: str, one: Rows, args: Any, kwargs: Any, of: Sequence[Rows]) -> torch.dtype | None:
    """None if it is not known. Under autocast it is that of the same call of no rows, which a graph leaves out."""
    if name in _COMPARING:
        return torch.bool
    if name in _CASTS:
        return _CASTS[name]
    if name in ("to", "type_as"):
        for given in (*args[1:], *kwargs.values()):
            if isinstance(given, (torch.dtype, torch.Tensor, Rows)):
                return given if isinstance(given, torch.dtype) else given.dtype
        return one._dtype
    if torch.is_autocast_enabled("cpu") and name != "dropout" and all(r._dtype is not None for r in of):
        with torch.no_grad():
            return func(*_with(args, _none), **_with(kwargs, _none)).dtype
    others = {a.dtype for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.dim()}
    dtypes = {r._dtype for r in of} | others
    return dtypes.pop() if len(dtypes) == 1 and kwargs.get("dtype") is None else None


def _parts(one: Rows, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Rows, ...]:
    named = ("chunks", "split_size", "split_size_or_sections")
    told: Any = args[1] if len(args) > 1 else next((kwargs[k] for k in named if k in kwargs), None)
    dim = _behind(one, args[2] if len(args) > 2 else kwargs.get("dim", 0))
    size = one.behind[dim]
    if isinstance(told, int):
        step = math.ceil(size / told) if name == "chunk" else told
        told = [min(step, size - at) for at in range(0, size, step)]
    found = []
    for number, cut in enumerate(told):
        behind = (*one.behind[:dim], cut, *one.behind[dim + 1 :])
        found.append(one.like(Part(call, number), behind, one._dtype))
    for rows in (one, *found):
        rows._is_shared = True
    return tuple(found)


def _arranged(func: Any, name: str, one: Rows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows:
    """Views, in which the rows stay the first dim."""
    if kwargs:
        raise _refused(name)
    behind, lead = one.behind, one.lead
    term: Term = Call(func, (one.term, *args), {})
    if name in ("view", "reshape"):
        sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        if not sizes or sizes[0] != -1 or math.prod(sizes[1:]) != math.prod(behind):
            raise _refused(name)
        behind, lead = tuple(sizes[1:]), False
        term = Call(torch.Tensor.reshape, (one.term, (-1, *behind)), {})
    elif name == "squeeze" and lead and args == (0,):
        lead, term = False, one.term
    elif lead:
        raise SelectionError("rows for an expert with a dim before them: take it away with view(-1, size)")
    elif name == "squeeze":
        dim = _behind(one, args[0] if args else None)
        behind = tuple(n for d, n in enumerate(behind) if d != dim or n != 1)
    elif name == "unsqueeze":
        dim = args[0] - 1 if args[0] > 0 else args[0] + 1 + len(behind)
        if not 0 <= dim <= len(behind) or args[0] == 0:
            raise _refused(name)
        behind = (*behind[:dim], 1, *behind[dim:])
    elif name == "getitem":
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        of_rows = bool(index) and isinstance(index[0], slice) and index[0] == slice(None)
        if not of_rows and (
            not index or index[0] is not ... or len([i for i in index[1:] if i is not None]) > len(behind)
        ):
            raise _refused("a part")
        behind = indexed(behind, index[1:] if of_rows else index)
    else:
        raise _refused(name)
    found = one.like(term, behind, one._dtype, lead=lead)
    one._is_shared = found._is_shared = True
    return found


def _with(argument: Any, of_rows: Callable[[Rows], Any], of_tensor: Callable[[torch.Tensor], Any] = _same) -> Any:
    """``argument`` with something instead of rows, and of tensors."""
    if isinstance(argument, Rows):
        return of_rows(argument)
    if isinstance(argument, torch.Tensor):
        return of_tensor(argument)
    if isinstance(argument, (tuple, list)):
        return type(argument)(_with(a, of_rows, of_tensor) for a in argument)
    if isinstance(argument, dict):
        return {k: _with(a, of_rows, of_tensor) for k, a in argument.items()}
    return argument


def _term(one: Rows) -> Term:
    return one.term


def _none(one: Rows) -> torch.Tensor:
    return torch.zeros(0, *one.behind, dtype=one.dtype)
