"""Random numbers that every sharding draws alike: functions of (seed, site, global element), as ``hap.bits`` has them.

``hap.rand.default(size, seed, site, shard, dtype=)`` draws from the uniform distribution, ``hap.randn.default`` from
the normal one, ``hap.randint.default(size, low, high, seed, site, shard, dtype=)`` whole numbers, and
``hap.bernoulli.default(size, p, seed, site, shard, dtype=)`` ones and zeros: where a dropout of ``1 - p`` keeps, ones.
What else PyTorch draws is made of these at capture (``hap.capture.draws``). ``size`` is the size of the piece that
``shard`` says.

A uniform number is the middle of one of ``2^(b - 1)`` equal parts of the interval from 0 to 1, with b the bits of the
dtype's significand, 32 at most: never 0 or 1, so its logarithm is a number, and exact in its dtype, so that comparing
it gives the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hap.bits import WIDTH, Place, drawn, top_bits
from hap.dropout import keep_mask

_SIGNIFICAND = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
LARGEST_RANGE = 2**31  # of whole numbers: what 32 bits can be scaled to within 64


@torch.compiler.disable  # as dropout's masks
def rand(
    size: Sequence[int], seed: torch.Tensor, site: int, shard: Place | None, *, dtype: torch.dtype
) -> torch.Tensor:
    """Uniform between 0 and 1, both excluded: ``size``, of a real floating ``dtype``, on the seed's device."""
    return drawn(lambda bits: _uniform(bits, dtype), dtype, size, seed, site, shard)


@torch.compiler.disable
def randn(
    size: Sequence[int], seed: torch.Tensor, site: int, shard: Place | None, *, dtype: torch.dtype
) -> torch.Tensor:
    """Of mean 0 and variance 1: ``size``, of a real floating ``dtype``, on the seed's device.

    By the inverse of the distribution function, in float32 where the dtype is narrower: at most 5.3 deviations, 6.2 in
    float64.
    """
    wide = dtype if dtype == torch.float64 else torch.float32

    def normal(bits: torch.Tensor) -> torch.Tensor:
        return _uniform(bits, wide).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))

    return drawn(normal, dtype, size, seed, site, shard)


def _uniform(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    count = _SIGNIFICAND[dtype] - 1
    return top_bits(bits, count).to(dtype).add_(0.5).mul_(0.5**count)


def bernoulli(
    size: Sequence[int], p: float, seed: torch.Tensor, site: int, shard: Place | None, *, dtype: torch.dtype
) -> torch.Tensor:
    """1 with probability ``p``, else 0: ``size``, of a ``dtype``, on the seed's device."""
    return keep_mask(size, seed, 1 - p, site, shard).to(dtype)


@torch.compiler.disable
def randint(
    size: Sequence[int],
    low: int,
    high: int,
    seed: torch.Tensor,
    site: int,
    shard: Place | None,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Whole numbers from ``low`` to ``high - 1``, alike likely to one part in 2^32 of their number; at most
    ``LARGEST_RANGE`` of them."""

    def scaled(bits: torch.Tensor) -> torch.Tensor:
        return ((bits.to(torch.int64) & (2**WIDTH - 1)) * (high - low) >> WIDTH) + low

    return drawn(scaled, dtype, size, seed, site, shard)
