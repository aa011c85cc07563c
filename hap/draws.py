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

from hap.bits import WIDTH, Place, element_bits, top_bits
from hap.dropout import keep_mask

_SIGNIFICAND = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
LARGEST_RANGE = 2**31  # of whole numbers: what 32 bits can be scaled to within 64


@torch.compiler.disable  # as dropout's masks
def rand(
    size: Sequence[int], seed: torch.Tensor, site: int, shard: Place | None, *, dtype: torch.dtype
) -> torch.Tensor:
    """Uniform between 0 and 1, both excluded: ``size``, of a real floating ``dtype``, on the seed's device."""
    bits = _SIGNIFICAND[dtype]
    return (top_bits(bits - 1, size, seed, site, shard).to(dtype) + 0.5) * 2.0 ** (1 - bits)


def randn(
    size: Sequence[int], seed: torch.Tensor, site: int, shard: Place | None, *, dtype: torch.dtype
) -> torch.Tensor:
    """Of mean 0 and variance 1: ``size``, of a real floating ``dtype``, on the seed's device.

    By the inverse of the distribution function, in float32 where the dtype is narrower: at most 5.3 deviations, 6.2 in
    float64.
    """
    wide = dtype if dtype == torch.float64 else torch.float32
    uniform = rand(size, seed, site, shard, dtype=wide)
    return (torch.erfinv(2 * uniform - 1) * math.sqrt(2)).to(dtype)


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
    bits = element_bits(size, seed, site, shard).to(torch.int64) & (2**WIDTH - 1)
    return ((bits * (high - low) >> WIDTH) + low).to(dtype)
