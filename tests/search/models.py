"""Small captured models and clusters that the search's tests share. Nothing is allocated: models live on ``meta``."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.plan import Plan
from hap.rules.choices import Choices, choices
from hap.search.assemble import assemble_plan
from hap.search.found import Found


@cache
def mlp(batch: int, width: int, layers: int = 2) -> Choices:
    """``layers`` of Linear (width, width) with ReLU between and a mean-squared-error loss, on (batch, width)."""
    with torch.device("meta"):
        steps: list[nn.Module] = []
        for _ in range(layers):
            steps += [nn.Linear(width, width), nn.ReLU()]
        model = nn.Sequential(*steps[:-1])
        x = torch.empty(batch, width)
    return choices(capture(model, x, loss_fn=nn.functional.mse_loss, example_targets=x, name="mlp"))


class Mixer(nn.Module):
    """A layer over the width and one over the positions of (batch, length, width): each dim is mixed by one of them."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.within, self.across = nn.Linear(width, width), nn.Linear(length, length)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.across(self.within(x).relu().transpose(1, 2)).transpose(1, 2)


@cache
def mixer(batch: int, length: int, width: int) -> Choices:
    """``Mixer`` with a mean-squared-error loss."""
    with torch.device("meta"):
        model, x = Mixer(length, width), torch.empty(batch, length, width)
    return choices(capture(model, x, loss_fn=nn.functional.mse_loss, example_targets=x, name="mixer"))


@cache
def unrolled(steps: int, batch: int = 8, width: int = 8) -> Choices:
    """An Elman network over (batch, steps, width), its steps in time calls of their own."""
    with torch.device("meta"):
        model, x = nn.RNN(width, width, batch_first=True), torch.empty(batch, steps, width)
    return choices(capture(model, x, loss_fn=lambda out: out[0].square().mean(), name="unrolled"))


@cache
def gpt2(layers: int, batch: int = 16, length: int = 128, width: int = 256, heads: int = 4) -> Choices:
    """Hugging Face GPT-2 with its own loss and a vocabulary of 4,000."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        vocab_size=4000,
        n_positions=length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        ids = torch.zeros(batch, length, dtype=torch.int64)
    return choices(capture(model, {"input_ids": ids, "labels": ids}, name="gpt2"))


def cluster(
    *devices: tuple[float, str],
    network: str = "100GB/s",
    latency: str = "1us",
    memory_bandwidth: str = "2000GB/s",
) -> ClusterSpec:
    """One host per device, each (TFLOP/s in float32, memory)."""
    hosts = "".join(
        f"""
  - name: host{i}
    devices: [{{name: gpu, tflops: {{float32: {tflops}}}, memory: {memory}, memory_bandwidth: {memory_bandwidth}}}]
    network: {{bandwidth: {network}, latency: {latency}}}"""
        for i, (tflops, memory) in enumerate(devices)
    )
    return ClusterSpec.from_yaml(f"name: test\nbackend: nccl\nhosts:{hosts}\n")


def plan_of(choices: Choices, devices: ClusterSpec, found: Found) -> Plan:
    """What a search found, as a plan to run."""
    return assemble_plan(
        choices,
        devices,
        found.strategies,
        found.sizes,
        found.evaluation,
        optimizer="adamw",
        model_name=choices.graph.name,
        lower_bound_s=None,
        solver={},
        recomputed=found.recomputed,
        postponed=found.postponed,
    )
