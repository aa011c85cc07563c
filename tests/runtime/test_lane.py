"""Work beside the program, on a CPU; and whose thread queues it on a GPU, of which there is none here."""

from __future__ import annotations

import contextlib
import threading
from typing import Any
from unittest import mock

import pytest
import torch

from hap.runtime.lane import Beside


def test_what_is_beside_is_done_in_another_thread_and_in_order() -> None:
    beside, order, gate = Beside(torch.device("cpu"), "test"), list[int](), threading.Event()

    def job(number: int) -> int:
        gate.wait(10.0)
        order.append(number)
        return threading.get_ident()

    running = [beside.submit(lambda n=n: job(n), ()) for n in range(3)]  # type: ignore[misc]
    assert order == []
    gate.set()
    assert {r.result() for r in running} != {threading.get_ident()} and order == [0, 1, 2]


def test_what_it_raises_is_raised_by_who_asks() -> None:
    running = Beside(torch.device("cpu"), "test").submit(lambda: 1 // 0, ())
    with pytest.raises(ZeroDivisionError):
        running.result()


def test_on_a_gpu_the_programs_own_thread_queues_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all ranks call NCCL in one order."""
    stream, given = mock.Mock(), mock.Mock()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    beside, seen = Beside(torch.device("cuda"), "test"), list[Any]()
    running = beside.submit(lambda: seen.append(threading.get_ident()), [given])
    assert seen == [threading.get_ident()]
    given.record_stream.assert_called_once_with(stream)
    assert [c[0] for c in stream.method_calls] == ["wait_stream", "record_event"]
    assert running.result() is None
    failed = beside.submit(lambda: 1 // 0, ())
    with pytest.raises(ZeroDivisionError):
        failed.result()
