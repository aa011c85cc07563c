"""What a routed collective (``hap.routes``) does to the ports of a cluster, and which routings are worth trying there.

``RouteLoads`` belongs to a way and a fabric and to nothing else: it is remembered, since a search asks for it for every
value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hap.fabric import Array, Fabric
from hap.routes import Way, tree


@dataclass(frozen=True, eq=False)
class RouteLoads:
    """``down`` (K, N): how often port k is crossed when rank i's bytes go down its tree; ``up`` when they come up.

    ``depth``: of the deepest tree; ``latency_s``: of all its steps. ``pass_on_s_per_byte``: what the last segment takes
    on its last step. ``turn_s_per_byte``: what the slowest link takes for the segment that comes up before any goes
    down.
    """

    down: Array
    up: Array
    depth: int
    latency_s: float
    pass_on_s_per_byte: float
    turn_s_per_byte: float


@lru_cache(maxsize=512)
def route_loads(way: Way, fabric: Fabric) -> RouteLoads:
    """Of every owner's tree."""
    n = fabric.world_size
    down, up = np.zeros_like(fabric.senders), np.zeros_like(fabric.senders)
    pace = _pair_s_per_byte(fabric)
    depth, latency, passing = 0, 0.0, 0.0
    for root in range(n):
        edges = tree(way, root, n)
        parents, children = [e.parent for e in edges], [e.child for e in edges]
        down[:, root] = (fabric.senders[:, parents] * fabric.receivers[:, children]).sum(axis=1)
        up[:, root] = (fabric.senders[:, children] * fabric.receivers[:, parents]).sum(axis=1)
        steps: dict[int, float] = {}
        for e in edges:
            steps[e.depth] = max(steps.get(e.depth, 0.0), float(fabric.latency_s[e.parent, e.child]))
            if e.depth > 1:
                passing = max(passing, float(pace[e.parent, e.child]))
        depth, latency = max(depth, *steps), max(latency, sum(steps.values()))
    return RouteLoads(down, up, depth, latency, passing, float(pace.max(initial=0.0)))


def routings(name: str, fabric: Fabric, hosts: tuple[str, ...]) -> tuple[str, ...]:
    """The routings of one name that this fabric suggests; ``hosts[rank]`` is the rank's host."""
    ranks = tuple(range(fabric.world_size))
    match name:
        case "pairs":
            return (name,)
        case "ring":
            order = _near_neighbours(fabric)
            return (name,) if order == ranks else (name, str(Way(name, (order,))))
        case "relay":
            return tuple(str(Way(name, (fast,))) for fast in _fast_sets(fabric, hosts))
        case "owners":
            return tuple(str(Way(name, (owners,))) for owners in (ranks, *_fast_sets(fabric, hosts)))
        case "two_level":
            groups = tuple(tuple(r for r in ranks if hosts[r] == h) for h in dict.fromkeys(hosts))
            several = 1 < len(groups) < len(ranks)
            return (str(Way(name, groups)),) if several else ()
    raise AssertionError(name)


@lru_cache(maxsize=64)
def _fast_sets(fabric: Fabric, hosts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The ranks whose hosts' networks are fastest, and those with the next slower ones, ...: a set for each rate but
    the slowest, smallest first."""
    ranks = range(fabric.world_size)
    rate = [_own_rate(fabric, hosts, hosts[r]) for r in ranks]
    return tuple(tuple(r for r in ranks if rate[r] >= least) for least in sorted(set(rate), reverse=True)[:-1])


def _own_rate(fabric: Fabric, hosts: tuple[str, ...], host: str) -> float:
    """Bytes/s of each rank of a host towards or from all other hosts, the slower of the two; infinite if there are
    none."""
    mine = tuple(r for r, h in enumerate(hosts) if h == host)
    others = tuple(r for r, h in enumerate(hosts) if h != host)
    own = [p.bytes_per_s for p in fabric.ports if {p.senders, p.receivers} == {mine, others}]
    return min(own, default=float("inf")) / len(mine)


def _pair_s_per_byte(fabric: Fabric) -> Array:
    """(N, N): seconds a byte takes from rank i to rank j when nobody else talks; 0 on the diagonal."""
    found = np.zeros((fabric.world_size, fabric.world_size))
    for k in range(len(fabric.ports)):
        crossing = np.outer(fabric.senders[k], fabric.receivers[k]) / fabric.rates[k]
        found = np.maximum(found, crossing)
    return found


def _near_neighbours(fabric: Fabric) -> tuple[int, ...]:
    """From rank 0 always on to the best reached rank that is left; the next in rank order of equals."""
    pace, order = _pair_s_per_byte(fabric), [0]
    while len(order) < fabric.world_size:
        left = [r for r in range(fabric.world_size) if r not in order]
        order.append(min(left, key=lambda r: (pace[order[-1], r], (r - order[-1]) % fabric.world_size)))
    return tuple(order)
