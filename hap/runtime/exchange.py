"""The transports that backends bring: collective calls on flat tensors with unequal lengths for the ranks.

Only calls that both Gloo and NCCL accept with unequal and zero lengths are used: ``all_to_all_single`` with split
sizes, ``all_gather_single`` on padded buffers and ``broadcast`` per owner. (The list form of ``all_gather`` refuses
unequal lengths on Gloo, and its functional form kills the process.) What is not summed is moved as ``uint8``, so that
what a backend supports never depends on the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from hap.runtime.dealing import runs_of

# torch 2.13 renamed these two and warns of the old names, which are all that 2.11 has.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_by_exchange(flat: torch.Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> None:
    """Fill ``flat`` (rank r's ``lengths[r]`` elements after those of the ranks before it) from this rank's part.

    One ``all_to_all_single`` in which everybody sends its part to each of the others.
    """
    rank, world_size = dist.get_rank(group), len(lengths)
    start = sum(lengths[:rank])
    mine = flat[start : start + lengths[rank]]
    sent = mine.repeat(world_size - 1)
    outgoing = [0 if r == rank else lengths[rank] for r in range(world_size)]
    incoming = [0 if r == rank else n for r, n in enumerate(lengths)]
    received = flat.new_empty(sum(incoming))
    dist.all_to_all_single(received, sent, incoming, outgoing, group=group)
    flat[:start] = received[:start]
    flat[start + lengths[rank] :] = received[start:]


def gather_padded(mine: torch.Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The flat tensor of all ranks, by one ``all_gather_single`` of buffers padded to the longest."""
    longest = max(lengths)
    padded = mine
    if mine.numel() < longest:
        padded = mine.new_zeros(longest)
        padded[: mine.numel()] = mine
    received = mine.new_empty(longest * len(lengths))
    all_gather_single(received, padded, group=group)
    if all(n == longest for n in lengths):
        return received
    rows = received.view(len(lengths), longest)
    return torch.cat([rows[r : r + count, :n].reshape(-1) for r, _, count, n in runs_of(tuple(lengths))])


def gather_by_broadcast(flat: torch.Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> None:
    """As ``gather_by_exchange``, by one asynchronous broadcast from each owner; owners of nothing are skipped."""
    starts = accumulate(lengths, initial=0)
    pending = [
        dist.broadcast(flat[start : start + n], group_src=r, group=group, async_op=True)
        for r, (start, n) in enumerate(zip(starts, lengths, strict=False))
        if n
    ]
    for work in pending:
        assert work is not None
        work.wait()


def scatter_by_exchange(flat: torch.Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's ``lengths[rank]`` elements of the sum over ranks of ``flat``; numbers of 16 bits are added in float32
    and rounded once.

    One ``all_to_all_single``, then a local sum.
    """
    rank = dist.get_rank(group)
    mine, itemsize = lengths[rank], flat.itemsize
    received = flat.new_empty(mine * len(lengths))
    incoming, outgoing = [mine * itemsize] * len(lengths), [n * itemsize for n in lengths]
    dist.all_to_all_single(as_bytes(received), as_bytes(flat), incoming, outgoing, group=group)
    return received.view(len(lengths), mine).sum(0, dtype=flat.dtype)


def scatter_padded(flat: torch.Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The same by one ``reduce_scatter_single`` of buffers padded to the longest."""
    rank, longest = dist.get_rank(group), max(lengths)
    if longest == 0:
        return flat
    if all(n == longest for n in lengths):
        rows = flat.view(len(lengths), longest)
    else:
        rows = flat.new_zeros(len(lengths), longest)
        for r, start, count, n in runs_of(tuple(lengths)):
            rows[r : r + count, :n] = flat[start : start + count * n].view(count, n)
    total = flat.new_empty(longest)
    ends = (total, rows)
    if flat.is_complex():  # of which NCCL has no dtype
        ends = (torch.view_as_real(total), torch.view_as_real(rows))
    reduce_scatter_single(ends[0].view(-1), ends[1].view(-1), group=group)
    return total[: lengths[rank]].clone()


def as_bytes(piece: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a flat ``uint8`` tensor: a view if it is contiguous.

    One element, or none, counts as contiguous whatever its stride, but only one of stride 1 can be viewed as bytes.
    """
    flat = piece.contiguous().reshape(-1)
    if flat.numel() <= 1:
        flat = flat.as_strided(flat.shape, (1,))  # a view, since a broadcast writes here
    return flat.view(torch.uint8)
