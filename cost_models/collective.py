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
another for a rank that talks to all (N-1 of them), one per ring step. NCCL picks a tree where that has less latency;
where its GPUs are known, its own model of itself replaces these formulas (``collective_nccl``). Beside the links,
packing and joining pieces is a stage limited by memory bandwidth. No form goes below the least time in which each
host's network receives what its ranks lack and sends what only they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hap.cost_models.collective_delays import delayed
from hap.cost_models.collective_form import (
    CALL_S,
    COPY_EFFICIENCY,
    GLOO_ALL_TO_ALL_EFFICIENCY,
    CollectiveForm,
    Problem,
    Stage,
    shares,
)
from hap.cost_models.collective_formulas import formula, overlaps
from hap.cost_models.collective_nccl import nccl_formula, speech
from hap.cost_models.collective_routes import routings
from hap.cost_models.fold import MOST_WHOLE, Cluster
from hap.cost_models.profile import CalibratedCluster
from hap.fabric import Array, Fabric
from hap.placement import GroupSizes, Placement, Shard
from hap.plan import Collective
from hap.routes import ROUTED

__all__ = [
    "CALL_S",
    "COPY_EFFICIENCY",
    "GLOO_ALL_TO_ALL_EFFICIENCY",
    "CollectiveForm",
    "Forms",
    "Stage",
    "best_decomposition",
    "candidates",
    "collective_coefficients",
    "collective_seconds",
    "decompositions",
    "formula_coefficients",
    "overlaps",
    "shares",
]

# Trees of every owner grow with the square of the ranks; beyond so many, only the backends' own ways.
MOST_ROUTED = MOST_WHOLE

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


def decompositions(kind: Collective, backend: str) -> tuple[str, ...]:
    """The ways to perform a collective that are worth asking about on a backend; the first is the plainest. A name
    that takes a list of ranks stands here without one: ``candidates`` has those of a cluster."""
    return _DECOMPOSITIONS[kind, backend]


def candidates(kind: Collective, cluster: Cluster) -> tuple[str, ...]:
    """The same for a cluster: orders of ranks, relays and owners as its links suggest them. A part of a measured one
    has those alone that were measured of the whole, whose links may have suggested less."""
    found: list[str] = []
    profile = cluster.profile if isinstance(cluster, CalibratedCluster) else None
    measured = {(c.kind, c.decomposition) for c in profile.collectives} if profile is not None else set()
    for name in decompositions(kind, cluster.backend):
        routed = name in ROUTED and (kind, name) not in (("all_reduce", "ring"), ("all_to_all", "pairs"))
        if not routed:
            found.append(name)
        elif measured and (kind, name) not in measured:
            continue
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
    _best: dict[tuple[object, ...], tuple[str, float]] = field(default_factory=dict, repr=False)

    def names(self, kind: Collective) -> tuple[str, ...]:
        if kind not in self._names:
            self._names[kind] = candidates(kind, self.cluster)
        return self._names[kind]

    def best(
        self, kind: Collective, nbytes: int, source: Placement, target: Placement, sizes: GroupSizes
    ) -> tuple[str, float]:
        """See ``best_decomposition``."""
        key = (kind, nbytes, *(_what_matters(p, sizes, kind) for p in (source, target)))
        if key not in self._best:
            self._best[key] = self._find_best(kind, nbytes, source, target, sizes)
        return self._best[key]

    def _find_best(
        self, kind: Collective, nbytes: int, source: Placement, target: Placement, sizes: GroupSizes
    ) -> tuple[str, float]:
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


def _what_matters(placement: Placement, sizes: GroupSizes, kind: Collective) -> object:
    """What the seconds of a collective depend on."""
    if not isinstance(placement, Shard):
        return str(placement)
    return (placement if kind == "all_to_all" else None, tuple(sizes[placement.group]))


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
    problem = Problem(cluster, cluster.fabric, float(nbytes), source, target, sizes)
    return _as_measured(form, kind, decomposition, problem, cluster)


@dataclass(frozen=True, eq=False)
class Course:
    """How a collective goes on a measured cluster: seconds on the wire; by rank (N,) seconds of packing and joining,
    and by how many seconds it is done before the last one."""

    wire_s: float
    packing_s: Array
    ahead_s: Array


def course(
    kind: Collective,
    decomposition: str,
    nbytes: int,
    source: Placement,
    target: Placement,
    cluster: CalibratedCluster,
    sizes: GroupSizes,
) -> Course:
    """Of the same seconds as ``collective_coefficients`` has, which rank spends which."""
    form = collective_coefficients(kind, decomposition, nbytes, source, target, cluster, sizes=sizes)
    given = tuple(shares(p, sizes, cluster.world_size) for p in (source, target))
    wire_s = form.constant_s + sum(stage.seconds(*given) for stage in form.stages if not stage.in_memory)
    packing_s = np.zeros(cluster.world_size)
    for stage in form.stages:
        packing_s = packing_s + stage.rows(*given) if stage.in_memory else packing_s
    early = cluster.collective(kind, decomposition).ahead if cluster.world_size > 1 else ()
    return Course(wire_s, packing_s, wire_s * np.array(early) if early else np.zeros(cluster.world_size))


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
    problem = Problem(cluster, cluster.fabric, float(nbytes), source, target, sizes)
    if cluster.fabric.world_size == 1 and kind != "slice":
        return CollectiveForm(0.0, ())
    told = speech(cluster)
    if told is not None:
        return nccl_formula(problem, kind, decomposition, told)
    return delayed(problem, kind, decomposition) if cluster.fabric.by_size else formula(problem, kind, decomposition)


def _as_measured(
    form: CollectiveForm, kind: Collective, decomposition: str, p: Problem, cluster: CalibratedCluster
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
