"""Random bits that are a function of (seed, site, global element), so that every sharding draws the same numbers.

``seed`` is a 0-dim int64 tensor that changes from step to step, ``site`` numbers the draws of one program, ``shard``
says which piece of the global tensor is drawn: ``(dim, outer, n, unit, start)``, the atoms from ``start`` of a dim of
``outer * n * unit`` (see ``hap.placement``), or None for all of it. On a mesh of two axes it may be a piece of a piece:
five more numbers say which, of the first.

The bits are counter-based (Salmon et al. 2011): a row is all but the last dim. Its key is the 64-bit finaliser of
SplitMix64 (Steele et al. 2014) of the row's number and of the key of (seed, site); an element's 32 bits are the
finaliser of MurmurHash3 (Appleby) of its column and one half of the row's key, into which the other half is mixed. All
is integer arithmetic, alike on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_GOLDEN_64 = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
_GOLDEN_32 = 0x9E3779B9
WIDTH = 32

Place = Sequence[int]  # dim, outer, n, unit, start; of what the five before say, if there are any


def top_bits(count: int, shape: Sequence[int], seed: torch.Tensor, site: int, shard: Place | None) -> torch.Tensor:
    """``count`` random bits (at most 31) for each element of the local ``shape``: int32, on the seed's device."""
    bits = element_bits(shape, seed, site, shard)
    return _shifted(bits, WIDTH - count, WIDTH)


def element_bits(shape: Sequence[int], seed: torch.Tensor, site: int, shard: Place | None) -> torch.Tensor:
    """32 random bits for each element of the local ``shape``: int32, on the seed's device."""
    size = list(shape) or [1]
    columns = _positions(size, len(size) - 1, shard, seed.device)
    row_keys = _mix_64(_row_numbers(size, shard, seed.device) * _signed(_GOLDEN_64, 64) + _key(seed, site))
    low, high = row_keys.to(torch.int32), (row_keys >> 32).to(torch.int32)
    bits = columns.to(torch.int32) * _signed(_GOLDEN_32, 32) + low.unsqueeze(-1)
    bits ^= _shifted(bits, 16, 32)
    bits *= _signed(0x85EBCA6B, 32)
    bits ^= _shifted(bits, 13, 32)
    bits ^= high.unsqueeze(-1)
    bits *= _signed(0xC2B2AE35, 32)
    bits ^= _shifted(bits, 16, 32)
    return bits.reshape(tuple(shape))


def _key(seed: torch.Tensor, site: int) -> torch.Tensor:
    return _mix_64(_mix_64(seed + _signed(_GOLDEN_64, 64)) + _signed(_GOLDEN_64 * (site + 1), 64))


def _row_numbers(size: list[int], shard: Place | None, device: torch.device) -> torch.Tensor:
    """The global number of every local row, in the shape of all dims but the last."""
    extents = list(size)
    for dim, outer, n, unit, _ in reversed(_places(shard)):
        extents[dim] = outer * n * unit
    rows, stride = torch.zeros((), dtype=torch.int64, device=device), 1
    for dim in reversed(range(len(size) - 1)):
        along = _positions(size, dim, shard, device) * stride
        rows = rows + along.reshape(-1, *(1,) * (len(size) - 2 - dim))
        stride *= extents[dim]
    return rows


def _positions(size: list[int], dim: int, shard: Place | None, device: torch.device) -> torch.Tensor:
    """The global position along ``dim`` of each local one."""
    found = torch.arange(size[dim], device=device)
    extent = size[dim]
    for along, outer, n, unit, start in reversed(_places(shard)):
        if along == dim:
            held = extent // (outer * unit)
            inside = max(1, held * unit)
            block, rest = found // inside, found % inside
            found, extent = (block * n + start) * unit + rest, outer * n * unit
    return found


def _places(shard: Place | None) -> list[tuple[int, ...]]:
    """From that of the whole to that of the last piece."""
    return [] if shard is None else [tuple(shard[i : i + 5]) for i in range(0, len(shard), 5)]


def _mix_64(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shifted(bits, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    bits = (bits ^ _shifted(bits, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return bits ^ _shifted(bits, 31, 64)


def _shifted(bits: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """A shift to the right that brings in zeros, as torch's integers are signed."""
    return (bits >> count) & ((1 << (width - count)) - 1)


def _signed(bits: int, width: int) -> int:
    bits &= (1 << width) - 1
    return bits - (1 << width) if bits >> (width - 1) else bits
