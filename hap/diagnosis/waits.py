"""What ranks waited for in one step, by who waits for whom.

Ranks that come to the wire together are a *meeting*: all ranks of the job, and on a mesh of two axes those of each
host, too, for what they do among themselves. One axis has the one meeting of all ranks. What a rank is waited for is
the sum over its meetings. No delay counts twice: a rank that is late to its host's meeting is waited for there, and if
the host is then late to what all do, its ranks come together, so that no single one of them is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hap.fabric import Array
from hap.run_record import RankRecord, RecordError, Scope, StepLine

Call = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Meeting:
    """The n ``ranks`` that come to the same K ``calls`` of a step, by their numbers on the first of these ranks.
    ``seconds`` (K, n): how long each was held up by each of them, in order."""

    ranks: tuple[int, ...]
    calls: tuple[int, ...]
    seconds: Array

    @property
    def shared_s(self) -> Array:
        """(K,): how long all of them waited at once. What a rank waits beyond that, it waits for other ranks: the last
        one to come waits for the wire alone. Clocks of different hosts play no part."""
        least: Array = self.seconds.min(axis=1)
        return least

    @property
    def waited_for_s(self) -> Array:
        """(n,): by how much the calls would have been over earlier if this rank had come no later to them than the
        last of the others."""
        found = np.zeros(len(self.ranks))
        if len(self.ranks) > 1:
            ordered = np.sort(self.seconds, axis=1)
            np.add.at(found, self.seconds.argmin(axis=1), ordered[:, 1] - ordered[:, 0])
        return found


@dataclass(frozen=True, eq=False)
class Waits:
    """The meeting of all N ranks, and those of ``hosts`` whose ranks do something among themselves."""

    world: Meeting
    hosts: tuple[Meeting, ...] = ()

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        return (self.world, *self.hosts)

    @property
    def shared_s(self) -> float:
        """How long the wire alone held the step up: all ranks, and the ranks of the host that it held up longest. Hosts
        wait at the same time, each for its own, so that theirs do not add up."""
        of_hosts = [float(host.shared_s.sum()) for host in self.hosts]
        return float(self.world.shared_s.sum()) + max(of_hosts, default=0.0)

    @property
    def waited_for_s(self) -> Array:
        """(N,): the sum over a rank's meetings."""
        found = np.zeros(len(self.world.ranks))
        for meeting in self.meetings:
            found[list(meeting.ranks)] += meeting.waited_for_s
        return found


def find_waits(
    ranks: Sequence[RankRecord], lines: Sequence[StepLine], hosts: Sequence[tuple[int, ...]]
) -> Waits | None:
    """Of one step, in which ``lines`` are the ranks'; None where one was told in short. RecordError if ranks of a
    meeting came to it unequally often."""
    if any(line.calls is None for line in lines):
        return None
    world = _meeting(ranks, lines, tuple(range(len(ranks))), "world")
    of_hosts = (_meeting(ranks, lines, members, "host") for members in hosts)
    return Waits(world, tuple(meeting for meeting in of_hosts if meeting.calls))


def calls_of(record: RankRecord, line: StepLine, scope: Scope) -> list[Call]:
    """Those of a step that are of this scope, in order."""
    return [call for call in line.calls or () if record.kind_of(call[0]).scope == scope]


def _meeting(ranks: Sequence[RankRecord], lines: Sequence[StepLine], members: tuple[int, ...], scope: Scope) -> Meeting:
    told = [calls_of(ranks[rank], lines[rank], scope) for rank in members]
    if len({len(calls) for calls in told}) > 1:
        raise RecordError(f"step {lines[0].step}: ranks have come to the wire unequally often, so it was no one step")
    seconds = [[_held_up_s(call) for call in calls] for calls in told]
    return Meeting(members, tuple(call[0] for call in told[0]), np.array(seconds).T.reshape(-1, len(members)))


def _held_up_s(call: Call) -> float:
    """Of a call as it stands in the file; what was not waited for yet held nobody up."""
    marks = call[2:]
    return (marks[1] - marks[0] + (marks[3] - marks[2] if len(marks) >= 4 else 0)) / 1e6
