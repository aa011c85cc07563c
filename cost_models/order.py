"""The order in which a lowered program makes its calls, which is not quite the graph's.

First what the loss and the buffers' updates need; then the backward pass. A forward node that only the backward pass
reads runs there, just before its first reader, so that its arguments are kept and not its result; a node that nobody
needs does not run. This is what ``hap.codegen.lowering`` does; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable

from hap.graph import Graph, Node


def program_order(graph: Graph) -> tuple[Node, ...]:
    """Sources first, then calls as they run."""
    position = {n.name: i for i, n in enumerate(graph.nodes)}
    order = [n for n in graph.nodes if n.is_source]
    done = {n.name for n in order}

    def add(names: Iterable[str]) -> None:
        for name in sorted(names, key=position.__getitem__):
            order.append(graph.by_name[name])
            done.add(name)

    forward = _ancestors(graph, (graph.loss.node, *(v.node for v in graph.updates.values())), done)
    add(forward)
    wanted = _ancestors(graph, (v.node for v in graph.gradients.values()), done)
    for node in graph.nodes:
        if node.name in wanted and node.phase == "backward" and node.name not in done:
            add(_ancestors(graph, (node.name,), done))
    for value in graph.gradients.values():
        add(_ancestors(graph, (value.node,), done))
    return tuple(order)


def _ancestors(graph: Graph, names: Iterable[str], done: set[str]) -> set[str]:
    """The named nodes and all that they depend on, without those done."""
    pending, found = list(names), set[str]()
    while pending:
        name = pending.pop()
        if name not in found and name not in done:
            found.add(name)
            pending.extend(v.node for v in graph.by_name[name].inputs)
    return found
