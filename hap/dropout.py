"""Dropout whose mask is a function of (seed, site, global element), so that every sharding drops the same elements.

``hap.dropout.default(x, seed, p, site, shard)``: seed, site and shard as in ``hap.bits``, x the piece that shard says.
Dropout is linear in x and its own derivative: the backward pass is the same call on the gradient, and no mask is kept.
An element is kept if its top 24 bits are at least ``p * 2^24``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hap.bits import Place, drawn, top_bits

_BITS = 24


def dropout(x: torch.Tensor, seed: torch.Tensor, p: float, site: int, shard: Place | None) -> torch.Tensor:
    """x with each element zeroed with probability p, and the others divided by 1 - p; x's shape and dtype."""
    if p >= 1:
        return torch.zeros_like(x)
    if p == 0:
        return x.clone()
    return (x * (1 / (1 - p))).masked_fill_(_dropped(x.shape, seed, p, site, shard), 0.0)


def keep_mask(
    shape: Sequence[int], seed: torch.Tensor, p: float, site: int, shard: Place | None = None
) -> torch.Tensor:
    """Which elements of the local ``shape`` stay: bool, on the seed's device."""
    return ~_dropped(shape, seed, p, site, shard)


@torch.compiler.disable  # its whole numbers wrap around, and inductor's constants do not
def _dropped(shape: Sequence[int], seed: torch.Tensor, p: float, site: int, shard: Place | None) -> torch.Tensor:
    least = round(p * 2**_BITS)
    return drawn(lambda bits: top_bits(bits, _BITS) < least, torch.bool, shape, seed, site, shard)
