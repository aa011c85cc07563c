"""Jobs as records, without running any: ranks that compute for so long, come to collectives, and leave them together.

A step is a forward part with some collectives and a backward part with as many; each takes ``wire_s`` from when the
last rank has come. So everything that a diagnosis measures is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from hap.capture import capture
from hap.diagnosis.run import Run
from hap.plan import Plan
from hap.run_record import CallKind, Head, ProbeLine, RankRecord, State, StepLine
from tests._support.plans import replicated_plan

CALLS = 6  # of a step, half of them in each part
KIND = CallKind(number=1, kind="all_reduce", decomposition="ring", values=1, nbytes=1 << 20)


@cache
def _any_plan(world_size: int) -> Plan:
    model = nn.Linear(2, 2)
    return replicated_plan(capture(model, torch.ones(2, 2), loss_fn=lambda out: out.sum()), world_size)


def plan_of(compute_s: Sequence[float], step_s: float = 1.0, plan: Plan | None = None) -> Plan:
    """A plan, or this one, that predicts this."""
    plan = _any_plan(len(compute_s)) if plan is None else plan
    told = {"compute_s": tuple(compute_s), "step_s": step_s, "overlapped_s": None, "lower_bound_s": None}
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update=told)})


def records(
    compute_s: np.ndarray[Any, Any],
    outside_s: np.ndarray[Any, Any],
    wire_s: float | Sequence[float] = 0.01,
    *,
    skew_s: Sequence[float] | None = None,
    hosts: Sequence[str] | None = None,
) -> tuple[RankRecord, ...]:
    """Of steps (S, N). ``wire_s``: of each call, by step if there are several; ``skew_s``: how late each rank's clock
    began, which is another one on each of the ``hosts``."""
    steps, n = compute_s.shape
    wires = [wire_s] * steps if isinstance(wire_s, float) else list(wire_s)
    skew = np.zeros(n) if skew_s is None else np.array(skew_s)
    now = np.zeros(n)  # of the one true clock
    lines: list[list[StepLine]] = [[] for _ in range(n)]
    for step in range(steps):
        began, marks, halves = now.copy(), [[] for _ in range(n)], []
        for call in range(CALLS):
            if call == CALLS // 2:
                halves.append(now.copy())
            came = now + compute_s[step] / CALLS
            now = np.full(n, came.max() + wires[step])
            for rank in range(n):
                marks[rank].append((came[rank], now[rank]))
        ended = now.copy()
        now = now + outside_s[step]
        for rank in range(n):
            told = [(1, 0, *(_micros(t - began[rank]) for t in pair)) for pair in marks[rank]]
            half, end = (_micros(t[rank] - began[rank]) for t in (halves[0], ended))
            lines[rank].append(
                StepLine(
                    step=step + 1,
                    at_s=float(began[rank] - skew[rank]),
                    seconds=float(now[rank] - began[rank]),
                    parts=(("forward", 0, half), ("backward", half, end)),
                    wire_s=float(sum(leave - come for come, leave in marks[rank])),
                    outside_wire_s=0.0,
                    calls=tuple(told),
                )
            )
    names = ["one"] * n if hosts is None else hosts
    return tuple(
        RankRecord(
            Head(rank=r, world_size=n, device=f"h{r}/gpu#0", host=names[r], pid=1, began=float(skew[r])),
            {1: KIND},
            tuple(lines[r]),
            (),
            None,
            None,
            None,
        )
        for r in range(n)
    )


def _micros(seconds: float) -> int:
    return round(1e6 * float(seconds))


def steady(
    compute_s: Sequence[float], outside_s: Sequence[float] | float = 0.02, steps: int = 30, noise: float = 0.01
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(compute, outside) of steps that scatter a little, always in the same way."""
    source = np.random.default_rng(0)
    outside = np.broadcast_to(np.array(outside_s, dtype=np.float64), (len(compute_s),))
    shape = (steps, len(compute_s))
    return (
        np.array(compute_s) * source.normal(1, noise, shape),
        outside * source.normal(1, noise, shape),
    )


def job(
    compute_s: np.ndarray[Any, Any],
    outside_s: np.ndarray[Any, Any],
    wire_s: float | Sequence[float] = 0.01,
    plan: Plan | None = None,
    devices: Sequence[str] | None = None,
) -> Run:
    ranks = records(compute_s, outside_s, wire_s)
    names = [r.head.device for r in ranks] if devices is None else devices
    named = (r._replace(head=r.head.model_copy(update={"device": n})) for r, n in zip(ranks, names, strict=True))
    return Run(tuple(named), plan)


def with_states(
    run: Run, states: Sequence[State | None], errors: Sequence[str | None] = (), seen: float | None = None
) -> Run:
    """The same job, its ranks last seen so, at this time of their clock; None: on another machine, or in a copy."""
    said = [*errors, *[None] * (len(states) - len(errors))]
    ranks = tuple(r._replace(state=s, error=e, seen=seen) for r, s, e in zip(run.ranks, states, said, strict=True))
    return Run(ranks, run.plan)


def with_probes(run: Run, *matrices: np.ndarray[Any, Any], nbytes: int = 1 << 20) -> Run:
    """The same job with links timed so: seconds (N, N) from source to target, after steps 0, 10, 20, ..."""

    def lines(rank: int) -> tuple[ProbeLine, ...]:
        columns = [tuple(None if s == rank else float(m[s, rank]) for s in range(len(m))) for m in matrices]
        return tuple(ProbeLine(step=10 * i, nbytes=nbytes, seconds=c) for i, c in enumerate(columns))

    return Run(tuple(r._replace(probes=lines(rank)) for rank, r in enumerate(run.ranks)), run.plan)
