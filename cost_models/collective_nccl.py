"""Seconds of a conversion where NCCL joins NVIDIA's GPUs: its own calls as its tuner expects them (``nccl``), and what
is built from messages by the plain formulas with the latencies of NCCL's messages.

N ranks, a value of B bytes, source shares rho, target shares sigma; ``line`` runs over NCCL's pairs of algorithm and
protocol, ``Simple`` is the ring by Simple, the pair with the most bandwidth:

    all_reduce      ring        min over lines of latency + B s_per_byte
    all_gather      padded      Simple's s_per_byte * N B max(rho), and whatever the best line costs above that when
    reduce_scatter  padded      dealt evenly:  min over lines of latency + B (s_per_byte - Simple's s_per_byte)
    all_gather      broadcast   N calls on one stream: min over protocols of N bases + a ring's hops + B / bandwidth
    to and from all peers       one call by Simple: the longest hop, and each further message handed to the network
    the rest                    one call by Simple for each round of messages (``hap.runtime.p2p``); a schedule that
                                passes segments on has a round for each that the largest owner has

Messages of one call wait side by side ("can be seen as progressing independently", NCCL's user guide on point-to-point
communication).

Each is a constant, concave in B, and stages proportional to B and affine in the shares, as the search wants it: a
straight line between two sizes is never above it.

A cluster is priced so when all its GPUs and its links inside hosts are known to be NVIDIA's (``ClusterSpec.nvidia``).
Otherwise, and where collectives were measured (a profile), the plain forms stay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hap.cluster import ClusterSpec, Nvidia
from hap.cost_models.collective_form import CollectiveForm, Problem, Stage
from hap.cost_models.collective_formulas import formula
from hap.cost_models.collective_routes import route_loads
from hap.cost_models.fold import Cluster, FoldedCluster
from hap.cost_models.nccl import (
    Communicator,
    base_s,
    fastest,
    generation_of,
    lines,
    network_hop_s,
    post_s,
)
from hap.cost_models.profile import CalibratedCluster
from hap.fabric import Fabric
from hap.plan import Collective
from hap.routes import ROUTED, SEGMENT_BYTES, Way, segment_owners

LL128_SINCE = 70  # compute capability
CALL_S = base_s("ring", "Simple")  # of a call that exchanges messages


@dataclass(frozen=True, eq=False)
class Speech:
    """A cluster as NCCL sees it: one communicator, the fabric with the latencies of single messages, and the latency of
    messages to all peers in one call."""

    comm: Communicator
    messages: Fabric
    exchange_s: float


def speech(cluster: Cluster) -> Speech | None:
    """None where nothing says that NCCL joins NVIDIA's GPUs, or where its collectives were measured."""
    whole = _whole(cluster)
    if isinstance(whole, CalibratedCluster) or whole.nvidia is None or whole.world_size == 1:
        return None
    return _speech(whole.fabric, whole.nvidia)


def priced_by(cluster: ClusterSpec) -> tuple[str, ...]:
    """What a plan assumes of NCCL, in words; nothing on another backend or where collectives were measured."""
    if cluster.backend != "nccl" or isinstance(cluster, CalibratedCluster) or cluster.world_size == 1:
        return ()
    told = speech(cluster)
    if told is None:
        return (
            "collectives take latency and bandwidth alone: NCCL's own model asks for NVIDIA's GPUs from the catalogue, "
            "links inside hosts of a known kind, and no curves",
        )
    comm = told.comm
    inside = "" if comm.inside is None else f", {comm.inside} inside hosts"
    return (f"collectives take what NCCL's own model expects: {comm.generation}{inside}, its least of rings and trees",)


def nccl_formula(p: Problem, kind: Collective, decomposition: str, speech: Speech) -> CollectiveForm:
    """Seconds of one way to perform a collective, or of a routing."""
    match kind, decomposition:
        case "slice", _:
            return formula(p, kind, decomposition)
        case "all_reduce", "ring":
            return CollectiveForm(fastest("all_reduce", p.nbytes, speech.comm).seconds, ())
        case "all_gather", "padded":
            constant, per_share = _padded("all_gather", p, speech.comm)
            return CollectiveForm(constant, (p.by_rank(source=per_share), _copies(p)))
        case "reduce_scatter", "padded":
            constant, per_share = _padded("reduce_scatter", p, speech.comm)
            return CollectiveForm(constant, (p.by_rank(target=per_share), _copies(p)))
        case "all_gather", "broadcast":
            return CollectiveForm(_broadcasts_s(p.nbytes, speech.comm), (_copies(p),))
    way = Way.parse(decomposition)
    if way.name in ROUTED and kind != "all_to_all":
        return _by_rounds(replace(p, fabric=speech.messages, base_s=CALL_S), kind, way)
    return replace(formula(p, kind, decomposition), constant_s=CALL_S + speech.exchange_s)


def _padded(kind: Collective, p: Problem, comm: Communicator) -> tuple[float, float]:
    """(constant, seconds of the wire for the largest share)."""
    assert kind in ("all_gather", "reduce_scatter")
    simple = p.nbytes * (comm.ranks - 1) / comm.ranks / comm.bus_bytes_per_s
    return fastest(kind, p.nbytes, comm).seconds - simple, comm.ranks * simple


def _broadcasts_s(nbytes: float, comm: Communicator) -> float:
    return min(
        line.latency_s
        + (comm.ranks - 1) * base_s("ring", line.protocol)
        + nbytes * line.s_per_byte * comm.ranks / (comm.ranks - 1)
        for line in lines("all_gather", comm)
    )


def _copies(p: Problem) -> Stage:
    return p.by_rank(constant=p.copy_s, in_memory=True)


def _by_rounds(p: Problem, kind: Collective, way: Way) -> CollectiveForm:
    """Each round is a call of its own, which the formula of a stream of messages does not know. A sum goes up and down
    in every round, which then waits for its messages. Of shards passed on, owners that send in the same rounds wait
    for each other; what one of them sends alone comes in without a pause. So calls count for the largest shard, waiting
    for an even one."""
    assert isinstance(p.fabric, Fabric), "routes are of ranks, not of classes"
    form = formula(p, kind, str(way))
    depth, segments = route_loads(way, p.fabric).depth, p.nbytes / SEGMENT_BYTES
    wait_s = p.fabric.largest_latency_s
    if kind == "all_reduce":
        turns = segments / len(segment_owners(way, p.n))
        rounds_s = (2 * depth - 1) * CALL_S + turns * (CALL_S + wait_s)
        return replace(form, constant_s=form.constant_s + rounds_s)
    if depth == 1:
        return form
    calls = segments * CALL_S
    stage = p.by_rank(source=calls) if kind == "all_gather" else p.by_rank(target=calls)
    constant_s = form.constant_s + (depth - 1) * CALL_S + segments / p.n * wait_s
    return CollectiveForm(constant_s, (*form.stages, stage))


def _whole(cluster: Cluster) -> ClusterSpec:
    return cluster.whole if isinstance(cluster, FoldedCluster) else cluster


@lru_cache(maxsize=32)
def _speech(fabric: Fabric, gpus: Nvidia) -> Speech:
    host, ranks = np.array(gpus.host), np.arange(fabric.world_size)
    same, after = host[:, None] == host, np.roll(ranks, -1)
    on_network = fabric.latency_s[ranks, after][host != host[after]]
    least, nothing = network_hop_s("tree", "Simple", 0.0), network_hop_s("tree", "LL", 0.0)
    latency_s = np.where(same, fabric.latency_s, least + np.maximum(0.0, fabric.latency_s - nothing))
    latency_s.flags.writeable = False
    comm = Communicator(
        ranks=fabric.world_size,
        hosts=gpus.host[-1] + 1,
        inside=gpus.inside,
        bus_bytes_per_s=1.0 / fabric.ring_s_per_byte,
        generation=generation_of(gpus.oldest),
        ll128=gpus.oldest == gpus.newest >= LL128_SINCE and gpus.inside != "pcie",
        network_latency_s=float(on_network.max(initial=0.0)),
        most_on_a_host=gpus.most_on_a_host,
    )
    messages = replace(fabric, latency_s=latency_s)
    posted = max(0, int((~same).sum(axis=1).max()) - 1)
    return Speech(comm, messages, messages.largest_latency_s + posted * post_s("Simple"))
