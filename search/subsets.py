"""Clusters without some of their devices, and whether a job would be better off there.

A rank without any share still joins every collective and repeats every replicated call, at its own pace: in one job no
device is ever quite left out. Where that costs more than the device brings, the job should not start on it at all. The
plan for all devices then says so, with the step that the others alone would take (``Advice``); a search that may leave
devices out plans for the others (``fewer``), and says what they would have cost (``LeftOut``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hap.cluster import ClusterSpec
from hap.hosts import Device
from hap.units import format_time


@dataclass(frozen=True)
class Advice:
    """Without the devices of ``ranks`` a step would take ``step_s`` instead of ``instead_of_s``, ``as_run`` or with
    nothing overlapped. ``kinds``: how many there are of each."""

    ranks: tuple[int, ...]
    kinds: tuple[tuple[str, int], ...]
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
    kinds: tuple[tuple[str, int], ...]
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


def _named(kinds: Sequence[tuple[str, int]]) -> str:
    return " and ".join(f"the {count} {kind}" for kind, count in kinds)


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
