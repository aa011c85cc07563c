"""The communicator of a mesh of two axes: the ranks of one host, and between the hosts sums of gradients.

The batch is dealt out to the hosts, each of which runs a one-axis program of its own on its ranks, so a rank's
collectives are those of its host (``Communicator``). The one thing that hosts do together in a step is to add the
gradients of parameters, which lie inside of each host as its own plan has them: see ``hap.runtime.ragged``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from hap.errors import ProgramError
from hap.hosts_sum import SUM_LANES, bundle_bytes
from hap.run_record import BUNDLED, IN_ROUNDS
from hap.runtime.collectives import GROUPS, LANES, Communicator
from hap.runtime.lane import Lane, StreamLane, ThreadLane, Ticket
from hap.runtime.ragged import Exchange, Site, Splits, all_to_all

if TYPE_CHECKING:
    from hap.run_record import Scope
    from hap.runtime.record import Entry

T = TypeVar("T")


class HostCommunicator(Communicator):
    """One rank's end of its host's collectives and of the sums over hosts. Collective: every rank makes one alike.

    ``hosts`` are the numbers of ranks of the hosts, in rank order: host 0 has the ranks 0 to ``hosts[0]`` - 1 of
    ``world``, which is all ranks of the job (None for a job of one rank). ``sites`` are the tensors that are summed,
    known by their numbers; ``later`` are those of ``hosts_sum_later``, in the order of the calls.

    Inherited collectives, ``rank`` and ``world_size`` are the host's; ``everyone`` has those of the world. Who is told
    of uses of the wire is told of those of both, and of those of ``on``.
    """

    scope: Scope = "host"

    def __init__(
        self,
        world: dist.ProcessGroup | None,
        hosts: Sequence[int],
        sites: Sequence[Site],
        device: torch.device | str = "cpu",
        *,
        later: Sequence[int] = (),
        bundle_bytes: int | None = None,
        check: bool | None = None,
    ) -> None:
        self.everyone = Communicator(world, device, check=check)
        if min(hosts, default=0) < 1 or sum(hosts) != self.everyone.world_size:
            raise ProgramError(f"hosts of {tuple(hosts)} ranks, the job has {self.everyone.world_size}")
        for site in sites:
            site.verify(hosts)
        starts = list(accumulate(hosts, initial=0))
        self.hosts, self.sites, self.later = tuple(hosts), tuple(sites), tuple(later)
        self._late = frozenset(later)
        self.host = sum(start <= self.everyone.rank for start in starts[1:])
        self._members = [list(range(start, stop)) for start, stop in pairwise(starts)]
        super().__init__(self._host_group(), device, check=check)
        self.everyone.observers = self.observers
        if self.device.type != "cuda":
            # Groups are made by all ranks of the job at once: not when a host's program first needs them.
            made = [group for _ in range(LANES + GROUPS) if (group := self._host_group()) is not None]
            self._lanes, self._groups = [(ThreadLane(), group) for group in made[:LANES]], made[LANES:]
        self._bundle_bytes = bundle_bytes
        self._exchanges: dict[tuple[int, ...], Exchange] = {}
        self._sum_lanes: list[tuple[Lane, dist.ProcessGroup]] = []
        if self.later and len(hosts) > 1:
            everyone = range(starts[-1])
            if self.device.type == "cuda":
                self._sum_lanes = [(StreamLane(self.device), self._new_group(everyone))]
            else:
                self._sum_lanes = [(ThreadLane(), self._new_group(everyone)) for _ in range(SUM_LANES)]
        self._submitted = 0  # the same number on every rank
        self._given = 0  # of ``later``, in this step
        self._bundle: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # site, piece, result
        self._tickets: list[tuple[Ticket, Entry | None]] = []
        self._failure: BaseException | None = None  # of a bundle
        self._likes: dict[HostCommunicator, HostCommunicator] = {}

    def another(self) -> HostCommunicator:
        """As ``Communicator.another``, of the host's ranks and of the world's. Collective, of all ranks of the job."""
        world = None if self.everyone.group is None else self.everyone._group_alike()
        return HostCommunicator(world, self.hosts, self.sites, self.device, later=self.later, check=self.check)

    def like(self, other: Communicator) -> HostCommunicator:
        assert isinstance(other, HostCommunicator) and other.hosts == self.hosts
        if (other.sites, other.later) == (self.sites, self.later):
            return self
        if other not in self._likes:
            self._likes[other] = self.on(other.sites, other.later)
        return self._likes[other]

    def on(self, sites: Sequence[Site], later: Sequence[int]) -> HostCommunicator:
        """The same end of the same groups, for another program's sums over hosts. Local."""
        for site in sites:
            site.verify(self.hosts)
        other = copy.copy(self)
        other.sites, other.later, other._late = tuple(sites), tuple(later), frozenset(later)
        other._bundle_bytes, other._exchanges = None, {}
        other._given, other._bundle, other._tickets, other._likes = 0, [], [], {}
        return other

    def broadcast(self, whole: torch.Tensor) -> torch.Tensor:
        """As ``Communicator.broadcast``, from the world's rank 0 to all of the world."""
        return self.everyone.broadcast(whole)

    def from_rank_zero(self, mine: T) -> T:
        """The picklable object of the world's rank 0 on every rank of the world."""
        return self.everyone.from_rank_zero(mine)

    def same_on_hosts(self, found: torch.Tensor) -> torch.Tensor:
        """What the world's rank 0 has found. Collective, of all ranks of the job."""
        with self.everyone.wire():
            return self.everyone.broadcast(found)

    def over_hosts(self, piece: torch.Tensor, site: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """What programs call: ``hosts_sum_later`` for the sites of ``later``, for others ``hosts_sum``."""
        return self.hosts_sum_later(piece, site, dtype) if site in self._late else self.hosts_sum(piece, site, dtype)

    def hosts_sum(self, piece: torch.Tensor, site: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """What this rank holds of the site -> the same of its sum over hosts, a new contiguous tensor. It travels in
        the piece's dtype; with another ``dtype`` the sum is cast to that."""
        if self.check:
            layout = self.sites[site].layouts[self.host]
            whole = tuple(piece.shape) if layout is None else layout.whole_shape(piece.shape)
            self.everyone.agree("hosts_sum", (site, str(piece.dtype), whole))
        move = partial(self._move, self._recorded_sum((site,), piece, IN_ROUNDS))
        return self._exchange((site,)).sum([piece], move, dtype)[0]

    def hosts_sum_later(self, piece: torch.Tensor, site: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor that will hold ``hosts_sum`` once ``finish`` has returned; until then ``piece`` must not be written.

        The sites are ``later``, one after another: ProgramError for any other. Consecutive ones of one dtype go
        together. In check mode the sum is there when this returns.
        """
        expected = self.later[self._given] if self._given < len(self.later) else None
        if site != expected:
            due = "none" if expected is None else f"site {expected}"
            raise ProgramError(f"sums over hosts for later: site {site} was given, {due} is next")
        if self.check or not self._sum_lanes:
            result = self.hosts_sum(piece, site, dtype)
            self._given += 1
            return result
        self.sites[site].verify_piece(piece, self.host, self.rank)
        if self._bundle and self._bundle[0][1].dtype != piece.dtype:
            self._submit()
        result = torch.empty_like(piece, dtype=dtype, memory_format=torch.contiguous_format)
        self._bundle.append((site, piece, result))
        self._given += 1
        nbytes = sum(math.prod(self.sites[number].shape) * given.itemsize for number, given, _ in self._bundle)
        if nbytes >= self._enough(piece.itemsize) or self._given == len(self.later):
            self._submit()
        return result

    def _enough(self, itemsize: int) -> int:
        """Bytes of a bundle."""
        if self._bundle_bytes is None:
            self._bundle_bytes = bundle_bytes(sum(math.prod(self.sites[n].shape) for n in self.later) * itemsize)
        return self._bundle_bytes

    def finish(self) -> None:
        """Wait for the sums of ``hosts_sum_later``, and raise what went wrong with them. Then a new step may begin.

        ProgramError if not all of ``later`` were given. After an exchange that failed none is begun: other ranks may
        still be in it, and this raises the same again.
        """
        given, tickets = self._given, self._tickets
        self._given, self._bundle, self._tickets = 0, [], []
        if given < len(self.later):
            raise ProgramError(
                f"sums over hosts for later: {given} of {len(self.later)} were given, site {self.later[given]} is next"
            )
        for ticket, entry in tickets:
            with self.wire(entry):
                ticket.wait()

    def _submit(self) -> None:
        lane, group = self._sum_lanes[self._submitted % len(self._sum_lanes)]
        self._submitted += 1
        sites, pieces, results = zip(*self._bundle, strict=True)
        self._bundle = []
        entry = self._recorded_sum(sites, pieces[0], BUNDLED)
        with self.wire(entry):
            work: Callable[[], None] = partial(self._sum_bundle, self._exchange(sites), pieces, results, group)
            if entry is not None and self.observers.recorder is not None:
                work = self.observers.recorder.moved(entry, work)
            self._tickets.append((lane.submit(work), entry))

    def _sum_bundle(
        self,
        exchange: Exchange,
        pieces: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
    ) -> None:
        """What a lane does with a bundle."""
        if self._failure is not None:
            raise self._failure
        if self.device.type == "cuda":  # memory of the program's stream, which may be done with it before this one is
            for tensor in (*pieces, *results):
                tensor.record_stream(torch.cuda.current_stream())
        try:
            exchange.sum_into(results, pieces, partial(all_to_all, group=group))
        except BaseException as failure:
            self._failure = self._failure or failure
            raise

    def _exchange(self, sites: tuple[int, ...]) -> Exchange:
        if sites not in self._exchanges:
            found = [self.sites[site] for site in sites]
            self._exchanges[sites] = Exchange(found, self.hosts, self.everyone.rank, self.device)
        return self._exchanges[sites]

    def _recorded_sum(self, sites: Sequence[int], piece: torch.Tensor, how: str) -> Entry | None:
        if self.observers.recorder is None or len(self.hosts) == 1:
            return None
        return self.observers.recorder.summed([self.sites[site].shape for site in sites], piece.itemsize, how)

    def _move(self, entry: Entry | None, sent: torch.Tensor, splits: Splits) -> torch.Tensor:
        assert self.everyone.group is not None
        with self.wire(entry):
            return all_to_all(sent, splits, self.everyone.group)

    def _host_group(self) -> dist.ProcessGroup | None:
        """A new group of this host's ranks; none for a host of one rank. All ranks of the world make those of all."""
        made = [self._new_group(ranks) if len(ranks) > 1 else None for ranks in self._members]
        return made[self.host]

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        world = self.everyone.group
        assert world is not None
        known = dist.get_process_group_ranks(world)
        return dist.new_group([known[rank] for rank in ranks], backend=dist.get_backend(world))
