"""``plan_mesh``: a mesh of two axes. Between the hosts the batch is dealt out, inside each host everything is searched.

1. *Between.* The batch is dealt out to hosts in proportion to the speed of their devices, with whole parameters; every
   other placement follows (``hap.rules.host_graph.deal_batch``).
2. *Inside.* Each host's part of the step is a graph of its own, in which sums over hosts are calls that take what the
   wire takes; ``plan_graph`` plans it on the host's devices. Hosts with equal devices and parts share a plan, or its
   decisions where their graphs differ in their places in the batch.
3. *Again.* A host's step without the sums says how fast it is with the strategies that were found: the batch is dealt
   out in proportion to that, while the step gets shorter.

The step as it is run is that of all hosts' programs played together, as they wait for each other at every sum; with
nothing overlapped it is the slowest host's, played alone.

The sums take what the slowest way out or in of any host allows, as all wait for each other. No bound of one axis goes
for two; ``mesh_bound`` has one that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from hap.cluster import ClusterSpec
from hap.codegen.lowering import lower
from hap.cost_models.compute import Calls, parts_seconds
from hap.cost_models.timeline import Event
from hap.cost_models.together import play_together
from hap.deferral import Batches
from hap.errors import InfeasibleError, PlanError
from hap.fabric import Fabric
from hap.graph import Graph
from hap.hosts import Device, DuplexSpec, HostSpec, format_curve
from hap.mesh_plan import BATCH, HostPart, MeshPlan, MeshPrediction, verify_mesh_plan
from hap.placement import Placement, Shard, Sizes
from hap.plan import GroupPlan, Plan, Strategy
from hap.rules.choices import Choices, choices
from hap.rules.host_graph import batch_group, deal_batch, host_graph, summed
from hap.search.judge import batches_events
from hap.search.limits import Effort, check_asked
from hap.search.mesh_bound import arithmetic_s, least_s, slowest_rate, speeds, sums_s
from hap.search.planner import plan_graph
from hap.search.rounding import round_shares
from hap.search.subsets import without
from hap.units import format_rate, format_time

ROUNDS = 3  # in which the batch is dealt out anew
LESS = 0.8  # of a part that does not fit
CLOSE = 0.01  # of a step: less is not worth another round
LOOKS = 2  # clusters that are planned, with and without slow hosts


def plan_mesh(
    possible: Choices,
    cluster: ClusterSpec,
    *,
    optimizer: str = "adamw",
    effort: Effort = "normal",
    leave_out: bool = False,
    batches: int = 1,
) -> MeshPlan:
    """The best plan found for one training step on ``cluster``'s hosts and, inside each, its devices.

    ``leave_out``: hosts with the slowest networks may be left out; the plan is then for a cluster of the others.
    ``batches``: of a step of the optimizer, all but the last under ``no_sync()``; times are then those of one batch.
    PlanError: there is one host, some host's part of the batch would be less than half a sample, or the step needs more
    between hosts than sums. InfeasibleError if a host's part fits in no way. Deterministic, as ``plan_graph`` is.
    """
    check_asked(effort, "milp", batches)
    if len(cluster.hosts) < 2:
        raise PlanError(f"cluster {cluster.name!r} has one host: there is no second axis, between hosts")
    if type(cluster) is not ClusterSpec:
        raise PlanError("a mesh of two axes is planned by descriptions; give no profile")
    found: list[MeshPlan] = []
    refusals: list[PlanError | InfeasibleError] = []
    for part in _parts(possible.graph, cluster, batches) if leave_out else [cluster]:
        try:
            found.append(_Mesh(possible, part, optimizer, effort, batches).run())
        except (PlanError, InfeasibleError) as e:
            refusals.append(e)
        if found and found[-1].provenance.solver.get("stopped"):
            break
    if not found:
        raise refusals[0]
    best = min(found, key=lambda plan: plan.predicted.as_run_s)
    names = {h.name for h in best.hosts}
    return best.model_copy(update={"left_out": tuple(h.name for h in cluster.hosts if h.name not in names)})


def _parts(graph: Graph, cluster: ClusterSpec, batches: int) -> list[ClusterSpec]:
    """The cluster, and what is left of it without the hosts of its slowest network, of its two slowest, ...: those that
    look best by their arithmetic and what the sums of all gradients take."""
    rates = [min(n.up_bytes_per_s, n.down_bytes_per_s) for h in cluster.hosts if (n := cluster.network(h.name))]
    parts = []
    for least in sorted(set(rates)):
        gone = {h.name for h, rate in zip(cluster.hosts, rates, strict=True) if rate < least}
        if len(cluster.hosts) - len(gone) > 1:
            parts.append(without(cluster, [d.rank for d in cluster.devices if d.host in gone]))
    return sorted(parts, key=lambda part: arithmetic_s(graph, part) + sums_s(graph, part) / batches)[:LOOKS]


def host_cluster(cluster: ClusterSpec, number: int) -> ClusterSpec:
    """One host as the cluster that its part is planned for. Its network is what every host's sums go by: the least of
    all ways out and in, and the longest latency, as all wait for each other, and of messages of the sizes that curves
    name the longest latency and delay together. What a pair's own link lets through is one of H - 1 parts of what a
    host sends."""
    others = len(cluster.hosts) - 1
    rates = [link.bandwidth * others for link in cluster.links if link.bandwidth is not None]
    rate = min([slowest_rate(cluster), *rates])
    firsts = list(accumulate((h.size for h in cluster.hosts[:-1]), initial=0))
    latency_s = _longest_s(cluster.fabric, firsts)
    waits = {round(size): _longest_s(fabric, firsts) for size, fabric in cluster.fabric.by_size}
    given: dict[str, Any] = {"bandwidth": format_rate(rate), "latency": format_time(latency_s)}
    if any(wait_s > latency_s for wait_s in waits.values()):
        given["curve"] = format_curve({size: size / (wait_s + size / rate) for size, wait_s in waits.items()})
    network = DuplexSpec.model_validate(given)
    host = cluster.hosts[number].model_copy(update={"network": network})
    return ClusterSpec(name=f"{cluster.name}/{host.name}", backend=cluster.backend, hosts=(host,))


def _longest_s(fabric: Fabric, ranks: Sequence[int]) -> float:
    """The longest latency between any two of these."""
    return float(fabric.latency_s[np.ix_(ranks, ranks)].max())


@dataclass(frozen=True)
class _Dealt:
    """One way to deal the batch out: every host's plan, its step, what of it are sums over hosts, and the step of all
    as it is run, in which hosts wait for each other."""

    batches: Sizes
    plans: tuple[Plan, ...]
    step_s: tuple[float, ...]
    sums_s: tuple[float, ...]
    as_run_s: float

    @property
    def stopped(self) -> bool:
        """Whether Ctrl-C ended one of the searches."""
        return any(plan.provenance.solver.get("stopped") for plan in self.plans)

    def rates(self) -> list[float]:
        """Samples a second of each host, sums over hosts left out."""
        alone = [max(step - sums, 1e-12) for step, sums in zip(self.step_s, self.sums_s, strict=True)]
        return [batch / s for batch, s in zip(self.batches, alone, strict=True)]

    def to_gain(self) -> float:
        """By which part of the step the slowest host would be faster, if all took as long without their sums."""
        rates, alone = self.rates(), [s - sums for s, sums in zip(self.step_s, self.sums_s, strict=True)]
        return (max(alone) - sum(self.batches) / sum(rates)) / max(self.step_s)


@dataclass
class _Room:
    """How much of the batch a host is tried with: at most ``cap``, between what was seen to fit and what was not."""

    batch: int
    most_seen: int = 0

    def __post_init__(self) -> None:
        self.cap, self.least_too_much = self.batch, self.batch + 1

    def saw(self, size: int, fits: bool) -> None:
        if fits:
            self.most_seen = max(self.most_seen, size)
        elif size < self.least_too_much:
            self.least_too_much = size
            self.cap = max(self.most_seen, min(size - 1, int(size * LESS)))

    def widen(self) -> bool:
        """Half-way towards what did not fit; whether there is any way."""
        self.cap, before = (self.cap + self.least_too_much) // 2, self.cap
        return self.cap > before


@dataclass
class _Mesh:
    possible: Choices
    cluster: ClusterSpec
    optimizer: str
    effort: Effort
    count: int  # of batches of a step
    _plans: dict[object, dict[str, tuple[Plan, float] | None]] = field(default_factory=dict)  # by graph's fingerprint
    _events: dict[int, tuple[list[Event], list[Event] | None]] = field(default_factory=dict)  # by decisions

    @property
    def graph(self) -> Graph:
        return self.possible.graph

    def run(self) -> MeshPlan:
        best = self._deal(speeds(self.graph, self.cluster))
        for _ in range(ROUNDS):
            if best.stopped or best.to_gain() < CLOSE:
                break
            try:
                found = self._deal(best.rates())
            except (PlanError, InfeasibleError):
                break  # what was found stands: by these rates some host would get nothing, or too much
            if found.as_run_s >= best.as_run_s:
                break
            best = found
        return self._assemble(best)

    @cached_property
    def strategies(self) -> dict[str, Strategy]:
        """Between the hosts."""
        return {name: of_batch(strategy) for name, strategy in deal_batch(self.possible).items()}

    def _deal(self, rates: Sequence[float]) -> _Dealt:
        """The batch in proportion to ``rates``; a host in which its part does not fit gets less."""
        batch, hosts = batch_group(self.possible).n, self.cluster.hosts
        rooms = [_Room(batch) for _ in hosts]
        while True:
            while sum(room.cap for room in rooms) < batch:
                widest = max(rooms, key=lambda room: room.least_too_much - room.cap)
                if not widest.widen():
                    raise InfeasibleError(f"of a batch of {batch} there fit at most {_listed(hosts, rooms)}")
            batches = round_shares(rates, batch, [room.cap for room in rooms])
            if 0 in batches:
                name = hosts[batches.index(0)].name
                raise PlanError(
                    f"of a batch of {batch} host {name!r} would get nothing: leave it out, or give a larger batch"
                )
            graphs = [host_graph(self.graph, self.strategies, {BATCH: batches}, h, s.size) for h, s in enumerate(hosts)]
            found = [self._inside(h, graphs[h], batches[h]) for h in range(len(hosts))]
            for room, size, inside in zip(rooms, batches, found, strict=True):
                room.saw(size, inside is not None)
            fitting = [inside for inside in found if inside is not None]
            if len(fitting) == len(hosts):
                plans, sums_s = (tuple(column) for column in zip(*fitting, strict=True))
                step_s = tuple(p.predicted.step_s for p in plans)
                return _Dealt(batches, plans, step_s, sums_s, self._as_run_s(graphs, plans))

    def _as_run_s(self, graphs: Sequence[Graph], plans: Sequence[Plan]) -> float:
        """The step of all hosts as it is run, played together; of several batches the mean of those before the last
        one and that. Hosts of the same decisions do the same at the same time, so one of them is played. Where a host's
        part is too large to be played, the slowest host's step."""
        alone_s = max(plan.predicted.as_run_s for plan in plans)
        if any(plan.predicted.overlapped_s is None for plan in plans):
            return alone_s
        lasts, befores, names = [], [], []
        for key, (plan, host) in {id(plan.strategies): (plan, h) for h, plan in enumerate(plans)}.items():
            part = host_cluster(self.cluster, host)
            if key not in self._events:
                self._events[key] = batches_events(graphs[host], plan, lower(graphs[host], plan), part)
            last, before = self._events[key]
            lasts.append(last)
            befores.append(before or [])
            names.append(tuple(d.name for d in part.devices))
        sums = frozenset(node.name for node in summed(graphs[0]))
        last_s = play_together(lasts, names, sums).step_s
        before_s = play_together(befores, names, sums).step_s if self.count > 1 else 0.0
        return max(alone_s, ((self.count - 1) * before_s + last_s) / self.count)

    def _inside(self, host: int, graph: Graph, batch: int) -> tuple[Plan, float] | None:
        """A host's plan for its part, and the seconds of the sums over hosts in it; None if it does not fit."""
        key = (self.cluster.hosts[host].model_dump_json(include={"devices", "link"}), batch)
        known = self._plans.setdefault(key, {})
        if graph.fingerprint not in known:
            part = host_cluster(self.cluster, host)
            known[graph.fingerprint] = _taken_over(known.values(), graph) or self._search(graph, part, batch)
        return known[graph.fingerprint]

    def _search(self, graph: Graph, part: ClusterSpec, batch: int) -> tuple[Plan, float] | None:
        try:
            plan = plan_graph(choices(graph), part, optimizer=self.optimizer, effort=self.effort, batches=self.count)
        except InfeasibleError as e:
            if batch == 1:
                raise InfeasibleError(f"host {part.hosts[0].name!r} with one sample of the batch: {e}") from None
            return None
        return plan, seconds_of_sums(graph, plan, part.devices[0])

    def _assemble(self, dealt: _Dealt) -> MeshPlan:
        plans = list(dict.fromkeys(id(p) for p in dealt.plans))
        inside = [next(p for p in dealt.plans if id(p) == i) for i in plans]
        batch, whole = batch_group(self.possible), inside[0].provenance
        made = whole.model_copy(
            update={
                "model_fingerprint": self.graph.fingerprint,
                "cluster": self.cluster.name,
                "cluster_fingerprint": self.cluster.fingerprint,
                "world_size": self.cluster.world_size,
                "solver": {"stopped": True} if dealt.stopped else {},
            }
        )
        found = MeshPlan(
            provenance=made,
            hosts=tuple(
                HostPart(name=spec.name, ranks=spec.size, batch=batch, inside=plans.index(id(plan)))
                for spec, batch, plan in zip(self.cluster.hosts, dealt.batches, dealt.plans, strict=True)
            ),
            batch=GroupPlan(n=batch.n, label=batch.label, sizes=dealt.batches),
            between={name: str(strategy) for name, strategy in self.strategies.items()},
            inside=tuple(inside),
            predicted=MeshPrediction(
                step_s=max(dealt.step_s),
                overlapped_s=dealt.as_run_s,
                sums_s=max(dealt.sums_s),
                arithmetic_s=arithmetic_s(self.graph, self.cluster),
                lower_bound_s=least_s(self.graph, self.cluster, self.optimizer, self.count),
            ),
        )
        verify_mesh_plan(found)
        return found


def of_batch(strategy: Strategy) -> Strategy:
    """The strategy with all that it shards in the group ``BATCH``."""
    inputs, outputs = ([_named(p) for p in side] for side in (strategy.inputs, strategy.outputs))
    return Strategy(tuple(p for p in inputs if p is not None), tuple(outputs))


def _named(placement: Placement | None) -> Placement | None:
    return placement._replace(group=BATCH) if isinstance(placement, Shard) else placement


def _listed(hosts: Sequence[HostSpec], rooms: Sequence[_Room]) -> str:
    return ", ".join(f"{room.cap} on {host.name!r}" for host, room in zip(hosts, rooms, strict=True))


def _taken_over(known: Iterable[tuple[Plan, float] | None], graph: Graph) -> tuple[Plan, float] | None:
    """A plan for an equal part on equal devices, for this part: graphs of different places in the batch differ in where
    slices begin and dropout's masks. None if its strategies are not possible here."""
    for found in known:
        if found is not None:
            plan, sums_s = found
            made = plan.provenance.model_copy(update={"model_fingerprint": graph.fingerprint})
            plan = plan.model_copy(update={"provenance": made})
            try:
                lower(graph, plan)
            except PlanError:
                continue
            return plan, sums_s
    return None


def seconds_of_sums(graph: Graph, plan: Plan, device: Device) -> float:
    """What sums over hosts take of one host's step, as they are in the compute that its plan predicts for a device."""
    calls = Calls(graph, Batches.of(graph, plan.gradient_accumulation_steps))
    return sum(parts_seconds(calls.parts(n.name, plan.strategy(n.name)), 1.0, device) for n in summed(graph))
