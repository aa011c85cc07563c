"""The formulas of ``hap.cost_models.collective``, one per kind of collective and decomposition."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hap.cost_models.collective_form import (
    GLOO_BROADCAST_EFFICIENCY,
    CollectiveForm,
    Problem,
    shares,
)
from hap.cost_models.collective_routes import route_loads
from hap.cost_models.fold import FoldedCluster, FoldedFabric
from hap.fabric import Array, Fabric
from hap.placement import Placement, Shard
from hap.plan import Collective
from hap.routes import SEGMENT_BYTES, Way, segment_owners


def formula(p: Problem, kind: Collective, decomposition: str) -> CollectiveForm:
    """Seconds of one way to perform a collective, or of a routing."""
    if kind == "slice":
        return _slice(p)
    known = _FORMS.get((kind, decomposition))
    return known(p) if known else _routed(p, kind, Way.parse(decomposition))


def _slice(p: Problem) -> CollectiveForm:
    launch = np.array([d.launch_s for d in p.cluster.devices])
    return CollectiveForm(0.0, (p.by_rank(constant=launch, target=p.copy_s, in_memory=True),))


def _gather_exchange(p: Problem) -> CollectiveForm:
    carried = p.nbytes * p.fabric.senders * p.fabric.receivers.sum(axis=1)[:, None]
    stage = p.network(by_source=carried, efficiency=p.all_to_all_efficiency)
    return CollectiveForm(p.exchange_latency_s, (stage, p.by_rank(constant=p.copy_s, in_memory=True)))


def _gather_padded(p: Problem) -> CollectiveForm:
    steps = p.n - 1
    stage = p.by_rank(source=steps * p.nbytes * p.ring_s_per_byte)
    return CollectiveForm(p.ring_latency_s(steps), (stage, p.by_rank(constant=p.copy_s, in_memory=True)))


def _gather_broadcast(p: Problem) -> CollectiveForm:
    if p.is_gloo:
        depth = math.ceil(math.log2(p.n))
        stage = p.network(by_source=p.nbytes * _trees(p), efficiency=GLOO_BROADCAST_EFFICIENCY)
        latency = p.n * p.call_s + depth * p.fabric.largest_latency_s
        return CollectiveForm(latency, (stage, p.by_rank(constant=p.copy_s, in_memory=True)))
    stage = p.network(constant=p.nbytes * p.fabric.edges.sum(axis=1), by_source=-p.nbytes * p.fabric.arriving)
    return CollectiveForm(p.ring_latency_s(p.n - 1), (stage, p.by_rank(constant=p.copy_s, in_memory=True)))


def _trees(p: Problem) -> Array:
    """(K, N): how often port k is crossed when rank i's bytes go down the binomial tree from i."""
    carried = np.zeros_like(p.fabric.senders)
    for root in range(p.n):
        reach = 1
        while reach < p.n:
            for holder in range(min(reach, p.n - reach)):
                src, dst = (root + holder) % p.n, (root + holder + reach) % p.n
                carried[:, root] += p.fabric.senders[:, src] * p.fabric.receivers[:, dst]
            reach *= 2
    return carried


def _reduce_ring(p: Problem) -> CollectiveForm:
    steps = 2 * (p.n - 1)
    latency = p.ring_latency_s(steps)
    if not p.is_gloo:
        depth = 2 * math.ceil(math.log2(p.n))
        latency = min(latency, p.call_s + depth * p.fabric.largest_latency_s)
    seconds = steps * (p.nbytes / p.n) * p.ring_s_per_byte
    return CollectiveForm(latency + seconds, ())


def _scatter_exchange(p: Problem) -> CollectiveForm:
    carried = p.nbytes * p.fabric.receivers * p.fabric.senders.sum(axis=1)[:, None]
    stage = p.network(by_target=carried, efficiency=p.all_to_all_efficiency)
    summing = p.copy_s * (p.n + 1) / 2  # N pieces read, one written
    return CollectiveForm(p.exchange_latency_s, (stage, p.by_rank(constant=p.copy_s, target=summing, in_memory=True)))


def _scatter_padded(p: Problem) -> CollectiveForm:
    steps = (2 if p.is_gloo else 1) * (p.n - 1)
    stage = p.by_rank(target=steps * p.nbytes * p.ring_s_per_byte)
    return CollectiveForm(p.ring_latency_s(steps), (stage, p.by_rank(constant=p.copy_s, in_memory=True)))


def _routed(p: Problem, kind: Collective, way: Way) -> CollectiveForm:
    loads = route_loads(way, _whole(p))
    latency = p.call_s + loads.latency_s
    again = min(p.nbytes, SEGMENT_BYTES) * loads.pass_on_s_per_byte
    if kind == "all_gather":
        stage = p.network(by_source=p.nbytes * loads.down)
        return CollectiveForm(latency + again, (stage, p.by_rank(constant=p.copy_s, in_memory=True)))
    if kind == "reduce_scatter":
        stage = p.network(by_target=p.nbytes * loads.up)
        summing = p.copy_s * (p.n + 1) / 2
        return CollectiveForm(latency + again, (stage, p.by_rank(constant=p.copy_s, target=summing, in_memory=True)))
    assert kind == "all_reduce", f"{kind} has no decomposition {way}"
    owners = segment_owners(way, p.n)
    turns = np.bincount(owners, minlength=p.n) / len(owners)
    first = min(p.nbytes / len(owners), SEGMENT_BYTES) * loads.turn_s_per_byte
    busiest = float((p.nbytes * ((loads.down + loads.up) @ turns) / p.fabric.rates).max())
    return CollectiveForm(p.call_s + 2 * loads.latency_s + 2 * again + first + busiest, ())


def _whole(p: Problem) -> Fabric:
    assert isinstance(p.fabric, Fabric), "routes are of ranks, not of classes"
    return p.fabric


def _direct(p: Problem) -> CollectiveForm:
    return _exchange(p, p.all_to_all_efficiency)


def _paired(p: Problem) -> CollectiveForm:
    return _exchange(p, 1.0)


def _exchange(p: Problem, efficiency: float) -> CollectiveForm:
    """Port k carries at most rho(S_k) B and at most sigma(R_k) B; the row uses the smaller of the two sets."""
    sends_less = p.fabric.senders.sum(axis=1) <= p.fabric.receivers.sum(axis=1)
    by_source = p.nbytes * p.fabric.senders * sends_less[:, None]
    by_target = p.nbytes * p.fabric.receivers * ~sends_less[:, None]
    if p.sizes is not None:
        source, target = (shares(placement, p.sizes, p.width) for placement in (p.source, p.target))
        bound = by_source @ source + by_target @ target
        carried = p.nbytes * _carried(p, source, target)
        exact = np.divide(carried, bound, out=np.ones_like(bound), where=bound > 0)
        by_source, by_target = by_source * exact[:, None], by_target * exact[:, None]
    stage = p.network(by_source=by_source, by_target=by_target, efficiency=efficiency)
    return CollectiveForm(p.exchange_latency_s, (stage, p.by_rank(source=p.copy_s, target=p.copy_s, in_memory=True)))


def exchanges_s_per_byte(p: Problem, decomposition: str, pairs: Sequence[tuple[Placement, Placement]]) -> Array:
    """What ``formula`` takes for an all-to-all of each of these pairs of placements (W,), beside its constant and for
    every byte: many pairs at once. ``p`` has the sizes, and may have any placements."""
    assert p.sizes is not None
    rho, sigma = (np.array([shares(end, p.sizes, p.width) for end in ends]).T for ends in zip(*pairs, strict=True))
    carried = (p.fabric.senders @ rho) * (p.fabric.receivers @ sigma)
    for w, (source, target) in enumerate(pairs):
        if _same_ranges(source, target):
            carried[:, w] = _carried(replace(p, source=source, target=target), rho[:, w], sigma[:, w])
    efficiency = p.all_to_all_efficiency if decomposition == "direct" else 1.0
    wire = (carried / (p.fabric.rates * efficiency)[:, None]).max(axis=0)
    copies: Array = (p.copy_s[:, None] / p.nbytes * (rho + sigma)).max(axis=0)
    return wire + copies


def _carried(p: Problem, rho: Array, sigma: Array) -> Array:
    """(K,): the fraction of the value that crosses every port."""
    if not _same_ranges(p.source, p.target):
        independent: Array = (p.fabric.senders @ rho) * (p.fabric.receivers @ sigma)
        return independent
    if isinstance(p.cluster, FoldedCluster):
        assert isinstance(p.fabric, FoldedFabric)
        whole = replace(p, cluster=p.cluster.whole, fabric=p.cluster.whole.fabric)
        of = list(p.cluster.of)
        return p.fabric.busiest(_carried(whole, rho[of], sigma[of]))
    return _whole(p).crossing(*_common(rho, sigma))


def _common(rho: Array, sigma: Array) -> tuple[NDArray[np.intp], NDArray[np.intp], Array]:
    """Ranges of lengths rho and of lengths sigma over the same index: which two overlap, and by how much."""
    have, want = np.cumsum(rho), np.cumsum(sigma)
    ends = np.sort(np.concatenate([have, want]))  # of those that are equal all but one begin ranges of nothing
    begins = np.concatenate([[0.0], ends[:-1]])
    middle, last = (begins + ends) / 2, len(rho) - 1
    i, j = (np.minimum(np.searchsorted(edge, middle, side="right"), last) for edge in (have, want))
    return i, j, ends - begins


def _same_ranges(source: Placement, target: Placement) -> bool:
    assert isinstance(source, Shard) and isinstance(target, Shard)
    return source.dim == target.dim and source.outer == target.outer


def overlaps(source: Placement, target: Placement, rho: Array, sigma: Array) -> Array:
    """(N, N): the fraction of the value that rank i holds and rank j wants.

    Two shards of one dim with the same outer factor are ranges of the same index, and overlap as ranges do. Any other
    two are taken as independent, which is exact for two different dims.
    """
    if not _same_ranges(source, target):
        return np.outer(rho, sigma)
    have, want = np.cumsum(rho), np.cumsum(sigma)
    low = np.maximum.outer(have - rho, want - sigma)
    high = np.minimum.outer(have, want)
    return np.maximum(high - low, 0.0)


_FORMS: Mapping[tuple[Collective, str], Callable[[Problem], CollectiveForm]] = {
    ("all_gather", "all_to_all"): _gather_exchange,
    ("all_gather", "padded"): _gather_padded,
    ("all_gather", "broadcast"): _gather_broadcast,
    ("all_reduce", "ring"): _reduce_ring,
    ("reduce_scatter", "all_to_all_sum"): _scatter_exchange,
    ("reduce_scatter", "padded"): _scatter_padded,
    ("all_to_all", "direct"): _direct,
    ("all_to_all", "pairs"): _paired,
}
