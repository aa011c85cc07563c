"""Compare a captured graph, interpreted, with the module itself run by autograd."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hap.capture import capture, interpret, source_values
from hap.capture.inputs import step_inputs
from hap.capture.step import find_loss
from hap.graph import Graph, verify_graph


def assert_equals_eager(
    model: nn.Module, inputs: Any, *, loss_fn: Any = None, targets: Any = None, tolerance: float = 1e-12
) -> Graph:
    """Loss, every gradient (and the absence of one) and every changed buffer, relative to the largest entry."""
    graph = capture(model, inputs, loss_fn=loss_fn, example_targets=targets)
    verify_graph(graph)
    values = interpret(graph, source_values(graph, model, inputs, targets, tangent=2.0))

    eager = copy.deepcopy(model)
    call = step_inputs(inputs, targets)
    loss = find_loss(eager(*call.args, **call.kwargs), loss_fn, call.targets)
    loss.backward(torch.tensor(2.0, dtype=loss.dtype))
    assert_close(values[graph.loss], loss.detach(), tolerance, "loss")
    gradients = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
    assert list(graph.gradients) == list(gradients)
    for name, gradient in gradients.items():
        assert_close(values[graph.gradients[name]], gradient, tolerance, name)
    before = dict(model.named_buffers())
    changed = {name: b for name, b in eager.named_buffers() if not torch.equal(b, before[name])}
    assert sorted(graph.updates) == sorted(changed)
    for name, buffer in changed.items():
        assert_close(values[graph.updates[name]], buffer, tolerance, name)
    return graph


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    assert got.shape == expected.shape and got.dtype == expected.dtype, what
    if expected.numel():
        error = float((got - expected).abs().max() / expected.abs().max().clamp(min=1))
        assert error <= tolerance, f"{what}: {error:.2e}"


def count(graph: Graph) -> Mapping[str, int]:
    """Operator -> how often it is called."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        if not node.is_source:
            found[node.op] = found.get(node.op, 0) + 1
    return found
