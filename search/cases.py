"""The lower bound by cases: boxes of sizes (``boxes``), the worst of them split until little is gained.

    boxes := {everything}, with the bound that holds for all shares
    while the least bound of a box is below ``enough_s``: split that box along the part whose ranks' time for all that
        the batch can deal out it leaves most open; bound both halves, neither below the whole
    the least bound of all boxes holds for every plan, since every plan's sizes lie in one of them

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
from hap.search.boxes import BATCH, SETS, Box, Boxes
from hap.search.milp import MS
from hap.search.prices import Facts
from hap.search.protos import DUAL, OFF, KeptSolver, Solution, fill_matrix, seeded, solve_once
from hap.search.relaxation import SAFETY, relaxation

CUTS = 30  # rounds of cutting planes for the weights of a box
TRIES = 2  # linear programs for a box
TINY = 1e-9
WORTH = 2e-3  # of a bound: less is not looked for
SPLITS = 40  # of boxes
SHORT_OF = 0.02  # what is enough: nearer is not looked for
PATIENCE = 10  # splits after which the bound must have risen


def bound_by_cases(facts: Facts, known_s: float, enough_s: float, *, most: int = SPLITS) -> float:
    """Seconds that every plan takes at least: ``known_s``, which is proved, or more, after at most ``most`` splits of
    boxes; no more than ``SHORT_OF`` below ``enough_s`` is looked for, and no longer than it rises."""
    enough_s *= 1 - SHORT_OF
    batch = find_batch(facts)
    if batch is None or facts.cluster.world_size == 1 or known_s >= enough_s:
        return known_s
    relaxed = relaxation(facts)
    if relaxed.seconds is None or batch[0] not in find_shared(facts, relaxed.fine):
        return known_s
    search = _Cases(Boxes(facts, relaxed, batch), relaxed.solver)
    heap, leasts_s = [(known_s, 0, search.boxes.everything)], list[float]()
    for split in range(1, most + 1):
        least_s, _, box = heap[0]
        leasts_s.append(least_s)
        halves = search.halves(box)
        if least_s >= enough_s or not halves or (split > PATIENCE and least_s < leasts_s[-PATIENCE] * (1 + WORTH)):
            break
        heapq.heappop(heap)
        for side, half in enumerate(halves):
            half_s = search.bound_s(half, least_s, enough_s)
            heapq.heappush(heap, (half_s, 2 * split + side, half))
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
    cross between the batch and other groups."""

    times: Array
    wire_s: float
    crossing_bytes: float


class _Cases:
    def __init__(self, boxes: Boxes, solver: KeptSolver) -> None:
        self.boxes, self.parts, self.n, self.solver = boxes, boxes.parts, boxes.ranks, solver
        self.points: list[_Point] = []
        self.each = np.concatenate([np.ones_like(self.n), self.n])  # ranks that a weight is for
        self.usable = np.tile(np.concatenate([np.ones(len(self.n), dtype=bool), self.n > 1]), SETS)
        alike = np.append(np.ones_like(self.n), np.zeros_like(self.n))  # the busiest rank of every part
        self.start: Array = np.tile(alike / (alike @ self.each), SETS)
        dealt = boxes.how == BATCH
        often = np.bincount(boxes.line, weights=boxes.times, minlength=len(dealt))[dealt]
        self.spent: Array = often @ boxes.whole[dealt] / self.n  # by every part (J,), for all that the batch deals out
        self._remember(self.solver.solve(seeded(lp_algorithm=DUAL, presolve=OFF)))

    # -- boxes -------------------------------------------------------------------------------------------------------

    def halves(self, box: Box) -> list[Box]:
        """Both halves of a box, as small as the sum of all parts lets them be; nothing where no time is left open."""
        low, high = self.boxes.fractions(box)
        open_s = (high - low) * self.spent
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
            samples = self.boxes.samples
            for j in range(len(self.n)):
                low[j] = max(low[j], samples - (sum(high) - high[j]))
                high[j] = min(high[j], samples - (sum(low) - low[j]))
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

    def bound_s(self, box: Box, known_s: float, enough_s: float) -> float:
        """Of all plans whose sizes lie in the box, for which ``known_s`` is proved. More than ``enough_s`` is not asked
        for."""
        best_s, cuts = known_s, list[Array]()
        for _ in range(TRIES):
            self.start, promised_s = self.weights(box, cuts)
            if promised_s <= best_s * (1 + WORTH):
                break
            price = self.boxes.coefficients(box, self.start) @ self.start
            self.solver.minimise(self.boxes.cost_ms(box, price))
            solved = self.solver.solve(seeded(lp_algorithm=DUAL, presolve=OFF))
            if solved is None or not solved.is_optimal:
                break
            best_s = max(best_s, solved.bound / MS * (1 - SAFETY))
            self._remember(solved)
            if best_s >= enough_s:
                break
        return best_s

    def _remember(self, solved: Solution | None) -> None:
        if solved is not None and solved.is_optimal:
            x, boxes = solved.values, self.boxes
            paid = boxes.times * x[boxes.variable]
            times: Array = np.bincount(boxes.line, weights=paid, minlength=len(boxes.how)).astype(np.float64)
            self.points.append(_Point(times, float(boxes.wire @ x) / MS, float(boxes.crossing @ x)))

    def weights(self, box: Box, cuts: list[Array]) -> tuple[Array, float]:
        """Weights (S 2 J,) under which all solutions so far cost most, at most as much as the second figure says.
        ``cuts``: what was found out about the box."""
        crossing_s = self.boxes.crossing_s(box)
        fixed = [p.wire_s + p.crossing_bytes * crossing_s for p in self.points]
        every = np.array([p.times for p in self.points])
        tried, best, best_s, promised_s = self.start, self.start, -np.inf, np.inf
        for _ in range(CUTS):
            slopes = every @ self.boxes.coefficients(box, tried)
            seconds = slopes @ tried + fixed
            if seconds.min() > best_s:
                best, best_s = tried, float(seconds.min())
            cuts += [np.append(slope, constant) for slope, constant in zip(slopes, fixed, strict=True)]
            found = self._master(np.array(cuts))
            if found is None:
                break
            ahead, promised_s = found
            if promised_s <= best_s * (1 + WORTH / 2):
                break
            tried = (best + ahead) / 2  # the best that the cuts allow is often far off
        return best, promised_s

    def _master(self, cuts: Array) -> tuple[Array, float] | None:
        """Weights that make the least of the cuts (K, W + 1), the last column constant, largest, and that least; None
        if the solver ends without them for want of precision."""
        slopes, constant = cuts[:, :-1][:, self.usable] * MS, cuts[:, -1] * MS
        slopes = np.where(slopes > TINY * slopes.max(), slopes, 0.0)  # the solver gives up on the very small
        k, w = slopes.shape
        proto = model_pb2.ModelProto(name="weights")
        proto.variables.ids.extend(range(w + 1))
        proto.variables.lower_bounds.extend([0.0] * (w + 1))
        proto.variables.upper_bounds.extend([np.inf] * (w + 1))
        proto.variables.integers.extend([False] * (w + 1))
        proto.objective.maximize = True
        proto.objective.linear_coefficients.ids.append(w)
        proto.objective.linear_coefficients.values.append(1.0)
        proto.linear_constraints.ids.extend(range(k + SETS))
        proto.linear_constraints.lower_bounds.extend([*[1.0] * SETS, *(-constant).tolist()])
        proto.linear_constraints.upper_bounds.extend([*[1.0] * SETS, *[np.inf] * k])
        sums = np.kron(np.eye(SETS), self.each)[:, self.usable]  # every set adds up to one
        ones = np.append(sums, np.zeros((SETS, 1)), axis=1)
        fill_matrix(proto, [], np.concatenate([ones, np.append(slopes, np.full((k, 1), -1.0), axis=1)]), 0)
        solved = solve_once(proto)
        if solved is None:
            return None
        found = np.zeros(len(self.usable))
        found[self.usable] = np.maximum(0.0, solved.values[:w])
        by_set = found.reshape(SETS, -1)
        return (by_set / (by_set @ self.each)[:, None]).ravel(), solved.objective / MS
