"""Collectives begin as soon as what they carry is made and are waited for where it is read.

Their order among each other is that in which they begin, written in the program and so the same on every rank. What
could begin at once, a parameter to be gathered, begins when the one ``ahead`` places before it has been waited for:
otherwise all gathered parameters would be held together. A collective with nothing to do meanwhile, be it another
collective, stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hap.codegen.passes.windows import Window, find_windows, hides, rearranged, work_of
from hap.codegen.program import Instruction, Program, Start, Wait

AHEAD = 2


def overlap_collectives(program: Program, *, ahead: int = AHEAD) -> Program:
    """The pass. ``ahead`` = 0: parameters are gathered where they are read."""
    taken = set(program.held)
    return replace(
        program,
        forward=_overlap(program.forward, ahead, taken, "f"),
        backward=_overlap(program.backward, ahead, taken, "b"),
    )


def _overlap(part: Sequence[Instruction], ahead: int, taken: set[str], letter: str) -> tuple[Instruction, ...]:
    removed: list[int] = []
    starts: dict[int, list[Instruction]] = {}
    waits: dict[int, list[Instruction]] = {}
    for number, (window, begin) in enumerate(_begins(part, ahead)):
        meanwhile = part[begin : window.due]
        others = any(work_of(i) is not None for i in meanwhile if i is not part[window.position])
        if not hides(meanwhile) and not others:
            continue
        work = work_of(part[window.position])
        assert work is not None
        handle = f"pending_{letter}{number}"
        assert handle not in taken, f"{handle} is taken"
        removed.append(window.position)
        starts.setdefault(begin, []).append(Start(handle, work))
        module = part[window.due].module if window.due < len(part) else work.module
        waits.setdefault(window.due, []).append(Wait(handle, work, module))
    places = sorted({*starts, *waits})
    return rearranged(part, removed, {at: [*waits.get(at, ()), *starts.get(at, ())] for at in places})


def _begins(part: Sequence[Instruction], ahead: int) -> list[tuple[Window, int]]:
    """Every collective with the place where it may begin."""
    found = []
    gathered: list[Window] = []  # those that could begin at once, so far
    for window in find_windows(part):
        begin = window.ready
        if begin == 0 and not window.is_result:
            begin = gathered[-ahead].due if 0 < ahead <= len(gathered) else 0 if ahead else window.due
            begin = min(begin, window.due)
            gathered.append(window)
        found.append((window, begin))
    return found
