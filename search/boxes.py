"""The joint bound case by case: how much of the batch each host works on.

The relaxation lets every call, and every collective, have shares of its own; but a step has one vector of batch sizes.
So the bound is proved separately for boxes that together hold all of these vectors, and the least of their bounds holds
for all (branch and bound over the boxes). Symbols: N samples; j a *part*, the ranks of one class on the host of its
kind that has most of the batch (any plan has one: alike hosts can change names), or on the other hosts of that kind;
R[j] the fraction of the batch on it, of n[j] ranks; a box says low[j] <= R[j] <= high[j]. In a box

    T >= sum_j u[j] t[busiest rank of j] + v[j] sum of t[r in j]        sum_j u[j] + n[j] v[j] = 1, u, v >= 0

for any such weights, and the calls of a path (``chain``) may have other weights where they are dealt out by the batch
than where they are by another group. Under a strategy that shards the batch a rank with share m needs at least F + m s
seconds (nothing without a share, if it is idle then), so with low[j] > 0, as the busiest rank's m is at least
R[j] / n[j] and a whole number of samples,

    sum_r w t >= min over R in the box of sum_j u[j] (F + s R[j] / n[j]) + v[j] (F + s R[j])            (_batch)

and as in ``bound`` under all other strategies, whose shares no box restricts. The least over R, whose parts sum to
one, is found greedily. What all-to-alls between shards take at least in a box is said in ``crossing``; ``cases``
searches the boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hap.conversion import collective_kind
from hap.cost_models.compute import parts_coefficients, parts_seconds
from hap.fabric import Array
from hap.placement import Placement, Shard
from hap.plan import Strategy
from hap.search.chain import find_chain
from hap.search.crossing import Box, Port, crossing_s, find_parts, find_ports
from hap.search.milp import MS
from hap.search.prices import Facts
from hap.search.relaxation import Relaxation

REPLICATED, OTHER, BATCH = range(3)  # how a strategy deals out a call
SETS = 2  # of weights: one for the batch, and one for all other groups
TINY = 1e-6  # share: the side of the roofline of small shares


class Line(NamedTuple):
    """What a call takes under a strategy on the device of every part: ``fixed`` + share * ``slope`` for either side of
    the roofline (2, J), and ``whole`` (J,) for everything. ``how``: it is dealt out; ``idle``: a rank without a share
    does nothing; ``chained``: it is of the path."""

    how: int
    idle: bool
    chained: bool
    fixed: tuple[tuple[float, ...], ...]
    slope: tuple[tuple[float, ...], ...]
    whole: tuple[float, ...]


@dataclass(eq=False)
class Boxes:
    """The relaxation's prices for boxes of sizes. ``batch``: its group and how many samples it has."""

    facts: Facts
    relaxed: Relaxation
    batch: tuple[str, int]
    _lines: dict[Line, int] = field(default_factory=dict)
    _known: dict[object, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parts = find_parts(self.facts)
        self.ranks = np.array([p.ranks for p in self.parts], dtype=np.float64)
        width = len(self.relaxed.cost)
        self.wire = np.zeros(width)  # ms of a unit of every variable that no share changes
        self.group, self.samples = self.batch
        self.crossing = np.zeros(width)  # bytes of it between the batch and another group
        chained = self._chained()
        entries: list[tuple[int, float, int]]
        entries = [(v, count, self._call(name, i, name in chained)) for v, count, name, i in self.relaxed.options]
        for v, each, nbytes, source, target in self.relaxed.conversions:
            kind = collective_kind(source, target)
            if kind == "slice":
                entries.append((v, 1 / each, self._slice(nbytes, source, target)))
                continue
            self.wire[v] += self.relaxed.least.seconds(kind, nbytes) * MS / each
            if kind == "all_to_all" and self._is_crossed(source, target):
                self.crossing[v] += nbytes / each
        self.variable, self.line = (np.array([e[i] for e in entries], dtype=np.int64) for i in (0, 2))
        self.times = np.array([e[1] for e in entries], dtype=np.float64)
        lines = list(self._lines)
        self.how, self.idle, self.chained = (np.array([x[i] for x in lines]) for i in range(3))
        self.fixed, self.slope = (np.array([x.fixed for x in lines]), np.array([x.slope for x in lines]))
        self.fixed, self.slope = self.fixed.swapaxes(0, 1), self.slope.swapaxes(0, 1)
        self.whole = np.array([x.whole for x in lines])

    @property
    def everything(self) -> Box:
        width = len(self.parts)
        return Box((0,) * width, (self.samples,) * width)

    def fractions(self, box: Box) -> tuple[Array, Array]:
        """(J,) from which fraction of the batch to which it is on every part."""
        low, high = (np.array(side, dtype=np.float64) for side in box)
        return low / self.samples, high / self.samples

    # -- what the variables are --------------------------------------------------------------------------------------

    def _chained(self) -> frozenset[str]:
        """The first call of every type whose calls are all of the path."""
        chain, of = find_chain(self.facts), self.relaxed.fine
        others = {of[node.name] for node in self.facts.graph.nodes if node.name not in chain}
        return frozenset(name for a, name in self.relaxed.first.items() if a not in others)

    def _call(self, name: str, option: int, chained: bool) -> int:
        facts, strategy = self.facts, self.facts.candidates[name][option]
        if facts.graph.by_name[name].is_source:
            return self._update(name, strategy)
        parts = facts.parts(name, strategy)
        how = REPLICATED if parts.group is None else self._how(parts.group)
        key = (how, parts.op_class, parts.dtype, parts.fixed_flops, parts.shared_flops, parts.fixed_bytes)
        key += (parts.shared_bytes, parts.idle_when_empty, chained)  # type: ignore[assignment]
        if key not in self._known:
            devices = [p.device for p in self.parts]
            sides = [[parts_coefficients(parts, d, at_share=share) for d in devices] for share in (TINY, 1.0)]
            whole = tuple(parts_seconds(parts, 1.0, d) for d in devices)
            fixed, slope = (tuple(tuple(pair[i] for pair in side) for side in sides) for i in (0, 1))
            self._known[key] = self._number(Line(how, parts.idle_when_empty, chained, fixed, slope, whole))
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
        how = self._how(target.group)
        key = ("slice", nbytes, how)
        if key not in self._known:
            constant, slope = self.relaxed.slices.slices(nbytes, source, target)
            of = [self.relaxed.slices.classes.of[p.device.rank] for p in self.parts]
            fixed, slopes = tuple(constant[of].tolist()), tuple(slope[of].tolist())
            whole = tuple(f + s for f, s in zip(fixed, slopes, strict=True))
            self._known[key] = self._number(Line(how, False, False, (fixed,) * 2, (slopes,) * 2, whole))
        return self._known[key]

    def _number(self, line: Line) -> int:
        return self._lines.setdefault(line, len(self._lines))

    def _how(self, group: str) -> int:
        return BATCH if group == self.group else OTHER

    def _is_crossed(self, source: Placement, target: Placement) -> bool:
        """Whether it is between the batch and another group, of different dims."""
        assert isinstance(source, Shard) and isinstance(target, Shard)
        ranges = source.dim == target.dim and source.outer == target.outer
        return not ranges and (source.group == self.group) != (target.group == self.group)

    @cached_property
    def ports(self) -> tuple[Port, ...]:
        return find_ports(self.facts, self.parts)

    # -- prices ------------------------------------------------------------------------------------------------------

    def crossing_s(self, box: Box) -> float:
        """Seconds a byte that an all-to-all between the batch and another group takes at least."""
        return crossing_s(self.ports, *self.fractions(box))

    def coefficients(self, box: Box, weights: Array) -> Array:
        """(L, S 2 J): of every line, seconds per unit of every weight, at the sizes in the box that are best for these
        weights, where it is paid for with the set of its group, or with the set that makes it least."""
        sets = weights.reshape(SETS, -1)
        found = np.array([self._by_set(box, w) for w in sets])
        seconds = np.einsum("slw,sw->sl", found, sets)
        own = np.where(self.how == OTHER, 1, 0)
        number = np.where(self.chained & (self.how != REPLICATED), own, seconds.argmin(axis=0))
        every = np.arange(len(own))
        chosen = np.zeros((len(own), *sets.shape))
        chosen[every, number] = found[number, every]
        result: Array = chosen.reshape(len(own), -1)
        return result

    def _by_set(self, box: Box, weights: Array) -> Array:
        """(L, 2 J): the same of all lines with one set of weights (u, v)."""
        n, width = self.ranks, len(self.parts)
        v = weights[width:]
        found = np.zeros((len(self.how), 2 * width))
        own, lone = np.arange(len(self.how)), np.where(n > 1, v, weights[:width])
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

        found[self.how == BATCH] = self._batch(*self.fractions(box), weights)
        return found

    def _batch(self, low: Array, high: Array, weights: Array) -> Array:
        """The same for calls that are dealt out by the batch, of which fractions (J,) are on the parts."""
        n, width, of = self.ranks, len(self.parts), self.how == BATCH
        u, v = weights[:width], weights[width:]
        fixed, slope = (side[of] for side in self._side((low + high) / 2 / n))
        idle = self.idle[of][:, None]
        nothing = idle & (low == 0)
        chord = slope + np.divide(fixed, high, out=np.zeros_like(fixed), where=high > 0)
        fixed, slope = np.where(nothing, 0.0, fixed), np.where(nothing, chord, slope)
        all_fixed = fixed * np.where(idle, 1.0, n)
        whole = np.ceil(low * self.samples / n - 1e-9) / self.samples
        free = np.clip(whole * n, low, high)  # so much costs the busiest rank no more than ``low`` does
        slopes = np.concatenate([v * slope, u * slope / n + v * slope], axis=1)
        pieces = _dealt(slopes, np.append(low, np.zeros(width)), np.append(free, high - free))
        at = pieces[:, :width] + pieces[:, width:]
        return np.concatenate([fixed + slope * np.maximum(at / n, whole), all_fixed + slope * at], axis=1)

    def _side(self, share: Array) -> tuple[Array, Array]:
        """The side of the roofline that is higher at these shares of a rank (J,): fixed and slope (L, J)."""
        first, second = (f + s * share for f, s in zip(self.fixed, self.slope, strict=True))
        higher = first >= second
        return np.where(higher, self.fixed[0], self.fixed[1]), np.where(higher, self.slope[0], self.slope[1])

    def cost_ms(self, box: Box, price_s: Array) -> Array:
        """(V,): the relaxation's objective with these seconds of every line."""
        cost = self.wire + self.crossing_s(box) * MS * self.crossing
        np.add.at(cost, self.variable, self.times * price_s[self.line] * MS)
        return cost


def _through_nothing(how: int, whole: Sequence[float]) -> Line:
    """Seconds in proportion to the share."""
    nothing = (0.0,) * len(whole)
    return Line(how, True, False, (nothing, nothing), (tuple(whole), tuple(whole)), tuple(whole))


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
