"""Collectives begin as soon as what they carry is made and are waited for where it is read.

Their order among each other is that in which they begin, written in the program and so the same on every rank. Two
passes: ``prefetch_parameters`` for what could begin at once, a parameter to be gathered: it begins when the one
``ahead`` places before it has been waited for, since otherwise all gathered parameters would be held together, and
behind collectives that come before any product: on one wire they would wait for a parameter that is needed later.
``overlap_collectives`` for what the part itself makes: it begins when it is made, but behind what is urgent, that is,
read before any product: what the weights of a convolution are sent for can wait until the few bytes are through that
the batch norm below it needs at once. What ends as a result is waited for in the order in which it began: else what is
read last, but sent late, would be waited for before what has long arrived is unpacked. A collective with nothing to do
meanwhile, be it another collective or, at the end, results to be unpacked, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hap.codegen.passes.windows import Window, find_windows, has_product, hides, rearranged, sends, work_of
from hap.codegen.program import Instruction, Program, Start, Wait

AHEAD = 2
Begins = Callable[[Sequence[Instruction]], list[tuple[Window, int]]]


def prefetch_parameters(program: Program, *, ahead: int = AHEAD) -> Program:
    """The pass. ``ahead`` = 0: parameters are gathered where they are read."""
    assert ahead >= 0
    return _rewritten(program, lambda part: _prefetched(part, ahead), "ahead")


def overlap_collectives(program: Program) -> Program:
    """The pass. The loss's own collective is left to the runtime, which may have the backward part meanwhile."""
    return replace(_rewritten(program, _overlapped, "pending"), loss_may_be_late=True)


def _rewritten(program: Program, begins: Begins, word: str) -> Program:
    taken = set(program.held)
    return replace(
        program,
        forward=_started(program.forward, begins(program.forward), taken, f"{word}_f"),
        backward=_started(program.backward, begins(program.backward), taken, f"{word}_b"),
    )


def _prefetched(part: Sequence[Instruction], ahead: int) -> list[tuple[Window, int]]:
    """What could begin at once, with the place where it may begin."""
    found: list[tuple[Window, int]] = []
    windows = find_windows(part)
    others = [w.position for w in windows if w.ready > 0]
    for window in windows:
        if window.ready == 0 and not window.is_result:
            begin = found[-ahead][0].due if 0 < ahead <= len(found) else 0 if ahead else window.due
            found.append((window, min(_behind(part, others, begin), window.due)))
    return found


def _behind(part: Sequence[Instruction], others: Sequence[int], begin: int) -> int:
    """Behind the other collectives, at these places, that come before any product."""
    for position in others:
        if position >= begin:
            if has_product(part[begin:position]):
                break
            begin = position + 1
    return begin


def _overlapped(part: Sequence[Instruction]) -> list[tuple[Window, int]]:
    """The others begin where what they carry is made, and what has time, behind what is urgent."""
    windows = [w for w in find_windows(part) if w.ready > 0 or w.is_result]
    urgent = [w.position for w in windows if w.is_urgent]
    begins = [(w, w.ready if w.is_urgent else min(_behind(part, urgent, w.ready), w.due)) for w in windows]
    return _waited_in_turn(sorted(begins, key=lambda one: one[1]), len(part))


def _waited_in_turn(begins: Sequence[tuple[Window, int]], end: int) -> list[tuple[Window, int]]:
    """The same, in the order in which they begin, where no result is waited for after one that begins later."""
    found: list[tuple[Window, int]] = []
    for window, begin in reversed(begins):
        if window.is_result:
            end = min(end, window.due)
            window = replace(window, due=end)
        found.append((window, begin))
    return found[::-1]


def _started(
    part: Sequence[Instruction], begins: Sequence[tuple[Window, int]], taken: set[str], prefix: str
) -> tuple[Instruction, ...]:
    removed: list[int] = []
    starts: dict[int, list[Instruction]] = {}
    waits: dict[int, list[Instruction]] = {}
    is_awaited = False  # some result
    for number, (window, begin) in enumerate(begins):
        meanwhile = part[begin : window.due]
        sent = any(sends(i) for i in meanwhile if i is not part[window.position])
        unpacked = is_awaited and window.is_result and begin < window.due
        if not (hides(meanwhile) or sent or unpacked):
            continue
        is_awaited = is_awaited or window.is_result
        work = work_of(part[window.position])
        assert work is not None
        handle = f"{prefix}{number}"
        assert handle not in taken, f"{handle} is taken"
        removed.append(window.position)
        starts.setdefault(begin, []).append(Start(handle, work))
        module = work.module if window.is_result or window.due == len(part) else part[window.due].module
        waits.setdefault(window.due, []).append(Wait(handle, work, module))
    places = sorted({*starts, *waits})
    return rearranged(part, removed, {at: [*waits.get(at, ()), *starts.get(at, ())] for at in places})
