"""How seconds of a call are read, and which calls are timed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from hap.capture import capture
from hap.cost_models.profile import ProfileError
from hap.graph import Value
from hap.rules.choices import choices
from hap.runtime import profile_ops
from hap.runtime.emulate import Core
from hap.runtime.profile_ops import Clock, distinct_calls, local_call, local_sizes, memory_layouts

EMULATED = Clock(torch.device("cpu"), slowdown=2.0)


class Ticks:
    """Stands in for ``time``: successive readings of the thread's CPU time."""

    def __init__(self, *readings: float) -> None:
        self.readings = itertools.cycle(readings)

    def thread_time(self) -> float:
        return next(self.readings)


def test_an_emulated_clock_takes_the_least_sample_times_the_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of 3, 1 and 2 s: the least is 1, times 2; the median is 2, and the median distance from it 1."""
    monkeypatch.setattr(profile_ops, "time", Ticks(0.0, 3.0, 3.0, 4.0, 4.0, 6.0))
    assert EMULATED.seconds(lambda: None) == pytest.approx((2.0, 0.5))


def test_on_a_core_of_known_speed_it_takes_the_median_in_seconds_of_full_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of 3, 1 and 2 s at half the speed: the median is 1 s of full speed, times 2."""

    class Half(Core):
        def factor(self) -> float:
            return 0.5

    monkeypatch.setattr(profile_ops, "time", Ticks(0.0, 3.0, 3.0, 4.0, 4.0, 6.0))
    clock = Clock(torch.device("cpu"), slowdown=2.0, core=Half(1.0))
    assert clock.seconds(lambda: None) == pytest.approx((2.0, 0.5))


def test_a_sample_in_which_the_clock_stood_still_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_ops, "time", Ticks(5.0, 5.0, 5.0, 7.0))
    assert EMULATED.sample(lambda: None) == 2.0


def test_a_clock_that_goes_on_standing_still_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_ops, "time", Ticks(5.0))
    with pytest.raises(ProfileError, match="stands still"):
        EMULATED.seconds(lambda: None)


class Systems(nn.Module):
    """What draws, what looks things up, and what has pivots, which count from one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.linear(x) + torch.eye(3)
        solved = torch.linalg.solve_ex(a, torch.randn_like(x))[0]
        chosen = torch.multinomial(a[:, 0].softmax(1), 1)
        return torch.linalg.det(a).sum() + solved.sum() + a[:, 0].gather(1, chosen).sum()


def test_statistics_of_a_norm_are_wider_on_a_gpu() -> None:
    """Kernels for CPUs keep bfloat16 there, CUDA's float32, and its backward kernels take nothing else."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(torch.bfloat16), torch.zeros(2, 4).bfloat16()
    graph = capture(model, x, loss_fn=torch.sum)
    (norm,) = (node for node in graph.nodes if node.op == "aten.native_layer_norm.default")
    layouts = memory_layouts(graph)
    dtypes = [(meta.dtype, layouts[Value(norm.name, i)].on_gpu) for i, meta in enumerate(norm.outputs) if meta]
    assert dtypes[0] == (torch.bfloat16, torch.bfloat16)
    assert dtypes[1:] == [(torch.bfloat16, torch.float32)] * 2
    statistics = layouts[Value(norm.name, 1)]
    assert statistics.make((2, 1), torch.bfloat16, torch.device("cpu")).dtype == torch.bfloat16


def test_every_call_of_a_graph_can_be_timed() -> None:
    graph = capture(Systems(), torch.zeros(8, 3, 3))
    layouts, calls = memory_layouts(graph), distinct_calls(graph, choices(graph).strategies)
    assert {"aten.linalg_lu_solve.default", "hap.randn.default"} <= {node.op for node, _, _ in calls.values()}
    for node, strategy, parts in calls.values():
        for _, sizes in local_sizes(parts, (1 / 4, 1.0)):
            local_call(graph, node, strategy, sizes, layouts, torch.device("cpu"))()
