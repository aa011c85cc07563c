"""What a forward pass may call in PyTorch and cannot in a step, each with what to write instead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

_VIEWING = (torch.Tensor.view, torch.Tensor.view_as)
_LIES_OTHERWISE = ("Cannot view a tensor with shape", "view size is not compatible")  # by release
BACKWARD = "a backward pass inside of the forward pass, which would add to .grad: use torch.autograd.grad there"
COUNTING = (torch.bincount, torch.Tensor.bincount)


class RefusedError(Exception):
    """What cannot be, and what to write instead: the first part of what is said."""


@contextlib.contextmanager
def explained(func: Any) -> Iterator[None]:
    """A tensor that cannot be viewed may be one that can where its input lies in another order in memory."""
    try:
        yield
    except (RuntimeError, ValueError) as e:
        if func not in _VIEWING or not any(said in str(e) for said in _LIES_OTHERWISE):
            raise
        raise RefusedError(
            "a view that needs another memory format: a step's inputs and parameters are contiguous, never "
            "channels_last; use reshape"
        ) from e


def refuse_sparse(found: Any, arguments: Iterable[Any]) -> None:
    """What a call returned, and what it was given."""
    tensors = [t for t in (found, *arguments) if isinstance(t, torch.Tensor)]
    if isinstance(found, torch.Tensor) and any(t.layout != torch.strided for t in tensors):
        raise RefusedError(
            "a sparse tensor: make it with its zeros, torch.zeros(size).index_put(places, values), or add up a product "
            "by its rows, torch.zeros(n, k).index_add(0, rows, values[:, None] * x[columns]),"
        )


def _refusing(why: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RefusedError(why)

    return refuse


_COUNTED = _refusing(
    "a tensor whose size depends on values: for K of them, use one_hot(y, K).sum(0), with weights "
    "torch.zeros(K).index_add(0, y, weights)"
)
_PACKED = _refusing(
    "a packed sequence, which has fewer samples from time to time, cannot be dealt out: give the layer the padded one, "
    "and mask what lies behind the ends"
)
REFUSED: Mapping[Any, Callable[..., NoReturn]] = {
    **dict.fromkeys(COUNTING, _COUNTED),
    torch._VF._pack_padded_sequence: _PACKED,
    torch.Tensor.backward: _refusing(BACKWARD),
}
