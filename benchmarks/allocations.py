"""Bytes of tensor memory that a program really holds: every storage that an operator of this thread makes.

A dispatch mode sees each call's results. A storage counts from the call that first returns it until it is freed (a weak
reference says when); views add nothing. What existed before (parameters, inputs) is ``keep``-ed by hand. Nothing of an
allocator's rounding or of a library's workspace is seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """``now`` and ``peak`` bytes. Use as a context around what is to be measured."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: dict[int, int] = {}

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._see(tensor)

    def least_peak(
        self, step: Callable[[], object], between: Callable[[], object] = lambda: None, steps: int = 5
    ) -> int:
        """Bytes at the fullest moment of ``step``: the least of ``steps`` calls, with ``between`` after each.

        A transport's thread may hold a collective's tensors for a moment after the collective is done (Gloo's does, for
        milliseconds where cores are busy), so one step's peak may be above what the program itself holds, never below.
        """
        peaks = []
        for _ in range(steps):
            self.restart()
            with self:
                step()
            peaks.append(self.peak)
            between()
        return min(peaks)

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.keep(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or storage.nbytes() == 0:
            return
        self._alive[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._alive.pop(key)
