"""``plan_graph``: strategies and sizes together, by alternation from several starts.

One round solves the MILP for the strategies at fixed sizes (``milp``), then the LP for the shares at fixed strategies
(``ratios``), rounds them (``rounding``), and goes on while the step gets shorter. The rounds start from shares in
proportion to speed, from equal ones, from shares in proportion to memory, and from speed without each slower kind of
device. Every candidate is judged by ``evaluate``, the one truth; the best that fits in memory wins, and is then
improved by moving single atoms. Everything is limited by counts of work, never by the clock, so a plan is the same
every time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from hap.cluster import ClusterSpec
from hap.conversion import find_needs
from hap.cost_models.evaluate import Evaluation, evaluate
from hap.cost_models.memory import usable_bytes
from hap.errors import InfeasibleError
from hap.fabric import Array
from hap.placement import REPLICATE, GroupSizes, Shard, Sizes
from hap.plan import Plan, Strategy
from hap.rules.choices import Choices, replicated
from hap.search.assemble import assemble_plan, used_groups
from hap.search.classes import Classes, find_bundles, find_classes
from hap.search.infeasible import why_infeasible
from hap.search.milp import Choice, choose, make_skeleton
from hap.search.pins import Pins, pinned_candidates, pinned_sizes
from hap.search.prices import Facts
from hap.search.ratios import Shares, best_shares
from hap.search.relaxation import lower_bound
from hap.search.rounding import improve, round_shares
from hap.search.subsets import Advice, slowest_kinds, without
from hap.search.tables import Prices, Tables

Effort = Literal["quick", "normal"]


@dataclass(frozen=True)
class Limits:
    """How much work: starts, rounds per start, branch-and-bound nodes per MILP, evaluations of single moves (and
    those times nodes of the graph), and whether the estimate without barriers is asked too."""

    starts: int
    rounds: int
    nodes: int
    moves: int
    work: int
    both_estimates: bool


HASTY = Limits(1, 2, 200, 0, 0, False)  # for what a smaller cluster would do
WORTH_SAYING = 0.03  # of the step, that devices cost by taking part
MIP_GAP = 1e-4  # relative; the judge's own error is far larger
BEHIND = 1.05  # a start whose first round is this much slower than the best so far is given up
LIMITS: Mapping[str, Limits] = {"quick": Limits(1, 2, 200, 0, 0, False), "normal": Limits(4, 3, 1000, 60, 20_000, True)}
SHORTER = 1e-4  # of the bound: what one collective less is worth beside its own seconds
EVERYTHING = 0.9  # of a step's calls scale with the share at least; the rest is launches and replicated operands
TYPICAL_BYTES = 1 << 24  # of a parameter, for which links and latency are weighed
TIGHTENINGS = 3  # how often a MILP is solved again with less memory, when the ledger finds more than it had seen
INPUT_TOLERANCE = 0.02  # of the step: what dealing out the inputs may cost
CLOSE = 0.005  # of the bound: no further start is made
COARSE = 16  # atoms per rank: below, single ones are moved
WAITING = 0.05  # of the step, in which the busiest rank waits for others: from here on, the other estimate is asked
NEARLY_FULL = 0.9  # of usable memory: from here on, dropping and regathering parameters is tried


@dataclass(frozen=True)
class Found:
    """One candidate plan, judged. ``left_out``: ranks that were denied any share."""

    strategies: Mapping[str, Strategy]
    sizes: GroupSizes
    regather: bool
    left_out: tuple[int, ...]
    evaluation: Evaluation
    choice: Choice

    @property
    def cost(self) -> tuple[float, float]:
        """(bytes that do not fit, seconds)."""
        return overflow_bytes(self.evaluation), self.evaluation.step_s


class Start(NamedTuple):
    """Shares of the groups that inputs can be sharded in, and of all others: who works, and who stores."""

    working: Shares
    storing: Shares


def overflow_bytes(evaluation: Evaluation) -> int:
    """Bytes beyond the usable memory, over all ranks."""
    pairs = zip(evaluation.memory_bytes, evaluation.usable_bytes, strict=True)
    return sum(max(0, used - usable) for used, usable in pairs)


def _whole(options: tuple[Strategy, ...], whole: Strategy) -> tuple[Strategy, ...]:
    """On one device a shard is the whole: only pins can ask for one."""
    return (whole,) if whole in options else options


def _best(found: Sequence[Found]) -> Found | None:
    return min(found, key=lambda f: f.cost, default=None)


def plan_graph(
    choices: Choices,
    cluster: ClusterSpec,
    *,
    optimizer: str = "adamw",
    pins: Pins | None = None,
    model_name: str | None = None,
    effort: Effort = "normal",
) -> Plan:
    """The best plan found for one training step of ``choices.graph`` on ``cluster``.

    InfeasibleError if nothing fits, with the numbers; PlanError for a pin that makes no sense.
    """
    search = Search(choices, cluster, optimizer, pins or Pins(), LIMITS[effort])
    best = search.run()
    advice = search.advise(best) if effort == "normal" else None
    return assemble_plan(
        choices,
        cluster,
        best.strategies,
        best.sizes,
        best.evaluation,
        optimizer=optimizer,
        model_name=model_name or choices.graph.name,
        lower_bound_s=search.bound_s,
        solver=search.statistics(best),
        advice=advice,
    )


@dataclass
class Search:
    """The state of one search: what is fixed, and what was solved."""

    choices: Choices
    cluster: ClusterSpec
    optimizer: str
    pins: Pins
    limits: Limits
    milps: int = 0
    rounds: int = 0
    starts: int = 0

    def __post_init__(self) -> None:
        self.graph = self.choices.graph
        candidates = pinned_candidates(self.choices, self.pins)
        if self.cluster.world_size == 1:
            candidates = {
                name: _whole(options, replicated(self.graph.by_name[name])) for name, options in candidates.items()
            }
        self.facts = Facts(self.graph, candidates, self.cluster, self.optimizer)
        self.classes: Classes = find_classes(self.graph, candidates)
        self.fixed: Mapping[str, Sizes] = self._fixed_sizes()
        self.bundles = self._bundles()
        self.solved: dict[object, Choice | None] = {}
        self.margin: Array = np.zeros(self.cluster.world_size)
        self.tables: dict[bool, Tables] = {}

    @cached_property
    def scale_s(self) -> float:
        """Seconds of all work, perfectly dealt out."""
        return float(1.0 / (1.0 / self.whole_s).sum())

    @cached_property
    def bound_s(self) -> float | None:
        lower = lower_bound(self.facts)
        return None if lower is None else lower.seconds

    def _fixed_sizes(self) -> dict[str, Sizes]:
        groups, pins = self.choices.groups, self.pins
        fixed = pinned_sizes(groups, pins, self.cluster.world_size)
        if pins.ratios is not None:
            fixed = {name: round_shares(pins.ratios, g.n) for name, g in groups.items()} | fixed
        return fixed

    def _bundles(self) -> tuple[tuple[str, ...], ...]:
        """Groups that move together, pinned ones apart."""
        found = find_bundles(self.classes, self.facts.candidates)
        free = (tuple(name for name in bundle if name not in self.fixed) for bundle in found)
        return tuple(bundle for bundle in free if bundle)

    # -- the search --------------------------------------------------------------------------------------------------

    def run(self) -> Found:
        """The best plan that fits. InfeasibleError if there is none."""
        starts = self._starts()
        best = self._try(starts, None, regather=False)
        if best is None or best.cost[0] > 0:
            best = self._try(starts, best, regather=True)
        elif self._is_nearly_full(best):
            best = self._rounds(best.sizes, best.left_out, best, regather=True)
        if best is not None:
            best = self._polish(self._deal_out_inputs(self._without_barriers(best)))
        if best is None or best.cost[0] > 0:
            closest = None if best is None else best.evaluation
            raise InfeasibleError(why_infeasible(self.facts, closest, pinned=self.pins != Pins()))
        return best

    def glance(self) -> Found | None:
        """What the first start leads to, whether it fits or not."""
        return self._try(self._starts()[:1], None, regather=False)

    def _try(self, starts: Sequence[Start], best: Found | None, *, regather: bool) -> Found | None:
        """The best of ``best`` and what the rounds from so many starts find, or from more while nothing fits."""
        for number, start in enumerate(starts):
            if best is not None and best.cost[0] == 0:
                if number >= self.limits.starts:
                    break
                if best.evaluation.step_s * (1 - CLOSE) <= (self.bound_s or 0.0):
                    break
                if self._is_hopeless(start, best):
                    continue
            self.starts += 1
            left_out = tuple(r for r, (s, t) in enumerate(zip(*start, strict=True)) if s == 0 and t == 0)
            best = self._rounds(self._round({}, *start), left_out, best, regather=regather)
        return best

    def _is_hopeless(self, start: Start, best: Found) -> bool:
        """Even with everything dealt out, the ranks that get a share would compute for longer than the best step."""
        speed = (1.0 / self.whole_s)[np.array(start.working) > 0]
        return float(1.0 / speed.sum()) * EVERYTHING > best.evaluation.step_s

    def _starts(self) -> list[Start]:
        """Share vectors to begin from, most promising first."""
        devices = self.cluster.devices
        speed = 1.0 / self.whole_s
        memory = np.array([d.memory_bytes for d in devices], dtype=np.float64)
        largest = max((n.meta.nbytes for n in self.graph.sources("parameter")), default=0)
        storing = self.facts.wires.cheapest_shares(min(largest, TYPICAL_BYTES))
        vectors = [] if storing is None else [(speed, storing)]
        for slow in sorted({round(float(s), 12) for s in speed / speed.max()})[-2::-1]:
            fast = np.where(speed / speed.max() > slow + 1e-9, speed, 0.0)
            vectors.append((fast, fast if storing is None else storing))
        vectors += [(speed, speed), (memory, memory), (np.ones(len(devices)),) * 2]
        if len(self.fixed) == len(self.choices.groups):
            vectors = vectors[:1]
        starts = [Start(*(tuple((v / v.sum()).tolist()) for v in pair)) for pair in vectors]
        return list(dict.fromkeys(starts))

    @cached_property
    def whole_s(self) -> Array:
        """Seconds that every rank would need for the whole step alone (N,)."""
        ones, total = np.ones(self.cluster.world_size), np.zeros(self.cluster.world_size)
        for node in self.graph.nodes:
            if not node.is_source:
                strategy = self.choices.strategies[node.name][0]
                total = total + self.facts.compute.seconds(self.facts.parts(node.name, strategy), ones)
        return np.maximum(total, 1e-12)

    def _rounds(
        self, sizes: GroupSizes, left_out: tuple[int, ...], best: Found | None, *, regather: bool
    ) -> Found | None:
        """MILP and LP in turn, until neither helps. Returns the best of ``best`` and what was met on the way."""
        reached: tuple[float, float] | None = None
        for _ in range(self.limits.rounds):
            self.rounds += 1
            chosen = self._strategies(sizes, regather, left_out, best=best)
            if chosen is None:
                break
            if best is not None and chosen.choice.objective_s > BEHIND * best.choice.objective_s:
                best = min(best, chosen, key=lambda f: f.cost)
                break
            reshared = self._reshare(chosen)
            cost = min(chosen.cost, reshared.cost)
            best = min([f for f in (best, chosen, reshared) if f], key=lambda f: f.cost)
            behind = cost > (best.cost[0], best.cost[1] * BEHIND)
            if behind or reshared.sizes == sizes or (reached is not None and cost >= reached):
                break
            sizes, reached = reshared.sizes, cost
        return best

    def _without_barriers(self, best: Found) -> Found:
        """The other estimate's choice at the same sizes, where the judge prefers it."""
        waiting = best.evaluation.stages_s + best.evaluation.update_s - max(best.evaluation.compute_s)
        if not self.limits.both_estimates or waiting < WAITING * best.evaluation.step_s:
            return best
        other = self._strategies(best.sizes, best.regather, best.left_out, best=best, barriers=False)
        return best if other is None else min(best, other, key=lambda f: f.cost)

    def _deal_out_inputs(self, best: Found) -> Found:
        """The same with the inputs split like the batch inside, if that costs next to nothing.

        Whole inputs on every rank are sometimes a little faster, as a count over the labels then needs no collective;
        but loading and decoding data, which the cost model leaves out, is then done by every rank.
        """
        forced = self._whole_inputs(best)
        if not forced:
            return best
        chosen = self._strategies(best.sizes, best.regather, best.left_out, forced=forced)
        if chosen is None or chosen.cost > (0, best.cost[1] * (1 + INPUT_TOLERANCE)):
            return best
        return chosen

    def _whole_inputs(self, best: Found) -> dict[int, tuple[int, ...]]:
        """Class of an input that is whole, though it could be sharded in a group in use -> the options that do so."""
        used, found = used_groups(best.strategies.values()), {}
        for node in self.graph.sources("input"):
            placements = [s.outputs[0] for s in self.facts.candidates[node.name]]
            options = tuple(i for i, p in enumerate(placements) if isinstance(p, Shard) and p.group in used)
            if options and best.strategies[node.name].outputs[0] == REPLICATE:
                found[self.classes.of[node.name]] = options
        return found

    def _strategies(
        self,
        sizes: GroupSizes,
        regather: bool,
        left_out: tuple[int, ...],
        *,
        forced: Mapping[int, tuple[int, ...]] | None = None,
        best: Found | None = None,
        barriers: bool = True,
    ) -> Found | None:
        """The MILP's choice at these sizes, asked again with less memory while the ledger finds more than it saw.

        The margin that helped is kept for the next sizes.
        None if nothing fits. No further attempt is made where the objective is already far behind ``best``.
        """
        usable = np.array([usable_bytes(d.memory_bytes) for d in self.cluster.devices], dtype=np.float64)
        found: list[Found] = []
        capacity = usable - self.margin
        for _ in range(TIGHTENINGS + 1):
            choice = self._choose(sizes, regather, capacity, forced or {}, barriers)
            if choice is None:
                break
            strategies = self.classes.expand(choice.picks, self.facts.candidates)
            evaluation = self._judge(strategies, sizes, regather)
            found.append(Found(strategies, sizes, regather, left_out, evaluation, choice))
            hopeless = best is not None and best.cost[0] == 0 and choice.objective_s > BEHIND * best.cost[1]
            if found[-1].cost[0] == 0:
                self.margin = usable - capacity
            if found[-1].cost[0] == 0 or hopeless:
                break
            capacity = capacity - np.maximum(0.0, np.array(evaluation.memory_bytes) - usable)
        return _best(found)

    def _choose(
        self,
        sizes: GroupSizes,
        regather: bool,
        capacity: Array,
        forced: Mapping[int, tuple[int, ...]],
        barriers: bool,
    ) -> Choice | None:
        key = (tuple(sizes.items()), regather, tuple(capacity.tolist()), tuple(forced.items()), barriers)
        if key not in self.solved:
            self.milps += 1
            self.solved[key] = choose(
                self._tables(regather).skeleton,
                Prices(self._tables(regather), sizes, capacity, SHORTER * self.scale_s),
                forced=forced,
                barriers=barriers,
                nodes=self.limits.nodes,
                gap=MIP_GAP,
            )
        return self.solved[key]

    def _tables(self, regather: bool) -> Tables:
        if regather not in self.tables:
            names = frozenset(n.name for n in self.graph.sources("parameter")) if regather else frozenset()
            same = {name: bundle[0] for bundle in self.bundles for name in bundle}
            self.tables[regather] = Tables(self.facts, make_skeleton(self.classes, regathered=names), same)
        return self.tables[regather]

    def _reshare(self, found: Found) -> Found:
        """The same strategies with the LP's shares, rounded; the LP's groups only, the others follow their mean."""
        shares = best_shares(
            self.facts,
            found.strategies,
            found.sizes,
            found.evaluation,
            bundles=[b for b in self.bundles if set(b) & set(used_groups(found.strategies.values()))],
            fixed=self.fixed,
            left_out=found.left_out,
            regather=found.regather,
        )
        if not shares:
            return found
        sizes = self._round(shares, *self._means(shares, found.sizes))
        evaluation = self._judge(found.strategies, sizes, found.regather)
        return Found(found.strategies, sizes, found.regather, found.left_out, evaluation, found.choice)

    def _means(self, shares: Mapping[str, Shares], sizes: GroupSizes) -> Start:
        """For the groups that the LP did not see: the mean of those it did, of either kind; else what they had."""
        kinds = []
        for working in (True, False):
            known = [s for name, s in shares.items() if (name in self.of_inputs) == working]
            known = known or [s for name, s in sizes.items() if (name in self.of_inputs) == working]
            known = known or list(shares.values())
            ratios = [np.array(s, dtype=np.float64) / sum(s) for s in known]
            kinds.append(tuple(np.mean(ratios, axis=0).tolist()))
        return Start(*kinds)

    def _round(self, shares: Mapping[str, Shares], working: Shares, storing: Shares) -> dict[str, Sizes]:
        """Sizes of every group: pinned, or rounded from its own shares, or from those of its kind."""
        otherwise = {name: working if name in self.of_inputs else storing for name in self.choices.groups}
        return {
            name: self.fixed[name] if name in self.fixed else round_shares(shares.get(name, otherwise[name]), group.n)
            for name, group in self.choices.groups.items()
        }

    @cached_property
    def of_inputs(self) -> frozenset[str]:
        """The groups that inputs can be sharded in."""
        placements = (s.outputs[0] for n in self.graph.sources("input") for s in self.facts.candidates[n.name])
        return frozenset(p.group for p in placements if isinstance(p, Shard))

    def _judge(self, strategies: Mapping[str, Strategy], sizes: GroupSizes, regather: bool) -> Evaluation:
        needs = find_needs(self.graph, strategies, regather=regather)
        return evaluate(
            self.graph, strategies, sizes, self.cluster, needs=needs, optimizer=self.optimizer, regather=regather
        )

    def _is_nearly_full(self, found: Found) -> bool:
        pairs = zip(found.evaluation.memory_bytes, found.evaluation.usable_bytes, strict=True)
        return any(used > NEARLY_FULL * usable for used, usable in pairs)

    def _polish(self, found: Found) -> Found:
        """Single atoms moved between ranks, in the groups that are used and free."""
        used = used_groups(found.strategies.values())
        coarse = COARSE * self.cluster.world_size
        bundles = [b for b in self.bundles if set(b) & set(used) and self.choices.groups[b[0]].n < coarse]
        moves = min(
            self.limits.moves, self.limits.work // (len(self.graph.nodes) * max(1, self.cluster.world_size // 8))
        )
        if not bundles or not moves:
            return found

        def cost(sizes: GroupSizes) -> tuple[float, float]:
            evaluation = self._judge(found.strategies, sizes, found.regather)
            return overflow_bytes(evaluation), evaluation.step_s

        sizes = improve(found.sizes, bundles, cost, evaluations=moves)
        evaluation = self._judge(found.strategies, sizes, found.regather)
        return Found(found.strategies, sizes, found.regather, found.left_out, evaluation, found.choice)

    def advise(self, best: Found) -> Advice | None:
        """The best of the clusters without the slowest kinds of devices, if a job would run clearly faster there."""
        if self.pins.sizes or self.pins.ratios is not None or type(self.cluster) is not ClusterSpec:
            return None
        found: list[tuple[float, tuple[int, ...]]] = []
        for ranks in slowest_kinds(self.cluster.devices, self.whole_s.tolist()):
            kept = np.array([r not in ranks for r in range(self.cluster.world_size)])
            if float(1.0 / (1.0 / self.whole_s[kept]).sum()) * EVERYTHING > best.evaluation.step_s:
                break
            search = Search(self.choices, without(self.cluster, ranks), self.optimizer, self.pins, HASTY)
            alone = search.glance()
            if alone is None or alone.cost[0] > 0:
                break
            found.append((alone.evaluation.step_s, ranks))
        step_s, ranks = min(found, default=(float("inf"), ()))
        if step_s > best.evaluation.step_s * (1 - WORTH_SAYING):
            return None
        kinds = Counter(self.cluster.devices[r].gpu for r in ranks)
        return Advice(ranks, tuple(kinds.items()), step_s, best.evaluation.step_s)

    def statistics(self, best: Found) -> dict[str, Any]:
        """What the solver did, in numbers that are the same every time."""
        choice = best.choice
        return {
            "variables": choice.variables,
            "rows": choice.rows,
            "status": choice.status,
            "mip_gap": round(choice.gap, 9),
            "starts": self.starts,
            "rounds": self.rounds,
            "milps": self.milps,
            "node_classes": len(self.classes.nodes),
            "regather": best.regather,
        }
