"""ACCO: gradients are exchanged and the optimizer steps while the next batches are computed (Nabli et al.,
arXiv 2406.02613, section 3).

A step's batches come in two halves. While the second is computed at the parameters x, the gradients ``g~`` of the
first are exchanged and an *estimate* ``x~ = update(x, g~)`` is made, whose state of the optimizer is thrown away;
while the first half of the next step is computed at ``x~``, the gradients ``g`` of the second are exchanged and ``x``
moves by both:

    x~(t+1) = update(x(t), mean of g~(t))                       beside computing g(t)    at x(t)
    x(t+1)  = update(x(t), mean of g~(t) and g(t))              beside computing g~(t+1) at x~(t+1)

So nobody waits for an exchange that takes no longer than half a step, at the price that half of the gradients are those
of a guess of the parameters: it is not what one device computes, but what one device would by these equations. Twice as
many bytes travel as in a step that exchanges once.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hap.errors import ProgramError
from hap.runtime.clipping import global_norm, scale_gradients
from hap.runtime.lane import Beside, Running
from hap.runtime.stand_in import StandIn

if TYPE_CHECKING:
    from hap.runtime.program import HapProgram
    from hap.runtime.step import Step

Tensors = dict[str, torch.Tensor]
Held = dict["Step", Tensors]


class Acco:
    """Trains a program by the equations above; on every rank alike.

        optimizer = torch.optim.AdamW(program.parameters())
        acco = hap.Acco(program, optimizer, batches=4)          # two batches at x, two at x~, for each update
        for batch in loader:
            loss = acco.step(**batch)                           # of the global batch, like program(**batch)
        acco.finish()

    The program's own parameters are x, so that it is evaluated, saved and given values as ever, after ``finish()``,
    which may be called between any two steps; a copy of it computes. ``scheduler`` is stepped with every update,
    ``max_norm`` clips each update's gradients, an estimate's, too. An optimizer's options count as they are when a half
    is complete.
    """

    def __init__(
        self,
        program: HapProgram,
        optimizer: torch.optim.Optimizer,
        *,
        batches: int = 2,
        max_norm: float | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        """Collective. ``batches``: of an update, an even number. ProgramError: for an optimizer of other parameters, or
        that keeps parameters of its own; for ``ReduceLROnPlateau``; for parameters with hooks; for a program that
        ``program.compile()`` compiled."""
        if batches < 2 or batches % 2:
            raise ProgramError(f"ACCO has two halves of a step's batches: an even number of them, not {batches}")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ProgramError("ReduceLROnPlateau needs a loss for its step(): step it by yourself, without scheduler=")
        _check_plain(program)
        program.check_idle()
        self._shares = {name: p for name, p in program.named_parameters() if p.requires_grad}
        if not _are_all_of(optimizer, self._shares):
            raise ProgramError("ACCO needs an optimizer of all of the program's trainable parameters, and no others")
        self._program, self._optimizer, self._scheduler = program, optimizer, scheduler
        self._check_hooks()
        self._batches, self._max_norm = batches, max_norm
        self._copy = copy.deepcopy(program)
        self._copy._alike = program._alike  # what either has looked at counts for both
        self._copies = dict(self._copy.named_parameters())
        self._updated = {name: _like(share) for name, share in self._shares.items()}
        self._stand_in = StandIn(optimizer, {share: self._updated[name] for name, share in self._shares.items()})
        self._sharded = {slot.name for slot in program._tensors.slots if slot.layout is not None}
        self._comm = program._comm.another()
        self._beside = Beside(program.device, "acco")
        self._running: Running[Tensors] | None = None
        self._first: Tensors | None = None  # gradients of a step's first half
        self._computed = 0  # batches of the half under way
        self.is_under_way = False  # something has been computed since the last finish()
        self._failed = False
        self._versions: list[int] = []
        program._trainer = weakref.ref(self)

    def step(self, *args: Any, targets: Any = None, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one batch, this rank's share in; the loss of the global batch, detached. Collective.

        With the last batch of a half what was exchanged meanwhile is waited for, and the half's exchange begins.
        ProgramError if the program was written to, or what is trained has changed, since the last ``finish()``.
        """
        program, copied = self._program, self._copy
        _check_plain(program)
        program.check_call(stacklevel=6)
        if self._failed:
            raise ProgramError("a batch under hap.Acco did not come to its end: acco.finish(), and go on")
        if not self._computed:
            self._check_same()
        if not self.is_under_way:
            self._begin()
        copied.train(program.training)
        copied._variants.learn(program._variants)
        copied.random_seed = program.random_seed
        with copied.no_sync():
            loss = copied(*args, targets=targets, **kwargs)
            self.is_under_way = self._failed = True
            (loss / self._batches).backward()
        program.random_seed, program._outputs = copied.random_seed, copied._outputs
        self._computed += 1
        if self._computed == self._batches // 2:
            self._install()
            self._submit()
            self._computed = 0
        self._failed = False
        return loss.detach()

    def finish(self) -> None:
        """Wait for what is under way. The program has the parameters of the last whole step, and the buffers and frozen
        parameters of the last batch; a half that waits for its second is dropped, and so are batches of one that is
        not complete. Collective."""
        try:
            self._install()
        finally:
            self._copy.zero_grad()
            self._first, self._computed, self._failed = None, 0, False
            if self.is_under_way:
                self.is_under_way = False
                frozen = [name for name in self._copies if name not in self._shares]
                ours = (*map(self._program.get_parameter, frozen), *self._program.buffers())
                theirs = (*map(self._copies.__getitem__, frozen), *self._copy.buffers())
                _copy_all(ours, theirs)  # the forward pass may have changed them

    def _begin(self) -> None:
        """The copy computes with what the program has been given."""
        _copy_all((*self._copy.parameters(), *self._copy.buffers()), self._written())
        self._copy._uninitialised = self._program._uninitialised
        self._versions = [tensor._version for tensor in self._written()]

    def _written(self) -> tuple[torch.Tensor, ...]:
        return *self._program.parameters(), *self._program.buffers()

    def _install(self) -> None:
        """What was made beside the last batches is what the next are computed at."""
        if self._running is None:
            return
        running, self._running = self._running, None
        with self._program._comm.wire():
            first = running.result()
        if [tensor._version for tensor in self._written()] != self._versions:
            raise ProgramError("the program was written to while hap.Acco had batches under way: acco.finish() first")
        is_update = self._first is not None
        self._first = None if is_update else first
        if is_update:
            self._stand_in.take_over()
        with torch.no_grad():
            for name, value in self._updated.items():
                self._copies[name].copy_(value)
                if is_update:
                    self._shares[name].copy_(value)
        if is_update:
            self._versions = [tensor._version for tensor in self._written()]
            if self._scheduler is not None:
                self._scheduler.step()

    def _submit(self) -> None:
        """A half is complete: its exchange begins, by what goes for it now."""
        self._check_same()
        held = self._copy._unsummed.take()
        complete = {name: p.grad for name, p in self._copies.items() if p.grad is not None}
        self._copy.zero_grad(set_to_none=True)
        self._stand_in.prepare()
        given = (*complete.values(), *self._updated.values(), *(t for local in held.values() for t in local.values()))
        self._running = self._beside.submit(partial(self._exchange, held, complete, self._first), given)

    def _exchange(self, held: Held, complete: Tensors, first: Tensors | None) -> Tensors:
        """Beside the program: the half's gradients. What the next batches are computed at is ``_updated`` then."""
        gradients = dict(complete)
        for step, local in held.items():
            gradients = _sum(gradients, step.sum_up(local, self._comm.like(step.comm)))
        counted = {n: 2 * g for n, g in gradients.items()} if first is None else _sum(first, gradients)
        _copy_all(self._updated.values(), self._shares.values())
        for name, parameter in self._updated.items():
            parameter.grad = counted.get(name)
        if self._max_norm is not None:
            present = [(p.grad, n in self._sharded) for n, p in self._updated.items() if p.grad is not None]
            total = global_norm(present, 2.0, self._comm)
            scale_gradients([gradient for gradient, _ in present], total, self._max_norm)
        self._stand_in.step(keeps=first is not None)
        for parameter in self._updated.values():
            parameter.grad = None
        return gradients

    def _check_same(self) -> None:
        trained = {name for name, p in self._program.named_parameters() if p.requires_grad}
        if trained != self._shares.keys() or not _are_all_of(self._optimizer, self._shares):
            raise ProgramError(
                "what is trained is not what it was when this Acco was made (by requires_grad, or by the optimizer's "
                "groups): finish(), and make a new Acco, with an optimizer of all trainable parameters"
            )
        self._check_hooks()

    def _check_hooks(self) -> None:
        own = self._program._unsummed.hooked
        for name, share in self._shares.items():
            later = share._post_accumulate_grad_hooks
            if share._backward_hooks or (later and len(later) > (name in own)):
                raise ProgramError(f"{name} has a hook on its gradient, and ACCO has gradients of a copy: leave it out")


def _check_plain(program: HapProgram) -> None:
    """While one thread compiles, torch's optimizers take themselves for compiled in every other, and round their
    corrections to float32: ranks' parameters would not stay alike."""
    if program._variants.is_compiled:
        raise ProgramError("ACCO updates in a thread of its own, which torch.compile disturbs: leave out compile()")


def _are_all_of(optimizer: torch.optim.Optimizer, shares: Mapping[str, torch.Tensor]) -> bool:
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return given == {id(p) for p in shares.values()}


def _like(share: torch.Tensor) -> nn.Parameter:
    """With what others have set on it, which optimizers may go by."""
    found = nn.Parameter(share.detach().clone())
    vars(found).update(vars(share))
    return found


def _copy_all(targets: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)


def _sum(one: Tensors, other: Tensors) -> Tensors:
    both = one.keys() & other.keys()
    return {**one, **other, **{name: one[name] + other[name] for name in both}}
