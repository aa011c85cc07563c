"""Who keeps a job from going on: C4D's rule for hangs, from what every rank was doing last.

Ranks of one program come to the wire equally often. So of ranks that no longer move, those that have come there less
often than others are the ones that the others wait for (a *non-communication hang*: a crash, a deadlock, a loader that
never ends); if all stand in the same call, the call itself does not end (a *communication hang*); if their calls are
not alike, they do not run the same program (a *desync*). How long they stand is counted up to the last sign of life, so
that the records of a job that hung and was ended an hour ago say the same as they did then.

On a mesh of two axes each host has a program of its own. There ranks are first put beside each other by how often they
have come to what all ranks do, above all the sums over hosts. Of those that are behind (of all, if none is) some may
stand elsewhere than in such a sum: then the rule is asked of the ranks of their hosts, each host by itself, by all that
these do. A sum that ranks go on beside counts when it begins, and again when it is waited for: so who is ahead may have
begun more and wait for nobody, but whoever waits for a rank that stands still has come further than that.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hap.diagnosis.finding import Finding
from hap.diagnosis.run import Run
from hap.run_record import HEARTBEAT_S, OTHER_KIND, State

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
        return _hang(run, open_, now)
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
    suspects = _never_come(_groups(run, states))
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


@dataclass(frozen=True)
class _Group:
    """Ranks beside each other: how often each has come to the wire, and whether it is in it. ``awaited``: whether ranks
    of other groups wait for these."""

    places: dict[int, tuple[int, int]]
    awaited: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.places)

    @property
    def behind(self) -> tuple[int, ...]:
        furthest = max(self.places.values())
        return tuple(rank for rank, place in self.places.items() if place < furthest)

    @property
    def never_come(self) -> tuple[int, ...]:
        """Those that others wait for, and that are not in the wire."""
        late = self.behind or (self.ranks if self.awaited else ())
        return tuple(rank for rank in late if not self.places[rank][1])

    @property
    def waits(self) -> bool:
        return any(in_wire for _, in_wire in self.places.values())


def _groups(run: Run, states: dict[int, State]) -> tuple[_Group, ...]:
    """The groups in which somebody keeps the job from going on: see the module docstring."""

    def inside(ranks: Iterable[int], awaited: bool) -> _Group:
        return _Group({r: (states[r].entered, states[r].in_wire) for r in ranks if r in states}, awaited)

    if len(run.hosts) == 1:
        return (inside(states, awaited=False),)
    in_world = {
        rank: state.in_wire and run.ranks[rank].kind_of(state.call).scope == "world" for rank, state in states.items()
    }
    world = _Group({rank: (state.world, int(in_world[rank])) for rank, state in states.items()})
    elsewhere = {rank for rank in world.behind or world.ranks if not in_world[rank]}
    if not elsewhere:
        return (world,)
    return tuple(inside(host, bool(world.behind)) for host in run.hosts if elsewhere.intersection(host))


def _never_come(groups: tuple[_Group, ...]) -> tuple[int, ...]:
    return tuple(sorted(rank for group in groups for rank in group.never_come))


def _hang(run: Run, states: dict[int, State], now: float) -> tuple[Finding, ...]:
    stood_s = min(now - state.since for state in states.values())
    groups = _groups(run, states)
    told = tuple(f"{run.name(rank)}: {_doing(run, rank, state)}" for rank, state in states.items())
    if computing := _never_come(groups):
        first = states[computing[0]]
        at = "between two steps" if first.what == "outside" else f"in the {first.what} part of step {first.step}"
        return (
            Finding(
                "non-communication hang",
                computing,
                f"{_names(run, computing)} stands {at} and never comes to what the others wait in, since "
                f"{stood_s:.0f} s",
                (*told, *_stacks(run, computing)),
                "its stacks say where it stands (rank-*.stack, written after a minute); if they name its data, look "
                "there",
            ),
        )
    if waiting := [group for group in groups if group.waits]:
        return tuple(_stuck(run, group, states, stood_s, told) for group in waiting)
    return (
        Finding(
            "non-communication hang",
            tuple(states),
            f"no rank has come to a collective for {stood_s:.0f} s",
            (*told, *_stacks(run, tuple(states))),
            "all of them wait for something that is no rank: a file system, a data service, a debugger",
        ),
    )


def _stuck(run: Run, group: _Group, states: dict[int, State], stood_s: float, told: tuple[str, ...]) -> Finding:
    """Of ranks that are all in the wire, or have left what others of them are in."""
    behind = group.behind
    if behind:
        ahead = tuple(rank for rank in group.ranks if rank not in behind)
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
    calls = {rank: run.call_name(rank, states[rank].call) for rank in group.ranks}
    if len(set(calls.values())) > 1:
        return Finding(
            "desync",
            _minority(calls),
            f"ranks wait in different collectives, since {stood_s:.0f} s",
            told,
            "they do not run the same program: look for a branch on the rank around a step, clipping or evaluation",
        )
    first = min(group.ranks)
    who = "all ranks" if len(group.ranks) == len(states) else f"{_names(run, group.ranks)}, all of a host,"
    return Finding(
        "communication hang",
        group.ranks,
        f"{who} are in {calls[first]} of step {states[first].step} and it does not end, since {stood_s:.0f} s",
        told,
        "no rank is missing, so a link is: hap profile on these hosts times each pair",
    )


def _doing(run: Run, rank: int, state: State) -> str:
    """What a rank was doing last, in words."""
    if state.in_wire:
        is_other = run.ranks[rank].kind_of(state.call).kind == OTHER_KIND
        number = "" if is_other else f", number {state.entered} since it began"
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
