"""Autocast around a step and inside of it: the casts of eager PyTorch, forward and backward."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from hap.capture import capture, interpret, source_values
from hap.capture.autocast import IN_FLOAT32, Autocast
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


def test_the_list_of_what_cuda_computes_in_float32_is_that_of_torch() -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("this torch is installed without its headers")
    lists = dict(re.findall(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)*.*)", header.read_text()))
    names = re.findall(r"_\((\w+)[,)]", lists["FP32"] + lists["FP32_SET_OPT_DTYPE"])
    names += re.findall(r"ADD_NS\((\w+)\)", lists["DIFFERENT_REDISPATCH_SIGNATURE"])
    assert len(names) > 60
    assert sorted(set(names) - IN_FLOAT32) == []


IMAGE = torch.ones(1, 2, 4, 4, dtype=torch.bfloat16)
WIDE = [
    lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    lambda x: functional.interpolate(x, (8, 8)),
    lambda x: torch.logsumexp(x, 1),
    lambda x: torch.linalg.vector_norm(x, dim=1),
    lambda x: torch.linalg.matrix_norm(x),
    lambda x: torch.linalg.norm(x, dim=1),
    lambda x: functional.huber_loss(x, x),
    lambda x: torch.renorm(x, 2, 0, 1.0),
    lambda x: torch.special.logsumexp(x, 1),
]


@pytest.mark.parametrize("function", WIDE)
def test_what_cuda_computes_in_float32_is_in_float32(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with Autocast("cuda", torch.bfloat16).on_cpu():
        assert function(IMAGE).dtype == torch.float32


def test_what_cuda_computes_in_16_bits_stays_so() -> None:
    with Autocast("cuda", torch.bfloat16).on_cpu():
        assert functional.interpolate(IMAGE, (2, 2), mode="area").dtype == torch.bfloat16
        assert functional.gelu(IMAGE).dtype == torch.bfloat16
