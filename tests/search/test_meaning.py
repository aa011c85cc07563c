"""What the planner chooses computes what one device computes, value by value, in float64."""

import pytest
import torch

from hap.capture import interpret, source_values
from hap.codegen.lowering import lower
from hap.rules.choices import choices
from hap.runtime.lockstep import run_lockstep
from hap.search import Pins, plan_graph
from tests._support.residual import PINS, captured
from tests.search.models import cluster

# So little memory bandwidth and so fast a network that sharding a toy pays.
TOY = {"network": "100000GB/s", "latency": "0us", "memory_bandwidth": "1MB/s"}


@pytest.mark.parametrize(
    ("memory", "pins"),
    [("1GB", None), ("18kB", None), *(("1GB", pins) for pins in PINS.values())],
    ids=["free", "memory binds", *PINS],
)
def test_equals_one_device(memory: str, pins: Pins | None) -> None:
    model, batch, graph = captured()
    devices = cluster((0.01, memory), (0.005, memory), (0.002, memory), **TOY)
    plan = plan_graph(choices(graph), devices, pins=pins)
    assert any(c.collective != "slice" for c in plan.conversions)
    values = interpret(graph, source_values(graph, model, batch, tangent=1.3))
    step = run_lockstep(lower(graph, plan), values, check=True)
    torch.testing.assert_close(step.loss, values[graph.loss], rtol=1e-12, atol=0)
    for target, value in graph.gradients.items():
        torch.testing.assert_close(step.gradients[target], values[value], rtol=1e-10, atol=1e-12)
