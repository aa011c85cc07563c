"""Emulated inequality: makes a CPU rank as slow as the device that the cluster file says it is.

Four ranks on one machine are equal, so an unequal cluster has to be played. A ``Throttle`` does that with the clock
alone: between two collectives it reads the CPU time ``c`` that the rank's thread spent computing, and lets the wall
clock reach ``c * slowdown`` before the next collective starts,

    slowdown = rate of one core of this host / nominal rate of the device,

both measured or given in FLOP/s of a float32 matmul. Sleeping costs no CPU, so ranks share cores fairly as long as the
nominal rates sum to less than the machine: sum(1 / slowdown) < cores.

What is emulated: compute. What is not: links are this machine's loopback, whatever the cluster file says, and memory
limits are the planner's only. Nothing here runs on real GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

NOTICE = "compute speeds are emulated on this machine's CPU; links are its loopback, not the cluster file's"


@dataclass(frozen=True)
class HostRate:
    """What one thread of this machine does: float32 matmul FLOP/s, streamed bytes/s, seconds of overhead per call."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float


def measure_host() -> HostRate:
    """Probe the calling thread for about a second. The best of several runs: a busy neighbour only makes runs slower.

    The matmul has a transformer's shape (1024 x 256 @ 256 x 1024), the stream a tensor larger than the caches, the
    call a tensor so small that only the dispatch remains. Inputs are plain ones: values do not matter, pages do.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = torch.ones(1024, 256), torch.ones(256, 1024)
        matmul_s = best_time(lambda: a @ b, repeats=20)
        x, y = torch.ones(8 << 20), torch.ones(8 << 20)
        stream_s = best_time(lambda: torch.add(x, 1.0, out=y), repeats=8)
        tiny = torch.ones(4)
        launch_s = best_time(lambda: [torch.add(tiny, 1.0) for _ in range(200)], repeats=8) / 200
    finally:
        torch.set_num_threads(threads)
    return HostRate(2 * 1024 * 256 * 1024 / matmul_s, 2 * x.nbytes / stream_s, launch_s)


def best_time(call: Callable[[], object], repeats: int) -> float:
    """The smallest CPU time in seconds of ``repeats`` calls after one warm-up call."""
    call()
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return best


class Throttle:
    """Stretches this thread's compute by ``slowdown`` (>= 1; no device can be emulated faster than the host).

    ``settle`` is called before a collective and at the end of a step, ``resume`` after a collective: what happens in
    between is communication and is not stretched. Sleeping too long is remembered and taken off the next sleep.
    """

    def __init__(self, slowdown: float) -> None:
        if slowdown < 1:
            raise ValueError(f"cannot emulate a device {1 / slowdown:.3g} times as fast as this machine's core")
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


_CARRY_S = 1e-3  # a rank that lost more than this (descheduled, paging) does not catch up by running unthrottled
