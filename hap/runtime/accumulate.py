"""Gradients of several batches that are summed over the ranks once: what ``HapProgram.no_sync`` keeps in between.

A rank adds up what it has of them (``hap.codegen.accumulate``), outside of ``.grad``: there a deferred gradient
stands as zeros, so that ``zero_grad()`` is seen to have dropped it. The next backward pass that sums adds them to its
own; those of batches of another shape, whose program is another one, are summed by themselves. All these passes must be
for the same parameters. ``torch.autograd.grad`` has nothing to do with it: it is handed out sums.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hap.capture.torch_private import current_pass
from hap.errors import ProgramError
from hap.runtime.step import Kept, Step

_waiting: weakref.WeakSet[Unsummed] = weakref.WeakSet()  # that have something
_reading = threading.Lock()  # it: optimizers step in other threads, too
_hooked: list[Any] = []


class Unsummed:
    """What the gradients of one program lack. ``shares``: its trainable parameters, by name."""

    def __init__(self, shares: Mapping[str, torch.Tensor]) -> None:
        self._shares = shares
        self._held: dict[Step, dict[str, torch.Tensor]] = {}
        self._seen: dict[int, int] = {}  # memory of a deferred ``.grad`` -> version, as backward passes left it
        self._kept: dict[str, bool] = {}  # deferred target -> whether it has a ``.grad`` of it
        self._zeros: dict[str, tuple[int, int]] = {}  # target -> both, of the zeros that its ``.grad`` was made of
        self._pending: set[str] = set()  # targets that have been given zeros, which are not in ``.grad`` yet
        self._pass = -1  # the backward pass that is to put them there
        self._hooks: dict[str, Any] = {}
        self._failed = False  # in the middle of what it adds up

    def apart(
        self, step: Step, saved: dict[str, torch.Tensor], tangent: torch.Tensor, keeps: Callable[[], Kept]
    ) -> dict[str, torch.Tensor]:
        """The gradients of a backward pass that sums none that can be deferred: zeros in their place."""
        if not step.accumulation.deferred or (kept := keeps()) is None:
            return step.backward(saved, tangent)
        self.forget_zeroed()
        self._check_kept(kept)
        self._check_hooks(kept.intersection(step.accumulation.deferred))
        self._kept |= {target: target in kept for target in step.accumulation.deferred}
        self._held.setdefault(step, {})
        self._failed = True
        gradients, self._held[step] = step.backward_apart(saved, tangent, self._held[step] or None)
        self._failed = False
        for target in kept.intersection(step.accumulation.deferred):
            share = self._shares[target]
            if target not in self._hooks:
                self._hooks[target] = share.register_post_accumulate_grad_hook(partial(self._see, target))
            if share.grad is not None:
                self._remember(share.grad)
            elif target not in self._pending:
                gradients[target] = torch.zeros_like(share)
                self._zeros[target] = _state(gradients[target])
                self._pending.add(target)
        self._pass = current_pass()
        self._wait()
        if not _hooked:
            _hooked.append(register_optimizer_step_pre_hook(_before_step))
        return gradients

    def together(
        self, step: Step, saved: dict[str, torch.Tensor], tangent: torch.Tensor, keeps: Callable[[], Kept]
    ) -> dict[str, torch.Tensor]:
        """The gradients of a backward pass with all that earlier ones left."""
        if not self._held or (kept := keeps()) is None:
            return step.backward(saved, tangent)
        self.forget_zeroed()
        self._check_kept(kept)
        self._check_hooks(self._deferred())
        shares, kept_before = [self._shares[target] for target in self._deferred()], dict(self._kept)
        left = self.take()
        try:
            gradients = step.backward(saved, tangent, left.pop(step, None))
            for other, held in left.items():
                for target, found in other.sum_up(held).items():
                    gradients[target] = found if target not in gradients else gradients[target] + found
        except BaseException:  # what waited is gone: that is said until zero_grad()
            self._held, self._kept, self._failed = {step: {}}, kept_before, True
            for share in shares:
                if share.grad is None:
                    share.grad = share.new_zeros(()).expand_as(share)
            self._wait()
            raise
        return gradients

    def take(self) -> dict[Step, dict[str, torch.Tensor]]:
        """What is held, which is somebody else's from now on; the zeros that stand for it are dropped."""
        self.forget_zeroed()
        for target in self._deferred():
            share = self._shares[target]
            if share.grad is not None and self._zeros.get(target) == _state(share.grad):
                share.grad = None
        held = dict(self._held)
        self._drop()
        return held

    @property
    def hooked(self) -> Collection[str]:
        """Whose gradients it sees by a hook."""
        return self._hooks

    def check(self, what: str) -> None:
        """ProgramError if gradients are not complete."""
        self.forget_zeroed()
        if self._held:
            raise ProgramError(
                f"{what} after backward passes under no_sync() alone: the last one of a step must be outside of it, "
                "so that gradients are summed over the ranks"
            )

    def forget_zeroed(self) -> None:
        """Drop what ``zero_grad()`` dropped. ProgramError if something else was done to gradients in the meantime."""
        if not self._held:
            return
        if self._pending and self._pass != current_pass():  # it ended, and they did not arrive
            self._pending.clear()
            self._failed = True
        present = {target: self._shares[target].grad for target in self._deferred() - self._pending}
        zeroed = {target for target, gradient in present.items() if gradient is None}
        if zeroed == self._deferred():
            self._drop()
        elif self._failed:
            raise ProgramError(
                "a backward pass of a step with no_sync() did not come to its end: zero_grad(), and start anew"
            )
        elif zeroed:
            raise ProgramError(
                f"the gradient of {min(zeroed)} was dropped between backward passes under no_sync(), that of "
                f"{min(self._deferred() - zeroed)} was not: zero_grad() for all parameters, or for none"
            )
        elif changed := [t for t, g in sorted(present.items()) if g is None or _state(g) not in self._seen.items()]:
            raise ProgramError(
                f"the gradient of {changed[0]} was written between backward passes under no_sync(), where it is not "
                "complete; to start anew use zero_grad(set_to_none=True)"
            )

    def _deferred(self) -> set[str]:
        """Of what is held, what stands as zeros in a ``.grad``."""
        return {target for target, kept in self._kept.items() if kept}

    def _check_kept(self, kept: frozenset[str]) -> None:
        for target, before in self._kept.items():
            if before != (target in kept):
                raise ProgramError(
                    f"a backward pass under no_sync() {'added to' if before else 'left out'} the gradient of {target}, "
                    f"and this one {'leaves it out' if before else 'adds to it'} (by requires_grad, or by inputs= of "
                    "backward()): end the first batches with a pass outside of no_sync(), or zero_grad()"
                )

    def _check_hooks(self, deferred: Iterable[str]) -> None:
        for target in deferred:
            if self._shares[target]._backward_hooks:
                raise ProgramError(
                    f"a hook on the gradient of {target} would see sums over several batches under no_sync(), and not "
                    "each one's gradient: leave out the hook, or no_sync()"
                )

    def _wait(self) -> None:
        with _reading:
            _waiting.add(self)

    def _drop(self) -> None:
        self._held.clear()
        self._kept.clear()
        self._zeros.clear()
        self._pending.clear()
        self._seen.clear()
        self._failed = False
        with _reading:
            _waiting.discard(self)

    def _see(self, target: str, share: torch.Tensor) -> None:
        """Also called where a backward pass has no gradient of it."""
        self._pending.discard(target)
        if share.grad is not None:
            self._remember(share.grad)

    def _remember(self, gradient: torch.Tensor) -> None:
        where, version = _state(gradient)
        self._seen[where] = version

    def holds(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether one of these is of the program."""
        own = {id(share) for share in self._shares.values()}
        return any(id(p) in own for p in parameters)


def _state(gradient: torch.Tensor) -> tuple[int, int]:
    """(memory, version); those of one bundle share both."""
    return (gradient.untyped_storage().data_ptr(), gradient._version) if gradient.numel() else (0, 0)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with _reading:
        waiting = tuple(_waiting)
    for unsummed in waiting:
        if unsummed.holds(p for group in optimizer.param_groups for p in group["params"]):
            unsummed.check("optimizer.step()")
