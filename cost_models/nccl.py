"""What NCCL's own tuner expects of its collectives: rings and trees, by three protocols.

    seconds = latency + steps / N * nbytes / bandwidth      ring; steps = 2 (N-1) all-reduce, N-1 the others
    seconds = latency + 2 * nbytes / bandwidth              tree; all-reduce only

    latency, ring     base + (steps - between) * hop inside + between * hop between hosts; between = hosts - 1, twice
                      that for an all-reduce, whose latency by Simple is half as much again (1.4) over several hosts
    latency, tree     base + 2 ((ranks of a host - 1) * hop inside + floor(log2(hosts)) * hop between hosts)
    bandwidth, ring   Simple: the bus; LL: half of it, at most ``_LL_MOST``; LL128: 0.92 of it
    bandwidth, tree   Simple: 0.92 of the bus; LL: that / 3.8, at most ``_LL_MOST``; LL128: that * 7/9 on one host,
                      * 120/128 on several

LL writes a flag beside every 4 bytes, LL128 120 bytes in 128, Simple fences whole chunks: less latency for less
bandwidth. NCCL takes the pair that it expects to be fastest, and so do we: a minimum of straight lines in the bytes.

One number for all ranks, as in NCCL: the slowest edge of the ring, the slowest kind of link inside a host, the oldest
generation; LL128 only where all have the same compute capability, Volta's or later, and NVLink inside hosts. NCCL's hop
between hosts is that of a fast network; of a stated latency counts what it has above the hop of LL.

Source: NCCL 2.28.3 and 2.30.7, src/graph/tuning.cc. Left out: caps by channel, whose number the
topology decides, the tree's corrections at middle sizes, LL128's refusal where GPU and network card are far apart,
NVLS, CollNet and PAT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Algorithm = Literal["ring", "tree"]
Protocol = Literal["LL", "LL128", "Simple"]
Generation = Literal["volta", "ampere", "hopper", "blackwell"]
Inside = Literal["nvlink", "pcie"]
Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]

PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")
_US = 1e-6
_BASE_US: Mapping[Algorithm, tuple[float, float, float]] = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_HOP_US: Mapping[tuple[Algorithm, str], tuple[float, float, float]] = {
    ("tree", "nvlink"): (0.6, 1.25, 4.0),
    ("tree", "pcie"): (1.0, 1.9, 4.0),
    ("tree", "network"): (5.0, 8.5, 14.0),
    ("ring", "nvlink"): (0.6, 1.9, 3.4),
    ("ring", "pcie"): (1.0, 2.5, 5.7),
    ("ring", "network"): (2.7, 4.0, 14.0),
}
_POST_US = (1.0, 1.0, 3.0)  # a step of a ring over several hosts takes at least that: handing it to the network
_LL_MOST: Mapping[Generation, float] = {"volta": 39e9, "ampere": 87.7e9, "hopper": 141e9, "blackwell": 282e9}
_LL_MOST_BETWEEN = (22.5e9, 19.0e9)  # bytes/s on two hosts, on more: the less of Intel's and AMD's
_PLATEAU = 1.4  # of an all-reduce's latency by ring and Simple over several hosts, compute capability 8.0 and later
_PLATEAU_VOLTA = 1.9


@dataclass(frozen=True)
class Communicator:
    """N ranks on ``hosts`` hosts. ``inside``: None where no host has two. ``bus_bytes_per_s``: what a ring carries past
    each rank, the least of any edge. ``network_latency_s``: as stated, of an edge between hosts. ``most_on_a_host``: 0
    where all hosts have equally many ranks."""

    ranks: int
    hosts: int
    inside: Inside | None
    bus_bytes_per_s: float
    generation: Generation
    ll128: bool = True
    network_latency_s: float = 0.0
    most_on_a_host: int = 0

    def __post_init__(self) -> None:
        assert 1 <= self.hosts <= self.ranks
        assert self.most_on_a_host or self.ranks % self.hosts == 0, "hosts of equally many ranks"
        assert self.inside is not None or self.hosts == self.ranks, "several on a host, so a link"


@dataclass(frozen=True)
class Line:
    """One way to do it: ``latency_s + nbytes * s_per_byte``, ``nbytes`` of the whole value dealt evenly."""

    algorithm: Algorithm
    protocol: Protocol
    latency_s: float
    s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes * self.s_per_byte


@dataclass(frozen=True)
class Expected:
    algorithm: Algorithm
    protocol: Protocol
    seconds: float


def generation_of(compute_capability: int) -> Generation:
    """The column of NCCL's tables: what is older than Ampere counts as Volta."""
    names: tuple[tuple[int, Generation], ...] = ((100, "blackwell"), (90, "hopper"), (80, "ampere"))
    return next((name for least, name in names if compute_capability >= least), "volta")


def fastest(kind: Kind, nbytes: float, comm: Communicator) -> Expected:
    """The algorithm and protocol with the least expected seconds; ``nbytes`` of the whole value. The first of equals,
    ring before tree."""
    best = min(lines(kind, comm), key=lambda line: line.seconds(nbytes))
    return Expected(best.algorithm, best.protocol, best.seconds(nbytes))


def seconds(kind: Kind, algorithm: Algorithm, protocol: Protocol, nbytes: float, comm: Communicator) -> float:
    """See the module docstring. No rank talks to itself: 0 for one rank."""
    assert algorithm == "ring" or kind == "all_reduce", f"{kind} has no tree"
    return _line(kind, algorithm, protocol, comm).seconds(nbytes)


@lru_cache(maxsize=64)
def lines(kind: Kind, comm: Communicator) -> tuple[Line, ...]:
    """Every way that NCCL would consider, rings first."""
    algorithms: tuple[Algorithm, ...] = ("ring", "tree") if kind == "all_reduce" else ("ring",)
    protocols = [p for p in PROTOCOLS if p != "LL128" or comm.ll128]
    return tuple(_line(kind, a, p, comm) for a in algorithms for p in protocols)


def _line(kind: Kind, algorithm: Algorithm, protocol: Protocol, comm: Communicator) -> Line:
    if comm.ranks == 1:
        return Line(algorithm, protocol, 0.0, 0.0)
    rate = _bandwidth(algorithm, protocol, comm)
    if algorithm == "tree":
        return Line(algorithm, protocol, _tree_latency_s(protocol, comm), 2 / rate)
    steps = (2 if kind == "all_reduce" else 1) * (comm.ranks - 1)
    return Line(algorithm, protocol, ring_latency_s(kind, protocol, comm), steps / comm.ranks / rate)


def base_s(algorithm: Algorithm, protocol: Protocol) -> float:
    """Of a call, before anything is sent."""
    return _BASE_US[algorithm][PROTOCOLS.index(protocol)] * _US


def ring_latency_s(kind: Kind, protocol: Protocol, comm: Communicator) -> float:
    """Of all steps of a ring, the call's base included."""
    passes = 2 if kind == "all_reduce" else 1
    steps, crossing = passes * (comm.ranks - 1), passes * (comm.hosts - 1)
    inside = 0.0 if comm.inside is None else _hop_s("ring", comm.inside, protocol)
    if comm.hosts > 1:
        inside = max(inside, post_s(protocol))
    between = network_hop_s("tree" if comm.hosts == comm.ranks else "ring", protocol, comm.network_latency_s)
    latency = base_s("ring", protocol) + (steps - crossing) * inside + crossing * between
    if kind == "all_reduce" and protocol == "Simple" and comm.hosts > 1:
        latency *= _PLATEAU_VOLTA if comm.generation == "volta" else _PLATEAU
    return latency


def post_s(protocol: Protocol) -> float:
    """Of handing one message to the network."""
    return _POST_US[PROTOCOLS.index(protocol)] * _US


def _tree_latency_s(protocol: Protocol, comm: Communicator) -> float:
    """Up and down: a chain inside each host, a tree of hosts."""
    chain = (comm.most_on_a_host or comm.ranks // comm.hosts) - 1
    inside = 0.0 if comm.inside is None else _hop_s("tree", comm.inside, protocol)
    between = network_hop_s("tree", protocol, comm.network_latency_s)
    return base_s("tree", protocol) + 2 * (chain * inside + (comm.hosts.bit_length() - 1) * between)


def network_hop_s(algorithm: Algorithm, protocol: Protocol, stated_s: float) -> float:
    """Between two hosts. NCCL takes the tree's where nothing else hides it: a rank alone on its host, one message."""
    least = _hop_s(algorithm, "network", "LL")
    return _hop_s(algorithm, "network", protocol) + max(0.0, stated_s - least)


def _hop_s(algorithm: Algorithm, over: str, protocol: Protocol) -> float:
    return _HOP_US[algorithm, over][PROTOCOLS.index(protocol)] * _US


def _bandwidth(algorithm: Algorithm, protocol: Protocol, comm: Communicator) -> float:
    """Bytes/s of the bus by a protocol."""
    most = _LL_MOST[comm.generation] if comm.hosts == 1 else _LL_MOST_BETWEEN[0 if comm.hosts == 2 else 1]
    bus = comm.bus_bytes_per_s
    if algorithm == "ring":
        return {"LL": min(0.5 * bus, most), "LL128": 0.92 * bus, "Simple": bus}[protocol]
    bus *= 0.92
    packed = 7 / 9 if comm.hosts == 1 else 120 / 128
    return {"LL": min(bus / 3.8, most), "LL128": bus * packed, "Simple": bus}[protocol]
