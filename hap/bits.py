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

from collections.abc import Callable, Sequence

import torch

_GOLDEN_64 = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
_GOLDEN_32 = 0x9E3779B9
WIDTH = 32
_CACHED = 1 << 16  # elements that a core works on at a time: what is done with them stays in its cache
_CACHED_ON_GPU = 1 << 22  # that a GPU does: what lies between the calls takes little of its memory

Place = Sequence[int]  # dim, outer, n, unit, start; of what the five before say, if there are any


def drawn(
    make: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    shape: Sequence[int],
    seed: torch.Tensor,
    site: int,
    shard: Place | None,
) -> torch.Tensor:
    """What ``make`` gives of 32 random bits for each element: the local ``shape`` in ``dtype``, on the seed's device.

    ``make`` is elementwise, of int32 that it may overwrite. It is called for so many rows at a time as a cache holds.
    """
    size, device = list(shape) or [1], seed.device
    columns = _positions(size, len(size) - 1, shard, device).to(torch.int32) * _signed(_GOLDEN_32, 32)
    row_keys = _mix_64(_row_numbers(size, shard, device) * _signed(_GOLDEN_64, 64) + _key(seed, site)).reshape(-1, 1)
    low, high = row_keys.to(torch.int32), (row_keys >> 32).to(torch.int32)
    cached = _CACHED * torch.get_num_threads() if device.type == "cpu" else _CACHED_ON_GPU
    rows = cached // max(1, len(columns))
    if rows >= len(row_keys):
        return make(_mixed(columns, low, high)).to(dtype).reshape(tuple(shape))
    found = torch.empty((len(row_keys), len(columns)), dtype=dtype, device=device)
    for part, first, second in zip(*(t.split(max(1, rows)) for t in (found, low, high)), strict=True):
        part.copy_(make(_mixed(columns, first, second)))
    return found.reshape(tuple(shape))


def _mixed(columns: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The bits of rows (R, 1) at columns (C,)."""
    bits = columns + low
    spare = torch.empty_like(bits)
    _stir(bits, 16, spare)
    bits *= _signed(0x85EBCA6B, 32)
    _stir(bits, 13, spare)
    bits ^= high
    bits *= _signed(0xC2B2AE35, 32)
    _stir(bits, 16, spare)
    return bits


def top_bits(bits: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` of them (at most 31), in place."""
    bits >>= WIDTH - count
    return bits.bitwise_and_((1 << count) - 1)


def _stir(bits: torch.Tensor, count: int, spare: torch.Tensor) -> None:
    """``bits ^= bits >> count`` of int32 in place, with zeros brought in."""
    torch.bitwise_right_shift(bits, count, out=spare)
    bits ^= spare.bitwise_and_((1 << (WIDTH - count)) - 1)


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
    bits = (bits ^ _shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    bits = (bits ^ _shifted(bits, 27)) * _signed(0x94D049BB133111EB, 64)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """A shift of int64 to the right that brings in zeros, as torch's integers are signed."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(bits: int, width: int) -> int:
    bits &= (1 << width) - 1
    return bits - (1 << width) if bits >> (width - 1) else bits
