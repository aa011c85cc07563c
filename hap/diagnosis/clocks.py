"""One clock for all ranks: their hosts' clocks, as far as the collectives bear them out.

No rank leaves a sum over all ranks before every rank has entered it. So of clocks that are apart by ``o[r]`` (what is
added to rank r's to get rank 0's) each such call says

    entered[0] - left[r]  <=  o[r]  <=  left[0] - entered[r]

and many calls leave little between the two ends: hosts' clocks that say something else are off. On one host there is
one clock. Uses of the wire that are no collective of the program are left out: a sum, as in clipping, would do, but a
broadcast or a rank's own wait would not, and records do not tell which it was.

Between hosts of a mesh of two axes there are sums over hosts instead. What a rank gets of one it cannot have before
some rank of every host has entered it, and of every host some rank gets something. So there the same is said of two
hosts ``A``, which has rank 0, and ``B``, each with one clock for its ranks:

    min over A of entered - max over B of left  <=  o[B]  <=  max over A of left - min over B of entered
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hap.diagnosis.run import Run
from hap.diagnosis.waits import calls_of
from hap.run_record import SUM_KIND, StepLine


class Offset(NamedTuple):
    """Seconds to add to a rank's clock, and how far that may be off; ``residual_s`` is None where no call told, and
    nothing is known of the hosts' clocks."""

    seconds: float
    residual_s: float | None


def offsets(run: Run, rows: Sequence[int]) -> tuple[Offset, ...]:
    """By rank, from the steps of those rows."""
    own, found = run.ranks[0].head, []
    for rank, record in enumerate(run.ranks):
        by_hosts = record.head.began - own.began
        if record.head.host == own.host:
            found.append(Offset(by_hosts, 0.0))
            continue
        bounds = [bound for row in rows for bound in _bounds(run, run.steps[row], rank)]
        if bounds:
            low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
            found.append(Offset(min(max(by_hosts, low), high), abs(high - low) / 2))
        else:
            found.append(Offset(by_hosts, None))
    return tuple(found)


def _bounds(run: Run, lines: Sequence[StepLine], rank: int) -> list[tuple[float, float]]:
    """(least, most) that each sum of the step allows. None of a host of a mesh whose ranks have several clocks."""
    own, theirs = (next(host for host in run.hosts if r in host) for r in (0, rank))
    if own == theirs:
        first, other = (_sums(run, lines, (r,), r, across=False) for r in (0, rank))
    elif all(len({run.ranks[r].head.host for r in host}) == 1 for host in (own, theirs)):
        first, other = _sums(run, lines, own, 0, across=True), _sums(run, lines, theirs, rank, across=True)
    else:
        return []
    both = [(first[number], other[number]) for number in first if number in other]
    return [(entered - left_there, left - entered_there) for (entered, left), (entered_there, left_there) in both]


def _sums(
    run: Run, lines: Sequence[StepLine], ranks: tuple[int, ...], clock: int, *, across: bool
) -> dict[int, tuple[float, float]]:
    """By number of the call, when the first of these ranks entered and the last one left it, by the clock of rank
    ``clock``: sums of all ranks of their host, or ``across`` hosts, which are numbered by themselves."""
    found = {}
    zeros = [lines[r].at_s + (run.ranks[r].head.began - run.ranks[clock].head.began) for r in ranks]
    told = [calls_of(run.ranks[r], lines[r], "world") if across else lines[r].calls or () for r in ranks]
    for number, calls in enumerate(zip(*told, strict=False)):
        kind = run.ranks[ranks[0]].kind_of(calls[0][0])
        is_sum = kind.kind == "all_reduce" or (across and kind.kind == SUM_KIND and kind.nbytes > 0)
        if is_sum and all(len(call) >= (6 if call[1] else 4) for call in calls):
            entered = min(zero + call[2] / 1e6 for zero, call in zip(zeros, calls, strict=True))
            left = max(zero + call[5 if call[1] else 3] / 1e6 for zero, call in zip(zeros, calls, strict=True))
            found[number] = entered, left
    return found
