"""What a step on a mesh of two axes takes at least, and how fast hosts are.

For weights w >= 0 of the devices that sum to 1, nothing overlapped,

    T >= sum_n min_d w[d] * whole[n,d]  +  sum_h sum_p min_{d in h} w[d] * update[p,d]  +  S

``whole`` are the seconds of call n alone on device d: however a call is cut along two axes, the parts of its arithmetic
sum to one at least, whoever has a part rho of it reads and writes at least as much of every operand, and launches it,
which is rho launches at least. Every host updates all parameters (``update``), dealt out inside it. S are the sums of
all gradients over the hosts, for which all devices wait (``hap.hosts_sum``). Communication inside hosts is free. Where
a step of the optimizer has several batches, each pays its part of the update and the sums. Any weights prove a bound;
those of an LP are taken, as on one axis (``bound``). It goes for every way to deal the batch out to these hosts, with
these sums, and all plans inside.

``arithmetic_s`` is less, and goes for both clocks and any mesh: only products, attentions and convolutions, with their
flops perfectly dealt out, ``flops * min_d (w[d] / rate[d])``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch

from hap.cluster import ClusterSpec
from hap.cost_models.compute import DEFAULT_MODEL, parts_seconds, split_work
from hap.cost_models.evaluate import UpdateTable
from hap.cost_models.optimizers import update_flops
from hap.cost_models.work import OpClass, node_work
from hap.graph import Graph
from hap.hosts_sum import outward_bytes
from hap.rules.choices import replicated
from hap.rules.host_graph import widens
from hap.search.bound import Bound, Line, best_weights, computes_like, device_classes


def least_s(graph: Graph, cluster: ClusterSpec, optimizer: str, batches: int = 1) -> float:
    """The bound of the module docstring, in seconds of one of so many ``batches``."""
    devices, counts = device_classes(cluster)
    lines: Counter[tuple[float, ...]] = Counter()
    for node in graph.nodes:
        if not node.is_source:
            parts = split_work(node_work(graph, node), replicated(node))
            lines[tuple(parts_seconds(parts, 1.0, d) for d in devices)] += 1
    nothing = (0.0,) * len(devices)
    bound = Bound(tuple(((Line(nothing, whole),), n) for whole, n in lines.items() if any(whole)), counts)
    if not bound.menus:
        return sums_s(graph, cluster) / batches
    weights = best_weights(bound)
    total = sum(w * c for w, c in zip(weights, counts, strict=True))
    of_kind = {computes_like(d): w / total for d, w in zip(devices, weights, strict=True)}
    once_s = _updates_s(graph, cluster, optimizer, of_kind) + sums_s(graph, cluster)
    return bound.seconds(weights) + once_s / batches


def _updates_s(graph: Graph, cluster: ClusterSpec, optimizer: str, of_kind: Mapping[object, float]) -> float:
    """Of every host's update, weighted, each parameter where its host has it at the least weight. ``of_kind``: the
    weight of one device of each kind."""
    trained = [n for n in graph.sources("parameter") if n.target in graph.gradients]
    if not trained:
        return 0.0
    flops = np.array([[update_flops(optimizer, graph, n)] for n in trained])
    nbytes = np.array([[float(n.meta.nbytes)] for n in trained])
    weights = np.array([of_kind[computes_like(d)] for d in cluster.devices])
    whole = UpdateTable(cluster, optimizer).seconds(nbytes.repeat(cluster.world_size, axis=1), flops) * weights
    hosts = [[d.rank for d in cluster.devices if d.host == h.name] for h in cluster.hosts]
    return sum(float(whole[:, ranks].min(axis=1).sum()) for ranks in hosts)


def sums_s(graph: Graph, cluster: ClusterSpec) -> float:
    """Seconds of the sums of all gradients over the hosts, at least: of one of several parameters once, and of what was
    rounded before it is widened."""
    makers = {v: graph.by_name[v.node] for v in graph.gradients.values()}
    values = {node.inputs[0] if widens(graph, node) else v for v, node in makers.items()}
    nbytes = sum(graph.meta(v).nbytes for v in values)
    return outward_bytes(nbytes, len(cluster.hosts), 1) / slowest_rate(cluster)


def slowest_rate(cluster: ClusterSpec) -> float:
    """Bytes a second of the slowest way out or in of any host."""
    return min(min(n) for h in cluster.hosts if (n := cluster.network(h.name)) is not None)


def speeds(graph: Graph, cluster: ClusterSpec) -> list[float]:
    """Of each host: steps a second, if its devices' arithmetic were all."""
    alone = _alone_s(graph, cluster)
    by_host = [sum(1 / alone[d.rank] for d in cluster.devices if d.host == h.name) for h in cluster.hosts]
    return by_host


def arithmetic_s(graph: Graph, cluster: ClusterSpec) -> float:
    """See the module docstring; the weights are in proportion to each device's speed."""
    work = _arithmetic(graph, cluster)
    alone = _alone_s(graph, cluster)
    total = sum(1 / s for s in alone)
    return sum(flops * min(1 / s / total / rate for s, rate in zip(alone, rates, strict=True)) for flops, rates in work)


def _alone_s(graph: Graph, cluster: ClusterSpec) -> list[float]:
    """Seconds of all arithmetic on each device alone."""
    work = _arithmetic(graph, cluster)
    return [max(1e-12, sum(flops / rates[d.rank] for flops, rates in work)) for d in cluster.devices]


def _arithmetic(graph: Graph, cluster: ClusterSpec) -> list[tuple[float, list[float]]]:
    """Of each kind of arithmetic: the operations of a step, and how many a second each device does."""
    flops: dict[tuple[OpClass, torch.dtype], float] = {}
    for node in graph.nodes:
        work = node_work(graph, node)
        if work.op_class in ("matmul", "attention", "conv"):
            flops[work.op_class, work.dtype] = flops.get((work.op_class, work.dtype), 0.0) + work.flops
    return [(f, [DEFAULT_MODEL.flops_per_s(d, *kind) for d in cluster.devices]) for kind, f in flops.items()]
