"""Small collectives of one kind that may happen at one place become one, so that latencies are paid once.

Gradients above all: each must go home as soon as it is made, and may as well wait for the next few. And what one module
gathers of its parameters. A bundle is closed when it would hold more than ``limit_bytes`` (of the whole values), so
that the wire is busy early and little is held twice. What only the loss needs is in no bundle with what others need: it
may be late, and they may not; nor is what is read before any product in one with what has time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hap.codegen.late import only_for_loss
from hap.codegen.passes.windows import find_windows, rearranged
from hap.codegen.program import Convert, Instruction, Program, Together

LIMIT_BYTES = 1 << 20
Choose = Callable[[Convert, int], str]  # the decomposition for a bundle: its largest member, and the bytes of all


@dataclass
class _Bundle:
    """Members so far, in program order, and where all of them may stand."""

    members: list[tuple[int, Convert, int]]  # position, conversion, bytes
    ready: int
    due: int
    is_result: bool

    @property
    def nbytes(self) -> int:
        return sum(n for _, _, n in self.members)

    @property
    def place(self) -> int:
        """Results go home as soon as all are made; what is read comes as late as it may."""
        return self.ready if self.is_result else self.due


def bucket_collectives(program: Program, *, limit_bytes: int = LIMIT_BYTES, choose: Choose | None = None) -> Program:
    """The pass. Without ``choose`` a bundle takes the decomposition of its largest member."""
    return replace(
        program,
        forward=_bucket(program, program.forward, only_for_loss(program), limit_bytes, choose),
        backward=_bucket(program, program.backward, frozenset(), limit_bytes, choose),
    )


def _bucket(
    program: Program, part: Sequence[Instruction], alone: frozenset[int], limit_bytes: int, choose: Choose | None
) -> tuple[Instruction, ...]:
    bundles = [b for b in _collect(program, part, alone, limit_bytes) if len(b.members) > 1]
    inserted: dict[int, list[Instruction]] = {}
    for bundle in bundles:
        _, largest, _ = max(bundle.members, key=lambda m: m[2])
        how = largest.decomposition if choose is None else choose(largest, bundle.nbytes)
        work = Together(tuple(convert for _, convert, _ in bundle.members), how)
        inserted.setdefault(bundle.place, []).append(work)
    return rearranged(part, [at for b in bundles for at, _, _ in b.members], inserted)


def _collect(program: Program, part: Sequence[Instruction], alone: frozenset[int], limit_bytes: int) -> list[_Bundle]:
    """Greedy: each conversion joins the open bundle of its kind where the windows meet and there is room; ``alone``
    (numbers in the part) have bundles of their own."""
    found: list[_Bundle] = []
    open_: dict[tuple[object, ...], _Bundle] = {}
    for window in find_windows(part):
        convert = part[window.position]
        if not isinstance(convert, Convert):
            continue
        nbytes = program.held[convert.input].meta.nbytes
        key = (*_key(program, convert), window.position in alone, window.is_urgent)
        bundle = open_.get(key)
        if bundle is not None and bundle.nbytes + nbytes <= limit_bytes:
            ready, due = max(bundle.ready, window.ready), min(bundle.due, window.due)
            if ready <= due:
                bundle.members.append((window.position, convert, nbytes))
                bundle.ready, bundle.due = ready, due
                bundle.is_result = bundle.is_result and window.is_result
                continue
        bundle = _Bundle([(window.position, convert, nbytes)], window.ready, window.due, window.is_result)
        if nbytes <= limit_bytes:
            open_[key] = bundle
        found.append(bundle)
    return found


def _key(program: Program, convert: Convert) -> tuple[object, ...]:
    """What members of one bundle share."""
    sums = convert.kind in ("all_reduce", "reduce_scatter")
    return (convert.kind, program.held[convert.input].meta.dtype if sums else None)
