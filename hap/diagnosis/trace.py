"""Measured steps as a trace that Perfetto and chrome://tracing open: one process per rank, on one clock.

Threads: the program's parts, what held the rank up, and what was moved beside it. Format: the Trace Event Format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hap.diagnosis.clocks import Offset, offsets
from hap.diagnosis.run import Run
from hap.run_record import IN_ROUNDS, RecordError, StepLine

STEPS = 3  # the last ones
_THREADS = ("program", "waits", "moves beside it")


def to_trace(run: Run) -> str:
    """The last steps that were told call by call, as JSON text. RecordError if there are none."""
    rows = sorted(run.waits)[-STEPS:]
    if not rows:
        raise RecordError("no step was told call by call; record with a smaller every=")
    clocks = offsets(run, rows)
    first = min(run.steps[rows[0]][rank].at_s + clock.seconds for rank, clock in enumerate(clocks))
    events = [event for rank in range(run.world_size) for event in _names(run, rank, clocks[rank])]
    for row in rows:
        for rank, line in enumerate(run.steps[row]):
            events += _step(run, rank, line, line.at_s + clocks[rank].seconds - first)
    told = {"clocks_apart_s": [clock.seconds for clock in clocks], "residual_s": [c.residual_s for c in clocks]}
    return json.dumps({"displayTimeUnit": "ms", "otherData": told, "traceEvents": events}, indent=1) + "\n"


def _names(run: Run, rank: int, clock: Offset) -> Iterator[dict[str, Any]]:
    off = "by the hosts' clocks" if clock.residual_s is None else f"within {1e6 * clock.residual_s:.0f} us"
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"{run.name(rank)}, {off}"}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for number, thread in enumerate(_THREADS):
        yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": thread}}


def _step(run: Run, rank: int, line: StepLine, at_s: float) -> Iterator[dict[str, Any]]:
    def event(thread: int, name: str, begin: int, end: int) -> dict[str, Any]:
        args = {"step": line.step}
        ts = round(1e6 * at_s + begin, 1)
        return {"ph": "X", "pid": rank, "tid": thread, "name": name, "ts": ts, "dur": end - begin, "args": args}

    for part, begin, end in line.parts:
        yield event(0, part, begin, end)
    for call in line.calls or ():
        name, marks = run.call_name(rank, call[0]), call[2:]
        if not call[1] or run.ranks[rank].kind_of(call[0]).decomposition == IN_ROUNDS:
            yield event(1, name, marks[0], marks[1])
        if len(marks) >= 4:
            yield event(1, f"waits for {name}", marks[2], marks[3])
        if len(marks) == 6:
            yield event(2, name, marks[4], marks[5])
