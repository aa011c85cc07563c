"""Clusters without some of their devices, and whether a job would be better off there.

A rank without any share still joins every collective and repeats every replicated call, at its own pace: in one job no
device is ever quite left out. Where that costs more than the device brings, the job should not start on it at all; the
plan then says so, with the step that the other devices alone would take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hap.cluster import ClusterSpec
from hap.hosts import Device
from hap.units import format_time


@dataclass(frozen=True)
class Advice:
    """Without the devices of ``ranks`` a step would take ``step_s`` instead of ``instead_of_s``. ``kinds``: how many
    there are of each."""

    ranks: tuple[int, ...]
    kinds: tuple[tuple[str, int], ...]
    step_s: float
    instead_of_s: float

    def __str__(self) -> str:
        now, then = (format_time(float(f"{s:.3g}")) for s in (self.instead_of_s, self.step_s))
        kinds = " and ".join(f"the {count} {kind}" for kind, count in self.kinds)
        return f"leaving out {kinds} would make the step {then} instead of {now}: run on the other devices"


def without(cluster: ClusterSpec, ranks: Sequence[int]) -> ClusterSpec:
    """The cluster without the devices of ``ranks``, of which it must keep some. Hosts that lose all of theirs go."""
    left = [r for r in range(cluster.world_size) if r not in ranks]
    assert left, "no device is left"
    hosts, rank = [], 0
    for host in cluster.hosts:
        devices = []
        for spec in host.devices:
            kept = sum(r in left for r in range(rank, rank + spec.count))
            rank += spec.count
            if kept:
                devices.append(spec.model_copy(update={"count": kept}))
        if devices:
            hosts.append(host.model_copy(update={"devices": tuple(devices)}))
    names = [h.name for h in hosts]
    links = tuple(p for p in cluster.links if p.source in names and p.target in names)
    return ClusterSpec(name=cluster.name, backend=cluster.backend, hosts=tuple(hosts), links=links)


def slowest_kinds(devices: Sequence[Device], seconds: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """The ranks of the slowest kind of device, of the two slowest, ...: all but the fastest. ``seconds``: what each
    would take for everything alone."""
    pace = [round(s, 12) for s in seconds]
    for least in sorted(set(pace), reverse=True)[:-1]:
        yield tuple(d.rank for d in devices if pace[d.rank] >= least)
