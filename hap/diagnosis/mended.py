"""The cluster as a diagnosis found it: its description with what turned out slower, to be planned for.

    hap diagnose runs/1 -o found.yaml && hap plan model.py:build --cluster found.yaml

A straggler's rates of arithmetic and memory are divided by how many times as long it takes, a slow sender's or
receiver's network by the same, and a slow link between hosts becomes a limit of its own. Everything else stays. Of
findings about one device, way or link the largest factor counts: ranks of a host share its network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pydantic

from hap.cluster import ClusterSpec
from hap.diagnosis.finding import Finding
from hap.errors import ClusterError
from hap.units import format_rate, format_size, format_time

Body = dict[str, Any]
What = Literal["device", "up", "down", "link"]
WHAT: dict[str, What] = {
    "compute straggler": "device",
    "misjudged devices": "device",
    "slow sender": "up",
    "slow receiver": "down",
    "slow link": "link",
}


def as_found(cluster: ClusterSpec, findings: Sequence[Finding]) -> tuple[ClusterSpec, tuple[str, ...]]:
    """(the cluster, what was changed in words). ClusterError if nothing that was found has a place in a description."""
    body = cluster.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    body = {"name": cluster.name, "backend": cluster.backend, **body}
    said = []
    for (what, source, target), factor in _slower(cluster, findings).items():
        match what:
            case "device":
                said.append(_slower_device(body, cluster, source, factor))
            case "link":
                said.append(_slower_link(body, cluster, source, target, factor))
            case side:
                said.append(_slower_network(body, cluster, source, side, factor))
    said = list(filter(None, said))
    if not said:
        raise ClusterError("nothing was found that a cluster file can tell of")
    try:
        return ClusterSpec.model_validate({**body, "name": f"{cluster.name}-as-found"}), tuple(said)
    except pydantic.ValidationError as e:
        raise ClusterError(f"the cluster as found: {e.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def _slower(cluster: ClusterSpec, findings: Sequence[Finding]) -> dict[tuple[What, int, int], float]:
    """The factor of all that became slower, by what it is and whose: a rank's, or a host's, by its first rank."""
    first = {device.host: device.rank for device in reversed(cluster.devices)}
    found: dict[tuple[What, int, int], float] = {}
    for finding in findings:
        if finding.factor is None or finding.factor <= 1 or finding.syndrome not in WHAT:
            continue
        what = WHAT[finding.syndrome]
        for ends in [finding.ranks] if what == "link" else [(rank, rank) for rank in finding.ranks]:
            source, target = ends if what == "device" else (first[cluster.host_of(rank)] for rank in ends)
            found[what, source, target] = max(finding.factor, found.get((what, source, target), 1.0))
    return found


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


def _slower_network(body: Body, cluster: ClusterSpec, rank: int, side: Literal["up", "down"], factor: float) -> str:
    """The other way stays as the body has it, which may have become slower before."""
    name = cluster.host_of(rank)
    rates = cluster.network(name)
    if rates is None:
        return ""
    host = _host(body, cluster, rank)
    kept = {key: value for key, value in host["network"].items() if key in ("latency", "up", "down")}
    up, down = rates
    slower = format_rate((up if side == "up" else down) / factor)
    host["network"] = {"up": format_rate(up), "down": format_rate(down), **kept, side: slower}
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
