"""What an all-to-all between shards of two dims takes at least, where a box says how much of the batch each host has.

It carries rho_i sigma_j B bytes from rank i to rank j: for a host with x of the one group and y of the other out of it
x (1 - y) B and into it (1 - x) y B, at ``up`` and ``down`` bytes/s. As nothing is known of y, one of the two takes at
least

    B x (1 - x) / (x down + (1 - x) up)                                                              (whatever)

which between the ends of a box is nowhere less than at one of them (its inverse is convex in x). From y to x ``up`` and
``down`` change places; of both ways the smaller counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hap.cost_models.collective import candidates, collective_coefficients
from hap.fabric import Array
from hap.hosts import Device
from hap.placement import Shard
from hap.search.least import UNIT_BYTES
from hap.search.prices import Facts
from hap.search.wires import RankClasses


class Part(NamedTuple):
    """Ranks that could change places: ``kind`` of host, whether on the host with most of the batch, their device."""

    kind: int
    most: bool
    device: Device
    ranks: int
    hosts: int


class Box(NamedTuple):
    """Samples of every part, from ``low`` to ``high`` (J,)."""

    low: tuple[int, ...]
    high: tuple[int, ...]


class Port(NamedTuple):
    """A way in and out of ranks with some of a group: those of whole ``parts``, or one of ``alike`` sets of them.
    Bytes/s."""

    parts: tuple[int, ...]
    alike: int
    up: float
    down: float


def crossing_s(ports: Sequence[Port], low: Array, high: Array) -> float:
    """Seconds a byte that an all-to-all between the batch and another group takes at least, from fractions (J,)."""
    found = 0.0
    for port in ports:
        parts = list(port.parts)
        # some set of these parts has no less than the mean
        ends = float(low[parts].sum()) / port.alike, min(1.0, float(high[parts].sum()))
        ways = ((port.up, port.down), (port.down, port.up))
        found = max(found, min(whatever(x, *way) for x in ends for way in ways))
    return found


def whatever(x: float, up: float, down: float) -> float:
    """Seconds a byte of an all-to-all, at least, that ranks with x of a group take part in."""
    return 0.0 if x in (0.0, 1.0) else x * (1 - x) / (x * down + (1 - x) * up)


def find_parts(facts: Facts) -> tuple[Part, ...]:
    """Kinds of hosts in order, of each the host with most of the batch and then the others, by class of rank."""
    cluster = facts.cluster
    of = RankClasses.find(cluster).of
    hosts: dict[str, list[int]] = {}
    for d in cluster.devices:
        hosts.setdefault(d.host, []).append(of[d.rank])
    many: dict[tuple[int, ...], int] = {}
    for ranks in hosts.values():
        many[tuple(ranks)] = many.get(tuple(ranks), 0) + 1
    first = {of[r]: cluster.devices[r] for r in reversed(range(cluster.world_size))}
    parts = []
    for kind, (ranks_of, hosts_of) in enumerate(many.items()):
        for most, count in ((True, 1), (False, hosts_of - 1)):
            for c in dict.fromkeys(ranks_of) if count else ():
                parts.append(Part(kind, most, first[c], ranks_of.count(c) * count, count))
    return tuple(parts)


def find_ports(facts: Facts, parts: Sequence[Part]) -> tuple[Port, ...]:
    """Of hosts, or of single ranks where there is one host, by the fastest all-to-all."""
    cluster, n = facts.cluster, facts.cluster.world_size
    fabric, rates = cluster.fabric, []
    one, other = Shard(0, 1, n, 1, "one"), Shard(1, 1, n, 1, "other")
    for name in candidates("all_to_all", cluster):
        form = collective_coefficients("all_to_all", name, UNIT_BYTES, one, other, cluster)
        for stage in form.stages:
            if not stage.in_memory:
                assert len(stage.by_source) == len(fabric.ports), "a row for every port"
                rates.append(np.maximum(stage.by_source, stage.by_target).max(axis=1) / UNIT_BYTES)
    slowest = np.min(rates, axis=0)  # seconds a byte
    ways: dict[tuple[int, ...], list[float]] = {}
    for k, port in enumerate(fabric.ports):
        for inside, outside, way in ((port.senders, port.receivers, 0), (port.receivers, port.senders, 1)):
            if len(inside) + len(outside) == n and slowest[k] > 0:
                ways.setdefault(tuple(sorted(inside)), [np.inf, np.inf])[way] = 1 / slowest[k]
    kinds, both = _kinds_of(facts), {ranks: w for ranks, w in ways.items() if np.isfinite(w).all()}
    return tuple(dict.fromkeys(p for ranks, w in both.items() for p in _port(facts, parts, kinds, ranks, *w)))


def _port(
    facts: Facts, parts: Sequence[Part], kinds: dict[str, int], ranks: tuple[int, ...], up: float, down: float
) -> list[Port]:
    cluster = facts.cluster
    hosts = {cluster.devices[r].host for r in ranks}
    same = [r for r in range(cluster.world_size) if cluster.devices[r].host in hosts]
    if len(hosts) == 1 and len(same) == len(ranks):
        kind = kinds[next(iter(hosts))]
        found = []
        for most in (True, False):
            of_kind = tuple(j for j, p in enumerate(parts) if p.kind == kind and p.most is most)
            if of_kind:
                found.append(Port(of_kind, parts[of_kind[0]].hosts, up, down))
        return found
    if len(ranks) == 1:
        of = RankClasses.find(cluster).of
        alike = [j for j, p in enumerate(parts) if of[p.device.rank] == of[ranks[0]]]
        return [Port((j,), parts[j].ranks, up, down) for j in alike]
    return []


def _kinds_of(facts: Facts) -> dict[str, int]:
    of = RankClasses.find(facts.cluster).of
    hosts: dict[str, list[int]] = {}
    for d in facts.cluster.devices:
        hosts.setdefault(d.host, []).append(of[d.rank])
    numbers: dict[tuple[int, ...], int] = {}
    return {name: numbers.setdefault(tuple(ranks), len(numbers)) for name, ranks in hosts.items()}
