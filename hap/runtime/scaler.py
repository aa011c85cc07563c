"""``torch.amp.GradScaler`` over ranks that hold different gradients: whether one overflowed is everybody's business.

torch's own looks at this rank's gradients. A rank that skips a step while the others take it no longer holds the same
model, and scales its next loss by another number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hap.runtime.collectives import Communicator


class GradScaler(torch.amp.GradScaler):
    """``unscale_`` and ``step`` are collective; the rest is torch's."""

    def __init__(self, comm: Communicator, **options: Any) -> None:
        super().__init__(comm.device.type, **options)
        self._comm = comm

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        """torch's hook that divides the gradients and says, per device, whether one was not finite (1.0 or 0.0)."""
        found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(*args, **kwargs)
        overflowed = torch.zeros((), device=self._comm.device)
        for flag in found.values():
            overflowed = torch.maximum(overflowed, flag.reshape(()).to(overflowed.device))
        if self._comm.group is not None:
            with self._comm.wire():
                dist.all_reduce(overflowed, op=dist.ReduceOp.MAX, group=self._comm.group)
        for flag in found.values():
            flag.fill_(overflowed.to(flag.device))
        return found
