"""Who makes an update that must see a whole matrix: one rank, so that the products are dealt out, not repeated.

A parameter that the optimizer must see whole (``cost_models.optimizers``) may be whole on every rank, and every rank
makes the same update, the slowest one too. Or it has an *owner*: it is sharded in a group of its own, of which one rank
has all. Its gradient is then summed onto that rank, which alone keeps the optimizer's state and makes the update, and
the parameter is gathered from there for use. The search takes either, by what they cost; owners are chosen before it:

    in the order of what their updates take, longest first, each matrix goes to the rank that is done with its matrices
    soonest, of those whose memory they would not take ``UNFAIR`` times as much of as all of them together take of all

(longest processing time first, Graham 1969). Only of optimizers that look at one parameter at a time. A matrix of no
elements has no owner: there is nothing to keep or to make.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hap.cluster import ClusterSpec
from hap.cost_models.evaluate import UpdateTable
from hap.cost_models.memory import usable_bytes
from hap.cost_models.optimizers import optimizer_state_bytes, sees_whole, update_flops
from hap.fabric import Array
from hap.graph import Node
from hap.placement import Shard, Sizes
from hap.plan import Strategy
from hap.rules.choices import Choices, Group

UNFAIR = 2.0
OWNED = frozenset({"muon"})


def with_owners(choices: Choices, cluster: ClusterSpec, optimizer: str) -> tuple[Choices, dict[str, Sizes]]:
    """The choices with one more for every matrix that may have an owner, and the sizes of these groups."""
    graph, n = choices.graph, cluster.world_size
    if optimizer not in OWNED or n == 1:
        return choices, {}
    matrices = [node for node in graph.sources("parameter") if sees_whole(optimizer, graph, node)]
    nodes = [node for node in matrices if node.meta.nbytes]
    groups, strategies, sizes = dict(choices.groups), dict(choices.strategies), dict[str, Sizes]()
    for number, (node, owner) in enumerate(zip(nodes, _owners(nodes, choices, cluster, optimizer), strict=True)):
        rows, name = node.meta.shape[0], f"own{number}"
        groups[name] = Group(name, rows, f"{node.target} of one rank")
        owned = Strategy((), (Shard(0, 1, rows, 1, name),))
        strategies[node.name] = (*(s for s in strategies[node.name] if not is_owned(s)), owned)
        sizes[name] = tuple(rows if rank == owner else 0 for rank in range(n))
    return replace(choices, groups=groups, strategies=strategies), sizes


def is_owned(strategy: Strategy) -> bool:
    """Whether a parameter lies with its owner."""
    placement = strategy.outputs[0]
    return isinstance(placement, Shard) and placement.group.startswith("own")


def _owners(nodes: list[Node], choices: Choices, cluster: ClusterSpec, optimizer: str) -> list[int]:
    """Of every node the rank."""
    table, n = UpdateTable(cluster, optimizer), cluster.world_size
    seconds = {}
    for node in nodes:
        whole: Array = np.full(n, float(node.meta.nbytes))
        seconds[node.name] = table.seconds(whole, update_flops(optimizer, choices.graph, node))
    held = {n.name: 2 * n.meta.nbytes + optimizer_state_bytes(optimizer, n.meta.nbytes) for n in nodes}
    usable = np.array([float(usable_bytes(d.memory_bytes)) for d in cluster.devices])
    most = UNFAIR * sum(held.values()) / usable.sum()
    busy, full, found = np.zeros(n), np.zeros(n), dict[str, int]()
    for node in sorted(nodes, key=lambda node: -float(seconds[node.name].min())):
        fuller = full + held[node.name] / usable
        fair = fuller <= max(most, float(fuller.min()))
        done = np.where(fair, busy + seconds[node.name], np.inf)
        rank = int(done.argmin())
        busy[rank], full[rank] = done[rank], fuller[rank]
        found[node.name] = rank
    return [found[node.name] for node in nodes]
