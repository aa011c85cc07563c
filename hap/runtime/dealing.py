"""Whole values and flat tensors of all ranks' pieces, one piece after another in rank order.

Ranks that follow one another with shards of one size are a *run*: their pieces are copied by one call, whatever dim is
sharded and however many ranks there are. Devices of a kind are mostly one run, or two where the sizes do not come out
even. ``benchmarks/packing.py`` times it against a call for every piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch

from hap.codegen.layout import Layout
from hap.placement import Sizes

FEW = 8  # ranks whose pieces one call puts together sooner than one for each run: a view of each costs less


class Run(NamedTuple):
    """``ranks`` ranks from ``rank`` on with ``size`` each, of which the first begins at ``start``."""

    rank: int
    start: int
    ranks: int
    size: int


@lru_cache(maxsize=4096)
def runs_of(sizes: Sizes) -> tuple[Run, ...]:
    """Those that have something."""
    found, rank, start = [], 0, 0
    for size, alike in groupby(sizes):
        ranks = len(list(alike))
        if size:
            found.append(Run(rank, start, ranks, size))
        rank, start = rank + ranks, start + ranks * size
    return tuple(found)


def is_in_order(layout: Layout, shape: Sequence[int]) -> bool:
    """Whether the ranks' pieces, one after another in memory, are the whole value; ``shape``: of either."""
    return layout.outer == 1 and math.prod(shape[: layout.dim]) == 1


def lengths(layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
    """Elements of every rank's piece; ``shape``: of the whole value or of any piece."""
    place = layout.outer * layout.unit * math.prod(s for d, s in enumerate(shape) if d != layout.dim)
    return tuple(size * place for size in layout.sizes)


def dealt(whole: torch.Tensor, layout: Layout, *, new: bool = True) -> torch.Tensor:
    """Every rank's piece of the whole value, which may have any strides: flat, contiguous. Not ``new``: the value's own
    memory if they are in order there."""
    if is_in_order(layout, whole.shape):
        return whole.clone(memory_format=torch.contiguous_format).view(-1) if new else whole.reshape(-1)
    begin, flat = whole.storage_offset(), whole.new_empty(whole.numel())
    for view in _views(layout, whole.shape, whole.stride()):
        part = flat[view.start : view.stop].view(view.shape)
        part.copy_(whole.as_strided(view.shape, view.stride, begin + view.offset))
    return flat


def joined(flat: torch.Tensor, layout: Layout, shape: Sequence[int]) -> torch.Tensor:
    """The whole value, contiguous, of all pieces; ``shape``: of any piece. A view of ``flat`` if they are in order."""
    how = _joining(layout, tuple(shape))
    if how.few:
        return joined_of(flat.split_with_sizes(how.lengths), layout, shape)
    if how.in_order:
        return flat.view(how.shape)
    whole = flat.new_empty(how.shape)
    for view in _views(layout, whole.shape, whole.stride()):
        part = flat[view.start : view.stop].view(view.shape)
        whole.as_strided(view.shape, view.stride, view.offset).copy_(part)
    return whole


def joined_of(pieces: Sequence[torch.Tensor], layout: Layout, shape: Sequence[int]) -> torch.Tensor:
    """The same, new, of every rank's piece, flat."""
    few = _joining(layout, tuple(shape)).few
    if few:
        return torch.cat([piece.view(local) for piece, local in zip(pieces, few, strict=True)], layout.dim)
    return joined(torch.cat(list(pieces)), layout, shape)


@dataclass(frozen=True)
class _Joining:
    """``shape``: of the whole value. ``few``: shapes of the pieces that ``torch.cat`` puts together, none unless they
    are few and not in order. ``lengths``: of every piece. (No named tuple: torch 2.11's ``torch.compile`` loses those
    it made.)"""

    shape: tuple[int, ...]
    in_order: bool
    few: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]


@lru_cache(maxsize=4096)
def _joining(layout: Layout, shape: tuple[int, ...]) -> _Joining:
    """``shape``: of any piece."""
    whole, ranks = layout.whole_shape(shape), len(layout.sizes)
    in_order = is_in_order(layout, whole)
    few = layout.outer == 1 and ranks <= FEW and not in_order
    shapes = tuple(layout.local_shape(shape, rank) for rank in range(ranks)) if few else ()
    return _Joining(whole, in_order, shapes, lengths(layout, shape))


class _View(NamedTuple):
    """What a run has of a whole value, ``(ranks, *before, outer, size * unit, *after)``, and where that is among all
    pieces."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    start: int
    stop: int


@lru_cache(maxsize=4096)
def _views(layout: Layout, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[_View, ...]:
    """Of a whole value of that shape and stride."""
    dim, outer, unit, sizes = layout
    before, after = shape[:dim], shape[dim + 1 :]
    inner = (*stride[:dim], sum(sizes) * unit * stride[dim], *stride[dim:])
    place = outer * unit * math.prod((*before, *after))  # elements
    return tuple(
        _View(
            (ranks, *before, outer, size * unit, *after),
            (size * unit * stride[dim], *inner),
            start * unit * stride[dim],
            start * place,
            (start + ranks * size) * place,
        )
        for _, start, ranks, size in runs_of(sizes)
    )
