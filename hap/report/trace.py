"""A ``Timeline`` as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per rank with two threads, compute and communication; a collective stands in every rank's communication
thread. What lies on the critical path has ``critical: true`` and a colour. Format: the Trace Event Format, complete
events ("ph": "X") with microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hap.cost_models.timeline import Span, Timeline

_THREADS = {"compute": 0, "communication": 1}


def to_trace(timeline: Timeline, name: str) -> str:
    """The trace as JSON text. ``name`` says what it is of."""
    events = [*_names(timeline), *_spans(timeline)]
    return json.dumps({"displayTimeUnit": "ms", "otherData": {"name": name}, "traceEvents": events}, indent=1) + "\n"


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, device in enumerate(timeline.devices):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}: {device}"}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for thread, number in _THREADS.items():
            yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": thread}}


def _spans(timeline: Timeline) -> Iterator[dict[str, Any]]:
    critical = {id(span) for span in timeline.critical_path}
    for span in timeline.spans:
        for rank in range(len(timeline.devices)) if span.rank is None else (span.rank,):
            yield _event(span, rank, id(span) in critical)


def _event(span: Span, rank: int, critical: bool) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X",
        "pid": rank,
        "tid": _THREADS[span.stream],
        "name": span.name if span.stream == "compute" else f"{span.kind} {span.name}",
        "cat": span.kind,
        "ts": round(span.start_s * 1e6, 3),
        "dur": round(span.seconds * 1e6, 3),
        "args": {"critical": critical},
    }
    return {**event, "cname": "terrible"} if critical else event
