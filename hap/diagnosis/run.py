"""The records of all ranks beside each other: a row for every step that all of them took, a column for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from hap.errors import PlanError
from hap.fabric import Array
from hap.plan import Plan
from hap.run_record import OTHER, PLAN, ProbeLine, RankRecord, RecordError, StepLine, read_folder

WARM_UP = 3  # steps that are left out where there are at least three times as many
Call = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Waits:
    """What ranks waited for in one step. ``seconds`` (K, N): how long each rank was held up by each of its uses of the
    wire, in order."""

    seconds: Array

    @property
    def shared_s(self) -> Array:
        """(K,): how long all ranks waited at once. What a rank waits beyond that, it waits for other ranks: the last
        one to come waits for the wire alone. Clocks of different hosts play no part."""
        least: Array = self.seconds.min(axis=1)
        return least

    @property
    def waited_for_s(self) -> Array:
        """(N,): by how much the calls would have been over earlier if this rank had come no later to them than the
        last of the others."""
        found = np.zeros(self.seconds.shape[1])
        if self.seconds.shape[1] > 1:
            ordered = np.sort(self.seconds, axis=1)
            np.add.at(found, self.seconds.argmin(axis=1), ordered[:, 1] - ordered[:, 0])
        return found


@dataclass(frozen=True, eq=False)
class Run:
    """``plan`` is None where none was found: then nothing is compared with a prediction."""

    ranks: tuple[RankRecord, ...]
    plan: Plan | None

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(record.head.device for record in self.ranks)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.devices[rank]})"

    @cached_property
    def steps(self) -> tuple[tuple[StepLine, ...], ...]:
        """Training steps that every rank told of, by step and rank; without the warm-up, and without a last one that
        nothing came after, of which nobody knows how long it took."""
        by_number = [{line.step: line for line in record.steps} for record in self.ranks]
        numbers = sorted(set.intersection(*(set(lines) for lines in by_number)))
        if any(record.state is not None and record.state.ended for record in self.ranks):
            numbers = numbers[:-1]
        found = [tuple(lines[number] for lines in by_number) for number in numbers]
        found = [row for row in found if all(line.trains for line in row)]
        return tuple(found[WARM_UP:] if len(found) >= 3 * WARM_UP else found)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        return tuple(row[0].step for row in self.steps)

    @cached_property
    def rank_s(self) -> Array:
        """(S, N): from the beginning of a step to that of the next. Ranks that wait for each other take as long."""
        return self._table([[line.seconds for line in row] for row in self.steps])

    @cached_property
    def seconds(self) -> Array:
        """(S,): of each step, on the rank that took longest."""
        longest: Array = self.rank_s.max(axis=1, initial=0.0)
        return longest

    @cached_property
    def compute_s(self) -> Array:
        """(S, N)"""
        return self._table([[line.compute_s for line in row] for row in self.steps])

    @cached_property
    def outside_s(self) -> Array:
        """(S, N)"""
        return self._table([[line.outside_s for line in row] for row in self.steps])

    def _table(self, rows: Sequence[Sequence[float]]) -> Array:
        return np.array(rows, dtype=np.float64).reshape(len(rows), self.world_size)

    @cached_property
    def waits(self) -> dict[int, Waits]:
        """Row of a step -> its waits, where all ranks told of each call."""
        found = {}
        for row, lines in enumerate(self.steps):
            if (made := self._waits(lines)) is not None:
                found[row] = made
        return found

    @cached_property
    def shared_s(self) -> dict[int, float]:
        """Row of a step -> how long all ranks waited at once, call by call: for the wire, whoever came late."""
        return {row: float(found.shared_s.sum()) for row, found in self.waits.items()}

    def _waits(self, lines: Sequence[StepLine]) -> Waits | None:
        told = [line.calls for line in lines if line.calls is not None]
        if len(told) < self.world_size:
            return None
        if len({len(calls) for calls in told}) > 1:
            raise RecordError(
                f"step {lines[0].step}: ranks have come to the wire unequally often, so it was no one step"
            )
        seconds = [[_held_up_s(call) for call in calls] for calls in told]
        return Waits(np.array(seconds).T.reshape(-1, len(told)))

    def call_name(self, rank: int, number: int) -> str:
        """In words, of a kind of call of a rank."""
        if number == OTHER:
            return "a small exchange beside the program's collectives"
        kind = self.ranks[rank].kinds[number]
        values = "" if kind.values == 1 else f"{kind.values} values, "
        return f"{kind.kind} by {kind.decomposition} ({values}{kind.nbytes / 1e3:,.0f} kB)"

    @cached_property
    def probes(self) -> tuple[tuple[int, int, Array], ...]:
        """(step, bytes, seconds (N, N) from source to target; NaN for itself) of each time that links were timed."""
        found = []
        for lines in zip(*(record.probes for record in self.ranks), strict=False):
            first: ProbeLine = lines[0]
            if any((line.step, line.nbytes) != (first.step, first.nbytes) for line in lines):
                raise RecordError(f"probe after step {first.step}: ranks tell of different ones")
            columns = [[np.nan if s is None else s for s in line.seconds] for line in lines]
            found.append((first.step, first.nbytes, np.array(columns, dtype=np.float64).T))
        return tuple(found)


def _held_up_s(call: Call) -> float:
    """Of a call as it stands in the file; what was not waited for yet held nobody up."""
    marks = call[2:]
    return (marks[1] - marks[0] + (marks[3] - marks[2] if len(marks) >= 4 else 0)) / 1e6


def load_run(folder: Path, plan: Path | None = None) -> Run:
    """The records, beside the plan in their folder or another one. RecordError or PlanError, one line."""
    ranks = read_folder(folder)
    path = folder / PLAN if plan is None else plan
    found = Plan.load(path) if plan is not None or path.is_file() else None
    if found is not None and found.world_size != len(ranks):
        raise PlanError(f"{path}: a plan for {found.world_size} ranks, and the records are of {len(ranks)}")
    return Run(ranks, found)
