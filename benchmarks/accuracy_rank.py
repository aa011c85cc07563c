"""What a rank of the testbed runs for ``benchmarks/accuracy.py``: the calibration, and the plans to be measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

import hap
from benchmarks.accuracy_cases import cluster, find
from benchmarks.testbed.pace import Deadline, own_slowdown
from hap.build import BuiltModel
from hap.capture import capture
from hap.plan import Plan
from hap.rules.choices import choices
from hap.runtime.collectives import Communicator
from hap.runtime.profile import make_optimizer, measure

RECORDED = 6  # steps whose sections are recorded, unstretched
WARM = 2
PLAIN = ("sink", "bucket", "prefetch", "overlap")  # as the plan is written: nothing is moved, joined or hidden


class Run(NamedTuple):
    """One plan on one rank: seconds of each step; by how much deadlines were missed; of each step when the wire was
    entered and left (``perf_counter``, which the ranks of one machine share)."""

    steps: tuple[float, ...]
    late_s: float
    ends: tuple[tuple[tuple[float, float], ...], ...]


class Watched(Deadline):
    """A deadline that notes when the wire is entered and left."""

    def __init__(self, slowdown: float) -> None:
        self.ends: list[list[float]] = []
        super().__init__(slowdown)

    def settle(self) -> None:
        super().settle()
        self.ends.append([time.perf_counter()])

    def resume(self) -> None:
        super().resume()
        if self.ends:
            self.ends[-1].append(time.perf_counter())


def calibrate(rank: int, name: str, models: Sequence[str]) -> str:
    """The profile's JSON, measured with this bed's emulation on."""
    torch.set_num_threads(1)
    comm = Communicator(dist.group.WORLD)
    graphs = []
    for model in models:
        graph = capture_built(find(model))
        graphs.append((graph, choices(graph).strategies))
    said = ("testbed, deadline mode: compute is CPU time x slow-down",)
    return measure(
        cluster(name), comm, graphs, optimizers=("adamw",), slowdown=own_slowdown(), conditions=said
    ).model_dump_json()


def capture_built(built: BuiltModel) -> hap.graph.Graph:
    return capture(built.model, built.example_inputs, loss_fn=built.loss_fn, example_targets=built.example_targets)


def run_plans(rank: int, plans: Sequence[tuple[str, str]], steps: int) -> list[Run]:
    """``plans``: (model, plan's JSON). Every plan is compiled, recorded and then held to its deadlines."""
    torch.set_num_threads(1)
    return [_run_plan(model, text, steps) for model, text in plans]


def _run_plan(model: str, text: str, steps: int) -> Run:
    built = find(model)
    program = hap.compile(
        built.model,
        plan=Plan.from_json(text),
        example_inputs=built.example_inputs,
        example_targets=built.example_targets,
        loss_fn=built.loss_fn,
        passes_off=PLAIN,
    )
    optimizer = make_optimizer("adamw", program.parameters())
    batch, targets = program.shard_batch(built.example_inputs, built.example_targets)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        program(batch, targets=targets).backward()
        optimizer.step()

    for _ in range(WARM):
        step()
    pace = Watched(own_slowdown())
    program.set_pace(pace)
    for _ in range(RECORDED):
        with pace.step():
            step()
    pace.hold()
    seconds, ends = [], []
    for _ in range(steps + 1):
        pace.ends.clear()
        start = time.perf_counter()
        with pace.step():
            step()
        seconds.append(time.perf_counter() - start)
        ends.append(tuple((entered, left) for entered, left in pace.ends[:-1]))  # the last is the end of the step
    program.set_pace(None)
    dist.barrier()
    return Run(tuple(seconds[1:]), pace.late_s, tuple(ends[1:]))
