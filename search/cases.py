"""The lower bound by cases: boxes of the batch's sizes (``boxes``), the worst of them split until little is gained.

    boxes := {everything}, with the bound that holds for all shares
    while the least bound of a box is below ``enough_s``: split that box along the part whose ranks' time it leaves most
        open; bound both halves, neither below the whole
    the least bound of all boxes holds for every plan, since every plan's sizes lie in one of them

A box is bounded by the joint relaxation at weights of its own, a linear program whose objective alone changes, solved
from where it ended last. Any weights are valid. Every solution of the relaxation, of whatever box, bounds what weights
can gain from above; those are taken that promise most by all solutions so far (cutting planes, as what a solution
costs is concave in the weights), and tried.
"""

from __future__ import annotations

import heapq
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
SPLITS = 12  # of boxes
PATIENCE = 4  # splits after which the bound must have risen


def bound_by_cases(facts: Facts, known_s: float, enough_s: float, *, most: int = SPLITS) -> float:
    """Seconds that every plan takes at least: ``known_s``, which is proved, or more, after at most ``most`` splits; no
    more than ``enough_s`` is looked for, and no longer than it rises."""
    batch = find_batch(facts)
    if batch is None or facts.cluster.world_size == 1:
        return known_s
    relaxed = Relaxation(facts, best_weights(make_bound(facts)), crowded=False)
    search = _Cases(relaxed, Boxes(facts, relaxed, *batch))
    heap = [(known_s, 0, search.boxes.everything)]
    for split in range(1, most + 1):
        least_s, _, box = heap[0]
        halves = search.halves(box)
        if least_s >= enough_s or not halves or (split > PATIENCE and least_s < known_s * (1 + WORTH)):
            break
        heapq.heappop(heap)
        for side, half in enumerate(halves):
            heapq.heappush(heap, (max(least_s, search.bound_s(half, enough_s)), 2 * split + side, half))
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


class _Point(NamedTuple):
    """A solution of the relaxation: how often each line is paid for (L,), seconds of what no share changes, bytes that
    cross between the batch's shards and others."""

    times: Array
    wire_s: float
    crossing_bytes: float


class _Cases:
    def __init__(self, relaxed: Relaxation, boxes: Boxes) -> None:
        self.boxes, self.parts, self.n = boxes, boxes.parts, boxes.ranks
        self.solver = KeptSolver(relaxed.program())
        self.points: list[_Point] = []
        alone = boxes.whole[boxes.how == BATCH].sum(axis=0)
        self.rank_s = alone / self.n  # for the batch on each part alone, of its ranks
        self.each = np.concatenate([np.ones_like(self.n), self.n])  # ranks that a weight is for
        self.usable = np.concatenate([np.ones(len(self.n), dtype=bool), self.n > 1])
        self._remember(self.solver.solve(seeded()))

    # -- boxes -------------------------------------------------------------------------------------------------------

    def halves(self, box: Box) -> list[Box]:
        """Both halves of a box, as small as the sum of all parts lets them be; nothing for a single point."""
        open_s = [(up - down) * s for down, up, s in zip(*box, self.rank_s.tolist(), strict=True)]
        j = max(range(len(open_s)), key=lambda i: open_s[i])
        if box.high[j] == box.low[j]:
            return []
        middle = (box.low[j] + box.high[j]) // 2
        lower = Box(box.low, (*box.high[:j], middle, *box.high[j + 1 :]))
        upper = Box((*box.low[:j], middle + 1, *box.low[j + 1 :]), box.high)
        return [half for half in (self.tightened(lower), self.tightened(upper)) if half is not None]

    def tightened(self, box: Box) -> Box | None:
        """The same vectors in the smallest box; None if there are none."""
        low, high, atoms = list(box.low), list(box.high), self.boxes.atoms
        before = None
        while before != (low, high):
            before = (list(low), list(high))
            self._most(low, high)
            for j in range(len(low)):
                low[j] = max(low[j], atoms - sum(high) + high[j])
                high[j] = min(high[j], atoms - sum(low) + low[j])
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
            self.points.append(_Point(times, float(boxes.wire @ x) / MS, float(boxes.crossing @ x)))

    def weights(self, box: Box) -> tuple[Array, float]:
        """Weights (2 J,) under which all solutions so far cost most, at most as much as the second figure says."""
        fixed = [p.wire_s + p.crossing_bytes * self.boxes.crossing_s(box) for p in self.points]
        every = np.array([p.times for p in self.points])
        tried = np.where(self.usable & (np.arange(len(self.each)) < len(self.n)), 1.0, 0.0)
        tried /= tried @ self.each
        best, best_s, promised_s, cuts = tried, -np.inf, np.inf, list[Array]()
        for _ in range(CUTS):
            slopes = every @ self.boxes.coefficients(box, tried)
            seconds = slopes @ tried + fixed
            if seconds.min() > best_s:
                best, best_s = tried, float(seconds.min())
            cuts += [np.append(slope, constant) for slope, constant in zip(slopes, fixed, strict=True)]
            tried, promised_s = self._master(np.array(cuts))
            if promised_s <= best_s * (1 + WORTH / 4):
                break
        return best, promised_s

    def _master(self, cuts: Array) -> tuple[Array, float]:
        """Weights that make the least of the cuts (K, W + 1), the last column constant, largest, and that least."""
        slopes, constant = cuts[:, :-1][:, self.usable] * MS, cuts[:, -1] * MS
        k, w = slopes.shape
        proto = model_pb2.ModelProto(name="weights")
        proto.variables.ids.extend(range(w + 1))
        proto.variables.lower_bounds.extend([0.0] * (w + 1))
        proto.variables.upper_bounds.extend([np.inf] * (w + 1))
        proto.variables.integers.extend([False] * (w + 1))
        proto.objective.maximize = True
        proto.objective.linear_coefficients.ids.append(w)
        proto.objective.linear_coefficients.values.append(1.0)
        proto.linear_constraints.ids.extend(range(k + 1))
        proto.linear_constraints.lower_bounds.extend([1.0, *(-constant).tolist()])
        proto.linear_constraints.upper_bounds.extend([1.0] + [np.inf] * k)
        sums = np.append(self.each[self.usable], 0.0)
        fill_matrix(proto, [], np.concatenate([[sums], np.append(slopes, np.full((k, 1), -1.0), axis=1)]), 0)
        solved = solve_once(proto)
        assert solved is not None, "weights exist"
        found = np.zeros(len(self.each))
        found[self.usable] = np.maximum(0.0, solved.values[:w])
        return found / (found @ self.each), solved.objective / MS
