"""Shares to begin from: who works in proportion to speed, who stores where gathering is cheapest, and other guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hap.search.problem import Problem
from hap.search.ratios import Shares

EVERYTHING = 0.9  # of a step's calls scale with the share at least; the rest is launches and replicated operands
TYPICAL_BYTES = 1 << 24  # of a parameter, for which links and latency are weighed


class Start(NamedTuple):
    """Shares of the groups that inputs can be sharded in, and of all others: who works, and who stores."""

    working: Shares
    storing: Shares

    @property
    def left_out(self) -> tuple[int, ...]:
        return tuple(r for r, (s, t) in enumerate(zip(*self, strict=True)) if s == 0 and t == 0)


def find_starts(problem: Problem) -> list[Start]:
    """Share vectors to begin from, most promising first."""
    devices, speed = problem.cluster.devices, 1.0 / problem.whole_s
    memory = np.array([d.memory_bytes for d in devices], dtype=np.float64)
    storing = storing_shares(problem)
    vectors = [] if storing is None else [(speed, np.array(storing))]
    for slow in sorted({round(float(s), 12) for s in speed / speed.max()})[-2::-1]:
        fast = np.where(speed / speed.max() > slow + 1e-9, speed, 0.0)
        vectors.append((fast, fast))  # who stores nothing, either, has nothing to send
    vectors += [(speed, speed), (memory, memory), (np.ones(len(devices)),) * 2]
    if len(problem.fixed) == len(problem.choices.groups):
        vectors = vectors[:1]
    starts = [Start(*(tuple((v / v.sum()).tolist()) for v in pair)) for pair in vectors]
    return list(dict.fromkeys(starts))


def storing_shares(problem: Problem) -> Sequence[float] | None:
    """Of the ranks, at which what all need takes least to gather and to sum into; None for a single rank."""
    largest = max((n.meta.nbytes for n in problem.choices.graph.sources("parameter")), default=0)
    found = problem.facts.wires.cheapest_shares(min(largest, TYPICAL_BYTES))
    return None if found is None else tuple(found.tolist())


def least_compute_s(problem: Problem, left_out: Sequence[int] = ()) -> float:
    """What all devices but those compute for, with everything dealt out by speed."""
    return float(1.0 / np.delete(1.0 / problem.whole_s, list(left_out)).sum()) * EVERYTHING


def is_hopeless(problem: Problem, start: Start, step_s: float) -> bool:
    """Even with everything dealt out, the ranks that get a share would compute for longer than ``step_s``."""
    speed = (1.0 / problem.whole_s)[np.array(start.working) > 0]
    return float(1.0 / speed.sum()) * EVERYTHING > step_s
