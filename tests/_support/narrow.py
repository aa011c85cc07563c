"""Plans for tests whose gradients are exchanged between the casts that ``reduce_dtype`` wrote, as the search plans."""

from __future__ import annotations

from collections.abc import Mapping

from hap.codegen.program import Convert, Program
from hap.graph import CAST, Graph
from hap.placement import Sizes
from hap.plan import Plan, Strategy
from hap.rules.choices import Choices
from tests._support.plans import greedy_strategies, make_plan


def narrow_plan(
    found: Choices, wishes: Mapping[str, tuple[int, int]], sizes: Mapping[str, Sizes], *, regather: bool = False
) -> Plan:
    """A greedy plan that widens every gradient where its parameter lies."""
    graph, strategies = found.graph, greedy_strategies(found, wishes)
    homes = {n.target: strategies[n.name].outputs[0] for n in graph.sources("parameter")}
    for target, value in graph.gradients.items():
        if graph.by_name[value.node].op == CAST:
            home = homes[target]
            assert home is not None
            strategies[value.node] = Strategy((home,), (home,))
    return make_plan(found, strategies, sizes, regather=regather)


def exchanged(program: Program) -> list[tuple[Convert, int]]:
    """What ranks exchange of gradients, and its bytes of the whole."""
    behind: set[str] = set(program.gradients.values())
    found = []
    for instruction in reversed(program.backward):
        members = getattr(instruction, "members", (instruction,))
        for member in members:
            if behind.isdisjoint(n for n in member.outputs if n):
                continue
            if isinstance(member, Convert):
                found += [(member, program.held[member.input].meta.nbytes)] if member.kind != "slice" else []
            elif member.op == CAST or member.op == "aten.add.Tensor":
                behind.update(member.inputs)
    return found


def is_narrow(graph: Graph, program: Program) -> bool:
    """Whether all that ranks exchange of gradients has the graph's ``reduce_dtype``."""
    return all(program.held[c.input].meta.dtype == graph.reduce_dtype for c, _ in exchanged(program))
