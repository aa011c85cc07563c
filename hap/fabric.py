"""The ports of a cluster: what bytes on their way from rank to rank share.

A ``Port`` has a rate and is crossed by every byte from one of its senders to one of its receivers. When rank i sends
``m[i, j]`` bytes to every rank j at the same time, no schedule ends before the busiest port does:

    seconds >= max over ports k of (sum over i in senders_k, j in receivers_k of m[i, j]) / rate_k

The star model of a switched network: a device's way out and in inside its host, a host's network up and down, and a
slower link between two given hosts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    and 1, ``latency_s`` (N, N)."""

    ports: tuple[Port, ...]
    rates: Array = field(repr=False)
    senders: Array = field(repr=False)
    receivers: Array = field(repr=False)
    latency_s: Array = field(repr=False)

    @classmethod
    def build(cls, ports: tuple[Port, ...], latency_s: Array) -> Fabric:
        world_size = len(latency_s)
        senders, receivers = np.zeros((len(ports), world_size)), np.zeros((len(ports), world_size))
        for k, port in enumerate(ports):
            senders[k, list(port.senders)] = 1.0
            receivers[k, list(port.receivers)] = 1.0
        arrays = (np.array([p.bytes_per_s for p in ports]), senders, receivers, latency_s)
        for array in arrays:
            array.flags.writeable = False
        return cls(ports, *arrays)

    @property
    def world_size(self) -> int:
        return len(self.latency_s)
