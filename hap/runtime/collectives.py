"""The collectives of a compiled program, for unequal and zero shares of any dim, on Gloo and NCCL.

A shard is described by a ``Layout(dim, outer, unit, sizes)``: the dim's index is ``(o, i, u)`` with ``o < outer``,
``i < sum(sizes)``, ``u < unit``, and rank r holds the ``sizes[r]`` values of i that follow those of the ranks before it
(see ``hap.placement``). Every result is contiguous: ``native_layer_norm_backward`` is silently wrong otherwise.

====================  =================================================  =================================
collective            from -> to                                         decompositions
====================  =================================================  =================================
``all_gather``        shard -> replicated                                ``all_to_all padded broadcast``
``all_reduce``        partial -> replicated                              ``ring`` (the backend's own)
``reduce_scatter``    partial -> shard                                   ``all_to_all_sum padded``
``all_to_all``        shard -> shard of another dim, atom or group       ``direct``
``slice``             replicated -> shard                                ``local`` (nothing on the wire)
====================  =================================================  =================================

Sums are made in the value's own dtype and, in ``all_to_all_sum``, in rank order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from hap.codegen.layout import Layout
from hap.codegen.program import DECOMPOSITIONS
from hap.errors import ProgramError
from hap.placement import Sizes, join_shards
from hap.plan import Collective
from hap.runtime.exchange import as_bytes, exchange, gather_by_broadcast, gather_padded, reduce_scatter_single

T = TypeVar("T")
CHECK_VARIABLE = "HAP_CHECK_COLLECTIVES"


class Pace(Protocol):
    """Told where compute ends and begins again: see ``hap.runtime.emulate.Throttle``."""

    def settle(self) -> None: ...

    def resume(self) -> None: ...


class Communicator:
    """One rank's end of the collectives of one process group.

    ``group`` is None for a world of one, where no process group is needed. ``check=True`` (or the environment variable
    ``HAP_CHECK_COLLECTIVES=1``) compares call, layout, shape and dtype across ranks before every collective and raises
    ProgramError naming the rank that differs, where a mismatch would otherwise hang or corrupt. ``pace``, if set, is
    told of every use of the wire.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        *,
        check: bool | None = None,
    ) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.device = torch.device(device)
        self.check = os.environ.get(CHECK_VARIABLE) == "1" if check is None else check
        self.pace: Pace | None = None
        self._routes: dict[tuple[Layout, Layout], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    @contextmanager
    def wire(self) -> Iterator[None]:
        """Around what is sent and received; packing, joining and summing are compute."""
        if self.pace is None:
            yield
            return
        self.pace.settle()
        yield
        self.pace.resume()

    def all_gather(
        self, piece: torch.Tensor, *, dim: int, outer: int, unit: int, sizes: Sizes, decomposition: str = "all_to_all"
    ) -> torch.Tensor:
        """This rank's piece -> the whole value on every rank."""
        layout = Layout(dim, outer, unit, sizes)
        self._verify("all_gather", decomposition, piece, (layout,), held=layout)
        if self.group is None:
            return piece.contiguous()
        shapes = [layout.local_shape(piece.shape, r) for r in range(self.world_size)]
        with self.wire():
            if decomposition == "all_to_all":
                pieces = exchange([piece] * self.world_size, shapes, self.group)
            elif decomposition == "padded":
                pieces = gather_padded(piece, shapes, self.group)
            else:
                pieces = gather_by_broadcast(piece, shapes, self.group)
        return join_shards(pieces, layout.shard, sizes).contiguous()

    def all_reduce(self, partial: torch.Tensor, *, decomposition: str = "ring") -> torch.Tensor:
        """Partial sums -> their sum on every rank. The argument is left as it was."""
        self._verify("all_reduce", decomposition, partial, ())
        if self.group is None:
            return partial.contiguous()
        total = partial.clone(memory_format=torch.contiguous_format)
        if total.numel():
            with self.wire():
                dist.all_reduce(total, group=self.group)
        return total

    def reduce_scatter(
        self,
        partial: torch.Tensor,
        *,
        dim: int,
        outer: int,
        unit: int,
        sizes: Sizes,
        decomposition: str = "all_to_all_sum",
    ) -> torch.Tensor:
        """Partial sums of the whole -> this rank's piece of their sum."""
        layout = Layout(dim, outer, unit, sizes)
        self._verify("reduce_scatter", decomposition, partial, (layout,))
        if self.group is None:
            return partial.contiguous()
        pieces = [layout.take(partial, r) for r in range(self.world_size)]
        mine = tuple(pieces[self.rank].shape)
        if decomposition == "padded":
            return self._reduce_scatter_padded(pieces)
        with self.wire():
            received = exchange(pieces, [mine] * self.world_size, self.group)
        total = received[0].clone()
        for piece in received[1:]:
            total += piece
        return total

    def all_to_all(
        self, piece: torch.Tensor, *, source: Layout, target: Layout, decomposition: str = "direct"
    ) -> torch.Tensor:
        """This rank's piece under ``source`` -> its piece under ``target``; the two may share the dim or not."""
        self._verify("all_to_all", decomposition, piece, (source, target), held=source)
        if self.group is None:
            return piece.contiguous()
        if source.dim == target.dim:
            return self._regroup(piece, source, target)
        mine = target.local_shape(piece.shape, self.rank)
        shapes = [source.local_shape(mine, r) for r in range(self.world_size)]
        leaving = [target.take(piece, s) for s in range(self.world_size)]
        with self.wire():
            pieces = exchange(leaving, shapes, self.group)
        return join_shards(pieces, source.shard, source.sizes).contiguous()

    def slice(
        self, whole: torch.Tensor, *, dim: int, outer: int, unit: int, sizes: Sizes, decomposition: str = "local"
    ) -> torch.Tensor:
        """The whole value -> this rank's piece. Local, but checked like the rest."""
        layout = Layout(dim, outer, unit, sizes)
        self._verify("slice", decomposition, whole, (layout,))
        return layout.take(whole, self.rank)

    def agree(self, what: str, mine: Any) -> None:
        """Raise ProgramError on every rank, naming the first rank whose ``mine`` differs from rank 0's. Collective."""
        found = self.gather_objects(mine)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise ProgramError(f"{what}: rank {rank} has {other}, rank 0 has {found[0]}")

    def gather_objects(self, mine: T) -> list[T]:
        """Every rank's picklable object, in rank order. Collective."""
        if self.group is None:
            return [mine]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def broadcast(self, whole: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor on every rank; the others pass one of the same shape, which is overwritten. Any dtype."""
        if self.group is None or whole.numel() == 0:
            return whole
        whole = whole.contiguous()
        dist.broadcast(as_bytes(whole), group_src=0, group=self.group)
        return whole

    def from_rank_zero(self, mine: T) -> T:
        """Rank 0's picklable object on every rank."""
        found = [mine]
        if self.group is not None:
            dist.broadcast_object_list(found, group_src=0, group=self.group, device=self.device)
        return found[0]

    def _reduce_scatter_padded(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        mine, longest = pieces[self.rank], max(p.numel() for p in pieces)
        if longest == 0:
            return mine
        rows = torch.zeros(self.world_size, longest, dtype=mine.dtype, device=mine.device)
        for row, piece in zip(rows, pieces, strict=True):
            row[: piece.numel()] = piece.reshape(-1)
        total = torch.empty(longest, dtype=mine.dtype, device=mine.device)
        with self.wire():
            reduce_scatter_single(total, rows.reshape(-1), group=self.group)
        return total[: mine.numel()].reshape(mine.shape).clone()

    def _regroup(self, piece: torch.Tensor, source: Layout, target: Layout) -> torch.Tensor:
        """``all_to_all`` within one dim: each element goes from its owner before to its owner after."""
        assert self.group is not None
        leaving, arriving = self._route(source, target, piece.device)
        shapes = [tuple(len(a) if d == source.dim else s for d, s in enumerate(piece.shape)) for a in arriving]
        outgoing = [piece.index_select(source.dim, where) for where in leaving]
        with self.wire():
            pieces = exchange(outgoing, shapes, self.group)
        result = piece.new_empty(target.local_shape(piece.shape, self.rank))
        for where, arrived in zip(arriving, pieces, strict=True):
            result.index_copy_(source.dim, where, arrived)
        return result

    def _route(
        self, source: Layout, target: Layout, device: torch.device
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Positions in my source piece that leave for each rank, and in my target piece that arrive from each rank."""
        if (source, target) not in self._routes:
            mine_before = _indices(source, self.rank)
            mine_after = _indices(target, self.rank)
            owner_before, owner_after = _owners(source, self.world_size), _owners(target, self.world_size)
            leaving = [(owner_after[mine_before] == s).nonzero()[:, 0].to(device) for s in range(self.world_size)]
            arriving = [(owner_before[mine_after] == r).nonzero()[:, 0].to(device) for r in range(self.world_size)]
            self._routes[source, target] = (leaving, arriving)
        return self._routes[source, target]

    def _verify(
        self,
        kind: Collective,
        decomposition: str,
        value: torch.Tensor,
        layouts: tuple[Layout, ...],
        held: Layout | None = None,
    ) -> None:
        """Refuse an unknown decomposition or a piece of the wrong extent; in check mode compare across ranks too."""
        if decomposition not in DECOMPOSITIONS[kind]:
            known = ", ".join(DECOMPOSITIONS[kind])
            raise ProgramError(f"{kind}: unknown decomposition {decomposition!r} (known: {known})")
        for layout in layouts:
            if len(layout.sizes) != self.world_size:
                raise ProgramError(f"{kind}: {len(layout.sizes)} sizes for {self.world_size} ranks")
            expected = layout.local_shape(value.shape, self.rank) if layout is held else layout.whole_shape(value.shape)
            same_dim = held is not None and layout is not held and layout.dim == held.dim
            if not same_dim and tuple(value.shape) != expected:
                raise ProgramError(f"{kind}: rank {self.rank} holds {tuple(value.shape)}, the layout says {expected}")
        if self.check:
            whole = tuple(value.shape) if held is None else held.whole_shape(value.shape)
            self.agree(kind, (kind, decomposition, layouts, whole, str(value.dtype)))


def _indices(layout: Layout, rank: int) -> torch.Tensor:
    """The global indices along the dim that rank holds, ascending."""
    return Layout(0, layout.outer, layout.unit, layout.sizes).take(torch.arange(layout.shard.extent), rank)


def _owners(layout: Layout, world_size: int) -> torch.Tensor:
    """For every global index along the dim, the rank that holds it."""
    owners = torch.empty(layout.shard.extent, dtype=torch.int64)
    for rank in range(world_size):
        owners[_indices(layout, rank)] = rank
    return owners
