"""Why steps take as long as they do: who is waited for, and what keeps that rank; what the wire itself takes.

Of each call the rank that waits least is the last one to come, and what others wait beyond it is its doing (C4D's
receiver-driven rule, for any collective, without clocks that agree). A rank that is waited for computes longer than it
should, is late between steps, or is slow on the wire; if none of these, its plan gave it the most work, and all is as
it was meant to be. *Should* is the plan's prediction, less what it is wrong by for all ranks alike, or what the rank
itself took before something changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hap.diagnosis.change import Change, find_change
from hap.diagnosis.finding import Finding
from hap.diagnosis.run import Run
from hap.fabric import Array
from hap.report.words import seconds as in_words

SLOWER = 1.25  # times as long: below it a prediction may be wrong
CHANGED = 1.15  # the same of a rank beside what itself took before
MATTERS = 0.05  # of a step
UNLIKE = 2.0  # factors that differ by so much are of two reasons


@dataclass(frozen=True, eq=False)
class Slow:
    """Medians over the steps of ``window`` (rows of the run; all since the last change for the worse). ``ratio`` (N,):
    what a rank does by itself, in the program and beside it, measured over predicted, NaN where nothing is predicted;
    ``compute_ratio`` the same of the program's part alone. What all ranks are off by is no rank's fault: ``usual`` and
    ``usual_compute`` are the lower medians. ``wire_s`` and ``waited_for_s`` are NaN if none of these steps was told
    call by call (recorded with ``every`` > 1)."""

    run: Run
    change: Change | None
    window: slice
    step_s: float
    compute_s: Array
    outside_s: Array
    wire_s: float  # that all ranks waited at once, and those of one host: for the wire alone
    waited_for_s: Array
    ratio: Array
    compute_ratio: Array

    @classmethod
    def of(cls, run: Run) -> Slow:
        change = find_change(run.seconds, CHANGED)
        worse = change if change is not None and change.factor > 1 else None
        return cls._over(run, worse, slice(0 if worse is None else worse.at, len(run.steps)))

    @property
    def before(self) -> Slow:
        """Over the steps before they became longer; the same if they did not. What was so then is not the reason."""
        return self if self.change is None else self._over(self.run, None, slice(0, self.change.at))

    @classmethod
    def _over(cls, run: Run, change: Change | None, window: slice) -> Slow:
        rows = range(window.start, window.stop)
        told = [w.waited_for_s for row, w in run.waits.items() if row in rows]
        shared = [seconds for row, seconds in run.shared_s.items() if row in rows]
        compute, outside = (np.median(table[window], axis=0) for table in (run.compute_s, run.outside_s))
        planned = None if run.expected is None else run.expected.compute_s
        predicted = np.full(run.world_size, np.nan) if planned is None else np.array(planned)
        ratios = [
            np.divide(own, predicted, out=np.full_like(own, np.nan), where=predicted > 0)
            for own in (compute + outside, compute)
        ]
        return cls(
            run,
            change,
            window,
            float(np.median(run.seconds[window])),
            compute,
            outside,
            float(np.median(shared)) if shared else np.nan,
            np.maximum(np.median(told, axis=0) if told else np.nan, _ahead(np.median(run.rank_s[window], axis=0))),
            *ratios,
        )

    @property
    def usual(self) -> float:
        return _lower_median(self.ratio)

    @property
    def usual_compute(self) -> float:
        return _lower_median(self.compute_ratio)

    @property
    def since_step(self) -> int | None:
        return None if self.change is None else self.run.numbers[self.change.at]


def _ahead(rank_s: Array) -> Array:
    """(N,): by how much the longest rank's steps are longer than the second's: where ranks hardly meet in a step, they
    wait for it elsewhere, or at the end."""
    found = np.zeros_like(rank_s)
    if len(rank_s) > 1:
        second, first = np.sort(rank_s)[-2:]
        found[rank_s.argmax()] = first - second
    return found


def _lower_median(values: Array) -> float:
    """Of those that are known: what is wrong makes things slower, so of two the lower one is usual."""
    known = np.sort(values[~np.isnan(values)])
    return float(known[(len(known) - 1) // 2]) if len(known) else np.nan


def find_slow(slow: Slow) -> tuple[Finding, ...]:
    """Ranks that keep others waiting for a reason, and a wire that is slower than it was or should be."""
    everyone = range(slow.run.world_size)
    changed = [f for rank in everyone if (f := _changed(slow, rank))]
    known = {rank for finding in changed for rank in finding.ranks}
    before = slow.before
    off = [f for rank in everyone if rank not in known and (f := _off_plan(before, rank))]
    found = [*changed, *_by_kind(before, off)]
    found.sort(key=lambda f: -(f.lost_s or 0.0))
    return (*found, *_wire(slow))


def _by_kind(slow: Slow, off: list[Finding]) -> list[Finding]:
    """Where nothing was measured and all devices of a kind are off, the description of that kind is."""
    expected = slow.run.expected
    if expected is None or expected.is_measured:
        return off
    kinds = [device.rpartition("/")[2].partition("#")[0] for device in slow.run.devices]
    found, slower = list(off), [f for f in off if f.syndrome == "compute straggler"]
    for kind in dict.fromkeys(kinds):
        ranks = tuple(rank for rank, own in enumerate(kinds) if own == kind)
        theirs = [f for f in slower if f.ranks[0] in ranks]
        if theirs and (slow.compute_ratio[list(ranks)] >= SLOWER * slow.usual_compute).all():
            found = [f for f in found if f not in theirs] + [_misjudged(slow, kind, ranks, theirs)]
    return found


def _misjudged(slow: Slow, kind: str, ranks: tuple[int, ...], theirs: list[Finding]) -> Finding:
    factor = float(np.median(slow.compute_ratio[list(ranks)])) / slow.usual_compute
    count = "the only one" if len(ranks) == 1 else f"all {len(ranks)}"
    return Finding(
        "misjudged devices",
        ranks,
        f"{kind} computes {factor:.2f} times as long as the plan says, beyond what others are off by",
        (f"{count} of this kind, and nothing was measured", *theirs[0].evidence),
        "hap profile measures what these devices do, hap plan --profile plans with it; -o writes what was found",
        factor=factor,
        lost_s=max(f.lost_s or 0.0 for f in theirs),
    )


def _changed(slow: Slow, rank: int) -> Finding | None:
    """Whether the rank takes longer than it did, by what matters, and others do not. A device that has become slow is
    so in the program and beside it."""
    run, both = slow.run, slow.run.compute_s + slow.run.outside_s
    if (change := _own_change(both, rank)) is None:
        return None
    if _grown_s(both[:, rank], change) < MATTERS * slow.step_s:
        return None
    computes, beside = _own_change(run.compute_s, rank), _own_change(run.outside_s, rank)
    inside = computes is not None and (beside is None or not _is_more(run, rank, beside, computes))
    table, change = (run.compute_s, computes or change) if inside else (run.outside_s, beside or change)
    before, after = (float(np.median(part)) for part in np.split(table[:, rank], [change.at]))
    since = run.numbers[change.at]
    said = f"{in_words(after)} of each step, {in_words(before)} before step {since}"
    return _late(slow, rank, inside, change.factor, said, since)


def _is_more(run: Run, rank: int, beside: Change, computes: Change) -> bool:
    """Whether what has become longer between steps is more than what has in the program, and by another factor, which a
    device that has become slow has in both."""
    return beside.factor > UNLIKE * computes.factor and _grown_s(run.outside_s[:, rank], beside) > _grown_s(
        run.compute_s[:, rank], computes
    )


def _grown_s(series: Array, change: Change) -> float:
    before, after = (float(np.median(part)) for part in np.split(series, [change.at]))
    return after - before


def _own_change(table: Array, rank: int) -> Change | None:
    """For the worse, of this rank alone: if all others change by as much, their work has changed."""
    change = find_change(table[:, rank], CHANGED)
    if change is None or change.factor <= 1:
        return None
    rest = [find_change(table[:, r], CHANGED) for r in range(table.shape[1]) if r != rank]
    alike = [c is not None and c.factor >= change.factor / CHANGED for c in rest]
    return None if alike and all(alike) else change


def _off_plan(slow: Slow, rank: int) -> Finding | None:
    """Whether the rank takes longer than planned, by more than the others do, and they are known to wait for it."""
    if not slow.ratio[rank] >= SLOWER * slow.usual or not slow.waited_for_s[rank] >= MATTERS * slow.step_s:
        return None
    expected = slow.run.expected
    assert expected is not None and expected.compute_s is not None
    excess = float(slow.compute_s[rank] + slow.outside_s[rank]) - slow.usual * expected.compute_s[rank]
    inside = bool(slow.compute_ratio[rank] >= SLOWER * slow.usual_compute)
    factor: float | None
    if inside:
        factor = float(slow.compute_ratio[rank]) / slow.usual_compute
        said = (
            f"{in_words(float(slow.compute_s[rank]))} of each step, {slow.compute_ratio[rank]:.2f} times what its plan "
            f"says, where others take {slow.usual_compute:.2f} times"
        )
    else:
        should_s = max(0.0, float(slow.outside_s[rank]) - excess)
        factor = float(slow.outside_s[rank]) / should_s if should_s > 0 else None
        said = f"{in_words(float(slow.outside_s[rank]))} of each step, where the plan has {in_words(should_s)}"
    return _late(slow, rank, inside, factor, said, None)


def _late(slow: Slow, rank: int, inside: bool, factor: float | None, said: str, since: int | None) -> Finding:
    """Of a rank that takes long ``inside`` of the program, or between steps."""
    name, waited_s = slow.run.name(rank), float(slow.waited_for_s[rank])
    known = not np.isnan(waited_s)
    long = "too long" if factor is None else f"{factor:.2f} times as long as it should"
    return Finding(
        "compute straggler" if inside else "late between steps",
        (rank,),
        f"{name} {'computes' if inside else 'is busy between steps'} {long}"
        + (f", since step {since}" if since is not None else ""),
        (said, f"the others wait for it {in_words(waited_s)} of each step of {in_words(slow.step_s)}")
        if known
        else (said,),
        "look for another process on the device, its clock and its temperature; if it stays so, plan again with what "
        "was measured (-o)"
        if inside
        else "its data loader (workers, disk, decoding), or what else the script does on this rank alone",
        factor=factor,
        lost_s=waited_s if known else None,
        since_step=since,
    )


def _wire(slow: Slow) -> tuple[Finding, ...]:
    """Whether the wire alone takes longer than before, or than the plan says."""
    run, rows = slow.run, list(slow.run.shared_s)
    series = np.array(list(run.shared_s.values()))
    change = find_change(series, SLOWER)
    if change is not None and change.factor > 1:
        before, after = (float(np.median(part)) for part in np.split(series, [change.at]))
        if after - before >= MATTERS * slow.step_s:
            since = run.numbers[rows[change.at]]
            said = f"{in_words(after)} of each step, {in_words(before)} before step {since}"
            return (_slow_wire(said, change.factor, after - before, since),)
    planned_s = None if run.expected is None else run.expected.wire_s
    if planned_s is None or not slow.wire_s - planned_s >= max(MATTERS, SLOWER - 1) * slow.step_s:
        return ()
    said = f"{in_words(slow.wire_s)} of each step, where the plan says {in_words(planned_s)}"
    return (_slow_wire(said, slow.wire_s / planned_s if planned_s > 0 else None, slow.wire_s - planned_s, None),)


def _slow_wire(said: str, factor: float | None, lost_s: float, since: int | None) -> Finding:
    return Finding(
        "slow communication",
        (),
        "every rank is held up by collectives that are under way: " + said,
        (),
        "a probe tells which link: record with probe_every, or hap profile on these hosts",
        factor=factor,
        lost_s=lost_s,
        since_step=since,
    )
