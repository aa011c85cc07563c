"""The collectives of a compiled program, for unequal and zero shares of any dim, on Gloo and NCCL.

A shard is described by a ``Layout(dim, outer, unit, sizes)``: the dim's index is ``(o, i, u)`` with ``o < outer``,
``i < sum(sizes)``, ``u < unit``, and rank r holds the ``sizes[r]`` values of i that follow those of the ranks before it
(see ``hap.placement``). Every result is contiguous: ``native_layer_norm_backward`` is silently wrong otherwise.

====================  =============================  ===========================================================
collective            from -> to                     decompositions (``hap.routes`` has those with lists of ranks)
====================  =============================  ===========================================================
``all_gather``        shard -> replicated            ``all_to_all padded broadcast`` ``pairs ring relay two_level``
``all_reduce``        partial -> replicated          ``ring`` (the backend's own) ``owners two_level``
``reduce_scatter``    partial -> shard               ``all_to_all_sum padded`` ``pairs ring relay two_level``
``all_to_all``        shard -> shard of another      ``direct`` (the backend's own) ``pairs``
                      dim, atom or group
``slice``             replicated -> shard            ``local`` (nothing on the wire)
====================  =============================  ===========================================================

Sums are made in the value's own dtype (``all_to_all_sum`` rounds one of 16 bits once), in an order that is the same in
every run. Several values may go together
(``together``), and a call may be left running while the program computes (``start``, ``wait``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from hap.codegen.layout import Layout
from hap.codegen.program import DECOMPOSITIONS, is_decomposition
from hap.errors import ProgramError
from hap.placement import Sizes
from hap.plan import Collective
from hap.runtime.exchange import as_bytes
from hap.runtime.lane import Lane, StreamLane, ThreadLane, Ticket
from hap.runtime.leaving import pause_at_exit
from hap.runtime.transfer import Indices, Layouts, Transfer, find_indices, may_be_read_later, transfer

if TYPE_CHECKING:
    from hap.run_record import Part, Scope
    from hap.runtime.record import Entry, Recorder

T = TypeVar("T")
LANES = 3  # of threads: while one bundle's last segments arrive, the next ones' first are on their way
GROUPS = 2  # of calls that the backend runs by itself, each with Gloo's two threads
CHECK_VARIABLE = "HAP_CHECK_COLLECTIVES"


class Pending:
    """A collective under way: what ``start`` gives and ``wait`` takes. ``sent`` is dropped once nobody reads it any
    more: ``wait`` is of gradients at the end of the backward pass."""

    def __init__(self, found: Transfer, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.transfer, self.group = found, group
        self.sent: torch.Tensor | None = sent
        self.came: torch.Tensor | None = None
        self.ticket: Ticket | None = None
        self.entry: Entry | None = None

    def begin(self) -> Ticket:
        assert self.sent is not None
        work, self.came = self.transfer.begin(self.sent, self.group)
        return work

    def move(self) -> None:
        assert self.sent is not None
        self.came = self.transfer.move(self.sent, self.group)
        if not may_be_read_later(self.sent):
            self.sent = None

    def unpack(self) -> list[torch.Tensor]:
        came, self.sent, self.came = self.came, None, None
        assert came is not None, "waited for twice"
        return self.transfer.unpack(came)


class Pace(Protocol):
    """Told where compute ends and begins again: see ``hap.runtime.emulate.Throttle``."""

    def settle(self) -> None: ...

    def resume(self) -> None: ...


@dataclass(eq=False)
class Observers:
    """Who is told of uses of the wire: the same for all of a rank's communicators that talk for one program, whenever
    they were made."""

    pace: Pace | None = None
    recorder: Recorder | None = None


class Communicator:
    """One rank's end of the collectives of one process group.

    ``group`` is None for a world of one, where no process group is needed. ``check=True`` (or the environment variable
    ``HAP_CHECK_COLLECTIVES=1``) compares call, layout, shape and dtype across ranks before every collective and raises
    ProgramError naming the rank that differs, where a mismatch would otherwise hang or corrupt. Of ``observers`` the
    pace is told of every use of the wire; the recorder, too, and of which collective it is. ``scope``: whose
    collectives these are, of all ranks of the job or of one host of a mesh of two axes.
    """

    scope: Scope = "world"

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
        self.observers = Observers()
        self._routes: dict[tuple[Layout, Layout], Indices] = {}
        self._lanes: list[tuple[Lane, dist.ProcessGroup]] = []
        self._groups: list[dist.ProcessGroup] = []  # of calls begun by this thread
        self._started = self._begun = 0  # the same numbers on every rank
        self._fitting: set[tuple[object, ...]] = set()  # values that were found to have the layout's extents
        self._known: dict[tuple[object, ...], Transfer] = {}  # by call
        if group is not None and self.device.type != "cuda":
            pause_at_exit()

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """Itself: a rank has one end, whoever talks through it."""
        return self

    def wire(self, entry: Entry | None = None) -> AbstractContextManager[None]:
        """Around what is sent and received; packing, joining and summing are compute. ``entry``: the recorder's, of
        what it was told of; of anything else it notes the scope."""
        observed = self.observers.pace is not None or self.observers.recorder is not None
        return self._observed(entry) if observed else nullcontext()

    @contextmanager
    def _observed(self, entry: Entry | None) -> Iterator[None]:
        pace, recorder = self.observers.pace, self.observers.recorder
        if pace is not None:
            pace.settle()
        entered = None if recorder is None else recorder.enter(recorder.other(self.scope) if entry is None else entry)
        yield
        if recorder is not None and entered is not None:
            recorder.leave(entered)
        if pace is not None:
            pace.resume()

    def part(self, name: Part) -> AbstractContextManager[None]:
        """Around a part of the program, for the recorder."""
        return nullcontext() if self.observers.recorder is None else self.observers.recorder.part(name)

    def all_gather(
        self, piece: torch.Tensor, *, dim: int, outer: int, unit: int, sizes: Sizes, decomposition: str = "all_to_all"
    ) -> torch.Tensor:
        """This rank's piece -> the whole value on every rank."""
        return self.together("all_gather", [piece], [(Layout(dim, outer, unit, sizes),)], decomposition)[0]

    def all_reduce(self, partial: torch.Tensor, *, decomposition: str = "ring") -> torch.Tensor:
        """Partial sums -> their sum on every rank. The argument is left as it was."""
        return self.together("all_reduce", [partial], [()], decomposition)[0]

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
        return self.together("reduce_scatter", [partial], [(Layout(dim, outer, unit, sizes),)], decomposition)[0]

    def all_to_all(
        self, piece: torch.Tensor, *, source: Layout, target: Layout, decomposition: str = "direct"
    ) -> torch.Tensor:
        """This rank's piece under ``source`` -> its piece under ``target``; the two may share the dim or not."""
        return self.together("all_to_all", [piece], [(source, target)], decomposition)[0]

    def slice(
        self, whole: torch.Tensor, *, dim: int, outer: int, unit: int, sizes: Sizes, decomposition: str = "local"
    ) -> torch.Tensor:
        """The whole value -> this rank's piece. Local, but checked like the rest."""
        layout = Layout(dim, outer, unit, sizes)
        self._verify("slice", decomposition, whole, (layout,))
        return layout.take(whole, self.rank)

    def together(
        self, kind: Collective, values: Sequence[torch.Tensor], layouts: Sequence[Layouts], decomposition: str
    ) -> list[torch.Tensor]:
        """One collective for all of ``values``: ``layouts[i]`` has what ``values[i]`` alone would be given.

        Nothing for ``all_reduce``, (source, target) for ``all_to_all``, else one layout. Sums need one dtype.
        """
        found = self._prepare(kind, values, layouts, decomposition)
        if self.group is None:
            return [value.contiguous() for value in values]
        sent = found.pack(values)
        with self.wire(self._recorded(kind, values, layouts, decomposition, started=False)):
            came = found.move(sent, self.group)
        return found.unpack(came)

    def start(
        self, kind: Collective, values: Sequence[torch.Tensor], layouts: Sequence[Layouts], decomposition: str
    ) -> Pending | list[torch.Tensor]:
        """``together``, left running: for ``wait``. The values must not be written until then. The first call is
        collective.

        In check mode it is complete when this returns: ranks are compared before each collective.
        """
        if self.check or self.group is None:
            return self.together(kind, values, layouts, decomposition)
        found = self._prepare(kind, values, layouts, decomposition)
        begins = found.begins and self.device.type != "cuda"
        lane, group = (None, self._next_group()) if begins else self._next_lane()
        pending = Pending(found, found.pack(values), group)
        entry = pending.entry = self._recorded(kind, values, layouts, decomposition, started=True)
        recorder = self.observers.recorder
        move = pending.move if entry is None or recorder is None else recorder.moved(entry, pending.move)
        with self.wire(entry):
            pending.ticket = pending.begin() if lane is None else lane.submit(move)
        return pending

    def wait(self, pending: Pending | list[torch.Tensor]) -> list[torch.Tensor]:
        """The results of what was started. Once."""
        if isinstance(pending, list):
            return pending
        assert pending.ticket is not None
        with self.wire(pending.entry):
            pending.ticket.wait()
        return pending.unpack()

    def finish(self) -> None:
        """Wait for what a step leaves under way until its end: here, nothing."""

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

    def _prepare(
        self,
        kind: Collective,
        values: Sequence[torch.Tensor],
        layouts: Sequence[Layouts],
        decomposition: str,
    ) -> Transfer:
        """Checked. The same for every call on values of the same shapes, dtypes and layouts."""
        shapes, dtypes = tuple([value.shape for value in values]), tuple([value.dtype for value in values])
        call = (kind, decomposition, shapes, dtypes, tuple(layouts))
        if self.check or call not in self._known:
            for value, found in zip(values, layouts, strict=True):
                held = found[0] if kind in ("all_gather", "all_to_all") else None
                self._verify(kind, decomposition, value, tuple(found), held)
                if kind == "all_to_all" and found[0].dim == found[1].dim and tuple(found) not in self._routes:
                    source, target = found
                    indices = find_indices(source, target, self.rank, self.world_size, value.device)
                    self._routes[source, target] = indices
            if kind in ("all_reduce", "reduce_scatter") and len(set(dtypes)) > 1:
                raise ProgramError(f"{kind}: sums of several dtypes cannot go together")
            place = (self.rank, self.world_size)
            self._known[call] = transfer(kind, *place, values, layouts, decomposition, self._routes)
        return self._known[call]

    def _recorded(
        self,
        kind: Collective,
        values: Sequence[torch.Tensor],
        layouts: Sequence[Layouts],
        decomposition: str,
        *,
        started: bool,
    ) -> Entry | None:
        if self.observers.recorder is None:
            return None
        return self.observers.recorder.called(kind, values, layouts, decomposition, started=started, scope=self.scope)

    def _next_lane(self) -> tuple[Lane, dist.ProcessGroup]:
        """In turns, so that every rank puts the same call on the same lane.

        Threads have a process group each: on a group, calls must come in one order, and what the program waits for
        must not queue behind what it does not. Streams share the group, whose calls the one host thread orders.
        """
        assert self.group is not None
        if not self._lanes:
            if self.device.type == "cuda":
                self._lanes.append((StreamLane(self.device), self.group))
            else:
                self._lanes = [(ThreadLane(), self._group_alike()) for _ in range(LANES)]
        self._started += 1
        return self._lanes[self._started % len(self._lanes)]

    def _next_group(self) -> dist.ProcessGroup:
        """In turns, of groups on which only this thread begins calls: so they begin in the program's order on every
        rank, and need no thread of Python's. The lanes' threads begin theirs on groups of their own."""
        if not self._groups:
            self._groups = [self._group_alike() for _ in range(GROUPS)]
        self._begun += 1
        return self._groups[self._begun % len(self._groups)]

    def _group_alike(self) -> dist.ProcessGroup:
        """Of the same ranks. Collective."""
        assert self.group is not None
        ranks = dist.get_process_group_ranks(self.group)
        made: dist.ProcessGroup = dist.new_group(ranks, backend=dist.get_backend(self.group))
        return made

    def another(self) -> Communicator:
        """An end of the same ranks for another thread of each: what one of them calls does not wait for the other.
        Both have from now on all process groups that they may need, as these are made in one order on all ranks.
        Collective."""
        other = Communicator(None if self.group is None else self._group_alike(), self.device, check=self.check)
        for comm in (self, other) if self.group is not None else ():
            comm._next_lane()
            if self.device.type != "cuda":  # where each would take a stream and memory, and is not asked for
                comm._next_group()
        return other

    def same_on_hosts(self, found: torch.Tensor) -> torch.Tensor:
        """What the ranks of every host have found in pieces of their own -> the same bits on all ranks of the job."""
        return found

    def like(self, other: Communicator) -> Communicator:
        """This end, for the program that ``other`` talks for. Local."""
        return self

    def _verify(
        self,
        kind: Collective,
        decomposition: str,
        value: torch.Tensor,
        layouts: tuple[Layout, ...],
        held: Layout | None = None,
    ) -> None:
        """Refuse an unknown decomposition or a piece of the wrong extent; in check mode compare across ranks too."""
        call = (kind, decomposition, tuple(value.shape), layouts)
        if call not in self._fitting:
            self._verify_extents(kind, decomposition, value, layouts, held)
            self._fitting.add(call)
        if self.check:
            whole = tuple(value.shape) if held is None else held.whole_shape(value.shape)
            self.agree(kind, (kind, decomposition, layouts, whole, str(value.dtype)))

    def _verify_extents(
        self,
        kind: Collective,
        decomposition: str,
        value: torch.Tensor,
        layouts: tuple[Layout, ...],
        held: Layout | None,
    ) -> None:
        if not is_decomposition(kind, decomposition, self.world_size):
            known = ", ".join(DECOMPOSITIONS[kind])
            raise ProgramError(f"{kind}: unknown decomposition {decomposition!r} (known: {known})")
        for layout in layouts:
            if len(layout.sizes) != self.world_size:
                raise ProgramError(f"{kind}: {len(layout.sizes)} sizes for {self.world_size} ranks")
            expected = layout.local_shape(value.shape, self.rank) if layout is held else layout.whole_shape(value.shape)
            same_dim = held is not None and layout is not held and layout.dim == held.dim
            if not same_dim and tuple(value.shape) != expected:
                raise ProgramError(f"{kind}: rank {self.rank} holds {tuple(value.shape)}, the layout says {expected}")
