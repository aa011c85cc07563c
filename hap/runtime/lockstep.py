"""All ranks of a program in one process, one instruction at a time: what the program means, without any network.

A value is a list with one local tensor per rank. A conversion is done by definition (join or sum the pieces, then cut
them anew), so the same run is the specification of ``hap.runtime.collectives``, and hundreds of plans can be tried in
the time that starting processes would take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hap.codegen.call import map_leaves, returns_many
from hap.codegen.program import Call, Convert, Instruction, Program, RankDevice, Start, Together, Wait
from hap.errors import ProgramError
from hap.graph import Value
from hap.ops import resolve
from hap.placement import LocalSize, Partial, Placement, Shard, Sizes, join_shards, take_shard

Locals = list[torch.Tensor]  # one per rank


@dataclass(frozen=True)
class StepResult:
    """The loss, the gradients and the updated buffers of one step, whole."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    updates: Mapping[str, torch.Tensor]


def run_lockstep(program: Program, values: Mapping[Value, torch.Tensor], *, check: bool = False) -> StepResult:
    """One step of every rank. ``values`` holds the whole tensor of every source but constants, the tangent included.

    With ``check``, ``values`` holds every value of the graph on one device (``hap.capture.interpret``); each value is
    compared as soon as it is made, and the first one that differs is named in a ProgramError.
    """
    machine = _Lockstep(program, values if check else {})
    for source in program.sources:
        held = program.held[source.name]
        whole = program.constants[source.target] if source.kind == "constant" else values[held.value]
        machine.store(source.name, distribute(whole, held.placement, program.sizes, machine.ranks))
    for instruction in (*program.forward, *program.backward):
        machine.run(instruction)
    return StepResult(
        loss=machine.whole(program.loss),
        gradients={target: machine.whole(name) for target, name in program.gradients.items()},
        updates={target: machine.whole(name) for target, name in program.updates.items()},
    )


def assemble(pieces: Sequence[torch.Tensor], placement: Placement, sizes: Mapping[str, Sizes]) -> torch.Tensor:
    """The whole value that the ranks' pieces stand for."""
    match placement:
        case Shard():
            return join_shards(pieces, placement, sizes[placement.group])
        case Partial():
            return torch.stack(list(pieces)).sum(0, dtype=pieces[0].dtype)
        case _:
            return pieces[0]


def distribute(whole: torch.Tensor, placement: Placement, sizes: Mapping[str, Sizes], ranks: range) -> Locals:
    """Every rank's own, contiguous piece of a whole value; a partial value is never made from a whole one."""
    assert not isinstance(placement, Partial)
    if isinstance(placement, Shard):
        return [take_shard(whole, placement, sizes[placement.group], rank).clone() for rank in ranks]
    return [whole.clone(memory_format=torch.contiguous_format) for _ in ranks]


class _Lockstep:
    def __init__(self, program: Program, reference: Mapping[Value, torch.Tensor]) -> None:
        self.program, self.reference = program, reference
        self.ranks = range(program.world_size)
        self.values: dict[str, Locals] = {}
        self.running: dict[str, list[Locals]] = {}

    def whole(self, name: str) -> torch.Tensor:
        return assemble(self.values[name], self.program.held[name].placement, self.program.sizes)

    def store(self, name: str, pieces: Locals) -> None:
        """Keep a value; its pieces must have the shapes and dtype that its placement says."""
        held = self.program.held[name]
        for rank, piece in enumerate(pieces):
            expected = list(held.meta.shape)
            if isinstance(held.placement, Shard):
                expected[held.placement.dim] = held.placement.local_extent(
                    self.program.sizes[held.placement.group][rank]
                )
            if list(piece.shape) != expected or piece.dtype != held.meta.dtype:
                raise ProgramError(f"{name}: rank {rank} made {tuple(piece.shape)} {piece.dtype}, expected {expected}")
        self.values[name] = pieces
        if held.value in self.reference:
            self._compare(name, held.value)

    def run(self, instruction: Instruction) -> None:
        match instruction:
            case Convert():
                self.store(instruction.output, self._convert(instruction))
            case Together():
                for member in instruction.members:
                    self.store(member.output, self._convert(member))
            case Start():
                self.running[instruction.handle] = [self._convert(m) for m in instruction.work.members]
            case Wait():
                for name, pieces in zip(instruction.outputs, self.running.pop(instruction.handle), strict=True):
                    self.store(name, pieces)
            case Call():
                self._run_call(instruction)

    def _convert(self, convert: Convert) -> Locals:
        whole = assemble(self.values[convert.input], convert.source, self.program.sizes)
        return distribute(whole, convert.target, self.program.sizes, self.ranks)

    def _run_call(self, instruction: Call) -> None:
        results = [self._call(instruction, rank) for rank in self.ranks]
        for index, name in enumerate(instruction.outputs):
            if name is not None:
                self.store(name, [result[index] for result in results])

    def _call(self, call: Call, rank: int) -> Sequence[torch.Tensor]:
        def leaf(found: Value | LocalSize | RankDevice) -> Any:
            if isinstance(found, Value):
                return self.values[found.node][rank]
            return found.at(self.program.sizes, rank) if isinstance(found, LocalSize) else "cpu"

        args = [map_leaves(arg, leaf) for arg in call.args]
        result = resolve(call.op)(*args, **{key: map_leaves(arg, leaf) for key, arg in call.kwargs})
        return result if returns_many(call) else (result,)

    def _compare(self, name: str, value: Value) -> None:
        expected, found = self.reference[value], self.whole(name)
        placement = self.program.held[name].placement
        replicas = self.values[name] if not isinstance(placement, (Shard, Partial)) else [found]
        for rank, replica in enumerate(replicas):
            if not torch.allclose(replica, expected, rtol=1e-9, atol=1e-11, equal_nan=True):
                raise ProgramError(f"{name} ({placement}) differs from one device's {value}, first seen at rank {rank}")
