"""Other clusters than the one at hand: edits of a description, and what a plan would gain from better hardware.

Edits work on the plain description (``cluster_body``), with catalogue numbers written out where they are changed, and
end in ``ClusterSpec.model_validate``, so that an edited cluster is as checked as any.

``what_helps`` answers the question that the duals of the shares' linear program answer, in finite steps: the strategies
stay, one kind of resource gets better, the shares are dealt out anew (``search.ratios``) and rounded, and the whole is
judged by ``evaluate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic

from hap.cluster import ClusterSpec
from hap.codegen.lowering import lower
from hap.conversion import Need
from hap.cost_models.evaluate import Evaluation, evaluate
from hap.cost_models.profile import CalibratedCluster
from hap.deferral import Batches
from hap.errors import ClusterError
from hap.graph import Graph
from hap.hosts import HostSpec, LinkSpec, format_curve
from hap.placement import GroupSizes
from hap.plan import Help, Plan, Strategy
from hap.report.explanation import cluster_body, make_explanation, needs_of, strategies_of
from hap.search.classes import find_bundles, find_classes
from hap.search.found import used_groups
from hap.search.judge import played
from hap.search.prices import Facts
from hap.search.ratios import best_shares
from hap.search.rounding import round_shares
from hap.units import format_rate, format_size, format_time, parse_rate, parse_time

Body = dict[str, Any]
FASTER = 1.25
MOST_HOSTS = 8  # beyond this many, single hosts are not asked about
MOST_RANKS = 128  # beyond this many, the linear program takes longer than a reader waits


def rebuilt(body: Body) -> ClusterSpec:
    """The cluster of an edited description. ClusterError, one line, if the edit makes no sense."""
    try:
        return ClusterSpec.model_validate(body)
    except pydantic.ValidationError as e:
        raise ClusterError(f"edited cluster: {e.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def faster_devices(cluster: ClusterSpec, kind: str, factor: float) -> ClusterSpec:
    """All devices of one label with ``factor`` times the rates of arithmetic and memory."""
    body = cluster_body(cluster)
    for host, spec in zip(body["hosts"], cluster.hosts, strict=True):
        for entry, device in zip(host["devices"], spec.devices, strict=True):
            if device.label == kind:
                now = device.device(0, spec.name, 0)
                entry["tflops"] = {dtype: rate * factor for dtype, rate in now.tflops.items()}
                entry["memory_bandwidth"] = format_rate(now.memory_bandwidth_bytes_per_s * factor)
                entry["memory"] = format_size(now.memory_bytes)
    return rebuilt(body)


def faster_network(cluster: ClusterSpec, factor: float, host: str | None = None) -> ClusterSpec:
    """The networks of all hosts, or of one, with ``factor`` times the bandwidth; so the single links between hosts."""
    body = cluster_body(cluster)
    for entry in body["hosts"]:
        if "network" in entry and host in (None, entry["name"]):
            entry["network"] = _faster(entry["network"], factor)
    body["links"] = [_faster(p, factor) if host in (None, p["from"], p["to"]) else p for p in body.get("links", ())]
    return rebuilt(body)


def faster_links(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """Links inside hosts with ``factor`` times the bandwidth."""
    body = cluster_body(cluster)
    for entry, spec in zip(body["hosts"], cluster.hosts, strict=True):
        if spec.inside is not None:
            entry["link"] = _faster(_in_numbers(spec), factor)
    return rebuilt(body)


def shorter_latency(cluster: ClusterSpec) -> ClusterSpec:
    """Half the latency everywhere, launches of kernels included."""
    body = cluster_body(cluster)
    for entry, spec in zip(body["hosts"], cluster.hosts, strict=True):
        for device, given in zip(entry["devices"], spec.devices, strict=True):
            device["launch"] = format_time(given.launch / 2)
        if "network" in entry:
            entry["network"] = _sooner(entry["network"])
        if spec.inside is not None:
            entry["link"] = _sooner(_in_numbers(spec))
    body["links"] = [_sooner(p) if "latency" in p else p for p in body.get("links", ())]
    return rebuilt(body)


def _in_numbers(host: HostSpec) -> Body:
    """The link inside a host, still of its kind and with its curve."""
    inside = host.inside
    assert inside is not None
    rates = {"up": format_rate(inside.up_bytes_per_s), "down": format_rate(inside.down_bytes_per_s)}
    kind = {"kind": host.link_kind} if host.link_kind else {}
    curve = {"curve": format_curve(host.link.curve)} if isinstance(host.link, LinkSpec) and host.link.curve else {}
    return {**rates, "latency": format_time(inside.latency_s), **kind, **curve}


def _faster(duplex: Body, factor: float) -> Body:
    rates = ("bandwidth", "up", "down")
    return {k: format_rate(parse_rate(v) * factor) if k in rates else v for k, v in duplex.items()}


def _sooner(duplex: Body) -> Body:
    return {**duplex, "latency": format_time(parse_time(duplex["latency"]) / 2)}


def better_clusters(cluster: ClusterSpec) -> Iterator[tuple[str, Callable[[], ClusterSpec]]]:
    """Changes in words, and the cluster after each."""
    for kind in dict.fromkeys(d.gpu for d in cluster.devices):
        percent = f"{FASTER - 1:.0%}"
        yield f"{kind} {percent} faster", lambda kind=kind: faster_devices(cluster, kind, FASTER)  # type: ignore[misc]
    if len(cluster.hosts) > 1:
        yield "twice the bandwidth between hosts", lambda: faster_network(cluster, 2.0)
        for host in cluster.hosts if 2 < len(cluster.hosts) <= MOST_HOSTS else ():
            words = f"twice the network of {host.name}"
            yield words, lambda host=host: faster_network(cluster, 2.0, host.name)  # type: ignore[misc]
    if any(h.size > 1 for h in cluster.hosts):
        yield "twice the bandwidth inside hosts", lambda: faster_links(cluster, 2.0)
    yield "half the latency, of links and of kernel launches", lambda: shorter_latency(cluster)


def what_helps(plan: Plan, graph: Graph, cluster: ClusterSpec) -> tuple[Help, ...]:
    """Every change of ``better_clusters`` with the step it leads to, the best first. Empty for a measured cluster (its
    speeds are not the description's) and for more than ``MOST_RANKS``."""
    if isinstance(cluster, CalibratedCluster) or cluster.world_size > MOST_RANKS:
        return ()
    fixed = _Fixed.of(plan, graph)
    found = [Help(change=words, step_s=fixed.step_s(make())) for words, make in better_clusters(cluster)]
    return tuple(sorted(found, key=lambda h: h.step_s))


def explained(plan: Plan, graph: Graph, cluster: ClusterSpec, *, helps: bool) -> Plan:
    """The plan with its explanation."""
    found = what_helps(plan, graph, cluster) if helps else ()
    as_run = played(graph, plan, lower(graph, plan), cluster)
    return plan.model_copy(update={"explanation": make_explanation(plan, graph, cluster, found, as_run)})


@dataclass(frozen=True)
class _Fixed:
    """What stays when the cluster changes: the plan's strategies, and which groups move together."""

    plan: Plan
    graph: Graph
    strategies: Mapping[str, Strategy]
    candidates: Mapping[str, tuple[Strategy, ...]]
    needs: tuple[Need, ...]
    bundles: tuple[tuple[str, ...], ...]
    batches: Batches

    @classmethod
    def of(cls, plan: Plan, graph: Graph) -> _Fixed:
        strategies = strategies_of(plan)
        candidates = {name: (strategy,) for name, strategy in strategies.items()}
        used = frozenset(used_groups(strategies.values()))
        bundles = find_bundles(find_classes(graph, candidates), candidates)
        moving = tuple(b for b in bundles if used.intersection(b))
        batches = Batches.of(graph, plan.gradient_accumulation_steps)
        return cls(plan, graph, strategies, candidates, needs_of(plan, graph, strategies), moving, batches)

    def step_s(self, cluster: ClusterSpec) -> float:
        """The step on another cluster of as many ranks, with the plan's shares or better ones."""
        sizes, optimizer = self.plan.sizes, self.plan.provenance.optimizer
        before = self._judge(sizes, cluster)
        shares = best_shares(
            Facts(self.graph, self.candidates, cluster, optimizer, self.plan.recomputed, self.batches),
            self.strategies,
            sizes,
            before,
            bundles=self.bundles,
            fixed={},
            regather=bool(self.plan.provenance.solver.get("regather", False)),
        )
        found = shares or {}
        anew = {name: round_shares(found[name], sum(own)) if name in found else own for name, own in sizes.items()}
        after = self._judge(anew, cluster)
        return float(f"{min(before.step_s, after.step_s if after.fits else before.step_s):.4g}")

    def _judge(self, sizes: GroupSizes, cluster: ClusterSpec) -> Evaluation:
        optimizer = self.plan.provenance.optimizer
        again = self.plan.repeated
        return evaluate(
            self.graph,
            self.strategies,
            sizes,
            cluster,
            needs=self.needs,
            optimizer=optimizer,
            recomputed=again,
            postponed=self.plan.postponed,
            batches=self.batches.count,
        )
