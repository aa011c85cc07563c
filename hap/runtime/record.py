"""Recording what a rank does while it trains, for ``hap diagnose``: cheap enough to be left on.

    with program.record("runs/1"):
        for batch in loader: ...

Every use of the wire is stamped on entering and leaving, as are forward and backward parts; a step becomes one line of
``rank-0002.jsonl``. On a mesh of two axes it is told, too, whether all ranks take part or those of one host. What the
rank is doing just now stands in ``rank-0002.state``, a mapped file, which outlives the process however that ends. A
thread gives a sign of life each second, and writes down what all threads do when the rank has stood still for a minute.
The forms are in ``hap/run_record.py``.

These are C4D's records (arXiv 2406.04594: communicator, operation), and for its third layer, the
transport, links are probed (``hap.runtime.probe``), as what moves inside of a backend's collective is not to be seen
from here. On a GPU the stamps are the streams' (``hap.runtime.marks``) and the state is the host's, which runs ahead.
"""

from __future__ import annotations

import atexit
import faulthandler
import math
import mmap
import os
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from hap.codegen.layout import Layout
from hap.errors import ProgramError
from hap.mesh_plan import MeshPlan
from hap.plan import Plan
from hap.run_record import (
    DOING,
    DONE,
    HEARTBEAT_S,
    OTHER,
    OTHER_KIND,
    PLAN,
    RAISED,
    STATE_BYTES,
    STOPPED,
    SUM_KIND,
    CallKind,
    Head,
    Part,
    ProbeLine,
    Scope,
    StateWriter,
    StepLine,
    make_folder,
    rank_file,
    used,
)
from hap.runtime.marks import Mark, clock_of
from hap.runtime.probe import probe
from hap.together import together

if TYPE_CHECKING:
    from hap.runtime.collectives import Communicator

STILL_S = 60.0  # without a change, until the stacks are written down


class Entry:
    """One use of the wire. ``marks``: entered and left, once, or twice for what the rank goes on beside; ``inside`` of
    a part of the program, each time. ``lane``: when it was moved beside the program."""

    __slots__ = ("inside", "lane", "marks", "number", "scope", "started")

    def __init__(self, number: int, started: bool, scope: Scope) -> None:
        self.number, self.started, self.scope = number, started, scope
        self.marks: list[Mark] = []
        self.inside: list[bool] = []
        self.lane: tuple[Mark, Mark] | None = None


class Taken(NamedTuple):
    """A step that has ended for the host."""

    step: int
    began: Mark
    ended: Mark
    parts: list[tuple[Part, Mark, Mark]]
    entries: list[Entry]


class Recorder:
    """One rank's records, from now until ``close``. Made by ``HapProgram.record``; collective."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        comm: Communicator,
        plan: Plan | MeshPlan,
        *,
        every: int = 1,
        probe_every: int = 0,
        mesh_host: int = 0,
    ) -> None:
        """``comm`` is that of all ranks of the job. ``every``: so many steps apart are those of which each call is
        written; of all others the sums. ``probe_every``: links are timed now, and again after so many steps if it is
        not 0. ``mesh_host``: the number of this rank's host in a plan of two axes.

        ProgramError for a second recording at once, and for a folder that has records already, or cannot be made.
        """
        self.folder, self.comm, self.every, self.probe_every = Path(folder), comm, every, probe_every
        if every < 1 or probe_every < 0:
            raise ProgramError(f"record: every={every}, probe_every={probe_every}: steps are counted from 1")
        if comm.observers.recorder is not None:
            raise ProgramError(f"record: this job is recorded already, in {comm.observers.recorder.folder}")
        together(comm, lambda: make_folder(self.folder))
        path = rank_file(self.folder, comm.rank, "jsonl")
        if any(comm.gather_objects(path.exists())):
            raise used(self.folder)
        if comm.rank == 0:
            plan.save(self.folder / PLAN)
        self._clock = clock_of(comm.device)
        self._zero, zero = self._clock.mark(), time.perf_counter()
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._failed = False  # a disk would not take more
        began = time.time()
        state = rank_file(self.folder, comm.rank, "state")
        self._state, self._memory = _mapped(state, began)
        head = Head(
            rank=comm.rank,
            world_size=comm.world_size,
            device=plan.devices[comm.rank],
            host=socket.gethostname(),
            pid=os.getpid(),
            began=began,
            mesh_host=mesh_host,
            state_inode=state.stat().st_ino,
        )
        self._file.write(head.line())
        self._wall = began - zero  # what makes of ``perf_counter`` the host's clock
        self._numbers: dict[object, int] = {}
        self._step, self._doing = 0, 0
        self._began = self._last = self._zero
        self._parts: list[tuple[Part, Mark, Mark]] = []
        self._entries: list[Entry] = []
        self._taken: list[Taken] = []
        self._entered, self._in_wire, self._call, self._since = 0, False, OTHER, zero
        self._world = 0  # of ``_entered``, those of all ranks
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hap-record", daemon=True)
        self._thread.start()
        self.probe()
        comm.observers.recorder = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Write what is left, and that this rank ended as it should, or by ``error``; by Ctrl-C and ``SystemExit``
        without a failure it was stopped from outside. Twice is fine. Local."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.comm.observers.recorder = None
        self._thread.join()
        if error is None:  # else the device may be in no state to be asked, and the last step is none
            self._take(self._last)  # nobody knows what the rank did after it
            self._clock.settle()
            self._write()
        else:
            text = "".join(traceback.format_exception(error))
            with self._at_most_warned():
                rank_file(self.folder, self.comm.rank, "error").write_text(text, encoding="utf-8")
        self._state.alive(time.time())
        self._state.ended(_how(error))
        with self._at_most_warned():
            self._file.close()

    def close_at_exit(self) -> None:
        """For a script that does not know that it is recorded: closed when the interpreter ends.

        The interpreter keeps the exception that it ends by, but no ``SystemExit``. One that came in the midst of a part
        has left the part open, and counts as a stop from outside; of another one nothing is known here.
        """

        def close() -> None:
            error = getattr(sys, "last_value", None)
            self.close(SystemExit() if error is None and self._doing else error)

        atexit.register(close)

    def probe(self) -> None:
        """Time the links between all ranks, each pair by itself: ``hap.runtime.probe``. Between steps. Collective."""
        seconds, nbytes = probe(self.comm)
        self._put(ProbeLine(step=self._step, nbytes=nbytes, seconds=seconds).line())

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Around a part of the program."""
        if name != "backward":
            self._next_step()
        self._doing, begun = DOING.index(name), self._clock.mark()
        self._tell()
        yield
        self._doing, self._last = 0, self._clock.mark()
        self._tell()
        self._parts.append((name, begun, self._last))

    def called(
        self,
        kind: str,
        values: Sequence[torch.Tensor],
        layouts: Sequence[Sequence[Layout]],
        how: str,
        *,
        started: bool,
        scope: Scope = "world",
    ) -> Entry:
        """A collective that is about to enter the wire; ``started``: the rank will go on beside it."""
        key = (kind, how, *((v.shape, v.dtype) for v in values), *map(tuple, layouts))
        if (number := self._numbers.get(key)) is None:
            nbytes = sum(_whole_bytes(kind, *pair) for pair in zip(values, layouts, strict=True))
            number = self._number(key, kind, how, len(values), nbytes, scope)
        return Entry(number, started, scope)

    def summed(self, shapes: Sequence[tuple[int, ...]], itemsize: int, how: str) -> Entry:
        """A sum over the hosts of a mesh, of whole tensors of these shapes, that is about to enter the wire for the
        first of two times: in its rounds, or when it is begun and when it is waited for."""
        key = (SUM_KIND, how, itemsize, *shapes)
        if (number := self._numbers.get(key)) is None:
            nbytes = itemsize * sum(map(math.prod, shapes))
            number = self._number(key, SUM_KIND, how, len(shapes), nbytes, "world")
        return Entry(number, True, "world")

    def other(self, scope: Scope) -> Entry:
        """Something that is no collective of the program's is about to enter the wire."""
        if scope == "world":
            return Entry(OTHER, False, scope)
        if (number := self._numbers.get(OTHER_KIND)) is None:
            number = self._number(OTHER_KIND, OTHER_KIND, "-", 1, 0, scope)
        return Entry(number, False, scope)

    def enter(self, entry: Entry) -> Entry:
        """The wire is entered for this."""
        if not entry.marks:
            self._entries.append(entry)
        entry.marks.append(self._clock.mark())
        entry.inside.append(bool(self._doing))
        self._entered, self._in_wire, self._call = self._entered + 1, True, entry.number
        self._world += entry.scope == "world"
        self._tell()
        return entry

    def leave(self, entry: Entry) -> None:
        self._last = self._clock.mark()
        entry.marks.append(self._last)
        self._in_wire = False
        self._tell()

    def moved(self, entry: Entry, move: Callable[[], None]) -> Callable[[], None]:
        """``move``, with what it took written down: for the thread that will do it."""

        def timed() -> None:
            begun = self._clock.mark()
            move()
            entry.lane = begun, self._clock.mark()

        return timed

    def _number(self, key: object, kind: str, how: str, values: int, nbytes: int, scope: Scope) -> int:
        """A new one."""
        number = len(self._numbers) + 1
        told = CallKind(number=number, kind=kind, decomposition=how, values=values, nbytes=nbytes, scope=scope)
        self._put(told.line())
        if self._failed:  # the state must not name a kind that nobody was told of
            number = self._numbers.get(OTHER_KIND, OTHER) if scope == "host" else OTHER
        self._numbers[key] = number
        return number

    def _put(self, line: str) -> None:
        """Into the file, unless that has failed before."""
        if not self._failed:
            with self._at_most_warned():
                self._file.write(line)

    @contextmanager
    def _at_most_warned(self) -> Iterator[None]:
        """Around what is written. A disk that is full ends the records of this rank, with one warning, but neither its
        job nor its signs of life; links are timed all the same, as other ranks take part in that."""
        try:
            yield
        except OSError as e:
            if not self._failed:
                self._failed = True
                warnings.warn(
                    f"record: rank {self.comm.rank} writes no more records from step {self._step} on ({e})",
                    stacklevel=2,
                )

    def _tell(self) -> None:
        self._since = time.perf_counter()
        self._state.now(
            self._doing, self._in_wire, self._step, self._entered, self._call, self._since + self._wall, self._world
        )

    def _next_step(self) -> None:
        self._take(self._clock.mark())
        self._write()
        if self.probe_every and self._step and self._step % self.probe_every == 0:
            self.probe()
        self._step += 1
        self._began = self._clock.mark()

    def _take(self, ended: Mark) -> None:
        """The step ends now, if one began."""
        if self._parts and not self._failed:
            self._taken.append(Taken(self._step, self._began, ended, self._parts, self._entries))
        self._parts, self._entries = [], []

    def _write(self) -> None:
        """The steps of which all is known by now."""
        while self._taken and self._clock.has_passed(self._taken[0].ended):
            self._put(self._line(self._taken.pop(0)).line())

    def _line(self, taken: Taken) -> StepLine:
        def micros(mark: Mark) -> int:
            return max(0, round(1e6 * self._clock.seconds(taken.began, mark)))

        def in_numbers(entry: Entry) -> tuple[int, ...]:
            marks = entry.marks + (list(entry.lane) if entry.lane is not None and len(entry.marks) == 4 else [])
            return (entry.number, int(entry.started), *map(micros, marks))

        held_up_s = {True: 0.0, False: 0.0}
        for entry in taken.entries:
            for inside, (entered, left) in zip(entry.inside, pairs(entry.marks), strict=False):
                held_up_s[inside] += self._clock.seconds(entered, left)
        whole = (taken.step - 1) % self.every == 0
        return StepLine(
            step=taken.step,
            at_s=round(self._clock.seconds(self._zero, taken.began), 6),
            seconds=round(max(0.0, self._clock.seconds(taken.began, taken.ended)), 6),
            parts=tuple((name, micros(begun), micros(ended)) for name, begun, ended in taken.parts),
            wire_s=round(held_up_s[True], 6),
            outside_wire_s=round(held_up_s[False], 6),
            calls=tuple(map(in_numbers, taken.entries)) if whole else None,
        )

    def _watch(self) -> None:
        """What the thread does."""
        written_for = None
        while not self._closed.wait(HEARTBEAT_S):
            self._state.alive(time.time())
            since = self._since
            if time.perf_counter() - since > STILL_S and since != written_for:
                written_for = since
                path = rank_file(self.folder, self.comm.rank, "stack")
                with self._at_most_warned(), path.open("w", encoding="utf-8") as file:
                    faulthandler.dump_traceback(file, all_threads=True)


def pairs(marks: Sequence[Mark]) -> Iterator[tuple[Mark, Mark]]:
    """Entered and left, each time."""
    return zip(marks[::2], marks[1::2], strict=False)


def _how(error: BaseException | None) -> int:
    """What a state says of an end by it."""
    if error is None:
        return DONE
    was_stopped = isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code in (None, 0))
    return STOPPED if was_stopped else RAISED


def _mapped(path: Path, now: float) -> tuple[StateWriter, mmap.mmap]:
    with path.open("w+b") as file:
        file.write(bytes(STATE_BYTES))  # so that the disk has room for it: a store into a hole that gets none is fatal
        file.flush()
        memory = mmap.mmap(file.fileno(), STATE_BYTES)
    return StateWriter(memoryview(memory), now), memory


def _whole_bytes(kind: str, value: torch.Tensor, layouts: Sequence[Layout]) -> int:
    """Of the whole value that a rank has a piece of."""
    if kind in ("all_gather", "all_to_all"):
        shape = layouts[0].whole_shape(value.shape)
        return torch.Size(shape).numel() * value.itemsize
    return value.nbytes
