"""What a rank runs in ``benchmarks/diagnose.py``: a recorded job of some steps, in which something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import hap
from benchmarks.race_models import build
from benchmarks.race_rank import RECORDED, WARM, Hap
from benchmarks.testbed.pace import deadline
from hap.cluster import ClusterSpec
from hap.codegen.layout import Layout
from hap.run_record import rank_file
from hap.runtime.collectives import Communicator
from hap.runtime.record import Recorder

STEPS = 40
AT = 20  # the step before which what goes wrong does so
PROBE_EVERY = 12  # links are timed before the steps 1, 13, 25 and 37
POLL_S = 0.05
BLOCK = 20  # steps, when it is measured what recording costs
CALLS = 100  # of a step
ONE = ClusterSpec.from_yaml("""
name: one
backend: gloo
hosts:
  - name: a
    devices: [{name: c, tflops: {float32: 1}, memory: 4GB, memory_bandwidth: 10GB/s}]
""")
REPAIRED = "repaired"  # a file in the folder of the records: what kept a rank is over
HANGS = ("never comes", "stopped", "killed", "raises", "link cut")


@dataclass(frozen=True)
class Fault:
    """``what`` goes wrong on ``rank``: *computes slowly* (``factor`` times as long), *late* (``factor`` of a step),
    *sends slowly* or *receives slowly* (the bed does it, ``factor``), or one of ``HANGS``. ``at``: before which step;
    0: before the first one."""

    what: str
    rank: int = 0
    factor: float = 1.0
    at: int = AT


def job(
    rank: int, model: str, plan: str, cluster: str, profile: str, folder: str, faults: Mapping[str, object]
) -> list[float]:
    """Seconds of each step of this rank."""
    torch.set_num_threads(1)
    fault = Fault(**faults)  # type: ignore[arg-type]
    contestant = Hap(build(model), plan, cluster, profile, ())
    for _ in range(WARM):
        contestant.step()
    pace = deadline()
    contestant.pace = pace
    for _ in range(RECORDED):
        with pace.step():
            contestant.step()
    pace.hold()
    dist.barrier()
    seconds: list[float] = []
    with contestant.program.record(folder, probe_every=PROBE_EVERY):
        for step in range(1, STEPS + 1):
            if rank == fault.rank and (step == fault.at or (step == 1 and fault.at == 0)):
                if fault.what == "computes slowly":
                    pace.slowdown *= fault.factor
                elif fault.what in HANGS:
                    _break(fault.what, Path(folder))
            if rank == fault.rank and fault.what == "late" and step >= fault.at:
                time.sleep(fault.factor * seconds[fault.at - 2])
            begun = time.perf_counter()
            with pace.step():
                contestant.step()
            seconds.append(time.perf_counter() - begun)
    return seconds


def _break(what: str, folder: Path) -> None:
    match what:
        case "never comes":
            while not (folder / REPAIRED).exists():
                time.sleep(POLL_S)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raises":
            raise ValueError("a broken sample")


def costs(rank: int, cluster: str, folder: str, blocks: int) -> list[tuple[float, float, float, float, int]]:
    """Of each block: median wall seconds of a step recorded and not, CPU seconds of this process for all steps recorded
    and not, and how often a step comes to the wire."""
    torch.set_num_threads(1)
    built = build("GPT-2")
    program = hap.compile(
        built.model,
        ClusterSpec.from_yaml(cluster),
        example_inputs=built.example_inputs,
        example_targets=built.example_targets,
        loss_fn=built.loss_fn,
    )
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-3)
    batch, targets = program.shard_batch(built.example_inputs, built.example_targets)

    def steps() -> tuple[float, float]:
        wall: list[float] = []
        dist.barrier()
        cpu = time.process_time()
        for _ in range(BLOCK):
            begun = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            program(batch, targets=targets).backward()
            optimizer.step()
            wall.append(time.perf_counter() - begun)
        return statistics.median(wall), time.process_time() - cpu

    steps()
    found = []
    for number in range(blocks):
        with program.record(f"{folder}/{number}"):
            recorded = steps()
        alone = steps()
        lines = rank_file(Path(f"{folder}/{number}"), rank, "jsonl").read_text(encoding="utf-8").splitlines()
        calls = len(json.loads(lines[-1])["step"]["calls"])
        found.append((recorded[0], alone[0], recorded[1], alone[1], calls))
    return found


def recorder_us(blocks: int) -> list[float]:
    """CPU microseconds of the recorder for each collective, a block of steps at a time."""
    built = build("GPT-2")
    plan = hap.plan(
        built.model,
        ONE,
        example_inputs=built.example_inputs,
        example_targets=built.example_targets,
        loss_fn=built.loss_fn,
        effort="quick",
    )
    values, layouts = [torch.ones(16, 8) for _ in range(3)], [(Layout(0, 1, 1, (16,)),)] * 3
    found = []
    with tempfile.TemporaryDirectory() as folder, Recorder(folder, Communicator(None), plan) as recorder:
        for _ in range(blocks):
            begun = time.process_time()
            for _ in range(BLOCK):
                with recorder.part("forward"):
                    for _ in range(CALLS):
                        entry = recorder.called("all_gather", values, layouts, "pairs", started=False)
                        recorder.leave(recorder.enter(entry))
                with recorder.part("backward"):
                    pass
            found.append(1e6 * (time.process_time() - begun) / BLOCK / CALLS)
    return found
