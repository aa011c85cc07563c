"""``Layout``: a ``Shard`` once the plan's sizes are known; what collectives take and emitted programs spell out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from hap.placement import Shard, Sizes, take_shard


class Layout(NamedTuple):
    """``dim`` is read as ``(o, i, u)``, ``o < outer``, ``u < unit``; rank r holds the next ``sizes[r]`` values of i."""

    dim: int
    outer: int
    unit: int
    sizes: Sizes

    @classmethod
    def of(cls, shard: Shard, sizes: Mapping[str, Sizes]) -> Layout:
        return cls(shard.dim, shard.outer, shard.unit, sizes[shard.group])

    @property
    def shard(self) -> Shard:
        return Shard(self.dim, self.outer, sum(self.sizes), self.unit, "")

    def local_shape(self, whole: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of rank's piece of a tensor of shape ``whole``."""
        extent = self.outer * self.sizes[rank] * self.unit
        return tuple(extent if d == self.dim else s for d, s in enumerate(whole))

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor from that of any piece."""
        return tuple(self.shard.extent if d == self.dim else s for d, s in enumerate(local))

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Rank's piece of the whole tensor, contiguous."""
        if self.outer == 1:  # as most are: one call instead of four
            start = sum(self.sizes[:rank]) * self.unit
            return whole.narrow(self.dim, start, self.sizes[rank] * self.unit).contiguous()
        return take_shard(whole, self.shard, self.sizes, rank)
