"""Cutting a module at its collectives."""

from __future__ import annotations

import pytest
from torch import fx

from hap.codegen.fx import to_graph_modules
from hap.codegen.lowering import lower
from hap.codegen.passes.runner import run_passes, standard_passes
from hap.runtime.pieces import compiled_pieces
from tests._support import cases, gpt2

CALLED = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "slice", "start", "together", "wait")


def called(graph: fx.Graph) -> list[str]:
    """Collectives, with all that is no value."""
    nodes = [n for n in graph.nodes if n.op == "call_method" and n.target in CALLED]
    told = [[a for a in n.args if not isinstance(a, (fx.Node, list))] for n in nodes]
    return [f"{n.target} {words} {sorted(n.kwargs.items())}" for n, words in zip(nodes, told, strict=True)]


@pytest.mark.parametrize("part", [0, 1])
def test_collectives_keep_their_order_and_are_in_no_compiled_piece(part: int) -> None:
    program = run_passes(lower(gpt2.graph(), cases.zero((5, 2, 1), regather=True)), standard_passes()).program
    module = to_graph_modules(program, 0)[part]
    before, after, pieces = called(module.graph), list[str](), 0
    cut = compiled_pieces(module, {"backend": "eager"})
    for call in cut.graph.nodes:
        if call.op != "call_module":
            continue
        inside = cut.get_submodule(str(call.target))
        if int(str(call.target).rpartition("_")[2]) % 2:
            pieces += 1
            graph: fx.Graph = inside._orig_mod.graph  # type: ignore[assignment,union-attr]
            assert not called(graph) and not [n for n in graph.nodes if n.target == "pop"]
        else:
            after += called(inside.graph)  # type: ignore[arg-type]
    assert len(set(before)) > 10 and after == before and pieces > 5
