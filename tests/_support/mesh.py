"""Plans of two axes for tests, without a search: the batch by hand, and inside each host strategies of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hap.graph import Graph
from hap.mesh_plan import BATCH, HostPart, MeshPlan, MeshPrediction, verify_mesh_plan
from hap.placement import Shard
from hap.plan import GroupPlan, Plan
from hap.rules.choices import choices
from hap.rules.host_graph import batch_group, deal_batch, host_graph
from hap.search.mesh import of_batch
from tests._support.plans import greedy_strategies, make_plan, random_sizes, random_strategies, sizes_for

RATIOS = (3, 2, 1)


def make_mesh(graph: Graph, ranks: Sequence[int], batches: Sequence[int], seed: int | None = None) -> MeshPlan:
    """Host h of ``ranks[h]`` ranks with ``batches[h]`` of the batch. ``seed``: strategies and sizes inside drawn at
    random, another way in each host; None: parameters cut along their first dim, the batch dealt out."""
    found = choices(graph)
    strategies = {name: of_batch(s) for name, s in deal_batch(found).items()}
    group = batch_group(found)
    inside = []
    for host, count in enumerate(ranks):
        part = host_graph(graph, strategies, {BATCH: tuple(batches)}, host, count)
        inside.append(_inside(part, count, None if seed is None else seed + host))
    first = inside[0].provenance
    plan = MeshPlan(
        provenance=first.model_copy(update={"model_fingerprint": graph.fingerprint, "world_size": sum(ranks)}),
        hosts=tuple(
            HostPart(
                name=f"host{h}",
                ranks=count,
                batch=batches[h],
                inside=h,
            )
            for h, count in enumerate(ranks)
        ),
        batch=GroupPlan(n=group.n, label=group.label, sizes=tuple(batches)),
        between={name: str(s) for name, s in strategies.items()},
        inside=tuple(inside),
        predicted=MeshPrediction(step_s=1.0, overlapped_s=None, sums_s=0.0, arithmetic_s=0.0, lower_bound_s=0.0),
    )
    verify_mesh_plan(plan)
    return plan


def _inside(part: Graph, ranks: int, seed: int | None) -> Plan:
    possible = choices(part)
    if seed is not None:
        source = random.Random(seed)
        chosen, sizes = random_strategies(possible, source), random_sizes(possible, ranks, source)
        return make_plan(possible, chosen, sizes, world_size=ranks)
    wishes = {}
    for node in part.nodes:
        cuts = [p for s in possible.strategies[node.name] if isinstance(p := s.outputs[0], Shard)]
        if node.op in ("parameter", "input") and any((p.dim, p.n) == (0, node.meta.shape[0]) for p in cuts):
            wishes[node.target] = (0, node.meta.shape[0])
    sizes = sizes_for(possible, RATIOS[:ranks])
    return make_plan(possible, greedy_strategies(possible, wishes), sizes, world_size=ranks)
