"""The joint bound case by case: how much of the batch each host works on.

The relaxation lets every call, and every collective, have shares of its own; but a step has one vector of batch sizes.
So the bound is proved separately for boxes that together hold all such vectors, and the least of their bounds holds
for all (branch and bound over the boxes). Symbols: N samples; j a *part*, the ranks of one class on the host of its
kind that has most of the batch (any plan has one: alike hosts can change names), or on the other hosts of that kind;
R[j] the fraction of the batch on it, of n[j] ranks; a box says low[j] <= R[j] <= high[j]. In a box

    T >= sum_j u[j] t[busiest rank of j] + v[j] sum of t[r in j]        sum_j u[j] + n[j] v[j] = 1, u, v >= 0

for any such weights, where under a strategy that shards the batch a rank with share m needs at least F + m s seconds
(nothing without a share, if it is idle then), so with low[j] > 0, as the busiest rank's m is at least R[j] / n[j],

    sum_r w t >= min over R in the box of sum_j u[j] (F + s R[j] / n[j]) + v[j] (F + s R[j])            (_batch)

and as in ``bound`` under all other strategies, whose shares no box restricts. The least over R, whose parts sum to one,
is found greedily. Between a shard of the batch and a shard of another dim of any other group an all-to-all carries
rho_i sigma_j B bytes from rank i to rank j: for a host with x of the batch and y of the other group out of it
x (1 - y) B and into it (1 - x) y B, of which at ``up`` and ``down`` bytes/s one takes at least, whatever y,

    B x (1 - x) / (x down + (1 - x) up)                                                              (_crossing)

which between the ends of a box is nowhere less than at one of them (its inverse is convex in x).
``cases`` searches the boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hap.conversion import collective_kind
from hap.cost_models.collective import candidates, collective_coefficients
from hap.cost_models.compute import parts_coefficients, parts_seconds
from hap.fabric import Array
from hap.hosts import Device
from hap.placement import Placement, Shard
from hap.plan import Strategy
from hap.search.least import UNIT_BYTES
from hap.search.milp import MS
from hap.search.prices import Facts
from hap.search.relaxation import Relaxation
from hap.search.wires import RankClasses

REPLICATED, OTHER, BATCH = range(3)  # how a strategy deals out a call
TINY = 1e-6  # share: the side of the roofline of small shares


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


class Line(NamedTuple):
    """What a call takes under a strategy on the device of every part: ``fixed`` + share * ``slope`` for either side of
    the roofline (2, J), and ``whole`` (J,) for everything. ``how``: it is dealt out; ``idle``: a rank without a share
    does nothing."""

    how: int
    idle: bool
    fixed: tuple[tuple[float, ...], ...]
    slope: tuple[tuple[float, ...], ...]
    whole: tuple[float, ...]


class Port(NamedTuple):
    """A way in and out of ranks with some of the batch: those of whole ``parts``, or one of ``alike`` sets of them.
    Bytes/s."""

    parts: tuple[int, ...]
    alike: int
    up: float
    down: float


@dataclass(eq=False)
class Boxes:
    """The relaxation's prices for boxes of the batch's sizes. ``group``: that of the batch."""

    facts: Facts
    relaxed: Relaxation
    group: str
    atoms: int
    _lines: dict[Line, int] = field(default_factory=dict)
    _known: dict[object, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parts = find_parts(self.facts)
        self.ranks = np.array([p.ranks for p in self.parts], dtype=np.float64)
        width = len(self.relaxed.cost)
        self.wire = np.zeros(width)  # ms of a unit of every variable that no share changes
        self.crossing = np.zeros(width)  # bytes of it that an all-to-all takes out of the batch's shards, or into them
        entries: list[tuple[int, float, int]]
        entries = [(v, count, self._call(name, i)) for v, count, name, i in self.relaxed.options]
        for v, each, nbytes, source, target in self.relaxed.conversions:
            kind = collective_kind(source, target)
            if kind == "slice":
                entries.append((v, 1 / each, self._slice(nbytes, source, target)))
                continue
            self.wire[v] += self.relaxed.least.seconds(kind, nbytes) * MS / each
            if kind == "all_to_all" and self._crosses(source, target):
                self.crossing[v] += nbytes / each
        self.variable, self.line = (np.array([e[i] for e in entries], dtype=np.int64) for i in (0, 2))
        self.times = np.array([e[1] for e in entries], dtype=np.float64)
        lines = list(self._lines)
        self.how, self.idle = np.array([x.how for x in lines]), np.array([x.idle for x in lines])
        self.fixed, self.slope = (np.array([x[i] for x in lines]).swapaxes(0, 1) for i in (2, 3))
        self.whole = np.array([x.whole for x in lines])

    @property
    def everything(self) -> Box:
        return Box((0,) * len(self.parts), (self.atoms,) * len(self.parts))

    # -- what the variables are --------------------------------------------------------------------------------------

    def _call(self, name: str, option: int) -> int:
        facts, strategy = self.facts, self.facts.candidates[name][option]
        if facts.graph.by_name[name].is_source:
            return self._update(name, strategy)
        parts = facts.parts(name, strategy)
        how = REPLICATED if parts.group is None else BATCH if parts.group == self.group else OTHER
        key = (how, parts.op_class, parts.dtype, parts.fixed_flops, parts.shared_flops, parts.fixed_bytes)
        key += (parts.shared_bytes, parts.idle_when_empty)  # type: ignore[assignment]
        if key not in self._known:
            devices = [p.device for p in self.parts]
            sides = [[parts_coefficients(parts, d, at_share=share) for d in devices] for share in (TINY, 1.0)]
            whole = tuple(parts_seconds(parts, 1.0, d) for d in devices)
            fixed, slope = (tuple(tuple(pair[i] for pair in side) for side in sides) for i in (0, 1))
            self._known[key] = self._number(Line(how, parts.idle_when_empty, fixed, slope, whole))
        return self._known[key]

    def _update(self, name: str, strategy: Strategy) -> int:
        placement, n = strategy.outputs[0], self.facts.cluster.world_size
        sharded = isinstance(placement, Shard)
        sizes = {placement.group: (placement.n,) * n} if isinstance(placement, Shard) else {}
        seconds = self.facts.update_s(name, strategy, sizes)
        whole = tuple(float(seconds[p.device.rank]) for p in self.parts)
        return self._number(_through_nothing(OTHER if sharded else REPLICATED, whole))

    def _slice(self, nbytes: int, source: Placement, target: Placement) -> int:
        assert isinstance(target, Shard)
        key = ("slice", nbytes, target.group == self.group)
        if key not in self._known:
            constant, slope = self.relaxed.slices.slices(nbytes, source, target)
            of = [self.relaxed.slices.classes.of[p.device.rank] for p in self.parts]
            fixed, slopes = tuple(constant[of].tolist()), tuple(slope[of].tolist())
            whole = tuple(f + s for f, s in zip(fixed, slopes, strict=True))
            how = BATCH if target.group == self.group else OTHER
            self._known[key] = self._number(Line(how, False, (fixed,) * 2, (slopes,) * 2, whole))
        return self._known[key]

    def _number(self, line: Line) -> int:
        return self._lines.setdefault(line, len(self._lines))

    def _crosses(self, source: Placement, target: Placement) -> bool:
        """Whether an all-to-all is from the batch's shards to others of another dim, or back."""
        assert isinstance(source, Shard) and isinstance(target, Shard)
        ranges = source.dim == target.dim and source.outer == target.outer
        return not ranges and (source.group == self.group) != (target.group == self.group)

    @cached_property
    def ports(self) -> tuple[Port, ...]:
        """Of hosts, or of single ranks where there is one host, by the fastest all-to-all."""
        cluster, n = self.facts.cluster, self.facts.cluster.world_size
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
        return tuple(dict.fromkeys(p for ranks, (up, down) in ways.items() for p in self._port(ranks, up, down)))

    def _port(self, ranks: tuple[int, ...], up: float, down: float) -> list[Port]:
        cluster = self.facts.cluster
        hosts = {cluster.devices[r].host for r in ranks}
        same = [r for r in range(cluster.world_size) if cluster.devices[r].host in hosts]
        kinds = self._kinds_of
        if len(hosts) == 1 and len(same) == len(ranks):
            kind = kinds[next(iter(hosts))]
            found = []
            for most in (True, False):
                parts = tuple(j for j, p in enumerate(self.parts) if p.kind == kind and p.most is most)
                if parts:
                    found.append(Port(parts, self.parts[parts[0]].hosts, up, down))
            return found
        if len(ranks) == 1:
            of = RankClasses.find(cluster).of
            alike = [j for j, p in enumerate(self.parts) if of[p.device.rank] == of[ranks[0]]]
            return [Port((j,), self.parts[j].ranks, up, down) for j in alike]
        return []

    @cached_property
    def _kinds_of(self) -> dict[str, int]:
        of = RankClasses.find(self.facts.cluster).of
        hosts: dict[str, list[int]] = {}
        for d in self.facts.cluster.devices:
            hosts.setdefault(d.host, []).append(of[d.rank])
        numbers: dict[tuple[int, ...], int] = {}
        return {name: numbers.setdefault(tuple(ranks), len(numbers)) for name, ranks in hosts.items()}

    # -- prices ------------------------------------------------------------------------------------------------------

    def crossing_s(self, box: Box) -> float:
        """Seconds a byte that an all-to-all takes at least."""
        least = 0.0
        for port in self.ports:
            low = sum(box.low[j] for j in port.parts) / self.atoms / port.alike
            high = min(1.0, sum(box.high[j] for j in port.parts) / self.atoms)
            least = max(least, min(_crossing(x, port.up, port.down) for x in (low, high)))
        return least

    def coefficients(self, box: Box, weights: Array) -> Array:
        """(L, 2 J): of every line, seconds per unit of every weight at the batch sizes in the box that are best for
        these weights (u, v)."""
        n, width = self.ranks, len(self.parts)
        u, v = weights[:width], weights[width:]
        low, high = (np.array(side, dtype=np.float64) / self.atoms for side in box)
        found = np.zeros((len(self.how), 2 * width))
        own, lone = np.arange(len(self.how)), np.where(n > 1, v, u)
        column = np.where(n > 1, width + np.arange(width), np.arange(width))

        whole = self.how == REPLICATED
        found[whole] = np.concatenate([self.whole[whole], self.whole[whole] * n], axis=1)

        other = self.how == OTHER
        fixed, slope = self._side(np.full(width, 1.0 / n.sum()))
        fixed = np.where(self.idle[:, None], 0.0, fixed)
        slope = np.where(self.idle[:, None], self.whole, slope)
        cheapest = (slope * lone).argmin(axis=1)
        found[other] = np.concatenate([fixed[other], fixed[other] * n], axis=1)
        found[own[other], column[cheapest[other]]] += slope[own[other], cheapest[other]]

        batch = self.how == BATCH
        fixed, slope = (side[batch] for side in self._side((low + high) / 2 / n))
        idle = self.idle[batch][:, None]
        nothing = idle & (low == 0)
        chord = slope + np.divide(fixed, high, out=np.zeros_like(fixed), where=high > 0)
        fixed, slope = np.where(nothing, 0.0, fixed), np.where(nothing, chord, slope)
        busiest, each = slope / n, slope
        at = _dealt(u * busiest + v * each, low, high)
        share = np.where(low == high, np.ceil(low * self.atoms / n - 1e-9) / self.atoms, at / n)
        found[batch] = np.concatenate([fixed + slope * share, fixed * np.where(idle, 1.0, n) + slope * at], axis=1)
        return found

    def _side(self, share: Array) -> tuple[Array, Array]:
        """The side of the roofline that is higher at these shares of a rank (J,): fixed and slope (L, J)."""
        first, second = (f + s * share for f, s in zip(self.fixed, self.slope, strict=True))
        higher = first >= second
        return np.where(higher, self.fixed[0], self.fixed[1]), np.where(higher, self.slope[0], self.slope[1])

    def cost_ms(self, box: Box, price_s: Array) -> Array:
        """(V,): the relaxation's objective with these seconds of every line."""
        cost = self.wire + self.crossing * (self.crossing_s(box) * MS)
        np.add.at(cost, self.variable, self.times * price_s[self.line] * MS)
        return cost


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


def _through_nothing(how: int, whole: Sequence[float]) -> Line:
    """Seconds in proportion to the share."""
    nothing = (0.0,) * len(whole)
    return Line(how, True, (nothing, nothing), (tuple(whole), tuple(whole)), tuple(whole))


def _crossing(x: float, up: float, down: float) -> float:
    """Seconds a byte of an all-to-all, at least, that ranks with x of the batch take part in."""
    return 0.0 if x in (0.0, 1.0) else x * (1 - x) / (x * down + (1 - x) * up)


def _dealt(slope: Array, low: Array, high: Array) -> Array:
    """(L, J): for each row of slopes (L, J) the fractions between low and high, together one, whose sum with the
    slopes is least: what is left over ``low`` goes where it costs least."""
    order = slope.argsort(axis=1, kind="stable")
    room = (high - low)[order]
    before = np.concatenate([np.zeros((len(order), 1)), room.cumsum(axis=1)[:, :-1]], axis=1)
    taken = np.clip(1.0 - low.sum() - before, 0.0, room)
    found = np.empty_like(slope)
    np.put_along_axis(found, order, taken, axis=1)
    return found + low
