"""The transports under the collectives: moving flat pieces of unequal length between ranks.

Every function moves *bytes*: a piece of any dtype (bool included) is viewed as ``uint8`` on the wire, so that what a
backend supports never depends on the dtype. Only calls that both Gloo and NCCL accept with unequal and zero lengths are
used: ``all_to_all_single`` with split sizes, ``all_gather_single`` on padded buffers and ``broadcast`` per owner.
(The list form of ``all_gather`` refuses unequal lengths on Gloo, and its functional form kills the process.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

Shape = tuple[int, ...]
# torch 2.13 renamed these two and warns of the old names, which are all that 2.11 has.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def exchange(pieces: Sequence[torch.Tensor], shapes: Sequence[Shape], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Send ``pieces[s]`` to rank s; receive from rank r a tensor of ``shapes[r]``. The own piece is not copied.

    One ``all_to_all_single`` with split sizes. All pieces have one dtype; ranks must agree on every length.
    """
    rank = dist.get_rank(group)
    like = pieces[rank]
    outgoing = [0 if s == rank else piece.numel() * like.itemsize for s, piece in enumerate(pieces)]
    incoming = [0 if r == rank else math.prod(shape) * like.itemsize for r, shape in enumerate(shapes)]
    sent = torch.cat([as_bytes(piece) for s, piece in enumerate(pieces) if s != rank])
    received = torch.empty(sum(incoming), dtype=torch.uint8, device=like.device)
    dist.all_to_all_single(received, sent, incoming, outgoing, group=group)
    parts = list(received.split(incoming))
    return [
        like if r == rank else _from_bytes(part, like.dtype, shape)
        for r, (part, shape) in enumerate(zip(parts, shapes, strict=True))
    ]


def gather_padded(piece: torch.Tensor, shapes: Sequence[Shape], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every rank's piece, by one ``all_gather_single`` of buffers padded to the longest."""
    lengths = [math.prod(shape) * piece.itemsize for shape in shapes]
    longest = max(lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=piece.device)
    padded[: piece.numel() * piece.itemsize] = as_bytes(piece)
    received = torch.empty(longest * len(shapes), dtype=torch.uint8, device=piece.device)
    all_gather_single(received, padded, group=group)
    rows = received.split(longest) if longest else [received] * len(shapes)
    return [
        _from_bytes(row[:length], piece.dtype, shape) for row, length, shape in zip(rows, lengths, shapes, strict=True)
    ]


def gather_by_broadcast(piece: torch.Tensor, shapes: Sequence[Shape], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every rank's piece, by one asynchronous broadcast from each owner; owners of nothing are skipped."""
    rank = dist.get_rank(group)
    buffers = [
        as_bytes(piece).clone()
        if r == rank
        else torch.empty(math.prod(shape) * piece.itemsize, dtype=torch.uint8, device=piece.device)
        for r, shape in enumerate(shapes)
    ]
    pending = [
        dist.broadcast(buffer, group_src=r, group=group, async_op=True)
        for r, buffer in enumerate(buffers)
        if buffer.numel()
    ]
    for work in pending:
        assert work is not None
        work.wait()
    return [_from_bytes(buffer, piece.dtype, shape) for buffer, shape in zip(buffers, shapes, strict=True)]


def as_bytes(piece: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a flat ``uint8`` tensor: a view if it is contiguous."""
    return piece.contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(raw: torch.Tensor, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """The bytes as a tensor; copied only where an odd offset forbids the view."""
    aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype).reshape(shape)
