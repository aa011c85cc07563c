"""What a run sent, how large, and how long it was waited for: the tables of collective profiling (arXiv 2507.07117:
types and counts of operations, bytes of each, the distribution of their sizes, when they come).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hap.diagnosis.run import Run
from hap.diagnosis.waits import Meeting
from hap.report.words import quantity, table
from hap.report.words import seconds as in_words
from hap.run_record import OTHER_KIND, RecordError, StepLine

EDGES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)  # bytes: the classes of size
CLASSES = ("< 4 KiB", "< 64 KiB", "< 1 MiB", "< 16 MiB", "more")


@dataclass
class Row:
    """One kind of collective in one way, of one step, on all hosts of a mesh. ``sizes``: how many calls of each class
    of size; ``held_up_s``: the mean over ranks; ``shared_s``: what all ranks wait at once, and what those of a host do
    for calls of their own, on the host where that is longest."""

    kind: str
    decomposition: str
    calls: int = 0
    values: int = 0
    nbytes: int = 0
    held_up_s: float = 0.0
    shared_s: float = 0.0
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Traffic:
    """``step`` is the last one that was told call by call. ``under_way``: the part of it in which something was."""

    step: int
    seconds: float
    rows: tuple[Row, ...]
    under_way: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        head = ["collective", "way", "calls", "values", "bytes", *CLASSES, "held up", "all wait"]
        rows = [
            [
                row.kind,
                row.decomposition,
                str(row.calls),
                str(row.values),
                quantity(row.nbytes, "B"),
                *(str(row.sizes.get(name, "-")) for name in CLASSES),
                in_words(row.held_up_s),
                in_words(row.shared_s),
            ]
            for row in self.rows
        ]
        first = (
            f"step {self.step}: {in_words(self.seconds)}; something was under way in {self.under_way:.0%} of it "
            "(held up: the mean over ranks)"
        )
        return "\n".join([first, *table([head, *rows], right=range(2, len(head)))])


def find_traffic(run: Run) -> Traffic:
    """RecordError where no step was told call by call."""
    if not run.waits:
        raise RecordError("no step was told call by call; record with a smaller every=")
    last = max(run.waits)
    lines, waits = run.steps[last], run.waits[last]
    rows: dict[tuple[str, str], Row] = {}
    for meeting in waits.hosts:
        for key, shared_s in _count(run, meeting, rows).items():
            rows[key].shared_s = max(rows[key].shared_s, shared_s)
    for key, shared_s in _count(run, waits.world, rows).items():
        rows[key].shared_s += shared_s
    ordered = tuple(sorted(rows.values(), key=lambda row: -row.held_up_s))
    return Traffic(lines[0].step, lines[0].seconds, ordered, _under_way(lines[0]))


def _count(run: Run, meeting: Meeting, rows: dict[tuple[str, str], Row]) -> dict[tuple[str, str], float]:
    """Add the meeting's calls to the rows, but for what its ranks waited at once, which comes back by row."""
    shared: dict[tuple[str, str], float] = {}
    seconds = zip((meeting.seconds.sum(axis=1) / run.world_size).tolist(), meeting.shared_s.tolist(), strict=True)
    for number, (held_up_s, shared_s) in zip(meeting.calls, seconds, strict=True):
        kind = run.ranks[meeting.ranks[0]].kind_of(number)
        key = (kind.kind, kind.decomposition)
        row = rows.setdefault(key, Row(*key))
        row.calls, row.held_up_s = row.calls + 1, row.held_up_s + held_up_s
        shared[key] = shared.get(key, 0.0) + shared_s
        if kind.kind != OTHER_KIND:
            row.values, row.nbytes = row.values + kind.values, row.nbytes + kind.nbytes
            name = CLASSES[int(np.searchsorted(EDGES, kind.nbytes, side="right"))]
            row.sizes[name] = row.sizes.get(name, 0) + 1
    return shared


def _under_way(line: StepLine) -> float:
    """The part of the step in which this rank had something on its way, from when it entered to when it was done."""
    spans = sorted((call[2], call[-1]) for call in line.calls or ())
    covered, until = 0, 0
    for begin, end in spans:
        covered += max(0, end - max(begin, until))
        until = max(until, end)
    return min(1.0, covered / 1e6 / line.seconds) if line.seconds else 0.0
