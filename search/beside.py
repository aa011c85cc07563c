"""A second process that works beside the search: what it is asked it answers in the order in which it was asked.

It is forked, so it knows all that the search knew then, and only questions and answers go between the two; what it
finds out meanwhile it keeps for the next question. Python runs one thread at a time, so threads would gain little; but
one takes the questions off the pipe while an earlier one is worked on: a plan is more than a pipe holds, and who asks
about it must not wait.

Where no process can be forked, or there is no second core for it, questions wait until an answer is needed; then all
that were asked before it are answered first, in the same order. So the answers, which may depend on the questions
before, are the same everywhere.

One thing may be offered to it, to be done while nobody asks anything. If it has not begun when the answer is needed the
offer is withdrawn, and who made it does it, with the same result. There is one token in a pipe between the two: who
takes it does it. Once it is begun, a token in the pipe says that it is no longer wanted: it is looked for between two
pieces of work, and ends that work, so that who asks about something else does not wait for it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from hap.errors import PlanError

LOOK_S = 0.05  # between two looks at whether the search is to end, while an answer is waited for
TOKEN = b"1"


class Unwanted(Exception):
    """What was offered and begun is no longer wanted."""


@dataclass(frozen=True)
class Question:
    """A method of the worker and what it is called with. ``offered``: only if it has nothing else to do, and then the
    last argument is what is to be called between two pieces of work; it may end that by ``Unwanted``."""

    number: int
    method: str
    arguments: tuple[Any, ...]
    offered: bool = False


class Beside:
    """``worker``: whose methods are called. ``apart``: whether in another process, if there can be one. ``check``:
    called while an answer is waited for; may end that by an exception."""

    def __init__(self, worker: object, *, apart: bool, check: Callable[[], None] = lambda: None) -> None:
        self.worker, self.check = worker, check
        self._asked: list[Question] = []
        self._answers: dict[int, Any] = {}  # by the number of the question
        self._offer: Question | None = None
        self._withdrawn = False
        self._pipe: Connection | None = None
        if apart and can_fork():
            self._fork()

    @property
    def is_apart(self) -> bool:
        return self._pipe is not None

    def _fork(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._forked_by = os.getpid()
        self._token, self._given = os.pipe()
        os.set_blocking(self._token, False)
        self._process = context.Process(
            target=_answer, args=(self.worker, self._token, theirs, self._pipe), daemon=True
        )
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            with warnings.catch_warnings():  # of threads, from Python 3.12 on: the worker calls none of torch's
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> Question:
        """What ``answer`` is for. Arguments are pickled. PlanError if the other process has ended."""
        return self._send(Question(len(self._asked), method, arguments))

    def offer(self, method: str, *arguments: Any) -> Question | None:
        """What ``is_taken`` is for; None where nobody else could do it, or something was offered before. PlanError if
        the other process has ended."""
        if self._pipe is None or self._offer is not None:
            return None
        os.write(self._given, TOKEN)
        self._offer = self._send(Question(len(self._asked), method, arguments, offered=True))
        return self._offer

    def is_taken(self, offer: Question) -> bool:
        """Whether it was begun, and is to be waited for; if not, it is withdrawn."""
        if self._pipe is not None and offer.number not in self._answers and not self._withdrawn:
            self._withdrawn = takes(self._token)
        return not self._withdrawn and (self._pipe is not None or offer.number in self._answers)

    def drop(self, offer: Question) -> None:
        """It is no longer wanted, whether it was begun or not."""
        if self._pipe is not None and self.is_taken(offer) and offer.number not in self._answers:
            self._withdrawn = True
            os.write(self._given, TOKEN)

    def _send(self, question: Question) -> Question:
        self._asked.append(question)
        if self._pipe is not None:
            try:
                self._pipe.send(question)
            except OSError:
                raise self._ended() from None
        return question

    def answer(self, question: Question) -> Any:
        """To this question; what the worker raised is raised. PlanError if the other process has ended."""
        while question.number not in self._answers:
            if self._pipe is None:
                asked = next(q for q in self._asked if q.number not in self._answers and not q.offered)
                self._answers[asked.number] = _called(self.worker, asked)
            else:
                number, found = self._received(self._pipe)
                self._answers[number] = found
        found = self._answers[question.number]
        if isinstance(found, Exception):
            raise found
        return found

    def answered(self, question: Question) -> Any:
        """The answer, if it has been received; otherwise None."""
        return self._answers.get(question.number)

    def _received(self, pipe: Connection) -> Any:
        while not pipe.poll(LOOK_S):
            self.check()
        try:
            return pipe.recv()
        except (EOFError, OSError):  # nothing is left of what it said, part of an answer, or questions it never took
            raise self._ended() from None

    def _ended(self) -> PlanError:
        """What is raised; with its exit code, if that is known: only who forked a process is told."""
        said = "the process that works beside the search has ended"
        if os.getpid() != self._forked_by:
            return PlanError(said)
        self._process.join()
        return PlanError(f"{said}, with exit code {self._process.exitcode}")

    def close(self) -> None:
        """The other process is ended. What is asked from now on is answered here."""
        if self._pipe is not None:
            for end in (self._token, self._given):
                os.close(end)
            self._pipe.close()
            self._pipe = None
            self._process.kill()
            self._process.join()


def can_fork() -> bool:
    """Whether a second process can be made, and there is a second core for it. macOS' own libraries do not stand it."""
    if sys.platform != "linux" or multiprocessing.current_process().daemon:
        return False
    return len(os.sched_getaffinity(0)) > 1


def _called(worker: object, question: Question, *more: object) -> Any:
    """What the method returns, or raises."""
    try:
        return getattr(worker, question.method)(*question.arguments, *more)
    except Exception as e:
        return e


def _answer(worker: object, token: int, pipe: Connection, theirs: Connection) -> None:
    """The other process: until nobody asks any more, whatever it is at then. Ctrl-C is for the search."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    theirs.close()
    questions: SimpleQueue[Question | None] = SimpleQueue()
    threading.Thread(target=_take, args=(pipe, questions), daemon=True).start()
    while (asked := questions.get()) is not None:
        if asked.offered and not questions.empty():
            questions.put(asked)  # behind what was asked
        elif not asked.offered:
            _say(pipe, asked.number, _called(worker, asked))
        elif takes(token):
            found = _called(worker, asked, partial(_check, token))
            if not isinstance(found, Unwanted):
                _say(pipe, asked.number, found)


def _say(pipe: Connection, number: int, found: object) -> None:
    """The answer to the question of this number; if nobody is left to read it, the process ends."""
    try:
        pipe.send((number, found))
    except ConnectionError:
        os._exit(0)


def _check(token: int) -> None:
    """Unwanted if what was begun is."""
    if takes(token):
        raise Unwanted


def takes(token: int) -> bool:
    """Whether the token was in this pipe; then it no longer is."""
    try:
        return os.read(token, 1) == TOKEN
    except BlockingIOError:
        return False


def _take(pipe: Connection, questions: SimpleQueue[Question | None]) -> None:
    """All that come, and at the end None. Where the search has ended, so does the process at once: what it works on
    is for nobody. Its end of the pipe is reset if an answer lay there unread."""
    try:
        while True:
            questions.put(pipe.recv())
    except (EOFError, ConnectionError):
        os._exit(0)
    finally:
        questions.put(None)
