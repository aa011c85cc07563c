"""What is only made ready to be handed out waits for the end of its part.

A gradient is often summed over the ranks and then viewed, cast or transposed. Where it stands, such a call makes the
program wait for the sum at once. Behind everything else it leaves the sum the rest of the part to arrive in. Products
stay: what they read would be held until then, and where they run best is the search's to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hap.codegen.passes.windows import is_product
from hap.codegen.program import Call, Convert, Instruction, Program
from hap.hosts_sum import HOSTS_SUM


def sink_results(program: Program) -> Program:
    """The pass: calls that need a conversion, and whose results only such calls read, go to the end of their part."""
    return replace(program, forward=_sunk(program.forward), backward=_sunk(program.backward))


def _sunk(part: Sequence[Instruction]) -> tuple[Instruction, ...]:
    needs = _need_a_conversion(part)
    if not needs:
        return tuple(part)
    wanted: set[str] = set()  # names that some call reads which stays where it is
    sunk: list[int] = []
    for position in range(len(part) - 1, -1, -1):
        instruction = part[position]
        if position in needs and wanted.isdisjoint(instruction.outputs):
            sunk.append(position)
        else:
            wanted.update(instruction.inputs)
    moved = [part[position] for position in reversed(sunk)]
    gone = frozenset(sunk)
    return (*(i for position, i in enumerate(part) if position not in gone), *moved)


def _need_a_conversion(part: Sequence[Instruction]) -> frozenset[int]:
    """Numbers of the calls, but sums over hosts and products, that read, through other calls, what a collective of the
    part makes, and little else: all that they read was made by a conversion, by another such call, or outside the part.
    """
    converted: set[str | None] = set()
    others: set[str | None] = set()  # what else the part has made
    found: set[int] = set()
    for position, instruction in enumerate(part):
        if isinstance(instruction, Call):
            inputs = instruction.inputs
            stays = instruction.op == HOSTS_SUM or is_product(instruction)
            if not stays and not converted.isdisjoint(inputs) and others.isdisjoint(inputs):
                found.add(position)
                converted.update(instruction.outputs)
                continue
        elif isinstance(instruction, Convert) and instruction.kind != "slice":
            converted.update(instruction.outputs)
            continue
        others.update(instruction.outputs)
    return frozenset(found)
