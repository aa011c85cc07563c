"""A tensor whose value is under way: it is waited for when it is first read, and not before.

The global loss is a sum over the ranks, and a training loop reads it, if ever, after ``backward()``. So a step returns
it while the sum is still being made. Whatever looks at its value, from Python or from inside of an operator, waits for
it first; asking for shape, dtype or ``grad_fn`` does not, nor does ``backward()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch


class Arrival:
    """The value in the making. ``held`` is an empty tensor in whose memory it will be; ``bring`` waits for it and
    returns it."""

    def __init__(self, held: torch.Tensor, bring: Callable[[], torch.Tensor]) -> None:
        self._held, self._bring = held, bring
        self._arrived = False

    def value(self) -> torch.Tensor:
        """The value, waited for at the first call, which raises what the wait raised."""
        if not self._arrived:
            with torch.no_grad():
                self._held.copy_(self._bring())
            self._arrived = True
            del self._bring
        return self._held


class LateTensor(torch.Tensor):
    """See the module docstring. Results of operators are plain tensors."""

    arrival: Arrival

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, bring: Callable[[], torch.Tensor]) -> Self:
        """On the CPU."""
        held = torch.empty(tuple(shape), dtype=dtype)
        # The same memory, and for autograd no relation: what arrives there is no write.
        twin = torch.empty(0, dtype=dtype).set_(held.untyped_storage(), 0, held.shape)  # type: ignore[call-overload]
        made = torch.Tensor._make_subclass(cls, twin)  # as_subclass would make a view, which allows no in-place call
        made.arrival = Arrival(held, bring)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Python's door: also what reads memory and is no operator, such as ``numpy()`` and ``tolist()``."""
        kwargs = kwargs or {}
        if func in _PLAIN_TENSORS_ONLY:
            args, kwargs = _arrived(args), _arrived(kwargs)
        elif func not in _LOOKS_AT_NO_VALUE:
            _arrived(args), _arrived(kwargs)
        return torch.Tensor.__torch_function__(func, (), args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch says not what it is given
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operators' door."""
        if func is torch.ops.aten.ones_like.default:  # the tangent that ``backward()`` begins with
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        return func(*_arrived(args), **_arrived(kwargs or {}))


def _arrived(given: Any) -> Any:
    """An argument, or several, with every late tensor's value in its place."""
    if isinstance(given, LateTensor):
        return given.arrival.value()
    if isinstance(given, (tuple, list)):
        return [_arrived(item) for item in given] if isinstance(given, list) else tuple(map(_arrived, given))
    if isinstance(given, Mapping):
        return {key: _arrived(item) for key, item in given.items()}
    return given


_FORM = ("grad_fn", "requires_grad", "shape", "dtype", "device", "_version")
_LOOKS_AT_NO_VALUE = (torch.Tensor.backward, *(getattr(torch.Tensor, name).__get__ for name in _FORM))
_PLAIN_TENSORS_ONLY = (torch.Tensor.__format__, torch.Tensor.__repr__, torch.Tensor.tolist)
