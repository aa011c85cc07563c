"""The engine of graph rewriting: one walk in program order, a rule per node, values renamed as they disappear."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hap.graph import Graph, Node, TensorMeta, Value, with_inputs


class Rewritten:
    """What a rule may ask about the part of the graph that is already rewritten."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}

    def producer(self, value: Value) -> Node:
        return self.nodes[value.node]

    def meta(self, value: Value) -> TensorMeta:
        found = self.nodes[value.node].outputs[value.index]
        assert found is not None, f"{value} is not a tensor"
        return found


# A rule gives None (leave the node), another node of the same name, or the values that replace the node's outputs.
Rule = Callable[[Node, Rewritten], Node | tuple[Value, ...] | None]


def rewrite(graph: Graph, rule: Rule) -> Graph:
    """Apply ``rule`` to every call in program order; it sees inputs that are already rewritten."""
    done = Rewritten()
    renamed: dict[Value, Value] = {}

    def rename(value: Value) -> Value:
        return renamed.get(value, value)

    for node in graph.nodes:
        if any(value in renamed for value in node.inputs):
            node = with_inputs(node, rename)
        result = None if node.is_source else rule(node, done)
        if isinstance(result, tuple):
            renamed.update((Value(node.name, i), value) for i, value in enumerate(result))
            continue
        node = node if result is None else result
        done.nodes[node.name] = node
    return replace(
        graph,
        nodes=tuple(done.nodes.values()),
        loss=rename(graph.loss),
        gradients=_renamed(graph.gradients, rename),
        updates=_renamed(graph.updates, rename),
    )


def _renamed(results: Mapping[str, Value], rename: Callable[[Value], Value]) -> dict[str, Value]:
    return {name: rename(value) for name, value in results.items()}
