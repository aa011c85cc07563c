"""What nobody reads is not computed; what only renames a value is not called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hap.codegen.program import Call, Convert, Instruction, Program
from hap.graph import Value, map_values

_RENAMES = ("aten.alias.default", "aten.detach.default", "aten.lift_fresh.default", "aten.lift_fresh_copy.default")


def remove_dead_code(program: Program) -> Program:
    """The pass: drops calls and conversions whose results are not read, and then what was saved for them."""
    kept = list(program.gradients.values())
    backward = _live(program.backward, kept)
    read = set(kept).union(*(i.inputs for i in backward))
    saved = tuple(name for name in program.saved if name in read)
    forward = _live(program.forward, [program.loss, *program.updates.values(), *saved])
    return replace(program, forward=forward, backward=backward, saved=saved)


def remove_renames(program: Program) -> Program:
    """The pass: calls that return their argument as it is. A program writes nothing in place, so names may be joined.
    Not in one part what the other reads under the new name, nor a result."""
    fixed = {program.loss, *program.updates.values(), *program.gradients.values(), *program.saved}
    return replace(program, forward=_joined(program.forward, fixed), backward=_joined(program.backward, fixed))


def _live(part: Sequence[Instruction], kept: Sequence[str]) -> tuple[Instruction, ...]:
    read, found = set(kept), list[Instruction]()
    for instruction in reversed(part):
        if read.isdisjoint(instruction.outputs) and isinstance(instruction, (Call, Convert)):
            continue
        read.update(instruction.inputs)
        found.append(instruction)
    return tuple(reversed(found))


def _joined(part: Sequence[Instruction], fixed: set[str]) -> tuple[Instruction, ...]:
    renamed: dict[str, str] = {}
    found: list[Instruction] = []
    for instruction in part:
        if renamed:
            instruction = _reading(instruction, renamed)
        if isinstance(instruction, Call) and instruction.op in _RENAMES:
            (name,), (origin,) = instruction.outputs, instruction.inputs
            if name is not None and name not in fixed:
                renamed[name] = origin
                continue
        found.append(instruction)
    return tuple(found)


def _reading(instruction: Instruction, renamed: Mapping[str, str]) -> Instruction:
    if renamed.keys().isdisjoint(instruction.inputs):
        return instruction
    match instruction:
        case Call():

            def read(value: Value) -> Value:
                return Value(renamed.get(value.node, value.node))

            kwargs = tuple((key, map_values(arg, read)) for key, arg in instruction.kwargs)
            return replace(instruction, args=map_values(instruction.args, read), kwargs=kwargs)
        case Convert():
            return replace(instruction, input=renamed.get(instruction.input, instruction.input))
    raise AssertionError("renames are removed before collectives are bundled")
