"""Work beside the program, on a CPU."""

from __future__ import annotations

import threading

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
