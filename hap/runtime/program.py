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

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import default_collate

from hap.capture.dropout import SEED
from hap.capture.inputs import StepInputs
from hap.codegen.program import Call, Program
from hap.codegen.source import to_python
from hap.errors import ProgramError
from hap.plan import Plan
from hap.runtime.clipping import global_norm, scale_gradients
from hap.runtime.collectives import Communicator, Pace
from hap.runtime.data import ShareSampler, Signature, in_form
from hap.runtime.state import check_keys, copy_share, initial_shares, model_tensors, register, whole_tensor
from hap.runtime.step import RunStep, Step, without_dropout

_SEEDS = 2**62  # seeds are int64 tensors


class HapProgram(nn.Module):
    """See the module docstring. Built by ``hap.compile``; making one is collective."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        comm: Communicator,
        model: nn.Module,
        example_inputs: Any,
        example_targets: Any = None,
    ) -> None:
        """ProgramError unless the communicator has the plan's number of ranks."""
        super().__init__()
        if comm.world_size != program.world_size:
            raise ProgramError(f"the plan is for {program.world_size} ranks, this job has {comm.world_size}")
        self._plan, self._program, self._comm = plan, program, comm
        self._example = (example_inputs, example_targets)
        self._signature = Signature.of(program, example_inputs, example_targets)
        self._step = Step(program, comm)
        self._tensors = model_tensors(model, program)
        shares, self._uninitialised = initial_shares(model, self._tensors, comm)
        self._shares: dict[str, torch.Tensor] = {}
        for slot in self._tensors.slots:
            share = shares[slot.name]
            is_parameter = slot.kind == "parameter"
            self._shares[slot.name] = nn.Parameter(share, requires_grad=slot.trainable) if is_parameter else share
            register(self, slot.name, self._shares[slot.name])
        self._state_sources = {
            s.name: self._shares[s.target] for s in (*program.sources_of("parameter"), *program.sources_of("buffer"))
        } | {s.name: program.constants[s.target].to(comm.device) for s in program.sources_of("constant")}
        self._trainable = tuple(s.name for s in self._tensors.slots if s.trainable)
        self._seed_name = next((s.name for s in program.sources_of("input") if s.target == SEED), None)
        self.dropout_seed = comm.from_rank_zero(torch.initial_seed() % _SEEDS)
        self._undropped: Step | None = None
        self._captured_training = model.training
        self._takes_batch_statistics = any(
            isinstance(i, Call) and i.op == "hap.batch_norm_squares.default" for i in program.forward
        )
        self.train(model.training)

    @property
    def plan(self) -> Plan:
        """The plan this program was made from."""
        return self._plan

    @property
    def device(self) -> torch.device:
        """Where this rank's shares live and its inputs must be."""
        return self._comm.device

    def _seeded(self) -> dict[str, torch.Tensor]:
        """The seed as the program's input, if it draws. Each training step takes the next one."""
        if self._seed_name is None:
            return {}
        found = torch.tensor(self.dropout_seed, device=self._comm.device)
        if self.training:
            self.dropout_seed = (self.dropout_seed + 1) % _SEEDS
        return {self._seed_name: found}

    def _mode_step(self) -> Step:
        """The step of the current mode: in evaluation nothing is dropped out. ProgramError where capture cannot know
        what the other mode computes."""
        if self.training and not self._captured_training:
            raise ProgramError("compiled from a model in evaluation: call model.train() before hap.compile to train")
        if not self.training and self._takes_batch_statistics:
            raise ProgramError(
                "compiled in training, where batch norm uses the batch's statistics: to evaluate, compile model.eval() "
                "and give it this program's state_dict()"
            )
        if self.training or self._seed_name is None:
            return self._step
        if self._undropped is None:
            self._undropped = Step(without_dropout(self._program), self._comm)
        return self._undropped

    def set_pace(self, pace: Pace | None) -> None:
        """Have ``pace`` told of every use of the wire: how a rank plays a slower device (``hap.runtime.emulate``)."""
        self._comm.pace = pace

    def forward(self, *args: Any, targets: Any = None, **kwargs: Any) -> torch.Tensor:
        """The loss of the global batch, the same on every rank, from this rank's share of it. Collective.

        Arguments are those of the model's forward; ``targets`` those of the loss function. Under ``torch.no_grad()``
        nothing is kept for a backward. Dropout draws from ``dropout_seed``, alike on every rank, which rises by one at
        each call in training (set it to resume a run), and is left out after ``eval()``. ProgramError: a tensor that is
        not this rank's share, parameters that were never given values, or a mode that was not captured: ``train()``
        of a model compiled in evaluation, ``eval()`` of batch norms compiled in training.
        """
        if self._uninitialised:
            raise ProgramError(f"{self._uninitialised[0]} has no value (the model was on meta): load_state_dict first")
        sources = self._state_sources | self._signature.read(
            self._call(args, targets, kwargs), self._comm.rank, self._comm.device
        )
        step, sources = self._mode_step(), sources | self._seeded()
        updates: dict[str, torch.Tensor] = {}
        if torch.is_grad_enabled():
            shares = [self._shares[name] for name in self._trainable]
            loss: torch.Tensor = RunStep.apply(step, sources, updates, self._trainable, *shares)
        else:
            loss, found = step.evaluate(sources)
            updates.update(found)
        if self.training:
            with torch.no_grad():
                for target, value in updates.items():
                    self._shares[target].copy_(value)
        return loss

    def shard_batch(self, batch: Any, targets: Any = None) -> Any:
        """This rank's share of a global batch, in the batch's own form, on this rank's device.

        ``batch`` is a tensor, a tuple or list of positionals, a dict of keywords, or ``(args, kwargs)``; with
        ``targets`` the result is the pair of both.
        """
        return self._signature.shares(batch, targets, self._comm.rank, self._comm.device)

    def batch_sampler(
        self, dataset_len: int, shuffle: bool = True, seed: int = 0, drop_last: bool = True
    ) -> ShareSampler:
        """A sampler for ``DataLoader(batch_sampler=...)`` that yields this rank's indices of every global batch."""
        size, layout = self._signature.batch
        return ShareSampler(dataset_len, size, layout, self._comm.rank, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def collate(self, samples: Sequence[Any]) -> Any:
        """``default_collate``, and for a rank that holds none of the batch its empty share: for ``collate_fn=``.

        The empty share has the form of the example inputs; with example targets it is the pair of both.
        """
        if samples:
            return default_collate(list(samples))
        return in_form(self._signature.nothing(self._comm.rank), *self._example)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip as ``torch.nn.utils.clip_grad_norm_`` would on one device; returns the global norm. Collective."""
        found = [(s, self._shares[s.name].grad) for s in self._tensors.slots if s.trainable]
        present = [(gradient, slot.layout is not None) for slot, gradient in found if gradient is not None]
        total = global_norm(present, norm_type, self._comm)
        scale_gradients([gradient for gradient, _ in present], total, max_norm)
        return total

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradient of every trainable parameter that has one, on the CPU of every rank. Collective."""
        found = {slot: self._shares[slot.name].grad for slot in self._tensors.slots if slot.trainable}
        return {slot.name: whole_tensor(slot, g, self._comm) for slot, g in found.items() if g is not None}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The whole model under its own names, tied ones included, on the CPU of every rank. Collective.

        It loads into the original model, and into a program of any other plan.
        """
        if args or kwargs:
            raise ProgramError("state_dict of a compiled program takes no arguments: it is the whole model's")
        whole: dict[str, torch.Tensor] = {}
        found: dict[str, torch.Tensor] = {}
        for name, slot in self._tensors.state_names:
            if slot.name not in whole:
                whole[slot.name] = whole_tensor(slot, self._shares[slot.name], self._comm)
            found[name] = whole[slot.name]
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take this rank's shares of a whole model's state dict. Local: every rank passes the same dict.

        ProgramError for a wrong shape and, if ``strict``, for missing or unexpected names.
        """
        if assign:
            raise ProgramError("assign=True is not possible: a program's parameters are shares of what is loaded")
        missing, unexpected = check_keys(self._tensors, state_dict)
        if strict and (missing or unexpected):
            raise ProgramError(f"state dict does not fit: missing {missing[:3]}, unexpected {unexpected[:3]}")
        given = {self._tensors.first_name(name): whole for name, whole in state_dict.items()}
        for slot in self._tensors.slots:
            if slot.name in given:
                copy_share(slot, self._shares[slot.name], given[slot.name], self._comm.rank)
        self._uninitialised = tuple(name for name in self._uninitialised if name not in given)
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)

    def print_readable(self) -> str:
        """This rank's FX programs, forward and backward, printed and returned."""
        modules = (self._step.forward_module, self._step.backward_module)
        text = "\n".join(module.print_readable(print_output=False) for module in modules)
        print(text)
        return text

    def python_source(self) -> str:
        """The program of all ranks as one Python file that runs under torchrun."""
        return to_python(self._program, self._plan)

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise ProgramError("a compiled program cannot be moved or cast; compile it with device= and the model's dtype")

    def _call(self, args: tuple[Any, ...], targets: Any, kwargs: Mapping[str, Any]) -> StepInputs:
        """The step's inputs; a model's own ``targets=`` keyword is one where the loss function takes none."""
        if targets is not None and not any(path.startswith("targets.") for path in self._signature.feeds):
            return StepInputs(args, {**kwargs, "targets": targets}, ())
        loss_args = targets if isinstance(targets, (tuple, list)) else () if targets is None else (targets,)
        return StepInputs(args, kwargs, tuple(loss_args))
