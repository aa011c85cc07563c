"""What calls of the forward part make that the backward part reads: what lies between them, if nothing is repeated."""

from __future__ import annotations

from collections.abc import Mapping

from hap.cost_models.work import is_view
from hap.graph import Graph, Value
from hap.order import program_parts


def parts_of_calls(graph: Graph) -> Mapping[str, str]:
    """Call -> the part of the program in which it runs."""
    _, forward, backward = program_parts(graph)
    return dict.fromkeys((n.name for n in backward), "backward") | dict.fromkeys((n.name for n in forward), "forward")


def saved_bytes(graph: Graph, parts: Mapping[str, str], name: str) -> int:
    """Bytes of what a call of the forward part makes and the backward part reads, by itself or through views, of which
    those that must copy may be kept in its place. ``parts``: of the calls."""
    node = graph.by_name[name]
    if node.is_source or is_view(node) or parts.get(name) != "forward":
        return 0
    made = [(Value(name, i), meta.nbytes) for i, meta in enumerate(node.outputs) if meta is not None]
    return sum(_read_late(graph, parts, value, nbytes) for value, nbytes in made)


def _read_late(graph: Graph, parts: Mapping[str, str], value: Value, nbytes: int) -> int:
    """The most bytes that a reader in the backward part needs of a value, no more than ``nbytes``."""
    most = 0
    for user, place in graph.users.get(value, ()):
        if parts.get(user.name) == "backward":
            return nbytes
        if is_view(user) and place == 0:
            for index, meta in enumerate(user.outputs):
                if meta is not None:
                    most = max(most, _read_late(graph, parts, Value(user.name, index), min(nbytes, meta.nbytes)))
    return most
