"""Where collectives run that the program does not wait for: a thread beside it on a CPU, a stream on a GPU.

A lane does what it is given one after another, in the order in which it was given, which is the program's and so the
same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch


class Ticket(Protocol):
    """Something on its way."""

    def wait(self) -> object:
        """Return when it is done (on a GPU: when later work of this stream will see it done); raise what it raised."""
        ...


class Lane(Protocol):
    def submit(self, job: Callable[[], None]) -> Ticket: ...


class _Promise:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class ThreadLane:
    """One thread. What it does with tensors and sockets releases Python's lock."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hap-wire")

    def submit(self, job: Callable[[], None]) -> _Promise:
        return _Promise(self._thread.submit(job))


class _Mark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class StreamLane:
    """One side stream. A job sees all that was queued on the program's stream before it was submitted."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, job: Callable[[], None]) -> _Mark:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            job()
            event = torch.cuda.Event()
            event.record(self._stream)
        return _Mark(event)
