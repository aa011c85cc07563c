"""From a running job to a cluster description that a person can edit: who sits where, with what device and links.

Ranks of one host name are one host, in the order in which they first appear, so a job must number the ranks of a host
one after another (torchrun does). A GPU of the catalogue is named; any other device gets measured numbers. A host's
network is the fastest that any of its ranks showed towards, and from, a rank of another host; its link the slowest
between its own ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hap.cluster import ClusterSpec
from hap.cost_models.profile import LinkProfile
from hap.errors import ClusterError
from hap.gpus import find_device
from hap.hosts import DeviceSpec, DuplexSpec, HostSpec
from hap.runtime.collectives import Communicator
from hap.runtime.profile_ops import Clock
from hap.runtime.profile_wire import measure_links
from hap.units import format_rate, format_size, format_time

MATMUL = 2048  # on a GPU; on a CPU a quarter
STREAM_BYTES = 256 << 20  # on a GPU; on a CPU an eighth
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Found:
    """One rank's device."""

    host: str
    name: str
    memory_bytes: int
    tflops: dict[str, float]
    bytes_per_s: float
    launch_s: float


def discover(comm: Communicator, name: str = "discovered") -> ClusterSpec:
    """Collective. ClusterError if the ranks of a host are not numbered one after another."""
    found = comm.gather_objects(look(comm.device))
    links = measure_links(comm.device) if comm.world_size > 1 else ()
    described = describe(found, links, "nccl" if comm.device.type == "cuda" else "gloo", name)
    return ClusterSpec.from_yaml(comm.from_rank_zero(described.to_yaml()))


def look(device: torch.device) -> Found:
    """This rank's device, measured: the largest matmul and stream that are quick."""
    clock, on_gpu = Clock(device), device.type == "cuda"
    n, nbytes = (MATMUL, STREAM_BYTES) if on_gpu else (MATMUL // 4, STREAM_BYTES // 8)
    tflops = {}
    for dtype_name, dtype in DTYPES.items() if on_gpu else [("float32", torch.float32)]:
        a = torch.randn(n, n, device=device).to(dtype)
        tflops[dtype_name] = float(f"{2 * n**3 / clock.seconds(lambda a=a: a @ a)[0] / 1e12:.3g}")  # type: ignore[misc]
    x = torch.ones(nbytes // 4, device=device)
    y = torch.empty_like(x)
    stream_s, _ = clock.seconds(lambda: torch.add(x, 1.0, out=y))
    tiny = torch.ones(4, device=device)
    launch_s, _ = clock.seconds(lambda: [tiny + 1.0 for _ in range(100)])
    if on_gpu:
        properties = torch.cuda.get_device_properties(device)
        label, memory = properties.name, properties.total_memory
    else:
        label, memory = "cpu", _host_memory()
    return Found(socket.gethostname(), label, memory, tflops, 2 * nbytes / stream_s, launch_s / 100)


def _host_memory() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe(found: Sequence[Found], links: Sequence[LinkProfile], backend: str, name: str) -> ClusterSpec:
    """The description. ``found`` by rank. Memory of CPU ranks is divided among those of a host."""
    names = list(dict.fromkeys(f.host for f in found))
    members = {h: [r for r, f in enumerate(found) if f.host == h] for h in names}
    order = [r for h in names for r in members[h]]
    if order != list(range(len(found))):
        raise ClusterError("the ranks of a host are not numbered one after another; start the job with torchrun")
    hosts = []
    for i, host in enumerate(names):
        mine = members[host]
        devices = tuple(_device(found[r], len(mine)) for r in mine)
        inside = [k for k in links if k.source in mine and k.target in mine]
        leaving = [k for k in links if k.source in mine and k.target not in mine]
        arriving = [k for k in links if k.target in mine and k.source not in mine]
        hosts.append(
            HostSpec(
                name=_host_name(host, i),
                devices=devices,
                link=_duplex(inside, inside, slowest=True) if inside else None,
                network=_duplex(leaving, arriving, slowest=False) if leaving else None,
            )
        )
    return ClusterSpec(name=name, backend=backend, hosts=tuple(hosts))  # type: ignore[arg-type]


def _host_name(host: str, index: int) -> str:
    kept = "".join(c if c.isalnum() or c in "_.-" else "-" for c in host).lstrip("_.-")
    return kept or f"host{index}"


def _device(found: Found, sharing: int) -> DeviceSpec:
    if (gpu := find_device(found.name, found.memory_bytes)) is not None:
        return DeviceSpec.model_validate({"gpu": gpu.name, "memory": format_size(found.memory_bytes)})
    on_cpu = found.name == "cpu"
    return DeviceSpec.model_validate(
        {
            "name": found.name,
            "tflops": found.tflops,
            "memory": format_size(found.memory_bytes // (sharing if on_cpu else 1)),
            "memory_bandwidth": format_rate(float(f"{found.bytes_per_s:.3g}")),
            "launch": format_time(float(f"{found.launch_s:.3g}")),
        }
    )


def _duplex(out: Sequence[LinkProfile], back: Sequence[LinkProfile], *, slowest: bool) -> DuplexSpec:
    choose = min if slowest else max
    up, down = (choose(k.bytes_per_s for k in some) for some in (out, back))
    latency = min(k.latency_s for k in (*out, *back))
    return DuplexSpec.model_validate(
        {
            "up": format_rate(float(f"{up:.3g}")),
            "down": format_rate(float(f"{down:.3g}")),
            "latency": format_time(float(f"{latency:.3g}")),
        }
    )
