"""The seed of a step's random numbers, an input of its graph."""

from __future__ import annotations

from dataclasses import replace

import torch

from hap.graph import Graph, Node, TensorMeta, Value

SEED = "seed"  # the target of the input node; the user's inputs are args.*, kwargs.* and targets.*


def with_seed(graph: Graph) -> tuple[Graph, Value]:
    """The graph with an input for the seed: an int64 scalar, which whoever runs it gives, another one each step."""
    seed = Node("drawing_seed", "input", outputs=(TensorMeta((), torch.int64),), target=SEED)
    first = next(i for i, n in enumerate(graph.nodes) if not n.is_source)
    return replace(graph, nodes=(*graph.nodes[:first], seed, *graph.nodes[first:])), Value(seed.name)
