"""Carrying a plan over to another graph of the same model: a smaller last batch, other lengths, evaluation.

Parameters must lie as they do, since all programs of one model share them; the rest is free. So nothing is searched:

* a source lies as the plan says, a batch of another size dealt in the plan's proportions;
* a call does what its counterpart did (same operator in the same module, counted in order), if that row still exists
  and its partial arguments are made;
* calls run in the graph's order, even those that the plan postpones;
* any other call takes the row for which the fewest elements must move, then the one that leaves least whole.

Whatever comes out is a choice of proved rows with the conversions they imply, which ``lower`` checks like any plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from hap.codegen.program import DECOMPOSITIONS
from hap.conversion import find_needs
from hap.errors import PlanError
from hap.graph import Graph, Node
from hap.order import repeats
from hap.placement import PARTIAL, REPLICATE, Placement, Shard, Sizes
from hap.plan import Collective, Conversion, GroupPlan, Plan, Recomputed, Strategy
from hap.rules.choices import Choices, batch_size, choices
from hap.search.rounding import round_shares

_EFFORT = {"reduce": 2.0, "move": 1.0, "cut": 0.01}  # elements on the wire per element that changes its placement


def carry_over(plan: Plan, old: Graph, new: Graph) -> Plan:
    """The plan of ``new`` that follows ``plan``, which is for ``old``; its prediction is still the old one's."""
    return _Carrier(plan, old, choices(new)).run()


@dataclass
class _Carrier:
    plan: Plan
    old: Graph
    found: Choices

    def __post_init__(self) -> None:
        self.graph = self.found.graph
        self.placed = {n.target: self.plan.strategy(n.name).outputs[0] for n in self.old.nodes if n.is_source}
        self.before = dict(_counted(self.old))
        self.sizes: dict[str, Sizes] = {}
        self.groups = {name: (group.n, group.label) for name, group in self.found.groups.items()}
        self.chosen: dict[str, Strategy] = {}
        self.heirs: dict[str, str] = {}  # group -> the plan's group whose place it takes

    def run(self) -> Plan:
        for node in self.graph.nodes:
            if node.is_source:
                self.chosen[node.name] = Strategy((), (self._source(node),))
        for key, node in _counted(self.graph):
            able = [s for s in self.found.strategies[node.name] if self._is_possible(node, s)]
            like = self._like_before(self.before.get(key), able)
            self.chosen[node.name] = like or min(able, key=lambda s, n=node: self._effort(n, s))  # type: ignore[misc]
        self._deal_the_rest()
        return self._plan()

    # ---- sources ----

    def _source(self, node: Node) -> Placement:
        """Where the plan has it; under the group that it now belongs to, or one of its own if sizes do not fit that."""
        before = self.placed.get(node.target, REPLICATE)
        if not isinstance(before, Shard):
            return REPLICATE
        if node.op == "buffer":
            raise PlanError(
                f"this call changes {node.target} in its forward pass, and ranks hold shares of it, as the call that "
                "was planned for leaves it as it is: plan for one that changes it"
            )
        shares = self.plan.groups[before.group].sizes
        stored = [s.outputs[0] for s in self.found.strategies[node.name] if isinstance(s.outputs[0], Shard)]
        if node.op == "input":
            if not (shape := node.meta.shape) or (n := shape[0]) != batch_size(self.graph) or not stored:
                return REPLICATE  # as what has no dims is, whatever this input was before
            shares, before = round_shares(shares, n), Shard(0, 1, n, 1, "")
        for shard in stored:
            assert isinstance(shard, Shard)
            if shard._replace(group="") == before._replace(group="") and self._deals(shard.group, shares):
                return shard
        own = f"own{len(self.groups)}"
        self.groups[own], self.sizes[own] = (before.n, node.target), shares
        return before._replace(group=own)

    def _deals(self, group: str, shares: Sizes) -> bool:
        return self.sizes.setdefault(group, shares) == shares

    def _deal_the_rest(self) -> None:
        """Groups of no source: like the group whose place they take, or of the same name in words, or the first."""
        by_label = {group.label: group.sizes for group in reversed(self.plan.groups.values())}
        default = next((g.sizes for g in self.plan.groups.values()), (1,) * self.plan.world_size)
        for name, (n, label) in self.groups.items():
            if name not in self.sizes:
                heir = self.heirs.get(name)
                shares = by_label.get(label, default) if heir is None else self.plan.groups[heir].sizes
                self.sizes[name] = shares if sum(shares) == n else round_shares(shares, n)

    # ---- calls ----

    def _is_possible(self, node: Node, strategy: Strategy) -> bool:
        pairs = zip(node.inputs, strategy.inputs, strict=True)
        return all(p != PARTIAL or self.chosen[v.node].outputs[v.index] == PARTIAL for v, p in pairs)

    def _like_before(self, before: Node | None, able: list[Strategy]) -> Strategy | None:
        """The strategy that cuts the same dims into the same parts as the counterpart's, if there is one."""
        if before is None:
            return None
        wanted = self.plan.strategy(before.name)
        like = [s for s in able if _dims(s) == _dims(wanted)]
        if not like:
            return None
        found = max(like, key=lambda s: self._likeness(s, wanted))
        for mine, theirs in _pairs(found, wanted):
            self.heirs.setdefault(mine.group, theirs.group)
        return found

    def _likeness(self, mine: Strategy, theirs: Strategy) -> int:
        """How many slots are of the group of the same name in words, and how many of the very same parts."""
        score = 0
        for a, b in _pairs(mine, theirs):
            score += 4 * (self.groups[a.group][1] == self.plan.groups[b.group].label)
            score += 2 * (a.n == b.n) + (a.outer == b.outer) + (a.unit == b.unit)
        return score

    def _effort(self, node: Node, strategy: Strategy) -> tuple[float, float]:
        moved = sum(
            self.graph.meta(v).numel * _weight(self.chosen[v.node].outputs[v.index], p)
            for v, p in zip(node.inputs, strategy.inputs, strict=True)
        )
        whole = sum(not isinstance(p, Shard) for p in strategy.outputs) + 0.5 * strategy.outputs.count(PARTIAL)
        return moved, whole

    # ---- the plan ----

    def _plan(self) -> Plan:
        made_for = self.plan.provenance.model_copy(update={"model_fingerprint": self.graph.fingerprint})
        groups = {name: GroupPlan(n=n, label=label, sizes=self.sizes[name]) for name, (n, label) in self.groups.items()}
        return self.plan.model_copy(
            update={
                "provenance": made_for,
                "groups": groups,
                "strategies": {node.name: str(self.chosen[node.name]) for node in self.graph.nodes},
                "conversions": tuple(self._conversions()),
                "explanation": None,
                "recomputed": tuple(self._recomputed()),
                "postponed": {},
            }
        )

    def _recomputed(self) -> Iterator[Recomputed]:
        """What the plan repeats, by the counterparts of its calls."""
        heirs = {self.before[key].name: node.name for key, node in _counted(self.graph) if key in self.before}
        for block in self.plan.recomputed:
            if calls := tuple(heirs[name] for name in block.calls if name in heirs):
                yield block.model_copy(update={"calls": calls})

    def _conversions(self) -> Iterator[Conversion]:
        """What the strategies imply; parameters that the plan gathers again for the backward pass are here, too."""
        parameters = {n.name for n in self.old.sources("parameter")}
        again = {c.value for c in self.plan.conversions if c.phase == "backward" and c.value in parameters}
        least = find_needs(self.graph, self.chosen)
        known = {c.collective: c.decomposition for c in reversed(self.plan.conversions)}
        same = {(c.value, c.collective): c.decomposition for c in self.plan.conversions if c.value in parameters}
        repeated = repeats(self.graph, self.chosen, [name for r in self._recomputed() for name in r.calls])
        for need in find_needs(self.graph, self.chosen, regather=True, again=repeated):
            if need in least or str(need.value) in again:
                kind: Collective = need.collective
                yield Conversion(
                    value=str(need.value),
                    source=str(need.source),
                    target=str(need.target),
                    phase=need.phase,
                    collective=kind,
                    decomposition=same.get((str(need.value), kind), known.get(kind, DECOMPOSITIONS[kind][0])),
                    nbytes=self.graph.meta(need.value).nbytes,
                )


def _counted(graph: Graph) -> Iterator[tuple[tuple[str, str, str, int], Node]]:
    """Every call with what it is known by in another graph: module, operator, phase, the how manieth of these."""
    seen: Counter[tuple[str, str, str]] = Counter()
    for node in graph.nodes:
        if not node.is_source:
            kind = (node.module, node.op, node.phase)
            seen[kind] += 1
            yield (*kind, seen[kind]), node


def _pairs(mine: Strategy, theirs: Strategy) -> Iterator[tuple[Shard, Shard]]:
    """The slots that both cut."""
    for a, b in zip((*mine.inputs, *mine.outputs), (*theirs.inputs, *theirs.outputs), strict=True):
        if isinstance(a, Shard) and isinstance(b, Shard):
            yield a, b


def _dims(strategy: Strategy) -> tuple[tuple[object, ...], tuple[object, ...]]:
    return tuple(map(_dim, strategy.inputs)), tuple(map(_dim, strategy.outputs))


def _dim(placement: Placement | None) -> object:
    return placement.dim if isinstance(placement, Shard) else str(placement)


def _weight(source: Placement | None, target: Placement) -> float:
    if source == target:
        return 0.0
    return _EFFORT["reduce"] if source == PARTIAL else _EFFORT["move" if isinstance(source, Shard) else "cut"]
