"""Where work runs that the program does not wait for: a thread beside it on a CPU, a stream on a GPU.

A lane does what it is given one after another, in the order in which it was given, which is the program's and so the
same on every rank. Collectives need no more; ``Beside`` is for work whose calls take the host long, too. On a GPU these
calls are the program's own thread's all the same: NCCL's, made from two threads through communicators of their own, may
come in another order on each rank, which then wait for each other for ever (NCCL's user guide, "Thread safety").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

import torch

T = TypeVar("T")


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


class Beside:
    """A thread on a CPU, a stream on a GPU."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, name) if self._stream is None else None

    def submit(self, job: Callable[[], T], given: Iterable[torch.Tensor]) -> Running[T]:
        """Start ``job``, which sees all that was queued on this stream before. ``given`` are the tensors of this stream
        that it reads and that may be gone before it is done."""
        if self._thread is not None:
            return Running(self._thread.submit(lambda: (job(), None)))
        assert self._stream is not None
        for tensor in given:
            tensor.record_stream(self._stream)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        queued: Future[tuple[T, torch.cuda.Event | None]] = Future()
        try:
            with torch.cuda.stream(self._stream), torch.autocast("cuda", enabled=False):  # as a thread has none
                queued.set_result((job(), self._stream.record_event()))
        except Exception as e:
            queued.set_exception(e)
        return Running(queued)


class Running(Generic[T]):
    """What ``Beside`` was given."""

    def __init__(self, future: Future[tuple[T, torch.cuda.Event | None]]) -> None:
        self._future = future

    def result(self) -> T:
        """Once it is done (on a GPU: once later work of this stream will see it done); raises what it raised."""
        found, after = self._future.result()
        if after is not None:
            torch.cuda.current_stream().wait_event(after)
        return found
