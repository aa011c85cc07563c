"""Seconds of one conversion on the cluster's links, for uneven shards.

N ranks, a value of B bytes, shares rho (source) and sigma (target) summing to 1, ports k of ``hap.fabric`` with rate
b_k, senders S_k and receivers R_k. Everything is ``constant + sum over stages of the slowest row``; a row is affine in
the shares, so the same ``CollectiveForm`` gives seconds to a plan and linear constraints to the ratio LP.

    all_gather      all_to_all      every rank sends its shard to each peer: port k carries B |R_k| rho(S_k)
                    padded          ring of shards padded to the largest: N-1 steps of B max(rho) bytes
                    broadcast       a broadcast per owner, grouped: NCCL pipelines them round the ring, where the edge
                                    into rank j carries all but j's own shard; Gloo sends each down a binomial tree
                    pairs, ring, relay, two_level: see below
    all_reduce      ring            2(N-1) steps of B/N bytes, by the backend
                    owners, two_level: see below
    reduce_scatter  all_to_all_sum  every rank sends each peer its piece, each sums: B |S_k| sigma(R_k)
                    padded          ring, N-1 steps of B max(sigma); on Gloo an all-reduce of the padded buffer, 2(N-1)
                    pairs, ring, relay, two_level: see below
    all_to_all      direct, pairs   rank i sends rank j the overlap of their ranges when both shard the same dim, else
                                    rho_i sigma_j B
    slice           local           no traffic; a copy of B sigma_i bytes

What HAP builds from point-to-point messages (``hap.routes``) sends owner o's bytes down a tree T_o, a reduce-scatter
up: port k carries B sum_o rho_o |edges of T_o that cross k|. An all-reduce does both at once, rho the owners' turns.
The latency is one message for every step of the deepest tree; a passed on segment takes its time once more.

A ring goes through the ranks in order, so each host's network carries one flow each way. Latencies: one message after
another for a rank that talks to all (N-1 of them), one per ring step. NCCL picks a tree where that has less latency.
Beside the links, packing and joining pieces is a stage limited by memory bandwidth. Sources: collectives.md sections
3.1 (alpha-beta), 3.4 (what Gloo and NCCL do), 3.6 (measured). No form goes below the lower bounds of section 3.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hap.cost_models.collective_routes import route_loads, routings
from hap.cost_models.fold import MOST_WHOLE, Cluster, FoldedCluster, FoldedFabric
from hap.cost_models.profile import CalibratedCluster
from hap.fabric import Array, Fabric
from hap.placement import GroupSizes, Placement, Shard
from hap.plan import Collective
from hap.routes import ROUTED, SEGMENT_BYTES, Way, segment_owners

CALL_S = {"nccl": 6.6e-6, "gloo": 50e-6}  # NCCL src/graph/tuning.cc, ring LL base latency; Gloo assumed
# Gloo posts all sends of an all-to-all at once and the streams collide: measured 1.50, 1.08, 1.05 times the bound for
# even, 5:5:1:1 and 1:1:5:5 shares (collectives.md 3.6), 1.2 in the geometric mean.
GLOO_ALL_TO_ALL_EFFICIENCY = 1 / 1.2
GLOO_BROADCAST_EFFICIENCY = 0.5  # same table: trees are not pipelined, 567 ms where the busiest link needs 262
COPY_EFFICIENCY = 0.8  # of memory bandwidth, assumed

MOST_ROUTED = (
    MOST_WHOLE  # ranks: trees of every owner grow with the square of the ranks; beyond, only the backends' own ways
)

_DECOMPOSITIONS: Mapping[tuple[Collective, str], tuple[str, ...]] = {
    ("all_gather", "nccl"): ("all_to_all", "padded", "broadcast", "ring", "relay", "two_level"),
    ("all_gather", "gloo"): ("all_to_all", "padded", "pairs", "ring", "relay", "two_level"),
    ("all_reduce", "nccl"): ("ring", "owners", "two_level"),
    ("all_reduce", "gloo"): ("ring", "owners", "two_level"),
    ("reduce_scatter", "nccl"): ("all_to_all_sum", "padded", "ring", "relay", "two_level"),
    ("reduce_scatter", "gloo"): ("all_to_all_sum", "padded", "pairs", "ring", "relay", "two_level"),
    ("all_to_all", "nccl"): ("direct",),
    ("all_to_all", "gloo"): ("direct", "pairs"),
    ("slice", "nccl"): ("local",),
    ("slice", "gloo"): ("local",),
}


@dataclass(frozen=True, eq=False)
class Stage:
    """Rows that run side by side: seconds = max over rows of (constant + by_source @ rho + by_target @ sigma).

    ``names`` (K,) says what each row is: a port, or a rank's device. ``constant`` (K,) seconds; ``by_source`` and
    ``by_target`` (K, N) seconds per unit of share. ``in_memory``: packing and joining, not the wire.
    """

    names: tuple[str, ...]
    constant: Array
    by_source: Array
    by_target: Array
    in_memory: bool = False

    def scaled(self, factor: float) -> Stage:
        return replace(
            self, constant=factor * self.constant, by_source=factor * self.by_source, by_target=factor * self.by_target
        )

    def rows(self, source: Array, target: Array) -> Array:
        result: Array = self.constant + self.by_source @ source + self.by_target @ target
        return result

    def seconds(self, source: Array, target: Array) -> float:
        return float(self.rows(source, target).max(initial=0.0))


@dataclass(frozen=True, eq=False)
class CollectiveForm:
    """``constant_s`` plus the stages one after another. ``source`` and ``target`` are shares (N,); where a placement is
    not a shard its argument is ignored (its coefficients are zero)."""

    constant_s: float
    stages: tuple[Stage, ...]

    def seconds(self, source: Array, target: Array) -> float:
        return self.constant_s + sum(stage.seconds(source, target) for stage in self.stages)


def decompositions(kind: Collective, backend: str) -> tuple[str, ...]:
    """The ways to perform a collective that are worth asking about on a backend; the first is the plainest. A name
    that takes a list of ranks stands here without one: ``candidates`` has those of a cluster."""
    return _DECOMPOSITIONS[kind, backend]


def candidates(kind: Collective, cluster: Cluster) -> tuple[str, ...]:
    """The same for a cluster: orders of ranks, relays and owners as its links suggest them."""
    found: list[str] = []
    for name in decompositions(kind, cluster.backend):
        routed = name in ROUTED and (kind, name) not in (("all_reduce", "ring"), ("all_to_all", "pairs"))
        if not routed:
            found.append(name)
        elif isinstance(cluster.fabric, Fabric) and cluster.fabric.world_size <= MOST_ROUTED:
            found += routings(name, cluster.fabric, tuple(d.host for d in cluster.devices))
    return tuple(found)


def best_decomposition(
    kind: Collective, nbytes: int, source: Placement, target: Placement, sizes: GroupSizes, cluster: Cluster
) -> tuple[str, float]:
    """``(decomposition, seconds)`` of the fastest; the first of equals."""
    return Forms(cluster).best(kind, nbytes, source, target, sizes)


@dataclass(frozen=True, eq=False)
class Forms:
    """The forms of one cluster's collectives, made once: but for an all-to-all, whose traffic depends on which ranges
    overlap, a form depends on sizes in bytes and not on shares."""

    cluster: Cluster
    _names: dict[Collective, tuple[str, ...]] = field(default_factory=dict, repr=False)
    _known: dict[tuple[Collective, str, int], CollectiveForm] = field(default_factory=dict, repr=False)

    def names(self, kind: Collective) -> tuple[str, ...]:
        if kind not in self._names:
            self._names[kind] = candidates(kind, self.cluster)
        return self._names[kind]

    def best(
        self, kind: Collective, nbytes: int, source: Placement, target: Placement, sizes: GroupSizes
    ) -> tuple[str, float]:
        """See ``best_decomposition``."""
        rho, sigma = (shares(p, sizes, len(self.cluster.devices)) for p in (source, target))
        timed = [
            (name, self._form(kind, name, nbytes, source, target, sizes).seconds(rho, sigma))
            for name in self.names(kind)
        ]
        return min(timed, key=lambda t: t[1])

    def _form(
        self, kind: Collective, name: str, nbytes: int, source: Placement, target: Placement, sizes: GroupSizes
    ) -> CollectiveForm:
        if kind == "all_to_all":
            return collective_coefficients(kind, name, nbytes, source, target, self.cluster, sizes=sizes)
        key = (kind, name, nbytes)
        if key not in self._known:
            self._known[key] = collective_coefficients(kind, name, nbytes, source, target, self.cluster)
        return self._known[key]


def collective_seconds(
    kind: Collective,
    decomposition: str,
    nbytes: int,
    source: Placement,
    target: Placement,
    sizes: GroupSizes,
    cluster: Cluster,
) -> float:
    """Seconds to turn a value of ``nbytes`` (whole) from ``source`` into ``target``."""
    form = collective_coefficients(kind, decomposition, nbytes, source, target, cluster, sizes=sizes)
    width = len(cluster.devices)
    return form.seconds(shares(source, sizes, width), shares(target, sizes, width))


def collective_coefficients(
    kind: Collective,
    decomposition: str,
    nbytes: int,
    source: Placement,
    target: Placement,
    cluster: Cluster,
    *,
    sizes: GroupSizes | None = None,
) -> CollectiveForm:
    """The seconds as a function of the shares.

    Exact for every decomposition but ``direct``, whose traffic is no affine function of the shares: without ``sizes``
    its rows are an upper bound (as if no rank kept anything), with ``sizes`` they are scaled to be exact there.
    """
    form = formula_coefficients(kind, decomposition, nbytes, source, target, cluster, sizes=sizes)
    if not isinstance(cluster, CalibratedCluster) or (cluster.fabric.world_size == 1 and kind != "slice"):
        return form
    problem = _Problem(cluster, cluster.fabric, float(nbytes), source, target, sizes)
    return _as_measured(form, kind, decomposition, problem, cluster)


def formula_coefficients(
    kind: Collective,
    decomposition: str,
    nbytes: int,
    source: Placement,
    target: Placement,
    cluster: Cluster,
    *,
    sizes: GroupSizes | None = None,
) -> CollectiveForm:
    """The same before anything that was measured of the collective itself; of the links it may have been."""
    problem = _Problem(cluster, cluster.fabric, float(nbytes), source, target, sizes)
    if cluster.fabric.world_size == 1 and kind != "slice":
        return CollectiveForm(0.0, ())
    return _form(problem, kind, decomposition)


def _form(p: _Problem, kind: Collective, decomposition: str) -> CollectiveForm:
    if kind == "slice":
        return _slice(p)
    known = _FORMS.get((kind, decomposition))
    return known(p) if known else _routed(p, kind, Way.parse(decomposition))


def _as_measured(
    form: CollectiveForm, kind: Collective, decomposition: str, p: _Problem, cluster: CalibratedCluster
) -> CollectiveForm:
    """The formula's wire stages scaled by what was measured of it, its memory stages replaced. A routing, which is one
    of many, takes what was measured of all of its name."""
    launch, per_whole, per_local = cluster.copy_rates(kind, decomposition)
    sharded = [isinstance(placement, Shard) for placement in (p.source, p.target)]
    whole = 0.0 if all(sharded) else p.nbytes
    source, target = (p.nbytes * per_local if cut else 0.0 for cut in sharded)
    memory = p.by_rank(constant=launch + whole * per_whole, source=source, target=target, in_memory=True)
    if kind == "slice":
        return CollectiveForm(0.0, (memory,))
    found = cluster.collective(kind, decomposition)
    factor = found.factor(p.nbytes)
    wire = tuple(stage.scaled(factor) for stage in form.stages if not stage.in_memory)
    return CollectiveForm(factor * form.constant_s, (*wire, memory))


def shares(placement: Placement, sizes: GroupSizes, world_size: int) -> Array:
    """Each rank's fraction of the value (N,): ones where it is not sharded."""
    if not isinstance(placement, Shard):
        return np.ones(world_size)
    return np.array(sizes[placement.group], dtype=np.float64) / placement.n


@dataclass(frozen=True, eq=False)
class _Problem:
    cluster: Cluster
    fabric: Fabric | FoldedFabric
    nbytes: float
    source: Placement
    target: Placement
    sizes: GroupSizes | None

    @property
    def n(self) -> int:
        return self.fabric.world_size

    @property
    def width(self) -> int:
        """The length of vectors: ranks, or classes of them."""
        return len(self.cluster.devices)

    @property
    def is_gloo(self) -> bool:
        return self.cluster.backend == "gloo"

    def network(
        self,
        *,
        constant: Array | None = None,
        by_source: Array | None = None,
        by_target: Array | None = None,
        efficiency: float = 1.0,
    ) -> Stage:
        """A stage with one row per port from the *bytes* it carries."""
        k, per_byte = len(self.fabric.rates), 1.0 / (self.fabric.rates * efficiency)
        nothing = np.zeros((k, self.width))
        return Stage(
            self.fabric.names,
            (np.zeros(k) if constant is None else constant) * per_byte,
            nothing if by_source is None else by_source * per_byte[:, None],
            nothing if by_target is None else by_target * per_byte[:, None],
        )

    def by_rank(
        self,
        *,
        constant: Array | float = 0.0,
        source: Array | float = 0.0,
        target: Array | float = 0.0,
        in_memory: bool = False,
    ) -> Stage:
        """A stage with one row per rank, each depending on its own shares only: seconds and seconds per share."""
        zeros = np.zeros(self.width)
        names = tuple(d.name for d in self.cluster.devices)
        return Stage(names, zeros + constant, np.diag(zeros + source), np.diag(zeros + target), in_memory)

    @property
    def call_s(self) -> float:
        """Before anything is sent; where it was measured it is no part of the formula."""
        return 0.0 if isinstance(self.cluster, CalibratedCluster) else CALL_S[self.cluster.backend]

    @property
    def copy_s(self) -> Array:
        """Seconds for each rank to read and write the whole value once in its own memory."""
        bandwidth = np.array([d.memory_bandwidth_bytes_per_s for d in self.cluster.devices])
        seconds: Array = 2.0 * self.nbytes / (COPY_EFFICIENCY * bandwidth)
        return seconds

    @property
    def exchange_latency_s(self) -> float:
        """Every rank sends to every other, one message after another."""
        return self.call_s + self.fabric.exchange_latency_s

    @property
    def all_to_all_efficiency(self) -> float:
        return GLOO_ALL_TO_ALL_EFFICIENCY if self.is_gloo and not isinstance(self.cluster, CalibratedCluster) else 1.0

    def ring_latency_s(self, steps: int) -> float:
        return self.call_s + steps * self.fabric.ring_latency_s

    @property
    def ring_s_per_byte(self) -> float:
        """Seconds of one step in which every rank sends one byte to its successor."""
        return float((self.fabric.edges.sum(axis=1) / self.fabric.rates).max())


def _slice(p: _Problem) -> CollectiveForm:
    launch = np.array([d.launch_s for d in p.cluster.devices])
    return CollectiveForm(0.0, (p.by_rank(constant=launch, target=p.copy_s, in_memory=True),))


def _gather_exchange(p: _Problem) -> CollectiveForm:
    carried = p.nbytes * p.fabric.senders * p.fabric.receivers.sum(axis=1)[:, None]
    stage = p.network(by_source=carried, efficiency=p.all_to_all_efficiency)
    return CollectiveForm(p.exchange_latency_s, (stage, p.by_rank(constant=p.copy_s, in_memory=True)))


def _gather_padded(p: _Problem) -> CollectiveForm:
    steps = p.n - 1
    stage = p.by_rank(source=steps * p.nbytes * p.ring_s_per_byte)
    return CollectiveForm(p.ring_latency_s(steps), (stage, p.by_rank(constant=p.copy_s, in_memory=True)))


def _gather_broadcast(p: _Problem) -> CollectiveForm:
    if p.is_gloo:
        depth = math.ceil(math.log2(p.n))
        stage = p.network(by_source=p.nbytes * _trees(p), efficiency=GLOO_BROADCAST_EFFICIENCY)
        latency = p.n * p.call_s + depth * p.fabric.largest_latency_s
        return CollectiveForm(latency, (stage, p.by_rank(constant=p.copy_s, in_memory=True)))
    stage = p.network(constant=p.nbytes * p.fabric.edges.sum(axis=1), by_source=-p.nbytes * p.fabric.arriving)
    return CollectiveForm(p.ring_latency_s(p.n - 1), (stage, p.by_rank(constant=p.copy_s, in_memory=True)))


def _trees(p: _Problem) -> Array:
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


def _reduce_ring(p: _Problem) -> CollectiveForm:
    steps = 2 * (p.n - 1)
    latency = p.ring_latency_s(steps)
    if not p.is_gloo:
        depth = 2 * math.ceil(math.log2(p.n))
        latency = min(latency, p.call_s + depth * p.fabric.largest_latency_s)
    seconds = steps * (p.nbytes / p.n) * p.ring_s_per_byte
    return CollectiveForm(latency + seconds, ())


def _scatter_exchange(p: _Problem) -> CollectiveForm:
    carried = p.nbytes * p.fabric.receivers * p.fabric.senders.sum(axis=1)[:, None]
    stage = p.network(by_target=carried, efficiency=p.all_to_all_efficiency)
    summing = p.copy_s * (p.n + 1) / 2  # N pieces read, one written
    return CollectiveForm(p.exchange_latency_s, (stage, p.by_rank(constant=p.copy_s, target=summing, in_memory=True)))


def _scatter_padded(p: _Problem) -> CollectiveForm:
    steps = (2 if p.is_gloo else 1) * (p.n - 1)
    stage = p.by_rank(target=steps * p.nbytes * p.ring_s_per_byte)
    return CollectiveForm(p.ring_latency_s(steps), (stage, p.by_rank(constant=p.copy_s, in_memory=True)))


def _routed(p: _Problem, kind: Collective, way: Way) -> CollectiveForm:
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


def _whole(p: _Problem) -> Fabric:
    assert isinstance(p.fabric, Fabric), "routes are of ranks, not of classes"
    return p.fabric


def _direct(p: _Problem) -> CollectiveForm:
    return _exchange(p, p.all_to_all_efficiency)


def _paired(p: _Problem) -> CollectiveForm:
    return _exchange(p, 1.0)


def _exchange(p: _Problem, efficiency: float) -> CollectiveForm:
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


def _carried(p: _Problem, rho: Array, sigma: Array) -> Array:
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
    ends = np.unique(np.concatenate([have, want]))
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


_FORMS: Mapping[tuple[Collective, str], Callable[[_Problem], CollectiveForm]] = {
    ("all_gather", "all_to_all"): _gather_exchange,
    ("all_gather", "padded"): _gather_padded,
    ("all_gather", "broadcast"): _gather_broadcast,
    ("all_reduce", "ring"): _reduce_ring,
    ("reduce_scatter", "all_to_all_sum"): _scatter_exchange,
    ("reduce_scatter", "padded"): _scatter_padded,
    ("all_to_all", "direct"): _direct,
    ("all_to_all", "pairs"): _paired,
}
