"""Timing links and collectives. Everything here is collective: every rank calls it at the same time.

A link is measured by its receiver alone: it asks for so many bytes, the sender answers with them. A collective is timed
by all on one clock (rank 0's, to which each rank measures its offset): from the moment when the last rank enters the
wire to that when the last leaves it. Packing and joining are told apart from the wire by the communicator's pace.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from hap.cluster import ClusterSpec
from hap.codegen.layout import Layout
from hap.cost_models.collective import candidates, formula_coefficients, shares
from hap.cost_models.fit import CopyTiming, WireTiming
from hap.cost_models.profile import LinkProfile, ProfileError
from hap.placement import PARTIAL, REPLICATE, Placement, Shard, Sizes
from hap.plan import Collective
from hap.runtime.collectives import Communicator
from hap.runtime.profile_ops import TOO_NOISY, TRIES, Clock

ATOMS = 16  # of the measured values, per side
VALUE_BYTES = tuple(1 << k for k in (10, 14, 16, 17, 18, 19, 20))  # closely about the segments of ``hap.routes``
LINK_BYTES = 1 << 20  # at least: 64 times a shaper's burst, since small messages pass faster than the rate
MOST_LINK_BYTES = 1 << 28
LONG = 10.0  # round trips of an empty message that a large one takes at least, if its size allows it
REPEATS = 2
LARGE_BYTES = 1 << 18  # smaller values are measured twice as often: one tick of the scheduler is as long as they are
SETTLE_S = 2e-3  # after a barrier and the sweep, until the processes that they woke are at rest again
LATER_S = 1e-3  # every other time each rank comes so much later than the one before: in a step some wait for the last
PARTS = (1 / 16, 1 / 4)  # of the large message: the sizes in between that are measured
LINK_REPEATS = 5
SWEPT_BYTES = 1 << 20  # written before each: in a step a rank comes from computing, and the caches hold that
AWAKE = 8  # small calls after that: who packs has just computed; only who joins has waited (``DeviceKind.resume_s``)


class Ends(NamedTuple):
    """One run on one rank: when the wire was entered and left (rank 0's clock), seconds of packing and joining."""

    entered: float
    left: float
    copying_s: float


class Recorder:
    """A ``Pace`` that only looks on."""

    def __init__(self, device: torch.device, slowdown: float | None, offset_s: float) -> None:
        self.device, self.slowdown, self.offset_s = device, slowdown, offset_s
        self.factor = 1.0  # of seconds that were emulated (``Clock.factor``)

    def begin(self) -> None:
        self.copying_s, self.entered, self.left = 0.0, 0.0, 0.0
        self._mark = self._now()

    def settle(self) -> None:
        self.copying_s += self._now() - self._mark
        self.entered = self.entered or time.perf_counter()

    def resume(self) -> None:
        synchronize(self.device)
        self.left = time.perf_counter()
        self._mark = self._now()

    def end(self) -> Ends:
        self.copying_s += self._now() - self._mark
        copying_s = self.copying_s * (self.slowdown or 1.0) * self.factor
        return Ends(self.entered + self.offset_s, self.left + self.offset_s, copying_s)

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter() if self.slowdown is None else time.thread_time()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock_offset_s(device: torch.device, rounds: int = 8) -> float:
    """What to add to this rank's ``perf_counter`` to get rank 0's: Cristian's method, the round of the least delay."""
    rank, found = dist.get_rank(), (float("inf"), 0.0)
    told = torch.zeros(1, dtype=torch.float64, device=device)
    for other in range(1, dist.get_world_size()):
        for _ in range(rounds):
            if rank == other:
                asked = time.perf_counter()
                dist.send(told, 0)
                dist.recv(told, 0)
                theirs, answered = float(told), time.perf_counter()
                found = min(found, (answered - asked, theirs - (asked + answered) / 2))
            elif rank == 0:
                dist.recv(told, other)
                synchronize(device)  # NCCL's calls return before anything has arrived
                dist.send(torch.full_like(told, time.perf_counter()), other)
    return found[1]


def measure_links(device: torch.device, repeats: int = LINK_REPEATS) -> tuple[LinkProfile, ...]:
    """Every ordered pair, one after another; the same on every rank."""
    n, mine = dist.get_world_size(), dict[tuple[int, int], dict[int, list[float]]]()
    for source in range(n):
        for target in range(n):
            if source != target:
                dist.barrier()
                if dist.get_rank() == source:
                    _serve(target, device)
                elif dist.get_rank() == target:
                    mine[source, target] = _ask(source, device, repeats)
    gathered: list[dict[tuple[int, int], dict[int, list[float]]]] = [{} for _ in range(n)]
    dist.all_gather_object(gathered, mine)
    seconds = {pair: times for found in gathered for pair, times in found.items()}
    return tuple(fit_link(*pair, seconds[pair]) for pair in sorted(seconds))


def _serve(target: int, device: torch.device) -> None:
    """The sender: messages of the sizes that the receiver asks for, until it asks for none."""
    wanted, held = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.uint8, device=device)
    while True:
        dist.recv(wanted, target)
        if not (size := int(wanted)):
            return
        held = held if held.numel() >= size else torch.zeros(size, dtype=torch.uint8, device=device)
        dist.send(held[:size], target)
        synchronize(device)


def _ask(source: int, device: torch.device, repeats: int) -> dict[int, list[float]]:
    """The receiver: see ``link_times``."""
    held = torch.zeros(1, dtype=torch.uint8, device=device)

    def answer_s(size: int) -> float:
        nonlocal held
        held = held if held.numel() >= size else torch.zeros(size, dtype=torch.uint8, device=device)
        wanted = torch.tensor([size], device=device)
        synchronize(device)
        start = time.perf_counter()
        dist.send(wanted, source)
        dist.recv(held[:size], source)
        synchronize(device)
        return time.perf_counter() - start

    seconds = link_times(answer_s, repeats)
    dist.send(torch.zeros(1, dtype=torch.int64, device=device), source)
    return seconds


def link_times(answer_s: Callable[[int], float], repeats: int) -> dict[int, list[float]]:
    """Seconds from asking to having an answer of one byte, of so many that it takes ``LONG`` times as long, and of
    sizes in between (``PARTS``); ``answer_s`` asks for one. They take turns, since empty answers in a row may each wait
    for the scheduler's tick; the first answer of a size is not kept. Where large ones differ by more than
    ``TOO_NOISY``, as when something else ran for a moment, all are asked for again, ``TRIES`` times at most."""
    empty: list[float] = []

    def after_an_empty_one_s(size: int) -> float:
        empty.append(answer_s(1))
        return answer_s(size)

    size = LINK_BYTES
    after_an_empty_one_s(size)
    empty.clear()
    while after_an_empty_one_s(size) < LONG * min(empty) and size < MOST_LINK_BYTES:
        size *= 4
    sizes = [int(size * part) for part in PARTS] + [size]
    for _ in range(TRIES):
        rounds = [[after_an_empty_one_s(s) for s in sizes] for _ in range(repeats)]
        if _spread([large for *_, large in rounds]) <= TOO_NOISY:
            break
    return {1: empty} | dict(zip(sizes, map(list, zip(*rounds, strict=True)), strict=True))


def fit_link(source: int, target: int, seconds: Mapping[int, Sequence[float]]) -> LinkProfile:
    """Half the least round trip is the latency; the rest of a large answer's median time is its bytes'; by what others'
    medians are above that line is their delay. ProfileError if a large one has no rest."""
    trip, size = min(seconds[1]), max(seconds)
    middle = {nbytes: statistics.median(found) for nbytes, found in seconds.items()}
    large = middle[size]
    if large <= trip:
        raise ProfileError(
            f"link from rank {source} to {target}: {size} bytes took no longer than one; nothing can be measured"
        )
    rate = size / (large - trip)
    return LinkProfile(
        source=source,
        target=target,
        latency_s=trip / 2,
        bytes_per_s=rate,
        spread=_spread(seconds[size]),
        delays=tuple((s, max(0.0, middle[s] - trip - s / rate)) for s in sorted(middle) if 1 < s < size),
    )


def _spread(seconds: Sequence[float]) -> float:
    """The median of how far they are from their median, as a part of it."""
    middle = statistics.median(seconds)
    return statistics.median(abs(s - middle) for s in seconds) / middle


def measure_collectives(
    cluster: ClusterSpec, comm: Communicator, clock: Clock
) -> tuple[tuple[WireTiming, ...], tuple[CopyTiming, ...]]:
    """(the wire's timings, the same on every rank; this rank's copies). ``cluster`` gives the formula's seconds: one
    whose links are already measured."""
    recorder = Recorder(comm.device, clock.slowdown, clock_offset_s(comm.device))
    comm.observers.pace = recorder
    wire: list[WireTiming] = []
    copies: list[CopyTiming] = []
    try:
        for case in _cases(cluster):
            recorder.factor = clock.factor()
            repeats = REPEATS if case.nbytes >= LARGE_BYTES else 2 * REPEATS
            ends = [_once(case, comm, recorder, turn) for turn in range(repeats + 1)][1:]
            copies.append(case.copied(comm.rank, statistics.median(e.copying_s for e in ends)))
            if case.kind != "slice":
                everyone = comm.gather_objects([(e.entered, e.left) for e in ends])
                wire.append(case.timed(everyone, cluster))
    finally:
        comm.observers.pace = None
    return tuple(wire), tuple(copies)


class Case(NamedTuple):
    """One collective on one value of ``nbytes``, (ATOMS, any) float32, dealt as ``sizes``."""

    kind: Collective
    decomposition: str
    nbytes: int
    sizes: Sizes
    source: Placement
    target: Placement

    def call(self, comm: Communicator) -> Callable[[], torch.Tensor]:
        rows, columns = ATOMS, self.nbytes // 4 // ATOMS
        whole = torch.ones(rows, columns, device=comm.device)
        cut = Layout(0, 1, 1, self.sizes)
        settings = {"dim": 0, "outer": 1, "unit": 1, "sizes": self.sizes, "decomposition": self.decomposition}
        match self.kind:
            case "all_reduce":
                return lambda: comm.all_reduce(whole, decomposition=self.decomposition)
            case "reduce_scatter":
                return lambda: comm.reduce_scatter(whole, **settings)  # type: ignore[arg-type]
            case "slice":
                return lambda: comm.slice(whole, **settings)  # type: ignore[arg-type]
        piece = cut.take(whole, comm.rank)
        if self.kind == "all_gather":
            return lambda: comm.all_gather(piece, **settings)  # type: ignore[arg-type]
        across = Layout(1, 1, columns // ATOMS, self.sizes)
        return lambda: comm.all_to_all(piece, source=cut, target=across, decomposition=self.decomposition)

    def copied(self, rank: int, seconds: float) -> CopyTiming:
        cut = [isinstance(p, Shard) for p in (self.source, self.target)]
        local = sum(cut) * self.nbytes * self.sizes[rank] / ATOMS
        return CopyTiming(self.kind, self.decomposition, 0.0 if all(cut) else self.nbytes, local, max(seconds, 1e-7))

    def timed(self, everyone: Sequence[Sequence[tuple[float, float]]], cluster: ClusterSpec) -> WireTiming:
        """``everyone[rank][repeat]`` is (entered, left)."""
        runs = [(max(entered for entered, _ in run), run) for run in zip(*everyone, strict=True)]
        ends = [(begin, max(left for _, left in run), run) for begin, run in runs]
        seconds = [end - begin for begin, end, _ in ends]
        early = [[min(1.0, (end - left) / (end - begin)) for _, left in run] for begin, end, run in ends]
        middle = statistics.median(seconds)
        spread = statistics.median(abs(s - middle) for s in seconds) / middle
        given = {"g": self.sizes}
        form = formula_coefficients(
            self.kind, self.decomposition, self.nbytes, self.source, self.target, cluster, sizes=given
        )
        rho, sigma = (shares(p, given, cluster.world_size) for p in (self.source, self.target))
        formula = form.constant_s + sum(s.seconds(rho, sigma) for s in form.stages if not s.in_memory)
        ahead = tuple(statistics.median(own) for own in zip(*early, strict=True))
        return WireTiming(self.kind, self.decomposition, self.nbytes, formula, middle, spread, ahead)


def _once(case: Case, comm: Communicator, recorder: Recorder, turn: int) -> Ends:
    run = case.call(comm)
    dist.barrier()
    torch.ones(SWEPT_BYTES // 4, device=comm.device).add_(1.0)
    time.sleep(SETTLE_S + LATER_S * ((comm.rank + turn) % comm.world_size) * (turn % 2))
    for _ in range(AWAKE):
        torch.ones(1024, device=comm.device).add_(1.0)
    recorder.begin()
    run()
    return recorder.end()


def _cases(cluster: ClusterSpec) -> Iterator[Case]:
    """Every collective and decomposition, every size; even shares, and shares that fall from the first rank on."""
    n = cluster.world_size
    rows, columns = Shard(0, 1, ATOMS, 1, "g"), Shard(1, 1, ATOMS, 1, "g")
    sides: dict[Collective, tuple[Placement, Placement]] = {
        "all_gather": (rows, REPLICATE),
        "all_reduce": (PARTIAL, REPLICATE),
        "reduce_scatter": (PARTIAL, rows),
        "all_to_all": (rows, columns),
        "slice": (REPLICATE, rows),
    }
    for kind, (source, target) in sides.items():
        for decomposition in candidates(kind, cluster):
            for nbytes in VALUE_BYTES:
                for sizes in dealings(n) if kind != "all_reduce" else dealings(n)[:1]:
                    yield Case(kind, decomposition, nbytes, sizes, source, target)


def dealings(n: int) -> tuple[Sizes, ...]:
    """``ATOMS`` dealt to n ranks: evenly, and the first half of the ranks three times as much as the rest."""
    even = tuple(ATOMS * (r + 1) // n - ATOMS * r // n for r in range(n))
    weights = [3.0 if r < n / 2 else 1.0 for r in range(n)]
    edges = [round(ATOMS * sum(weights[:r]) / sum(weights)) for r in range(n + 1)]
    return even, tuple(b - a for a, b in itertools.pairwise(edges))
