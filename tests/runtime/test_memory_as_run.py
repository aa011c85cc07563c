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

WIDTH, LAYERS, BATCH = 256, 16, 384
DEVICES = """
name: test
backend: gloo
hosts:
  - name: h
    devices: [{{name: d, count: 3, tflops: {{float32: 0.05}}, memory: {}, memory_bandwidth: 10GB/s}}]
    link: {{bandwidth: 1GB/s, latency: 50us}}
"""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def peaks(rank: int, plan: str) -> int:
    """Of forward and backward, with what an AdamW holds; parameters and inputs included."""
    x = torch.randn(BATCH, WIDTH)
    program = hap.compile(model(), plan=Plan.from_json(plan), example_inputs=(x,), loss_fn=loss_of)
    (mine,) = (share.clone() for share in program.shard_batch((x,)))
    seen = Allocations()
    held = (*program.parameters(), *program.buffers())
    state = [torch.empty_like(p) for p in held for _ in "mv"]
    seen.keep((*held, *state, mine))
    return seen.least_peak(lambda: program(mine).backward(), program.zero_grad)


@pytest.mark.parametrize(
    ("memory", "placements"),
    [("10GB", {"*": "R", "args.*": "S(0)"}), ("10GB", {"args.*": "S(0)"}), ("9MB", {})],
    ids=["data parallel", "searched", "searched, little memory"],
)
def test_a_step_as_run_holds_what_its_plan_says(memory: str, placements: dict[str, str]) -> None:
    with torch.device("meta"):
        graph = capture(model(), torch.empty(BATCH, WIDTH), loss_fn=loss_of)
    pins = Pins(placements=placements) if placements else None
    plan = plan_graph(choices(graph), ClusterSpec.from_yaml(DEVICES.format(memory)), pins=pins)
    for peak, expected in zip(run_ranks(3, peaks, plan.to_json()), plan.predicted.memory_bytes, strict=True):
        assert 0.9 * expected < peak < expected + LIMIT_BYTES
