"""``hap plan --add 8xA100-40GB@12.5 --without host3 --link left-right=25Gbit/s``: the cluster beside what it could be.

Every change is a variant of its own, and all of them together one more. Each is planned like any cluster; they are
ranked by samples a second, and by samples per money where every host has a price. What a faster link costs nobody says:
a cluster with one has no price. An added host has the network of the
fastest host there is, and its own GPUs' link if the catalogue knows one, else PCIe 4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hap.build import BuiltModel
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.errors import ClusterError, InfeasibleError
from hap.gpus import find_gpu, suggest
from hap.reduce_dtype import ReduceDtype
from hap.report.explanation import cluster_body
from hap.report.words import quantity, seconds, table
from hap.rules.choices import batch_size, choices
from hap.search.planner import Effort, plan_graph
from hap.units import format_rate, parse_rate
from hap.whatif import Body, rebuilt

Change = tuple[str, str]  # add, without or link; and what was said
NOW, ALL = "as it is", "all of these"
_ADD = re.compile(r"([1-9]\d{0,3})x([^@\s]+)(?:@(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class Variant:
    """One cluster. ``step_s`` is None where no plan fits, and ``why_not`` says so. ``per_money``: samples for one unit
    of what an hour costs."""

    name: str
    devices: int
    step_s: float | None
    samples_per_s: float | None
    price_per_hour: float | None
    why_not: str = ""

    @property
    def per_money(self) -> float | None:
        if self.samples_per_s is None or not self.price_per_hour:
            return None
        return self.samples_per_s * 3600 / self.price_per_hour


@dataclass(frozen=True)
class Ranking:
    """The variants, the fastest first."""

    variants: tuple[Variant, ...]

    def to_json(self) -> list[dict[str, Any]]:
        return [{**asdict(v), "samples_per_money": v.per_money} for v in self.variants]

    def __str__(self) -> str:
        now = next(v for v in self.variants if v.name == NOW)
        rows = [["", "devices", "step", "samples/s", "beside now", "an hour", "samples per money"]]
        for v in self.variants:
            if v.step_s is None or v.samples_per_s is None:
                rows.append([v.name, str(v.devices), f"does not fit: {v.why_not}", "", "", "", ""])
                continue
            beside = f"{v.samples_per_s / now.samples_per_s - 1:+.1%}" if now.samples_per_s else ""
            price = "-" if v.price_per_hour is None else f"{v.price_per_hour:.2f}"
            money = "-" if v.per_money is None else quantity(v.per_money)
            rows.append([v.name, str(v.devices), seconds(v.step_s), quantity(v.samples_per_s), beside, price, money])
        lines = table(rows, right=(1, 2, 3, 4, 5, 6))
        priced = [v for v in self.variants if v.per_money is not None]
        if priced:
            best = max(priced, key=lambda v: v.per_money or 0.0)
            lines += ["", f"most samples for the money: {best.name}"]
        return "\n".join(lines)


def compare(
    built: BuiltModel,
    cluster: ClusterSpec,
    changes: Sequence[Change],
    *,
    optimizer: str,
    effort: Effort,
    batches: int = 1,
    reduce_dtype: ReduceDtype = None,
) -> Ranking:
    """Plan every variant, for steps of so many batches, with gradients exchanged in this dtype. ClusterError for a
    change that makes no sense."""
    variants: list[tuple[str, Sequence[Change]]] = [(NOW, ())]
    variants += [(_words(change), [change]) for change in changes]
    if len(changes) > 1:
        variants.append((ALL, changes))
    graph = capture(
        built.model,
        built.example_inputs,
        loss_fn=built.loss_fn,
        example_targets=built.example_targets,
        reduce_dtype=reduce_dtype,
    )
    found, batch = choices(graph), batch_size(graph)
    judged = []
    for name, made in variants:
        spec = changed(cluster, made) if made else cluster
        price = None if any(kind == "link" for kind, _ in made) else _price(spec)
        try:
            plan = plan_graph(found, spec, optimizer=optimizer, effort=effort, batches=batches)
        except InfeasibleError as e:
            judged.append(Variant(name, spec.world_size, None, None, price, str(e)))
            continue
        step_s = plan.predicted.as_run_s
        judged.append(Variant(name, spec.world_size, step_s, (batch or 1) / step_s, price))
    return Ranking(tuple(sorted(judged, key=lambda v: -(v.samples_per_s or 0.0))))


def _words(change: Change) -> str:
    return f"{change[0]} {change[1]}"


def _price(cluster: ClusterSpec) -> float | None:
    prices = [h.price_per_hour for h in cluster.hosts]
    return None if None in prices else sum(p for p in prices if p is not None)


def changed(cluster: ClusterSpec, changes: Sequence[Change]) -> ClusterSpec:
    """The cluster after all changes: additions first, then links, removals last."""
    body = cluster_body(cluster)
    for kind in ("add", "link", "without"):
        for change, said in changes:
            if change == kind:
                body = _EDITS[kind](body, said)
    return rebuilt(body)


def _add(body: Body, said: str) -> Body:
    match = _ADD.fullmatch(said)
    if match is None:
        raise ClusterError(f"--add {said!r}: expected a number and a GPU, such as 8xA100-40GB or 8xA100-40GB@12.5")
    count, gpu = int(match[1]), _gpu(match[2])
    names = [host["name"] for host in body["hosts"]]
    networks = [host["network"] for host in body["hosts"] if "network" in host]
    if not networks:
        raise ClusterError(f"--add {said}: no host has a network, so a new one cannot be reached; add network: {{...}}")
    name = next(n for n in (f"new-{i}" for i in range(1, len(names) + 2)) if n not in names)
    host = {
        "name": name,
        "devices": [{"gpu": gpu.name, "count": count}],
        "network": max(networks, key=lambda n: min(_rates(n))),
    }
    if count > 1:
        host["link"] = gpu.link if gpu.link in ("nvlink", "xgmi") and gpu.link_bytes_per_s else "pcie4"
    if match[3] is not None:
        host["price_per_hour"] = float(match[3])
    return {**body, "hosts": [*body["hosts"], host]}


def _gpu(name: str) -> Any:
    try:
        return find_gpu(name)
    except ValueError as e:
        raise ClusterError(f"--add: {e}") from None


def _rates(network: Body) -> tuple[float, float]:
    """(up, down) in bytes/s."""
    both = network.get("bandwidth")
    return parse_rate(network.get("up", both)), parse_rate(network.get("down", both))


def _without(body: Body, said: str) -> Body:
    _known(body, said, "--without")
    hosts = [host for host in body["hosts"] if host["name"] != said]
    if not hosts:
        raise ClusterError(f"--without {said}: no host would be left")
    links = [p for p in body.get("links", ()) if said not in (p["from"], p["to"])]
    return {**body, "hosts": hosts, "links": links}


def _known(body: Body, name: str, option: str) -> None:
    names = [host["name"] for host in body["hosts"]]
    if name not in names:
        raise ClusterError(f"{option}: no host {name!r}{suggest(name, names)} (hosts: {', '.join(names)})")


def _link(body: Body, said: str) -> Body:
    """This bandwidth both ways between two hosts. Where a host's network has less it is raised, and what it had stays
    the limit towards all others."""
    pair, _, rate = said.partition("=")
    a, b = _pair(body, pair, said)
    try:
        bandwidth = parse_rate(rate)
    except ValueError as e:
        raise ClusterError(f"--link {said}: {e}") from None
    links = {(p["from"], p["to"]): dict(p) for p in body.get("links", ())}
    hosts = [dict(host) for host in body["hosts"]]
    old = {host["name"]: _rates(host["network"]) for host in hosts}
    for host in hosts:
        up, down = old[host["name"]]
        if host["name"] in (a, b) and bandwidth > min(up, down):
            for other in (h["name"] for h in hosts if h["name"] not in (a, b)):
                _limit(links, host["name"], other, min(up, old[other][1]))
                _limit(links, other, host["name"], min(down, old[other][0]))
            raised = [format_rate(max(r, bandwidth)) for r in (up, down)]
            kept = {k: v for k, v in host["network"].items() if k not in ("bandwidth", "up", "down")}
            host["network"] = {"up": raised[0], "down": raised[1], **kept}
    for source, target in ((a, b), (b, a)):
        before = links.get((source, target), {"from": source, "to": target})
        before.pop("curve", None)  # of the link as it was
        links[source, target] = {**before, "bandwidth": format_rate(bandwidth)}
    return {**body, "hosts": hosts, "links": list(links.values())}


def _limit(links: dict[tuple[str, str], Body], source: str, target: str, rate: float) -> None:
    path = links.setdefault((source, target), {"from": source, "to": target})
    path.setdefault("bandwidth", format_rate(rate))


def _pair(body: Body, pair: str, said: str) -> tuple[str, str]:
    """Host names may hold dashes: the one split at which both are hosts."""
    names = [host["name"] for host in body["hosts"]]
    parts = pair.split("-")
    splits = [("-".join(parts[:i]), "-".join(parts[i:])) for i in range(1, len(parts))]
    found = [(a, b) for a, b in splits if a in names and b in names and a != b]
    if len(found) != 1:
        raise ClusterError(f"--link {said}: expected HOST-HOST=RATE, two of the hosts {', '.join(names)}")
    if any("network" not in host for host in body["hosts"]):
        raise ClusterError(f"--link {said}: every host needs a network")
    return found[0]


_EDITS = {"add": _add, "link": _link, "without": _without}
