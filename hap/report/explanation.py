"""What a reader wants beside a plan's decisions, worked out while graph and cluster are at hand and kept in the plan.

The step is replayed as ``hap.cost_models.evaluate`` adds it up: stages of local work, each ended by a collective. Ranks
that compute alike in every stage form one class, so that a thousand devices of three kinds are three rows. Seconds have
four significant digits, which keeps files small and their diffs quiet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hap.cluster import ClusterSpec
from hap.conversion import Need, find_needs
from hap.cost_models.compute import DEFAULT_MODEL, Calls
from hap.cost_models.evaluate import update_seconds
from hap.cost_models.sequence import ConversionCost, Pricer, sequence
from hap.cost_models.timeline import Timeline
from hap.deferral import Batches
from hap.fabric import Array
from hap.graph import Graph, Value
from hap.order import repeats
from hap.placement import Shard, parse_placement
from hap.plan import AsRun, Explanation, Help, Layer, Plan, Sent, Stage, Strategy

GAP = 1e-6  # of a step: a pause that nobody sees
ROOT = "(model)"
OPTIMIZER = "optimizer"


def strategies_of(plan: Plan) -> dict[str, Strategy]:
    return {name: Strategy.parse(text) for name, text in plan.strategies.items()}


def needs_of(plan: Plan, graph: Graph, strategies: Mapping[str, Strategy]) -> tuple[Need, ...]:
    """The plan's conversions as needs, in its order: parameters gathered again where the plan does so."""
    made = [(Value.parse(c.value), parse_placement(c.target), c.phase) for c in plan.conversions]
    again = repeats(graph, strategies, plan.repeated)
    least, most = (
        {(n.value, n.target, n.phase): n for n in find_needs(graph, strategies, regather=regather, again=again)}
        for regather in (False, True)
    )
    assert least.keys() <= set(made) <= most.keys(), "a plan's conversions are those of its strategies"
    return tuple(most[key] for key in made)


def layer_of(module: str) -> str:
    """The layer that a module belongs to: its path up to the first number, or all of it."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts) or ROOT


def make_explanation(
    plan: Plan, graph: Graph, cluster: ClusterSpec, helps: Sequence[Help] = (), played: Timeline | None = None
) -> Explanation:
    """The explanation of a plan made for ``graph`` and ``cluster``; ``played`` is its step as it is run."""
    strategies = strategies_of(plan)
    needs = needs_of(plan, graph, strategies)
    batches = Batches.of(graph, plan.gradient_accumulation_steps)
    costs = Pricer(graph, plan.sizes, cluster, batches=batches).price(needs)
    replay = _Replay(plan, graph, cluster, {cost.need: i for i, cost in enumerate(costs)})
    again = repeats(graph, strategies, plan.repeated)
    calls = Calls(graph, batches)
    for item in sequence(graph, strategies, plan.sizes, cluster, costs, DEFAULT_MODEL, calls, again=again):
        if isinstance(item, ConversionCost):
            replay.collective(item)
        else:
            replay.compute(item.name, item.kind, item.seconds)
    replay.end(update_seconds(graph, strategies, plan.sizes, cluster, plan.provenance.optimizer) / batches.count)
    return Explanation(
        cluster=cluster_body(cluster),
        classes=replay.classes(),
        stages=replay.stages(),
        conversion_s=tuple(_short(c.seconds) for c in costs),
        layers=replay.layers(strategies),
        helps=tuple(helps),
        as_run=None if played is None else _as_run(played, [ranks[0] for ranks in replay.classes()]),
    )


def _as_run(played: Timeline, first: Sequence[int]) -> AsRun:
    """What ``first``, a rank of each class, do, and what is on the wire."""
    busy: dict[int, list[float]] = {rank: [] for rank in first}
    wire = []
    for span in played.spans:
        if span.stream == "communication":
            names = span.name.split(", ")
            wire.append(
                Sent(
                    name=names[0],
                    values=len(names),
                    collective=span.kind,
                    start_s=_fine(span.start_s),
                    wire_s=_fine(span.seconds),
                )
            )
        elif span.rank in busy and span.seconds > 0:
            row = busy[span.rank]
            if row and span.start_s - row[-1] <= GAP * played.step_s:
                row[-1] = span.end_s
            else:
                row += [span.start_s, span.end_s]
    rows = tuple(tuple(map(_fine, busy[rank])) for rank in first)
    return AsRun(step_s=_fine(played.step_s), wire=tuple(wire), busy_s=rows)


def cluster_body(cluster: ClusterSpec) -> dict[str, Any]:
    """The description as plain data, from which ``ClusterSpec.model_validate`` makes it again."""
    described = set(ClusterSpec.model_fields)  # a calibrated cluster has more
    body = cluster.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True, include=described)
    return {"name": cluster.name, "backend": cluster.backend, **body}


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _fine(seconds: float) -> float:
    """Of a moment in the step, whose differences are looked at."""
    return float(f"{seconds:.7g}")


@dataclass
class _Layer:
    forward: Array
    backward: Array
    wire_s: float = 0.0


@dataclass
class _Replay:
    """The step so far: stages that have ended, the one under way, and every layer's share."""

    plan: Plan
    graph: Graph
    cluster: ClusterSpec
    index: Mapping[Need, int]
    ended: list[tuple[Array, str, int | None, float]] = field(default_factory=list)
    found: dict[str, _Layer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now: Array = np.zeros(self.cluster.world_size)
        for node in self.graph.nodes:  # the model's order is that of its calls
            if not node.is_source:
                self._layer(layer_of(node.module))
        for node in self.graph.sources("parameter"):
            self._layer(layer_of(node.target.rpartition(".")[0]))

    def _layer(self, name: str) -> _Layer:
        zeros = np.zeros(self.cluster.world_size)
        return self.found.setdefault(name, _Layer(zeros, zeros.copy()))

    def compute(self, name: str, kind: str, seconds: Array) -> None:
        self.now = self.now + seconds
        node = self.graph.by_name.get(name.removeprefix("slice ").partition(":")[0])
        if node is None:
            return
        layer = self._layer(layer_of(node.module))
        if "backward" in (node.phase, kind):
            layer.backward = layer.backward + seconds
        else:
            layer.forward = layer.forward + seconds

    def collective(self, cost: ConversionCost) -> None:
        node = self.graph.by_name[cost.need.before or cost.need.value.node]
        name = layer_of(node.target.rpartition(".")[0] if node.op == "parameter" else node.module)
        self._layer(name).wire_s += cost.seconds
        self.ended.append((self.now, name, self.index[cost.need], cost.seconds))
        self.now = np.zeros(self.cluster.world_size)

    def end(self, update: Array) -> None:
        self.ended.append((self.now + update, OPTIMIZER, None, 0.0))

    def classes(self) -> tuple[tuple[int, ...], ...]:
        table = np.stack([seconds for seconds, *_ in self.ended])
        alike: dict[object, list[int]] = {}
        for rank, device in enumerate(self.cluster.devices):
            key = (device.gpu, tuple(_short(s) for s in table[:, rank].tolist()))
            alike.setdefault(key, []).append(rank)
        return tuple(tuple(ranks) for ranks in alike.values())

    def stages(self) -> tuple[Stage, ...]:
        first = [ranks[0] for ranks in self.classes()]
        return tuple(
            Stage(
                compute_s=tuple(_short(float(seconds[r])) for r in first),
                layer=layer,
                conversion=conversion,
                wire_s=_short(wire_s),
            )
            for seconds, layer, conversion, wire_s in self.ended
        )

    def layers(self, strategies: Mapping[str, Strategy]) -> tuple[Layer, ...]:
        calls: dict[str, dict[str, int]] = {}
        held: dict[str, int] = {}
        for node in self.graph.nodes:
            if node.op == "parameter":
                layer = layer_of(node.target.rpartition(".")[0])
                held[layer] = held.get(layer, 0) + node.meta.nbytes
            elif not node.is_source:
                by_label = calls.setdefault(layer_of(node.module), {})
                label = self._label(strategies[node.name])
                by_label[label] = by_label.get(label, 0) + 1
        return tuple(
            Layer(
                name=name,
                forward_s=_short(float(layer.forward.max())),
                backward_s=_short(float(layer.backward.max())),
                wire_s=_short(layer.wire_s),
                parameter_bytes=held.get(name, 0),
                calls=dict(sorted(calls.get(name, {}).items())),
            )
            for name, layer in self.found.items()
        )

    def _label(self, strategy: Strategy) -> str:
        group = next((p.group for p in (*strategy.inputs, *strategy.outputs) if isinstance(p, Shard)), None)
        return "" if group is None else self.plan.groups[group].label
