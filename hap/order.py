"""The order in which a lowered program makes its calls, which is not quite the graph's.

First what the loss and the buffers' updates need; then the backward pass. A forward node that only the backward pass
reads runs there, just before its first reader, so that its arguments are kept and not its result; a node that nobody
needs does not run. Calls of the backward pass that a plan postpones, or puts first, run just before another one, or at
the end, unless what they make is read before that. Lowering asks here, as the ledger and the clocks do.

``repeats`` says what ``hap.codegen.passes.recompute`` does to a program: which calls run once more, and before which; a
test holds the two together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from types import MappingProxyType

from hap.conversion import required_results
from hap.graph import Graph, Node, Value
from hap.placement import Placement
from hap.plan import Strategy

Parts = tuple[tuple[Node, ...], tuple[Node, ...], tuple[Node, ...]]
Postponed = Mapping[str, tuple[str, ...]]  # call of the backward pass, or "" -> which run just before it, or at the end
NONE: Postponed = MappingProxyType({})


def program_order(graph: Graph, postponed: Postponed = NONE) -> tuple[Node, ...]:
    """Sources first, then calls as they run."""
    return tuple(node for part in program_parts(graph, postponed) for node in part)


def program_parts(graph: Graph, postponed: Postponed = NONE) -> Parts:
    """Sources, calls of the forward part, calls of the backward part."""
    sources = tuple(n for n in graph.nodes if n.is_source)
    order: list[Node] = []
    done = {n.name for n in sources}

    def add(*names: str) -> None:
        """What they need goes before them."""
        if len(names) == 1 and done.issuperset([v.node for v in graph.by_name[names[0]].inputs]):
            if names[0] not in done:
                order.append(graph.by_name[names[0]])
                done.add(names[0])
            return
        for name in sorted(_ancestors(graph, names, done), key=graph.position.__getitem__):
            order.append(graph.by_name[name])
            done.add(name)

    add(graph.loss.node, *(v.node for v in graph.updates.values()))
    first = len(order)
    wanted = _ancestors(graph, (v.node for v in graph.gradients.values()), done)
    late = frozenset(chain(*postponed.values()))
    for node in graph.nodes:
        if node.name in wanted and node.phase == "backward" and node.name not in late:
            for name in (*postponed.get(node.name, ()), node.name):
                add(name)
    for name in postponed.get("", ()):
        add(name)
    for value in graph.gradients.values():
        add(value.node)
    return sources, tuple(order[:first]), tuple(order[first:])


def _ancestors(graph: Graph, names: Iterable[str], done: set[str]) -> set[str]:
    """The named nodes and all that they depend on, without those done."""
    pending, found = list(names), set[str]()
    while pending:
        name = pending.pop()
        if name not in found and name not in done:
            found.add(name)
            pending += [v.node for v in graph.by_name[name].inputs]
    return found


def repeats(
    graph: Graph, strategies: Mapping[str, Strategy], recomputed: Collection[str], parts: Parts | None = None
) -> dict[str, tuple[Node, ...]]:
    """Call of the backward part -> those of the calls named ``recomputed`` that are made again just before it: what it
    reads as they made it, and what that needs. A converted copy that the forward part has is kept, and read instead.
    ``parts`` are the graph's, if known."""
    if not recomputed:
        return {}
    _, forward, backward = program_parts(graph) if parts is None else parts
    ran = frozenset(n.name for n in forward)
    chosen = frozenset(recomputed) & ran
    copies = {read for node in forward for read in zip(node.inputs, strategies[node.name].inputs, strict=True)}
    copies |= set(required_results(graph, strategies))
    done: set[str] = set()

    def from_maker(value: Value, target: Placement) -> bool:
        """Whether a call of the backward part that reads ``value`` in ``target`` needs it as it was made."""
        if strategies[value.node].outputs[value.index] == target:
            return True
        known = (value, target) in copies
        copies.add((value, target))
        return not known

    found: dict[str, tuple[Node, ...]] = {}
    for node in backward:
        waiting, again = [node], set[str]()
        while waiting:
            reader = waiting.pop()
            for value, target in zip(reader.inputs, strategies[reader.name].inputs, strict=True):
                if value.node in chosen and value.node not in done and from_maker(value, target):
                    done.add(value.node)
                    again.add(value.node)
                    waiting.append(graph.by_name[value.node])
        if again:
            found[node.name] = tuple(graph.by_name[name] for name in sorted(again, key=graph.position.__getitem__))
    return found
