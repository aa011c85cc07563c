"""What a whole choice costs: one step's seconds and every rank's memory, for given strategies and sizes.

The step is bulk-synchronous. Collectives cut the program, in its order, into stages; nobody passes a collective before
all have reached it, so a stage lasts as long as its slowest rank, and

    step_s = sum over stages of max over ranks of compute + sum of collectives

where the last stage ends with the optimizer's update (no rank waits before it). Nothing overlaps; ``timeline`` plays
what does. Each conversion takes the fastest decomposition; ``sequence`` says in which order all of it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from hap.cluster import ClusterSpec
from hap.conversion import Need, find_needs
from hap.cost_models.collective import Forms
from hap.cost_models.compute import DEFAULT_MODEL, Calls, ComputeModel
from hap.cost_models.fold import Cluster, FoldedCluster, Folds
from hap.cost_models.memory import MemoryUse, Walk, usable_bytes
from hap.cost_models.optimizers import NEWTON_SCHULZ, PRODUCTS, optimizer_state_bytes, update_flops
from hap.cost_models.pieces import many_local_bytes
from hap.cost_models.profile import MeasuredDevice
from hap.cost_models.sequence import ConversionCost, Pricer
from hap.cost_models.stages import Stages, find_stages
from hap.cost_models.steps import Step, find_steps
from hap.cost_models.strides import Strides, find_strides
from hap.deferral import ONE, Batches
from hap.fabric import Array
from hap.graph import Graph, Node
from hap.order import NONE, Parts, Postponed, program_order, program_parts, repeats
from hap.placement import GroupSizes, Placement, Sizes
from hap.plan import Conversion, Prediction, Strategy


@dataclass(frozen=True)
class Evaluation:
    """Seconds of one step, or of one batch where a step has several, and bytes at each rank's peak. ``compute_s[rank]``
    has the update, no waiting; ``stages_s`` is what the stages take without it, ``update_s`` what it adds; with
    ``communication_s`` they sum to ``step_s``."""

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
            sent = [c for c in self.conversions if c.need.collective != "slice"]
            slowest = max(sent, key=lambda c: c.seconds)
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


@dataclass(frozen=True, eq=False)
class Prepared:
    """What the cost of strategies needs that no sizes change. ``groups``: those that some placement shards; ``again``:
    the calls that are repeated before a call, in the graph's order, and ``late``, in the plan's; ``evaluations``: by
    their sizes, for whoever asks again."""

    evaluator: Evaluator
    strategies: Mapping[str, Strategy]
    needs: Sequence[Need]
    groups: tuple[str, ...]
    again: Mapping[str, Sequence[Node]]
    late: Mapping[str, Sequence[Node]]
    postponed: Postponed
    evaluations: dict[tuple[Sizes, ...], Evaluation] = field(default_factory=dict, repr=False)

    @cached_property
    def stages(self) -> Stages:
        of = self.evaluator
        measured = any(isinstance(d, MeasuredDevice) for d in of.cluster.devices)
        return find_stages(of.graph, self.strategies, self.needs, of.calls, self.again, measured=measured)

    @cached_property
    def walk(self) -> Walk:
        of = self.evaluator
        steps = of.late_steps(self.postponed) if self.postponed else of.steps
        return Walk(
            of.graph,
            self.strategies,
            self.needs,
            steps=steps,
            strides=of.strides,
            again=self.late,
            batches=of.batches,
        )


@dataclass(frozen=True, eq=False)
class Evaluator:
    """``evaluate`` for one graph, cluster and optimizer; what depends on nothing else is found once."""

    graph: Graph
    cluster: ClusterSpec
    optimizer: str
    calls: Calls
    model: ComputeModel = DEFAULT_MODEL
    batches: Batches = ONE
    _folded: dict[tuple[int, ...], Forms] = field(default_factory=dict, repr=False)
    _late: dict[object, Mapping[str, Step]] = field(default_factory=dict, repr=False)

    @cached_property
    def forms(self) -> Forms:
        return Forms(self.cluster)

    @cached_property
    def folds(self) -> Folds:
        return Folds(self.cluster)

    def _forms(self, folded: FoldedCluster) -> Forms:
        return self._folded.setdefault(folded.of, Forms(folded))

    def on(self, cluster: ClusterSpec) -> Evaluator:
        """The same for another cluster; what was found of the graph is handed on."""
        other = replace(self, cluster=cluster, _folded={}, _late={})
        other.__dict__.update(strides=self.strides, steps=self.steps, parts=self.parts)
        return other

    @cached_property
    def steps(self) -> Mapping[str, Step]:
        return find_steps(self.graph, self.strides)

    def late_steps(self, postponed: Postponed) -> Mapping[str, Step]:
        """In the order with calls postponed."""
        key = tuple(postponed.items())
        if key not in self._late:
            self._late[key] = {n.name: self.steps[n.name] for n in program_order(self.graph, postponed)}
        return self._late[key]

    @cached_property
    def parts(self) -> Parts:
        """See ``program_parts``."""
        return program_parts(self.graph)

    @cached_property
    def strides(self) -> Strides:
        return find_strides(self.graph)

    def evaluate(
        self,
        strategies: Mapping[str, Strategy],
        sizes: GroupSizes,
        needs: Sequence[Need] | None = None,
        *,
        regather: bool = False,
        kept: Collection[str] = (),
        recomputed: Collection[str] = (),
        postponed: Postponed = NONE,
    ) -> Evaluation:
        """See ``evaluate``, and ``find_needs`` for ``kept``."""
        prepared = self.prepare(
            strategies, needs, regather=regather, kept=kept, recomputed=recomputed, postponed=postponed
        )
        return self.at_sizes(prepared, sizes)

    def prepare(
        self,
        strategies: Mapping[str, Strategy],
        needs: Sequence[Need] | None = None,
        *,
        regather: bool = False,
        kept: Collection[str] = (),
        recomputed: Collection[str] = (),
        postponed: Postponed = NONE,
    ) -> Prepared:
        """What does not depend on sizes, for those who ask about several. ``needs``, if known, go before ``regather``
        and ``kept``. What takes long of it is found when it is asked for first."""
        used = dict.fromkeys(group for s in strategies.values() for group in s.groups)
        again = repeats(self.graph, strategies, recomputed, self.parts)
        if needs is None:
            needs = find_needs(self.graph, strategies, regather=regather, kept=kept, again=again)
        late = again
        if recomputed and postponed:
            late = repeats(self.graph, strategies, recomputed, program_parts(self.graph, postponed))
        return Prepared(self, strategies, needs, tuple(used), again, late, postponed)

    def conversions(self, prepared: Prepared, sizes: GroupSizes) -> tuple[ConversionCost, ...]:
        """Those of the evaluation at these sizes, without the rest of it."""
        here, cluster, forms, _ = self._folded_at(prepared, sizes)
        return self._priced(prepared, here, cluster, forms)

    def fits(self, prepared: Prepared, sizes: GroupSizes) -> bool:
        """As the evaluation at these sizes has it, without the rest of it."""
        here, cluster, forms, _ = self._folded_at(prepared, sizes)
        peaks = self._memory(prepared, here, cluster, self._priced(prepared, here, cluster, forms)).peak_bytes
        return all(peak <= usable_bytes(d.memory_bytes) for peak, d in zip(peaks, cluster.devices, strict=True))

    def _folded_at(
        self, prepared: Prepared, sizes: GroupSizes
    ) -> tuple[GroupSizes, Cluster, Forms, FoldedCluster | None]:
        """Sizes, ranks and their collectives, where ranks that are alike and hold alike are one; and these, if any."""
        sizes = {group: sizes[group] for group in prepared.groups}
        folded = self.folds.find(dict.fromkeys(sizes.values()))
        if folded is None:
            return sizes, self.cluster, self.forms, None
        return folded.take(sizes), folded, self._forms(folded), folded

    def _priced(
        self, prepared: Prepared, sizes: GroupSizes, cluster: Cluster, forms: Forms
    ) -> tuple[ConversionCost, ...]:
        return Pricer(self.graph, sizes, cluster, forms, self.batches).price(prepared.needs)

    def _memory(
        self, prepared: Prepared, sizes: GroupSizes, cluster: Cluster, costs: Sequence[ConversionCost]
    ) -> MemoryUse:
        return prepared.walk.use(
            sizes,
            cluster.world_size,
            self.optimizer,
            ranks=cluster.fabric.world_size,
            decompositions=[c.decomposition for c in costs],
            backend=cluster.backend,
            devices=cluster.devices,
        )

    def at_sizes(self, prepared: Prepared, sizes: GroupSizes) -> Evaluation:
        """Ranks that are alike and hold alike are asked about once."""
        here, cluster, forms, folded = self._folded_at(prepared, sizes)
        found = self._evaluate(prepared, here, cluster, forms)
        if folded is None:
            return found
        return replace(
            found,
            compute_s=folded.spread(found.compute_s),
            memory=MemoryUse(folded.spread(found.memory.by_kind)),
            usable_bytes=folded.spread(found.usable_bytes),
            devices=tuple(d.name for d in self.cluster.devices),
        )

    def _evaluate(self, prepared: Prepared, sizes: GroupSizes, cluster: Cluster, forms: Forms) -> Evaluation:
        graph, strategies, model = self.graph, prepared.strategies, self.model
        costs = self._priced(prepared, sizes, cluster, forms)
        compute, stages, last = prepared.stages.seconds(sizes, cluster, costs, model)
        update = update_seconds(graph, strategies, sizes, cluster, self.optimizer, model) / self.batches.count
        communication = sum(c.seconds for c in costs if c.need.collective != "slice")
        ending = float((last + update).max())
        return Evaluation(
            step_s=stages + communication + ending,
            compute_s=tuple(float(s) for s in compute + update),
            stages_s=stages + float(last.max()),
            communication_s=communication,
            update_s=ending - float(last.max()),
            conversions=costs,
            memory=self._memory(prepared, sizes, cluster, costs),
            usable_bytes=tuple(usable_bytes(d.memory_bytes) for d in cluster.devices),
            devices=tuple(d.name for d in cluster.devices),
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
    recomputed: Collection[str] = (),
    postponed: Postponed = NONE,
    model: ComputeModel = DEFAULT_MODEL,
    batches: int = 1,
) -> Evaluation:
    """Evaluate one choice. ``needs`` may be passed if already found for the same strategies and ``regather``.
    ``recomputed``: nodes whose calls are made again in the backward pass. ``postponed`` (``order``) counts for memory
    alone: seconds are of calls in the graph's order. ``batches``: of a step of the optimizer.

    Raises ClusterError if a device lists no rate for a dtype that the graph computes in, PlanError for an unknown
    optimizer.
    """
    of_a_step = Batches.of(graph, batches)
    evaluator = Evaluator(graph, cluster, optimizer, Calls(graph, of_a_step), model, of_a_step)
    return evaluator.evaluate(
        strategies, sizes, needs, regather=regather, recomputed=recomputed, postponed=postponed
    )


def update_seconds(
    graph: Graph,
    strategies: Mapping[str, Strategy],
    sizes: GroupSizes,
    cluster: Cluster,
    optimizer: str,
    model: ComputeModel = DEFAULT_MODEL,
) -> Array:
    """Seconds of the optimizer's update on every rank (N,): it reads parameter, gradient and state, writes parameter
    and state, and launches once per parameter that the rank holds any of (assumed: torch's fused and foreach kernels
    launch less often, its plain loops more). Muon's products come to that."""
    known: dict[tuple[int, Placement, float], int] = {}  # bytes, how they lie, FLOPs -> row
    rows: list[int] = []
    for node in _trained(graph):
        placement = strategies[node.name].outputs[0]
        assert placement is not None
        key = (node.meta.nbytes, placement, update_flops(optimizer, graph, node))
        rows.append(known.setdefault(key, len(known)))
    if not rows:
        return np.zeros(cluster.world_size)
    own = many_local_bytes(((nbytes, placement) for nbytes, placement, _ in known), sizes, cluster.world_size)
    flops = np.array([[flops] for *_, flops in known])
    total: Array = UpdateTable(cluster, optimizer, model).seconds(own, flops)[rows].cumsum(axis=0)[-1]
    return total


@dataclass(frozen=True, eq=False)
class UpdateTable:
    """All devices at once: what the optimizer takes for parameters of which each rank holds so many bytes."""

    cluster: Cluster
    optimizer: str
    model: ComputeModel = DEFAULT_MODEL

    @cached_property
    def _rates(self) -> tuple[Array, Array]:
        """(launch seconds, seconds per byte of the parameter) of every rank."""
        passes = 3 + 2 * optimizer_state_bytes(self.optimizer, 1)
        bandwidth = np.array([self.model.bytes_per_s(d, "elementwise") for d in self.cluster.devices])
        return np.array([d.launch_s for d in self.cluster.devices]), passes / bandwidth

    def seconds(self, own_bytes: Array, flops: Array | float = 0.0) -> Array:
        """(..., N) from (..., N); ``flops`` of the products of an update, in bfloat16, of what is held whole."""
        launch, per_byte = self._rates
        products: Array | float = 0.0
        if np.any(flops):
            products = np.where(flops, NEWTON_SCHULZ * PRODUCTS * launch + flops * self._s_per_flop, 0.0)
        seconds: Array = np.where(own_bytes > 0, launch + own_bytes * per_byte + products, 0.0)
        for rank, device in self._measured:
            for place in np.argwhere(own_bytes[..., rank] > 0).tolist():
                of = float(np.broadcast_to(flops, own_bytes.shape)[(*place, rank)])
                seconds[(*place, rank)] = device.update_seconds(self.optimizer, own_bytes[(*place, rank)], of)
        return seconds

    @cached_property
    def _s_per_flop(self) -> Array:
        return np.array([1.0 / self.model.flops_per_s(d, "matmul", torch.bfloat16) for d in self.cluster.devices])

    @cached_property
    def _measured(self) -> tuple[tuple[int, MeasuredDevice], ...]:
        return tuple((rank, d) for rank, d in enumerate(self.cluster.devices) if isinstance(d, MeasuredDevice))


def _trained(graph: Graph) -> tuple[Node, ...]:
    return tuple(n for n in graph.sources("parameter") if n.target in graph.gradients)
