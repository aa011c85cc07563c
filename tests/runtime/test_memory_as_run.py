"""A step with its default passes holds what its plan says, and a bundle in the making beside it: no partial sums that
are under way, and no activations that a product at the end would read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hap
from benchmarks.allocations import Allocations
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.codegen.passes.bucket import LIMIT_BYTES
from hap.plan import Plan
from hap.rules.choices import choices
from hap.search import Pins, plan_graph
from tests._support.ranks import run_ranks

WIDTH, LAYERS, BATCH = 256, 12, 192
DEVICES = """
name: test
backend: gloo
hosts:
  - name: h
    devices: [{{name: d, count: 2, tflops: {{float32: 0.05}}, memory: {}, memory_bandwidth: 10GB/s}}]
    link: {{bandwidth: 1GB/s, latency: 50us}}
"""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def peaks(rank: int, plans: list[str]) -> list[int]:
    found = []
    for text in plans:
        x = torch.randn(BATCH, WIDTH)
        program = hap.compile(model(), plan=Plan.from_json(text), example_inputs=(x,), loss_fn=loss_of)
        (mine,) = (share.clone() for share in program.shard_batch((x,)))
        seen = Allocations()
        seen.keep((*program.parameters(), *program.buffers(), mine))
        found.append(seen.least_peak(lambda mine=mine, program=program: program(mine).backward(), program.zero_grad))
    return found


@pytest.mark.parametrize("memory", ["10GB", "7MB"])
def test_a_step_as_run_holds_what_its_plan_says(memory: str) -> None:
    """Data parallel, and what a search finds, where there is room and where there is little."""
    with torch.device("meta"):
        graph = capture(model(), torch.empty(BATCH, WIDTH), loss_fn=loss_of)
    found, on = choices(graph), ClusterSpec.from_yaml(DEVICES.format(memory))
    pins = [Pins(placements={"args.*": "S(0)"})]
    if memory == "10GB":
        pins.append(Pins(placements={"*": "R", "args.*": "S(0)"}))
    plans = [plan_graph(found, on, pins=pin, optimizer="sgd") for pin in pins]
    for held in run_ranks(2, peaks, [plan.to_json() for plan in plans]):
        for plan, peak in zip(plans, held, strict=True):
            expected = plan.predicted.memory_bytes[0]
            assert 0.9 * expected < peak < expected + LIMIT_BYTES
