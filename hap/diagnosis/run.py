"""The records of all ranks beside each other: a row for every step that all of them took, a column for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from hap.diagnosis.expected import Expected
from hap.diagnosis.waits import Waits, find_waits
from hap.errors import PlanError
from hap.fabric import Array
from hap.mesh_plan import MeshPlan, load_plan
from hap.plan import Plan
from hap.run_record import OTHER_KIND, PLAN, ProbeLine, RankRecord, RecordError, StepLine, read_folder

WARM_UP = 3  # steps that are left out where there are at least three times as many


@dataclass(frozen=True, eq=False)
class Run:
    """``plan`` is None where none was found: then nothing is compared with a prediction."""

    ranks: tuple[RankRecord, ...]
    plan: Plan | MeshPlan | None

    @cached_property
    def expected(self) -> Expected | None:
        """What the plan says of such a run. PlanError if the plan describes a cluster of other devices."""
        return None if self.plan is None else Expected.of(self.plan)

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that run one program: all of them, or on a mesh of two axes those of each host."""
        numbers = sorted({record.head.mesh_host for record in self.ranks})
        of_each = (tuple(r for r, record in enumerate(self.ranks) if record.head.mesh_host == n) for n in numbers)
        return tuple(of_each)

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
            if (made := find_waits(self.ranks, lines, self.hosts)) is not None:
                found[row] = made
        return found

    @cached_property
    def shared_s(self) -> dict[int, float]:
        """Row of a step -> how long all ranks waited at once, call by call: for the wire, whoever came late. On a mesh
        of two axes with the ranks of the host that did so longest for what is its own (``Waits.shared_s``)."""
        return {row: found.shared_s for row, found in self.waits.items()}

    def call_name(self, rank: int, number: int) -> str:
        """In words, of a kind of call of a rank."""
        kind = self.ranks[rank].kind_of(number)
        if kind.kind == OTHER_KIND:
            return "a small exchange beside the program's collectives"
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


def load_run(folder: Path, plan: Path | None = None) -> Run:
    """The records, beside the plan in their folder or another one. RecordError or PlanError, one line."""
    ranks = read_folder(folder)
    path = folder / PLAN if plan is None else plan
    run = Run(ranks, load_plan(path) if plan is not None or path.is_file() else None)
    if run.plan is not None and run.plan.world_size != len(ranks):
        raise PlanError(f"{path}: a plan for {run.plan.world_size} ranks, and the records are of {len(ranks)}")
    recorded = tuple(map(len, run.hosts))
    if run.expected is not None and run.expected.hosts != recorded:
        raise PlanError(f"{path}: a plan for hosts of {run.expected.hosts} ranks, and the records are of {recorded}")
    return run
