"""Gradient clipping by the norm of the *global* gradients, as ``torch.nn.utils.clip_grad_norm_`` on one device.

A gradient that every rank holds whole counts once, a sharded one is the sum of its pieces:
``norm = (sum over replicated |g|^p on rank 0 + sum over shards |g|^p on every rank) ^ (1/p)``, the maximum for p = inf.
Every rank gets the same number from one all-reduce, so replicated parameters stay alike. Hosts of a mesh of two axes
add the same gradients up in different pieces, so all of them take what rank 0 has found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from hap.errors import ProgramError
from hap.runtime.collectives import Communicator

Gradients = Iterable[tuple[torch.Tensor, bool]]  # (this rank's gradient, whether it is a shard)


def global_norm(gradients: Gradients, norm_type: float, comm: Communicator) -> torch.Tensor:
    """The norm of all gradients together, a scalar on the communicator's device; NaN if it is on any rank. Collective.

    ProgramError for a ``norm_type`` that is no number above zero."""
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ProgramError(f"a norm of gradients of type {norm_type:g}: it must be above zero")
    counted = [
        g.abs() if g.is_complex() else g for g, sharded in gradients if g.numel() and (sharded or comm.rank == 0)
    ]
    dtype = max((g.dtype for g in counted), key=lambda d: d.itemsize, default=torch.float32)
    dtype = torch.promote_types(dtype, torch.float32)
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=dtype) for g in counted]
    zero = torch.zeros((), dtype=torch.float64, device=comm.device)
    if math.isinf(norm_type):
        mine = torch.stack(norms).max().double() if norms else zero
    else:
        mine = torch.stack(norms).double().pow(norm_type).sum() if norms else zero
    if comm.group is not None and not math.isinf(norm_type):
        with comm.wire():
            dist.all_reduce(mine, group=comm.group)
    elif comm.group is not None:
        both = torch.stack([mine.nan_to_num(nan=0.0, posinf=math.inf), mine.isnan().double()])
        with comm.wire():
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=comm.group)  # which may lose what is no number
        mine = torch.where(both[1] > 0, math.nan, both[0])
    return comm.same_on_hosts(mine if math.isinf(norm_type) else mine.pow(1.0 / norm_type))


def scale_gradients(gradients: Iterable[torch.Tensor], total: torch.Tensor, max_norm: float) -> None:
    """Multiply by ``min(1, max_norm / (total + 1e-6))`` in place, like torch."""
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    of_dtype: dict[torch.dtype, torch.Tensor] = {}  # cast once each: on a GPU that is a call
    for gradient in gradients:
        if gradient.dtype not in of_dtype:
            of_dtype[gradient.dtype] = factor.to(gradient.dtype)
        gradient.mul_(of_dtype[gradient.dtype])
