"""Plans for tests without a search: any sound choice of strategy per node, drawn at random or kept close to a wish."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

import torch

import hap
from hap.conversion import find_needs
from hap.graph import Graph, Node
from hap.order import NONE, Postponed, repeats
from hap.placement import PARTIAL, Placement, Shard, Sizes
from hap.plan import Conversion, GroupPlan, Plan, Prediction, Provenance, Recomputed, Strategy
from hap.reduce_dtype import reduce_name
from hap.rules.choices import Choices, replicated

FIRST = {"all_gather": "all_to_all", "all_reduce": "ring", "reduce_scatter": "all_to_all_sum"}
DECOMPOSITION = {**FIRST, "all_to_all": "direct", "slice": "local"}


def replicated_plan(graph: Graph, world_size: int = 1) -> Plan:
    """Everything whole on every rank: needs no rules."""
    strategies = {node.name: replicated(node) for node in graph.nodes}
    return make_plan(Choices(graph, {}, {}), strategies, {}, world_size=world_size)


def random_strategies(choices: Choices, source: random.Random) -> dict[str, Strategy]:
    """For each node any strategy whose partial arguments its producers give."""
    chosen: dict[str, Strategy] = {}
    for node in choices.graph.nodes:
        chosen[node.name] = source.choice(possible(choices, chosen, node))
    return chosen


def greedy_strategies(choices: Choices, wishes: Mapping[str, tuple[int, int]]) -> dict[str, Strategy]:
    """For each node the strategy with the fewest elements to convert.

    ``wishes`` maps a source's target to ``(dim, n)``: shard this dim in n atoms. All other sources stay whole."""
    chosen: dict[str, Strategy] = {}
    for node in choices.graph.nodes:
        able = possible(choices, chosen, node)
        if node.is_source:
            able = [s for s in able if _cut(s.outputs[0]) == wishes.get(node.target)][:1]
            assert able, f"{node.target} cannot be sharded by {wishes[node.target]}"
        chosen[node.name] = min(able, key=lambda s, n=node: _effort(choices.graph, chosen, n, s))
    return chosen


def _cut(placement: Placement | None) -> tuple[int, int] | None:
    return (placement.dim, placement.n) if isinstance(placement, Shard) else None


def possible(choices: Choices, chosen: Mapping[str, Strategy], node: Node) -> list[Strategy]:
    return [
        s
        for s in choices.strategies[node.name]
        if all(
            p != PARTIAL or chosen[v.node].outputs[v.index] == PARTIAL
            for v, p in zip(node.inputs, s.inputs, strict=True)
        )
    ]


def _effort(graph: Graph, chosen: Mapping[str, Strategy], node: Node, strategy: Strategy) -> tuple[float, float]:
    moved = sum(
        graph.meta(v).numel * _weight(chosen[v.node].outputs[v.index], p)
        for v, p in zip(node.inputs, strategy.inputs, strict=True)
    )
    whole = sum(not isinstance(p, Shard) for p in strategy.outputs) + 0.5 * sum(p == PARTIAL for p in strategy.outputs)
    return moved, whole


def _weight(source: Placement | None, target: Placement) -> float:
    """Elements that a conversion moves, per element of the value: a slice nothing, an all-reduce twice."""
    if source == target:
        return 0.0
    return 2.0 if source == PARTIAL else 1.0 if isinstance(source, Shard) else 0.01


def sizes_for(choices: Choices, ratios: Sizes, exact: Mapping[int, Sizes] | None = None) -> dict[str, Sizes]:
    """Sizes of every group in proportion to ``ratios``, the remainder to the largest; ``exact[n]`` where given."""
    found = {}
    for name, group in choices.groups.items():
        shares = [group.n * r // sum(ratios) for r in ratios]
        shares[ratios.index(max(ratios))] += group.n - sum(shares)
        found[name] = tuple((exact or {}).get(group.n, shares))
    return found


def random_sizes(choices: Choices, world_size: int, source: random.Random) -> dict[str, Sizes]:
    """Any sizes, zeros included."""
    found = {}
    for name, group in choices.groups.items():
        cuts = sorted(source.randint(0, group.n) for _ in range(world_size - 1))
        found[name] = tuple(b - a for a, b in zip([0, *cuts], [*cuts, group.n], strict=True))
    return found


def random_postponed(graph: Graph, source: random.Random, part: float = 0.3) -> dict[str, tuple[str, ...]]:
    """So much of the calls of the backward pass, each until any other call of it or its end, whatever reads them."""
    calls = [n.name for n in graph.nodes if n.phase == "backward" and not n.is_source]
    late = {name for name in calls if source.random() < part}
    others = ["", *(name for name in calls if name not in late)]
    found: dict[str, tuple[str, ...]] = {}
    for name in sorted(late):
        until = source.choice(others)
        found[until] = (*found.get(until, ()), name)
    return found


def make_plan(
    choices: Choices,
    strategies: Mapping[str, Strategy],
    sizes: Mapping[str, Sizes],
    *,
    regather: bool = False,
    kept: Collection[str] = (),
    recomputed: Sequence[Recomputed] = (),
    postponed: Postponed = NONE,
    world_size: int | None = None,
) -> Plan:
    """The plan with these decisions, without a prediction worth reading."""
    again = repeats(choices.graph, strategies, [name for r in recomputed for name in r.calls])
    graph = choices.graph
    world_size = world_size or len(next(iter(sizes.values())))
    conversions = tuple(
        Conversion(
            value=str(need.value),
            source=str(need.source),
            target=str(need.target),
            phase=need.phase,
            collective=need.collective,
            decomposition=DECOMPOSITION[need.collective],
            nbytes=graph.meta(need.value).nbytes,
        )
        for need in find_needs(graph, strategies, regather=regather, kept=kept, again=again)
    )
    nothing = (0.0,) * world_size
    return Plan(
        provenance=Provenance(
            model=graph.name,
            model_fingerprint=graph.fingerprint,
            parameters=sum(n.meta.numel for n in graph.sources("parameter")),
            cluster="test",
            cluster_fingerprint="test",
            world_size=world_size,
            backend="gloo",
            rules_fingerprint="test",
            hap_version=hap.__version__,
            torch_version=torch.__version__,
            optimizer="adamw",
            reduce_dtype=reduce_name(graph.reduce_dtype),
        ),
        groups={
            name: GroupPlan(n=group.n, label=group.label, sizes=sizes[name]) for name, group in choices.groups.items()
        },
        strategies={node.name: str(strategies[node.name]) for node in graph.nodes},
        conversions=conversions,
        predicted=Prediction(
            step_s=0.001,
            compute_s=nothing,
            communication_s=0.0,
            memory_bytes=(0,) * world_size,
            memory_by_kind=({},) * world_size,
        ),
        devices=tuple(f"cpu{r}" for r in range(world_size)),
        recomputed=tuple(recomputed),
        postponed=dict(postponed),
    )
