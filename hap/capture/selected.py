"""``x[mask]``: what a mask of booleans selects. How many there are, no graph of static shapes can say.

So all places stay, with zeros where nothing is selected, and these are left out where elements are added up:

    x[mask]                                 where(mask, x, 0)
    f(x[mask], y[mask])                     f of all places: of elements, or along a dim behind the mask's own
    x[mask].sum(), x[mask].mean()           where(mask, x, 0).sum(), for a mean over how many are selected
    cross_entropy(x[mask], labels[mask])    of all places, where the labels of the others count for nothing
    x[mask] = y[mask], x[mask] *= 2         where(mask, y, x) in place

A place that is not selected gets the gradient zero, and so must whatever led to it: no function may be infinite there,
nor its derivative, as 0 times that is no number. Those that may be are given another argument there (``_SAFE``). The
rest is refused: what depends on the number itself, what puts places together, and two masks in one call.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

_SAFE: Mapping[str, float] = {"exp": 0, "log": 1, "log1p": 0, "log2": 1, "sqrt": 1, "rsqrt": 1, "reciprocal": 1}
_WORDS = """
    abs add bfloat16 clamp clone contiguous cos detach double eq float ge gelu gt half int layer_norm le linear
    log_sigmoid logsigmoid long lt mul ne neg radd relu rms_norm rmul rsub sigmoid silu sin softplus square sub tanh to
    type_as
"""
_OF_PLACES = frozenset(_WORDS.split())  # finite everywhere, and so are their derivatives
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
        self.version = mask._version  # counts changes in place

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
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func)).strip("_")
        of = [a for a in (*args, *kwargs.values()) if isinstance(a, Selected)]
        if len({id(one.mask) for one in of}) != 1:
            raise SelectionError(f"{name} of what several masks select: use the same tensor as the mask")
        if any(one.version != one.mask._version for one in of):
            raise SelectionError(f"{name} of what a mask selected that was changed in place since: change a copy of it")
        if name == "setitem":
            return _written(*args)
        if func in _LABELLED:
            return _labelled(func, *args, **kwargs)
        if func in _COMPARED:
            return _compared(func, *args, **kwargs)
        if name in ("sum", "mean") and of[0] is args[0]:
            return _added_up(name, *args, **kwargs)
        if name in ("div", "truediv", "true_divide", "rdiv") and len(args) == 2 and not kwargs:
            over, under = args if name != "rdiv" else args[::-1]
            safe = Selected(under.filled(1), under.mask) if isinstance(under, Selected) else under
            return _of_all(torch.true_divide, (over, safe), {})
        if name == "pow" and args[0] is of[0] and isinstance(args[1], (int, float)) and args[1] >= 1:
            return _of_all(torch.pow, args, kwargs)
        if name in _SAFE:
            return _of_all(func, (Selected(of[0].filled(_SAFE[name]), of[0].mask), *args[1:]), kwargs)
        if name in _ALONG:
            dim, *others = args[1:] or (kwargs.get("dim"),)
            kwargs = {k: v for k, v in kwargs.items() if k != "dim"}
            return _of_all(func, (args[0], _from_behind(of[0], (dim,))[0], *others), kwargs)
        if name in _OF_PLACES:
            return _of_all(func, args, kwargs)
        raise SelectionError(
            f"{name} of a tensor whose size depends on values, as a boolean index makes one: add it up, "
            "or use torch.where or a mask"
        )

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
for _name in f"{_OPERATORS} getitem setitem len iter bool matmul rmatmul".split():
    setattr(Selected, f"__{_name}__", _operator(f"__{_name}__"))
Selected.__hash__ = object.__hash__  # type: ignore[method-assign]


def _of_all(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Selected:
    """``func`` of all places. What is no selection must broadcast over what lies behind the mask's dims."""
    found = (*args, *kwargs.values())
    one = max((a for a in found if isinstance(a, Selected)), key=lambda a: a.behind)
    beside = [a for a in found if isinstance(a, torch.Tensor)]
    if func is not functional.linear and any(a.dim() > one.behind for a in beside):
        raise SelectionError("a tensor beside what a mask selects that has as many dims: select from it, too")
    whole = func(*map(_whole, args), **{k: _whole(a) for k, a in kwargs.items()})
    return Selected(whole, one.mask)


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
    lost = _of_all(func, pair, {**given, "reduction": "none"})
    return lost if reduction == "none" else _added_up(reduction, lost)


def _bound(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        raise SelectionError(f"{func.__name__} of what a mask selects with size_average or reduce: use reduction")
    return given
