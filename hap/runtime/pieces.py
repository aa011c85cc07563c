"""A module's calls by ``torch.compile``, piece by piece: what lies between two uses of the communicator is one graph.

Left to find them itself, ``torch.compile`` would trace the rest of the module anew after each collective. Here the
module is cut before: collectives, and what is taken out of the saved values, run as they are, in the order that they
have; a saved value is taken out at the beginning of the piece that reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from hap.attention import attention, attention_backward


def compiled_pieces(module: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
    """The module with its pieces compiled when they first run. ``options``: ``torch.compile``'s."""
    for kernel in (attention, attention_backward):  # which look at devices and choose
        torch.compiler.allow_in_graph(kernel)
    ordered, numbers = _ordered(module.graph)
    cut = split_module(fx.GraphModule(module, ordered), module, numbers.__getitem__, keep_original_order=True)
    for number in sorted(set(numbers.values())):
        if number % 2:
            name = f"submod_{number}"
            setattr(cut, name, torch.compile(cut.get_submodule(name), **options))
    return cut


def _ordered(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, int]]:
    """The graph with its parts one after another, and the part of each node."""
    numbers, copied, ordered = _numbers(graph), dict[fx.Node, fx.Node](), fx.Graph()
    ends = {"placeholder": -1, "output": max(numbers.values(), default=0) + 1}
    for node in sorted(graph.nodes, key=lambda node: numbers.get(node, ends.get(node.op, 0))):
        copied[node] = ordered.node_copy(node, copied.__getitem__)
    return ordered, {copied[node]: number for node, number in numbers.items()}


def _numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """Node -> its part: odd ones are computed, even ones, which come before, run as they are."""
    comm = next(node for node in graph.nodes if node.op == "placeholder")
    assert comm.target == "comm"
    found: dict[fx.Node, int] = {}
    number = 1
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "call_method" and first is comm:
            number += 2
            found[node] = number - 1
        elif node.op == "call_method" and node.target == "pop":
            found[node] = number - 1
        elif node.target is operator.getitem and isinstance(first, fx.Node) and found.get(first, 1) % 2 == 0:
            found[node] = found[first]
        else:
            found[node] = number
    return found
