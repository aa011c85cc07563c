"""``x[mask]``: what a mask of booleans selects. How many there are, no graph of static shapes can say.

So all places stay, with zeros where nothing is selected, and these are left out where elements are added up:

    x[mask]                                 where(mask, x, 0)
    f(x[mask], y[mask])                     f of all places: of elements, or along a dim behind the mask's own
    x[mask].sum(), x[mask].mean()           where(mask, x, 0).sum(), for a mean over how many are selected
    cross_entropy(x[mask], labels[mask])    of all places, where the labels of the others count for nothing
    x[mask] = y[mask], x[mask] *= 2         where(mask, y, x) in place

A place that is not selected gets the gradient zero, and so must whatever led to it: no function may be infinite there,
nor its derivative, as 0 times that is no number. Those that may be are given another argument there (``SAFE``). The
rest is refused: what depends on the number itself, what puts places together, and two masks in one call
that are not made of the same by the same comparisons (``sames``).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

SAFE: Mapping[str, float] = {"exp": 0, "log": 1, "log1p": 0, "log2": 1, "sqrt": 1, "rsqrt": 1, "reciprocal": 1}
_SHARING = (
    "bfloat16",
    "contiguous",
    "detach",
    "double",
    "float",
    "half",
    "int",
    "long",
    "to",
    "type_as",
)  # memory, maybe
_WORDS = """
    abs add clamp clone cos eq ge gelu gt le log_sigmoid logsigmoid lt mul ne neg radd relu rmul rsub sigmoid silu sin
    softplus square sub tanh
"""
OF_PLACES = frozenset(_WORDS.split()).union(_SHARING)  # finite everywhere, and so are their derivatives
_ROWS = ("linear", "layer_norm", "rms_norm")
_ALONG = ("softmax", "log_softmax", "logsumexp")
_LABELLED = (functional.cross_entropy, functional.nll_loss)
_COMPARED = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy_with_logits,
)
_KNOWN = ("dtype", "device", "layout", "requires_grad", "is_cuda")


class SelectionError(Exception):
    """What a mask selects is used as no graph of static shapes can."""


class Selected:
    """``whole``: all places, the mask's dims and ``behind`` others. ``mask`` is the user's own: two selections go
    together if theirs is the same."""

    def __init__(self, whole: torch.Tensor, mask: torch.Tensor) -> None:
        self.whole, self.mask, self.behind = whole, mask, whole.dim() - mask.dim()
        self.version, self.is_shared = mask._version, False  # changes in place; memory, with another selection

    @classmethod
    def of(cls, x: torch.Tensor, mask: torch.Tensor) -> Selected:
        """The dims of ``mask`` are the first ones of ``x``."""
        return cls(cls(x, mask).filled(0), mask)

    def filled(self, value: float) -> torch.Tensor:
        """``whole``, with this value where nothing is selected."""
        value = bool(value) if self.whole.dtype == torch.bool else value
        return torch.where(self.mask[(..., *(None,) * self.behind)], self.whole, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, own = kwargs or {}, getattr(func, "__name__", str(func))
        name, of = own.strip("_"), [a for a in (*args, *kwargs.values()) if isinstance(a, Selected)]
        if len({id(one.mask) for one in of}) > 1:
            raise SelectionError(f"{name} of what several masks select: use the same tensor as the mask")
        if any(one.version != one.mask._version for one in of):
            raise SelectionError(f"{name} of what a mask selected that was changed in place since: change a copy of it")
        if own.endswith("_") and not own.endswith("__"):
            raise SelectionError(f"{own} of what a mask selects: the same function without the underscore has a graph")
        if "out" in kwargs:
            raise SelectionError(f"{name} of what a mask selects into a tensor of one's own")
        if name == "setitem" and of:
            return _written(*args)
        if func in _LABELLED:
            return _labelled(func, *args, **kwargs)
        if func in _COMPARED:
            return _compared(func, *args, **kwargs)
        first = bool(args) and isinstance(args[0], Selected)
        if name in ("sum", "mean") and first:
            return _added_up(name, *args, **kwargs)
        if name in ("div", "truediv", "true_divide", "rdiv") and len(args) == 2 and not kwargs:
            over, under = args if name != "rdiv" else args[::-1]
            return _of_all(torch.true_divide, (over, _safe(under, 1)), {})
        if name == "pow" and first and len(args) == 2 and isinstance(args[1], (int, float)) and not kwargs:
            is_whole = float(args[1]).is_integer() and args[1] >= 1  # others have no number of what is below zero
            return _of_all(torch.pow, (args[0] if is_whole else _safe(args[0], 1), args[1]), {})
        if name in SAFE and first:
            return _of_all(func, (_safe(args[0], SAFE[name]), *args[1:]), kwargs)
        if name in _ALONG and first:
            dim, *others = args[1:] or (kwargs.get("dim"),)
            kwargs = {k: v for k, v in kwargs.items() if k != "dim"}
            return _of_all(func, (args[0], _from_behind(args[0], (dim,))[0], *others), kwargs)
        if name in _ROWS and first and len(of) == 1:
            return _of_rows(func, *args, **kwargs)
        if name in OF_PLACES and of:
            found = _of_all(func, args, kwargs)
            for one in (found, *of) if name in _SHARING else ():
                one.is_shared = True
            return found
        raise SelectionError(
            f"{name} of a tensor whose size depends on values, as a boolean index makes one: add it up, "
            "or use torch.where or a mask"
        )

    def _changed(self, name: str, other: Any) -> Selected:
        """By an operator in place: whoever else holds this very selection sees it, too."""
        if self.is_shared:
            raise SelectionError("a change in place of what a mask selects that may share memory: change a clone of it")
        if self.whole.requires_grad and not torch.is_grad_enabled():  # they would be those of what was there before
            raise SelectionError("a change in place, without gradients, of what a mask selects with gradients")
        whole = Selected.__torch_function__(getattr(torch.Tensor, name), (Selected,), (self, other)).whole
        if whole.shape != self.whole.shape or whole.dtype != self.whole.dtype:
            raise SelectionError("a change in place of what a mask selects to another shape or dtype")
        self.whole = whole
        return self

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(torch.Tensor, name)
        if name in _KNOWN:
            return getattr(self.whole, name)
        if not callable(attribute):
            raise SelectionError(f"the {name} of a tensor whose size depends on values, as a boolean index makes one")
        return lambda *args, **kwargs: Selected.__torch_function__(attribute, (Selected,), (self, *args), kwargs)


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: Selected, *args: Any) -> Any:
        return Selected.__torch_function__(getattr(torch.Tensor, name), (Selected,), (self, *args))

    return operator


_OPERATORS = "add radd sub rsub mul rmul truediv rtruediv neg abs pow eq ne lt le gt ge"


def _in_place(name: str) -> Callable[..., Selected]:
    return lambda self, other: self._changed(name, other)


for _name in ("add", "sub", "mul", "truediv"):
    setattr(Selected, f"__i{_name}__", _in_place(f"__{_name}__"))
for _name in f"{_OPERATORS} getitem setitem len iter bool matmul rmatmul".split():
    setattr(Selected, f"__{_name}__", _operator(f"__{_name}__"))
Selected.__hash__ = object.__hash__  # type: ignore[method-assign]


def _of_all(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Selected:
    """``func`` of all places. What is no selection must broadcast over what lies behind the mask's dims."""
    found = (*args, *kwargs.values())
    one, *others = (a for a in found if isinstance(a, Selected))
    if any(other.behind != one.behind for other in others):
        raise SelectionError("a call of what a mask selects of two tensors with unlike numbers of dims")
    if any(isinstance(a, torch.Tensor) and a.dim() > one.behind for a in found):
        raise SelectionError("a tensor beside what a mask selects that has as many dims: select from it, too")
    return Selected(func(*map(_whole, args), **{k: _whole(a) for k, a in kwargs.items()}), one.mask)


def _of_rows(func: Any, rows: Selected, *args: Any, **kwargs: Any) -> Selected:
    """``linear``, and norms over the last dims."""
    normalized = args[0] if args else kwargs.get("normalized_shape")
    if rows.behind < (1 if func is functional.linear or normalized is None else len(normalized)):
        raise SelectionError("a call along the dim whose size depends on values, as a boolean index makes one")
    return Selected(func(rows.whole, *args, **kwargs), rows.mask)


def _safe(argument: Any, value: float) -> Any:
    return Selected(argument.filled(value), argument.mask) if isinstance(argument, Selected) else argument


def _whole(argument: Any) -> Any:
    return argument.whole if isinstance(argument, Selected) else argument


def _from_behind(one: Selected, dims: Sequence[Any]) -> list[int]:
    """Dims of the selection, counted from behind, where those of ``whole`` are the same."""
    if not all(isinstance(d, int) and -one.behind <= (d - one.behind - 1 if d >= 0 else d) < 0 for d in dims):
        raise SelectionError("a call along the dim whose size depends on values, as a boolean index makes one")
    return [d - one.behind - 1 if d >= 0 else d for d in dims]


def _added_up(name: str, one: Selected, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """``sum`` and ``mean`` over all, over what is selected, or along dims behind that."""
    dims = () if dim is None else tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    if dims and not any(d in (0, -one.behind - 1) for d in dims):
        return _of_all(
            getattr(torch, name), (one,), {"dim": _from_behind(one, dims), "keepdim": keepdim, "dtype": dtype}
        )
    if keepdim:
        raise SelectionError(f"{name} with keepdim over what a mask selects")
    if name == "mean" and not (dtype or one.whole.dtype).is_floating_point:
        raise SelectionError(f"a mean of what a mask selects in {dtype or one.whole.dtype}")
    behind = _from_behind(one, [d for d in dims if d not in (0, -one.behind - 1)]) if dims else range(-one.behind, 0)
    whole = one.filled(0) if dtype is None else one.filled(0).to(dtype)
    over = [*range(one.mask.dim()), *behind]
    if name == "sum":
        return whole.sum(over)
    total = whole.sum(over, dtype=torch.promote_types(whole.dtype, torch.float32))  # of 16 bits, it may have no number
    count = one.mask.sum() * math.prod(one.whole.shape[d] for d in behind)
    return (total / count.to(total.dtype)).to(whole.dtype)


def _written(x: Any, index: Any, value: Any) -> torch.Tensor:
    """``x[index] = value`` in place, of what the same mask selects of as many elements."""
    (place,) = index if isinstance(index, tuple) and len(index) == 1 else (index,)
    same = isinstance(value, Selected) and place is value.mask and isinstance(x, torch.Tensor)
    if not same or value.whole.shape != x.shape or value.whole.dtype != x.dtype:
        raise SelectionError("what a mask selects is written where the same tensor as the mask says, in the same dtype")
    return x.copy_(torch.where(value.mask[(..., *(None,) * value.behind)], value.whole, x))


def _labelled(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A loss of scores (n, classes, ...) and classes (n, ...): those of what is not selected are ignored."""
    given = _bound(func, args, kwargs)
    scores, labels, ignored = given.pop("input"), given.pop("target"), given["ignore_index"]
    both = isinstance(scores, Selected) and isinstance(labels, Selected)
    if not both or labels.whole.dtype.is_floating_point or scores.behind != labels.behind + 1:
        raise SelectionError(f"{func.__name__} of what a mask selects takes scores and classes that it selects, both")
    dims = scores.mask.dim()
    lost = func(scores.whole.flatten(0, dims - 1), labels.filled(ignored).flatten(0, dims - 1), **given)
    return lost if given["reduction"] != "none" else Selected(lost.unflatten(0, scores.mask.shape), scores.mask)


def _compared(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A loss of each element."""
    given = _bound(func, args, kwargs)
    reduction, pair = given.pop("reduction"), (given.pop("input"), given.pop("target"))
    if reduction not in ("none", "mean", "sum"):
        raise SelectionError(f"{reduction} is not a valid value for reduction")
    if func is not functional.binary_cross_entropy_with_logits and given.get("weight") is not None:
        raise SelectionError(f"{func.__name__} of what a mask selects with weights, by which a mean is divided")
    lost = _of_all(func, pair, {**given, "reduction": "none"})
    return lost if reduction == "none" else _added_up(reduction, lost)


def _bound(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        raise SelectionError(f"{func.__name__} of what a mask selects with size_average or reduce: use reduction")
    return given
