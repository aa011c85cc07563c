"""What a run measured, to be put beside the prediction: a folder with ``steps.csv`` of ``step,seconds``, or with the
records that ``hap diagnose`` reads. A step is one of the optimizer, of however many batches.

log = StepLog("runs/1")                 # on rank 0
for step, batch in enumerate(loader):
    with log.step(step):
        ...
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hap.errors import HapError
from hap.mesh_plan import MeshPlan, load_plan
from hap.plan import Plan
from hap.run_record import PLAN, rank_file, read_folder

HEADER = ["step", "seconds"]
WARM_UP = 3  # steps that are left out where there are at least three times as many


@dataclass(frozen=True)
class Measured:
    """Steps in order of time, all of them and those that count (without the warm-up). ``other_plan``: the checksum of
    the plan that was run, where it is another one."""

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    other_plan: str | None = None

    @property
    def counted(self) -> tuple[float, ...]:
        return self.seconds[WARM_UP:] if len(self.seconds) >= 3 * WARM_UP else self.seconds

    @property
    def median_s(self) -> float:
        return float(np.median(self.counted))

    @property
    def spread_s(self) -> tuple[float, float]:
        """Between these lie 80% of the steps."""
        low, high = np.percentile(self.counted, (10, 90))
        return float(low), float(high)


class StepLog:
    """Writes ``steps.csv`` line by line, so that a run that is cut short leaves what it did."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.path = Path(folder) / "steps.csv"
        self.path.write_text(",".join(HEADER) + "\n", encoding="utf-8")

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Time the body as one step. CUDA work counts once the body has waited for it (reading the loss does)."""
        start = time.perf_counter()
        yield
        self.add(number, time.perf_counter() - start)

    def add(self, number: int, seconds: float) -> None:
        """A step that was timed already."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{number},{seconds:.6g}\n")


def load_run(folder: Path, plan: Plan | MeshPlan) -> Measured:
    """A run of ``plan``. HapError, one line, where there is no readable ``steps.csv`` with at least one step, nor
    records, or where they are of another number of ranks than the plan is for."""
    other, run, path = None, folder / PLAN, folder / "steps.csv"
    has_records = rank_file(folder, 0, "jsonl").exists()
    if run.is_file() and has_records:  # else whoever wrote the steps may have put anything there
        recorded = load_plan(run)
        _check_ranks(folder, plan, recorded.world_size)
        other = None if recorded.checksum == plan.checksum else recorded.checksum
    if not path.exists() and has_records:
        return replace(_recorded(folder, plan), other_plan=other)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first, *rows = [row for row in csv.reader(file) if row] or [[]]
        if first != HEADER:
            raise ValueError(f"its first line is not {','.join(HEADER)}")
        steps = tuple(int(row[0]) for row in rows)
        seconds = tuple(float(row[1]) for row in rows)
    except (OSError, ValueError, IndexError, csv.Error) as e:
        raise HapError(f"{path}: cannot read measured steps ({' '.join(str(e).split())})") from None
    if not seconds or not all(0 < s < float("inf") for s in seconds):
        raise HapError(f"{path}: no steps, or times that are not more than zero")
    return Measured(steps, seconds, other)


def _check_ranks(folder: Path, plan: Plan | MeshPlan, ranks: int) -> None:
    if ranks != plan.world_size:
        raise HapError(f"{folder}: a run of {ranks} ranks, and the plan is for {plan.world_size}")


def _recorded(folder: Path, plan: Plan | MeshPlan) -> Measured:
    """Training steps as rank 0 saw them, but for the last batch, after which nothing came. Records tell of batches: a
    step has so many of them as the plan says."""
    ranks, batches = read_folder(folder), plan.gradient_accumulation_steps
    _check_ranks(folder, plan, len(ranks))
    lines = [line for line in ranks[0].steps if line.trains][:-1]
    steps = [lines[i : i + batches] for i in range(0, len(lines) - batches + 1, batches)]
    if not steps:
        raise HapError(f"{folder}: the records have no whole step")
    return Measured(tuple(s[0].step // batches for s in steps), tuple(sum(line.seconds for line in s) for s in steps))
