"""Dropout in one spelling: ``hap.dropout.default(x, seed, p, site, None)``, forward and backward.

The seed is an input of the step, ``SEED``, which whoever runs the graph gives: an int64 scalar, another one each step.
Sites are numbered in program order. A dropout whose mask is read by anything but its own backward keeps its name, and
rules refuse it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hap.capture.rewrite import Rewritten, rewrite
from hap.graph import Graph, Node, TensorMeta, Value

SEED = "seed"  # the target of the input node; the user's inputs are args.*, kwargs.* and targets.*
_FORWARD, _BACKWARD = "aten.native_dropout.default", "aten.native_dropout_backward.default"
_OWN = "hap.dropout.default"


def canonical_dropout(graph: Graph) -> Graph:
    """Every dropout whose mask serves only its backward; adds the seed if there is one."""
    mine = [n for n in graph.nodes if n.op == _FORWARD and n.args[2] and _is_private(graph, n)]
    if not mine:
        return graph
    sites = {node.name: site for site, node in enumerate(mine)}
    seed = Node("dropout_seed", "input", outputs=(TensorMeta((), torch.int64),), target=SEED)
    first = next(i for i, n in enumerate(graph.nodes) if not n.is_source)
    graph = replace(graph, nodes=(*graph.nodes[:first], seed, *graph.nodes[first:]))
    probabilities = {node.name: float(node.args[1]) for node in mine}

    def rule(node: Node, done: Rewritten) -> Node | None:
        owner = node.name if node.op == _FORWARD else node.args[1].node if node.op == _BACKWARD else ""
        if owner not in sites:
            return None
        args = (node.args[0], Value(seed.name), probabilities[owner], sites[owner], None)
        return replace(node, op=_OWN, args=args, kwargs=(), outputs=node.outputs[:1])

    return rewrite(graph, rule)


def _is_private(graph: Graph, node: Node) -> bool:
    mask = Value(node.name, 1)
    return all(user.op == _BACKWARD and at == 1 for user, at in graph.users.get(mask, ()))
