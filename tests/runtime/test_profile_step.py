"""What ``hap profile`` runs whole graphs on is like what they are trained on, and so is when it runs them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hap.capture import capture
from hap.codegen.lowering import lower
from hap.rules.choices import choices
from hap.runtime import profile_step
from hap.runtime.collectives import Communicator
from hap.runtime.profile_ops import Clock, time_calls
from hap.runtime.profile_step import CUTS, REST_S, STEPS, one_device_plan, random_source, time_graph, time_share
from hap.runtime.step import Step


class Attending(nn.Module):
    """Residual layers of attention, as wide as makes entries of size one too large."""

    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = layer(nn.functional.layer_norm(x, x.shape[-1:])).chunk(3, -1)
            x = x + torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v
        return x.sum()


def denormal() -> float:
    """The fraction of what the backward pass reads."""
    graph = capture(Attending(), torch.ones(2, 64, 128))
    program = lower(graph, one_device_plan(graph))
    device = torch.device("cpu")
    torch.manual_seed(0)
    sources = {s.name: random_source(graph, program, s, device) for s in program.forward_sources}
    loss, _, saved = Step(program, Communicator(None, device)).forward(sources)
    assert torch.isfinite(loss)
    values = torch.cat([t.flatten() for t in saved.values() if t.is_floating_point()])
    return float(((values != 0) & (values.abs() < torch.finfo(torch.float32).tiny)).float().mean())


def test_whole_graphs_are_timed_without_denormal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert denormal() == 0
    monkeypatch.setattr(profile_step, "INITIAL", 1.0)
    assert denormal() > 0.001  # what the smaller parameters are for


def test_before_each_run_of_a_step_ranks_rest_and_before_pieces_of_a_share_as_long_together() -> None:
    graph = capture(nn.Linear(8, 8), torch.ones(4, 8), loss_fn=lambda out: out.sum())
    clock, rests = Clock(torch.device("cpu")), list[float]()
    strategies = choices(graph).strategies
    timings = list(time_calls(graph, strategies, clock))
    calls = {t.call: t.seconds for t in timings if t.share == 1.0}
    time_graph(graph, calls, clock, {"sgd": lambda held: torch.optim.SGD(held)}, rests.append)
    assert rests == [REST_S] * 2 * STEPS  # forward and backward, and the update
    rests.clear()
    time_share(graph, strategies, timings, clock, rests.append)
    assert rests == [REST_S, *[REST_S / CUTS] * CUTS] * STEPS


def test_only_cpu_ranks_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[object]()
    monkeypatch.setattr(profile_step.time, "sleep", done.append)
    monkeypatch.setattr(profile_step.dist, "barrier", lambda: done.append("together"))
    profile_step.rested(torch.device("cpu"), 0.25)
    profile_step.rested(torch.device("cuda"), 0.25)
    assert done == [0.25, "together", "together"]
