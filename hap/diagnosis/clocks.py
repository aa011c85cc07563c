"""One clock for all ranks: their hosts' clocks, as far as the collectives bear them out.

No rank leaves a sum over all ranks before every rank has entered it. So of clocks that are apart by ``o[r]`` (what is
added to rank r's to get rank 0's) each such call says

    entered[0] - left[r]  <=  o[r]  <=  left[0] - entered[r]

and many calls leave little between the two ends: hosts' clocks that say something else are off. On one host there is
one clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hap.diagnosis.run import Run
from hap.run_record import OTHER, StepLine


class Offset(NamedTuple):
    """Seconds to add to a rank's clock, and how far that may be off; ``residual_s`` is None where no call told, and
    nothing is known of the hosts' clocks."""

    seconds: float
    residual_s: float | None


def offsets(run: Run, rows: Sequence[int]) -> tuple[Offset, ...]:
    """By rank, from the steps of those rows."""
    own = run.ranks[0].head
    found = [Offset(0.0, 0.0)]
    for rank in range(1, run.world_size):
        head = run.ranks[rank].head
        by_hosts = head.began - own.began
        if head.host == own.host:
            found.append(Offset(by_hosts, 0.0))
            continue
        bounds = [_bounds(run, run.steps[row][0], run.steps[row][rank]) for row in rows]
        lows = [low for step in bounds for low, _ in step]
        highs = [high for step in bounds for _, high in step]
        if lows:
            low, high = max(lows), min(highs)
            found.append(Offset(min(max(by_hosts, low), high), abs(high - low) / 2))
        else:
            found.append(Offset(by_hosts, None))
    return tuple(found)


def _bounds(run: Run, first: StepLine, other: StepLine) -> list[tuple[float, float]]:
    """(least, most) that each sum of the step allows."""
    found = []
    for mine, theirs in zip(first.calls or (), other.calls or (), strict=False):
        is_sum = mine[0] == OTHER or run.ranks[0].kinds[mine[0]].kind == "all_reduce"
        if is_sum and min(len(mine), len(theirs)) >= (6 if mine[1] else 4):
            left = 5 if mine[1] else 3
            entered_0, left_0 = first.at_s + mine[2] / 1e6, first.at_s + mine[left] / 1e6
            entered_r, left_r = other.at_s + theirs[2] / 1e6, other.at_s + theirs[left] / 1e6
            found.append((entered_0 - left_r, left_0 - entered_r))
    return found
