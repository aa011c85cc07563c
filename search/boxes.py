"""The joint bound case by case: how much of the batch, and of other groups, each host works on.

The relaxation lets every call, and every collective, have shares of its own; but a step has one vector of sizes for
every group that means the same everywhere. So the bound is proved separately for boxes that together hold all of these
vectors, and the least of their bounds holds for all (branch and bound over the boxes). Symbols: N atoms of a group; j a
*part*, the ranks of one class on the host of its kind that has most of the batch (any plan has one: alike hosts can
change names), or on the other hosts of that kind; R[j] the fraction of the group on it, of n[j] ranks; a box says
low[j] <= R[j] <= high[j] for every group that has boxes. In a box

    T >= sum_j u[j] t[chosen rank of j] + v[j] sum of t[r in j]        sum_j u[j] + n[j] v[j] = 1, u, v >= 0

for any such weights and any choice of a rank of every part, as a stage takes no less than any mean of its ranks. All
calls of one stage are to be weighed by the same ones, but every stage may have weights and a choice of its own. Those
of a path (``chain``) tell which: no two groups deal them out in one stage. So there is a set (u, v) for the stages of
every group that has a box of its own, in which the rank with most of this group is chosen, and one for all other
stages, in which the rank with most of the batch is. A call of the path is paid for with its group's set; any other call
may be in any stage, and is paid for with the set that makes it least.

Under a strategy that shards a group with boxes a rank with share m needs at least F + m s seconds (nothing without a
share, if it is idle then). If the chosen rank is the one with most of this group, or the part's only one, its m is at
least R[j] / n[j] and a whole number of atoms. If it was chosen by another group it may have less of this one than all
others, or nothing: then it needs F, or nothing at all if it is idle without a share. The ranks of a part together have
R[j] in any case, and one of them has a share where low[j] > 0. So with low[j] > 0, for a call that is idle without a
share, where K is 1 if the chosen rank is known to have most, and else 0,

    sum_r w t >= min over R in the box of sum_j u[j] K (F + s R[j] / n[j]) + v[j] (F + s R[j])           (_dealt_by)

and as in ``bound`` under all other strategies, whose shares no box restricts. The least over R, whose parts sum to
one, is found greedily. What all-to-alls between shards take at least in a box is said in ``crossing``; ``cases``
searches the boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np

from hap.conversion import collective_kind
from hap.cost_models.compute import parts_seconds
from hap.cost_models.floors import floor_line, floor_slope
from hap.fabric import Array
from hap.placement import Placement, Shard
from hap.plan import Strategy
from hap.search.chain import find_chain
from hap.search.crossing import Box, Fractions, Port, crossing_s, find_parts, find_ports
from hap.search.milp import MS
from hap.search.prices import Facts
from hap.search.relaxation import Relaxation

REPLICATED = -1  # how a strategy deals out a call, which is else the number of the group
TINY = 1e-6  # share: the side of the roofline of small shares


class Line(NamedTuple):
    """What a call takes under a strategy on the device of every part: ``fixed`` + share * ``slope`` for either side of
    the roofline (2, J), or lines below what was measured, and ``whole`` (J,) for everything. ``how``: by which group it
    is dealt out; ``idle``: a rank without a share does nothing, and one with a share takes that much of ``whole`` at
    least; ``chained``: it is of the path."""

    how: int
    idle: bool
    chained: bool
    fixed: tuple[tuple[float, ...], ...]
    slope: tuple[tuple[float, ...], ...]
    whole: tuple[float, ...]


class _Within(NamedTuple):
    """Of calls that one group deals out, of which a part has from ``low`` to ``high`` (J,), and its busiest rank no
    less than ``whole``: ``fixed`` and ``slope`` (L, J) of a rank that has a share, and the first of one that may have
    none, and of all ranks of a part."""

    low: Array
    high: Array
    whole: Array
    fixed: Array
    slope: Array
    any_fixed: Array
    all_fixed: Array


@dataclass(eq=False)
class Boxes:
    """The relaxation's prices for boxes of sizes. ``groups``: those that have boxes, the batch first, and how many
    atoms each has. All others together come after them, as ``other``."""

    facts: Facts
    relaxed: Relaxation
    groups: tuple[tuple[str, int], ...]
    _lines: dict[Line, int] = field(default_factory=dict)
    _known: dict[object, int] = field(default_factory=dict)
    _sides: dict[object, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parts = find_parts(self.facts)
        self.ranks = np.array([p.ranks for p in self.parts], dtype=np.float64)
        width = len(self.relaxed.cost)
        self.wire = np.zeros(width)  # ms of a unit of every variable that no share changes
        self.number = {name: k for k, (name, _) in enumerate(self.groups)}
        self.atoms, self.other = tuple(n for _, n in self.groups), len(self.groups)
        self.hosts = len({d.host for d in self.facts.cluster.devices})
        self.hosts = self.hosts if self.hosts > 1 else self.facts.cluster.world_size
        crossing: dict[tuple[int, int], Array] = {}  # groups -> bytes of every variable that go from one to the other
        chained = self._chained()
        entries: list[tuple[int, float, int]]
        entries = [(v, count, self._call(name, i, name in chained)) for v, count, name, i in self.relaxed.options]
        for v, each, nbytes, source, target in self.relaxed.conversions:
            kind = collective_kind(source, target)
            if kind == "slice":
                entries.append((v, 1 / each, self._slice(nbytes, source, target)))
                continue
            self.wire[v] += self.relaxed.least.seconds(kind, nbytes) * MS / each
            if kind == "all_to_all" and (pair := self._crossed(source, target)):
                crossing.setdefault(pair, np.zeros(width))[v] += nbytes / each
        self.pairs = tuple(crossing)
        self.crossing = np.array(list(crossing.values())).reshape(len(self.pairs), width)
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
        return Box(((0,) * width,) * len(self.atoms), tuple((n,) * width for n in self.atoms))

    def fractions(self, box: Box) -> list[Fractions]:
        """Of every group that has boxes."""
        pairs = zip(*box, self.atoms, strict=True)
        return [Fractions(np.array(low) / n, np.array(high) / n) for low, high, n in pairs]

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
        key += (parts.shared_bytes, parts.message_bytes, parts.idle_when_empty, chained)  # type: ignore[assignment]
        if facts.compute.is_measured:  # calls of as much work may take different times
            key += (parts.call,)  # type: ignore[assignment]
        if key not in self._known:
            devices = [p.device for p in self.parts]
            sides = [[floor_line(parts, d, at_share=share) for d in devices] for share in (TINY, 1.0)]
            idle = parts.idle_when_empty
            whole = tuple(floor_slope(parts, d) if idle else parts_seconds(parts, 1.0, d) for d in devices)
            fixed, slope = (tuple(tuple(pair[i] for pair in side) for side in sides) for i in (0, 1))
            self._known[key] = self._number(Line(how, parts.idle_when_empty, chained, fixed, slope, whole))
        return self._known[key]

    def _update(self, name: str, strategy: Strategy) -> int:
        placement, n = strategy.outputs[0], self.facts.cluster.world_size
        sharded = isinstance(placement, Shard)
        sizes = {placement.group: (placement.n,) * n} if isinstance(placement, Shard) else {}
        seconds = self.facts.update_s(name, strategy, sizes)
        whole = tuple(float(seconds[p.device.rank]) for p in self.parts)
        return self._number(_through_nothing(self.other if sharded else REPLICATED, whole))

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
        return self.number.get(group, self.other)

    def _crossed(self, source: Placement, target: Placement) -> tuple[int, int] | None:
        """Between which groups it is, of different dims; None where the boxes say nothing of it."""
        assert isinstance(source, Shard) and isinstance(target, Shard)
        pair = self._how(source.group), self._how(target.group)
        ranges = source.dim == target.dim and source.outer == target.outer
        return None if ranges or pair == (self.other, self.other) else pair

    @cached_property
    def ports(self) -> tuple[Port, ...]:
        return find_ports(self.facts, self.parts)

    # -- prices ------------------------------------------------------------------------------------------------------

    def crossing_s(self, box: Box) -> Array:
        """(P,): seconds a byte that an all-to-all between the groups of every pair takes at least."""
        if box not in self._sides:
            width = len(self.parts)
            known = [*self.fractions(box), Fractions(np.zeros(width), np.ones(width))]
            found = [crossing_s(self.ports, known[s], known[t], self.hosts) for s, t in self.pairs]
            self._sides[box] = np.array(found)
        return cast(Array, self._sides[box])

    def restricted(self, box: Box) -> tuple[int, ...]:
        """The numbers of the batch and of the groups of which not all sizes are in the box. Others are like groups that
        have no boxes."""
        pairs = enumerate(zip(*box, self.atoms, strict=True))
        return tuple(k for k, (low, high, n) in pairs if k == 0 or any(low) or min(high) < n)

    def coefficients(self, box: Box, weights: Array) -> Array:
        """(L, S 2 J): of every line, seconds per unit of every weight, at the sizes in the box that are best for these
        weights, where it is paid for with the set of its group, or with the set that makes it least."""
        groups = (*self.restricted(box), self.other)
        sets = weights.reshape(self.other + 1, -1)
        chosen = np.zeros((len(self.how), *sets.shape))
        own = sets[list(groups)]
        for (how, chained), of in self._alike(groups).items():
            if chained:
                chosen[of, how] = self._by_set(box, how, of, sets[[how]], [how])[0]
                continue
            found = self._by_set(box, how, of, own, groups)
            least = np.einsum("slw,sw->sl", found, own).argmin(axis=0)
            chosen[of, np.array(groups)[least]] = found[least, np.arange(len(of))]
        result: Array = chosen.reshape(len(self.how), -1)
        return result

    def _alike(self, groups: Sequence[int]) -> dict[tuple[int, bool], Array]:
        """Numbers of the lines, by which of these groups they are dealt out by, or the last, and whether they have the
        weights of their group."""
        key = ("alike", groups)
        if key not in self._sides:
            found: dict[tuple[int, bool], list[int]] = {}
            for number, (how, chained) in enumerate(zip(self.how.tolist(), self.chained.tolist(), strict=True)):
                by = how if how == REPLICATED or how in groups else self.other
                found.setdefault((by, chained and how != REPLICATED), []).append(number)
            self._sides[key] = {by: np.array(numbers) for by, numbers in found.items()}
        return self._sides[key]

    def _by_set(self, box: Box, how: int, of: Array, sets: Array, groups: Sequence[int]) -> Array:
        """(S, L, 2 J): the same of some lines, dealt out alike, with each of these sets of weights (u, v), which are
        for stages of these groups."""
        n, width = self.ranks, len(self.parts)
        if how == REPLICATED:
            once = np.concatenate([self.whole[of], self.whole[of] * n], axis=1)
            return np.broadcast_to(once, (len(sets), *once.shape))
        if how != self.other:
            most = np.array([k == how or (k == self.other and how == 0) for k in groups])
            return self._dealt_by(self._within(how, of, box.low[how], box.high[how]), sets, most)
        fixed, slope = self._side(of, np.full(width, 1.0 / n.sum()))
        fixed = np.where(self.idle[of, None], 0.0, fixed)
        slope = np.where(self.idle[of, None], self.whole[of], slope)
        lone = np.where(n > 1, sets[:, width:], sets[:, :width])
        cheapest = (slope * lone[:, None, :]).argmin(axis=2)
        found = np.repeat(np.concatenate([fixed, fixed * n], axis=1)[None], len(sets), axis=0)
        line, column = np.arange(len(of)), np.where(n > 1, width + np.arange(width), np.arange(width))
        for one, at in zip(found, cheapest, strict=True):
            one[line, column[at]] += slope[line, at]
        return found

    def _within(self, how: int, of: Array, low_atoms: Sequence[int], high_atoms: Sequence[int]) -> _Within:
        """Of lines that one group deals out. The same for all boxes with as much of this group."""
        key = (how, low_atoms, high_atoms, int(of[0]))
        if key not in self._sides:
            n, atoms = self.ranks, self.atoms[how]
            low, high = np.array(low_atoms) / atoms, np.array(high_atoms) / atoms
            fixed, slope = self._side(of, (low + high) / 2 / n)
            idle = self.idle[of][:, None]
            nothing = idle & (low == 0)
            chord = slope + np.divide(fixed, high, out=np.zeros_like(fixed), where=high > 0)
            fixed, slope = np.where(nothing, 0.0, fixed), np.where(nothing, chord, slope)
            whole = np.ceil(low * atoms / n - 1e-9) / atoms
            of_any, of_all = np.where(idle, 0.0, fixed), fixed * np.where(idle, 1.0, n)
            self._sides[key] = _Within(low, high, whole, fixed, slope, of_any, of_all)
        return cast(_Within, self._sides[key])

    def _dealt_by(self, within: _Within, sets: Array, most: Array) -> Array:
        """(S, L, 2 J): what these lines take at the fractions (J,) that are best for each set. ``most`` (S,): whether
        its chosen ranks are those with most of this group."""
        n, width, (low, high, whole, fixed, slope, any_fixed, all_fixed) = self.ranks, len(self.parts), within
        u, v = sets[:, None, :width], sets[:, None, width:]
        known = (most[:, None] | (n == 1))[:, None]
        of_one = slope * known
        free = np.clip(whole * n, low, high)  # so much costs the busiest rank no more than ``low`` does
        slopes = np.concatenate([v * slope, u * of_one / n + v * slope], axis=2)
        flat = slopes.reshape(-1, 2 * width)
        pieces = _dealt(flat, np.append(low, np.zeros(width)), np.append(free, high - free)).reshape(slopes.shape)
        at = pieces[..., :width] + pieces[..., width:]
        chosen = np.where(known, fixed, any_fixed) + of_one * np.maximum(at / n, whole)
        return np.concatenate([chosen, all_fixed + slope * at], axis=2)

    def _side(self, of: Array, share: Array) -> tuple[Array, Array]:
        """The side of the roofline that is higher at these shares of a rank (J,): fixed and slope (L, J)."""
        fixed, slope = self.fixed[:, of], self.slope[:, of]
        first, second = (f + s * share for f, s in zip(fixed, slope, strict=True))
        higher = first >= second
        return np.where(higher, fixed[0], fixed[1]), np.where(higher, slope[0], slope[1])

    def cost_ms(self, box: Box, price_s: Array) -> Array:
        """(V,): the relaxation's objective with these seconds of every line."""
        cost = self.wire + self.crossing_s(box) @ self.crossing * MS
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
