"""What only the loss needs: it may arrive while the backward part runs.

The loss is the sum of what the ranks have. Nothing but the caller reads that sum, and the caller mostly not before the
backward part is through. So the forward part is cut: what the loss's last collective carries is made and sent, and what
remains, the collective's arrival and the calls behind it, is run when somebody asks for the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from hap.codegen.program import Call, Convert, Instruction, Program, Start, Together, Wait

HANDLE = "loss_pending"


@dataclass(frozen=True)
class LateLoss:
    """A forward part in two. ``first`` leaves the loss's collective running; ``last`` waits for it and makes the loss
    of it and of ``crossing``: names that ``first`` knows, the handle foremost."""

    first: tuple[Instruction, ...]
    crossing: tuple[str, ...]
    last: tuple[Instruction, ...]


def late_loss(program: Program) -> LateLoss | None:
    """None where the loss needs no collective, more than one, or one that something else needs, too."""
    mine = only_for_loss(program)
    arriving: set[str] = set()  # names that some collective of the loss's leads to
    last: list[int] = []
    collectives: list[int] = []
    for position, instruction in enumerate(program.forward):
        if position not in mine:
            continue
        if _arrives(instruction):
            collectives.append(position)
        elif not any(name in arriving for name in instruction.inputs):
            continue
        last.append(position)
        arriving |= {name for name in instruction.outputs if name is not None}
    if len(collectives) != 1 or program.loss not in arriving:
        return None
    first = [i for position, i in enumerate(program.forward) if position not in last]
    tail = [program.forward[position] for position in last]
    arrival = tail[0]
    if not isinstance(arrival, Wait):
        assert isinstance(arrival, (Convert, Together))
        work = Together((arrival,), arrival.decomposition) if isinstance(arrival, Convert) else arrival
        first.insert(collectives[0], Start(HANDLE, work))
        tail[0] = arrival = Wait(HANDLE, work, arrival.module)
    made = {name for i in tail for name in i.outputs if name is not None}
    read = dict.fromkeys(name for i in tail[1:] for name in i.inputs if name not in made)
    return LateLoss(tuple(first), (arrival.handle, *read), tuple(tail))


def only_for_loss(program: Program) -> frozenset[int]:
    """Numbers of the forward part's instructions whose results lead to the loss alone."""
    wanted: set[str | None] = {*program.saved, *program.updates.values()}
    if program.loss in wanted:
        return frozenset()
    found: set[int] = set()
    for position in reversed(range(len(program.forward))):
        instruction = program.forward[position]
        if wanted.isdisjoint(instruction.outputs):
            found.add(position)
        else:
            wanted.update(instruction.inputs)
    return frozenset(found)


def _arrives(instruction: Instruction) -> bool:
    """Whether values come from other ranks there."""
    match instruction:
        case Convert(kind="slice") | Call() | Start():
            return False
    return True
