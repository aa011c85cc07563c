"""Autocast around a step and inside of it: the casts of eager PyTorch, forward and backward."""

from __future__ import annotations

import copy

import torch
from torch import nn

from hap.capture import capture, interpret, source_values
from hap.graph import Graph
from tests.capture.equality import assert_close


class Exact(nn.Module):
    """Its second product is in float32, whatever is active outside. Without biases no kernel rounds more than once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 10, bias=False), nn.Linear(10, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.second(x.float()).square().mean()


def products(graph: Graph) -> dict[tuple[str, torch.dtype], int]:
    """(phase, dtype) -> how many."""
    found: dict[tuple[str, torch.dtype], int] = {}
    for node in graph.nodes:
        if node.op == "aten.mm.default":
            found[node.phase, node.meta.dtype] = found.get((node.phase, node.meta.dtype), 0) + 1
    return found


def test_the_backward_pass_is_outside_of_autocast() -> None:
    model, x = Exact(), torch.randn(8, 6)
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(model, x)
        eager = copy.deepcopy(model)
        loss = eager(x)
    loss.backward()
    assert products(graph) == {
        ("forward", torch.bfloat16): 1,
        ("forward", torch.float32): 1,
        ("backward", torch.float32): 2,
        ("backward", torch.bfloat16): 1,
    }
    values = interpret(graph, source_values(graph, model, x))
    for name, parameter in eager.named_parameters():
        assert_close(values[graph.gradients[name]], parameter.grad, 1e-6, name)
