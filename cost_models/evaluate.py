"""What a whole choice costs: one step's seconds and every rank's memory, for given strategies and sizes.

The step is bulk-synchronous. Collectives cut the program, in its order, into stages; nobody passes a collective before
all have reached it, so a stage lasts as long as its slowest rank, and

    step_s = sum over stages of max over ranks of compute + sum of collectives

where the last stage ends with the optimizer's update (no rank waits before it). Nothing overlaps; ``timeline`` plays
what does. Each conversion takes the fastest decomposition; ``sequence`` says in which order all of it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hap.cluster import ClusterSpec
from hap.conversion import Need, find_needs
from hap.cost_models.compute import DEFAULT_MODEL, ComputeModel
from hap.cost_models.memory import MemoryUse, local_bytes, memory_use, optimizer_state_bytes, usable_bytes
from hap.cost_models.profile import MeasuredDevice
from hap.cost_models.sequence import ConversionCost, Local, Pricer, sequence
from hap.fabric import Array
from hap.graph import Graph, Node, Value
from hap.placement import GroupSizes
from hap.plan import Conversion, Prediction, Strategy


@dataclass(frozen=True)
class Evaluation:
    """Seconds of one step and bytes at each rank's peak. ``compute_s[rank]`` has the update, no waiting; ``stages_s``
    is what the stages take without it, ``update_s`` what it adds; with ``communication_s`` they sum to ``step_s``."""

    step_s: float
    compute_s: tuple[float, ...]
    stages_s: float
    communication_s: float
    update_s: float
    conversions: tuple[ConversionCost, ...]
    memory: MemoryUse
    usable_bytes: tuple[int, ...]
    devices: tuple[str, ...]

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        return self.memory.peak_bytes

    @property
    def overfull(self) -> tuple[int, ...]:
        """Ranks whose peak does not fit the usable memory of their device."""
        return tuple(r for r, (m, u) in enumerate(zip(self.memory_bytes, self.usable_bytes, strict=True)) if m > u)

    @property
    def fits(self) -> bool:
        return not self.overfull

    @property
    def tight(self) -> str:
        """What limits the step, in words: the links, or the busiest device."""
        if self.communication_s > self.stages_s:
            slowest = max(self.conversions, key=lambda c: c.seconds)
            return f"communication, most of all {slowest.need.collective} of {slowest.need.value}"
        rank = max(range(len(self.compute_s)), key=lambda r: self.compute_s[r])
        return f"compute of {self.devices[rank]}"

    def to_prediction(self, lower_bound_s: float | None = None) -> Prediction:
        return Prediction(
            step_s=self.step_s,
            compute_s=self.compute_s,
            communication_s=self.communication_s,
            memory_bytes=self.memory_bytes,
            memory_by_kind=self.memory.by_kind,
            lower_bound_s=lower_bound_s,
            tight=self.tight,
        )

    def to_conversions(self) -> tuple[Conversion, ...]:
        """The plan's conversions, in the order of ``find_needs``."""
        return tuple(
            Conversion(
                value=str(c.need.value),
                source=str(c.need.source),
                target=str(c.need.target),
                phase=c.need.phase,
                collective=c.need.collective,
                decomposition=c.decomposition,
                nbytes=c.nbytes,
            )
            for c in self.conversions
        )


def evaluate(
    graph: Graph,
    strategies: Mapping[str, Strategy],
    sizes: GroupSizes,
    cluster: ClusterSpec,
    *,
    needs: Sequence[Need] | None = None,
    optimizer: str = "adamw",
    regather: bool = False,
    model: ComputeModel = DEFAULT_MODEL,
) -> Evaluation:
    """Evaluate one choice. ``needs`` may be passed if already found for the same strategies and ``regather``.

    Raises ClusterError if a device lists no rate for a dtype that the graph computes in, ValueError for an unknown
    optimizer.
    """
    if needs is None:
        needs = find_needs(graph, strategies, regather=regather)
    costs = Pricer(graph, sizes, cluster).price(needs)
    items = sequence(graph, strategies, sizes, cluster, costs, model)
    compute, stages, last = _stages(items, cluster.world_size)
    update = update_seconds(graph, strategies, sizes, cluster, optimizer, model)
    communication = sum(c.seconds for c in costs if c.need.collective != "slice")
    ending = float((last + update).max())
    return Evaluation(
        step_s=stages + communication + ending,
        compute_s=tuple(float(s) for s in compute + update),
        stages_s=stages + float(last.max()),
        communication_s=communication,
        update_s=ending - float(last.max()),
        conversions=costs,
        memory=memory_use(graph, strategies, sizes, needs, cluster.world_size, optimizer),
        usable_bytes=tuple(usable_bytes(d.memory_bytes) for d in cluster.devices),
        devices=tuple(d.name for d in cluster.devices),
    )


def _stages(items: Iterable[Local | ConversionCost], world_size: int) -> tuple[Array, float, Array]:
    """(compute seconds of every rank, seconds of the stages that a collective ended, the last stage by rank)."""
    total, stage, stages = np.zeros(world_size), np.zeros(world_size), 0.0
    for item in items:
        if isinstance(item, Local):
            stage = stage + item.seconds
        else:
            stages += float(stage.max())
            total, stage = total + stage, np.zeros(world_size)
    return total + stage, stages, stage


def update_seconds(
    graph: Graph,
    strategies: Mapping[str, Strategy],
    sizes: GroupSizes,
    cluster: ClusterSpec,
    optimizer: str,
    model: ComputeModel = DEFAULT_MODEL,
) -> Array:
    """Seconds of the optimizer's update on every rank (N,): it reads parameter, gradient and state, writes parameter
    and state, and launches once per parameter that the rank holds any of (assumed: torch's fused and foreach kernels
    launch less often, its plain loops more)."""
    seconds = np.zeros(cluster.world_size)
    bandwidth = np.array([model.bytes_per_s(d, "elementwise") for d in cluster.devices])
    launch = np.array([d.launch_s for d in cluster.devices])
    for node in _trained(graph):
        placement = strategies[node.name].outputs[0]
        assert placement is not None
        own = local_bytes(graph.meta(Value(node.name)).nbytes, placement, sizes, cluster.world_size)
        moved = own * (3 + 2 * optimizer_state_bytes(optimizer, 1))
        for rank, device in enumerate(cluster.devices):
            if isinstance(device, MeasuredDevice):
                seconds[rank] += device.update_seconds(optimizer, own[rank]) if own[rank] > 0 else 0.0
            elif own[rank] > 0:
                seconds[rank] += launch[rank] + moved[rank] / bandwidth[rank]
    return seconds


def _trained(graph: Graph) -> tuple[Node, ...]:
    return tuple(n for n in graph.sources("parameter") if n.target in graph.gradients)
