"""``HapProgram``: what ``hap.compile`` returns. One rank's share of a training step as an ordinary ``nn.Module``.

    for batch in DataLoader(data, batch_sampler=program.batch_sampler(len(data)), collate_fn=program.collate):
        loss = program(**batch)             # this rank's share in, the loss of the global batch out
        loss.backward()                     # fills .grad of the local shares
        program.clip_grad_norm_(1.0)
        optimizer.step(); scheduler.step(); optimizer.zero_grad()

``named_parameters()`` gives the model's own names, each once, with this rank's share as the parameter. Everything that
says "collective" must be called on every rank.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from hap.capture.autocast import Autocast
from hap.capture.inputs import step_inputs
from hap.codegen.passes.runner import Change
from hap.codegen.program import Program
from hap.codegen.source import to_python
from hap.errors import ProgramError
from hap.plan import Plan
from hap.runtime import checkpoint
from hap.runtime.accumulate import Unsummed
from hap.runtime.alike import Alike
from hap.runtime.clipping import global_norm, scale_gradients
from hap.runtime.collectives import Communicator, Pace
from hap.runtime.data import Collate, ShareSampler, Signature
from hap.runtime.elementwise import mark_shards
from hap.runtime.forgotten import note_compiled
from hap.runtime.parts import Root, build_parts, hold, set_mode
from hap.runtime.record import Recorder
from hap.runtime.scaler import GradScaler
from hap.runtime.state import (
    check_frozen,
    check_keys,
    copy_share,
    held_tensors,
    initial_shares,
    model_tensors,
    present_gradients,
    whole_tensor,
)
from hap.runtime.step import RunStep
from hap.runtime.variants import Built, Rebuild, Variant, Variants, split_outputs, without_data

_SEEDS = 2**62  # seeds are int64 tensors


class HapProgram(Root):
    """See the module docstring. Built by ``hap.compile``; making one is collective."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        comm: Communicator,
        model: nn.Module,
        example_inputs: Any,
        example_targets: Any = None,
        rebuild: Rebuild | None = None,
        passes: Sequence[Change] = (),
        dealt: Signature | None = None,
        host: int = 0,
    ) -> None:
        """``rebuild`` makes the program of another shape of batch or mode, its parameters lying as in this one;
        ``passes``: what ``program`` went through. ``dealt``: how hosts have the batch, if it is the program of number
        ``host`` of them.

        ProgramError unless the communicator has the plan's number of ranks.
        """
        super().__init__()
        if comm.world_size != program.world_size:
            raise ProgramError(f"the plan is for {program.world_size} ranks, this job has {comm.world_size}")
        self._plan, self._program, self._comm = plan, program, comm
        self._passes = tuple(passes)
        self._example = (example_inputs, example_targets)
        self._tensors = model_tensors(model, program)
        shares, self._uninitialised = initial_shares(model, self._tensors, comm)
        self._shares: dict[str, torch.Tensor] = {}
        build_parts(self, model)
        places = []
        for slot in self._tensors.slots:
            share = shares[slot.name]
            is_parameter = slot.kind == "parameter"
            self._shares[slot.name] = nn.Parameter(share, requires_grad=slot.trainable) if is_parameter else share
            places.append(hold(self, slot.name, self._shares[slot.name]))
        for further, known in self._tensors.tied.items():
            places.append(hold(self, further, self._shares[known]))
        self._trainable = tuple(s.name for s in self._tensors.slots if s.trainable)
        self._frozen = tuple(s.name for s in self._tensors.slots if s.kind == "parameter" and not s.trainable)
        self._unsummed, self._sums = Unsummed(self._shares), True
        self._mark_shards()
        note_compiled(model)
        self._outputs: Mapping[str, torch.Tensor] = {}
        self._autocast = Autocast.here().dtype
        self.random_seed = comm.from_rank_zero(torch.initial_seed() % _SEEDS)
        example = without_data(step_inputs(example_inputs, example_targets))
        first = Variant.of(Built(program, comm, dealt, host), example, self._shares)
        self._variants = Variants(first, example, model.training, self._shares, self._everyone, rebuild)
        self._alike = Alike(self._tensors.slots)
        self.train(model.training)
        self.close(model, places)

    def __deepcopy__(self, memo: dict[int, Any]) -> HapProgram:
        """A program with parameters and buffers of its own, such as ``torch.optim.swa_utils.AveragedModel`` makes; what
        was compiled is the same. Local."""
        same = (self._plan, self._program, self._passes, self._tensors, self._unsummed)
        memo |= {id(one): one for one in same}
        copied: HapProgram = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        copied._mark_shards()
        copied._trainer = None
        copied._unsummed, copied._alike = Unsummed(copied._shares), self._alike.without_state()
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ProgramError("a compiled program cannot be pickled: save_checkpoint() or state_dict() keep what it holds")

    def _mark_shards(self) -> None:
        layouts = {slot.name: slot.layout for slot in self._tensors.slots if slot.kind == "parameter"}
        mark_shards(self._shares, layouts, self._comm.rank)

    @property
    def plan(self) -> Plan:
        """The plan this program was made from."""
        return self._plan

    @property
    def passes(self) -> tuple[Change, ...]:
        """The passes that ran, in order, each with its ``name``, ``seconds`` and ``diff`` of the program's text."""
        return self._passes

    @property
    def device(self) -> torch.device:
        """Where this rank's shares live, and where inputs are moved to that are on the CPU."""
        return self._comm.device

    def _seeded(self, variant: Variant) -> dict[str, torch.Tensor]:
        """The seed as the program's input, if it draws; each such step takes the next one."""
        if variant.seed is None:
            return {}
        found = torch.full((), self.random_seed, dtype=torch.int64, device=self._comm.device)  # no copy, so no sync
        self.random_seed = (self.random_seed + 1) % _SEEDS
        return {variant.seed: found}

    def set_pace(self, pace: Pace | None) -> None:
        """Have ``pace`` told of every use of the wire: how a rank plays a slower device (``hap.runtime.emulate``)."""
        self._comm.observers.pace = pace

    def forward(self, *args: Any, targets: Any = None, **kwargs: Any) -> torch.Tensor:
        """The loss of the global batch, the same on every rank, from this rank's share of it. Collective.

        On CPUs its sum over the ranks may still be under way: it is waited for when the loss is read, or at the end of
        ``backward()`` (``hap.runtime.late``).
        Arguments are those of the model's forward; ``targets`` those of the loss function. Under ``torch.no_grad()``
        nothing is kept for a backward. Random numbers, dropout's masks among them, are drawn from ``random_seed``,
        alike on every rank, which rises by one at each step that draws (set it to resume a run). After ``eval()`` the
        step is the model's in evaluation, compiled at its first call; so is every shape of batch that ``shard_batch``
        or ``batch_sampler`` met, and every call with other flags, numbers, strings or None (of all ranks alike).
        ProgramError: a tensor that is not this rank's share, parameters that were never given values, or one that was
        frozen at compilation and is no longer.
        """
        if torch.is_inference_mode_enabled():  # a thread that moves what is sent is in no mode, and may not write there
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(*args, targets=targets, **kwargs)
        if self._uninitialised:
            raise ProgramError(f"{self._uninitialised[0]} has no value (the model was on meta): load_state_dict first")
        if (active := Autocast.here().dtype) not in (None, self._autocast):
            raise ProgramError(
                f"torch.autocast to {active} is active, and the program was compiled "
                f"{'without it' if self._autocast is None else f'for {self._autocast}'}: call hap.compile inside of it"
            )
        self.check_idle()
        self.check_call()
        call = self._variants.first.signature.call(args, targets, kwargs)
        variant = self._variants.choose(call, self.training)
        given = variant.signature.read(call, self._comm.rank, self._comm.device)
        self._alike.check(variant, given, self._shares, self._everyone)
        sources = {**variant.state, **given, **self._seeded(variant)}
        updates: dict[str, torch.Tensor] = {}
        if torch.is_grad_enabled():
            check_frozen(self._frozen, self._shares)
            shares = [self._shares[name] for name in self._trainable]
            backward = self._unsummed.together if self._sums else self._unsummed.apart
            loss: torch.Tensor = RunStep.apply(variant.step, sources, updates, self._trainable, backward, *shares)
        else:
            loss, found = variant.step.evaluate(sources)
            updates.update(found)
        self._outputs, kept = split_outputs(updates)
        with torch.no_grad():
            for target, value in kept.items():
                self._shares[target].copy_(value)
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Losses of programs called inside leave gradients unsummed, as ``DistributedDataParallel.no_sync`` has it:

            with program.no_sync():
                for batch in all_but_the_last:
                    program(**batch).backward()
            program(**last).backward()      # sums what all of them left

        Gradients that only consist of sums over the ranks are then added up by every rank for itself, whole, and
        summed once; the memory for that is not in the plan. Until then their ``.grad`` is zeros, and clipping them, an
        optimizer's step, or a backward pass for other parameters is a ProgramError. On every rank alike.
        """
        before, self._sums = self._sums, False
        try:
            yield
        finally:
            self._sums = before

    def record(self, folder: str | os.PathLike[str], *, every: int = 1, probe_every: int = 0) -> Recorder:
        """Write down what this rank does and waits for, for ``hap diagnose``, until the recorder is closed:

            with program.record("runs/1"):
                for batch in loader: ...

        ``every``: of so many steps one is told call by call, of the others only sums. ``probe_every``: links are timed
        at the beginning, and again after so many steps if it is not 0. Collective; see ``hap.runtime.record``.
        ProgramError for a folder that has records already.
        """
        return Recorder(folder, self._comm, self._plan, every=every, probe_every=probe_every)

    @property
    def outputs(self) -> Mapping[str, torch.Tensor]:
        """What the model returned in the last step under the names given as ``outputs=``: whole, on every rank."""
        return self._outputs

    def grad_scaler(self, **options: Any) -> GradScaler:
        """A ``torch.amp.GradScaler(**options)`` that skips a step on all ranks if a gradient overflowed on one."""
        return GradScaler(self._comm, **options)

    def shard_batch(self, batch: Any, targets: Any = None) -> Any:
        """This rank's share of a global batch, in the batch's own form, on this rank's device.

        ``batch`` is a tensor, a tuple or list of positionals, a dict of keywords, or ``(args, kwargs)``; with
        ``targets`` the result is the pair of both. A batch of another size (a last, smaller one) or of other lengths is
        compiled for when it is first met, its parameters lying as they do; that is collective and takes seconds.
        """
        return self._variants.for_batch(batch, targets, self.training).shares(batch, targets)

    def batch_sampler(
        self, dataset_len: int, shuffle: bool = True, seed: int = 0, drop_last: bool = True
    ) -> ShareSampler:
        """A sampler for ``DataLoader(batch_sampler=...)`` that yields this rank's indices of every global batch.

        With ``drop_last=False`` the last batch may be smaller: its program is compiled here, which is collective.
        """
        first = self._variants.first
        size, hosts, layout = first.batch
        last, rest = None, dataset_len % size
        if rest and not drop_last:
            last = self._variants.for_size(rest, self.training).batch
        rank, host = self._comm.rank, first.built.host
        return ShareSampler(
            dataset_len, size, layout, rank, shuffle=shuffle, seed=seed, last=last, hosts=hosts, host=host
        )

    @property
    def collate(self) -> Collate:
        """``default_collate``, and for a rank that holds none of the batch its empty share: for ``collate_fn=``."""
        return Collate(lambda: self._variants.nothing(self.training), *self._example)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, parameters: Iterable[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Clip as ``torch.nn.utils.clip_grad_norm_`` would on one device; returns the global norm. Collective.

        ``parameters``: only these of the program's are counted and scaled, the same on every rank; all of them if it is
        None. ProgramError for others."""
        self._unsummed.check("clip_grad_norm_()")
        present = present_gradients(self._tensors, self._shares, parameters)
        total = global_norm(present, norm_type, self._comm)
        scale_gradients([gradient for gradient, _ in present], total, max_norm)
        return total

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradient of every trainable parameter that has one, on the CPU of every rank. Collective."""
        self._unsummed.check("full_gradients()")
        found = {slot: self._shares[slot.name].grad for slot in self._tensors.slots if slot.trainable}
        return {s.name: whole_tensor(s, g, self._comm) for s, g in found.items() if g is not None}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The whole model under its own names, tied ones included, on the CPU of every rank. Collective.

        It loads into the original model, and into a program of any other plan.
        """
        if args or kwargs:
            raise ProgramError("state_dict of a compiled program takes no arguments: it is the whole model's")
        self.check_idle()
        whole, found = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, slot in self._tensors.state_names:
            if slot.name not in whole:
                whole[slot.name] = whole_tensor(slot, self._shares[slot.name], self._comm)
            found[name] = whole[slot.name]
        self.forgotten.handed_out(found)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take this rank's shares of a whole model's state dict. Local: every rank passes the same dict.

        ProgramError for a wrong shape and, if ``strict``, for missing or unexpected names.
        """
        if assign:
            raise ProgramError("assign=True is not possible: a program's parameters are shares of what is loaded")
        self.check_idle()
        missing, unexpected = check_keys(self._tensors, state_dict)
        if strict and (missing or unexpected):
            raise ProgramError(f"state dict does not fit: missing {missing[:3]}, unexpected {unexpected[:3]}")
        self.forgotten.loaded()
        given = {self._tensors.first_name(name): whole for name, whole in state_dict.items()}
        for slot in self._tensors.slots:
            if slot.name in given:
                copy_share(slot, self._shares[slot.name], given[slot.name], self._comm.rank)
        self._uninitialised = tuple(name for name in self._uninitialised if name not in given)
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)

    def save_checkpoint(
        self, directory: str | os.PathLike[str], *optimizers: torch.optim.Optimizer, extra: Any = None
    ) -> None:
        """Parameters, buffers, what the optimizers keep, their options and ``random_seed``, into a directory that has
        no checkpoint yet and that all ranks see. Collective.

        Every rank writes what it holds (``torch.distributed.checkpoint``), nothing is gathered. ``extra`` is what else
        a run needs, such as ``{"step": 100, "scheduler": scheduler.state_dict()}``: plain containers, numbers, strings
        and tensors, alike on all ranks. ProgramError for parameters without values, and for an optimizer that keeps
        other things of a parameter in shards than numbers and tensors of its shape.
        """
        self.check_idle()
        held, rest = self._held(), {"random_seed": self.random_seed, "extra": extra}
        if empty := [name for name in self._uninitialised if name in held]:
            raise ProgramError(f"{empty[0]} has no value (the model was on meta): nothing can be saved")
        checkpoint.save(directory, held, optimizers, rest, self._everyone, writes=self._writes)

    def load_checkpoint(self, directory: str | os.PathLike[str], *optimizers: torch.optim.Optimizer) -> Any:
        """Go on from a checkpoint, of this plan or any other plan of the model on any number of ranks; its ``extra``.
        Collective.

        Every rank reads what it holds. Give the optimizers, over the same groups of parameters, that it was saved
        with; none to load the model alone. ProgramError, with nothing overwritten, if it does not fit.
        """
        self.check_idle()
        rest = checkpoint.load(directory, self._held(), optimizers, self._everyone)
        self.random_seed, held = rest["random_seed"], self._held()
        self._uninitialised = tuple(name for name in self._uninitialised if name not in held)
        self.forgotten.loaded()
        return rest["extra"]

    @property
    def _everyone(self) -> Communicator:
        """Of all ranks of the job."""
        return self._comm

    @property
    def _writes(self) -> bool:
        """Whether this rank holds a part of what a checkpoint consists of, and not a copy."""
        return True

    def _held(self) -> dict[str, checkpoint.Held]:
        return held_tensors(self._tensors, self._shares, self._comm.rank)

    def print_readable(self) -> str:
        """This rank's FX programs, forward and backward, printed and returned."""
        step = self._variants.first.step
        text = "\n".join(m.print_readable(print_output=False) for m in (step.forward_module, step.backward_module))
        print(text)
        return text

    def python_source(self) -> str:
        """The program of all ranks as one Python file that runs under torchrun."""
        return to_python(self._program, self._plan)

    def train(self, mode: bool = True) -> HapProgram:
        """The model's step in training, or in evaluation, from the next call on."""
        set_mode(self, mode)
        return self

    def compile(self, **options: Any) -> None:
        """As ``nn.Module.compile``, in place: by ``torch.compile`` with these options, forward and backward, and what
        other batches will need; each part when it first runs. Collectives run as they are, between what is compiled.
        Values that cross to the backward part are held until it is done, which no plan reserves memory for. Local."""
        self._variants.compile({"dynamic": False, **options})
