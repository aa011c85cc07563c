"""What a rank runs for ``benchmarks/testbed_quota.py``: a case's plans, compiled unheld, then in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist

import hap
from benchmarks.race_models import build
from benchmarks.testbed import cgroup
from benchmarks.testbed.pace import Deadline, deadline
from hap.cluster import ClusterSpec
from hap.plan import Plan

RATE = 1e-3
WARM = 3
RECORDED = 10  # steps whose sections are recorded, unstretched
BLOCK = 2  # counted steps of a plan in a round, after one that is not
EXCHANGES = 40
SETTLE_S = 1e-3  # after a barrier, until the processes that it woke are at rest again


class Turns(NamedTuple):
    """One plan on one rank. ``late``: of its sections, by deadline; ``held_s`` by the kernel in the ``ran_s`` seconds
    of its blocks, by quota; ``losses`` of the whole batch in the first steps."""

    steps_s: tuple[float, ...]
    late: float
    held_s: float
    ran_s: float
    losses: tuple[float, ...]


def exchange_s(rank: int) -> float:
    """Seconds of the smallest exchange among all ranks of the bed (each sends to each, median of the slowest ranks'),
    the same on every rank: what the planner is told as the links' latency."""
    others = [r for r in range(dist.get_world_size()) if r != rank]
    gift, seen = torch.ones(1), [torch.empty(1) for _ in others]
    times = []
    for _ in range(EXCHANGES):
        dist.barrier()
        time.sleep(SETTLE_S)
        start = time.perf_counter()
        calls = [dist.P2POp(dist.irecv, into, r) for into, r in zip(seen, others, strict=True)]
        for work in dist.batch_isend_irecv(calls + [dist.P2POp(dist.isend, gift, r) for r in others]):
            work.wait()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times[EXCHANGES // 4 :], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.median())


class Runner:
    """A compiled plan with its optimizer and share of the batch. Collective."""

    def __init__(self, model: str, plan: str, cluster: ClusterSpec) -> None:
        built = build(model)
        self.program = hap.compile(
            built.model,
            cluster,
            plan=Plan.from_json(plan),
            example_inputs=built.example_inputs,
            example_targets=built.example_targets,
            loss_fn=built.loss_fn,
        )
        self.optimizer = torch.optim.AdamW(self.program.parameters(), lr=RATE)
        self.batch, self.targets = self.program.shard_batch(built.example_inputs, built.example_targets)
        self.pace: Deadline | None = None

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.program(self.batch, targets=self.targets)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def record(self) -> None:
        """Hold its sections to the least CPU time of each."""
        self.pace = deadline()
        self.program.set_pace(self.pace)
        for _ in range(RECORDED):
            with self.pace.step():
                self.step()
        self.pace.hold()

    def timed(self) -> float:
        """Seconds of a step."""
        start = time.perf_counter()
        with self.pace.step() if self.pace is not None else nullcontext():
            self.step()
        return time.perf_counter() - start


def take_turns(
    rank: int,
    model: str,
    plans: Sequence[tuple[str, str]],
    cluster: str,
    rounds: int,
    quota: tuple[cgroup.Controller, str] | None,
) -> dict[str, Turns]:
    """By plan's name; ``plans`` are (name, JSON). ``quota``: (controller, bed) where the kernel holds ranks; without
    it they pace themselves."""
    torch.set_num_threads(1)
    spec = ClusterSpec.from_yaml(cluster)
    with nullcontext() if quota is None else cgroup.released(*quota, rank):
        runners = {name: Runner(model, plan, spec) for name, plan in plans}
        losses = {name: tuple(runner.step() for _ in range(WARM)) for name, runner in runners.items()}
        dist.barrier()
    for runner in runners.values() if quota is None else ():
        runner.record()
    gc.disable()
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    held, ran = dict.fromkeys(runners, 0.0), dict.fromkeys(runners, 0.0)
    for _ in range(rounds):
        for name, runner in runners.items():
            dist.barrier()
            before = 0.0 if quota is None else cgroup.throttled_s(*quota, rank)
            found = [runner.timed() for _ in range(BLOCK + 1)]
            held[name] += 0.0 if quota is None else cgroup.throttled_s(*quota, rank) - before
            ran[name] += sum(found)
            seconds[name] += found[1:]
        gc.collect()
    paces = {name: runner.pace for name, runner in runners.items()}
    return {
        name: Turns(
            tuple(seconds[name]),
            0.0 if (pace := paces[name]) is None else pace.missed / max(1, pace.sections),
            held[name],
            ran[name],
            losses[name],
        )
        for name in runners
    }
