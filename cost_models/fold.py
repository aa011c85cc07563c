"""Ranks that are alike and hold alike, once each: a step of 1,024 devices costs what its few kinds do.

Where every vector over the ranks is constant on classes of them, so is all that the cost model makes of it: a sum over
ranks is a sum over classes that counts each class's ranks, a maximum one over classes. Ports that are crossed by the
same number of ranks of every class, each way, at the same rate, carry the same and are one row. So the numbers are
those of the whole cluster, to rounding; only which ranges of one dim overlap is asked of the whole. Beyond
``MOST_WHOLE`` ranks it pays. A measured device is like no other, so a measured cluster is never folded.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hap.cluster import Backend, ClusterSpec
from hap.cost_models.steps import is_old
from hap.fabric import Array, Fabric
from hap.hosts import Device
from hap.placement import GroupSizes

T = TypeVar("T")
MOST_WHOLE = 64  # ranks; up to here, routed collectives ask for every rank


def device_numbers(device: Device) -> Hashable:
    """What the cost model knows of a device: equal for devices that compute alike. A measured one is like no other."""
    if type(device) is not Device:
        return device.rank
    rates = tuple(device.tflops.items()), device.memory_bandwidth_bytes_per_s, device.launch_s
    return *rates, device.memory_bytes, is_old(device)


@dataclass(frozen=True, eq=False)
class FoldedFabric:
    """Like ``hap.fabric.Fabric``, with a column for each class, which counts its ranks, and equal rows once: ``rates``
    (K,), ``senders``, ``receivers``, ``edges`` and ``arriving`` (K, C). ``row_of``: port of the whole -> row."""

    names: tuple[str, ...]
    rates: Array
    senders: Array
    receivers: Array
    edges: Array
    arriving: Array
    row_of: NDArray[np.intp]
    world_size: int
    exchange_latency_s: float
    ring_latency_s: float
    largest_latency_s: float
    by_size: tuple[tuple[float, FoldedFabric], ...] = ()

    def at_latencies_of(self, fabric: Fabric) -> FoldedFabric:
        """The same ports with the latencies of another fabric of the whole cluster."""
        return replace(
            self,
            exchange_latency_s=fabric.exchange_latency_s,
            ring_latency_s=fabric.ring_latency_s,
            largest_latency_s=fabric.largest_latency_s,
            by_size=(),
        )

    @cached_property
    def ring_s_per_byte(self) -> float:
        """See ``hap.fabric.Fabric``."""
        return float((self.edges.sum(axis=1) / self.rates).max())

    def busiest(self, by_port: Array) -> Array:
        """(ports of the whole,) -> (K,): the most of all ports that a row stands for."""
        found = np.full(len(self.rates), -np.inf)
        np.maximum.at(found, self.row_of, by_port)
        return found


@dataclass(frozen=True, eq=False)
class FoldedCluster:
    """``whole`` with one device per class; ``of`` (N,) the class of every rank. To the formulas it is a cluster; its
    ``world_size``, the length of vectors, is the number of classes, its ``fabric.world_size`` that of ranks."""

    whole: ClusterSpec
    of: tuple[int, ...]

    @cached_property
    def first(self) -> tuple[int, ...]:
        """One rank of each class."""
        return tuple(self.of.index(c) for c in range(max(self.of) + 1))

    @property
    def world_size(self) -> int:
        return len(self.first)

    @property
    def backend(self) -> Backend:
        return self.whole.backend

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        return tuple(self.whole.devices[r] for r in self.first)

    @cached_property
    def fabric(self) -> FoldedFabric:
        fabric = self.whole.fabric
        members = np.zeros((len(self.of), len(self.first)))
        members[range(len(self.of)), list(self.of)] = 1.0
        tables = senders, receivers, edges, arriving = [
            t @ members for t in (fabric.senders, fabric.receivers, fabric.edges, fabric.arriving)
        ]
        both = np.concatenate([fabric.rates[:, None], *tables], axis=1)
        _, kept, row_of = np.unique(both, axis=0, return_index=True, return_inverse=True)
        folded = FoldedFabric(
            tuple(fabric.ports[k].name for k in kept),
            fabric.rates[kept],
            senders[kept],
            receivers[kept],
            edges[kept],
            arriving[kept],
            row_of=row_of.ravel(),
            world_size=fabric.world_size,
            exchange_latency_s=fabric.exchange_latency_s,
            ring_latency_s=fabric.ring_latency_s,
            largest_latency_s=fabric.largest_latency_s,
        )
        return replace(folded, by_size=tuple((size, folded.at_latencies_of(f)) for size, f in fabric.by_size))

    def take(self, sizes: GroupSizes) -> GroupSizes:
        """The sizes of one rank of each class."""
        first = self.first
        return {name: tuple(s[r] for r in first) for name, s in sizes.items()}

    def spread(self, by_class: Sequence[T]) -> tuple[T, ...]:
        """One entry per rank."""
        return tuple(by_class[c] for c in self.of)


Cluster = ClusterSpec | FoldedCluster


@dataclass(frozen=True, eq=False)
class Folds:
    """The ways in which one cluster was folded, each once, with all that was found of it."""

    cluster: ClusterSpec
    _known: dict[tuple[int, ...], FoldedCluster] = field(default_factory=dict, repr=False)

    def find(self, labels: Iterable[Sequence[Hashable]] = ()) -> FoldedCluster | None:
        """See ``fold``."""
        found = fold(self.cluster, labels)
        return None if found is None else self._known.setdefault(found.of, found)


def fold(cluster: ClusterSpec, labels: Iterable[Sequence[Hashable]] = ()) -> FoldedCluster | None:
    """The cluster folded by its devices' numbers and every one of ``labels``, of which each has one entry per rank.
    None where it would not be worth it."""
    devices = cluster.devices
    if len(devices) <= MOST_WHOLE or any(type(d) is not Device for d in devices):
        return None
    of = _numbered([device_numbers(d) for d in devices])
    for label in labels:
        of = _numbered(list(zip(of, label, strict=True)))
    return FoldedCluster(cluster, tuple(of))


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
