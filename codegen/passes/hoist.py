"""What a collective carries that follows from the batch alone is made first.

The number of a batch's valid tokens is summed over the ranks before the loss is divided by it. Where it stands, all
ranks wait for that sum at the end of the forward pass. Counted before everything else, it has the whole pass to arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hap.codegen.passes.windows import work_of
from hap.codegen.program import Call, Instruction, Program
from hap.hosts_sum import HOSTS_SUM


def hoist_batch_sums(program: Program) -> Program:
    """The pass: calls of the forward part that a collective needs, and that read nothing but the batch, constants and
    each other, go to its beginning. What they make lives longer for it: no tensor larger than the batch is so made."""
    given = {s.name for kind in ("input", "constant") for s in program.sources_of(kind)}
    room = max((program.held[s.name].meta.nbytes for s in program.sources_of("input")), default=0)
    moved = _needed(program, program.forward, given, room)
    first = [i for position, i in enumerate(program.forward) if position in moved]
    rest = [i for position, i in enumerate(program.forward) if position not in moved]
    return replace(program, forward=(*first, *rest))


def _needed(program: Program, part: Sequence[Instruction], given: set[str], room: int) -> frozenset[int]:
    """Numbers of the calls that move."""
    small: dict[str, int] = {}  # name -> number of the call that makes it of the batch alone
    known = set(given)  # and what is in ``small``
    needs: dict[int, frozenset[int]] = {}  # number of such a call -> those that it needs, and itself
    found: frozenset[int] = frozenset()
    for position, instruction in enumerate(part):
        if isinstance(instruction, Call):
            if known.issuperset(instruction.inputs) and instruction.op != HOSTS_SUM:
                names = [name for name in instruction.outputs if name is not None]
                if all(program.held[name].meta.nbytes <= room for name in names):
                    before = [needs[small[name]] for name in instruction.inputs if name in small]
                    needs[position] = frozenset({position}).union(*before)
                    small |= dict.fromkeys(names, position)
                    known.update(names)
        elif (work := work_of(instruction)) is not None and any(name in small for name in work.inputs):
            found = found.union(*(needs[small[name]] for name in work.inputs if name in small))
    return found
