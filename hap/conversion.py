"""Which conversions a choice of strategies implies: the one place that search, cost models and codegen all ask.

A value produced in placement p and needed in placement q != p is converted once per (value, q); every consumer shares
it. With ``regather=True`` a parameter that is gathered for the forward pass is dropped and gathered again for the
backward pass (FSDP's behaviour: less memory, more traffic), also for calls of the forward pass that are made again
there; with False the gathered copy is kept.

Results are consumers too: the loss is needed replicated, a gradient in its parameter's placement, a buffer's update in
its buffer's placement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from hap.graph import Graph, Node, Phase, Value
from hap.placement import REPLICATE, Partial, Placement, Replicate, Shard
from hap.plan import Collective, Strategy


@dataclass(frozen=True)
class Need:
    """``value`` must be turned from ``source`` into ``target`` before the first consumer of ``phase`` reads it.

    ``before`` is that consumer's node name, of a call that is made again, too, or "" when a result (loss, gradient,
    update) needs it.
    """

    value: Value
    source: Placement
    target: Placement
    phase: Phase
    before: str

    @cached_property
    def collective(self) -> Collective:
        return collective_kind(self.source, self.target)


def collective_kind(source: Placement, target: Placement) -> Collective:
    """The collective that turns ``source`` into ``target``. Turning anything into ``Partial`` is never needed."""
    found = _COLLECTIVES.get((type(source), type(target)))
    assert found is not None, f"no conversion from {source} to {target}"
    return found


_COLLECTIVES: Mapping[tuple[type, type], Collective] = {
    (Shard, Replicate): "all_gather",
    (Partial, Replicate): "all_reduce",
    (Partial, Shard): "reduce_scatter",
    (Shard, Shard): "all_to_all",
    (Replicate, Shard): "slice",
}


def required_results(graph: Graph, strategies: Mapping[str, Strategy]) -> tuple[tuple[Value, Placement], ...]:
    """Every result value with the placement it must end in."""
    stored = (*graph.sources("parameter"), *graph.sources("buffer"))
    homes = {n.target: strategies[n.name].outputs[0] for n in stored}
    needed: list[tuple[Value, Placement]] = [(graph.loss, REPLICATE)]
    for target, value in (*graph.gradients.items(), *graph.updates.items()):
        home = homes[target]
        assert home is not None
        needed.append((value, home))
    return tuple(needed)


def find_needs(
    graph: Graph,
    strategies: Mapping[str, Strategy],
    *,
    regather: bool = False,
    kept: Collection[str] = (),
    again: Mapping[str, Sequence[Node]] = MappingProxyType({}),
) -> tuple[Need, ...]:
    """All conversions in program order of their first consumer; results last. Deterministic. ``kept``: parameters
    (nodes) that are gathered once, whatever ``regather`` says. ``again``: the calls of the forward pass that are made
    again before a call (``hap.order.repeats``); all but parameters they find as they did."""
    seen: set[tuple[Value, Placement, Phase]] = set()
    needs: list[Need] = []

    def need(value: Value, source: Placement | None, target: Placement, phase: Phase, before: str) -> None:
        assert source is not None, f"{value} has no placement"
        twice = regather and graph.by_name[value.node].op == "parameter" and value.node not in kept
        if (value, target, phase) in seen or (not twice and (value, target, "forward") in seen):
            return
        seen.add((value, target, phase))
        needs.append(Need(value, source, target, phase, before))

    def reads(call: Node, phase: Phase) -> None:
        for value, target in zip(call.inputs, strategies[call.name].inputs, strict=True):
            source = strategies[value.node].outputs[value.index]
            if source is not target and source != target:
                need(value, source, target, phase, call.name)

    for node in graph.nodes:
        for call in again.get(node.name, ()):
            reads(call, "backward")
        reads(node, node.phase)
    for value, target in required_results(graph, strategies):
        if (source := strategies[value.node].outputs[value.index]) != target:
            need(value, source, target, graph.by_name[value.node].phase, "")
    return tuple(needs)


def kept_parameters(graph: Graph, conversions: Iterable[tuple[Value, Placement, Phase]]) -> frozenset[str]:
    """The parameters that these conversions (value, target, phase) gather for the forward pass and not again: with them
    as ``kept``, ``regather``, and what it makes again, ``find_needs`` finds what a plan converts."""
    done = frozenset(conversions)
    again = {v.node for v, target, phase in done if phase == "backward" and (v, target, "forward") in done}
    forward = {v.node for v, _, phase in done if phase == "forward"}
    return frozenset(n.name for n in graph.sources("parameter") if n.name in forward - again)
