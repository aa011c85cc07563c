"""The engine of graph rewriting: one walk in program order, a rule per node, values renamed as they disappear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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


@dataclass(frozen=True)
class Expansion:
    """Several nodes instead of one, and the values that replace its outputs."""

    nodes: Sequence[Node]
    values: tuple[Value, ...]


class Spelling:
    """Writes the nodes of an expansion, each in the phase and the module of the node that they replace."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.nodes: list[Node] = []
        self.metas: dict[Value, TensorMeta] = {}

    def call(
        self, op: str, args: tuple[Any, ...], *outputs: TensorMeta, kwargs: tuple[tuple[str, Any], ...] = ()
    ) -> Value:
        """The first output of a new call."""
        name = f"{self.node.name}_part_{len(self.nodes)}"
        self.nodes.append(Node(name, op, args, kwargs, outputs, self.node.phase, self.node.module))
        self.metas.update({Value(name, i): meta for i, meta in enumerate(outputs)})
        return Value(name)

    def meta(self, value: Value) -> TensorMeta:
        return self.metas[value]


# A rule gives None (leave the node), another node of the same name, the values that replace the node's outputs, or both
# new nodes and those values.
Rule = Callable[[Node, Rewritten], "Node | tuple[Value, ...] | Expansion | None"]


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
        if isinstance(result, Expansion):
            done.nodes.update({new.name: new for new in result.nodes})
            result = result.values
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
