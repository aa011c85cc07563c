"""The SPMD program: one list of instructions, the same on every rank, that a plan stands for.

``lower`` turns a ``Graph`` and a ``Plan`` into a ``Program``. Every value has one name per placement it is held in:
``mm_3`` as produced, ``mm_3__r`` once gathered or summed, ``mm_3__s0`` once sharded over dim 0. Sizes stay symbolic
(``LocalSize``), so the program does not depend on the rank. Two parts:

* **forward**: what the loss and the buffers' updates need;
* **backward**: the rest. A node that does not depend on the tangent but that only the backward pass reads is computed
  there, just before its first reader, so that its arguments are kept rather than its result.

A conversion stands just before its first reader; one that a result needs (a gradient going home to its parameter's
placement) stands just after the value is made, so that the whole gradient lives briefly. Values that the
forward part makes and the backward part reads are ``saved``.

Passes (``hap.codegen.passes``) may put several conversions into one collective (``Together``) and let one run while
the program goes on (``Start``, ``Wait``). What is started in a part is waited for in it, and collectives stand in one
order, which is the order in which every rank issues them.

``lower`` refuses, with PlanError, a plan for another graph, a strategy that is not a row of the rule table, conversions
that are not those the strategies imply, and a collective or decomposition that does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch

from hap.graph import Phase, TensorMeta, Value, values_in
from hap.placement import Partial, Placement, Replicate, Shard, Sizes
from hap.plan import Collective
from hap.routes import ROUTED, Way

SourceKind = Literal["parameter", "buffer", "input", "tangent", "constant"]

DECOMPOSITIONS: Mapping[Collective, tuple[str, ...]] = {
    "all_gather": ("all_to_all", "padded", "broadcast", "pairs", "ring", "relay", "two_level"),
    "all_reduce": ("ring", "owners", "two_level"),
    "reduce_scatter": ("all_to_all_sum", "padded", "pairs", "ring", "relay", "two_level"),
    "all_to_all": ("direct", "pairs"),
    "slice": ("local",),
}
_BACKENDS_OWN = {("all_reduce", "ring"), ("all_to_all", "pairs")}  # names that take no list of ranks there


def is_decomposition(kind: Collective, decomposition: str, world_size: int) -> bool:
    """Whether ranks can perform ``kind`` so: a name from ``DECOMPOSITIONS``, with a list of ranks if it takes one."""
    try:
        way = Way.parse(decomposition)
        way.check(world_size)
    except ValueError:
        return False
    takes_ranks = way.name in ROUTED and (kind, way.name) not in _BACKENDS_OWN and way.name != "pairs"
    return way.name in DECOMPOSITIONS[kind] and (takes_ranks or not way.groups)


@dataclass(frozen=True)
class RankDevice:
    """A ``device=`` argument that capture dropped: the device of the rank that runs the call."""


class Held(NamedTuple):
    """What a named value is: the graph's value, its global shape and dtype, and how it lies on the ranks."""

    value: Value
    meta: TensorMeta
    placement: Placement


@dataclass(frozen=True)
class Source:
    """A value that the caller supplies, already in its placement."""

    name: str
    kind: SourceKind
    target: str


@dataclass(frozen=True)
class Call:
    """One operator call on local tensors. ``args`` and ``kwargs`` hold ``Value(name)``, ``LocalSize``, ``RankDevice``.

    ``outputs[i]`` is None where nobody reads output i.
    """

    outputs: tuple[str | None, ...]
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    module: str

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        return tuple(v.node for v in values_in((self.args, tuple(v for _, v in self.kwargs))))


@dataclass(frozen=True)
class Convert:
    """One change of placement by one collective."""

    output: str
    input: str
    kind: Collective
    decomposition: str
    source: Placement
    target: Placement
    phase: Phase
    module: str

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input,)

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.output,)


@dataclass(frozen=True)
class Together:
    """Several conversions of one kind by one collective; sums have one dtype. ``decomposition`` goes for all."""

    members: tuple[Convert, ...]
    decomposition: str

    @property
    def kind(self) -> Collective:
        return self.members[0].kind

    @property
    def module(self) -> str:
        return self.members[0].module

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(m.input for m in self.members)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(m.output for m in self.members)


@dataclass(frozen=True)
class Start:
    """``work`` begins here and is left running under the name ``handle``."""

    handle: str
    work: Together

    @property
    def module(self) -> str:
        return self.work.module

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.work.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.handle,)


@dataclass(frozen=True)
class Wait:
    """The results of what ``Start`` left running in the same part."""

    handle: str
    work: Together
    module: str

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.handle,)

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.work.outputs


Instruction = Call | Convert | Together | Start | Wait


def converts(instruction: Instruction) -> tuple[Convert, ...]:
    """The conversions that an instruction completes."""
    match instruction:
        case Convert():
            return (instruction,)
        case Together():
            return instruction.members
        case Wait():
            return instruction.work.members
    return ()


@dataclass(frozen=True)
class Program:
    """See the module docstring. ``held`` describes every name; ``gradients`` and ``updates`` map targets to names.
    ``recomputed``: the graph's nodes whose calls are repeated for the backward part once the pass has run;
    ``gathered_again``: conversions of parameters that then only such calls read there.
    ``loss_may_be_late``: a runtime may run what only the loss needs when the loss is read (``hap.codegen.late``)."""

    name: str
    graph_fingerprint: str
    world_size: int
    sizes: Mapping[str, Sizes]
    labels: Mapping[str, str]
    sources: tuple[Source, ...]
    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    loss: str
    updates: Mapping[str, str]
    gradients: Mapping[str, str]
    saved: tuple[str, ...]
    held: Mapping[str, Held]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)
    recomputed: tuple[str, ...] = ()
    gathered_again: tuple[Convert, ...] = ()
    loss_may_be_late: bool = False

    @property
    def tangent(self) -> str | None:
        """The name of the loss's tangent, None if no gradient depends on it."""
        return next((s.name for s in self.sources if s.kind == "tangent"), None)

    def sources_of(self, kind: SourceKind) -> tuple[Source, ...]:
        return tuple(s for s in self.sources if s.kind == kind)

    @property
    def forward_sources(self) -> tuple[Source, ...]:
        """Sources that the forward part must be given: all but the tangent."""
        return tuple(s for s in self.sources if s.kind != "tangent")

    @property
    def conversions(self) -> tuple[Convert, ...]:
        return tuple(c for i in (*self.forward, *self.backward) for c in converts(i))


def last_uses(part: Sequence[Instruction], keep: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """For each instruction the names that die with it: last read there, or written there and never read.

    Names in ``keep`` never die. Names are in order of reading, so the emitted text is deterministic.
    """
    kept, dead_already = frozenset(keep), set()
    found: list[tuple[str, ...]] = []
    for instruction in reversed(part):
        dying = []
        for name in (*instruction.inputs, *(n for n in instruction.outputs if n is not None)):
            if name not in kept and name not in dead_already:
                dead_already.add(name)
                dying.append(name)
        found.append(tuple(dying))
    return tuple(reversed(found))


def gradients_alone(program: Program) -> frozenset[str]:
    """Names of gradients that nothing reads before the step ends."""
    read = {name for i in program.backward for name in i.inputs}
    return frozenset(program.gradients.values()) - read


def verify_program(program: Program) -> None:
    """Raise AssertionError unless names are defined once and before use and every conversion fits what it converts."""
    available = {s.name for s in program.forward_sources}
    _verify_part(program, program.forward, available)
    for name in (program.loss, *program.updates.values(), *program.saved):
        assert name in available, f"{name} is not made by the forward part"
    assert isinstance(program.held[program.loss].placement, Replicate), "the loss must end replicated"
    backward = set(program.saved) | ({program.tangent} if program.tangent else set())
    _verify_part(program, program.backward, backward)
    for target, name in program.gradients.items():
        assert name in backward, f"the gradient of {target} is not made by the backward part"
    homes = {s.target: program.held[s.name].placement for s in program.sources if s.kind in ("parameter", "buffer")}
    for target, name in (*program.gradients.items(), *program.updates.items()):
        assert program.held[name].placement == homes[target], f"{name} does not lie like {target}"


def _verify_part(program: Program, part: Sequence[Instruction], available: set[str]) -> None:
    running: dict[str, Together] = {}
    for instruction in part:
        for name in instruction.inputs:
            assert name in available, f"{name} is read before it is defined"
        for output in instruction.outputs:
            if output is not None:
                assert output not in available, f"{output} is defined twice"
                available.add(output)
        for convert in converts(instruction):
            before, after = program.held[convert.input].placement, program.held[convert.output].placement
            assert (before, after) == (convert.source, convert.target), f"{convert} is misdescribed"
        match instruction:
            case Convert():
                _verify_work(program, Together((instruction,), instruction.decomposition))
            case Together():
                _verify_work(program, instruction)
            case Start(handle=handle, work=work):
                assert handle not in program.held, f"{handle} is a value"
                _verify_work(program, work)
                running[handle] = work
            case Wait(handle=handle, work=work):
                started = running.pop(handle, None)
                assert started == work, f"{handle} was not started, or is waited for twice"
    assert not running, f"nobody waits for {sorted(running)}"


def _verify_work(program: Program, work: Together) -> None:
    known = is_decomposition(work.kind, work.decomposition, program.world_size)
    assert known, f"{work} cannot be performed"
    assert {m.kind for m in work.members} == {work.kind}, f"{work} mixes kinds"
    if work.kind in ("all_reduce", "reduce_scatter"):
        assert len({program.held[m.input].meta.dtype for m in work.members}) == 1, f"{work} sums several dtypes"


def placement_suffix(placement: Placement) -> str:
    """``r``, ``p`` or ``s<dim>``: how a converted value's name ends."""
    match placement:
        case Shard(dim=dim):
            return f"s{dim}"
        case Partial():
            return "p"
        case _:
            return "r"


def group_labels(labels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Group -> a Python constant's name made of its label, unique, in the given order.

    ``batch`` becomes ``BATCH``; of dotted names the part that all labels share is left out, so that of
    ``heads of model.h.0.attn`` and ``model.wte.weight dim 0`` remain ``HEADS_OF_H_0_ATTN`` and ``WTE_WEIGHT_DIM_0``.
    """
    shared = _shared_path([word.split(".") for label in labels.values() for word in label.split() if "." in word])
    taken: set[str] = set()
    for group, label in labels.items():
        short = " ".join(word.removeprefix(shared) for word in label.split())
        words = "_".join(re.findall("[0-9A-Za-z]+", short)).upper()
        base = words if words and not words[0].isdigit() else f"GROUP_{words}".rstrip("_")
        name, count = base, 1
        while name in taken:
            count += 1
            name = f"{base}_{count}"
        taken.add(name)
        yield group, name


def _shared_path(paths: Sequence[Sequence[str]]) -> str:
    """The components that all paths begin with, joined, with a final dot; never the name before a number."""
    shared: list[str] = []
    for parts in zip(*(path[:-1] for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    while shared and any(path[len(shared)].isdigit() for path in paths):
        shared.pop()
    return ".".join([*shared, ""])


assert set(DECOMPOSITIONS) == set(get_args(Collective))
