"""Emulated inequality: makes CPU ranks as unequal as the devices of the cluster file.

Four ranks on one machine are equal, so an unequal cluster has to be played. A ``Throttle`` does that with the clock
alone: between two collectives it reads the CPU time ``c`` that the rank's thread spent computing, and lets the wall
clock reach ``c * slowdown`` before the next collective starts. Sleeping costs no CPU, so the ranks get their turns as
long as sum(1 / slowdown) stays below the number of cores; ``emulate`` chooses the slowdowns so,

    slowdown_r = k * (fastest device's float32 TFLOP/s) / (device r's),     sum over r of 1 / slowdown_r = LOAD * cores,

with k >= 1, and writes what a rank then really has into a copy of the cluster: one core's measured FLOP/s and bytes/s
divided by its slowdown, its overhead per call times it. Plans made for that copy predict this machine.

What is emulated: the ratios between devices' compute. What is not: links are this machine's loopback, as measured,
whatever the cluster file says, and memory limits bind the planner only. Nothing here runs on real GPUs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hap.cluster import ClusterSpec, DeviceSpec, DuplexSpec, HostSpec, Link
from hap.errors import ClusterError
from hap.units import format_rate, format_size, format_time

NOTICE = "compute speeds are emulated on this machine's CPU; links are its loopback, not the cluster file's"
LOAD = 0.5  # of the cores; the rest is for the collectives, which are not throttled, and for whatever else runs here
_CARRY_S = 1e-3  # a rank that lost more than this (descheduled, paging) does not catch up by running unthrottled


@dataclass(frozen=True)
class HostRate:
    """What one thread of this machine does: float32 matmul FLOP/s, streamed bytes/s, seconds of overhead per call."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float


def measure_host() -> HostRate:
    """Probe the calling thread for half a second. The best of several runs: a busy neighbour only makes runs slower.

    The matmul has a transformer's shape (1024 x 256 @ 256 x 1024), the stream a tensor larger than the caches. A call
    is made as a program makes it, with the view that often goes before, on a tensor so small that only dispatch counts.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = torch.ones(1024, 256), torch.ones(256, 1024)
        matmul_s = _best_time(lambda: a @ b, repeats=20)
        x, y = torch.ones(8 << 20), torch.ones(8 << 20)
        stream_s = _best_time(lambda: torch.add(x, 1.0, out=y), repeats=8)
        tiny = torch.ones(4)
        view, add = torch.ops.aten.view.default, torch.ops.aten.add.Tensor
        launch_s = _best_time(lambda: [add(view(tiny, [2, 2]), 1.0) for _ in range(200)], repeats=8) / 200
    finally:
        torch.set_num_threads(threads)
    return HostRate(2 * 1024 * 256 * 1024 / matmul_s, 2 * x.nbytes / stream_s, launch_s)


def _best_time(call: Callable[[], object], repeats: int) -> float:
    """The smallest CPU time in seconds of ``repeats`` calls after one warm-up call."""
    call()
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return best


class Core:
    """How fast this core is just now, by a fixed piece of work, so that a played device keeps its speed though the core
    that plays it does not: on a shared machine the same work takes more CPU time for a second or for minutes, as
    neighbours use the core's other thread, its caches and its power.

    The work is matmuls that stay in the caches and a few calls on next to nothing, about as much of each as models do.
    ``standard_s``: what it takes (``work_seconds``) on a core of full speed, as anyone may define it, the same for all
    seconds that are to be compared.
    """

    MATMULS, CALLS, TRIES = 4, 30, 3

    def __init__(self, standard_s: float) -> None:
        assert standard_s > 0
        self.standard_s = standard_s
        self._a, self._b, self._tiny = torch.ones(128, 128), torch.ones(128, 128), torch.ones(4)

    def factor(self) -> float:
        """CPU seconds of now times this are seconds of a core of full speed."""
        return self.standard_s / _best_time(self._work, repeats=self.TRIES)

    @classmethod
    def work_seconds(cls, repeats: int = 500) -> float:
        """The least CPU time of the work that is found now: a standard for what is measured after it."""
        return _best_time(cls(1.0)._work, repeats)

    def _work(self) -> None:
        for _ in range(self.MATMULS):
            self._a @ self._b
        for _ in range(self.CALLS):
            self._tiny + self._tiny


def measure_loopback(world_size: int, repeats: int = 10, group: dist.ProcessGroup | None = None) -> Link:
    """What one rank sends to the others while all do so, by Gloo's all-to-all. Collective: every rank calls it.

    Latency is the median time of a one-element exchange, bandwidth the slope up to 256 kB for each peer. The result is
    the slowest rank's, so all ranks get the same numbers. ``group``: the ``world_size`` ranks that this one exchanges
    with, where all do so with a part of the ranks each.
    """
    if world_size == 1:
        return Link(1e9, 0.0)

    def median_s(elements: int) -> float:
        give, take = torch.ones(world_size * elements), torch.empty(world_size * elements)
        times = []
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            dist.all_to_all_single(take, give, group=group)
            times.append(time.perf_counter() - start)
        return sorted(times)[repeats // 2]

    median_s(1)
    elements = 1 << 16
    small, large = median_s(1), median_s(elements)
    seconds = torch.tensor([small, max(large - small, 1e-6)], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return Link((world_size - 1) * elements * 4 / float(seconds[1]), float(seconds[0]))


def usable_cores() -> float:
    """What this process may use: its CPU affinity, and a container's quota (Linux, cgroup v2) if that is less."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        cores = cores if limit == "max" else min(cores, int(limit) / int(period))
    return cores


def slowdowns(cluster: ClusterSpec, cores: float | None = None, load: float = LOAD) -> tuple[float, ...]:
    """By rank; see the module docstring. ClusterError if a device does not give its float32 rate."""
    for device in cluster.devices:
        if "float32" not in device.tflops:
            raise ClusterError(f"{device.name}: emulation needs its float32 TFLOP/s")
    rates = [device.tflops["float32"] for device in cluster.devices]
    cores = usable_cores() if cores is None else cores
    fastest = max(1.0, sum(rates) / max(rates) / (load * cores))
    return tuple(fastest * max(rates) / rate for rate in rates)


def emulated_cluster(cluster: ClusterSpec, host: HostRate, loopback: Link) -> ClusterSpec:
    """The same hosts, devices, names and memory; speeds and links as this machine plays them."""
    factors = iter(slowdowns(cluster))
    link = DuplexSpec.model_validate(
        {"bandwidth": format_rate(loopback.bandwidth_bytes_per_s), "latency": format_time(loopback.latency_s)}
    )
    hosts = []
    for spec in cluster.hosts:
        devices = tuple(_played(one, host, next(factors)) for one in spec.devices for _ in range(one.count))
        network = None if spec.network is None else link
        hosts.append(
            HostSpec(name=spec.name, devices=devices, link=link if len(devices) > 1 else None, network=network)
        )
    return ClusterSpec(name=f"{cluster.name}-emulated", backend="gloo", hosts=tuple(hosts))


def play(cluster: ClusterSpec) -> tuple[ClusterSpec, Throttle]:
    """The cluster as this machine emulates it, the same on every rank, and this rank's throttle. Collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cluster.check_world_size(world_size)
    factors = slowdowns(cluster)
    loopback = measure_loopback(world_size)
    dist.barrier()  # the others wait, idle, while rank 0 measures
    played = [emulated_cluster(cluster, measure_host(), loopback).to_yaml() if rank == 0 else ""]
    dist.broadcast_object_list(played)
    return ClusterSpec.from_yaml(played[0], "the emulated cluster"), Throttle(factors[rank])


def _played(spec: DeviceSpec, host: HostRate, slowdown: float) -> DeviceSpec:
    device = spec.device(0, "", 0)
    return DeviceSpec.model_validate(
        {
            "name": spec.label,
            "tflops": {"float32": host.flops_per_s / slowdown / 1e12},
            "memory": format_size(device.memory_bytes),
            "memory_bandwidth": format_rate(host.bytes_per_s / slowdown),
            "launch": format_time(host.launch_s * slowdown),
        }
    )


class Throttle:
    """Stretches this thread's compute by ``slowdown`` (>= 1; no device can be emulated faster than the host).

    ``settle`` is called before a collective and at the end of a step, ``resume`` after a collective: what happens in
    between is communication and is not stretched. Sleeping too long is remembered and taken off the next sleep.
    """

    def __init__(self, slowdown: float) -> None:
        assert slowdown >= 1, f"cannot emulate a device {1 / slowdown:.3g} times as fast as this machine's core"
        self.slowdown = slowdown
        self.compute_s = 0.0  # emulated seconds so far
        self._owed_s = 0.0  # what must pass before the next collective; negative after sleeping too long
        self.resume()

    def settle(self) -> None:
        """Sleep until the work since ``resume`` has taken as long as on the emulated device."""
        should_s = (time.thread_time() - self._cpu_mark) * self.slowdown
        self.compute_s += should_s
        self._owed_s += should_s - (time.perf_counter() - self._wall_mark)
        if self._owed_s > 0:
            start = time.perf_counter()
            time.sleep(self._owed_s)
            self._owed_s -= time.perf_counter() - start
        self._owed_s = max(self._owed_s, -_CARRY_S)
        self.resume()

    def resume(self) -> None:
        """Start counting compute from now."""
        self._cpu_mark = time.thread_time()
        self._wall_mark = time.perf_counter()
