"""Clusters without some of their devices, and whether a job would be better off there.

A rank without any share still joins every collective and repeats every replicated call, at its own pace: in one job no
device is ever quite left out. Where that costs more than the device brings, the job should not start on it at all. The
plan for all devices then says so, with the step that the others alone would take (``Advice``); a search that may leave
devices out plans for the others (``nested``), and says what they would have cost (``LeftOut``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hap.cluster import ClusterSpec
from hap.cost_models.profile import CalibratedCluster, MeasuredDevice
from hap.hosts import Device
from hap.units import format_time

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """So many ``of`` the devices with one name."""

    gpu: str
    count: int
    of: int

    def __str__(self) -> str:
        return f"the {self.of} {self.gpu}" if self.count == self.of else f"{self.count} of the {self.of} {self.gpu}"


@dataclass(frozen=True)
class Advice:
    """Without the devices of ``ranks`` a step would take ``step_s`` instead of ``instead_of_s``, ``as_run`` or with
    nothing overlapped. ``kinds``: of each how many they are, and of how many."""

    ranks: tuple[int, ...]
    kinds: tuple[Kind, ...]
    step_s: float
    instead_of_s: float
    as_run: bool

    def __str__(self) -> str:
        now, then = (_rounded(s) for s in (self.instead_of_s, self.step_s))
        clock = "as it is run" if self.as_run else "with nothing overlapped"
        return (
            f"leaving out {_named(self.kinds)} would make the step {clock} {then} instead of {now}: run on the other "
            "devices"
        )

    def figures(self) -> dict[str, Any]:
        """For the plan's provenance."""
        step = "leave_out_overlapped_s" if self.as_run else "leave_out_step_s"
        return {"leave_out": list(self.ranks), step: self.step_s}


@dataclass(frozen=True)
class LeftOut:
    """The plan is for the cluster without the devices of ``ranks``, ``devices`` by name. With them, too, a step with
    nothing overlapped takes at least ``at_least_s``, which is proved, and by the best plan found ``with_all_s``, or
    ``overlapped_s`` as it is run, where that was worth looking at; ``glanced``: no more than a first glance was."""

    ranks: tuple[int, ...]
    kinds: tuple[Kind, ...]
    devices: tuple[str, ...]
    at_least_s: float
    with_all_s: float | None = None
    overlapped_s: float | None = None
    glanced: bool = False

    def __str__(self) -> str:
        if self.overlapped_s is not None:
            known = f"{_rounded(self.overlapped_s)} as it is run"
        elif self.with_all_s is not None:
            known = f"{_rounded(self.with_all_s)} with nothing overlapped"
        else:
            known = f"at least {_rounded(self.at_least_s)} with nothing overlapped"
        some, them = ("is", "it") if len(self.ranks) == 1 else ("are", "them")
        how = ", at first glance" if self.glanced else ""
        return f"{_named(self.kinds)} {some} left out, with {them} the step would take {known}{how}"

    def figures(self) -> dict[str, Any]:
        """For the plan's provenance."""
        known = {"with_all_step_s": self.with_all_s, "with_all_overlapped_s": self.overlapped_s}
        return {
            "left_out": list(self.ranks),
            "left_out_devices": list(self.devices),
            "with_all_at_least_s": self.at_least_s,
            **{name: seconds for name, seconds in known.items() if seconds is not None},
            **({"with_all_glanced": True} if self.glanced else {}),
        }


def _rounded(seconds: float) -> str:
    return format_time(float(f"{seconds:.3g}"))


def _named(kinds: Sequence[Kind]) -> str:
    return " and ".join(map(str, kinds))


def kinds_of(cluster: ClusterSpec, ranks: Sequence[int]) -> tuple[Kind, ...]:
    """The kinds of the devices of ``ranks``, in their order."""
    of_all = Counter(d.gpu for d in cluster.devices)
    counts = Counter(cluster.devices[r].gpu for r in ranks)
    return tuple(Kind(gpu, count, of_all[gpu]) for gpu, count in counts.items())


def without(cluster: ClusterSpec, ranks: Sequence[int]) -> ClusterSpec:
    """The cluster without the devices of ``ranks``, of which it must keep some. Hosts that lose all of theirs go. Of a
    measured one what was measured of the others stays."""
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
    part = ClusterSpec(name=cluster.name, backend=cluster.backend, hosts=tuple(hosts), links=links)
    return cluster.profile.part(left, part).calibrate(part) if isinstance(cluster, CalibratedCluster) else part


def paces(cluster: ClusterSpec, seconds: Sequence[float]) -> list[float]:
    """What each device would take for everything alone: of measured ones that the cluster file describes alike, which
    differ a little, the mean."""
    devices, means = cluster.devices, dict[int, float]()
    kinds = [id(d.kind) if isinstance(d, MeasuredDevice) else -1 - d.rank for d in devices]
    for kind in dict.fromkeys(kinds):
        alike = [s for k, s in zip(kinds, seconds, strict=True) if k == kind]
        means[kind] = sum(alike) / len(alike)
    return [means[kind] for kind in kinds]


def slowest_kinds(devices: Sequence[Device], seconds: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """The ranks of the slowest kind of device, of the two slowest, ...: all but the fastest. ``seconds``: what each
    would take for everything alone."""
    pace = [round(s, 12) for s in seconds]
    for least in sorted(set(pace), reverse=True)[:-1]:
        yield tuple(d.rank for d in devices if pace[d.rank] >= least)


def fewer_hosts(devices: Sequence[Device], seconds: Sequence[float]) -> list[tuple[int, ...]]:
    """The ranks that are left out of ever smaller clusters, those of ``slowest_kinds`` among them: of the slowest kind
    half of the hosts that have it, half of the rest, ..., all; then of the next, too; of the fastest all but one host.
    Hosts with few devices of the kind and slow networks go first, by the product of both, as one that is kept is one
    more to send to, whatever it brings; of alike ones those that come later. Where faster devices keep a host, its
    slower ones go last."""
    pace, found, gone = [round(s, 12) for s in seconds], list[tuple[int, ...]](), set[int]()
    for kind in sorted(set(pace), reverse=True):
        hosts: dict[str, list[Device]] = {}
        for d in devices:
            if pace[d.rank] == kind:
                hosts.setdefault(d.host, []).append(d)
        kept = {d.host for d in devices if pace[d.rank] < kind}
        staying = sorted(hosts.values(), key=lambda h: (h[0].host not in kept, -_outward(h[0]) * len(h), h[0].rank))
        count = len(staying)
        while count > 1:
            count = -(-count // 2)
            found.append(_ranks(gone, staying[count:]))
        gone.update(_ranks((), staying))
        if kind != min(pace):
            found.append(tuple(sorted(gone)))
    return found


def beyond(order: Sequence[T], kinds: Collection[T], cluster: T, step: int) -> T | None:
    """In the ``order`` from all devices to the fewest, the next smaller cluster (1) or the next larger one (-1) than
    ``cluster``; None where that is one of the ``kinds``, which lack whole kinds and nothing else."""
    place = order.index(cluster) + step if cluster in order else -1
    return order[place] if 0 <= place < len(order) and order[place] not in kinds else None


def look_beside(
    order: Sequence[T], kinds: Collection[T], best: Callable[[], T], look: Callable[[T], bool | None]
) -> None:
    """From the ``best`` cluster with ever fewer hosts of its slowest kind of devices (two hosts may be no better than
    four, and one be); then from the best with ever more of the next slower one, while that is better. ``look``: whether
    a cluster is better than what was the best before, and None where nothing further on can be."""
    for step in (1, -1):
        cluster = beyond(order, kinds, best(), step)
        while cluster is not None:
            is_better = look(cluster)
            if is_better is None or (step < 0 and not is_better):
                break
            cluster = beyond(order, kinds, cluster, step)


def _outward(device: Device) -> float:
    """Bytes a second of its host's network, by the slower way."""
    return float("inf") if device.outward is None else min(device.outward[:2])


def _ranks(some: Iterable[int], hosts: Iterable[Sequence[Device]]) -> tuple[int, ...]:
    return tuple(sorted([*some, *(d.rank for host in hosts for d in host)]))
