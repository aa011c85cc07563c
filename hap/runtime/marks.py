"""Moments of a rank's work, by the clock of whoever does it: the host's on a CPU, the stream's on a GPU.

A GPU's host runs ahead of what its streams do. There a moment is an event in the stream, whose time is known when the
stream has come to it, and nobody waits for that: what was recorded of a step is written some steps later.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

Mark = Any  # a float, or an event


class Clock(Protocol):
    def mark(self) -> Mark:
        """Now, of what this thread's work has come to."""
        ...

    def seconds(self, begin: Mark, end: Mark) -> float:
        """From one to the other, both of which have passed."""
        ...

    def has_passed(self, mark: Mark) -> bool: ...

    def settle(self) -> None:
        """Return when all marks have passed."""
        ...


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def has_passed(self, mark: float) -> bool:
        return True

    def settle(self) -> None:
        pass


class StreamClock:
    """Of the current stream at each mark, so of a lane's in the lane."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)


def clock_of(device: torch.device) -> Clock:
    return StreamClock(device) if device.type == "cuda" else HostClock()
