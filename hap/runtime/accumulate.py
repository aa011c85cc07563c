"""Gradients of several batches that are summed over the ranks once: what ``HapProgram.no_sync`` keeps in between.

A rank adds up what it has of them (``hap.codegen.accumulate``), outside of ``.grad``: there a deferred gradient
stands as zeros, so that ``zero_grad()`` is seen to have dropped it. The next backward pass that sums adds them to its
own; those of batches of another shape, whose program is another one, are summed by themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hap.errors import ProgramError
from hap.runtime.step import Step

_waiting: weakref.WeakSet[Unsummed] = weakref.WeakSet()  # that have something
_hooked: list[Any] = []


class Unsummed:
    """What the gradients of one program lack. ``shares``: its trainable parameters, by name."""

    def __init__(self, shares: Mapping[str, torch.Tensor]) -> None:
        self._shares = shares
        self._held: dict[Step, dict[str, torch.Tensor]] = {}
        self._seen: dict[str, tuple[int, int]] = {}  # of a deferred gradient that stands as zeros: id and version
        self._hooks: dict[str, Any] = {}

    def apart(self, step: Step, saved: dict[str, torch.Tensor], tangent: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gradients of a backward pass that sums none that can be deferred: zeros in their place."""
        if not step.accumulation.deferred:
            return step.backward(saved, tangent)
        self.forget_zeroed()
        gradients, local = step.backward_apart(saved, tangent)
        held = self._held.setdefault(step, {})
        for name, found in local.items():
            if name in held:
                held[name] += found
            else:
                held[name] = found.to(step.accumulation.dtypes[name], copy=True)
        for target in step.accumulation.deferred:
            gradients[target] = torch.zeros_like(self._shares[target])
            if target not in self._hooks:
                share = self._shares[target]
                self._hooks[target] = share.register_post_accumulate_grad_hook(lambda p, name=target: self._see(name))
        _waiting.add(self)
        if not _hooked:
            _hooked.append(register_optimizer_step_pre_hook(_before_step))
        return gradients

    def together(self, step: Step, saved: dict[str, torch.Tensor], tangent: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gradients of a backward pass with all that earlier ones left."""
        self.forget_zeroed()
        gradients = step.backward(saved, tangent, self._held.pop(step, None))
        for other, held in self._held.items():
            for target, found in other.sum_up(held).items():
                gradients[target] = found if target not in gradients else gradients[target] + found
        self._drop()
        return gradients

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
        deferred = {target for step in self._held for target in step.accumulation.deferred}
        zeroed = {target for target in deferred if self._shares[target].grad is None}
        if zeroed == deferred:
            self._drop()
        elif zeroed:
            raise ProgramError(
                f"the gradient of {min(zeroed)} was dropped between backward passes under no_sync(), that of "
                f"{min(deferred - zeroed)} was not: zero_grad() for all parameters, or for none"
            )
        elif changed := [t for t in sorted(deferred) if self._seen[t] != self._now(t)]:
            raise ProgramError(
                f"the gradient of {changed[0]} was written between backward passes under no_sync(), where it is not "
                "complete; to start anew use zero_grad(set_to_none=True)"
            )

    def _drop(self) -> None:
        self._held.clear()
        _waiting.discard(self)

    def _see(self, name: str) -> None:
        self._seen[name] = self._now(name)

    def _now(self, name: str) -> tuple[int, int]:
        gradient = self._shares[name].grad
        assert gradient is not None
        return gradient.data_ptr(), gradient._version

    def holds(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether one of these is of the program."""
        own = {id(share) for share in self._shares.values()}
        return any(id(p) in own for p in parameters)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for unsummed in tuple(_waiting):
        if unsummed.holds(p for group in optimizer.param_groups for p in group["params"]):
            unsummed.check("optimizer.step()")
