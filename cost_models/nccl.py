"""What NCCL's own tuner expects of an all-reduce, all-gather or reduce-scatter: rings and trees, by three protocols.

    seconds = latency + steps / N * nbytes / bandwidth      ring; steps = 2 (N-1) all-reduce, N-1 the others
    seconds = latency + 2 * nbytes / bandwidth              tree; all-reduce only

    latency, ring     base + (steps - between) * hop inside + between * hop between hosts; between = hosts - 1, twice
                      that for an all-reduce, whose latency by Simple is half as much again (1.4) over several hosts
    latency, tree     base + 2 ((N / hosts - 1) * hop inside + log2(hosts) * hop between hosts)
    bandwidth, ring   Simple: the bus; LL: half of it, at most ``_LL_MOST``; LL128: 0.92 of it
    bandwidth, tree   Simple: 0.92 of the bus; LL: that / 3.8, at most ``_LL_MOST``; LL128: that * 7/9 on one host,
                      * 120/128 on several

LL writes a flag beside every 4 bytes, LL128 120 bytes in 128, Simple fences whole chunks: less latency for less
bandwidth. NCCL takes the pair that it expects to be fastest, and so do we. Source: NCCL 2.30.7, src/graph/tuning.cc;
numbers in its tables as read in collectives.md 3.2. Left out: caps by channel, whose number the topology decides, the
tree's corrections at middle sizes, NVLS, CollNet and PAT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
_LL_MOST: Mapping[Generation, tuple[float, float, float]] = {  # GB/s on one, two, and more hosts
    "volta": (39.0, 39.0, 20.4),
    "ampere": (87.7, 22.5, 19.0),
    "hopper": (141.0, 45.0, 35.0),
    "blackwell": (282.0, 90.0, 70.0),
}
_PLATEAU = 1.4  # of an all-reduce's latency by ring and Simple over several hosts, compute capability 8.0 and later
_PLATEAU_VOLTA = 1.9


@dataclass(frozen=True)
class Communicator:
    """N ranks on ``hosts`` hosts, alike. ``bus_bytes_per_s``: what a ring carries past each rank, the least of any
    edge; NCCL, too, has one number for all."""

    ranks: int
    hosts: int
    inside: Inside
    bus_bytes_per_s: float
    generation: Generation

    def __post_init__(self) -> None:
        assert 1 <= self.hosts <= self.ranks and self.ranks % self.hosts == 0, "hosts of equally many ranks"


@dataclass(frozen=True)
class Expected:
    algorithm: Algorithm
    protocol: Protocol
    seconds: float


def fastest(kind: Kind, nbytes: float, comm: Communicator) -> Expected:
    """The algorithm and protocol with the least expected seconds; ``nbytes`` of the whole value. The first of equals,
    ring before tree."""
    algorithms: tuple[Algorithm, ...] = ("ring", "tree") if kind == "all_reduce" else ("ring",)
    found = [Expected(a, p, seconds(kind, a, p, nbytes, comm)) for a in algorithms for p in PROTOCOLS]
    return min(found, key=lambda e: e.seconds)


def seconds(kind: Kind, algorithm: Algorithm, protocol: Protocol, nbytes: float, comm: Communicator) -> float:
    """See the module docstring. No rank talks to itself: 0 for one rank."""
    assert algorithm == "ring" or kind == "all_reduce", f"{kind} has no tree"
    if comm.ranks == 1:
        return 0.0
    at = PROTOCOLS.index(protocol)
    base, inside, between = (
        table[at] * _US
        for table in (_BASE_US[algorithm], _HOP_US[algorithm, comm.inside], _HOP_US[algorithm, "network"])
    )
    rate = _bandwidth(algorithm, protocol, comm)
    if algorithm == "tree":
        latency = base + 2 * ((comm.ranks / comm.hosts - 1) * inside + math.log2(comm.hosts) * between)
        return latency + 2 * nbytes / rate
    passes = 2 if kind == "all_reduce" else 1
    steps, crossing = passes * (comm.ranks - 1), passes * (comm.hosts - 1)
    latency = base + (steps - crossing) * inside + crossing * between
    if kind == "all_reduce" and protocol == "Simple" and comm.hosts > 1:
        latency *= _PLATEAU_VOLTA if comm.generation == "volta" else _PLATEAU
    return latency + steps / comm.ranks * nbytes / rate


def _bandwidth(algorithm: Algorithm, protocol: Protocol, comm: Communicator) -> float:
    """Bytes/s of the bus by a protocol."""
    most = _LL_MOST[comm.generation][0 if comm.hosts == 1 else 1 if comm.hosts == 2 else 2] * 1e9
    bus = comm.bus_bytes_per_s
    if algorithm == "ring":
        return {"LL": min(0.5 * bus, most), "LL128": 0.92 * bus, "Simple": bus}[protocol]
    bus *= 0.92
    packed = 7 / 9 if comm.hosts == 1 else 120 / 128
    return {"LL": min(bus / 3.8, most), "LL128": bus * packed, "Simple": bus}[protocol]
