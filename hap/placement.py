"""How one value lies on the ranks: ``Shard``, ``Replicate``, ``Partial``, and the whole-number sizes of a shard.

A sharded dim of global size ``outer * n * unit`` is read as the index ``(o, i, u)`` with ``o < outer``, ``i < n``,
``u < unit``; a rank holds a *range of i* and everything of ``o`` and ``u``. This carries views and fused projections
exactly: a fused QKV weight column of 144 = 3 x 6 heads x 8 sharded over its heads is
``Shard(1, outer=3, n=6, unit=8)``, and a batch of 8 folded into rows of 80 is ``Shard(0, outer=1, n=8, unit=10)``.

All sharded dims that operators tie together belong to one dimension *group*, and a group has one vector of sizes, one
whole number per rank, summing to its ``n``; zero is legal. The local extent of a shard is
``outer * sizes[rank] * unit``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

Sizes = tuple[int, ...]  # one whole number per rank
GroupSizes = Mapping[str, Sizes]  # group name -> sizes


class Shard(NamedTuple):
    """Rank r holds ``sizes[r]`` of the ``n`` atoms of ``dim``, where ``sizes`` belongs to ``group``."""

    dim: int
    outer: int
    n: int
    unit: int
    group: str

    @property
    def extent(self) -> int:
        return self.outer * self.n * self.unit

    def local_extent(self, size: int) -> int:
        return self.outer * size * self.unit

    def __str__(self) -> str:
        return f"S({self.dim}:{self.outer}x{self.n}x{self.unit}@{self.group})"


class Replicate:
    """Every rank holds the whole value. ``REPLICATE`` is the only one: ``Replicate()`` and a copy are it."""

    __slots__ = ()

    def __new__(cls) -> Replicate:
        return REPLICATE

    def __reduce__(self) -> str:
        return "REPLICATE"

    def __repr__(self) -> str:
        return "REPLICATE"

    def __str__(self) -> str:
        return "R"


class Partial:
    """The value is the element-wise sum of what the ranks hold. ``PARTIAL`` is the only one: ``Partial()`` and a copy
    are it."""

    __slots__ = ()

    def __new__(cls) -> Partial:
        return PARTIAL

    def __reduce__(self) -> str:
        return "PARTIAL"

    def __repr__(self) -> str:
        return "PARTIAL"

    def __str__(self) -> str:
        return "P"


Placement = Shard | Replicate | Partial
REPLICATE: Replicate = object.__new__(Replicate)
PARTIAL: Partial = object.__new__(Partial)
_SHARD = re.compile(r"S\((\d+):(\d+)x(\d+)x(\d+)@(\w+)\)")


def parse_placement(text: str) -> Placement:
    """Inverse of ``str``: ``R``, ``P`` or ``S(dim:outer x n x unit@group)`` without blanks. ValueError otherwise."""
    if text == "R":
        return REPLICATE
    if text == "P":
        return PARTIAL
    if match := _SHARD.fullmatch(text):
        dim, outer, n, unit = (int(match[i]) for i in range(1, 5))
        return Shard(dim, outer, n, unit, match[5])
    raise ValueError(f"not a placement: {text!r}")


@dataclass(frozen=True)
class LocalSize:
    """A size literal that differs by rank: ``scale * sizes[group][rank]``."""

    group: str
    scale: int

    def at(self, sizes: GroupSizes, rank: int) -> int:
        return self.scale * sizes[self.group][rank]


@dataclass(frozen=True)
class LocalStart(LocalSize):
    """A position literal that differs by rank: ``scale`` times the atoms that the ranks before it hold."""

    def at(self, sizes: GroupSizes, rank: int) -> int:
        return self.scale * sum(sizes[self.group][:rank])


def local_shape(shape: Sequence[int], placement: Placement) -> tuple[int | LocalSize, ...]:
    """The shape of a rank's piece, with the sharded extent left symbolic."""
    if not isinstance(placement, Shard):
        return tuple(shape)
    assert shape[placement.dim] == placement.extent, f"{placement} does not fit {tuple(shape)}"
    local = LocalSize(placement.group, placement.outer * placement.unit)
    return tuple(local if d == placement.dim else s for d, s in enumerate(shape))


def concrete_shape(shape: Sequence[int], placement: Placement, sizes: GroupSizes, rank: int) -> tuple[int, ...]:
    """The shape of rank's piece as plain numbers."""
    return tuple(s.at(sizes, rank) if isinstance(s, LocalSize) else s for s in local_shape(shape, placement))


def share(placement: Placement, sizes: GroupSizes, rank: int) -> float:
    """The fraction of the value's elements that rank holds, in [0, 1]."""
    return sizes[placement.group][rank] / placement.n if isinstance(placement, Shard) else 1.0


def take_shard(whole: torch.Tensor, shard: Shard, sizes: Sizes, rank: int) -> torch.Tensor:
    """Rank's piece of a whole tensor, contiguous. Contiguity matters: some kernels are silently wrong without it."""
    before, after = whole.shape[: shard.dim], whole.shape[shard.dim + 1 :]
    start = sum(sizes[:rank])
    atoms = whole.reshape(*before, shard.outer, shard.n, shard.unit, *after)
    piece = atoms.narrow(shard.dim + 1, start, sizes[rank])
    return piece.reshape(*before, shard.local_extent(sizes[rank]), *after).contiguous()


def join_shards(pieces: Sequence[torch.Tensor], shard: Shard, sizes: Sizes) -> torch.Tensor:
    """The whole tensor from every rank's piece: the inverse of ``take_shard``."""
    before, after = pieces[0].shape[: shard.dim], pieces[0].shape[shard.dim + 1 :]
    atoms = [p.reshape(*before, shard.outer, s, shard.unit, *after) for p, s in zip(pieces, sizes, strict=True)]
    return torch.cat(atoms, dim=shard.dim + 1).reshape(*before, shard.extent, *after)


def verify_sizes(sizes: Sizes, n: int, world_size: int) -> None:
    """Raise AssertionError unless ``sizes`` deals ``n`` atoms to ``world_size`` ranks exactly."""
    assert len(sizes) == world_size, f"{len(sizes)} sizes for {world_size} ranks"
    assert all(isinstance(s, int) and s >= 0 for s in sizes), f"sizes must be whole and non-negative: {sizes}"
    assert sum(sizes) == n, f"sizes {sizes} sum to {sum(sizes)}, not {n}"
