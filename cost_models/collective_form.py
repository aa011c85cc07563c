"""What a collective costs as a function of the shares, and what its formulas are told: ports, copies, latencies.

``CollectiveForm`` is the answer, ``Problem`` the question; ``collective_formulas`` has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hap.cost_models.fold import Cluster, FoldedFabric
from hap.cost_models.profile import CalibratedCluster
from hap.fabric import Array, Fabric
from hap.placement import GroupSizes, Placement, Shard

CALL_S = {"nccl": 6.6e-6, "gloo": 50e-6}  # NCCL src/graph/tuning.cc, ring LL base latency; Gloo assumed
# Gloo posts all sends of an all-to-all at once and the streams collide: measured 1.50, 1.08, 1.05 times the bound for
# even, 5:5:1:1 and 1:1:5:5 shares, 1.2 in the geometric mean.
GLOO_ALL_TO_ALL_EFFICIENCY = 1 / 1.2
GLOO_BROADCAST_EFFICIENCY = 0.5  # measured likewise: trees are not pipelined, 567 ms where the busiest link needs 262
COPY_EFFICIENCY = 0.8  # of memory bandwidth, assumed


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


def shares(placement: Placement, sizes: GroupSizes, world_size: int) -> Array:
    """Each rank's fraction of the value (N,): ones where it is not sharded."""
    if not isinstance(placement, Shard):
        return np.ones(world_size)
    return np.array(sizes[placement.group], dtype=np.float64) / placement.n


@dataclass(frozen=True, eq=False)
class Problem:
    cluster: Cluster
    fabric: Fabric | FoldedFabric
    nbytes: float
    source: Placement
    target: Placement
    sizes: GroupSizes | None
    base_s: float | None = None  # of a call, where the backend's own is known better than by ``CALL_S``

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
        if self.base_s is not None:
            return self.base_s
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
        return self.fabric.ring_s_per_byte
