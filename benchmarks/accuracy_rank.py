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
from hap.runtime.emulate import Core
from hap.runtime.profile import make_optimizer, measure

RECORDED = 5  # steps of a round whose sections are recorded, unstretched
RECORDINGS = 3  # rounds, between which the other plans run
WARM = 2
BLOCK = 3  # steps of one plan in a round
PLAIN = ("hoist", "sink", "bucket", "prefetch", "overlap")  # as the plan is written: nothing is moved, joined or hidden


class Run(NamedTuple):
    """One plan on one rank: when each step began, which is when the one before ended, and ended; by how much deadlines
    were missed; of each step when the wire was entered and left. All by ``perf_counter``, which the ranks of one
    machine share."""

    begun: tuple[float, ...]
    ended: tuple[float, ...]
    late_s: float
    ends: tuple[tuple[tuple[float, float], ...], ...]


class Watched(Deadline):
    """A deadline that notes when the wire is entered and left."""

    def __init__(self, slowdown: float, core: Core) -> None:
        self.ends: list[list[float]] = []
        super().__init__(slowdown, core=core)

    def settle(self) -> None:
        super().settle()
        self.ends.append([time.perf_counter()])

    def resume(self) -> None:
        super().resume()
        if self.ends:
            self.ends[-1].append(self.resumed_s)


def calibrate(rank: int, name: str, models: Sequence[str], standard_s: float) -> str:
    """The profile's JSON, measured with this bed's emulation on. ``standard_s`` is ``Core``'s."""
    torch.set_num_threads(1)
    comm = Communicator(dist.group.WORLD)
    graphs = []
    for model in models:
        graph = capture_built(find(model))
        graphs.append((graph, choices(graph).strategies))
    said = ("testbed, deadline mode: compute is CPU time on a core of full speed x slow-down",)
    found = measure(
        cluster(name),
        comm,
        graphs,
        optimizers=("adamw",),
        slowdown=own_slowdown(),
        core=Core(standard_s),
        conditions=said,
    )
    return found.model_dump_json()


def capture_built(built: BuiltModel) -> hap.graph.Graph:
    return capture(built.model, built.example_inputs, loss_fn=built.loss_fn, example_targets=built.example_targets)


class Contender:
    """One plan on this rank, compiled and warm."""

    def __init__(self, model: str, text: str, core: Core) -> None:
        built = find(model)
        self.program = hap.compile(
            built.model,
            plan=Plan.from_json(text),
            example_inputs=built.example_inputs,
            example_targets=built.example_targets,
            loss_fn=built.loss_fn,
            passes_off=PLAIN,
        )
        self.optimizer = make_optimizer("adamw", self.program.parameters())
        self.batch, self.targets = self.program.shard_batch(built.example_inputs, built.example_targets)
        self.pace = Watched(own_slowdown(), core)
        self.begun: list[float] = []
        self.ended: list[float] = []
        self.ends: list[tuple[tuple[float, float], ...]] = []
        for _ in range(WARM):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.program(self.batch, targets=self.targets).backward()
        self.optimizer.step()

    def record(self) -> None:
        """A round of steps whose sections are recorded. The first is not: others have used the caches."""
        self.step()
        self.program.set_pace(self.pace)
        for _ in range(RECORDED):
            with self.pace.step():
                self.step()
        self.program.set_pace(None)

    def run(self, steps: int) -> None:
        """A round of steps, held to their deadlines, after one that is not counted."""
        dist.barrier()
        self.program.set_pace(self.pace)
        end = 0.0
        for counted in range(steps + 1):
            self.pace.ends.clear()
            begin = end
            with self.pace.step():
                self.step()
            end = time.perf_counter()
            if counted:
                self.begun.append(begin)
                self.ended.append(end)
                wire = self.pace.ends[:-1]  # the last is the step's end
                self.ends.append(tuple((entered, left) for entered, left in wire))
        self.program.set_pace(None)

    def found(self) -> Run:
        return Run(tuple(self.begun), tuple(self.ended), self.pace.late_s, tuple(self.ends))


def run_plans(rank: int, plans: Sequence[tuple[str, str]], rounds: int, standard_s: float) -> list[Run]:
    """``plans``: (model, plan's JSON). All are compiled, recorded by turns, and by turns held to their deadlines."""
    torch.set_num_threads(1)
    core = Core(standard_s)
    contenders = [Contender(model, text, core) for model, text in plans]
    for _ in range(RECORDINGS):
        for contender in contenders:
            contender.record()
    for contender in contenders:
        contender.pace.hold()
    for _ in range(rounds):
        for contender in contenders:
            contender.run(BLOCK)
    return [contender.found() for contender in contenders]
