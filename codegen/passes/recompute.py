"""What the backward pass needs of chosen calls is not kept but made again, just before it is read.

``program.recomputed`` names the calls (of the forward part, by their nodes). Where the backward part reads what one of
them made, the call is made once more, and before it those of the chosen calls whose results it reads; so what they make
dies in the forward part after its last reader there. The rest is saved as before: what other calls made, what a
collective made (nothing is sent twice), and the inputs of the calls that are repeated. A parameter that is gathered
again for the backward pass is gathered sooner if a repeated call reads it, or for such calls alone.

A program writes nothing in place and random numbers go by seed and position, so a repeated call gives the same ones.
Buffer updates are results of the forward part and stay there: a running statistic moves once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hap.codegen.program import Call, Convert, Instruction, Program
from hap.graph import Value, map_values
from hap.placement import Placement


def recompute_calls(program: Program) -> Program:
    """The pass."""
    return _Backward(program).run() if program.recomputed else program


@dataclass
class _Backward:
    """The backward part in the making. ``names``: what the forward part made -> under which name it is read now."""

    program: Program
    part: list[Instruction] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    saved: dict[str, None] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)  # what conversions of the part have made

    def __post_init__(self) -> None:
        program = self.program
        chosen = frozenset(program.recomputed)
        self.position = {name: at for at, i in enumerate(program.forward) for name in i.outputs if name is not None}
        self.origin: dict[str, Call] = {}  # name -> the call to make again for it
        for call in program.forward:
            if isinstance(call, Call) and _node(program, call) in chosen:
                self.origin.update((name, call) for name in call.outputs if name is not None)
        for name in program.gradients.values():
            self.origin.pop(name, None)
        own = {name for i in program.backward for name in i.outputs if name is not None}
        self.own = own | ({program.tangent} if program.tangent else set())
        self.held = dict(program.held)
        self.converts: dict[tuple[Value, Placement], Convert] = {}  # those of the part that read nothing made in it
        for i in (*program.backward, *program.gathered_again):
            if isinstance(i, Convert) and i.input not in own:
                self.converts[program.held[i.input].value, i.target] = i

    def run(self) -> Program:
        for instruction in self.program.backward:
            self._repeat(instruction.inputs)
            if isinstance(instruction, Convert):
                self._convert(instruction)
            elif self.own.issuperset(instruction.inputs):
                self.part.append(instruction)
            else:
                names = {name: self._read(name) for name in instruction.inputs}
                same = all(name == read for name, read in names.items())
                self.part.append(instruction if same else _renamed(instruction, names))
        for name in self.program.gradients.values():
            if name not in self.own:
                self.saved[name] = None
        return replace(self.program, backward=tuple(self.part), saved=tuple(self.saved), held=self.held)

    def _repeat(self, wanted: tuple[str, ...]) -> None:
        """Make again, in their order, the calls that ``wanted`` need and that were not made again so far."""
        if self.origin.keys().isdisjoint(wanted):
            return
        waiting, calls = list(wanted), dict[int, Call]()
        while waiting:
            name = waiting.pop()
            if name in self.origin and name not in self.names and self.position[name] not in calls:
                calls[self.position[name]] = self.origin[name]
                waiting.extend(self.origin[name].inputs)
        for at in sorted(calls):
            call = calls[at]
            read = {name: self._read(name) for name in call.inputs}
            made = {name: self._again(name) for name in call.outputs if name is not None}
            self.names.update(made)
            outputs = tuple(None if name is None else made[name] for name in call.outputs)
            self.part.append(_renamed(replace(call, outputs=outputs), read))

    def _read(self, name: str) -> str:
        """Under which name the backward part finds ``name``."""
        if name in self.own:
            return name
        if name not in self.names:
            held = self.program.held[name]
            convert = self.converts.get((held.value, held.placement))
            if convert is None:
                self.saved[name] = None
                return name
            self._convert(convert)
            self.names[name] = convert.output
        return self.names[name]

    def _convert(self, convert: Convert) -> None:
        if convert.output not in self.done:
            self.done.add(convert.output)
            self.part.append(_renamed(convert, {convert.input: self._read(convert.input)}))

    def _again(self, name: str) -> str:
        again, count = f"{name}_again", 1
        while again in self.held:
            count += 1
            again = f"{name}_again_{count}"
        self.held[again] = self.program.held[name]
        return again


def _node(program: Program, call: Call) -> str | None:
    return next((program.held[name].value.node for name in call.outputs if name is not None), None)


def _renamed(instruction: Instruction, names: Mapping[str, str]) -> Instruction:
    """Reading other names."""
    match instruction:
        case Call():

            def read(value: Value) -> Value:
                return Value(names[value.node])

            kwargs = tuple((key, map_values(arg, read)) for key, arg in instruction.kwargs)
            return replace(instruction, args=map_values(instruction.args, read), kwargs=kwargs)
        case Convert():
            return replace(instruction, input=names[instruction.input])
    raise AssertionError("calls are repeated before collectives are bundled")
