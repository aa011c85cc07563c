"""What is only made ready to be handed out waits for the end of its part.

A gradient is often summed over the ranks and then viewed, cast or transposed. Where it stands, such a call makes the
program wait for the sum at once. Behind everything else it leaves the sum the rest of the part to arrive in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hap.codegen.program import Call, Convert, Instruction, Program
from hap.hosts_sum import HOSTS_SUM


def sink_results(program: Program) -> Program:
    """The pass: calls that need a conversion, and whose results only such calls read, go to the end of their part."""
    return replace(program, forward=_sunk(program.forward), backward=_sunk(program.backward))


def _sunk(part: Sequence[Instruction]) -> tuple[Instruction, ...]:
    needs = _need_a_conversion(part)
    wanted: set[str] = set()  # names that some call reads which stays where it is
    sunk: list[int] = []
    for position in reversed(range(len(part))):
        instruction = part[position]
        if position in needs and not any(name in wanted for name in instruction.outputs):
            sunk.append(position)
        else:
            wanted.update(instruction.inputs)
    moved = [part[position] for position in reversed(sunk)]
    gone = frozenset(sunk)
    return (*(i for position, i in enumerate(part) if position not in gone), *moved)


def _need_a_conversion(part: Sequence[Instruction]) -> frozenset[int]:
    """Numbers of the calls, but sums over hosts, that read, through other calls, what a collective of the part makes,
    and little else: all that they read was made by a conversion, by another such call, or outside the part."""
    converted: set[str] = set()
    made: set[str] = set()
    found: set[int] = set()
    for position, instruction in enumerate(part):
        names = {name for name in instruction.outputs if name is not None}
        match instruction:
            case Convert(kind=kind) if kind != "slice":
                converted |= names
            case Call(op=op, inputs=inputs) if (
                op != HOSTS_SUM
                and any(i in converted for i in inputs)
                and all(i in converted or i not in made for i in inputs)
            ):
                found.add(position)
                converted |= names
        made |= names
    return frozenset(found)
