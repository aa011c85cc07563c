"""Dropout whose mask is a function of (seed, site, global element), so that every sharding drops the same elements.

``hap.dropout.default(x, seed, p, site, shard)``: seed, site and shard as in ``hap.bits``, x the piece that shard says.
Dropout is linear in x and its own derivative: the backward pass is the same call on the gradient, and no mask is kept.
An element is kept if its top 24 bits are at least ``p * 2^24``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hap.bits import Place, top_bits

_BITS = 24


def dropout(x: torch.Tensor, seed: torch.Tensor, p: float, site: int, shard: Place | None) -> torch.Tensor:
    """x with each element zeroed with probability p, and the others divided by 1 - p; x's shape and dtype."""
    if p >= 1:
        return torch.zeros_like(x)
    if p == 0:
        return x.clone()
    return torch.where(keep_mask(x.shape, seed, p, site, shard), x * (1 / (1 - p)), 0.0)


@torch.compiler.disable  # its whole numbers wrap around, and inductor's constants do not
def keep_mask(
    shape: Sequence[int], seed: torch.Tensor, p: float, site: int, shard: Place | None = None
) -> torch.Tensor:
    """Which elements of the local ``shape`` stay: bool, on the seed's device."""
    return top_bits(_BITS, shape, seed, site, shard) >= round(p * 2**_BITS)
