"""What ranks leave in a folder while they run: written by ``hap.runtime.record``, read by ``hap.diagnosis``.

    plan.json           the plan, by rank 0
    rank-0002.jsonl     one JSON object a line: a ``head``, then ``call``, ``step`` and ``probe`` as they come
    rank-0002.state     64 bytes that say what the rank is doing just now, written in place (``State``): they are there
                        whatever becomes of the process
    rank-0002.stack     what its threads were doing when it had stood still for long
    rank-0002.error     the exception that ended the recording, if one did

Times of a step are whole microseconds since it began; a rank's clock is its own, and ``Head.began`` says when its zero
was by the host's clock. A step is from where one forward part begins to where the next one does.

Every use of the wire has a ``Scope``: all ranks of the job, or on a mesh of two axes those of one of its hosts. Ranks
come equally often to what they do together; so ranks of different hosts come equally often to what all do, no more.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from math import isfinite
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

import pydantic

from hap.errors import HapError, ProgramError

VARIABLE = "HAP_RECORD"  # of the environment: the folder, from ``hap run --record`` to ``hap.compile``
PLAN = "plan.json"
OTHER = 0  # the number of what uses the wire and is no collective of the program: clipping, agreements
DOING = ("outside", "forward", "backward", "evaluation")
HEARTBEAT_S = 1.0  # between a rank's signs of life
RUNS, DONE, RAISED, STOPPED = range(4)  # how a rank ended
Part = Literal["forward", "backward", "evaluation"]
Scope = Literal["world", "host"]
Whole = Annotated[int, pydantic.Field(ge=0)]


class RecordError(HapError):
    """A folder without records of a run, or with damaged ones."""


class _Line(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    tag: ClassVar[str]
    absent: ClassVar[tuple[str, ...]] = ()  # fields of meshes of two axes, which are left out where they say nothing

    def line(self) -> str:
        """As it stands in the file."""
        nothing = {name for name in self.absent if getattr(self, name) == type(self).model_fields[name].default}
        return json.dumps({self.tag: self.model_dump(mode="json", exclude=nothing)}, separators=(",", ":")) + "\n"


class Head(_Line):
    """``began``: when the rank's clock was zero, in seconds of its host's clock. ``mesh_host``: the number of the host
    whose program it runs, on a mesh of two axes; ranks of one axis are all of number 0. ``state_inode``: of the file of
    its state, which no copy has; 0 in records that are older."""

    tag = "head"
    absent = ("mesh_host", "state_inode")
    rank: Whole
    world_size: int = pydantic.Field(ge=1)
    device: str
    host: str
    pid: int
    began: float
    mesh_host: Whole = 0
    state_inode: Whole = 0


class CallKind(_Line):
    """One distinct collective: ``values`` go together, of ``nbytes`` when whole, among the ranks of ``scope``. What
    ranks of a host use the wire for beside the program's collectives is of the kind ``OTHER_KIND``, of no bytes."""

    tag = "call"
    absent = ("scope",)
    number: int = pydantic.Field(ge=1)
    kind: str
    decomposition: str
    values: int = pydantic.Field(ge=1)
    nbytes: Whole
    scope: Scope = "world"


class StepLine(_Line):
    """One step of a rank. ``at_s``: when it began by the rank's clock; ``seconds`` until the next one began.

    ``parts``: (name, begin, end). ``wire_s``: how long the rank was held up on the wire inside of the parts, and
    ``outside_wire_s`` beside them. ``calls``, in the order in which they began, None in steps that are told in short:
    number of the kind, 1 if the rank went on beside it, then when it entered the wire and left it, for a call that it
    went on beside those two again for the wait, and where a thread of ours moved it, when that began and ended. A sum
    over hosts ``IN_ROUNDS`` has two, between which ranks add up: it is told like a call and its wait.
    """

    tag = "step"
    step: Whole
    at_s: float
    seconds: float = pydantic.Field(ge=0)
    parts: tuple[tuple[Part, Whole, Whole], ...]
    wire_s: float = pydantic.Field(ge=0)
    outside_wire_s: float = pydantic.Field(ge=0)
    calls: tuple[tuple[Whole, ...], ...] | None = None

    @property
    def parts_s(self) -> float:
        return sum(end - begin for _, begin, end in self.parts) / 1e6

    @property
    def compute_s(self) -> float:
        """Seconds in forward and backward parts but for the wire's."""
        return max(0.0, self.parts_s - self.wire_s)

    @property
    def outside_s(self) -> float:
        """Seconds between the parts and until the next step, but for the wire's: data, the optimizer, whatever else."""
        return max(0.0, self.seconds - self.parts_s - self.outside_wire_s)

    @property
    def trains(self) -> bool:
        return any(name == "backward" for name, _, _ in self.parts)


class ProbeLine(_Line):
    """How long ``nbytes`` from each other rank took to come after this rank had asked for them; None for itself."""

    tag = "probe"
    step: Whole
    nbytes: int = pydantic.Field(ge=1)
    seconds: tuple[float | None, ...]


OTHER_KIND, SUM_KIND = "other", "hosts_sum"
IN_ROUNDS, BUNDLED = "rounds", "bundle"  # ways of sums over hosts: waited for round by round; gone on beside
OTHERS = CallKind.model_construct(  # of all ranks; no file has it, nor may another kind have its number
    number=OTHER, kind=OTHER_KIND, decomposition="-", values=1, nbytes=0, scope="world"
)


class RankRecord(NamedTuple):
    """All that one rank left. ``state`` is None where its file is missing. ``seen``: when the state was read, by the
    clock of the rank's host; None where that is another machine's, and of a copy, which stays as it is."""

    head: Head
    kinds: dict[int, CallKind]
    steps: tuple[StepLine, ...]
    probes: tuple[ProbeLine, ...]
    state: State | None
    stack: str | None
    error: str | None
    seen: float | None = None

    def kind_of(self, number: int) -> CallKind:
        """That of a call. ``read_folder`` sees to it that there is one."""
        return OTHERS if number == OTHER else self.kinds[number]


class State(NamedTuple):
    """What a rank was doing last. ``entered``: how often it has come to the wire, a number that ranks of one program
    count alike; ``call`` is the kind of the last one, ``in_wire`` whether it is still there. ``since``: when that
    changed last, ``alive``: when its process gave the last sign of life, both by its host's clock. ``ended``: ``RUNS``
    while it has not, ``DONE`` as it should, ``RAISED`` by an exception, ``STOPPED`` from outside of the script, as by
    Ctrl-C, which says nothing about the job. ``world``: how often of these to what all ranks do together, which ranks
    of different programs, of the hosts of a mesh of two axes, count alike, too; 0 in records that are older."""

    doing: int
    in_wire: int
    ended: int
    step: int
    entered: int
    call: int
    since: float
    alive: float
    world: int = 0

    @property
    def what(self) -> str:
        return DOING[self.doing]

    @classmethod
    def read(cls, raw: bytes, origin: str) -> Self:
        """RecordError for anything that ``pack`` did not make."""
        if len(raw) != STATE_BYTES or raw[:4] != MAGIC:
            raise RecordError(f"{origin}: not the state of a rank")
        found = cls(*_STATE.unpack_from(raw, 4))
        if (
            found.doing >= len(DOING)
            or found.in_wire > 1
            or found.ended > STOPPED
            or not isfinite(found.since + found.alive)
        ):
            raise RecordError(f"{origin}: a damaged state of a rank")
        return found


MAGIC = b"HAP1"
STATE_BYTES = 64
_STATE = struct.Struct("<HHHxxQQQddQ")  # after the magic; its parts are written apart, too
_ACTIVITY = struct.Struct("<HH")
_COUNTS = struct.Struct("<QQQd")
_ALIVE = struct.Struct("<d")
_WORLD = struct.Struct("<Q")


class StateWriter:
    """Writes a state into memory that is a file's. Each method is a few stores."""

    def __init__(self, memory: memoryview, now: float) -> None:
        assert len(memory) == STATE_BYTES
        self._memory = memory
        memory[:4] = MAGIC
        _STATE.pack_into(memory, 4, 0, 0, 0, 0, 0, 0, now, now, 0)

    def now(self, doing: int, in_wire: bool, step: int, entered: int, call: int, since: float, world: int) -> None:
        _ACTIVITY.pack_into(self._memory, 4, doing, in_wire)
        _COUNTS.pack_into(self._memory, 12, step, entered, call, since)
        _WORLD.pack_into(self._memory, 52, world)

    def alive(self, now: float) -> None:
        _ALIVE.pack_into(self._memory, 44, now)

    def ended(self, how: int) -> None:
        struct.pack_into("<H", self._memory, 8, how)


def rank_file(folder: Path, rank: int, kind: Literal["jsonl", "state", "stack", "error"]) -> Path:
    return folder / f"rank-{rank:04d}.{kind}"


def make_folder(folder: Path) -> None:
    """The folder of a run, if it is not there. ProgramError if it cannot be, or takes no files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ProgramError(f"record: {folder}: cannot make this folder ({e.strerror})") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ProgramError(f"record: {folder}: cannot write (no permission)")


def used(folder: Path) -> ProgramError:
    return ProgramError(f"record: {folder} has records of another run; name a new folder")


def read_folder(folder: Path) -> tuple[RankRecord, ...]:
    """Every rank's record, in rank order. RecordError, one line, if there are none or one is missing or damaged."""
    paths = sorted(folder.glob("rank-*.jsonl"))
    if not paths:
        raise RecordError(f"{folder}: no records of a run (rank-0000.jsonl, ...); make some by hap run --record")
    # All states at once, before anything that takes long: they are compared. And before what ranks wrote until then, so
    # that the kind of a state's call is told of.
    now = time.time()
    states = [_read_state(path.with_suffix(".state")) for path in paths]
    found = tuple(_read_rank(path, state, now) for path, state in zip(paths, states, strict=True))
    size = found[0].head.world_size
    missing = sorted(set(range(size)) - {record.head.rank for record in found})
    if missing or len(found) != size:
        raise RecordError(f"{folder}: {len(found)} records of {size} ranks; {missing[:4] or 'some'} have none")
    return found


def _read_state(path: Path) -> tuple[State, int] | None:
    """The state and its file's inode."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return State.read(file.read(), str(path)), os.fstat(file.fileno()).st_ino


def _read_rank(path: Path, state: tuple[State, int] | None, now: float) -> RankRecord:
    head: Head | None = None
    kinds: dict[int, CallKind] = {}
    steps: list[StepLine] = []
    probes: list[ProbeLine] = []
    stack, error = (path.with_suffix(f".{kind}") for kind in ("stack", "error"))
    try:
        *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")  # a last one was cut off
    except OSError as e:
        raise RecordError(f"{path}: cannot be read ({e.strerror})") from None
    for number, line in enumerate(lines, 1):
        try:
            match _parse(line):
                case Head() as made:
                    head = made
                case CallKind() as made:
                    kinds[made.number] = made
                case StepLine() as made:
                    steps.append(made)
                case ProbeLine() as made:
                    probes.append(made)
        except (ValueError, TypeError) as e:
            raise RecordError(f"{path}, line {number}: cannot be read ({str(e).splitlines()[0]})") from None
    if head is None or path != rank_file(path.parent, head.rank, "jsonl"):
        raise RecordError(f"{path}: it does not say whose it is, or another rank's")
    _check(path, head, kinds, steps, probes)
    last, inode = (None, 0) if state is None else state
    if last is not None and last.call != OTHER and last.call not in kinds:
        raise RecordError(f"{path.with_suffix('.state')}: a damaged state of a rank, in a call of an unknown kind")
    is_here = inode != 0 and inode == head.state_inode and head.host == socket.gethostname()
    return RankRecord(
        head,
        kinds,
        tuple(steps),
        tuple(probes),
        last,
        stack.read_text(encoding="utf-8", errors="replace") if stack.is_file() else None,
        error.read_text(encoding="utf-8", errors="replace") if error.is_file() else None,
        now if is_here else None,
    )


_KINDS: dict[str, type[_Line]] = {kind.tag: kind for kind in (Head, CallKind, StepLine, ProbeLine)}


def _parse(line: str) -> _Line:
    body = json.loads(line)
    if not isinstance(body, dict) or len(body) != 1:
        raise ValueError("not one tagged object")
    ((tag, content),) = body.items()
    if tag not in _KINDS:
        raise ValueError(f"unknown {tag!r}")
    return _KINDS[tag].model_validate(content)


def _check(path: Path, head: Head, kinds: dict[int, CallKind], steps: list[StepLine], probes: list[ProbeLine]) -> None:
    for step in steps:
        for call in step.calls or ():
            marks = len(call) - 2
            if call and call[0] != OTHER and call[0] not in kinds:
                raise RecordError(f"{path}: step {step.step} has a call of an unknown kind")
            if len(call) < 2 or call[1] not in (0, 1) or marks not in ((2, 4, 6) if call[1] else (2,)):
                raise RecordError(f"{path}: step {step.step} has a call with {marks} times")
    for probe in probes:
        if len(probe.seconds) != head.world_size:
            raise RecordError(f"{path}: a probe of {len(probe.seconds)} ranks among {head.world_size}")
