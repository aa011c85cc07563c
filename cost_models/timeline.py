"""An event simulation of one step: every rank's compute stream, and the stream of collectives that all ranks share.

    a collective starts when every rank has reached it and the one before it has ended     (the last arrival decides)
    blocking:    no rank goes on before it has ended
    overlapped:  it is issued as soon as its value exists; ranks go on, and wait for it where its first reader stands
                 (that of a result: at the update)

``evaluate`` is the same with nothing overlapped: the two agree to rounding. On a measured cluster the timeline knows
more: each rank packs for itself, and goes on when it has what it needs, maybe before others do; where nothing overlaps,
its step is then shorter, never longer. ``simulate`` plays a graph; ``play`` plays events, which ``hap.search.judge``
makes of a program as its passes leave it: there calls that pack and join what is sent are launched, too.
Every span knows the span that let it start, so the critical path is followed backwards from the last end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hap.cluster import ClusterSpec
from hap.conversion import Need, find_needs
from hap.cost_models.collective import course
from hap.cost_models.compute import DEFAULT_MODEL, ComputeModel
from hap.cost_models.evaluate import update_seconds
from hap.cost_models.profile import CalibratedCluster
from hap.cost_models.sequence import ConversionCost, Local, Pricer, sequence
from hap.cost_models.work import is_view
from hap.fabric import Array
from hap.graph import Graph
from hap.placement import GroupSizes
from hap.plan import Strategy


@dataclass(frozen=True)
class Span:
    """Something that lasts from ``start_s`` to ``end_s``. ``rank`` is None for a collective, in which all take part;
    ``after`` is the index of the span whose end let this one start, None at the beginning."""

    rank: int | None
    stream: Literal["compute", "communication"]
    name: str
    kind: str  # forward, backward, slice, pack, update, or the collective
    start_s: float
    end_s: float
    after: int | None

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """One step. Per rank: ``busy_s`` computing, ``exposed_s`` held up by a collective that is running, ``idle_s``
    waiting for others (the rest); the three add up to ``step_s``."""

    spans: tuple[Span, ...]
    devices: tuple[str, ...]
    step_s: float
    busy_s: tuple[float, ...]
    exposed_s: tuple[float, ...]

    @property
    def idle_s(self) -> tuple[float, ...]:
        rest = (self.step_s - b - e for b, e in zip(self.busy_s, self.exposed_s, strict=True))
        return tuple(max(0.0, seconds) for seconds in rest)  # less is what sums were rounded by

    @property
    def critical_path(self) -> tuple[Span, ...]:
        """From the beginning to the end without a gap: shortening none of these leaves the step as long as it is."""
        last = max(range(len(self.spans)), key=lambda i: (self.spans[i].end_s, -i), default=None)
        path: list[Span] = []
        while last is not None:
            path.append(self.spans[last])
            last = self.spans[last].after
        return tuple(reversed(path))


@dataclass(frozen=True)
class Issue:
    """A collective begins, as soon as all ranks are here and the wire is free. ``seconds`` on the wire; ``ahead_s``
    (N,): by how much each rank has what it needs before the end. Sums over hosts have a ``stream`` of their own."""

    handle: str
    name: str
    kind: str
    seconds: float
    ahead_s: Array | None = None
    stream: Literal["wire", "hosts", "hosts at once"] = "wire"


@dataclass(frozen=True)
class Await:
    """Nobody goes on before the collective issued under ``handle`` has ended."""

    handle: str


Event = Local | Issue | Await


def play(events: Iterable[Event], devices: tuple[str, ...]) -> Timeline:
    """One step of these events, the same for all ranks; what is not awaited ends with the step."""
    player = Player(len(devices))
    for event in events:
        match event:
            case Local():
                player.compute(event)
            case Issue():
                player.issue(event)
            case Await(handle=handle):
                player.wait(handle)
    return player.finish(devices)


def simulate(
    graph: Graph,
    strategies: Mapping[str, Strategy],
    sizes: GroupSizes,
    cluster: ClusterSpec,
    *,
    needs: Sequence[Need] | None = None,
    optimizer: str = "adamw",
    overlapped: Collection[Need] = (),
    model: ComputeModel = DEFAULT_MODEL,
) -> Timeline:
    """Play one step. ``overlapped`` are the needs (of ``find_needs``) whose collectives run beside compute; the rest
    block. Errors are those of ``evaluate``."""
    needs = find_needs(graph, strategies) if needs is None else needs
    costs = Pricer(graph, sizes, cluster).price(needs)
    items = list(sequence(graph, strategies, sizes, cluster, costs, model))
    update = update_seconds(graph, strategies, sizes, cluster, optimizer, model)
    started = _issues(graph, costs, frozenset(overlapped))

    def issue(cost: ConversionCost) -> Iterator[Event]:
        need, name = cost.need, str(cost.need.value)
        if isinstance(cluster, CalibratedCluster):
            known = course(need.collective, cost.decomposition, cost.nbytes, need.source, need.target, cluster, sizes)
            yield Local(f"pack {name}", "pack", known.packing_s)
            yield Issue(str(need), name, need.collective, known.wire_s, known.ahead_s)
        else:
            yield Issue(str(need), name, need.collective, cost.seconds)

    def events() -> Iterator[Event]:
        for cost in started.get("", ()):
            yield from issue(cost)
        for item in items:
            if not isinstance(item, ConversionCost):
                yield item
                for cost in started.get(item.name, ()):
                    yield from issue(cost)
            elif item.need not in overlapped:
                yield from issue(item)
                yield Await(str(item.need))
            elif item.need.before:
                yield Await(str(item.need))
        yield from (Await(str(c.need)) for c in costs if c.need in overlapped and not c.need.before)
        yield Local("optimizer", "update", update)

    return play(events(), tuple(d.name for d in cluster.devices))


def _issues(
    graph: Graph, costs: Sequence[ConversionCost], overlapped: frozenset[Need]
) -> dict[str, list[ConversionCost]]:
    """The overlapped collectives by the node after which they are issued; "" for those of sources. A value that a view
    gives exists when the node that made its memory has run."""
    found: dict[str, list[ConversionCost]] = {}
    for cost in costs:
        if cost.need in overlapped and cost.need.collective != "slice":
            node = graph.by_name[cost.need.value.node]
            while is_view(node):
                node = graph.by_name[node.inputs[0].node]
            found.setdefault("" if node.is_source else node.name, []).append(cost)
    return found


@dataclass
class Player:
    """The clocks: ``free`` (N,) when each rank's compute stream is next free, ``wires`` when those of collectives are,
    with the span that ended there."""

    world_size: int
    spans: list[Span] = field(default_factory=list)
    pending: dict[str, tuple[int, Array | None]] = field(default_factory=dict)  # not yet waited for: its span, ahead_s
    wires: dict[str, tuple[float, int | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free: Array = np.zeros(self.world_size)
        self.last: list[int | None] = [None] * self.world_size  # the span that set free[rank]
        self.busy: Array = np.zeros(self.world_size)
        self.exposed: Array = np.zeros(self.world_size)

    def compute(self, item: Local) -> None:
        for rank, seconds in enumerate(item.seconds.tolist()):
            if seconds > 0:
                start = float(self.free[rank])
                self.spans.append(Span(rank, "compute", item.name, item.kind, start, start + seconds, self.last[rank]))
                self.free[rank], self.last[rank] = start + seconds, len(self.spans) - 1
                self.busy[rank] += seconds

    def ready(self, stream: str) -> tuple[float, int | None]:
        """When a collective can begin on that stream, and after which span."""
        slowest = int(self.free.argmax())
        arrival = float(self.free[slowest])
        wire, last = self.wires.get(stream, (0.0, None))
        return (arrival, self.last[slowest]) if arrival >= wire else (wire, last)

    def issue(self, event: Issue, not_before_s: float = 0.0) -> None:
        """Put a collective on the wire."""
        start, after = self.ready(event.stream)
        start = max(start, not_before_s)
        end = start + event.seconds
        self.spans.append(Span(None, "communication", event.name, event.kind, start, end, after))
        self.wires[event.stream] = end, len(self.spans) - 1
        self.pending[event.handle] = len(self.spans) - 1, event.ahead_s

    def wait(self, handle: str) -> None:
        self._hold(*self.pending.pop(handle))

    def _hold(self, index: int, ahead_s: Array | None) -> None:
        """Every rank goes on when the collective has ended for it, if it is not later anyway."""
        span = self.spans[index]
        for rank in range(self.world_size):
            at, end = float(self.free[rank]), span.end_s - (0.0 if ahead_s is None else float(ahead_s[rank]))
            if at < end:
                self.exposed[rank] += end - max(at, span.start_s)
                self.free[rank], self.last[rank] = end, index

    def finish(self, devices: tuple[str, ...]) -> Timeline:
        step_s = max(float(self.free.max(initial=0.0)), *(end for end, _ in self.wires.values()), 0.0)
        return Timeline(tuple(self.spans), devices, step_s, tuple(self.busy.tolist()), tuple(self.exposed.tolist()))
