"""Run a ``Graph`` on one device, node by node: the meaning of a graph, for tests and for proving rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hap.capture.inputs import input_paths
from hap.capture.seed import SEED
from hap.graph import Graph, Node, Value, map_values
from hap.ops import resolve, takes_device


def interpret(graph: Graph, env: Mapping[Value, torch.Tensor]) -> dict[Value, torch.Tensor]:
    """Every value of the graph. ``env`` holds the sources (``source_values``); constants may be left out.

    All tensors of ``env`` must be on one device; the graph runs there.
    """
    device = next((t.device for t in env.values()), torch.device("cpu"))
    values = dict(env)
    for node in graph.nodes:
        if node.op == "constant":
            values.setdefault(Value(node.name), graph.constants[node.target].to(device))
        elif not node.is_source:
            values.update(run_node(node, values, device))
    return values


def run_node(node: Node, values: Mapping[Value, torch.Tensor], device: torch.device) -> dict[Value, torch.Tensor]:
    """The node's tensor outputs, given those of its inputs."""
    args = map_values(node.args, values.__getitem__)
    kwargs: dict[str, Any] = {k: map_values(v, values.__getitem__) for k, v in node.kwargs}
    if takes_device(node.op):
        kwargs["device"] = device
    result = resolve(node.op)(*args, **kwargs)
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    return {Value(node.name, i): t for i, t in enumerate(outputs) if isinstance(t, torch.Tensor)}


def source_values(
    graph: Graph,
    model: nn.Module,
    example_inputs: Any,
    example_targets: Any = None,
    tangent: float = 1.0,
    seed: int = 0,
) -> dict[Value, torch.Tensor]:
    """The environment of one step of ``model`` on real inputs.

    ``tangent`` is the loss's own gradient, ``seed`` the step's, from which random numbers are drawn.
    """
    state: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    inputs = {SEED: torch.tensor(seed), **dict(input_paths(example_inputs, example_targets))}
    env = {}
    for node in graph.nodes:
        if node.op in ("parameter", "buffer"):
            env[Value(node.name)] = state[node.target].detach()
        elif node.op == "input":
            env[Value(node.name)] = inputs[node.target]
        elif node.op == "tangent":
            env[Value(node.name)] = torch.tensor(tangent, dtype=node.meta.dtype)
    device = next((t.device for t in env.values() if t.dim()), torch.device("cpu"))
    return {value: tensor.to(device) for value, tensor in env.items()}
