"""The clock of HAP's published artifact, so that plans can be compared under the formulas that HAP was given.

HAP (Zhang et al., EuroSys 2024); the artifact (alibaba/hap) prices a program of triples k on devices i by

    t = sum_k ( max_i flops[k,i] / rate[i] + max_i elements[k,i] / bandwidth[kind] )                       (``Clock``)

    rate       one number per device for all operators, in the same formulas' operations (``Machine``)
    elements   all-reduce |t|;  all-gather, reduce-scatter n max_i share_i |t|;  all-to-all the same of its source
               (elements, though the bandwidths were measured in bytes: kept as it is)
    shares     fractions, never rounded; no latency, no message size, no topology, no overlap, no update, no memory

and operations of a forward call by ``forward_work``, of its backward twice that. Kept as well: a convolution counts no
kernel area, and attention none of its four projections. What has no formula there (other element-wise operators) counts
like its nearest relative.

Our graphs have the backward pass in them, so every backward node is priced itself: a product like any product (the two
of a linear layer make twice the forward one), others twice the forward formula. What HAP attaches to a replicated
parameter, the all-reduce of its gradient, is here a conversion of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hap.conversion import Need, collective_kind, find_needs
from hap.graph import Graph, Node
from hap.placement import Placement, Shard
from hap.plan import Strategy

Ratios = Mapping[str, tuple[float, ...]]  # group -> share of every rank

_PER_ELEMENT: Mapping[str, float] = {
    **dict.fromkeys(("sigmoid", "relu", "gelu", "silu", "tanh", "native_dropout", "max_pool2d_with_indices"), 3.0),
    **dict.fromkeys(("threshold_backward", "max_pool2d_with_indices_backward", "gelu_backward"), 6.0),
    **dict.fromkeys(("_adaptive_avg_pool2d", "mean"), 3.0),
    "_adaptive_avg_pool2d_backward": 6.0,
    **dict.fromkeys(("add", "sub", "mul", "div", "sum", "where", "gather", "nll_loss_forward"), 1.0),
    **dict.fromkeys(("_softmax", "_log_softmax"), 15.0),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), 30.0),
    "native_layer_norm": 10.0,
    "native_layer_norm_backward": 20.0,
}


@dataclass(frozen=True)
class Machine:
    """``rates`` (N,) operations per second; the others elements per second."""

    rates: tuple[float, ...]
    all_gather: float
    all_reduce: float
    reduce_scatter: float
    all_to_all: float

    @property
    def world_size(self) -> int:
        return len(self.rates)

    @property
    def proportional(self) -> tuple[float, ...]:
        """Shares by speed."""
        return tuple(r / sum(self.rates) for r in self.rates)

    @property
    def even(self) -> tuple[float, ...]:
        return (1.0 / self.world_size,) * self.world_size


def paper_machine(per_host: int) -> Machine:
    """The paper's cluster with so many devices of each of its eight hosts: V100 in two, P100 in six. Numbers that the
    authors measured and left in the artifact."""
    v100, p100 = 3_858_755_112_937.0, 2_149_250_936_815.0
    return Machine(
        (v100,) * (2 * per_host) + (p100,) * (6 * per_host),
        all_gather=815_418_707.0,
        all_reduce=476_774_816.0,
        reduce_scatter=876_490_907.0,
        all_to_all=7_504_501_871.0,
    )


def operations(graph: Graph, node: Node) -> float:
    """Of one call on one device. ``hap.attention`` stands for HAP's whole attention operator: its projections, found by
    the name of the module around it, count nothing."""
    name = node.op.split(".")[1] if "." in node.op else ""
    inputs = [graph.meta(v) for v in node.inputs]
    if node.is_source or not inputs:
        return 0.0
    match name:
        case "mm" | "bmm":
            return 0.0 if _is_projection(node) else 3.0 * inputs[0].numel * inputs[1].shape[-1]
        case "attention" | "attention_backward":
            batch, heads, length, depth = inputs[1 if name == "attention_backward" else 0].shape
            wide = heads * depth
            forward = 6.0 * length * batch * wide * length + 5.0 * length * length * batch
            return forward if name == "attention" else 2.0 * forward
        case "convolution":
            return 3.0 * inputs[0].numel * inputs[1].shape[0]
        case "convolution_backward":
            return 6.0 * inputs[1].numel * inputs[2].shape[0]
        case "embedding":
            return float(inputs[1].numel)
        case "embedding_dense_backward":
            return 2.0 * inputs[1].numel
    return _PER_ELEMENT.get(name, 0.0) * max(m.numel for m in inputs)


def _is_projection(node: Node) -> bool:
    return "attention" in node.module.split(".")


@dataclass(frozen=True)
class Clock:
    """Seconds of one graph on one machine."""

    graph: Graph
    machine: Machine

    def call_s(self, node: Node, strategy: Strategy, ratios: Ratios) -> float:
        """The slowest device of one call."""
        shard = next((p for p in (*strategy.inputs, *strategy.outputs) if isinstance(p, Shard)), None)
        work = operations(self.graph, node)
        if shard is None:
            return work / min(self.machine.rates)
        return work * max(b / r for b, r in zip(ratios[shard.group], self.machine.rates, strict=True))

    def conversion_s(self, elements: int, source: Placement, target: Placement, ratios: Ratios) -> float:
        """One collective for a tensor of so many elements."""
        machine = self.machine
        match collective_kind(source, target):
            case "all_gather":
                return _padded(elements, source, ratios) / machine.all_gather
            case "reduce_scatter":
                return _padded(elements, target, ratios) / machine.reduce_scatter
            case "all_to_all":
                return _padded(elements, source, ratios) / machine.all_to_all
            case "all_reduce":
                return elements / machine.all_reduce
            case "slice":
                return 0.0

    def seconds(self, strategies: Mapping[str, Strategy], ratios: Ratios) -> float:
        """A whole step."""
        compute = sum(self.call_s(n, strategies[n.name], ratios) for n in self.graph.nodes if not n.is_source)
        return compute + sum(self.need_s(need, ratios) for need in find_needs(self.graph, strategies))

    def need_s(self, need: Need, ratios: Ratios) -> float:
        return self.conversion_s(self.graph.meta(need.value).numel, need.source, need.target, ratios)


def _padded(elements: int, placement: Placement, ratios: Ratios) -> float:
    assert isinstance(placement, Shard)
    shares = ratios[placement.group]
    return len(shares) * max(shares) * elements


def best_ratios(clock: Clock, strategies: Mapping[str, Strategy], groups: Sequence[Sequence[str]]) -> Ratios:
    """The best shares of a program, one vector for all groups of each entry of ``groups``, on two kinds of device.

    A step is a weighted sum of max_i b_i / rate_i (calls) and max_i b_i (padded collectives). The first is least at
    shares by speed, the second at even ones; between the two, with equal shares for equal devices, both are affine, and
    outside both grow. So the sum is least at one of the ends.
    """
    assert len(set(clock.machine.rates)) <= 2, "more kinds have corners in between"
    machine, found = clock.machine, {}
    for together in groups:
        options = [dict.fromkeys(together, shares) for shares in (machine.proportional, machine.even)]
        neutral = {g: machine.even for others in groups for g in others}
        best = min(options, key=lambda shares: clock.seconds(strategies, {**neutral, **shares}))
        found.update(best)
    return found
