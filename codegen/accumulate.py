"""Gradients of several backward passes that travel between the ranks once: what of the backward part does it.

A gradient is *deferred* if ranks exchange what each has of it, mostly to sum it, and there is nothing but linear calls
between that and the gradient (``hap.deferral``). As an exchange is linear, too, what ranks have of several batches may
be added up before it. What the exchanges read, and the calls behind them, is *local*. A cast that rounds a gradient for
its exchange (``hap.capture.narrow``) goes with the exchange: batches are added up as they were, and rounded once. Other
backward parts are made from a program's, after its passes:

    first      everything but the deferred gradients' exchanges and what follows them; hands out what is local
    further    the same; hands it out added to what earlier batches left
    together   the whole, in which what earlier batches left is added before it is exchanged
    remainder  only the exchanges and what follows them, of what earlier batches left

``first``, ``further`` for the batches in between and ``together`` for the last give the gradients of the whole step;
``remainder`` goes for batches of another shape, which have a program of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from hap.codegen.program import Call, Convert, Instruction, Program, Start, Together, Wait, converts
from hap.deferral import is_linear
from hap.graph import CAST, Value, map_values
from hap.hosts_sum import HOSTS_SUM

Member = Call | Convert


@dataclass(frozen=True)
class BackwardPart:
    """Instructions with what they hand out: ``gradients`` target -> name, ``local`` name -> its name there. What else
    they read is taken from what is saved."""

    instructions: tuple[Instruction, ...]
    gradients: Mapping[str, str]
    local: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Accumulation:
    """``behind``: the names that are made by exchanges of gradients, or of what those made; ``local``: what they read
    besides, each with the dtype in which batches are added up, that of the gradient."""

    program: Program
    behind: frozenset[str]
    local: Mapping[str, torch.dtype]

    @cached_property
    def deferred(self) -> tuple[str, ...]:
        """The targets of these gradients."""
        return tuple(target for target, name in self.program.gradients.items() if name in self.behind)

    @cached_property
    def earlier(self) -> Mapping[str, str]:
        """What is local -> the name under which others read what earlier batches left of it."""
        return {name: _fresh(f"{name}_earlier", self.program.held) for name in self.local}

    @cached_property
    def first(self) -> BackwardPart:
        kept = _filtered(self.program.backward, lambda member: not self._is_behind(member))
        gradients = {t: name for t, name in self.program.gradients.items() if t not in self.deferred}
        return BackwardPart(kept, gradients, {name: name for name in self.local})

    @cached_property
    def further(self) -> BackwardPart:
        made = {name for i in self.first.instructions for name in i.outputs}
        found: list[Instruction] = [self._added(name) for name in self.local if name not in made]
        for instruction in self.first.instructions:
            outputs = (name for name in instruction.outputs if name is not None)
            found += [instruction, *(self._added(name) for name in outputs if name in self.local)]
        return BackwardPart(tuple(found), self.first.gradients, self._total)

    @cached_property
    def remainder(self) -> BackwardPart:
        left = _filtered(self.program.backward, self._is_behind)
        rounded = {name: calls for name in self.local if (calls := self._rounded(name, name))}
        names = {name: str(calls[-1].outputs[0]) for name, calls in rounded.items()}
        gradients = {target: self.program.gradients[target] for target in self.deferred}
        first = (call for calls in rounded.values() for call in calls)
        return BackwardPart((*first, *(self._reading(i, names) for i in left)), gradients)

    @cached_property
    def together(self) -> BackwardPart:
        names, found = dict[str, str](), list[Instruction]()
        for instruction in self.program.backward:
            for name in (n for member in _begun(instruction) if self._is_behind(member) for n in member.inputs):
                if name in self.local and name not in names:
                    calls = [self._added(name), *self._rounded(name, self._total[name])]
                    found += calls
                    names[name] = str(calls[-1].outputs[0])
            found.append(self._reading(instruction, names))
        return BackwardPart(tuple(found), self.program.gradients)

    @cached_property
    def _total(self) -> Mapping[str, str]:
        return {name: _fresh(f"{name}_total", self.program.held) for name in self.local}

    def _added(self, name: str) -> Call:
        """What is local, added to what earlier batches left of it, in their memory."""
        return Call((self._total[name],), "aten.add_.Tensor", (Value(self.earlier[name]), Value(name)), (), "")

    def _rounded(self, name: str, total: str) -> list[Call]:
        """``total``, of ``name``, in that one's dtype, which the exchange is for, if it has another."""
        dtype = _dtype(self.program, name)
        if dtype == self.local[name]:
            return []
        rounded = _fresh(f"{name}_rounded", self.program.held)
        return [Call((rounded,), "aten._to_copy.default", (Value(total),), (("dtype", dtype),), "")]

    def _is_behind(self, member: Member) -> bool:
        return any(name in self.behind for name in member.outputs)

    def _reading(self, instruction: Instruction, names: Mapping[str, str]) -> Instruction:
        """What of it is behind reads other names."""

        def of(convert: Convert) -> Convert:
            return (
                replace(convert, input=names.get(convert.input, convert.input)) if self._is_behind(convert) else convert
            )

        match instruction:
            case Call() if self._is_behind(instruction):
                args = map_values(instruction.args, lambda value: Value(names.get(value.node, value.node)))
                return replace(instruction, args=args)
            case Convert():
                return of(instruction)
            case Together(members=members):
                return replace(instruction, members=tuple(map(of, members)))
            case Start(work=work) | Wait(work=work):
                return replace(instruction, work=replace(work, members=tuple(map(of, work.members))))
        return instruction


def find_accumulation(program: Program) -> Accumulation:
    """What can be deferred."""
    members = [m for i in program.backward for m in _members(i)]
    leads_to = _made_into_gradients(program, members)
    behind, local = set[str](), dict[str, torch.dtype]()
    for member in members:
        name = _made(member)
        if name in leads_to and _is_linear(member) and (_exchanges(member) or not behind.isdisjoint(member.inputs)):
            behind.add(name)
            local |= {n: leads_to[name] for n in member.inputs if n not in behind}
    for cast in _rounding(program, members, behind, local):
        behind.add(_made(cast))
        local[cast.inputs[0]] = local.pop(_made(cast))
    return Accumulation(program, frozenset(behind), local)


def _rounding(
    program: Program, members: Sequence[Member], behind: Collection[str], local: Mapping[str, torch.dtype]
) -> tuple[Call, ...]:
    """The casts that make what is local of what has the dtype in which batches are added up, for exchanges alone."""
    others = {name for m in members if _made(m) not in behind for name in m.inputs}
    casts = {_made(m): m for m in members if isinstance(m, Call) and m.op == CAST}
    found = (casts[name] for name in local if name in casts and name not in others)
    return tuple(c for c in found if _dtype(program, c.inputs[0]) == local[_made(c)] and c.inputs[0] not in local)


def _dtype(program: Program, name: str) -> torch.dtype:
    return program.held[name].meta.dtype


def _made_into_gradients(program: Program, members: Sequence[Member]) -> dict[str, torch.dtype]:
    """Names of which nothing but gradients is made, by linear calls and conversions alone; with a gradient's dtype."""
    gradients = {name: _dtype(program, name) for name in program.gradients.values()}
    found, readers = dict[str, torch.dtype](), dict[str, list[Member]]()
    for member in reversed(members):
        for name in (n for n in member.outputs if n is not None):
            made = [found.get(_made(m)) if _is_linear(m) else None for m in readers.get(name, ())]
            if None not in made and (made or name in gradients):
                found[name] = gradients[name] if name in gradients else next(d for d in made if d is not None)
        for name in member.inputs:
            readers.setdefault(name, []).append(member)
    return found


def _made(member: Member) -> str:
    """What it makes first."""
    return next(name for name in member.outputs if name is not None)


def _is_linear(member: Member) -> bool:
    return isinstance(member, Convert) or is_linear(member.op, len(member.inputs))


def _exchanges(member: Member) -> bool:
    return member.op == HOSTS_SUM if isinstance(member, Call) else member.kind != "slice"


def _members(instruction: Instruction) -> tuple[Member, ...]:
    """The calls and conversions of an instruction, a bundle's where it is waited for or performed."""
    return (instruction,) if isinstance(instruction, Call) else converts(instruction)


def _begun(instruction: Instruction) -> tuple[Member, ...]:
    """The same, a bundle's where it begins or is performed."""
    match instruction:
        case Start(work=work):
            return work.members
        case Wait():
            return ()
    return _members(instruction)


def _filtered(part: Iterable[Instruction], keep: Callable[[Member], bool]) -> tuple[Instruction, ...]:
    """What is kept of every instruction, which of a bundle may be a part."""
    found: list[Instruction] = []
    for instruction in part:
        match instruction:
            case Call() | Convert():
                found += [instruction] if keep(instruction) else []
            case Together():
                found += [] if (work := _fewer(instruction, keep)) is None else [work]
            case Start() | Wait():
                work = _fewer(instruction.work, keep)
                found += [] if work is None else [replace(instruction, work=work)]
    return tuple(found)


def _fewer(work: Together, keep: Callable[[Member], bool]) -> Together | None:
    members = tuple(m for m in work.members if keep(m))
    return replace(work, members=members) if members else None


def _fresh(wanted: str, taken: Iterable[str]) -> str:
    name = wanted
    while name in taken:
        name += "_"
    return name
