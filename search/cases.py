"""The lower bound by cases: boxes of sizes (``boxes``), the worst of them split until little is gained.

    boxes := {everything}, with the bound that holds for all shares
    while the least bound of a box is below ``enough_s``: split that box along the group and the part whose ranks' time
        it leaves most open, by the calls that its solution deals out by the group; bound both halves, neither below
        the whole
    the least bound of all boxes holds for every plan, since every plan's sizes lie in one of them

There are boxes of the batch's sizes and, if more ``groups`` are asked for, of those by which the relaxation deals out
most where the batch is dear (``find_dealt``): in a transformer positions and the vocabulary, which with exchanges as
cheap as the relaxation's take the batch's place. With more groups a bound ends higher, but needs many more boxes.

A box is bounded by the joint relaxation at weights of its own, a linear program whose objective alone changes, solved
from where it ended last. Any weights are valid. Every solution of the relaxation, of whatever box, bounds what weights
can gain from above; those are taken that promise most by all solutions so far (cutting planes, as what a solution
costs is concave in the weights), and tried.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from ortools.math_opt import model_pb2

from hap.fabric import Array
from hap.placement import Shard
from hap.search.bound import best_weights, make_bound
from hap.search.boxes import BATCH, Box, Boxes
from hap.search.milp import MS
from hap.search.prices import Facts
from hap.search.protos import DUAL, OFF, KeptSolver, Solution, fill_matrix, seeded, solve_once
from hap.search.relaxation import SAFETY, Relaxation

CUTS = 30  # rounds of cutting planes for the weights of a box
TRIES = 3  # linear programs for a box
WORTH = 2e-3  # of a bound: less is not looked for
SPLITS = 40  # of boxes
DEAR = 1.5  # times what a group's calls take: to see what else calls can be dealt out by
MUCH = 0.15  # of what all calls take: what a group that gets boxes deals out at least
NEAR = 0.02  # of what is enough: nearer is not looked for
PATIENCE = 9  # splits after which the bound must have risen


def bound_by_cases(facts: Facts, known_s: float, enough_s: float, *, most: int = SPLITS, groups: int = 1) -> float:
    """Seconds that every plan takes at least: ``known_s``, which is proved, or more, after at most ``most`` splits of
    boxes of at most so many ``groups``; no more than ``NEAR`` below ``enough_s`` is looked for, and no longer than it
    rises."""
    enough_s *= 1 - NEAR
    batch = find_batch(facts)
    if batch is None or facts.cluster.world_size == 1 or known_s >= enough_s:
        return known_s
    relaxed = Relaxation(facts, best_weights(make_bound(facts)), crowded=False)
    if batch[0] not in find_shared(facts, relaxed.fine):
        return known_s
    search = _Cases.begin(relaxed, batch, groups)
    if not search.spent:
        return known_s
    heap, leasts_s = [(known_s, 0, search.boxes.everything, search.spent[-1])], list[float]()
    for split in range(1, most + 1):
        least_s, _, box, spent = heap[0]
        leasts_s.append(least_s)
        halves = search.halves(box, spent)
        if least_s >= enough_s or not halves or (split > PATIENCE and least_s < leasts_s[-PATIENCE] * (1 + WORTH)):
            break
        heapq.heappop(heap)
        for side, half in enumerate(halves):
            half_s = max(least_s, search.bound_s(half, enough_s))
            heapq.heappush(heap, (half_s, 2 * split + side, half, search.spent[-1]))
    return heap[0][0]


def find_batch(facts: Facts) -> tuple[str, int] | None:
    """(group, atoms) of the inputs' shards that most calls can be dealt out by. None if inputs cannot be dealt out."""
    sources = [facts.candidates[n.name] for n in facts.graph.sources("input")]
    groups = {p.group: p.n for options in sources for s in options if isinstance(p := s.outputs[0], Shard)}
    calls = dict.fromkeys(groups, 0)
    for options in facts.candidates.values():
        for group in {p.group: None for s in options for p in s.outputs if isinstance(p, Shard)}:
            if group in calls:
                calls[group] += 1
    best = max(calls, key=lambda g: calls[g], default=None)
    return None if best is None else (best, groups[best])


def find_dealt(
    relaxed: Relaxation, solver: KeptSolver, batch: tuple[str, int], groups: int
) -> tuple[tuple[str, int], ...]:
    """(group, atoms) of those that get boxes: the batch's, and as long as there are fewer than ``groups`` the one by
    which the relaxation deals out most, at least ``MUCH``, where these are dear."""
    if groups == 1:
        return (batch,)
    facts, group_of = relaxed.facts, dict[int, str]()
    for variable, _, name, option in relaxed.options:
        if not facts.graph.by_name[name].is_source:
            group = facts.parts(name, facts.candidates[name][option]).group
            if group is not None:
                group_of[variable] = group
    known, dealt = find_shared(facts, relaxed.fine), [batch]
    while len(dealt) < groups:
        cost, taken = np.array(relaxed.cost), [group for group, _ in dealt]
        cost[[v for v, group in group_of.items() if group in taken]] *= DEAR
        solver.minimise(cost)
        solved = solver.solve(seeded(lp_algorithm=DUAL, presolve=OFF))
        if solved is None or not solved.is_optimal:
            break
        spent = dict.fromkeys(group_of.values(), 0.0)
        for variable, group in group_of.items():
            spent[group] += float(cost[variable] * solved.values[variable])
        others = [g for g in spent if g in known and g not in taken and spent[g] >= MUCH * sum(spent.values())]
        if not others:
            break
        best = max(others, key=lambda g: spent[g])
        dealt.append((best, known[best]))
    return tuple(dealt)


def find_shared(facts: Facts, types: Mapping[str, int]) -> dict[str, int]:
    """The groups, with their atoms, that mean the same for all nodes of a type, whose options the relaxation counts
    together: not those of which every layer has one of its own."""
    apart, found = set[str](), dict[str, int]()
    firsts: dict[int, str] = {}
    for node in facts.graph.nodes:
        first = facts.candidates[firsts.setdefault(types[node.name], node.name)]
        for own, same in zip(facts.candidates[node.name], first, strict=True):
            pairs = zip((*own.inputs, *own.outputs), (*same.inputs, *same.outputs), strict=True)
            for p, q in ((p, q) for p, q in pairs if isinstance(p, Shard) and isinstance(q, Shard)):
                found[p.group] = p.n
                if p.group != q.group:
                    apart |= {p.group, q.group}
    return {group: n for group, n in found.items() if group not in apart}


class _Point(NamedTuple):
    """A solution of the relaxation: how often each line is paid for (L,), seconds of what no share changes, bytes that
    cross between shards, of every kind."""

    times: Array
    wire_s: float
    crossing_bytes: Array


class _Cases:
    def __init__(self, boxes: Boxes, solver: KeptSolver) -> None:
        self.boxes, self.parts, self.n, self.solver = boxes, boxes.parts, boxes.ranks, solver
        self.points: list[_Point] = []
        self.spent: list[Array] = []  # of every point (G, J): see ``_spent``
        self.each = np.concatenate([np.ones_like(self.n), self.n])  # ranks that a weight is for
        self.usable = np.tile(np.concatenate([np.ones(len(self.n), dtype=bool), self.n > 1]), boxes.sets)
        self._remember(self.solver.solve(seeded(lp_algorithm=DUAL, presolve=OFF)))

    @classmethod
    def begin(cls, relaxed: Relaxation, batch: tuple[str, int], groups: int) -> _Cases:
        solver = KeptSolver(relaxed.program())
        solver.solve(seeded(lp_algorithm=DUAL, presolve=OFF))
        return cls(Boxes(relaxed.facts, relaxed, find_dealt(relaxed, solver, batch, groups)), solver)

    # -- boxes -------------------------------------------------------------------------------------------------------

    def halves(self, box: Box, spent: Array) -> list[Box]:
        """Both halves of a box, as small as the sum of all parts lets them be; nothing where no time is left open.
        ``spent``: seconds that every part would need for all of a group's calls (G, J)."""
        low, high = self.boxes.fractions(box)
        open_s = ((high - low) * spent).ravel()
        i = int(open_s.argmax())
        if open_s[i] <= 0 or box.high[i] == box.low[i]:
            return []
        middle = (box.low[i] + box.high[i]) // 2
        lower = Box(box.low, (*box.high[:i], middle, *box.high[i + 1 :]))
        upper = Box((*box.low[:i], middle + 1, *box.low[i + 1 :]), box.high)
        return [half for half in (self.tightened(lower), self.tightened(upper)) if half is not None]

    def tightened(self, box: Box) -> Box | None:
        """The same vectors in the smallest box; None if there are none."""
        low, high = list(box.low), list(box.high)
        before = None
        while before != (low, high):
            before = (list(low), list(high))
            self._most(low, high)
            for g, atoms in enumerate(self.boxes.atoms.tolist()):
                own = range(g * len(self.n), (g + 1) * len(self.n))
                for j in own:
                    low[j] = max(low[j], atoms - sum(high[i] for i in own if i != j))
                    high[j] = min(high[j], atoms - sum(low[i] for i in own if i != j))
            if any(down > up for down, up in zip(low, high, strict=True)):
                return None
        return Box(tuple(low), tuple(high))

    def _most(self, low: list[int], high: list[int]) -> None:
        """The host with most of the batch has no less than the mean of the others of its kind."""
        for kind in dict.fromkeys(p.kind for p in self.parts):
            first = [j for j, p in enumerate(self.parts) if p.kind == kind and p.most]
            others = [j for j, p in enumerate(self.parts) if p.kind == kind and not p.most]
            if len(first) == len(others) == 1:
                (i,), (j,) = first, others
                low[i] = max(low[i], -(-low[j] // self.parts[j].hosts))
                high[j] = min(high[j], high[i] * self.parts[j].hosts)

    # -- bounds ------------------------------------------------------------------------------------------------------

    def bound_s(self, box: Box, enough_s: float) -> float:
        """Of all plans whose sizes lie in the box."""
        best_s = 0.0
        for _ in range(TRIES):
            weights, promised_s = self.weights(box)
            price = self.boxes.coefficients(box, weights) @ weights
            self.solver.minimise(self.boxes.cost_ms(box, price))
            solved = self.solver.solve(seeded(lp_algorithm=DUAL, presolve=OFF))
            if solved is None or not solved.is_optimal:
                break
            best_s = max(best_s, solved.bound / MS * (1 - SAFETY))
            self._remember(solved)
            if best_s >= enough_s or promised_s <= best_s * (1 + WORTH):
                break
        return best_s

    def _remember(self, solved: Solution | None) -> None:
        if solved is not None and solved.is_optimal:
            x, boxes = solved.values, self.boxes
            paid = boxes.times * x[boxes.variable]
            times: Array = np.bincount(boxes.line, weights=paid, minlength=len(boxes.how)).astype(np.float64)
            self.points.append(_Point(times, float(boxes.wire @ x) / MS, boxes.crossing @ x))
            self.spent.append(self._spent(times))

    def _spent(self, times: Array) -> Array:
        """Seconds that the ranks of every part would need for all that is dealt out by a group (G, J)."""
        boxes = self.boxes
        groups = [boxes.how == BATCH + g for g in range(len(boxes.dealt))]
        return np.array([times[of] @ boxes.whole[of] / self.n for of in groups])

    def weights(self, box: Box) -> tuple[Array, float]:
        """Weights (S 2 J,) under which all solutions so far cost most, at most as much as the second figure says."""
        fixed = [p.wire_s + float(p.crossing_bytes @ self.boxes.crossing_s(box)) for p in self.points]
        every = np.array([p.times for p in self.points])
        alike = np.append(np.ones_like(self.n), np.zeros_like(self.n))  # the busiest rank of every part
        tried = np.tile(alike / (alike @ self.each), self.boxes.sets)
        best, best_s, promised_s, cuts = tried, -np.inf, np.inf, list[Array]()
        for _ in range(CUTS):
            slopes = every @ self.boxes.coefficients(box, tried)
            seconds = slopes @ tried + fixed
            if seconds.min() > best_s:
                best, best_s = tried, float(seconds.min())
            cuts += [np.append(slope, constant) for slope, constant in zip(slopes, fixed, strict=True)]
            found = self._master(np.array(cuts))
            if found is None:
                break
            tried, promised_s = found
            if promised_s <= best_s * (1 + WORTH / 4):
                break
        return best, promised_s

    def _master(self, cuts: Array) -> tuple[Array, float] | None:
        """Weights that make the least of the cuts (K, W + 1), the last column constant, largest, and that least; None
        if the solver ends without them for want of precision."""
        slopes, constant = cuts[:, :-1][:, self.usable] * MS, cuts[:, -1] * MS
        (k, w), sets = slopes.shape, self.boxes.sets
        proto = model_pb2.ModelProto(name="weights")
        proto.variables.ids.extend(range(w + 1))
        proto.variables.lower_bounds.extend([0.0] * (w + 1))
        proto.variables.upper_bounds.extend([np.inf] * (w + 1))
        proto.variables.integers.extend([False] * (w + 1))
        proto.objective.maximize = True
        proto.objective.linear_coefficients.ids.append(w)
        proto.objective.linear_coefficients.values.append(1.0)
        proto.linear_constraints.ids.extend(range(k + sets))
        proto.linear_constraints.lower_bounds.extend([*[1.0] * sets, *(-constant).tolist()])
        proto.linear_constraints.upper_bounds.extend([*[1.0] * sets, *[np.inf] * k])
        sums = np.kron(np.eye(sets), self.each)[:, self.usable]  # every set adds up to one
        ones = np.append(sums, np.zeros((sets, 1)), axis=1)
        fill_matrix(proto, [], np.concatenate([ones, np.append(slopes, np.full((k, 1), -1.0), axis=1)]), 0)
        solved = solve_once(proto)
        if solved is None:
            return None
        found = np.zeros(len(self.usable))
        found[self.usable] = np.maximum(0.0, solved.values[:w])
        by_set = found.reshape(sets, -1)
        return (by_set / (by_set @ self.each)[:, None]).ravel(), solved.objective / MS
