"""What one search asks, fixed from the start: the candidates after pins, what is alike, who can be sharded how.

A ``Problem`` owns everything that does not change while plans are found. The parts that do not depend on the cluster
(classes of nodes, rows of the programs, work of every option) are handed on by ``on``, or asked for there, so that the
same graph on a smaller cluster costs little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hap.cluster import ClusterSpec
from hap.codegen.lowering import Drafts
from hap.codegen.program import Program
from hap.cost_models.compute import parts_seconds
from hap.cost_models.evaluate import Evaluation, Prepared
from hap.cost_models.optimizers import sees_whole
from hap.deferral import ONE, Batches
from hap.errors import InfeasibleError
from hap.fabric import Array
from hap.hosts_sum import HOSTS_SUM
from hap.placement import REPLICATE, GroupSizes, Shard, Sizes
from hap.plan import Recomputed, Strategy
from hap.rules.choices import Choices, replicated
from hap.search.classes import Candidates, Classes, find_bundles, find_classes, read_again
from hap.search.milp import Skeleton, make_skeleton
from hap.search.owners import is_owned, with_owners
from hap.search.pins import Pins, fixed_sizes, pinned_candidates
from hap.search.prices import Facts
from hap.search.ratios import Shares
from hap.search.rounding import round_shares
from hap.search.score import Apart, Score
from hap.search.tables import Tables

KEPT = 8  # plans that the judge was asked about last


@dataclass(frozen=True, eq=False)
class Problem:
    """See the module docstring. ``bundles``: groups that move together, pinned ones apart; ``fixed``: pinned sizes;
    ``drafted``: what the drafts of the judge have in common (``codegen.lowering.draft``); ``scores``: of the programs
    that it has played; ``shared``: what the linear programs of shares came to (``refine.reshare``); ``larger``: the
    same on the cluster of which this one is a part."""

    choices: Choices
    cluster: ClusterSpec
    optimizer: str
    pins: Pins
    facts: Facts
    classes: Classes
    fixed: Mapping[str, Sizes]
    bundles: tuple[tuple[str, ...], ...]
    drafted: Drafts = field(default_factory=Drafts, repr=False)
    scores: dict[object, tuple[Score, Apart | None]] = field(default_factory=dict, repr=False)
    unplaced: dict[object, Program] = field(default_factory=dict, repr=False)  # the last of them, see ``tempo``
    shared: dict[object, Mapping[str, Shares] | None] = field(default_factory=dict, repr=False)
    larger: Problem | None = field(default=None, repr=False)
    _skeletons: dict[bool, Skeleton] = field(default_factory=dict, repr=False)  # with what was solved last
    _tables: dict[bool, Tables] = field(default_factory=dict, repr=False)
    _prepared: dict[tuple[tuple[int, ...], bool], Prepared] = field(default_factory=dict, repr=False)

    @classmethod
    def state(
        cls, choices: Choices, cluster: ClusterSpec, optimizer: str, pins: Pins, batches: Batches = ONE
    ) -> Problem:
        """``batches``: of a step of the optimizer."""
        choices, owned = with_owners(choices, cluster, optimizer)
        candidates = _candidates(choices, cluster, optimizer, pins)
        facts = Facts(choices.graph, candidates, cluster, optimizer, batches=batches)
        classes = find_classes(choices.graph, candidates, colours=facts.colours, reads=facts.every_read)
        named = {name: group for name, group in choices.groups.items() if name not in owned}
        fixed = fixed_sizes(named, pins, cluster.world_size) | owned
        found = find_bundles(classes, candidates)
        free = (tuple(name for name in bundle if name not in fixed) for bundle in found)
        return cls(choices, cluster, optimizer, pins, facts, classes, fixed, tuple(b for b in free if b))

    def on(self, cluster: ClusterSpec) -> Problem:
        """The same on another cluster. Nothing may be pinned to ranks."""
        assert not self.pins.sizes and self.pins.ratios is None, "sizes are pinned for other ranks"
        if cluster.world_size == 1 or self.fixed:
            return Problem.state(self.choices, cluster, self.optimizer, self.pins, self.facts.batches)
        facts = self.facts.on(cluster)
        return replace(self, cluster=cluster, facts=facts, shared={}, larger=self, _tables={}, _prepared={})

    def repeating(self, recomputed: tuple[Recomputed, ...]) -> Problem:
        """The same with these calls made again in the backward pass."""
        facts = self.facts.repeating(recomputed)
        skeletons = {False: self._skeletons[False]} if False in self._skeletons else {}
        return replace(self, facts=facts, shared={}, larger=None, _skeletons=skeletons, _tables={}, _prepared={})

    @property
    def recomputed(self) -> tuple[Recomputed, ...]:
        return self.facts.recomputed

    @property
    def world_size(self) -> int:
        return self.cluster.world_size

    @cached_property
    def whole_s(self) -> Array:
        """Seconds that every rank would need for the whole step alone, but for sums over hosts (N,)."""
        calls, measured = self.facts.calls, self.facts.compute.is_measured
        computing = [n.name for n in self.choices.graph.nodes if not n.is_source and n.op != HOSTS_SUM]
        whole = [(name, self.choices.strategies[name][0]) for name in computing]
        if not whole:
            return np.full(self.world_size, 1e-12)
        kinds = [calls.kind(name, strategy, measured=measured) for name, strategy in whole]
        distinct = dict(zip(kinds, whole, strict=True))
        parts, rows = [calls.parts(*call) for call in distinct.values()], {kind: i for i, kind in enumerate(distinct)}
        seconds = self.facts.compute.of_many(parts, np.ones((len(parts), self.world_size)))
        total: Array = seconds[[rows[kind] for kind in kinds]].cumsum(axis=0)[-1]
        return np.maximum(total, 1e-12)

    @cached_property
    def scale_s(self) -> float:
        """Seconds of all work, perfectly dealt out."""
        return float(1.0 / (1.0 / self.whole_s).sum())

    def sums_s(self, strategies: Mapping[str, Strategy]) -> float:
        """Seconds of the sums over hosts, which may all be sent beside compute."""
        device = self.cluster.devices[0]
        return sum(parts_seconds(self.facts.parts(name, strategies[name]), 1.0, device) for name in self._sums)

    @cached_property
    def _sums(self) -> tuple[str, ...]:
        return tuple(n.name for n in self.choices.graph.nodes if n.op == HOSTS_SUM)

    @cached_property
    def of_inputs(self) -> frozenset[str]:
        """The groups that inputs can be sharded in."""
        sources = self.choices.graph.sources("input")
        placements = (s.outputs[0] for n in sources for s in self.facts.candidates[n.name])
        return frozenset(p.group for p in placements if isinstance(p, Shard))

    @property
    def variables(self) -> int:
        """Of the program of strategies."""
        return len(self._skeleton(False).names)

    def tables(self, regather: bool) -> Tables:
        """What the variables of the program pay for, which is the same on every cluster."""
        if regather not in self._tables and self.larger is not None:
            self._tables[regather] = self.larger.tables(regather).on(self.facts)
        elif regather not in self._tables:
            same = {name: bundle[0] for bundle in self.bundles for name in bundle}
            self._tables[regather] = Tables(self.facts, self._skeleton(regather), same, pinned=bool(self.fixed))
        return self._tables[regather]

    def _skeleton(self, regather: bool) -> Skeleton:
        if regather not in self._skeletons:
            names = frozenset(n.name for n in self.choices.graph.sources("parameter")) if regather else frozenset()
            classes = read_again(self.classes, names, self.facts.again_at)
            self._skeletons[regather] = make_skeleton(classes, regathered=names)
        return self._skeletons[regather]

    def round(self, shares: Mapping[str, Shares], working: Sequence[float], storing: Sequence[float]) -> GroupSizes:
        """Sizes of every group: pinned, or rounded from its own shares, or from those of its kind."""
        otherwise = {name: working if name in self.of_inputs else storing for name in self.choices.groups}
        known: dict[tuple[tuple[float, ...], int], Sizes] = {}
        sizes = dict(self.fixed)
        for name, group in self.choices.groups.items():
            key = (tuple(shares.get(name, otherwise[name])), group.n)
            if name not in self.fixed:
                sizes[name] = known[key] if key in known else known.setdefault(key, round_shares(*key))
        return {name: sizes[name] for name in self.choices.groups}

    def judge(self, strategies: Mapping[str, Strategy], sizes: GroupSizes, regather: bool) -> Evaluation:
        """What the cost model says of a whole plan: the one truth."""
        prepared = self.prepared(strategies, regather)
        key = tuple(sizes[group] for group in prepared.groups)
        known = prepared.evaluations
        if key not in known:
            known[key] = self.facts.evaluator.at_sizes(prepared, sizes)
            for old in list(known)[:-KEPT]:
                del known[old]
        return known[key]

    def prepared(self, strategies: Mapping[str, Strategy], regather: bool) -> Prepared:
        """What the judge needs that no sizes change; the last few are kept: one plan is asked about at many sizes."""
        key = (chosen(strategies), regather)
        if key not in self._prepared:
            self._prepared[key] = self.facts.evaluator.prepare(
                strategies, regather=regather, recomputed=self.facts.repeated
            )
            for old in list(self._prepared)[:-KEPT]:
                del self._prepared[old]
        return self._prepared[key]


def chosen(strategies: Mapping[str, Strategy]) -> tuple[int, ...]:
    """Equal for equal choices among the candidates, which are kept, and so are their ids: to hash them takes longer."""
    return tuple(map(id, strategies.values()))


def _candidates(choices: Choices, cluster: ClusterSpec, optimizer: str, pins: Pins) -> Candidates:
    """On one device a shard is the whole: only pins can ask for one. What the optimizer must see all of is whole, or
    with its owner."""
    candidates = pinned_candidates(choices, pins)
    for node in choices.graph.sources("parameter"):
        if sees_whole(optimizer, choices.graph, node):
            seen = tuple(s for s in candidates[node.name] if s.outputs[0] == REPLICATE or is_owned(s))
            if not seen:
                raise InfeasibleError(
                    f"{node.target} is pinned to shards, but an update by {optimizer} is made from all of it"
                )
            candidates[node.name] = seen
    if cluster.world_size > 1:
        return candidates
    whole = {name: replicated(choices.graph.by_name[name]) for name in candidates}
    return {name: (whole[name],) if whole[name] in options else options for name, options in candidates.items()}
