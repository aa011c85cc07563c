"""Where in a part of a program a collective may stand: what passes that move collectives need."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from hap.codegen.program import Call, Convert, Instruction, Start, Together


@dataclass(frozen=True)
class Window:
    """The collective at ``position`` may stand before any instruction from number ``ready`` to number ``due`` (of the
    part as it is; the part's length: at its end). ``is_result``: after ``due`` nothing is computed that takes time;
    ``is_urgent``: something is, and no product comes before it."""

    position: int
    ready: int
    due: int
    is_result: bool
    is_urgent: bool


def work_of(instruction: Instruction) -> Together | None:
    """What the wire does there, as a bundle; None where nothing is sent, or is under way already."""
    match instruction:
        case Convert(kind="slice"):
            return None
        case Convert():
            return Together((instruction,), instruction.decomposition)
        case Together():
            return instruction
    return None


def find_windows(part: Sequence[Instruction]) -> tuple[Window, ...]:
    """Of every collective, in program order. No collective reads what another makes (``lower`` converts originals),
    so all may move at once."""
    others = [(position, i) for position, i in enumerate(part) if not isinstance(i, Call)]
    works = [(position, work) for position, i in others if (work := work_of(i)) is not None]
    if not works:
        return ()
    made, first_read = _positions(part)
    idle, windows = _idle_from(part), []
    products = [0, *itertools.accumulate([isinstance(i, Call) and _is_product(i.op) for i in part])]  # before each
    for position, work in works:
        ready = 1 + max((made.get(name, -1) for name in work.inputs), default=-1)
        reads = [first_read[name] for name in work.outputs if name in first_read]
        due = min(reads, default=len(part))
        is_urgent = due < idle and products[due] == products[ready]
        windows.append(Window(position, ready, due, due >= idle, is_urgent))
    return tuple(windows)


def _idle_from(part: Sequence[Instruction]) -> int:
    """The first number from which on the rest of the part hides nothing."""
    number = len(part)
    while number and not hides(part[number - 1 :]):
        number -= 1
    return number


def rearranged(
    part: Sequence[Instruction], removed: Sequence[int], inserted: Mapping[int, Sequence[Instruction]]
) -> tuple[Instruction, ...]:
    """The part without the numbers ``removed`` and with ``inserted[i]`` before its number i."""
    gone, found = frozenset(removed), list[Instruction]()
    for position, instruction in enumerate(part):
        found += inserted.get(position, ())
        if position not in gone:
            found.append(instruction)
    return (*found, *inserted.get(len(part), ()))


def hides(meanwhile: Sequence[Instruction]) -> bool:
    """Whether these instructions keep a device busy for long enough to be worth a collective's detour: a product, or
    several calls that are no views."""
    several = 0
    for instruction in meanwhile:
        if isinstance(instruction, Call):
            several += _name(instruction.op) not in _VIEWS
            if several == _SEVERAL or _is_product(instruction.op):
                return True
    return False


def has_product(meanwhile: Sequence[Instruction]) -> bool:
    """Whether one of these instructions is a product, which takes longer than all that is small."""
    return any(map(is_product, meanwhile))


def is_product(instruction: Instruction) -> bool:
    return isinstance(instruction, Call) and _is_product(instruction.op)


def sends(instruction: Instruction) -> bool:
    """Whether a collective begins there."""
    if isinstance(instruction, Convert):
        return instruction.kind != "slice"
    return isinstance(instruction, (Start, Together))


@cache
def _is_product(op: str) -> bool:
    return _name(op) in _PRODUCTS


@cache
def _name(op: str) -> str:
    """Without the namespace and the overload."""
    return op.split(".")[1]


_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "expert_mm", "expert_mm_weight"}
    | {"convolution", "convolution_backward", "attention", "attention_backward"}
)
_VIEWS = frozenset(
    {"view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "split", "detach"}
)
_SEVERAL = 4


def _positions(part: Sequence[Instruction]) -> tuple[dict[str | None, int], dict[str, int]]:
    """Name -> where it is made, None standing for what has no name; name -> where it is first read."""
    made: dict[str | None, int] = {}
    first_read: dict[str, int] = {}
    for position in range(len(part) - 1, -1, -1):
        instruction = part[position]
        for name in instruction.inputs:
            first_read[name] = position
        for output in instruction.outputs:
            made[output] = position
    return made, first_read
