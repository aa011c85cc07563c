"""A collective on one or several values at once, in three steps: pack (compute), move (wire), unpack (compute).

Packing lays what every rank needs of this rank's values one after another in one flat tensor, so that a *bundle* of
values takes as many messages as one value does. ``move`` touches nothing but that tensor and the process group, so it
may run beside the program; what it sends is kept until ``unpack`` where another stream may be reading it when ``move``
returns, as its memory would go back to the program's. The values of a bundle have one device, and one dtype where sums
are made. What follows from shapes and dtypes is found once: the steps of a training run make the same calls.
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


class Transfer(Protocol):
    """One rank's part in all collective calls of one kind on values of the same shapes and dtypes: nothing of any one
    call is in it, so several may be under way."""

    begins: bool  # whether one call of the backend's moves all; the same on every rank

    def pack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """What is sent: flat, and maybe a value's own memory."""
        ...

    def begin(self, sent: torch.Tensor, group: dist.ProcessGroup) -> tuple[dist.Work, torch.Tensor]:
        """Start moving, by the one call; what comes is there when the first of these has been waited for."""
        ...

    def move(self, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """What has come."""
        ...

    def unpack(self, came: torch.Tensor) -> list[torch.Tensor]: ...


class _InSteps:
    """A transfer of several calls, each of which needs what the one before it brought."""

    begins = False

    def begin(self, sent: torch.Tensor, group: dist.ProcessGroup) -> tuple[dist.Work, torch.Tensor]:
        raise AssertionError("no single call moves this")


class Gather(_InSteps):
    """``all_gather``: pieces -> whole values. Bytes, so any mixture of dtypes; where there is one, values are laid out
    and taken apart in it, with a few calls for each instead of several for each piece."""

    def __init__(self, rank: int, values: Sequence[torch.Tensor], layouts: Sequence[Layouts], how: str) -> None:
        self.how = how
        dtypes = {value.dtype for value in values}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else None
        self.forms = [
            (layout, tuple(value.shape), value.dtype) for value, (layout,) in zip(values, layouts, strict=True)
        ]
        nbytes = [[n * dtype.itemsize for n in dealing.lengths(layout, shape)] for layout, shape, dtype in self.forms]
        self.lengths = [sum(column) for column in zip(*nbytes, strict=True)]
        self.mine = _own(self.lengths, rank)
        unit = 1 if self.dtype is None else self.dtype.itemsize
        self.parts = [n // unit for row in zip(*nbytes, strict=True) for n in row]  # as they come

    def pack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(values) == 1:
            mine = exchange.as_bytes(values[0])
        elif self.dtype is not None:
            mine = exchange.as_bytes(torch.cat([value.reshape(-1) for value in values]))
        else:
            mine = torch.cat([exchange.as_bytes(value) for value in values])
        if self.how == "padded":
            return mine
        flat = mine.new_empty(sum(self.lengths))
        flat[self.mine] = mine
        return flat

    def move(self, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if self.how == "padded":
            return exchange.gather_padded(sent, self.lengths, group)
        if self.how == "all_to_all":
            exchange.gather_by_exchange(sent, self.lengths, group)
        elif self.how == "broadcast":
            exchange.gather_by_broadcast(sent, self.lengths, group)
        else:
            perform(_gather_schedule(self.how, tuple(self.lengths)), sent, group)
        return sent

    def unpack(self, came: torch.Tensor) -> list[torch.Tensor]:
        if len(self.forms) == 1:
            ((layout, shape, dtype),) = self.forms
            return [dealing.joined(came.view(dtype), layout, shape)]
        own = _by_value(came if self.dtype is None else came.view(self.dtype), self.parts, len(self.forms))
        if self.dtype is not None:
            return [dealing.joined_of(pieces, of[0], of[1]) for pieces, of in zip(own, self.forms, strict=True)]
        return [  # pieces alone might begin where their dtype cannot
            dealing.joined(torch.cat(pieces).view(dtype), layout, shape)
            for pieces, (layout, shape, dtype) in zip(own, self.forms, strict=True)
        ]


class Reduce:
    """``all_reduce``: partial sums -> sums, everywhere."""

    def __init__(self, world_size: int, values: Sequence[torch.Tensor], how: str) -> None:
        self.how, self.world_size = how, world_size
        self.shapes = [tuple(value.shape) for value in values]
        self.parts = [value.numel() for value in values]
        self.begins = how == "ring" and any(self.parts)

    def pack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(values) == 1:
            return values[0].clone(memory_format=torch.contiguous_format).view(-1)
        return torch.cat([value.reshape(-1) for value in values])

    def begin(self, sent: torch.Tensor, group: dist.ProcessGroup) -> tuple[dist.Work, torch.Tensor]:
        return _begun(dist.all_reduce(sent, group=group, async_op=True)), sent

    def move(self, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if self.begins:
            dist.all_reduce(sent, group=group)
        elif sent.numel():
            perform(_reduce_schedule(self.how, sent.numel(), self.world_size, sent.itemsize), sent, group)
        return sent

    def unpack(self, came: torch.Tensor) -> list[torch.Tensor]:
        return _shaped(came, self.parts, self.shapes)


class Scatter(_InSteps):
    """``reduce_scatter``: partial sums of whole values -> this rank's pieces of the sums."""

    def __init__(self, rank: int, values: Sequence[torch.Tensor], layouts: Sequence[Layouts], how: str) -> None:
        self.how = how
        self.layouts = [layout for (layout,) in layouts]
        of = list(zip(values, self.layouts, strict=True))
        self.shapes = [layout.local_shape(value.shape, rank) for value, layout in of]
        self.parts = [math.prod(shape) for shape in self.shapes]
        self.each = [list(dealing.lengths(layout, value.shape)) for value, layout in of]
        self.lengths = [sum(column) for column in zip(*self.each, strict=True)]
        self.mine = _own(self.lengths, rank)

    def pack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        new = len(values) == 1  # several are copied once more
        dealt = [dealing.dealt(value, layout, new=new) for value, layout in zip(values, self.layouts, strict=True)]
        return dealt[0] if len(dealt) == 1 else _by_rank(dealt, self.each)

    def move(self, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if self.how == "padded":
            return exchange.scatter_padded(sent, self.lengths, group)
        if self.how == "all_to_all_sum":
            return exchange.scatter_by_exchange(sent, self.lengths, group)
        perform(_scatter_schedule(self.how, tuple(self.lengths), sent.itemsize), sent, group)
        return sent[self.mine].clone()

    def unpack(self, came: torch.Tensor) -> list[torch.Tensor]:
        return _shaped(came, self.parts, self.shapes)


@dataclass(frozen=True)
class Indices:
    """Within one dim: positions in my piece that leave for each rank, and in my new piece that arrive from each."""

    leaving: Sequence[torch.Tensor]
    arriving: Sequence[torch.Tensor]


Routes = Mapping[tuple[Layout, Layout], Indices]


class _Swapped:
    """One value of a ``Swap``. ``indices`` if its dim stays; ``outgoing`` and ``incoming``: bytes, by rank."""

    def __init__(self, rank: int, value: torch.Tensor, layouts: Layouts, indices: Indices | None) -> None:
        (self.source, self.target), self.indices, self.dtype = layouts, indices, value.dtype
        self.shape = self.target.local_shape(value.shape, rank)  # if the dim changes, with all that comes
        if indices is None:
            leaving, arriving = dealing.lengths(self.target, value.shape), dealing.lengths(self.source, self.shape)
        else:
            place = math.prod(s for d, s in enumerate(value.shape) if d != self.source.dim)
            ends = (indices.leaving, indices.arriving)
            leaving, arriving = (tuple(len(where) * place for where in end) for end in ends)
        self.outgoing, self.incoming = ([n * value.itemsize for n in lengths] for lengths in (leaving, arriving))

    def leaving(self, value: torch.Tensor, *, new: bool) -> torch.Tensor:
        """Flat, for one rank after the other, in bytes."""
        if self.indices is None:
            return exchange.as_bytes(dealing.dealt(value, self.target, new=new))
        parts = [value.index_select(self.source.dim, where) for where in self.indices.leaving]
        return torch.cat([exchange.as_bytes(part) for part in parts])

    def arrived(self, raw: torch.Tensor) -> torch.Tensor:
        flat = raw.view(self.dtype)
        if self.indices is None:
            return dealing.joined(flat, self.source, self.shape)
        dim, result = self.source.dim, flat.new_empty(self.shape)
        pieces = flat.split_with_sizes([n // flat.itemsize for n in self.incoming])
        for where, piece in zip(self.indices.arriving, pieces, strict=True):
            local = [len(where) if d == dim else s for d, s in enumerate(self.shape)]
            result.index_copy_(dim, where, piece.view(local))
        return result


class Swap:
    """``all_to_all``: pieces under one layout -> pieces under another. Bytes, so any mixture of dtypes."""

    def __init__(
        self, rank: int, values: Sequence[torch.Tensor], layouts: Sequence[Layouts], how: str, routes: Routes
    ) -> None:
        self.how, self.begins = how, how == "direct"
        self.each = [
            _Swapped(rank, value, of, routes.get((of[0], of[1]))) for value, of in zip(values, layouts, strict=True)
        ]
        self.outgoing = [sum(column) for column in zip(*(one.outgoing for one in self.each), strict=True)]
        self.incoming = [sum(column) for column in zip(*(one.incoming for one in self.each), strict=True)]
        self.parts = [n for row in zip(*(one.incoming for one in self.each), strict=True) for n in row]  # as they come

    def pack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        left = [one.leaving(value, new=len(values) == 1) for one, value in zip(self.each, values, strict=True)]
        return left[0] if len(left) == 1 else _by_rank(left, [one.outgoing for one in self.each])

    def begin(self, sent: torch.Tensor, group: dist.ProcessGroup) -> tuple[dist.Work, torch.Tensor]:
        came = sent.new_empty(sum(self.incoming))
        lengths = (self.incoming, self.outgoing)
        return _begun(dist.all_to_all_single(came, sent, *lengths, group=group, async_op=True)), came

    def move(self, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if self.how == "pairs":
            return swap(sent, self.outgoing, self.incoming, group)
        came = sent.new_empty(sum(self.incoming))
        dist.all_to_all_single(came, sent, self.incoming, self.outgoing, group=group)
        return came

    def unpack(self, came: torch.Tensor) -> list[torch.Tensor]:
        if len(self.each) == 1:
            return [self.each[0].arrived(came)]
        own = _by_value(came, self.parts, len(self.each))
        return [one.arrived(torch.cat(pieces)) for one, pieces in zip(self.each, own, strict=True)]


def transfer(
    kind: str,
    rank: int,
    world_size: int,
    values: Sequence[torch.Tensor],
    layouts: Sequence[Layouts],
    how: str,
    routes: Routes,
) -> Transfer:
    """The transfer of a collective of that kind, for all values that are like these; ``slice`` is none."""
    match kind:
        case "all_gather":
            return Gather(rank, values, layouts, how)
        case "all_reduce":
            return Reduce(world_size, values, how)
        case "reduce_scatter":
            return Scatter(rank, values, layouts, how)
        case "all_to_all":
            return Swap(rank, values, layouts, how, routes)
    raise AssertionError(f"{kind} needs no wire")


def may_be_read_later(sent: torch.Tensor) -> bool:
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


def _own(lengths: Sequence[int], rank: int) -> slice:
    """Where that rank's part is, of all ranks' one after another."""
    return slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))


def _by_rank(flats: Sequence[torch.Tensor], lengths: Sequence[Sequence[int]]) -> torch.Tensor:
    """Of several values, each dealt to all ranks: what is one rank's together."""
    parts = [flat.split_with_sizes(each) for flat, each in zip(flats, lengths, strict=True)]
    return torch.cat([part for row in zip(*parts, strict=True) for part in row])


def _by_value(came: torch.Tensor, parts: Sequence[int], values: int) -> list[tuple[torch.Tensor, ...]]:
    """Of all ranks' pieces of several values, what is one rank's together: those of each value."""
    pieces = came.split_with_sizes(parts)
    return [pieces[i::values] for i in range(values)]


def _shaped(came: torch.Tensor, parts: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Of several values one after another: each in its shape."""
    if len(shapes) == 1:
        return [came.view(shapes[0])]
    return [torch.reshape(part, shape) for part, shape in zip(came.split_with_sizes(parts), shapes, strict=True)]


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


def _way(how: str) -> Way:
    way = Way.parse(how)
    assert way.name in ROUTED, how
    return way
