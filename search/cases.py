"""The lower bound by cases: boxes of sizes (``boxes``), the worst of them split until little is gained.

    boxes := {everything}, with the bound that holds for all shares
    while the least bound of a box is below ``enough_s``: bound that box; if it has been, put both its halves in its
        place, cut where in its last solution the ranks of a part have most to do that one group deals out and that the
        box leaves open; neither is below the whole
    the least bound of all boxes holds for every plan, since every plan's sizes lie in one of them

Mostly boxes of the batch's sizes will do. Where the whole batch is on some hosts, a program may still be dealt out by
positions, or by a vocabulary, and the exchange with what is dealt out by the batch is free only where both lie alike:
to see that takes boxes of all groups that much work can be dealt out by (``find_main``), and many.

A box is bounded by the joint relaxation at weights of its own, a linear program whose objective alone changes, solved
from where it ended last. Any weights are valid. Every solution of the relaxation, of whatever box, bounds what weights
can gain from above; those are taken that promise most by the last solutions (cutting planes, as what a solution costs
is concave in the weights), and tried.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from ortools.math_opt import model_pb2, parameters_pb2

from hap.cost_models.compute import parts_seconds
from hap.fabric import Array
from hap.placement import Shard
from hap.search.boxes import Boxes
from hap.search.crossing import Box
from hap.search.flows import RADIUS, Flows
from hap.search.milp import MS
from hap.search.prices import Facts
from hap.search.protos import DUAL_STEPS, OFF, KeptSolver, Solution, fill_matrix, seeded, solve_once
from hap.search.relaxation import SAFETY, relaxation

CUTS = 30  # rounds of cutting planes for the weights of a box, ...
NEWEST = 12  # ... each with so many cuts, ...
POINTS = 30  # ... of as many solutions, the last ones
TRIES = 2  # linear programs for a box
TINY = 1e-9
WORTH = 2e-3  # of a bound: less is not looked for
SHORT_OF = 0.02  # what is enough: nearer is not looked for
BOXES = 80
PATIENCE = 20  # boxes after which the bound must have risen
MUCH = 0.1  # of all work: of groups that can deal out less it is not asked where they lie
# what ended last is feasible for another objective. Steps of the dual simplex method went on for ten minutes once
NEXT = seeded(lp_algorithm=parameters_pb2.LP_ALGORITHM_PRIMAL_SIMPLEX, presolve=OFF, iteration_limit=20_000)


class Cases:
    """The boxes of one cluster so far. ``bound_s`` is proved, and rises."""

    def __init__(self, bounds: _Bounds, known_s: float) -> None:
        self._bounds, self._numbers = bounds, itertools.count(1)
        self._found: list[float] = []  # the bound after each box
        self._heap = [_Open(known_s, 0, bounds.boxes.everything, bounds.points[-1])]

    @classmethod
    def of(cls, facts: Facts, known_s: float, *, alone: bool) -> Cases | None:
        """Of the batch ``alone``, or of other groups, too. None where the batch cannot be dealt out, there is one
        device, or the solver gives up."""
        assert facts.batches.count == 1, "boxes price every conversion whole"
        batch = find_batch(facts)
        if batch is None or facts.cluster.world_size == 1:
            return None
        relaxed = relaxation(facts)
        shared = find_boxed(facts, facts.colours[RADIUS])
        if relaxed.seconds is None or batch[0] not in shared:
            return None
        others = [] if alone else [group for group in find_main(facts, shared) if group != batch[0]]
        bounds = _Bounds(Boxes(facts, relaxed, (batch, *((group, shared[group]) for group in others))))
        return cls(bounds, known_s) if bounds.points else None  # the solver may have given up

    @property
    def bound_s(self) -> float:
        return self._heap[0].bound_s

    def raised_s(self, enough_s: float, *, most: int = BOXES) -> float:
        """The bound after at most ``most`` boxes, those of earlier calls among them; no more than ``SHORT_OF`` below
        ``enough_s`` is looked for, and no longer than it rises."""
        found = self._found
        while len(found) < most and self.step(enough_s):
            found.append(self.bound_s)
            if len(found) > PATIENCE and found[-1] < found[-PATIENCE] * (1 + WORTH):
                break
        return self.bound_s

    def step(self, enough_s: float) -> bool:
        """The worst box is bounded. False where it is near enough already, or nothing is left to be split."""
        enough_s *= 1 - SHORT_OF
        while self.bound_s < enough_s:
            known_s, _, box, point = self._heap[0]
            if point is None:
                bound_s, point = self._bounds.bound_s(box, known_s, enough_s)
                heapq.heapreplace(self._heap, _Open(bound_s, next(self._numbers), box, point))
                return True
            halves = self._bounds.halves(box, point)
            if not halves:
                return False
            heapq.heappop(self._heap)
            for half in halves:
                heapq.heappush(self._heap, _Open(known_s, next(self._numbers), half, None))
        return False


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


def find_boxed(facts: Facts, types: Mapping[str, int]) -> dict[str, int]:
    """Those of ``find_shared`` that mean the same for all values of a class, too, whose conversions the relaxation
    counts together: they are priced by the groups of the first."""
    flows, apart = Flows.of(facts), set[str]()
    for one, *others in flows.reads():
        for pairs in (zip(flows.ends(other), flows.ends(one), strict=True) for other in others):
            for p, q in pairs:
                if isinstance(p, Shard) and isinstance(q, Shard) and p.group != q.group:
                    apart |= {p.group, q.group}
    return {group: n for group, n in find_shared(facts, types).items() if group not in apart}


def find_main(facts: Facts, shared: Iterable[str]) -> list[str]:
    """Those of the groups by which at least ``MUCH`` of all work can be dealt out, most first."""
    device, possible, total_s = facts.cluster.devices[0], dict.fromkeys(shared, 0.0), 0.0
    for node in facts.graph.nodes:
        if node.is_source:
            continue
        options = [facts.parts(node.name, option) for option in facts.candidates[node.name]]
        seconds = parts_seconds(options[0], 1.0, device)
        total_s += seconds
        for group in {p.group: None for p in options}:
            if group in possible:
                possible[group] += seconds
    found = [group for group, seconds in possible.items() if seconds >= MUCH * total_s]
    return sorted(found, key=lambda group: -possible[group])


class _Point(NamedTuple):
    """A solution of the relaxation: how often each line is paid for (L,), seconds of what no share changes, bytes that
    cross between the groups of every pair (P,)."""

    times: Array
    wire_s: float
    crossing_bytes: Array


class _Open(NamedTuple):
    """A box that is looked at next, if its bound is the least: ``point`` is a solution in it, where it was solved."""

    bound_s: float
    number: int
    box: Box
    point: _Point | None


class _Bounds:
    """Of boxes."""

    def __init__(self, boxes: Boxes) -> None:
        self.boxes, self.parts, self.n = boxes, boxes.parts, boxes.ranks
        self.solver = KeptSolver(boxes.relaxed.program())  # of its own: what it ends with is what comes next
        self.points: list[_Point] = []
        self.sets = boxes.other + 1  # of weights: for every group that has boxes, and for all others
        self.each = np.concatenate([np.ones_like(self.n), self.n])  # ranks that a weight is for
        self.usable = np.concatenate([np.ones(len(self.n), dtype=bool), self.n > 1])
        alike = np.append(np.ones_like(self.n), np.zeros_like(self.n))  # the busiest rank of every part
        self.start: Array = np.tile(alike / (alike @ self.each), self.sets)
        self.often = np.bincount(boxes.line, weights=boxes.times, minlength=len(boxes.how))  # if all were chosen
        self._remember(self.solver.solve(DUAL_STEPS, start=boxes.relaxed.solver.basis))

    # -- boxes -------------------------------------------------------------------------------------------------------

    def halves(self, box: Box, point: _Point) -> list[Box]:
        """Both halves of a box, as small as the sum of all parts lets them be; nothing where no time is left open."""
        spent = self._spent(point)
        open_s = np.array([(g.high - g.low) * own for g, own in zip(self.boxes.fractions(box), spent, strict=True)])
        k, i = (int(at) for at in np.unravel_index(open_s.argmax(), open_s.shape))
        if open_s[k, i] <= 0 or box.high[k][i] == box.low[k][i]:
            return []
        low, high = box.low[k], box.high[k]
        middle = (low[i] + high[i]) // 2
        rows = (low, (*high[:i], middle, *high[i + 1 :])), ((*low[:i], middle + 1, *low[i + 1 :]), high)
        halves = [self.tightened(box, k, *row) for row in rows]
        return [half for half in halves if half is not None]

    def _spent(self, point: _Point) -> list[Array]:
        """By the ranks of every part (J,), for what each group deals out in a solution, if all of it were theirs; where
        the batch alone has boxes, for all that it may deal out."""
        groups = [self.boxes.how == k for k in range(self.boxes.other)]
        times = self.often if len(groups) == 1 else point.times
        return [times[of] @ self.boxes.whole[of] / self.n for of in groups]

    def tightened(self, box: Box, k: int, low: tuple[int, ...], high: tuple[int, ...]) -> Box | None:
        """The vectors of ``box`` whose group k is between these, in the smallest box; None if there are none."""
        least, most = list(low), list(high)
        before = None
        while before != (least, most):
            before = (list(least), list(most))
            if k == 0:
                self._most(least, most)
            atoms = self.boxes.atoms[k]
            for j in range(len(self.n)):
                least[j] = max(least[j], atoms - (sum(most) - most[j]))
                most[j] = min(most[j], atoms - (sum(least) - least[j]))
            if any(down > up for down, up in zip(least, most, strict=True)):
                return None
        return Box(*((*side[:k], tuple(own), *side[k + 1 :]) for side, own in zip(box, (least, most), strict=True)))

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

    def bound_s(self, box: Box, known_s: float, enough_s: float) -> tuple[float, _Point]:
        """Of all plans whose sizes lie in the box, for which ``known_s`` is proved, and a solution, in it where one is
        found. More than ``enough_s`` is not asked for."""
        best_s, point, cuts = known_s, self.points[-1], list[Array]()
        for number in range(TRIES):
            self.start, promised_s = self.weights(box, cuts)
            if number and promised_s <= best_s * (1 + WORTH):
                break
            price = self.boxes.coefficients(box, self.start) @ self.start
            self.solver.minimise(self.boxes.cost_ms(box, price))
            solved = self.solver.solve(NEXT)
            if solved is None or not solved.is_optimal:
                break
            self._remember(solved)
            found_s = solved.bound / MS * (1 - SAFETY)
            if number == 0 or found_s > best_s:
                best_s, point = max(best_s, found_s), self.points[-1]
            if best_s >= enough_s:
                break
        return best_s, point

    def _remember(self, solved: Solution | None) -> None:
        if solved is not None and solved.is_optimal:
            x, boxes = solved.values, self.boxes
            paid = boxes.times * x[boxes.variable]
            times: Array = np.bincount(boxes.line, weights=paid, minlength=len(boxes.how)).astype(np.float64)
            self.points.append(_Point(times, float(boxes.wire @ x) / MS, boxes.crossing @ x))

    def weights(self, box: Box, cuts: list[Array]) -> tuple[Array, float]:
        """Weights (S 2 J,) under which the last solutions cost most, at most as much as the second figure says.
        ``cuts``: what was found out about the box."""
        crossing_s, points = self.boxes.crossing_s(box), self.points[-POINTS:]
        fixed = [p.wire_s + float(p.crossing_bytes @ crossing_s) for p in points]
        every = np.array([p.times for p in points])
        tried, best, best_s, promised_s = self.start, self.start, -np.inf, np.inf
        for _ in range(CUTS):
            slopes = every @ self.boxes.coefficients(box, tried)
            seconds = slopes @ tried + fixed
            if seconds.min() > best_s:
                best, best_s = tried, float(seconds.min())
            cuts += [np.append(slopes[at], fixed[at]) for at in seconds.argsort(kind="stable")[:NEWEST]]
            found = self._master(np.array(cuts), self.boxes.restricted(box))
            if found is None:
                break
            ahead, promised_s = found
            if promised_s <= best_s * (1 + WORTH / 2):
                break
            tried = (best + ahead) / 2  # the best that the cuts allow is often far off
        return best, promised_s

    def _master(self, cuts: Array, groups: Sequence[int]) -> tuple[Array, float] | None:
        """Weights that make the least of the cuts (K, W + 1), the last column constant, largest, and that least; None
        if the solver ends without them for want of precision. These groups have sets of their own, all others one."""
        by_set = cuts[:, :-1].reshape(len(cuts), self.sets, -1)
        own = [by_set[:, k] for k in groups]
        own.append(by_set[:, [k for k in range(self.sets) if k not in groups]].sum(axis=1))
        usable = np.tile(self.usable, len(own))
        slopes, constant = np.concatenate(own, axis=1)[:, usable] * MS, cuts[:, -1] * MS
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
        proto.linear_constraints.ids.extend(range(k + len(own)))
        proto.linear_constraints.lower_bounds.extend([*[1.0] * len(own), *(-constant).tolist()])
        proto.linear_constraints.upper_bounds.extend([*[1.0] * len(own), *[np.inf] * k])
        sums = np.kron(np.eye(len(own)), self.each)[:, usable]  # every set adds up to one
        ones = np.append(sums, np.zeros((len(own), 1)), axis=1)
        fill_matrix(proto, [], np.concatenate([ones, np.append(slopes, np.full((k, 1), -1.0), axis=1)]), 0)
        solved = solve_once(proto)
        if solved is None:
            return None
        found = np.zeros(len(usable))
        found[usable] = np.maximum(0.0, solved.values[:w])
        sets = found.reshape(len(own), -1)
        sets = sets / (sets @ self.each)[:, None]
        every = np.repeat(sets[-1:], self.sets, axis=0)
        every[list(groups)] = sets[:-1]
        return every.ravel(), solved.objective / MS
