"""The process that works beside the search: answers in order, what goes wrong there, and the same plan without it."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hap.cluster import ClusterSpec
from hap.errors import PlanError
from hap.search import beside, fewer, plan_graph
from hap.search.beside import Beside, Question
from hap.search.fewer import Tried
from hap.search.limits import Effort
from tests.search.models import gpt2
from tests.search.test_masses import hosts

FORKS = pytest.mark.skipif(not beside.can_fork(), reason="no second process, or no second core for it, here")


class Worker:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def add(self, number: int, check: Callable[[], None] = lambda: None) -> tuple[int, list[int]]:
        check()
        self.asked.append(number)
        return os.getpid(), list(self.asked)

    def refuse(self) -> None:
        raise PlanError("not today")

    def end(self) -> None:
        os._exit(3)

    def wait(self) -> None:
        time.sleep(60)

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    def linger(self, begun: Path, check: Callable[[], None]) -> None:
        begun.touch()
        for _ in range(6_000):
            check()
            time.sleep(0.01)
        self.asked.append(0)


@pytest.mark.parametrize("apart", [pytest.param(True, marks=FORKS), False])
def test_answers_come_in_the_order_of_the_questions(apart: bool) -> None:
    """Whichever is asked for first; nothing that happens in the other process is seen here."""
    worker = Worker()
    other = Beside(worker, apart=apart)
    questions = [other.ask("add", number) for number in (3, 1, 2)]
    assert other.answered(questions[0]) is None
    pid, last = other.answer(questions[2])
    assert last == [3, 1, 2] and (pid == os.getpid()) is not apart
    assert other.answer(questions[0]) == (pid, [3]) == other.answered(questions[0])
    other.close()
    assert worker.asked == ([] if apart else [3, 1, 2])


@pytest.mark.parametrize("apart", [pytest.param(True, marks=FORKS), False])
def test_what_is_raised_there_is_raised_here_and_it_goes_on(apart: bool) -> None:
    other = Beside(Worker(), apart=apart)
    refused, added = other.ask("refuse"), other.ask("add", 1)
    with pytest.raises(PlanError, match=r"^not today$"):
        other.answer(refused)
    assert other.answer(added)[1] == [1]
    other.close()


@FORKS
def test_who_asks_does_not_wait_for_an_earlier_answer() -> None:
    """However much more than a pipe holds goes with the question."""
    other = Beside(Worker(), apart=True)
    other.ask("wait")
    began = time.monotonic()
    other.ask("add", "x" * (1 << 24))
    assert time.monotonic() - began < 30
    other.close()


@FORKS
def test_a_process_that_ended_is_told() -> None:
    other = Beside(Worker(), apart=True)
    with pytest.raises(PlanError, match=r"^the process that works beside the search has ended, with exit code 3$"):
        other.answer(other.ask("end"))
    other.close()


@FORKS
@pytest.mark.parametrize("asked", [("add", 2), ("wait",)], ids=["an answer lies unread", "it is busy"])
def test_it_ends_soon_after_a_search_that_was_killed(asked: tuple[object, ...]) -> None:
    """When the last process that has the other end of a pipe is gone, reading from it ends."""
    held, theirs = os.pipe()
    search = os.fork()
    if search == 0:
        try:
            other = Beside(Worker(), apart=True)
            pid, _ = other.answer(other.ask("add", 1))
            os.write(theirs, b"%d" % pid)
            other.ask(*asked)  # type: ignore[arg-type]
            assert other._pipe is not None
            other._pipe.poll(1.0)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(theirs)
    os.waitpid(search, 0)
    pid = int(os.read(held, 20))
    ended = bool(select.select([held], [], [], 20.0)[0])
    if not ended:
        os.kill(pid, signal.SIGKILL)
    assert os.read(held, 1) == b"" and ended
    os.close(held)


@FORKS
@pytest.mark.parametrize("then", ["ask", "offer", "answer"])
def test_a_process_that_was_killed_is_told_whatever_is_wanted_of_it_next(then: str) -> None:
    """Where a question is still on its way to it, too."""
    other = Beside(Worker(), apart=True)
    pid, _ = other.answer(other.ask("add", 1))
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    asked = other.ask("add", 2)
    os.kill(pid, signal.SIGKILL)
    other._process.join()
    with pytest.raises(PlanError, match=r"^the process that works beside the search has ended, with exit code -9$"):
        other.answer(asked) if then == "answer" else getattr(other, then)("add", 3)
    other.close()


@FORKS
def test_ctrl_c_is_for_the_search_and_a_check_may_end_the_waiting() -> None:
    looked = 0

    def check() -> None:
        nonlocal looked
        looked += 1
        if looked == 3:
            raise PlanError("out of time")

    other = Beside(Worker(), apart=True, check=check)
    pid, _ = other.answer(other.ask("add", 1))
    os.kill(pid, signal.SIGINT)
    assert other.answer(other.ask("add", 2))[1] == [1, 2]
    with pytest.raises(PlanError, match=r"^out of time$"):
        other.answer(other.ask("wait"))
    other.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@FORKS
def test_an_offer_waits_for_what_is_asked_and_can_be_withdrawn_until_then() -> None:
    """Of what was withdrawn nothing is done, whatever is asked later."""
    other = Beside(Worker(), apart=True)
    other.ask("nap", 0.5)
    offered, added = other.offer("add", 1), other.ask("add", 2)
    assert offered is not None and not other.is_taken(offered) and not other.is_taken(offered)
    assert other.answer(added)[1] == [2] and other.answer(other.ask("add", 3))[1] == [2, 3]
    other.close()
    begun = Beside(Worker(), apart=True)
    offered = begun.offer("add", 1)
    assert offered is not None and begun.offer("add", 2) is None  # one thing
    assert begun.answer(offered)[1] == [1] and begun.is_taken(offered)
    begun.close()


@FORKS
def test_an_offer_that_is_dropped_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Begun, it ends at its next check, as if nobody had asked; not begun, it never is; done, it has its answer."""
    other = Beside(Worker(), apart=True)
    offered = other.offer("linger", tmp_path / "begun")
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    assert offered is not None and other.is_taken(offered)
    other.drop(offered)
    assert not other.is_taken(offered) and other.answer(other.ask("add", 1))[1] == [1]
    other.close()
    waiting = Beside(Worker(), apart=True)
    waiting.ask("nap", 0.5)
    offered = waiting.offer("add", 2)
    assert offered is not None
    waiting.drop(offered)
    assert not waiting.is_taken(offered) and waiting.answer(waiting.ask("add", 3))[1] == [3]
    waiting.close()
    done = Beside(Worker(), apart=True)
    offered = done.offer("add", 4)
    assert offered is not None and done.answer(offered)[1] == [4]
    done.drop(offered)
    assert done.is_taken(offered) and done.answer(done.ask("add", 5))[1] == [4, 5]
    done.close()


def test_where_nobody_else_could_do_it_nothing_is_offered() -> None:
    other = Beside(Worker(), apart=False)
    asked = other.ask("add", 1)
    assert other.offer("add", 2) is None and other.answer(asked)[1] == [1]


def test_without_a_second_core_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    other = Beside(Worker(), apart=True)
    assert not other.is_apart and other.answer(other.ask("add", 1))[0] == os.getpid()


@FORKS
@pytest.mark.parametrize(
    "devices",
    [
        hosts(*[(1, 1)] * 6, *[(0.5, 1)] * 2, network="2GB/s"),
        pytest.param(hosts(*[(1, 1)] * 4, *[(0.7, 1)] * 2, *[(0.5, 1)] * 2, network="1GB/s"), marks=pytest.mark.long),
    ],
)
def test_the_plan_is_the_same_with_and_without_it(devices: ClusterSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges make up a good part of the step, so the bound is raised; of three kinds of devices by a second process,
    too."""
    found = gpt2(layers=1)
    monkeypatch.setattr(fewer, "FEWEST_NODES", 0)
    apart: list[bool] = []
    prove_beside = Tried.prove_beside

    def watched(self: Tried) -> None:
        prove_beside(self)
        assert self.beside is not None
        apart.append(self.beside.is_apart)

    asked: list[str] = []
    ask = Beside.ask

    def listening(self: Beside, method: str, *arguments: object) -> Question:
        asked.append(method)
        return ask(self, method, *arguments)

    monkeypatch.setattr(Tried, "prove_beside", watched)
    monkeypatch.setattr(Beside, "ask", listening)
    ways: tuple[tuple[Effort, bool], ...] = (("normal", True), ("quick", True), ("quick", False))
    plans = [plan_graph(found, devices, effort=effort, leave_out=leave_out) for effort, leave_out in ways]
    monkeypatch.setattr(beside, "can_fork", lambda: False)
    first, asked = asked, []
    again = [plan_graph(found, devices, effort=effort, leave_out=leave_out) for effort, leave_out in ways]
    assert apart == [True] * 3 + [False] * 3
    assert first.count("begin") == asked.count("begin") == 1, "bounds depend on what was begun"
    assert [plan.to_json() for plan in plans] == [plan.to_json() for plan in again]
