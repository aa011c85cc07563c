"""What a run measured, to be put beside the prediction: a folder with ``steps.csv`` of ``step,seconds``, or with the
records that ``hap diagnose`` reads.

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
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hap.errors import HapError
from hap.run_record import rank_file, read_folder

HEADER = ["step", "seconds"]
WARM_UP = 3  # steps that are left out where there are at least three times as many


@dataclass(frozen=True)
class Measured:
    """Steps in order of time, all of them and those that count (without the warm-up)."""

    steps: tuple[int, ...]
    seconds: tuple[float, ...]

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


def load_run(folder: Path) -> Measured:
    """HapError, one line, where there is no readable ``steps.csv`` with at least one step, nor records."""
    path = folder / "steps.csv"
    if not path.exists() and rank_file(folder, 0, "jsonl").exists():
        return _recorded(folder)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
        if rows[:1] != [HEADER]:
            raise ValueError(f"its first line is not {','.join(HEADER)}")
        steps = tuple(int(row[0]) for row in rows[1:])
        seconds = tuple(float(row[1]) for row in rows[1:])
    except (OSError, ValueError, IndexError, csv.Error) as e:
        raise HapError(f"{path}: cannot read measured steps ({' '.join(str(e).split())})") from None
    if not seconds or not all(0 < s < float("inf") for s in seconds):
        raise HapError(f"{path}: no steps, or times that are not more than zero")
    return Measured(steps, seconds)


def _recorded(folder: Path) -> Measured:
    """Training steps as rank 0 saw them, but for the last one, after which nothing came."""
    lines = [line for line in read_folder(folder)[0].steps if line.trains][:-1]
    if not lines:
        raise HapError(f"{folder}: the records have no whole step")
    return Measured(tuple(line.step for line in lines), tuple(line.seconds for line in lines))
