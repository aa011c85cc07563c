"""The cluster as a diagnosis found it: its description with what turned out slower, to be planned for.

    hap diagnose runs/1 -o found.yaml && hap plan model.py:build --cluster found.yaml

A straggler's rates of arithmetic and memory are divided by how many times as long it takes, a slow sender's or
receiver's network by the same, and a slow link between hosts becomes a limit of its own. Everything else stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pydantic

from hap.cluster import ClusterSpec
from hap.diagnosis.finding import Finding
from hap.errors import ClusterError
from hap.units import format_rate, format_size, format_time

Body = dict[str, Any]


def as_found(cluster: ClusterSpec, findings: Sequence[Finding]) -> tuple[ClusterSpec, tuple[str, ...]]:
    """(the cluster, what was changed in words). ClusterError if nothing that was found has a place in a description."""
    body = cluster.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    body = {"name": cluster.name, "backend": cluster.backend, **body}
    said = []
    for finding in findings:
        if finding.factor is None or finding.factor <= 1:
            continue
        match finding.syndrome:
            case "compute straggler" | "misjudged devices":
                said += [_slower_device(body, cluster, rank, finding.factor) for rank in finding.ranks]
            case "slow sender" | "slow receiver":
                side = "up" if finding.syndrome == "slow sender" else "down"
                said += [_slower_network(body, cluster, rank, side, finding.factor) for rank in finding.ranks]
            case "slow link":
                source, target = finding.ranks
                said.append(_slower_link(body, cluster, source, target, finding.factor))
    said = list(dict.fromkeys(filter(None, said)))
    if not said:
        raise ClusterError("nothing was found that a cluster file can tell of")
    try:
        return ClusterSpec.model_validate({**body, "name": f"{cluster.name}-as-found"}), tuple(said)
    except pydantic.ValidationError as e:
        raise ClusterError(f"the cluster as found: {e.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def _slower_device(body: Body, cluster: ClusterSpec, rank: int, factor: float) -> str:
    """Its entry cut in up to three: those before it, itself with numbers of its own, those after it."""
    device = cluster.devices[rank]
    host = _host(body, cluster, rank)
    index = rank - min(d.rank for d in cluster.devices if d.host == device.host)
    entries: list[Body] = []
    for entry in host["devices"]:
        count = entry.get("count", 1)
        if not 0 <= index < count:
            entries.append(entry)
        else:
            own = {
                **entry,
                "count": 1,
                "tflops": {dtype: float(f"{rate / factor:.6g}") for dtype, rate in device.tflops.items()},
                "memory": format_size(device.memory_bytes),
                "memory_bandwidth": format_rate(device.memory_bandwidth_bytes_per_s / factor),
                "launch": format_time(device.launch_s * factor),
            }
            entries += [{**entry, "count": index}] if index else []
            entries += [own]
            entries += [{**entry, "count": count - index - 1}] if count > index + 1 else []
        index -= count
    host["devices"] = entries
    return f"{device.name}: 1/{factor:.2f} of its rates"


def _slower_network(body: Body, cluster: ClusterSpec, rank: int, side: str, factor: float) -> str:
    name = cluster.host_of(rank)
    rates = cluster.network(name)
    if rates is None:
        return ""
    up, down = rates
    up, down = (up / factor, down) if side == "up" else (up, down / factor)
    host = _host(body, cluster, rank)
    kept = {key: value for key, value in host["network"].items() if key == "latency"}
    host["network"] = {**kept, "up": format_rate(up), "down": format_rate(down)}
    return f"{name}: 1/{factor:.2f} of its network's rate {'out' if side == 'up' else 'in'}"


def _slower_link(body: Body, cluster: ClusterSpec, source: int, target: int, factor: float) -> str:
    a, b = cluster.host_of(source), cluster.host_of(target)
    if a == b:
        return ""
    rate = cluster.link(source, target).bandwidth_bytes_per_s / factor
    links = {(p["from"], p["to"]): dict(p) for p in body.get("links", ())}
    before = links.get((a, b), {"from": a, "to": b})
    before.pop("curve", None)  # of the link as it was
    links[a, b] = {**before, "bandwidth": format_rate(rate)}
    body["links"] = list(links.values())
    return f"{a} to {b}: {format_rate(rate)}"


def _host(body: Body, cluster: ClusterSpec, rank: int) -> Body:
    name = cluster.host_of(rank)
    hosts: list[Body] = body["hosts"]
    return next(host for host in hosts if host["name"] == name)
