"""Sums over hosts of tensors that every host holds in its own way: whose each element is, and the exchange.

Host h holds its own contribution to a tensor T, whole on each of its ranks or dealt out to them by a layout. The sum
is made in two rounds, each one ``all_to_all_single`` of all ranks. T is cut along its longest dim into a slab for each
host, as even as can be. In the slab of h,

    owned(r) = slab(h) & held(r)             if h shards T: the rank that holds an element owns it,
    owned(r) = part r of slab(h), cut again  if h holds T whole,

so that every element has one owner. With spoken(q, h) = slab(h) & held(q), or the q-th part of the slab where q's host
holds T whole and any of its ranks might speak for it,

    round 1: rank q sends spoken(q, h) & owned(r) of what it holds to rank r of h, which adds, host after host,
    round 2: rank r sends owned(r) & held(q) of the sum to every rank q.

An element is added once, by its owner, in the order of the hosts: the result is the same everywhere and in every run.
Of n elements a host sends n - n/H, then n/H to each rank of another host that holds them. What a rank owes to itself is
not sent.

Index sets are products of sets of each dim. Counted within what a rank holds or owns, one of these is a range in every
dim but one at most (the other side's, if its ``outer`` > 1): so it is a view, or one ``index_select`` of a view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import torch
import torch.distributed as dist

from hap.codegen.layout import Layout
from hap.errors import ProgramError
from hap.runtime.exchange import as_bytes

Runs = tuple[range, ...]  # a set of indices of one dim: ascending, disjoint, none of them empty
Region = tuple[Runs, ...]  # the product of one set for each dim


class Splits(NamedTuple):
    """One rank's end of a round: elements to and from each rank of the world, none to itself."""

    outgoing: tuple[int, ...]
    incoming: tuple[int, ...]


Move = Callable[[torch.Tensor, Splits], torch.Tensor]  # flat tensor to send -> flat tensor received


@dataclass(frozen=True)
class Site:
    """A tensor of whole ``shape`` that is summed over hosts: host h has ``layouts[h]`` over its ranks, None if whole
    on each of them."""

    shape: tuple[int, ...]
    layouts: tuple[Layout | None, ...]

    def verify(self, hosts: Sequence[int]) -> None:
        """Raise ProgramError unless every layout fits the shape and its host's number of ranks."""
        if len(self.layouts) != len(hosts):
            raise ProgramError(f"a sum over hosts: {len(self.layouts)} layouts for {len(hosts)} hosts")
        for host, (layout, ranks) in enumerate(zip(self.layouts, hosts, strict=True)):
            if layout is None:
                continue
            if len(layout.sizes) != ranks:
                raise ProgramError(f"a sum over hosts: host {host} has {ranks} ranks, its layout {len(layout.sizes)}")
            if not 0 <= layout.dim < len(self.shape) or layout.whole_shape(self.shape) != self.shape:
                raise ProgramError(f"a sum over hosts: host {host}'s {layout} does not fit the shape {self.shape}")

    def local_shape(self, host: int, rank: int) -> tuple[int, ...]:
        """The shape of what the host's rank holds."""
        layout = self.layouts[host]
        return self.shape if layout is None else layout.local_shape(self.shape, rank)

    def verify_piece(self, piece: torch.Tensor, host: int, rank: int) -> None:
        """Raise ProgramError unless ``piece`` has the shape of what the host's rank holds."""
        expected = self.local_shape(host, rank)
        if tuple(piece.shape) != expected:
            held = tuple(piece.shape)
            raise ProgramError(f"a sum over hosts: rank {rank} of host {host} holds {held}, the layout says {expected}")


class Window:
    """Where a region lies within a frame that contains it, such as what a rank holds: to be read from, written to and
    added to a tensor of the frame's shape. Message and frame have the elements in one order."""

    def __init__(self, region: Region, frame: Region, device: torch.device | str = "cpu") -> None:
        self.shape = tuple(sum(map(len, runs)) for runs in region)
        self.numel = math.prod(self.shape)
        self._scattered: tuple[int, torch.Tensor] | None = None  # the dim of which a box would hold too much
        box: list[slice] = []
        for dim, (inner, outer) in enumerate(zip(region, frame, strict=True)):
            found = positions(inner, outer) if self.numel else ()
            if len(found) <= 1:
                box.append(slice(found[0].start, found[0].stop) if found else slice(0, 0))
                continue
            assert self._scattered is None, f"{region} in {frame} is scattered in two dims"
            box.append(slice(None))
            self._scattered = dim, torch.cat([torch.arange(run.start, run.stop) for run in found]).to(device)
        self._box = tuple(box)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The region itself, in place."""
        assert self._scattered is None
        return tensor[self._box]

    def read(self, tensor: torch.Tensor, message: torch.Tensor) -> None:
        if self._scattered is None:
            message.view(self.shape).copy_(tensor[self._box])
        elif message.dtype == tensor.dtype:
            torch.index_select(tensor[self._box], *self._scattered, out=message.view(self.shape))
        else:
            message.view(self.shape).copy_(torch.index_select(tensor[self._box], *self._scattered))

    def write(self, tensor: torch.Tensor, message: torch.Tensor) -> None:
        if self._scattered is None:
            tensor[self._box].copy_(message.view(self.shape))
        else:
            tensor[self._box].index_copy_(*self._scattered, message.view(self.shape).to(tensor.dtype))

    def add(self, tensor: torch.Tensor, message: torch.Tensor) -> None:
        if self._scattered is None:
            tensor[self._box].add_(message.view(self.shape))
        else:
            tensor[self._box].index_add_(*self._scattered, message.view(self.shape).to(tensor.dtype))


class Ground:
    """Whose each element of one site is. Ranks are the world's."""

    def __init__(self, site: Site, hosts: Sequence[int]) -> None:
        self._hosts, self._layouts = hosts, site.layouts
        self._places = [(host, rank) for host, ranks in enumerate(hosts) for rank in range(ranks)]
        shape = site.shape or (1,)
        self._whole: Region = tuple(_runs(range(extent)) for extent in shape)
        self._longest = max(range(len(shape)), key=lambda dim: shape[dim])
        self._slabs = cut(range(shape[self._longest]), len(hosts))
        self.held = [self._held(*place) for place in self._places]
        self.owned = [self._spoken(rank, host) for rank, (host, _) in enumerate(self._places)]

    def given(self, source: int, owner: int) -> Region:
        """What rank ``source`` contributes to the sums of rank ``owner``."""
        return meet(self._spoken(source, self._places[owner][0]), self.owned[owner])

    def returned(self, owner: int, target: int) -> Region:
        """The sums of rank ``owner`` that rank ``target`` holds."""
        return meet(self.owned[owner], self.held[target])

    def _spoken(self, world_rank: int, slab: int) -> Region:
        host, rank = self._places[world_rank]
        if self._layouts[host] is None:
            return self._along(self._longest, _runs(cut(self._slabs[slab], self._hosts[host])[rank]))
        return meet(self.held[world_rank], self._along(self._longest, _runs(self._slabs[slab])))

    def _held(self, host: int, rank: int) -> Region:
        layout = self._layouts[host]
        if layout is None:
            return self._whole
        n, start, size = (
            layout.unit * atoms for atoms in (sum(layout.sizes), sum(layout.sizes[:rank]), layout.sizes[rank])
        )
        if size == n:
            return self._whole
        blocks = (range(o * n + start, o * n + start + size) for o in range(layout.outer))
        return self._along(layout.dim, tuple(block for block in blocks if block))

    def _along(self, dim: int, runs: Runs) -> Region:
        return tuple(runs if d == dim else whole for d, whole in enumerate(self._whole))


class _Part(NamedTuple):
    """A window of one of a bundle's tensors, and where its elements are in the flat tensor that is sent."""

    tensor: int
    start: int
    window: Window

    def message(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self.window.numel]


_Rows = list[list[_Part]]  # by the rank at the other end


class Exchange:
    """One rank's end of the sums of a bundle of sites, all in the same two rounds.

    ``hosts`` are the numbers of ranks of the hosts, ``rank`` is the world's, sites fit their hosts (``Site.verify``).
    ``splits`` are those of the two rounds. The three steps between which messages travel may be called one by one.
    """

    def __init__(
        self, sites: Sequence[Site], hosts: Sequence[int], rank: int, device: torch.device | str = "cpu"
    ) -> None:
        self.sites, self.hosts, self.rank = tuple(sites), tuple(hosts), rank
        self._starts = tuple(accumulate(hosts, initial=0))
        self.host = sum(start <= rank for start in self._starts[1:])
        if len(hosts) == 1:
            return
        grounds = [Ground(site, hosts) for site in sites]
        held, owned = [g.held[rank] for g in grounds], [g.owned[rank] for g in grounds]
        self._mine = [Window(inner, outer, device) for inner, outer in zip(owned, held, strict=True)]

        def lay(region: Callable[[Ground, int], Region], frames: Sequence[Region]) -> _Rows:
            rows: _Rows = [[] for _ in range(self._starts[-1])]
            start = 0
            for other, (tensor, ground) in product(range(len(rows)), enumerate(grounds)):
                if other == rank:
                    continue
                window = Window(region(ground, other), frames[tensor], device)
                if window.numel:
                    rows[other].append(_Part(tensor, start, window))
                    start += window.numel
            return rows

        self._giving = lay(lambda ground, owner: ground.given(rank, owner), held)
        self._adding = lay(lambda ground, source: ground.given(source, rank), owned)
        self._returning = lay(lambda ground, target: ground.returned(rank, target), owned)
        self._taking = lay(lambda ground, owner: ground.returned(owner, rank), held)
        self.splits = (
            Splits(_lengths(self._giving), _lengths(self._adding)),
            Splits(_lengths(self._returning), _lengths(self._taking)),
        )

    def sum(self, pieces: Sequence[torch.Tensor], move: Move, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """What this rank holds of each site -> the same of its sum over hosts, new and contiguous, cast to ``dtype`` if
        that is given. Collective; ``move`` makes one round. ProgramError for a piece of another shape, or for several
        dtypes."""
        for site, piece in zip(self.sites, pieces, strict=True):
            site.verify_piece(piece, self.host, self.rank - self._starts[self.host])
        if len({piece.dtype for piece in pieces}) > 1:
            raise ProgramError("a sum over hosts: several dtypes cannot go together")
        results = [torch.empty_like(piece, dtype=dtype, memory_format=torch.contiguous_format) for piece in pieces]
        self.sum_into(results, pieces, move)
        return results

    @torch.no_grad()  # by thread, and a lane's has not the program's
    def sum_into(self, results: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], move: Move) -> None:
        """``sum`` in memory that is there, of whatever dtype, of pieces that are known to fit. What travels has the
        pieces' dtype; sums are made in the results', and rounded to the pieces' if that is narrower, once."""
        if len(self.hosts) == 1:
            for result, piece in zip(results, pieces, strict=True):
                result.copy_(piece)
            return
        first, second = self.splits
        received = move(self.pack(pieces), first)
        received = move(self.add(results, pieces, received), second)
        self.unpack(results, received)

    def pack(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """What is sent in round 1: contributions to the sums of others."""
        return _packed(self._giving, [_with_dims(piece) for piece in pieces], pieces[0])

    def add(
        self, results: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], received: torch.Tensor
    ) -> torch.Tensor:
        """Make this rank's sums, in their places in ``results``; what is sent of them in round 2, and alike here."""
        totals = [mine.view(_with_dims(result)) for mine, result in zip(self._mine, results, strict=True)]
        for source, row in enumerate(self._adding):
            begins = source < self._starts[1]  # the parts of host 0's ranks are together the whole of each total
            if source == self.rank:
                for total, mine, piece in zip(totals, self._mine, pieces, strict=True):
                    own = mine.view(_with_dims(piece))
                    total.copy_(own) if begins else total.add_(own)
            for part in row:
                put = part.window.write if begins else part.window.add
                put(totals[part.tensor], part.message(received))
        for total, piece in zip(totals, pieces, strict=True):
            if total.dtype != piece.dtype:
                total.copy_(total.to(piece.dtype))
        return _packed(self._returning, totals, pieces[0])

    def unpack(self, results: Sequence[torch.Tensor], received: torch.Tensor) -> None:
        """Put the sums of others in their places."""
        for row in self._taking:
            for part in row:
                part.window.write(_with_dims(results[part.tensor]), part.message(received))


def all_to_all(sent: torch.Tensor, splits: Splits, group: dist.ProcessGroup) -> torch.Tensor:
    """One round on the wire."""
    received = sent.new_empty(sum(splits.incoming))
    incoming, outgoing = ([n * sent.itemsize for n in lengths] for lengths in (splits.incoming, splits.outgoing))
    dist.all_to_all_single(as_bytes(received), as_bytes(sent), incoming, outgoing, group=group)
    return received


def cut(whole: range, parts: int) -> list[range]:
    """Contiguous parts, as even as can be; a single index is the first part's."""
    ends = [whole.start - (-len(whole) * part // parts) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]


def meet(one: Region, other: Region) -> Region:
    """The elements in both regions."""
    return tuple(a if a == b else _meet_runs(a, b) for a, b in zip(one, other, strict=True))


def _meet_runs(one: Runs, other: Runs) -> Runs:
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        a, b = one[i], other[j]
        start, stop = max(a.start, b.start), min(a.stop, b.stop)
        if start < stop:
            found.append(range(start, stop))
        i, j = (i + 1, j) if a.stop <= b.stop else (i, j + 1)
    return tuple(found)


def positions(inner: Runs, outer: Runs) -> Runs:
    """Where the indices of ``inner`` stand among those of ``outer``; each run of ``inner`` lies in one of ``outer``."""
    found: list[range] = []
    before = i = 0
    for run in inner:
        while outer[i].stop <= run.start:
            before += len(outer[i])
            i += 1
        start = before + run.start - outer[i].start
        if found and found[-1].stop == start:
            found[-1] = range(found[-1].start, start + len(run))
        else:
            found.append(range(start, start + len(run)))
    return tuple(found)


def _runs(indices: range) -> Runs:
    return (indices,) if indices else ()


def _lengths(rows: _Rows) -> tuple[int, ...]:
    return tuple(sum(part.window.numel for part in row) for row in rows)


def _packed(rows: _Rows, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    flat = like.new_empty(sum(_lengths(rows)))
    for row in rows:
        for part in row:
            part.window.read(tensors[part.tensor], part.message(flat))
    return flat


def _with_dims(tensor: torch.Tensor) -> torch.Tensor:
    """A view, of one dim where it has none."""
    return tensor.reshape(1) if tensor.dim() == 0 else tensor
