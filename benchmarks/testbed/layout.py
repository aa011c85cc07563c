"""What is built for a cluster: names, addresses, rates, cores, environment. Pure: nothing here touches the system.

    host 0 --eth0-- p0 \\                       each host and the switch: one network namespace
    host 1 --eth0-- p1 -- br0 (the switch)      shaped on eth0: the host's *up*; shaped on p_i: its *down*
    host 2 --eth0-- p2 /

Ranks of one host share its namespace, so they share its network, as in ``hap.fabric``, and talk to each other over its
loopback. A name is ``hapbed-ID-INDEX``, so that whatever a killed run leaves can be told from anything else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hap.cluster import ClusterSpec, Link
from hap.hosts import DuplexSpec
from hap.units import format_rate, format_time

if TYPE_CHECKING:
    from hap.runtime.emulate import HostRate

Mode = Literal["deadline", "quota"]

PREFIX = "hapbed-"
GOODPUT = 1448 / 1514  # payload of a full Ethernet frame (MTU 1500, TCP with time stamps) over what HTB counts
LATENCY_S = 0.25e-3  # one Gloo ring step, measured on such a bed
REACHABLE_BYTES_PER_S = 2e9 / 8  # above this the CPU, not the shaper, may set the pace


@dataclass(frozen=True)
class HostLayout:
    """One host. Rates in bytes/s of what the wire carries (headers included), None for a host without a network.

    ``paths`` are the links that are slower than the host's own network: (address of the other host, bytes/s).
    """

    name: str
    namespace: str
    address: str
    ranks: tuple[int, ...]
    up_bytes_per_s: float | None
    down_bytes_per_s: float | None
    paths: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class RankLayout:
    """Where one rank runs. ``slowdown``: how many times longer its compute takes than on a core of this machine."""

    rank: int
    local_rank: int
    host: int
    core: int
    slowdown: float


@dataclass(frozen=True)
class Layout:
    """All of a bed. ``mode`` and the cluster decide it; ``bed_id`` only its names."""

    bed_id: str
    mode: Mode
    switch: str
    hosts: tuple[HostLayout, ...]
    ranks: tuple[RankLayout, ...]

    @classmethod
    def of(
        cls,
        cluster: ClusterSpec,
        mode: Mode,
        bed_id: str,
        cores: Sequence[int] | None = None,
        load: float | None = None,
    ) -> Layout:
        """``load``: the share of the cores that the ranks' compute takes, by default half, which says how slow the
        fastest device is played. ClusterError if a device does not give the float32 rate by which its slow-down is
        told."""
        from hap.runtime.emulate import LOAD, slowdowns  # imports torch, which `down` and `status` need not wait for

        cores = tuple(sorted(os.sched_getaffinity(0)) if cores is None else cores)
        factors = slowdowns(cluster, float(len(cores)), LOAD if load is None else load)
        address = {h.name: f"10.77.{i // 250}.{i % 250 + 1}" for i, h in enumerate(cluster.hosts)}
        hosts = []
        for i, host in enumerate(cluster.hosts):
            rates = cluster.network(host.name)
            paths = [
                (address[p.target], p.bandwidth)
                for p in cluster.links
                if p.source == host.name and p.bandwidth is not None and rates and p.bandwidth < rates.up_bytes_per_s
            ]
            hosts.append(
                HostLayout(
                    host.name,
                    f"{PREFIX}{bed_id}-{i}",
                    address[host.name],
                    tuple(d.rank for d in cluster.devices if d.host == host.name),
                    rates.up_bytes_per_s if rates else None,
                    rates.down_bytes_per_s if rates else None,
                    tuple(paths),
                )
            )
        core_of = _spread(factors, cores)
        ranks = tuple(
            RankLayout(rank, local, i, core_of[rank], factors[rank])
            for i, h in enumerate(hosts)
            for local, rank in enumerate(h.ranks)
        )
        return cls(bed_id, mode, f"{PREFIX}{bed_id}-sw", tuple(hosts), ranks)

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.switch, *(h.namespace for h in self.hosts))

    def environment(self, rank: RankLayout, port: int, enforced: bool) -> Mapping[str, str]:
        """What a rank's process finds in ``os.environ``: torchrun's names, Gloo's interface, the slow-down."""
        networked = enforced and len(self.hosts) > 1
        return {
            "RANK": str(rank.rank),
            "WORLD_SIZE": str(len(self.ranks)),
            "LOCAL_RANK": str(rank.local_rank),
            "LOCAL_WORLD_SIZE": str(len(self.hosts[rank.host].ranks)),
            "MASTER_ADDR": self.hosts[self.ranks[0].host].address if networked else "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "eth0" if networked else "lo",
            "OMP_NUM_THREADS": "1",
            "HAP_TESTBED": self.bed_id,
            "HAP_TESTBED_MODE": self.mode,
            "HAP_TESTBED_SLOWDOWN": repr(rank.slowdown),
        }

    def not_enforced(self, cluster: ClusterSpec, root: bool) -> tuple[str, ...]:
        """What of the cluster this bed does not play, one sentence each; printed with every figure."""
        said = ["memory limits and latencies of the cluster file are not enforced (a link adds what this kernel takes)"]
        shared = [h.name for h in self.hosts if len(h.ranks) > 1]
        if not root:
            said.append("links are this machine's loopback, whatever the cluster file says (needs root)")
        elif shared:
            said.append(f"links inside {', '.join(shared)} are a namespace's loopback, not the cluster file's")
        fast = [
            h.name for h in self.hosts if max(h.up_bytes_per_s or 0, h.down_bytes_per_s or 0) > REACHABLE_BYTES_PER_S
        ]
        if root and fast:
            said.append(f"the networks of {', '.join(fast)} are faster than this machine may reach (2 Gbit/s)")
        if self.mode == "quota" and not root:
            said.append("compute speeds are not enforced: a quota needs root")
        return tuple(said)


def played(cluster: ClusterSpec, host: HostRate, inside: Link, latency_s: float = LATENCY_S) -> ClusterSpec:
    """The cluster that ranks on this bed really have, for a planner: this machine's core divided by each rank's
    slow-down, links of ``GOODPUT`` times the nominal rates, ``inside`` (measured) between ranks of one host."""
    from hap.runtime.emulate import emulated_cluster

    compute = emulated_cluster(cluster, host, inside)
    hosts = []
    for given, own in zip(cluster.hosts, compute.hosts, strict=True):
        network = None
        if given.network is not None:
            up, down = given.network.duplex.up_bytes_per_s, given.network.duplex.down_bytes_per_s
            network = DuplexSpec.model_validate(
                {
                    "up": format_rate(up * GOODPUT),
                    "down": format_rate(down * GOODPUT),
                    "latency": format_time(latency_s),
                }
            )
        hosts.append(own.model_copy(update={"network": network}))
    links = tuple(
        p.model_copy(update={"bandwidth": p.bandwidth * GOODPUT, "latency": None})
        for p in cluster.links
        if p.bandwidth is not None
    )
    return ClusterSpec(name=f"{cluster.name}-testbed", backend="gloo", hosts=tuple(hosts), links=links)


def _spread(factors: Sequence[float], cores: Sequence[int]) -> list[int]:
    """A core for every rank: the busiest rank (least slow-down) first, each to the core with least to do so far."""
    load = dict.fromkeys(cores, 0.0)
    chosen = [0] * len(factors)
    for rank in sorted(range(len(factors)), key=lambda r: (factors[r], r)):
        core = min(cores, key=lambda c: (load[c], c))
        load[core] += 1 / factors[rank]
        chosen[rank] = core
    return chosen
