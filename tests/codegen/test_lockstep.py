"""Any combination of sound strategies, sizes and zero shares means what one device means, value by value."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hap.capture import capture, interpret, source_values
from hap.codegen.lowering import lower
from hap.graph import Graph, Value
from hap.rules.choices import Choices, choices
from hap.runtime.lockstep import run_lockstep
from tests._support import cases, gpt2
from tests._support.plans import make_plan, random_sizes, random_strategies


class Small(nn.Module):
    """Three layers with a norm and a softmax: quick enough for hundreds of plans."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.second = nn.Linear(6, 4, bias=False)
        self.third = nn.Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        out = torch.softmax(self.second(hidden), -1) @ self.third.weight.t()
        return nn.functional.mse_loss(out, y)


@cache
def small() -> tuple[Choices, dict[Value, torch.Tensor]]:
    torch.manual_seed(0)
    model = Small().double()
    batch = (torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64))
    graph = capture(model, batch)
    return choices(graph), interpret(graph, source_values(graph, model, batch, tangent=0.7))


@cache
def large() -> tuple[Graph, dict[Value, torch.Tensor]]:
    graph = gpt2.graph()
    sources = source_values(graph, gpt2.build(), (gpt2.batch(),), gpt2.batch(), tangent=1.3)
    return graph, interpret(graph, sources)


@settings(max_examples=120, deadline=None)
@given(source=st.randoms(use_true_random=False), world_size=st.integers(1, 4), regather=st.booleans())
def test_any_sound_plan_equals_one_device(source, world_size, regather) -> None:  # type: ignore[no-untyped-def]
    found, values = small()
    plan = make_plan(
        found, random_strategies(found, source), random_sizes(found, world_size, source), regather=regather
    )
    step = run_lockstep(lower(found.graph, plan), values, check=True)
    for target, value in found.graph.gradients.items():
        torch.testing.assert_close(step.gradients[target], values[value], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_any_sound_plan_of_gpt2_equals_one_device(seed: int) -> None:
    graph, values = large()
    step = run_lockstep(lower(graph, cases.anything(seed)), values, check=True)
    torch.testing.assert_close(step.loss, values[graph.loss], rtol=1e-12, atol=0)
    assert step.gradients.keys() == graph.gradients.keys()
