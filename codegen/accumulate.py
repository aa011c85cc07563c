"""Gradients of several backward passes that travel between the ranks once: what of the backward part does it.

A gradient is *deferred* if the last thing that happens to it is that ranks exchange what each has of it, a sum over the
ranks mostly; behind that stand only calls that are linear. As an exchange is linear, too, what ranks have of several
batches may be added up before it. What is read by the exchanges is *local*. Three other backward parts are made from a
program's, after its passes:

    apart      everything but the deferred gradients' exchanges and what follows them; hands out what is local
    together   the whole, in which what earlier batches left is added before it is exchanged
    remainder  only the exchanges and what follows them, of what earlier batches left

``apart`` for all batches of a step but the last and ``together`` for that one give the gradients of the whole step;
``remainder`` goes for batches of another shape, which have a program of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from hap.codegen.program import Call, Convert, Instruction, Program, Start, Together, Wait, converts
from hap.graph import Value

_CALLS = """_to_copy.default _unsafe_view.default add.Tensor alias.default clone.default div.Tensor mul.Tensor
neg.default permute.default reshape.default squeeze.dim squeeze.dims sum.dim_IntList t.default transpose.int
unsqueeze.default view.default"""
LINEAR = frozenset(f"aten.{name}" for name in _CALLS.split())  # where they read one tensor, of an addition two
_ADDS = "aten.add.Tensor"

Member = Call | Convert


@dataclass(frozen=True)
class BackwardPart:
    """Instructions with what they hand out: ``gradients`` target -> name, ``local`` names. What else they read is taken
    from what is saved."""

    instructions: tuple[Instruction, ...]
    gradients: Mapping[str, str]
    local: tuple[str, ...] = ()


@dataclass(frozen=True)
class Accumulation:
    """``deferred``: the gradients' targets, with the names of what is local of each."""

    program: Program
    deferred: Mapping[str, tuple[str, ...]]

    @cached_property
    def local(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for names in self.deferred.values() for name in names))

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """What is local -> the dtype in which batches are added up: that of the gradient."""
        held = self.program.held
        return {
            name: held[self.program.gradients[target]].meta.dtype
            for target, names in self.deferred.items()
            for name in names
        }

    @cached_property
    def earlier(self) -> Mapping[str, str]:
        """What is local -> the name under which ``together`` reads what earlier batches left of it."""
        return {name: _fresh(f"{name}_earlier", self.program.held) for name in self.local}

    @cached_property
    def apart(self) -> BackwardPart:
        kept = _filtered(self.program.backward, lambda member: not self._is_behind(member))
        gradients = {t: name for t, name in self.program.gradients.items() if t not in self.deferred}
        return BackwardPart(kept, gradients, self.local)

    @cached_property
    def remainder(self) -> BackwardPart:
        left = _filtered(self.program.backward, self._is_behind)
        rounded = {name: calls for name in self.local if (calls := self._rounded(name, name))}
        names = {name: str(calls[-1].outputs[0]) for name, calls in rounded.items()}
        gradients = {target: self.program.gradients[target] for target in self.deferred}
        first = (call for calls in rounded.values() for call in calls)
        return BackwardPart((*first, *(_reading(i, names) for i in left)), gradients)

    @cached_property
    def together(self) -> BackwardPart:
        names, found = dict[str, str](), list[Instruction]()
        for instruction in self.program.backward:
            for member in _begun(instruction):
                if _exchanges(member) and member.input in self.earlier and member.input not in names:
                    calls = self._added(member.input)
                    found += calls
                    names[member.input] = str(calls[-1].outputs[0])
            found.append(_reading(instruction, names))
        return BackwardPart(tuple(found), self.program.gradients)

    def _added(self, name: str) -> list[Call]:
        """What is local with what earlier batches left of it, in its own dtype: that is what the exchange is for."""
        total = _fresh(f"{name}_total", self.program.held)
        add = Call((total,), _ADDS, (Value(name), Value(self.earlier[name])), (), "")
        return [add, *self._rounded(name, total)]

    def _rounded(self, name: str, total: str) -> list[Call]:
        """``total``, of ``name``, in that one's dtype, if it has another."""
        dtype = self.program.held[name].meta.dtype
        if dtype == self.dtypes[name]:
            return []
        rounded = _fresh(f"{name}_rounded", self.program.held)
        return [Call((rounded,), "aten._to_copy.default", (Value(total),), (("dtype", dtype),), "")]

    def _is_behind(self, member: Member) -> bool:
        return any(name in self._behind for name in member.outputs)

    @cached_property
    def _behind(self) -> frozenset[str]:
        return frozenset(_behind(self.program.backward, self.local))


def find_accumulation(program: Program) -> Accumulation:
    """Which gradients can be deferred."""
    consists_of: dict[str, frozenset[str]] = {}  # what is local
    for instruction in program.backward:
        for member in _members(instruction):
            if isinstance(member, Convert) and _exchanges(member):
                consists_of[member.output] = frozenset({member.input})
            elif _is_linear(member) and all(name in consists_of for name in member.inputs):
                parts = frozenset[str]().union(*(consists_of[name] for name in member.inputs))
                consists_of |= dict.fromkeys((n for n in member.outputs if n is not None), parts)
    targets = program.gradients.items()
    deferred = {target: consists_of[name] for target, name in targets if name in consists_of}
    while True:
        behind = _behind(program.backward, {name for parts in deferred.values() for name in parts})
        members = [m for i in program.backward for m in _members(i) if not _is_linear(m)]
        bad = frozenset[str]().union(
            *(behind.get(name, ()) for m in members for name in m.inputs),
            *(behind.get(name, ()) for target, name in targets if target not in deferred),
        )
        if not bad:
            return Accumulation(program, {t: tuple(sorted(parts)) for t, parts in deferred.items()})
        deferred = {t: parts for t, parts in deferred.items() if not parts & bad}


def _is_linear(member: Member) -> bool:
    """Besides exchanges, which are, too."""
    if isinstance(member, Convert):
        return not _exchanges(member)
    return member.op in LINEAR and len(member.inputs) == (2 if member.op == _ADDS else 1)


def _exchanges(member: Member) -> bool:
    return isinstance(member, Convert) and member.kind != "slice"


def _members(instruction: Instruction) -> tuple[Member, ...]:
    """The calls and conversions of an instruction, a bundle's where it is waited for or performed."""
    return (instruction,) if isinstance(instruction, Call) else converts(instruction)


def _begun(instruction: Instruction) -> tuple[Convert, ...]:
    """The conversions of an instruction, a bundle's where it begins or is performed."""
    match instruction:
        case Start(work=work):
            return work.members
        case Wait():
            return ()
    return converts(instruction)


def _behind(part: Sequence[Instruction], local: Iterable[str]) -> dict[str, frozenset[str]]:
    """What cannot be made before these are exchanged: name -> those of them that it depends on."""
    cut, found = frozenset(local), dict[str, frozenset[str]]()
    for instruction in part:
        for member in _members(instruction):
            if _exchanges(member) and cut.issuperset(member.inputs):
                found[str(member.outputs[0])] = frozenset(member.inputs)
            elif parts := [found[name] for name in member.inputs if name in found]:
                found |= dict.fromkeys((n for n in member.outputs if n is not None), frozenset[str]().union(*parts))
    return found


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


def _reading(instruction: Instruction, names: Mapping[str, str | None]) -> Instruction:
    """The exchanges of an instruction reading other names."""

    def of(convert: Convert) -> Convert:
        name = names.get(convert.input)
        return replace(convert, input=name) if name is not None and _exchanges(convert) else convert

    match instruction:
        case Convert():
            return of(instruction)
        case Together(members=members):
            return replace(instruction, members=tuple(map(of, members)))
        case Start(work=work) | Wait(work=work):
            return replace(instruction, work=replace(work, members=tuple(map(of, work.members))))
    return instruction


def _fresh(wanted: str, taken: Iterable[str]) -> str:
    name = wanted
    while name in taken:
        name += "_"
    return name
