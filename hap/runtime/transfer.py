"""A collective on one or several values at once, in three steps: pack (compute), move (wire), unpack (compute).

Packing lays what every rank needs of this rank's values one after another in one flat tensor, so that a *bundle* of
values takes as many messages as one value does. Partial sums are not held any longer then. ``move`` touches nothing but
that tensor and the process group, so it may run beside the program; what it sends is kept until ``unpack``, as on a GPU
another stream may be reading it when ``move`` returns, and its memory would go back to the program's. The values of a
bundle have one device, and one dtype where sums are made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
import torch.distributed as dist

from hap.codegen.layout import Layout
from hap.placement import Sizes
from hap.routes import ROUTED, Way
from hap.runtime import dealing, exchange
from hap.runtime.p2p import perform, swap
from hap.runtime.schedule import Message, gather_messages, reduce_messages, scatter_messages

Layouts = tuple[Layout, ...]  # of one value: none for all_reduce, (source, target) for all_to_all, else one


@dataclass(frozen=True)
class Here:
    """This rank's place in its process group. No named tuple: torch 2.11's ``torch.compile`` loses those it made."""

    group: dist.ProcessGroup
    rank: int
    world_size: int


class Transfer(Protocol):
    """One collective call. Called once each, in this order; ``begin`` or ``move``."""

    here: Here
    begins: bool  # whether one call of the backend's moves all; the same on every rank

    def pack(self) -> None: ...

    def begin(self) -> dist.Work:
        """Start moving, by the one call; done when what is returned has been waited for."""
        ...

    def move(self) -> None: ...

    def unpack(self) -> list[torch.Tensor]: ...


class _InSteps:
    """A transfer of several calls, each of which needs what the one before it brought."""

    begins = False

    def begin(self) -> dist.Work:
        raise AssertionError("no single call moves this")


class Gather(_InSteps):
    """``all_gather``: pieces -> whole values. Bytes, so any mixture of dtypes; where there is one, values are laid out
    and taken apart in it, with a few calls for each instead of several for each piece."""

    sent: torch.Tensor | None = None  # kept until unpack

    def __init__(self, here: Here, values: Sequence[torch.Tensor], layouts: Sequence[Layouts], how: str) -> None:
        self.here, self.how, self.values = here, how, values
        dtypes = {value.dtype for value in values}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else None
        self.layouts = [found for (found,) in layouts]
        self.nbytes = [
            [n * value.itemsize for n in _lengths(layout, tuple(value.shape))]
            for value, layout in zip(values, self.layouts, strict=True)
        ]
        self.lengths = [sum(column) for column in zip(*self.nbytes, strict=True)]

    def pack(self) -> None:
        if self.dtype is not None and len(self.values) > 1:
            mine = exchange.as_bytes(torch.cat([value.reshape(-1) for value in self.values]))
        else:
            parts = [exchange.as_bytes(value) for value in self.values]
            mine = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.how == "padded":
            self.flat = mine
            return
        start = sum(self.lengths[: self.here.rank])
        self.flat = mine.new_empty(sum(self.lengths))
        self.flat[start : start + mine.numel()] = mine

    def move(self) -> None:
        here, lengths = self.here, self.lengths
        if self.how == "all_to_all":
            exchange.gather_by_exchange(self.flat, lengths, here.group)
        elif self.how == "broadcast":
            exchange.gather_by_broadcast(self.flat, lengths, here.group)
        elif self.how == "padded":
            self.sent = self.flat
            self.flat = exchange.gather_padded(self.sent, lengths, here.group)
        else:
            perform(_gather_schedule(self.how, tuple(lengths)), self.flat, here.group)

    def unpack(self) -> list[torch.Tensor]:
        self.sent = None
        if len(self.values) == 1:
            (value,), (layout,) = self.values, self.layouts
            flat = exchange.from_bytes(self.flat, value.dtype, (-1,))
            return [dealing.joined(flat, layout, value.shape)]
        if self.dtype is not None:
            parts = _by_value(self.flat.view(self.dtype), self.nbytes)
            return [
                dealing.joined_of(own, layout, value.shape)
                for own, value, layout in zip(parts, self.values, self.layouts, strict=True)
            ]
        return [  # pieces alone might begin where their dtype cannot
            dealing.joined(torch.cat(own).view(value.dtype), layout, value.shape)
            for own, value, layout in zip(_by_value(self.flat, self.nbytes), self.values, self.layouts, strict=True)
        ]


class Reduce:
    """``all_reduce``: partial sums -> sums, everywhere."""

    def __init__(self, here: Here, values: Sequence[torch.Tensor], how: str) -> None:
        self.here, self.how, self.values = here, how, values
        self.shapes = [value.shape for value in values]
        self.begins = how == "ring" and any(value.numel() for value in values)

    def pack(self) -> None:
        if len(self.values) == 1:
            self.flat = self.values[0].clone(memory_format=torch.contiguous_format).view(-1)
        else:
            self.flat = torch.cat([value.reshape(-1) for value in self.values])
        self.values = ()

    def begin(self) -> dist.Work:
        return _begun(dist.all_reduce(self.flat, group=self.here.group, async_op=True))

    def move(self) -> None:
        if not self.flat.numel():
            return
        if self.how == "ring":
            dist.all_reduce(self.flat, group=self.here.group)
            return
        schedule = _reduce_schedule(self.how, self.flat.numel(), self.here.world_size, self.flat.itemsize)
        perform(schedule, self.flat, self.here.group)

    def unpack(self) -> list[torch.Tensor]:
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Scatter(_InSteps):
    """``reduce_scatter``: partial sums of whole values -> this rank's pieces of the sums."""

    def __init__(self, here: Here, values: Sequence[torch.Tensor], layouts: Sequence[Layouts], how: str) -> None:
        self.here, self.how, self.values = here, how, values
        self.layouts = [found for (found,) in layouts]
        self.shapes = [
            layout.local_shape(value.shape, here.rank) for value, layout in zip(values, self.layouts, strict=True)
        ]

    def pack(self) -> None:
        each = [_lengths(layout, tuple(value.shape)) for value, layout in zip(self.values, self.layouts, strict=True)]
        self.lengths = [sum(column) for column in zip(*each, strict=True)]
        new = len(self.values) == 1  # several are copied once more
        dealt = [dealing.dealt(value, layout, new=new) for value, layout in zip(self.values, self.layouts, strict=True)]
        self.flat = dealt[0] if len(dealt) == 1 else _by_rank(dealt, each)
        self.values = ()

    def move(self) -> None:
        here, lengths = self.here, self.lengths
        start = sum(lengths[: here.rank])
        if self.how == "padded":
            self.mine = exchange.scatter_padded(self.flat, lengths, here.group)
        elif self.how == "all_to_all_sum":
            self.mine = exchange.scatter_by_exchange(self.flat, lengths, here.group)
        else:
            perform(_scatter_schedule(self.how, tuple(lengths), self.flat.itemsize), self.flat, here.group)
            self.mine = self.flat[start : start + lengths[here.rank]].clone()
        if not _may_be_read_later(self.flat):
            self.flat = self.mine

    def unpack(self) -> list[torch.Tensor]:
        parts = self.mine.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@dataclass(frozen=True)
class Indices:
    """Within one dim: positions in my piece that leave for each rank, and in my new piece that arrive from each."""

    leaving: Sequence[torch.Tensor]
    arriving: Sequence[torch.Tensor]


Routes = Mapping[tuple[Layout, Layout], Indices]


class Swap:
    """``all_to_all``: pieces under one layout -> pieces under another. Bytes, so any mixture of dtypes."""

    sent: torch.Tensor | None = None  # kept until unpack

    def __init__(
        self, here: Here, values: Sequence[torch.Tensor], layouts: Sequence[Layouts], how: str, routes: Routes
    ) -> None:
        self.here, self.how, self.values, self.layouts, self.routes = here, how, values, layouts, routes
        self.begins = how == "direct"
        self.shapes = [  # of values whose dim changes, with all that comes, as it is dealt by the source
            target.local_shape(value.shape, here.rank) for value, (_, target) in zip(values, layouts, strict=True)
        ]
        self.nbytes = [self._arriving(i) for i in range(len(values))]
        self.incoming = [sum(column) for column in zip(*self.nbytes, strict=True)]

    def _arriving(self, i: int) -> list[int]:
        """Bytes from each rank."""
        value, (source, target) = self.values[i], self.layouts[i]
        if source.dim != target.dim:
            return [n * value.itemsize for n in _lengths(source, self.shapes[i])]
        return _nbytes(value, source.dim, self.routes[source, target].arriving)

    def _leaving(self, value: torch.Tensor, source: Layout, target: Layout) -> tuple[torch.Tensor, list[int]]:
        """Flat, for one rank after the other, in bytes; and how many for each."""
        if source.dim != target.dim:
            nbytes = [n * value.itemsize for n in _lengths(target, tuple(value.shape))]
            return exchange.as_bytes(dealing.dealt(value, target, new=len(self.values) == 1)), nbytes
        leaving = self.routes[source, target].leaving
        parts = [exchange.as_bytes(value.index_select(source.dim, where)) for where in leaving]
        return torch.cat(parts), [part.numel() for part in parts]

    def pack(self) -> None:
        left = [self._leaving(value, *pair) for value, pair in zip(self.values, self.layouts, strict=True)]
        self.outgoing = [sum(column) for column in zip(*(nbytes for _, nbytes in left), strict=True)]
        if len(left) == 1:
            self.flat = left[0][0]
        else:
            self.flat = _by_rank([flat for flat, _ in left], [nbytes for _, nbytes in left])

    def begin(self) -> dist.Work:
        self.sent, self.flat = self.flat, self.flat.new_empty(sum(self.incoming))
        group, lengths = self.here.group, (self.incoming, self.outgoing)
        return _begun(dist.all_to_all_single(self.flat, self.sent, *lengths, group=group, async_op=True))

    def move(self) -> None:
        self.sent = self.flat
        if self.how == "pairs":
            self.flat = swap(self.sent, self.outgoing, self.incoming, self.here.group)
        else:
            self.flat = self.sent.new_empty(sum(self.incoming))
            dist.all_to_all_single(self.flat, self.sent, self.incoming, self.outgoing, group=self.here.group)

    def unpack(self) -> list[torch.Tensor]:
        self.sent = None
        if len(self.values) == 1:
            arrived = [self.flat]
        else:
            arrived = [torch.cat(own) for own in _by_value(self.flat, self.nbytes)]
        results = []
        for i, (value, (source, target), raw) in enumerate(zip(self.values, self.layouts, arrived, strict=True)):
            flat = exchange.from_bytes(raw, value.dtype, (-1,))
            if source.dim != target.dim:
                results.append(dealing.joined(flat, source, self.shapes[i]))
                continue
            arriving = self.routes[source, target].arriving
            results.append(self._placed(flat, value, self.shapes[i], source.dim, arriving))
        return results

    @staticmethod
    def _placed(
        flat: torch.Tensor, value: torch.Tensor, shape: Sequence[int], dim: int, arriving: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        result = value.new_empty(shape)
        pieces = flat.split([n // value.itemsize for n in _nbytes(value, dim, arriving)])
        for where, piece in zip(arriving, pieces, strict=True):
            result.index_copy_(dim, where, piece.view([len(where) if d == dim else s for d, s in enumerate(shape)]))
        return result


def transfer(
    kind: str, here: Here, values: Sequence[torch.Tensor], layouts: Sequence[Layouts], how: str, routes: Routes
) -> Transfer:
    """The transfer of a collective of that kind; ``slice`` is none."""
    match kind:
        case "all_gather":
            return Gather(here, values, layouts, how)
        case "all_reduce":
            return Reduce(here, values, how)
        case "reduce_scatter":
            return Scatter(here, values, layouts, how)
        case "all_to_all":
            return Swap(here, values, layouts, how, routes)
    raise AssertionError(f"{kind} needs no wire")


def _may_be_read_later(sent: torch.Tensor) -> bool:
    """After ``move`` has returned: by a stream. On CPUs all is done then."""
    return sent.device.type != "cpu"


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not of the group"
    return work


def find_indices(source: Layout, target: Layout, rank: int, world_size: int, device: torch.device) -> Indices:
    """Each element goes from its owner before to its owner after."""
    mine_before, mine_after = _held(source, rank), _held(target, rank)
    owner_before, owner_after = _owners(source, world_size), _owners(target, world_size)
    leaving = [(owner_after[mine_before] == s).nonzero()[:, 0].to(device) for s in range(world_size)]
    arriving = [(owner_before[mine_after] == r).nonzero()[:, 0].to(device) for r in range(world_size)]
    return Indices(leaving, arriving)


def _held(layout: Layout, rank: int) -> torch.Tensor:
    """The global indices along the dim that rank holds, ascending."""
    return Layout(0, layout.outer, layout.unit, layout.sizes).take(torch.arange(layout.shard.extent), rank)


def _owners(layout: Layout, world_size: int) -> torch.Tensor:
    """For every global index along the dim, the rank that holds it."""
    owners = torch.empty(layout.shard.extent, dtype=torch.int64)
    for rank in range(world_size):
        owners[_held(layout, rank)] = rank
    return owners


def _by_rank(flats: Sequence[torch.Tensor], lengths: Sequence[Sequence[int]]) -> torch.Tensor:
    """Of several values, each dealt to all ranks: what is one rank's together."""
    parts = [flat.split(list(each)) for flat, each in zip(flats, lengths, strict=True)]
    return torch.cat([part for row in zip(*parts, strict=True) for part in row])


def _by_value(flat: torch.Tensor, nbytes: Sequence[Sequence[int]]) -> list[tuple[torch.Tensor, ...]]:
    """Of all ranks' pieces of several values, what is one rank's together, of so many bytes: those of each value."""
    parts = flat.split([n // flat.itemsize for row in zip(*nbytes, strict=True) for n in row])
    return [parts[i :: len(nbytes)] for i in range(len(nbytes))]


def _nbytes(value: torch.Tensor, dim: int, places: Sequence[torch.Tensor]) -> list[int]:
    """Of the value's places along the dim that go to, or come from, each rank."""
    place = math.prod(s for d, s in enumerate(value.shape) if d != dim) * value.itemsize
    return [len(where) * place for where in places]


# The schedule of a collective is the same in every step: pure functions of a few numbers, remembered.
@lru_cache(maxsize=1024)
def _gather_schedule(how: str, lengths: Sizes) -> tuple[Message, ...]:
    return gather_messages(_way(how), lengths, 1)


@lru_cache(maxsize=1024)
def _scatter_schedule(how: str, lengths: Sizes, itemsize: int) -> tuple[Message, ...]:
    return scatter_messages(_way(how), lengths, itemsize)


@lru_cache(maxsize=1024)
def _reduce_schedule(how: str, length: int, world_size: int, itemsize: int) -> tuple[Message, ...]:
    return reduce_messages(_way(how), length, world_size, itemsize)


_lengths = lru_cache(maxsize=4096)(dealing.lengths)


def _way(how: str) -> Way:
    way = Way.parse(how)
    assert way.name in ROUTED, how
    return way
