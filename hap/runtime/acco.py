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
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hap.errors import ProgramError
from hap.runtime.clipping import global_norm, scale_gradients
from hap.runtime.lane import Beside, Running
from hap.runtime.state import present_gradients

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

    The program's own parameters are x, so that it is evaluated and saved as ever, after ``finish()``, which may be
    called between any two steps; a copy of it computes. ``scheduler`` is stepped with every update, ``max_norm`` clips
    each update's gradients, an estimate's, too.
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
        """Collective. ``batches``: of an update, an even number. ProgramError: for an optimizer of other
        parameters; for a program that ``program.compile()`` compiled."""
        if batches < 2 or batches % 2:
            raise ProgramError(f"ACCO has two halves of a step's batches: an even number of them, not {batches}")
        _check_plain(program)
        self._shares = {name: p for name, p in program.named_parameters() if p.requires_grad}
        given = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if given != {id(p) for p in self._shares.values()}:
            raise ProgramError("ACCO needs an optimizer of all of the program's trainable parameters, and no others")
        self._program, self._optimizer, self._scheduler = program, optimizer, scheduler
        self._batches, self._max_norm = batches, max_norm
        self._copy = copy.deepcopy(program)
        self._copies = dict(self._copy.named_parameters())
        self._comm = program._comm.another()
        self._beside = Beside(program.device, "acco")
        self._running: Running[Tensors] | None = None
        self._first: Tensors | None = None  # gradients of a step's first half
        self._computed = 0  # batches of the half under way

    def step(self, *args: Any, targets: Any = None, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one batch, this rank's share in; the loss of the global batch, detached. Collective.

        With the last batch of a half what was exchanged meanwhile is waited for, and the half's exchange begins.
        """
        _check_plain(self._program)
        self._copy.train(self._program.training)
        self._copy._variants.learn(self._program._variants)
        self._copy.random_seed = self._program.random_seed
        with self._copy.no_sync():
            loss = self._copy(*args, targets=targets, **kwargs)
            (loss / self._batches).backward()
        self._program.random_seed = self._copy.random_seed
        self._computed += 1
        if self._computed == self._batches // 2:
            self._computed = 0
            self._install()
            held, complete = self._taken()
            work = partial(self._exchange, held, complete, self._first is None)
            self._running = self._beside.submit(work, _tensors(held, complete))
        return loss.detach()

    def finish(self) -> None:
        """Wait for what is under way. The program has the parameters of the last whole step, and the buffers and frozen
        parameters of the last batch; a half that waits for its second is dropped, and so are batches of one that is
        not complete. Collective."""
        self._install()
        self._copy.zero_grad()
        self._first, self._computed = None, 0
        with torch.no_grad():
            for name, share in self._program.named_parameters():
                copied = self._copies[name]
                if name in self._shares:
                    copied.copy_(share)
                else:  # the forward pass may have changed it
                    share.copy_(copied)
            for buffer, used in zip(self._program.buffers(), self._copy.buffers(), strict=True):
                buffer.copy_(used)

    def _install(self) -> None:
        """What was made beside the last batches is what the next are computed at."""
        if self._running is None:
            return
        with self._program._comm.wire():
            found, self._running = self._running.result(), None
        with torch.no_grad():
            for name, value in found.items():
                self._copies[name].copy_(value)

    def _taken(self) -> tuple[Held, Tensors]:
        """What this rank has of a half's gradients: to be exchanged, and what is complete."""
        held = self._copy._unsummed.take()
        complete = {name: p.grad for name, p in self._copies.items() if p.grad is not None}
        self._copy.zero_grad(set_to_none=True)
        return held, complete

    def _exchange(self, held: Held, complete: Tensors, is_first: bool) -> Tensors:
        """Beside the program: the parameters that the next batches are computed at."""
        gradients = dict(complete)
        for step, local in held.items():
            for name, found in step.sum_up(local, self._comm.like(step.comm)).items():
                gradients[name] = gradients[name] + found if name in gradients else found
        if is_first:
            self._first = gradients
            return self._estimated({name: 2 * gradient for name, gradient in gradients.items()})
        assert self._first is not None
        first, self._first = self._first, None
        self._update(_sum(first, gradients))
        if self._scheduler is not None:
            self._scheduler.step()
        return {name: share.detach().clone() for name, share in self._shares.items()}

    def _estimated(self, gradients: Tensors) -> Tensors:
        """What an update would make of the parameters. They stay, and what the optimizer keeps, also in its groups:
        copies are updated."""
        state, before = dict(self._optimizer.state), {name: share.data for name, share in self._shares.items()}
        groups = [dict(group) for group in self._optimizer.param_groups]
        for parameter, kept in state.items():
            self._optimizer.state[parameter] = _copied(kept)
        for group in self._optimizer.param_groups:
            group.update(_copied({key: option for key, option in group.items() if key != "params"}))
        for share in self._shares.values():
            share.data = share.data.clone()
        self._update(gradients)
        found = {name: share.data for name, share in self._shares.items()}
        for name, share in self._shares.items():
            share.data = before[name]
        self._optimizer.state.clear()
        self._optimizer.state.update(state)
        for group, options in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(options)
            for key in group.keys() - options.keys():
                del group[key]
        return found

    def _update(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for name, share in self._shares.items():
            share.grad = gradients.get(name)
        if self._max_norm is not None:
            present = present_gradients(self._program._tensors, self._program._shares)
            total = global_norm(present, 2.0, self._comm)
            scale_gradients([gradient for gradient, _ in present], total, self._max_norm)
        self._optimizer.step()
        for share in self._shares.values():
            share.grad = None


def _check_plain(program: HapProgram) -> None:
    """While one thread compiles, torch's optimizers take themselves for compiled in every other, and round their
    corrections to float32: ranks' parameters would not stay alike."""
    if program._variants.is_compiled:
        raise ProgramError("ACCO updates in a thread of its own, which torch.compile disturbs: leave out compile()")


def _copied(kept: Mapping[str, Any]) -> dict[str, Any]:
    """With copies of what may be written in place."""
    tensors = {key: value.clone() for key, value in kept.items() if isinstance(value, torch.Tensor)}
    containers = {key: copy.deepcopy(value) for key, value in kept.items() if isinstance(value, (list, dict, set))}
    return {**kept, **tensors, **containers}


def _tensors(held: Held, complete: Tensors) -> Iterator[torch.Tensor]:
    yield from complete.values()
    for local in held.values():
        yield from local.values()


def _sum(one: Tensors, other: Tensors) -> Tensors:
    both = one.keys() & other.keys()
    return {**one, **other, **{name: one[name] + other[name] for name in both}}
