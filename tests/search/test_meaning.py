"""What the planner chooses computes what one device computes, value by value, in float64."""

import pytest
import torch
from torch import nn

from hap.capture import capture, interpret, source_values
from hap.codegen.lowering import lower
from hap.rules.choices import choices
from hap.runtime.lockstep import run_lockstep
from hap.search import Pins, plan_graph
from tests.search.models import cluster

# So little memory bandwidth and so fast a network that sharding a toy pays.
TOY = {"network": "100000GB/s", "latency": "0us", "memory_bandwidth": "1MB/s"}


class Residual(nn.Module):
    """A norm, two linear layers around a nonlinearity, a residual, a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.wide = nn.Linear(12, 20)
        self.narrow = nn.Linear(20, 12)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = x + self.narrow(torch.tanh(self.wide(self.norm(x))))
        return nn.functional.mse_loss(torch.softmax(out, -1), y)


@pytest.mark.parametrize(
    ("memory", "pins"),
    [
        ("1GB", None),
        ("18kB", None),
        ("1GB", Pins(placements={"*": "R", "args.*": "S(0)"})),
        ("1GB", Pins(placements={"*": "S(0)", "args.*": "S(0)"}, ratios=(4, 1, 0))),
        ("1GB", Pins(placements={"wide.weight": "S(0)", "narrow.weight": "S(1)", "args.*": "R"})),
    ],
    ids=["free", "memory binds", "data parallel", "ZeRO, one device idle", "tensor parallel"],
)
def test_equals_one_device(memory: str, pins: Pins | None) -> None:
    torch.manual_seed(0)
    model = Residual().double()
    batch = (torch.randn(11, 12, dtype=torch.float64), torch.rand(11, 12, dtype=torch.float64))
    graph = capture(model, batch)
    devices = cluster((0.01, memory), (0.005, memory), (0.002, memory), **TOY)
    plan = plan_graph(choices(graph), devices, pins=pins)
    assert any(c.collective != "slice" for c in plan.conversions)
    values = interpret(graph, source_values(graph, model, batch, tangent=1.3))
    step = run_lockstep(lower(graph, plan), values, check=True)
    torch.testing.assert_close(step.loss, values[graph.loss], rtol=1e-12, atol=0)
    for target, value in graph.gradients.items():
        torch.testing.assert_close(step.gradients[target], values[value], rtol=1e-10, atol=1e-12)
