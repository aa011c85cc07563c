"""Calls beside the path (``chain``) that run in its stages by its group, or in stages without it.

Conversions, which part stages, stand before whoever first wants the value so, or after its maker where only a result
does. So of a call a beside the path it can be said when it may run while the path is dealt out by another group than
a's, h. Where that is not so, the busiest rank of h bounds a and its stage together, as it does the path's calls. Let c
and e be the path's calls before and after a.

*A follower* reads what c makes, v, before anybody else does. If that is turned for it, it stands after a collective,
without c; if not, c's group is h. If it makes a partial gradient, that is summed right after it, so it is in no stage
with e. If it makes anything else, it may be with e, if e is dealt out by another group g and no collective is between:

    v is dealt out by g, e reads it so, and a has it turned

Or it reads v whole, or a part of a whole v. Then e may be dealt out by no group, and so may the calls that follow, up
to one that is dealt out by another group, all without a collective: there nothing is claimed for it.

*A sibling* reads what c's predecessor makes, v, as c does, who is the first: a weight's gradient beside the input's.
If it makes a partial gradient, that is summed right after it, and e is not in its stage. With it may be c, if c is
dealt out by another group g and no collective is between:

    v is dealt out by h, a reads it so, and c has it turned to g;  or c and a cut theirs out of a whole v;
    or c reads v whole, and what else it reads is dealt out by g

If it makes anything else, and nobody reads before it what c makes, then e, which reads that, is with it only by c's
group. With it may be c, if that is dealt out by another group.

A call may read v through one of one argument, such as a transposition, that stands after c and reads v in its place; a
follower's e may then be with it wherever it is dealt out by another group.

Of the calls between c and e only the last may make something else than a gradient that is summed: the sum parts the
others from what comes after. Where the path is dealt out by no group nothing is lost: a call that every rank makes
takes its time on the busiest rank, too, whoever that is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from hap.cost_models.compute import parts_seconds
from hap.graph import Graph, Node, Value
from hap.search.prices import Facts

LIGHT = 1e-3  # of all work: calls of less are left out


class Companion(NamedTuple):
    """``value``: made by the path, read by ``reader``, which is the call itself or the one through which it reads, and
    by ``call``: of a follower the path's next call, of a sibling (``is_sibling``) the one before. ``closes``: whether a
    collective follows where it makes a partial sum. ``is_last``: whether it may be claimed where it does not."""

    value: Value
    reader: str
    call: str
    is_sibling: bool
    closes: bool
    is_last: bool


def find_companions(facts: Facts, path: Collection[str]) -> dict[str, Companion]:
    """Those of some weight, by name. ``path``: the calls of ``find_chain``."""
    graph, device = facts.graph, facts.cluster.devices[0]
    calls = [n for n in graph.nodes if not n.is_source]
    seconds = {n.name: parts_seconds(facts.parts(n.name, facts.candidates[n.name][0]), 1.0, device) for n in calls}
    least_s, found = LIGHT * sum(seconds.values()), dict[str, Companion]()
    order = graph.position
    on_path = [n for n in graph.nodes if n.name in path]
    for previous, before, after in zip([None, *on_path], on_path, on_path[1:], strict=False):
        between = [n for n in graph.nodes[order[before.name] + 1 : order[after.name]] if not n.is_source]
        between = [n for n in between if seconds[n.name] >= least_s and n.phase == before.phase == after.phase]
        if _makes_result(graph, before):
            continue
        for node in between:
            for value, reader in _reads(graph, node, before, order):
                readers = [user.name for user, _ in graph.users[value]]
                others = [name for name in readers if order[name] < order[node.name] and name != reader]
                if value in graph.results or readers.count(reader) != 1:
                    continue
                is_follower = value.node == before.name and not others and readers.count(after.name) == 1
                is_sibling = previous is not None and value.node == previous.name and previous.phase == before.phase
                if not is_follower and not (is_sibling and readers[0] == before.name and readers[1] != before.name):
                    continue
                made = [user for v in _made(graph, before) for user, _ in graph.users[v]]
                is_last = node is between[-1] and (is_follower or all(order[u.name] > order[node.name] for u in made))
                call = after.name if is_follower else before.name
                found[node.name] = Companion(value, reader, call, not is_follower, _closes(graph, node), is_last)
                break
    return found


def _reads(graph: Graph, node: Node, before: Node, order: Mapping[str, int]) -> Iterator[tuple[Value, str]]:
    """What the call reads, by itself or through one of one argument that stands after ``before``."""
    for value in node.inputs:
        yield value, node.name
        through = graph.by_name[value.node]
        if not through.is_source and len(through.inputs) == 1 and order[through.name] > order[before.name]:
            yield through.inputs[0], through.name


def _made(graph: Graph, node: Node) -> list[Value]:
    return [v for v in (Value(node.name, i) for i in range(len(node.outputs))) if v in graph.users]


def _makes_result(graph: Graph, node: Node) -> bool:
    return any(v.node == node.name for v in graph.results)


def _closes(graph: Graph, node: Node) -> bool:
    """Whether what it makes is a result, and read by nobody: where it is partial it is summed right after the call."""
    value = Value(node.name, 0)
    return len(node.outputs) == 1 and value in graph.results and not graph.users.get(value)
