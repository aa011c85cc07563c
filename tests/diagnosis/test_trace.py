"""One clock for all ranks, the trace on it, and the tables of what was sent."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hap.diagnosis.clocks import offsets
from hap.diagnosis.run import Run
from hap.diagnosis.trace import STEPS, to_trace
from hap.diagnosis.traffic import find_traffic
from hap.run_record import OTHER, RecordError
from tests._support.jobs import CALLS, KIND, job, records

SKEW = (0.0, 3.5, -0.25)


def apart(hosts: tuple[str, ...]) -> Run:
    """Ranks whose clocks began at other times; those of other hosts say so wrongly."""
    compute = np.array([np.roll([0.1, 0.3, 0.2], step) for step in range(6)])  # each is late to some
    ranks = records(compute, np.full((6, 3), 0.02), 0.01, skew_s=SKEW, hosts=hosts)
    wrong = tuple(
        r._replace(head=r.head.model_copy(update={"began": 0.0})) if host != hosts[0] else r
        for r, host in zip(ranks, hosts, strict=True)
    )
    return Run(wrong, None)


def test_collectives_tell_clocks_of_other_hosts() -> None:
    found = offsets(apart(("a", "b", "c")), range(6))
    assert found[0] == (0.0, 0.0)
    for rank in (1, 2):
        assert found[rank].residual_s is not None and found[rank].residual_s <= 0.011
        assert found[rank].seconds == pytest.approx(SKEW[rank], abs=found[rank].residual_s + 1e-4)


def test_what_is_no_collective_tells_no_clocks() -> None:
    """A broadcast, which rank 0 leaves at once and long before others enter it."""
    run, told = apart(("a", "b", "c")), []
    for rank, record in enumerate(run.ranks):
        steps = []
        for line in record.steps:
            first, *others = line.calls or ()
            at = first[2] if rank else 0
            steps.append(line.model_copy(update={"calls": ((OTHER, 0, at, at + 10), *others)}))
        told.append(record._replace(steps=tuple(steps)))
    for rank, clock in enumerate(offsets(Run(tuple(told), None), range(6))):
        assert clock.residual_s is not None and clock.residual_s <= 0.02
        assert clock.seconds == pytest.approx(SKEW[rank], abs=clock.residual_s + 1e-4)


def test_ranks_of_one_host_have_one_clock() -> None:
    assert offsets(apart(("a", "a", "a")), range(6)) == tuple((s, 0.0) for s in SKEW)


def spans(text: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]


def test_the_trace_has_all_ranks_on_one_clock() -> None:
    run = apart(("a", "a", "a"))
    found = spans(to_trace(run))
    waits = [e for e in found if e["tid"] == 1]
    assert len(waits) == STEPS * CALLS * 3
    for number in range(STEPS * CALLS):  # a sum ends on all ranks at once
        ends = [[e for e in waits if e["pid"] == rank][number] for rank in range(3)]
        assert max(e["ts"] + e["dur"] for e in ends) - min(e["ts"] + e["dur"] for e in ends) < 5
    parts = [e for e in found if e["tid"] == 0]
    assert {e["name"] for e in parts} == {"forward", "backward"} and len(parts) == STEPS * 2 * 3


def test_traffic_counts_what_one_step_sent() -> None:
    found = find_traffic(job(np.full((4, 2), 0.06), np.full((4, 2), 0.04), 0.01))
    (row,) = found.rows
    assert (row.kind, row.decomposition, row.calls, row.nbytes) == ("all_reduce", "ring", CALLS, CALLS * KIND.nbytes)
    assert dict(row.sizes) == {"< 16 MiB": CALLS}  # a MiB each
    assert row.shared_s == pytest.approx(CALLS * 0.01, rel=1e-3) == pytest.approx(row.held_up_s, rel=1e-3)
    assert found.under_way == pytest.approx(CALLS * 0.01 / 0.16, rel=1e-3)
    assert "all_reduce" in str(found) and "37% of it" in str(found)


def test_steps_told_in_short_have_no_trace() -> None:
    run = apart(("a", "a", "a"))
    short = tuple(r._replace(steps=tuple(s.model_copy(update={"calls": None}) for s in r.steps)) for r in run.ranks)
    for make in (to_trace, find_traffic):
        with pytest.raises(RecordError, match="no step was told call by call"):
            make(Run(short, None))
