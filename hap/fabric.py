"""The ports of a cluster: what bytes on their way from rank to rank share.

A ``Port`` has a rate and is crossed by every byte from one of its senders to one of its receivers. When rank i sends
``m[i, j]`` bytes to every rank j at the same time, no schedule ends before the busiest port does:

    seconds >= max over ports k of (sum over i in senders_k, j in receivers_k of m[i, j]) / rate_k

The star model of a switched network: a device's way out and in inside its host, a host's network up and down, and a
slower link between two given hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Port:
    """Bytes from any of ``senders`` to any of ``receivers`` (ranks; disjoint) share ``bytes_per_s``."""

    name: str
    bytes_per_s: float
    senders: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Fabric:
    """The ports as arrays, K ports and N ranks: ``rates`` (K,) in bytes/s, ``senders`` and ``receivers`` (K, N) of 0
    and 1, ``latency_s`` (N, N). ``by_size``: where messages of some sizes wait longer, those sizes, rising, and the
    fabric with what they wait for as its latencies; in between lie straight lines from ``latency_s`` on."""

    ports: tuple[Port, ...]
    rates: Array = field(repr=False)
    senders: Array = field(repr=False)
    receivers: Array = field(repr=False)
    latency_s: Array = field(repr=False)
    by_size: tuple[tuple[float, Fabric], ...] = field(default=(), repr=False)

    @classmethod
    def build(cls, ports: tuple[Port, ...], latency_s: Array, by_size: Sequence[tuple[float, Array]] = ()) -> Fabric:
        world_size = len(latency_s)
        senders, receivers = np.zeros((len(ports), world_size)), np.zeros((len(ports), world_size))
        for k, port in enumerate(ports):
            senders[k, list(port.senders)] = 1.0
            receivers[k, list(port.receivers)] = 1.0
        arrays = (np.array([p.bytes_per_s for p in ports]), senders, receivers, latency_s)
        for array in (*arrays, *(latency for _, latency in by_size)):
            array.flags.writeable = False
        slower = tuple((size, cls(ports, *arrays[:3], latency)) for size, latency in by_size)
        return cls(ports, *arrays, slower)

    @property
    def world_size(self) -> int:
        return len(self.latency_s)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.ports)

    @cached_property
    def edges(self) -> Array:
        """(K, N): port k is crossed by the ring's edge from rank i to its successor."""
        edges: Array = self.senders * np.roll(self.receivers, -1, axis=1)
        return edges

    @cached_property
    def arriving(self) -> Array:
        """(K, N): port k is crossed by the ring's edge from its predecessor to rank i."""
        return np.roll(self.edges, 1, axis=1)

    @cached_property
    def _by_sender(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Ports that a rank sends through, rank after rank, and where each rank's begin (N + 1,)."""
        ranks, ports = np.nonzero(self.senders.T)
        return ports, np.searchsorted(ranks, np.arange(self.world_size + 1))

    def crossing(self, source: NDArray[np.intp], target: NDArray[np.intp], amount: Array) -> Array:
        """(K,): what crosses every port when rank ``source[t]`` sends ``amount[t]`` to rank ``target[t]``."""
        ports, begin = self._by_sender
        counts = begin[source + 1] - begin[source]
        pair = np.repeat(np.arange(len(source)), counts)
        within = np.arange(len(pair)) - np.repeat(np.cumsum(counts) - counts, counts)
        port = ports[begin[source][pair] + within]
        weight = amount[pair] * self.receivers[port, target[pair]]
        carried: Array = np.bincount(port, weights=weight, minlength=len(self.ports)).astype(np.float64)
        return carried

    @cached_property
    def exchange_latency_s(self) -> float:
        """Of one message after another from a rank to all others."""
        return float(self.latency_s.sum(axis=1).max())

    @cached_property
    def ring_latency_s(self) -> float:
        """Of one step round the ring."""
        ranks = np.arange(self.world_size)
        return float(self.latency_s[ranks, np.roll(ranks, -1)].max())

    @cached_property
    def ring_s_per_byte(self) -> float:
        """Seconds of one step in which every rank sends one byte to its successor."""
        return float((self.edges.sum(axis=1) / self.rates).max())

    @cached_property
    def largest_latency_s(self) -> float:
        return float(self.latency_s.max())
