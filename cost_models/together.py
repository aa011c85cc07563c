"""One step of several hosts that sum tensors over each other: a mesh of two axes, played.

Each host's ranks and collectives are its own, as ``timeline`` plays them. A sum over hosts takes all of them: it begins
when the last host has come to it, and lasts as long as on the host where it is longest. All hosts have the same sums in
the same order. In a host's events such a sum is an ``Issue`` on the stream ``hosts``, or a ``Local`` of its name, for
which the host waits at once; if one host does, all do. Sums that nobody waits for before the step ends are one after
another, in lanes of their own: those in between do not wait for them (that they share the network is left out).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from hap.cost_models.sequence import Local
from hap.cost_models.timeline import Await, Event, Issue, Player, Span, Timeline

HOSTS: Final = "hosts"  # the stream of sums that nobody waits for
AT_ONCE: Final = "hosts at once"


class _Place(NamedTuple):
    """A span: of which host, and its number there."""

    host: int
    number: int | None


@dataclass(frozen=True)
class _Host:
    """``late``: sums that nobody waits for before the step ends. ``causes``: of each sum's span what let it start."""

    player: Player
    events: Sequence[Event]
    late: Collection[str]
    causes: dict[int, _Place] = field(default_factory=dict)

    def sums(self, names: Collection[str]) -> Iterator[Issue]:
        """What the host does, but for its sums, which are handed out one by one."""
        for event in self.events:
            match event:
                case Issue(stream=stream) if stream == HOSTS:
                    yield event
                case Local(name=name) if name in names:
                    yield Issue(name, name, "hosts_sum", float(event.seconds.max()), stream=HOSTS)
                case Local():
                    self.player.compute(event)
                case Issue():
                    self.player.issue(event)
                case Await(handle=handle) if handle not in names or handle in self.late:
                    self.player.wait(handle)

    def sum(self, event: Issue, start_s: float, cause: _Place) -> None:
        self.causes[len(self.player.spans)] = cause
        self.player.issue(event, start_s)
        if event.handle not in self.late:
            self.player.wait(event.handle)


def play_together(
    events: Sequence[Sequence[Event]], devices: Sequence[tuple[str, ...]], sums: Collection[str]
) -> Timeline:
    """One step of all hosts, the first one's ranks first. ``sums``: their names."""
    issued = [{e.name for e in of_one if isinstance(e, Issue) and e.stream == HOSTS} for of_one in events]
    late = frozenset[str].intersection(*map(frozenset, issued))
    hosts = [_Host(Player(len(names)), of_one, late) for of_one, names in zip(events, devices, strict=True)]
    for reached in zip(*(host.sums(sums) for host in hosts), strict=True):
        assert len({event.name for event in reached}) == 1, "hosts make their sums in one order"
        stream = HOSTS if reached[0].name in late else AT_ONCE
        ready = [host.player.ready(stream) for host in hosts]
        last = max(range(len(hosts)), key=lambda h: ready[h][0])
        seconds = max(event.seconds for event in reached)
        for host, event in zip(hosts, reached, strict=True):
            host.sum(replace(event, seconds=seconds, stream=stream), ready[last][0], _Place(last, ready[last][1]))
    return _joined(hosts, devices)


def _joined(hosts: Sequence[_Host], devices: Sequence[tuple[str, ...]]) -> Timeline:
    """The timelines as one; what all ranks of a host take part in stands once for each of them."""
    parts = [host.player.finish(names) for host, names in zip(hosts, devices, strict=True)]
    places: dict[_Place, int] = {}  # -> the number of its first span among all
    found: list[tuple[int, Span, _Place]] = []
    before = 0  # ranks of the hosts so far
    for h, (host, part) in enumerate(zip(hosts, parts, strict=True)):
        for number, span in enumerate(part.spans):
            places[_Place(h, number)] = len(found)
            ranks = range(len(part.devices)) if span.rank is None else (span.rank,)
            found += [(before + rank, span, host.causes.get(number, _Place(h, span.after))) for rank in ranks]
        before += len(part.devices)
    spans = [
        replace(span, rank=rank, after=None if cause.number is None else places[cause]) for rank, span, cause in found
    ]
    return Timeline(
        tuple(spans),
        tuple(name for part in parts for name in part.devices),
        max(part.step_s for part in parts),
        tuple(s for part in parts for s in part.busy_s),
        tuple(s for part in parts for s in part.exposed_s),
    )
