"""Who keeps a job from going on: C4D's rule for hangs, from what every rank was doing last.

Ranks of one program come to the wire equally often. So of ranks that no longer move, those that have come there less
often than others are the ones that the others wait for (a *non-communication hang*: a crash, a deadlock, a loader that
never ends); if all stand in the same call, the call itself does not end (a *communication hang*); if their calls are
not alike, they do not run the same program (a *desync*). How long they stand is counted up to the last sign of life, so
that the records of a job that hung and was ended an hour ago say the same as they did then.
"""

from __future__ import annotations

import time
from collections import Counter

from hap.diagnosis.finding import Finding
from hap.diagnosis.run import Run
from hap.run_record import HEARTBEAT_S, OTHER, State

SILENT = 5 * HEARTBEAT_S  # without a sign of life, while others give some
LEAST_S = 10.0  # nothing that moves within it hangs
STEPS = 5.0  # nor within so many of the longest steps


def find_hang(run: Run, clock: float | None = None) -> tuple[Finding, ...]:
    """What stopped the job, if anything did, at this time of the clock; None: now. A rank without a state is one of
    which nothing is known."""
    clock = time.time() if clock is None else clock
    states = {rank: record.state for rank, record in enumerate(run.ranks) if record.state is not None}
    open_ = {rank: state for rank, state in states.items() if not state.ended}
    raised = {rank: state for rank, state in states.items() if state.ended == 2}
    if raised:
        # Who raised while it waited for others was left alone by those: by one that raised elsewhere, or went silently.
        own = tuple(rank for rank, state in raised.items() if not state.in_wire)
        if not own and open_:
            return (_lost(run, tuple(open_), states, max(state.alive for state in states.values())),)
        return tuple(_raised(run, rank) for rank in own or raised)
    if not open_:
        return ()
    now = max(state.alive for state in open_.values())
    silent = tuple(rank for rank, state in open_.items() if now - state.alive > SILENT)
    if silent:
        return (_lost(run, silent, open_, now),)
    longest = max((line.seconds for record in run.ranks for line in record.steps), default=0.0)
    patience = max(LEAST_S, STEPS * longest)
    if all(now - state.since > patience for state in open_.values()):
        return (_hang(run, open_, now),)
    return (_ended(run, open_, now),) if clock - now > SILENT else ()


def _raised(run: Run, rank: int) -> Finding:
    said = (run.ranks[rank].error or "").strip().splitlines()
    return Finding(
        "raised",
        (rank,),
        f"{run.name(rank)} ended by an exception{f': {said[-1]}' if said else ''}",
        tuple(said[-8:]),
        f"read rank-{rank:04d}.error; if every rank raised, the one that did so first",
    )


def _lost(run: Run, silent: tuple[int, ...], states: dict[int, State], now: float) -> Finding:
    evidence = tuple(
        f"{run.name(rank)}: the last sign of life came {now - states[rank].alive:.0f} s before the others', "
        f"{_doing(run, rank, states[rank])}"
        for rank in silent
    )
    return Finding(
        "lost",
        silent,
        f"{_names(run, silent)} no longer runs: killed, stopped, or its host is gone",
        evidence,
        "look on its host for an out-of-memory kill (dmesg), a fault of the device, or the host's own end",
    )


def _ended(run: Run, states: dict[int, State], now: float) -> Finding:
    """Of processes that all went at once, as when one dies and its launcher ends the others."""
    where = {rank: (state.entered, state.in_wire) for rank, state in states.items()}
    behind = tuple(rank for rank in states if where[rank] < max(where.values()) and not states[rank].in_wire)
    suspects = behind if len(behind) < len(states) else ()
    stood_s = max((now - states[rank].since for rank in states if rank not in suspects), default=0.0)
    waited = (
        f"; {_names(run, suspects)} had not come to what others had been in for {stood_s:.1f} s" if suspects else ""
    )
    return Finding(
        "lost",
        suspects or tuple(states),
        f"all processes went at once, none as it should{waited}",
        tuple(f"{run.name(rank)}: {_doing(run, rank, state)}" for rank, state in states.items()),
        "the launcher's own output says which rank it lost first, and by which signal",
    )


def _hang(run: Run, states: dict[int, State], now: float) -> Finding:
    stood_s = min(now - state.since for state in states.values())
    where = {rank: (state.entered, state.in_wire) for rank, state in states.items()}
    furthest = max(where.values())
    behind = tuple(rank for rank in states if where[rank] < furthest)
    told = tuple(f"{run.name(rank)}: {_doing(run, rank, state)}" for rank, state in states.items())
    computing = tuple(rank for rank in behind if not states[rank].in_wire)
    if computing:
        first = states[computing[0]]
        at = "between two steps" if first.what == "outside" else f"in the {first.what} part of step {first.step}"
        return Finding(
            "non-communication hang",
            computing,
            f"{_names(run, computing)} stands {at} and never comes to what the others wait in, since {stood_s:.0f} s",
            (*told, *_stacks(run, computing)),
            "its stacks say where it stands (rank-*.stack, written after a minute); if they name its data, look there",
        )
    if behind:
        ahead = tuple(rank for rank in states if rank not in behind)
        sends = len(ahead) < len(behind)
        suspects, others = (ahead, behind) if sends else (behind, ahead)
        summary = (
            f"{_names(run, suspects)} has left a collective in which others still wait"
            if sends
            else f"{_names(run, suspects)} is still in a collective that others have left"
        )
        return Finding(
            "communication hang",
            suspects,
            f"{summary}, since {stood_s:.0f} s",
            told,
            f"what {'it sent' if sends else 'it is to receive'} does not come through: look at its links, above all to "
            f"{_names(run, others)}",
        )
    calls = {rank: run.call_name(rank, state.call) for rank, state in states.items()}
    if furthest[1] and len(set(calls.values())) > 1:
        return Finding(
            "desync",
            _minority(calls),
            f"ranks wait in different collectives, since {stood_s:.0f} s",
            told,
            "they do not run the same program: look for a branch on the rank around a step, clipping or evaluation",
        )
    if furthest[1]:
        return Finding(
            "communication hang",
            tuple(states),
            f"all ranks are in {calls[min(states)]} of step {states[min(states)].step} and it does not end, since "
            f"{stood_s:.0f} s",
            told,
            "no rank is missing, so a link is: hap profile on these hosts times each pair",
        )
    return Finding(
        "non-communication hang",
        tuple(states),
        f"no rank has come to a collective for {stood_s:.0f} s",
        (*told, *_stacks(run, tuple(states))),
        "all of them wait for something that is no rank: a file system, a data service, a debugger",
    )


def _doing(run: Run, rank: int, state: State) -> str:
    """What a rank was doing last, in words."""
    if state.in_wire:
        number = "" if state.call == OTHER else f", number {state.entered} since it began"
        return f"in {run.call_name(rank, state.call)} of step {state.step}{number}"
    if state.what == "outside":
        return f"outside of the program after step {state.step}"
    last = "" if state.entered == 0 else f", after {run.call_name(rank, state.call)}"
    return f"computing in the {state.what} part of step {state.step}{last}"


def _stacks(run: Run, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """The innermost lines of the main threads, where they were written down."""
    found = []
    for rank in ranks:
        lines = (run.ranks[rank].stack or "").splitlines()
        starts = [i for i, line in enumerate(lines) if line.startswith(("Thread", "Current thread"))]
        if starts:  # the main thread is the last one
            found += [f"{run.name(rank)}: {line.strip()}" for line in lines[starts[-1] + 1 :][:3]]
    return tuple(found)


def _minority(calls: dict[int, str]) -> tuple[int, ...]:
    """The ranks whose call fewest others are in; of as many, those with the higher numbers."""
    groups = Counter(calls.values())
    fewest = min(groups.values())
    last = [call for call, count in groups.items() if count == fewest][-1]
    return tuple(rank for rank, call in calls.items() if call == last)


def _names(run: Run, ranks: tuple[int, ...]) -> str:
    shown = [run.name(rank) for rank in ranks[:4]]
    return ", ".join(shown) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
