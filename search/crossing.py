"""What an all-to-all between shards of two dims takes at least, where a box says how much of a group each host has.

It carries rho_i sigma_j B bytes from rank i to rank j: for a host with x of the one group and y of the other out of it
x (1 - y) B and into it (1 - x) y B, at ``up`` and ``down`` bytes/s. So it takes at least

    B max(x (1 - y) / up, (1 - x) y / down)                                                              (one host)

For a given x the first falls and the second rises with y, so the y in the box that is nearest to where they are equal
is the best; and where they are equal,

    B x (1 - x) / (x down + (1 - x) up)                                                                  (balanced)

which between two x is nowhere less than at one of them (its inverse is convex in x), while with y at an end of the box
the larger of both falls until they are equal, and then rises. So only the ends of x count, and the x at which both are
equal with y at an end. Of all hosts s together leave

    B (1 - sum_s x_s y_s),        sum_s x_s y_s <= max over x in the box of sum_s x_s max(y_s)           (all hosts)

by all ways out, and likewise with x and y in each other's place. Of a group between two of its own dims x = y.

Where no box says anything (``seconds_apart``): let m be the share x of the host that has most of the one group, and
n >= m the share y of host k, which has most of the other; r[j] bytes/s the quicker of host j's ways. They take
max(x (1 - y), (1 - x) y) / r[j] >= x (1 - x) / r[j] seconds a byte, whatever y is. So if an all-to-all takes c seconds
a byte, every x[j] is no more than the lesser root of x (1 - x) = c r[j], or no less than the other, and such x must add
up to one with none above m. So

    c  >=  W (1 - m) + E d,        d = m - x[k],    E = 1 / (H sum_j r[j])                                    (apart)

for the W that is least over all c and m which allow it. There d <= m, d <= H m - 1, as no x is above m, and by (all
hosts) c sum_j r[j] >= 1 - m + m d. If d > 0, another host l than k has m of the one, and no more than 1 - n of the
other: so c r[l] >= m m, and c r[k] >= m (1 - m + d).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hap.cost_models.collective import candidates, formula_coefficients
from hap.cost_models.profile import CalibratedCluster
from hap.fabric import Array
from hap.hosts import Device
from hap.placement import Shard
from hap.search.prices import Facts
from hap.search.wires import UNIT_BYTES, RankClasses


class Part(NamedTuple):
    """Ranks that could change places: ``kind`` of host, whether on the host with most of the batch, their device."""

    kind: int
    most: bool
    device: Device
    ranks: int
    hosts: int


class Box(NamedTuple):
    """Atoms of every group on every part, from ``low`` to ``high`` (G, J); the batch is the first group."""

    low: tuple[tuple[int, ...], ...]
    high: tuple[tuple[int, ...], ...]


class Fractions(NamedTuple):
    """Of one group, on every part: from ``low`` to ``high`` (J,)."""

    low: Array
    high: Array


class Port(NamedTuple):
    """A way in and out of ranks with some of a group: those of whole ``parts``, or one of ``alike`` sets of them.
    Bytes/s."""

    parts: tuple[int, ...]
    alike: int
    up: float
    down: float


Range = tuple[float, float]
LEAST = 0.01  # for the fastest way, and for a quarter of all: there all x but one are little, and together, too
GRID_C, GRID_M = 1500, 600  # rectangles by which W is found, to about a percent, ...
GRID_STEP = 32  # ... those of so many c at a time


def crossing_s(ports: Sequence[Port], source: Fractions, target: Fractions, hosts: int) -> float:
    """Seconds a byte that an all-to-all between two groups takes at least. The same object twice is one group's, from
    one of its dims to another. ``hosts``: as many have ways of their own, or ranks where there is one host."""
    found = 0.0
    for port in ports:
        x, y = _inside(port, source), _inside(port, target)
        if source is target:
            found = max(found, min(_itself(end, port) for end in (x[0] / port.alike, x[1])))
        elif port.alike == 1:
            found = max(found, of_host(x, y, port.up, port.down))
        else:  # some set of these parts has no less than the mean of the one, and some of the other
            found = max(found, of_host((x[0] / port.alike, x[1]), (0.0, y[1]), port.up, port.down))
            found = max(found, of_host((0.0, x[1]), (y[0] / port.alike, y[1]), port.up, port.down))
    if sum(port.alike for port in ports) == hosts:
        stays = min(_most_staying(ports, source, target), _most_staying(ports, target, source))
        rate = min(sum(p.alike * p.up for p in ports), sum(p.alike * p.down for p in ports))
        found = max(found, (1.0 - stays) / rate)
    return found


def of_host(x: Range, y: Range, up: float, down: float) -> float:
    """Seconds a byte of an all-to-all, at least, that a host with such parts of two groups takes part in."""
    alike = (end * up / (end * up + (1 - end) * down) for end in y)  # where both ways take as long
    return min(_at(min(max(at, x[0]), x[1]), y, up, down) for at in (*x, *alike))


def _at(x: float, y: Range, up: float, down: float) -> float:
    best = min(max(x * down / (x * down + (1 - x) * up), y[0]), y[1])
    return max(x * (1 - best) / up, (1 - x) * best / down)


def _itself(x: float, port: Port) -> float:
    return x * (1 - x) / min(port.up, port.down)


def seconds_apart(ports: Sequence[Port]) -> tuple[float, float]:
    """(W, E), seconds a byte: see the module docstring. Of hosts' own ways, one for every host. The least over
    rectangles of c and m, of each by its corners."""
    rate, alike = np.array([max(p.up, p.down) for p in ports]), np.array([p.alike for p in ports])
    second, most = np.sort(np.repeat(rate, np.minimum(alike, 2)))[-2:].tolist()
    hosts, total = int(alike.sum()), float(rate @ alike)
    beside_s, found = 1.0 / (hosts * total), np.inf
    c = np.append(np.geomspace(LEAST / max(most, total / 4), 1 / rate.min(), GRID_C), np.inf)
    corners = np.linspace(1 / hosts, 1.0, GRID_M + 1)
    low, high = corners[:-1], corners[1:]

    def allowed(lasts: Array) -> NDArray[np.bool_]:
        """Of so many c (C,), and of every m: at no lesser c of what is not."""
        few = _root(lasts[:, None] * rate)
        kept, by_one = np.zeros((len(lasts), GRID_M)), np.zeros((len(lasts), GRID_M), dtype=bool)
        for own, count in zip(few.T, alike.tolist(), strict=True):
            kept += count * np.minimum(high, own[:, None])
            by_one |= high >= np.maximum(1 - own, 1 - (few @ alike - own))[:, None]
        return (kept >= 1) | by_one

    begin = bisect_left(c[1:].tolist(), True, key=lambda last: bool(allowed(np.array([last])).any()))
    for start in range(begin, GRID_C, GRID_STEP):
        first, last = c[:-1][start : start + GRID_STEP, None], c[1:][start : start + GRID_STEP, None]
        if (first[0, 0] - beside_s) / (1 - 1 / hosts) >= found:  # d is at most one, and m no less than 1 / H
            break
        d = np.zeros((len(first), GRID_M))
        for here, there in ((most, second), (second, most)):  # l's and k's
            more = np.minimum(last * there, last * total) / low - 1 + high
            d = np.where(last * here < low * low, d, np.maximum(d, more))
        d = np.minimum(d, np.minimum(high, hosts * high - 1))
        apart = (first - beside_s * d) / (1 - low)
        found = min(found, float(apart[allowed(last[:, 0])].min(initial=np.inf)))
    few = _root(c[0] * rate)  # below that c one host has nearly all, and roots are no more of c than here
    assert few @ alike < 0.1, "not all can be little"
    nearly_all = max(min(own, float(few @ alike) - own) for own in few.tolist())
    return max(min(found, c[0] / nearly_all), 1 / total), beside_s


def _root(product: Array) -> Array:
    """The lesser root of x (1 - x) = this; one, where any x is as good."""
    free = product >= 0.25
    found: Array = np.where(free, 1.0, (1 - np.sqrt(1 - 4 * np.where(free, 0.0, product))) / 2)
    return found


def _inside(port: Port, group: Fractions) -> Range:
    """The part of a group that is on the port's parts."""
    parts = list(port.parts)
    return min(1.0, float(group.low[parts].sum())), min(1.0, float(group.high[parts].sum()))


def _most_staying(ports: Sequence[Port], one: Fractions, other: Fractions) -> float:
    """What stays where it is at most, where hosts have the most that they may of the other group: as much of the one as
    there may be where that is most."""
    ranges = sorted(((_inside(p, other)[1], *_inside(p, one)) for p in ports), reverse=True)
    left, found = 1.0 - sum(low for _, low, _ in ranges), 0.0
    for most, low, high in ranges:
        taken = min(max(left, 0.0), high - low)
        left -= taken
        found += (low + taken) * most
    return min(1.0, found)


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
    """Of hosts, or of single ranks where there is one host, by the fastest all-to-all: where that was measured, at the
    size at which it is fastest beside the formula."""
    cluster, n = facts.cluster, facts.cluster.world_size
    fabric, rates = cluster.fabric, []
    one, other = Shard(0, 1, n, 1, "one"), Shard(1, 1, n, 1, "other")
    for name in candidates("all_to_all", cluster):
        form = formula_coefficients("all_to_all", name, UNIT_BYTES, one, other, cluster)
        least = 1.0
        if isinstance(cluster, CalibratedCluster):
            least = min(cluster.collective("all_to_all", name).factors, default=least)
        for stage in form.stages:
            if not stage.in_memory:
                assert len(stage.by_source) == len(fabric.ports), "a row for every port"
                rates.append(least * np.maximum(stage.by_source, stage.by_target).max(axis=1) / UNIT_BYTES)
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
