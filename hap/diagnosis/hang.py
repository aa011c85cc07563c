"""Who keeps a job from going on: C4D's rule for hangs, from what every rank was doing last.

Ranks of one program come to the wire equally often. So of ranks that no longer move, those that have come there less
often than others are the ones that the others wait for (a *non-communication hang*: a crash, a deadlock, a loader that
never ends); if all stand in the same call, the call itself does not end (a *communication hang*); if their calls are
not alike, they do not run the same program (a *desync*). How long a rank stands is counted up to its last sign of life,
so that the records of a job that hung and was ended an hour ago say the same as they did then.

Clocks of different hosts are never compared as if they were one, nor is the present with records of another machine or
copies, which may have been made one after another while the job went on. Of those a rank is lost whose records end
while it moves and others stand and wait; where ranks run on this machine, one that has been silent for some seconds.

A rank that came to its end is gone from what others wait in, if that is more than it has ever come to. One that was
stopped from outside, by Ctrl-C, is as if it had no end: what it did until then counts.

On a mesh of two axes each host has a program of its own. There ranks are first put beside each other by how often they
have come to what all ranks do, above all the sums over hosts. Of those that are behind (of all, if none is) some may
stand elsewhere than in such a sum: then the rule is asked of the ranks of their hosts, each host by itself, by all that
these do. A sum that ranks go on beside counts when it begins, and again when it is waited for: so who is ahead may have
begun more and wait for nobody, but whoever waits for a rank that stands still has come further than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hap.diagnosis.finding import Finding
from hap.diagnosis.run import Run
from hap.run_record import DONE, HEARTBEAT_S, OTHER_KIND, RAISED, RUNS, STOPPED, State

States = dict[int, State]
SILENT = 5 * HEARTBEAT_S  # without a sign of life, while others give some
LEAST_S = 10.0  # nothing that moves within it hangs
STEPS = 5.0  # nor within so many of the longest steps


def find_hang(run: Run) -> tuple[Finding, ...]:
    """What stopped the job, if anything did, as far as its records go. A rank without a state is one of which nothing
    is known."""
    states = {rank: record.state for rank, record in enumerate(run.ranks) if record.state is not None}
    raised = tuple(rank for rank, state in states.items() if state.ended == RAISED)
    # Who raised while it waited for others was left alone by those: by one that raised elsewhere, or went silently.
    if own := tuple(rank for rank in raised if not states[rank].in_wire):
        return tuple(_raised(run, rank) for rank in own)
    longest = max((line.seconds for record in run.ranks for line in record.steps), default=0.0)
    patience = max(LEAST_S, STEPS * longest)
    if early := _ended_early(run, states, patience):
        return early
    was_stopped = any(state.ended == STOPPED for state in states.values())
    open_ = {rank: state for rank, state in states.items() if state.ended != DONE}
    if not open_:
        return ()
    if silent := _silent(run, states) or _left(run, open_, patience):
        return (_lost(run, silent, states),)
    stand = all(_stood_s(run, open_, rank) > patience for rank in open_)
    if raised and not was_stopped:
        left = tuple(rank for rank, state in open_.items() if state.ended == RUNS)
        outside = tuple(rank for rank in left if not states[rank].in_wire)
        if stand and any(_lives(run, rank) and states[rank].alive == _newest(run, states, rank) for rank in outside):
            return _hang(run, open_)  # those that raised were tired of waiting
        here = (rank for rank in left if run.ranks[rank].seen is not None and not _lives(run, rank))
        gone = outside or tuple(here)  # of others in the wire it cannot be told
        return (_lost(run, gone, states),) if gone else tuple(_raised(run, rank) for rank in raised)
    if stand:
        return _hang(run, open_)
    gone = _all_gone(run, states)
    return (_ended(run, open_, gone),) if gone and not was_stopped else ()


def is_left_open(run: Run) -> bool:
    """Whether there are ranks of which nobody can tell here if they still run."""
    return any(r.seen is None and r.state is not None and r.state.ended == RUNS for r in run.ranks)


def _newest(run: Run, states: States, rank: int) -> float:
    """The last sign of life of the ranks of this one's host, by its clock."""
    host = run.ranks[rank].head.host
    return max(state.alive for other, state in states.items() if run.ranks[other].head.host == host)


def _stood_s(run: Run, states: States, rank: int) -> float:
    """How long a rank has been doing what it does, until the first rank of its host was stopped from outside."""
    host = run.ranks[rank].head.host
    ends = (s.alive for r, s in states.items() if s.ended == STOPPED and run.ranks[r].head.host == host)
    return min([states[rank].alive, *ends]) - states[rank].since


def _lives(run: Run, rank: int) -> bool:
    """Whether the rank is known to run now."""
    seen, state = run.ranks[rank].seen, run.ranks[rank].state
    return seen is not None and state is not None and state.ended == RUNS and seen - state.alive <= SILENT


def _silent(run: Run, states: States) -> tuple[int, ...]:
    """Ranks of this machine that give no sign of life, while others of it do or did."""
    return tuple(
        rank
        for rank, state in states.items()
        if run.ranks[rank].seen is not None
        and state.ended == RUNS
        and _newest(run, states, rank) - state.alive > SILENT
    )


def _left(run: Run, states: States, patience: float) -> tuple[int, ...]:
    """Those whose records end while they move, if they end before the others', which all stand."""
    moving = tuple(rank for rank in states if _stood_s(run, states, rank) <= patience)
    latest = max((state.alive for rank, state in states.items() if rank not in moving), default=0.0)
    silent = (
        states[rank].ended == RUNS
        and not _lives(run, rank)
        and (_newest(run, states, rank) - states[rank].alive > SILENT or latest - states[rank].alive > patience)
        for rank in moving
    )
    return moving if len(moving) < len(states) and all(silent) else ()


def _all_gone(run: Run, states: States) -> tuple[int, ...]:
    """All ranks of this machine that have not ended, if none of them gives a sign of life any more."""
    here = tuple(rank for rank, s in states.items() if s.ended == RUNS and run.ranks[rank].seen is not None)
    return () if any(_lives(run, rank) for rank in here) else here


def _ended_early(run: Run, states: States, patience: float) -> tuple[Finding, ...]:
    """Ranks that came to their end before what others were in when they stood for long, raised or went."""
    gone = _all_gone(run, states)

    def waits(rank: int, state: State) -> bool:
        stands = state.ended == RAISED or state.alive - state.since > patience
        return state.ended != DONE and (rank in gone or bool(state.in_wire and stands))

    def is_behind(rank: int, other: int) -> bool:
        """Whether this rank has never come to what the other one is in."""
        own, theirs = states[rank], states[other]
        if theirs.step > own.step:
            return True
        if run.ranks[rank].head.mesh_host == run.ranks[other].head.mesh_host:
            return bool(theirs.in_wire) and theirs.entered > own.entered
        return _in_world(run, other, theirs) and theirs.world > own.world

    waiting = [rank for rank, state in states.items() if waits(rank, state)]
    # Who was stopped from outside is missed only by those that wait for it still.
    early = tuple(
        rank
        for rank, state in states.items()
        if any(
            is_behind(rank, other) and (state.ended == DONE or (state.ended == STOPPED and _lives(run, other)))
            for other in waiting
        )
    )
    if not early:
        return ()
    last, further = states[early[0]], max((states[rank] for rank in waiting), key=lambda state: state.step)
    what = f"others {'wait' if further.in_wire else 'are'} in step {further.step}"
    return (
        Finding(
            "ended early",
            early,
            f"{_names(run, early)} came to its end after step {last.step}, while {what}",
            tuple(f"{run.name(rank)}: {_doing(run, rank, states[rank])}" for rank in (*early, *waiting)),
            "uneven data, or a way out of the loop that not all ranks take: give each as many batches as the others",
        ),
    )


def _raised(run: Run, rank: int) -> Finding:
    said = (run.ranks[rank].error or "").strip().splitlines()
    return Finding(
        "raised",
        (rank,),
        f"{run.name(rank)} ended by an exception{f': {said[-1]}' if said else ''}",
        tuple(said[-8:]),
        f"read rank-{rank:04d}.error; if every rank raised, the one that did so first",
    )


def _lost(run: Run, gone: tuple[int, ...], states: States) -> Finding:
    def last_sign(rank: int) -> str:
        before_s = _newest(run, states, rank) - states[rank].alive
        if before_s > SILENT:
            return f"the last sign of life came {before_s:.0f} s before the others'"
        return "the records of its host end" if run.ranks[rank].seen is None else "it gives none any more"

    is_far = any(run.ranks[rank].seen is None for rank in gone)
    return Finding(
        "lost",
        gone,
        f"{_names(run, gone)} no longer runs: killed, stopped, or its host is gone"
        + (", if these records are no older than the others'" if is_far else ""),
        tuple(f"{run.name(rank)}: {last_sign(rank)}, {_doing(run, rank, states[rank])}" for rank in gone),
        "look on its host for an out-of-memory kill (dmesg), a fault of the device, or the host's own end",
    )


def _ended(run: Run, states: States, gone: tuple[int, ...]) -> Finding:
    """Of processes that all went at once, as when one dies and its launcher ends the others."""
    suspects = tuple(rank for rank in _never_come(_groups(run, states)) if rank in gone)
    stood_s = max((_stood_s(run, states, rank) for rank in gone if rank not in suspects), default=0.0)
    waited = (
        f"; {_names(run, suspects)} had not come to what others had been in for {stood_s:.1f} s" if suspects else ""
    )
    which = "all processes" if len(gone) == len(states) else f"all processes of {run.ranks[gone[0]].head.host}"
    return Finding(
        "lost",
        suspects or gone,
        f"{which} went at once, none as it should{waited}",
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


def _in_world(run: Run, rank: int, state: State) -> bool:
    """Whether the rank is in what all ranks do together."""
    return bool(state.in_wire) and run.ranks[rank].kind_of(state.call).scope == "world"


def _groups(run: Run, states: States) -> tuple[_Group, ...]:
    """The groups in which somebody keeps the job from going on: see the module docstring."""

    def inside(ranks: Iterable[int], awaited: bool) -> _Group:
        return _Group({r: (states[r].entered, states[r].in_wire) for r in ranks if r in states}, awaited)

    if len(run.hosts) == 1:
        return (inside(states, awaited=False),)
    in_world = {rank: _in_world(run, rank, state) for rank, state in states.items()}
    world = _Group({rank: (state.world, int(in_world[rank])) for rank, state in states.items()})
    elsewhere = {rank for rank in world.behind or world.ranks if not in_world[rank]}
    if not elsewhere:
        return (world,)
    return tuple(inside(host, bool(world.behind)) for host in run.hosts if elsewhere.intersection(host))


def _never_come(groups: tuple[_Group, ...]) -> tuple[int, ...]:
    return tuple(sorted(rank for group in groups for rank in group.never_come))


def _hang(run: Run, states: States) -> tuple[Finding, ...]:
    stood_s = min(_stood_s(run, states, rank) for rank in states)
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


def _stuck(run: Run, group: _Group, states: States, stood_s: float, told: tuple[str, ...]) -> Finding:
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
