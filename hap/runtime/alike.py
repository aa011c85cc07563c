"""What a plan has whole on every rank must be the same on every rank, and nothing in a step would show that it is not:
each would train on its own. So it is compared once, when a program first runs for a shape or kind of call.

That is data which each rank draws or augments for itself (seeded by its rank, as is usual where each trains on data of
its own), and at the program's first step parameters that were given values rank by rank. What is compared of a tensor
is its length and two sums of its elements with random weights, the same on all ranks, in float64: places count, so
other orders are told apart, and what differs by rounding alone, as where unlike devices made it, passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from hap.errors import ProgramError
from hap.runtime.collectives import Communicator
from hap.runtime.state import Slot
from hap.runtime.variants import Variant

TOLERANCE = 1e-4  # of a tensor's length: rounding in float32 adds up to less, and other data differ by its tenths
OF_FLOATS = 5e-3  # the same of inputs that may be made before the step, in 16 bits or TF32, on devices that are unlike
_CHUNK = 2**18
_NOTHING = float("-inf")  # of a rank that has a part


class Alike:
    """Which programs have been looked at. ``slots``: the parameters and buffers, none of which are looked at later."""

    def __init__(self, slots: tuple[Slot, ...]) -> None:
        self._slots = slots
        self._compared: set[int] = set()

    def without_state(self) -> Alike:
        """For a copy of a program that has trained: what all ranks update may differ by rounding that added up."""
        found = Alike(())
        found._compared = set(self._compared)
        return found

    @torch.compiler.disable
    def check(
        self,
        variant: Variant,
        given: Mapping[str, torch.Tensor],
        shares: Mapping[str, torch.Tensor],
        everyone: Communicator,
    ) -> None:
        """ProgramError on every rank, if what all hold whole is not the same. ``given``: the variant's inputs by name.
        Collective when a variant comes for the first time, free otherwise."""
        if id(variant.step) in self._compared:
            return
        self._compared.add(id(variant.step))
        slots, self._slots = self._slots, ()
        if everyone.group is None or not (variant.signature.feeds or slots):
            return
        rows = [*_of_inputs(variant, given), *([None if slot.layout else shares[slot.name]] for slot in slots)]
        width, weights = max(map(len, rows)), _weights().to(everyone.device)
        found = torch.stack([_told(t, weights) for row in rows for t in (*row, *[None] * (width - len(row)))])
        with everyone.wire():
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=everyone.group)
        highest, lowest, length = found[:, :2], -found[:, 2:4], found[:, 4:5]
        of_inputs = torch.arange(len(found), device=found.device) < len(variant.signature.feeds) * width
        limits = torch.where(of_inputs & (found[:, 5] > 0), OF_FLOATS, TOLERANCE)
        most = limits[:, None] * length
        differs = (highest - lowest > most).any(1).view(-1, width).any(1)
        names = [*variant.signature.feeds, *(slot.name for slot in slots)]
        for place, (name, is_other) in enumerate(zip(names, differs.tolist(), strict=True)):
            if is_other:
                raise ProgramError(_of_an_input(name) if place < len(variant.signature.feeds) else _of_state(name))


def _of_an_input(path: str) -> str:
    return (
        f"input {path} is not the same on all ranks, and this plan has it whole on each: draw it alike (samplers, "
        "augmentation and masks seeded the same on all ranks, not by rank, and on the CPU where GPUs are unlike), or "
        "draw inside of the model"
    )


def _of_state(name: str) -> str:
    return (
        f"{name} is whole on every rank, and was given other values on one rank than on another: initialise the model "
        "before hap.compile, or hand all ranks the same values by program.load_state_dict()"
    )


def _of_inputs(variant: Variant, given: Mapping[str, torch.Tensor]) -> Iterator[list[torch.Tensor | None]]:
    """Of every input, for each part that hosts have, this rank's tensor if that is its host's part, whole."""
    built = variant.built
    for path, feed in variant.signature.feeds.items():
        whole = None if feed.name is None or feed.layout is not None else given[feed.name]
        to_hosts = None if built.dealt is None else built.dealt.feeds[path].layout
        if to_hosts is None:
            yield [whole]
        else:
            yield [whole if host == built.host else None for host in range(len(to_hosts.sizes))]


def _weights() -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.rand((2, _CHUNK), dtype=torch.float64, generator=generator, device="cpu") - 0.5


def _told(tensor: torch.Tensor | None, weights: torch.Tensor) -> torch.Tensor:
    """(two sums, the same negated, the length, whether of floats), so that the highest tell the lowest, too."""
    if tensor is None:
        return weights.new_full((6,), _NOTHING)
    sums, squares = weights.new_zeros(2), weights.new_zeros(1)
    flat = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    for number, chunk in enumerate(flat.reshape(-1).split(_CHUNK)):
        values = chunk.to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
        sums += weights[:, : len(values)] @ values * (1.0 + weights[0, number % _CHUNK])
        squares += values @ values
    return torch.cat([sums, -sums, squares.sqrt(), weights.new_tensor([float(flat.is_floating_point())])])
