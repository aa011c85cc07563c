"""A model's parameters and buffers as this rank's shares: where they come from, and how they go back to whole tensors.

``ModelTensors`` is what a compiled program remembers of the user's module: every parameter and buffer once, under its
first name, with the placement that the program gives it (``None``: whole on every rank; also what the program does not
read). Values come from rank 0, one tensor at a time, so that all ranks start alike; a tensor on ``meta`` stays
uninitialised until ``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from hap.codegen.layout import Layout
from hap.codegen.program import Program
from hap.errors import ProgramError
from hap.placement import Shard
from hap.runtime.checkpoint import Held, Piece
from hap.runtime.collectives import Communicator


@dataclass(frozen=True)
class Slot:
    """One parameter or buffer: its whole shape and dtype, and how it lies on the ranks."""

    name: str
    kind: Literal["parameter", "buffer"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    persistent: bool
    layout: Layout | None

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return self.shape if self.layout is None else self.layout.local_shape(self.shape, rank)

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Rank's share of the whole tensor."""
        return whole if self.layout is None else self.layout.take(whole, rank)


@dataclass(frozen=True)
class ModelTensors:
    """All slots in registration order, for every further name of a tied tensor its first name, and the names of the
    model's own state dict in its order."""

    slots: tuple[Slot, ...]
    tied: Mapping[str, str]
    stored: tuple[str, ...]

    def first_name(self, name: str) -> str:
        return self.tied.get(name, name)

    @property
    def state_names(self) -> Iterator[tuple[str, Slot]]:
        """Every name that a full state dict holds, tied ones included, in the model's order."""
        slots = {slot.name: slot for slot in self.slots}
        for name in self.stored:
            yield name, slots[self.first_name(name)]


def model_tensors(model: nn.Module, program: Program) -> ModelTensors:
    """Describe ``model`` under ``program``'s placements."""
    layouts: dict[str, Layout | None] = {}
    for source in (*program.sources_of("parameter"), *program.sources_of("buffer")):
        placement = program.held[source.name].placement
        layouts[source.target] = Layout.of(placement, program.sizes) if isinstance(placement, Shard) else None
    stored = {name: None for name, found in model.state_dict(keep_vars=True).items() if isinstance(found, torch.Tensor)}
    everything = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    firsts: dict[int, str] = {}
    tied: dict[str, str] = {}
    slots = []
    for name, tensor in everything:
        if id(tensor) in firsts:
            tied[name] = firsts[id(tensor)]
            continue
        firsts[id(tensor)] = name
        is_parameter = isinstance(tensor, nn.Parameter)
        slots.append(
            Slot(
                name=name,
                kind="parameter" if is_parameter else "buffer",
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                trainable=is_parameter and tensor.requires_grad,
                persistent=name in stored,
                layout=layouts.get(name),
            )
        )
    known = {slot.name for slot in slots} | tied.keys()
    return ModelTensors(tuple(slots), tied, tuple(name for name in stored if name in known))


def initial_shares(
    model: nn.Module, tensors: ModelTensors, comm: Communicator
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """This rank's share of every slot on the communicator's device, and the names that have no value yet.

    Collective: rank 0's values are broadcast, whole, one at a time.
    """
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    missing = comm.from_rank_zero([s.name for s in tensors.slots if values[s.name].device.type == "meta"])
    shares: dict[str, torch.Tensor] = {}
    for slot in tensors.slots:
        if slot.name in missing:
            shares[slot.name] = torch.empty(slot.local_shape(comm.rank), dtype=slot.dtype, device=comm.device)
            continue
        if comm.rank == 0:
            whole = values[slot.name].detach().to(comm.device)
        else:
            whole = torch.empty(slot.shape, dtype=slot.dtype, device=comm.device)
        whole = comm.broadcast(whole)
        shares[slot.name] = slot.take(whole, comm.rank).clone(memory_format=torch.contiguous_format)
    return shares, tuple(missing)


def whole_tensor(slot: Slot, share: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """The whole tensor, on the CPU, from every rank's share. Collective."""
    local = share.detach()
    if slot.layout is not None:
        return comm.all_gather(local, **slot.layout._asdict()).cpu()
    return local.cpu().clone()


def check_keys(tensors: ModelTensors, given: Mapping[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """(missing, unexpected) names of a full state dict; a tied tensor is present under any of its names."""
    found = {tensors.first_name(name) for name in given}
    missing = [slot.name for slot in tensors.slots if slot.persistent and slot.name not in found]
    known = {slot.name for slot in tensors.slots}
    unexpected = [name for name in given if tensors.first_name(name) not in known]
    return missing, unexpected


def copy_share(slot: Slot, share: torch.Tensor, whole: torch.Tensor, rank: int) -> None:
    """Overwrite a share with its part of ``whole``. ProgramError if the shape is another."""
    if tuple(whole.shape) != slot.shape:
        raise ProgramError(f"{slot.name}: the state dict holds {tuple(whole.shape)}, the model has {slot.shape}")
    with torch.no_grad():
        share.copy_(slot.take(whole.detach(), rank))


def check_frozen(names: Iterable[str], shares: Mapping[str, torch.Tensor]) -> None:
    """ProgramError if one of these, which were frozen when their program was compiled, is no longer."""
    for name in names:
        if shares[name].requires_grad:
            raise ProgramError(
                f"{name} was frozen when the program was compiled, which computes no gradient for it: unfreeze it "
                "in the model, plan and compile again, and load this program's checkpoint"
            )


def present_gradients(
    tensors: ModelTensors, shares: Mapping[str, torch.Tensor], chosen: Iterable[torch.Tensor] | None = None
) -> list[tuple[torch.Tensor, bool]]:
    """This rank's gradient of every trainable parameter, or of those ``chosen``, that has one, with whether it is a
    shard. ProgramError if one that was chosen is not a parameter of the program."""
    known = {id(shares[slot.name]): slot for slot in tensors.slots if slot.kind == "parameter"}
    given = [chosen] if isinstance(chosen, torch.Tensor) else chosen
    wanted = set(known) if given is None else {id(parameter) for parameter in given}
    if not wanted <= known.keys():
        raise ProgramError("one of the parameters to clip is not the program's: take them from program.parameters()")
    found = [(slot, shares[slot.name].grad) for number, slot in known.items() if slot.trainable and number in wanted]
    return [(gradient, slot.layout is not None) for slot, gradient in found if gradient is not None]


def held_tensors(tensors: ModelTensors, shares: Mapping[str, torch.Tensor], rank: int) -> dict[str, Held]:
    """What a checkpoint has of the shares."""
    found = {}
    for slot in tensors.slots:
        if slot.persistent:
            share = shares[slot.name]
            piece = Piece(share.detach(), slot.shape, slot.layout, rank)
            found[slot.name] = Held(piece, share if isinstance(share, nn.Parameter) else None)
    return found


def names_of(slots: Sequence[Slot], kind: str) -> tuple[str, ...]:
    """Names of the slots of one kind."""
    return tuple(slot.name for slot in slots if slot.kind == kind)
