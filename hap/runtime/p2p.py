"""Running a schedule of messages on Gloo or NCCL, by ``isend`` and ``irecv`` alone.

On Gloo every receive is posted at once and a part is sent on as soon as it has arrived. NCCL's point-to-point calls run
in order on a stream and may wait for each other, so there each round is one batch. Sums are made in the order of the
schedule, which is the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch
import torch.distributed as dist

from hap.runtime.schedule import Message


def perform(
    messages: Sequence[Message], buffer: torch.Tensor, group: dist.ProcessGroup, *, by_rounds: bool | None = None
) -> None:
    """Send, receive and add this rank's messages, in place in the flat ``buffer``; done when this returns.

    ``by_rounds`` is for tests; None: as the backend needs.
    """
    rank = dist.get_rank(group)
    mine = [m for m in messages if rank in (m.src, m.dst)]
    if by_rounds is None:
        served = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))  # device -> backend
        by_rounds = served[buffer.device.type] != "gloo"
    if by_rounds:
        for _, batch in groupby(mine, key=lambda m: m.round):
            _batch(tuple(batch), buffer, rank, group)
    else:
        _stream(mine, buffer, rank, group)


def _stream(mine: Sequence[Message], buffer: torch.Tensor, rank: int, group: dist.ProcessGroup) -> None:
    arriving: dict[int, list[tuple[Message, torch.Tensor, dist.Work]]] = {}
    for m in mine:
        if m.dst == rank:
            part = _landing(m, buffer)
            work = dist.irecv(part, group=group, group_src=m.src)
            assert work is not None
            arriving.setdefault(m.segment, []).append((m, part, work))
    sending = []
    for m in mine:
        if m.src == rank:
            pending = arriving.get(m.segment, [])
            while pending and pending[0][0].round < m.round:
                _take(*pending.pop(0), buffer)
            sending.append(dist.isend(buffer[m.start : m.stop], group=group, group_dst=m.dst))
    for pending in arriving.values():
        for arrival in pending:
            _take(*arrival, buffer)
    for sent in sending:
        assert sent is not None
        sent.wait()


def _batch(batch: Sequence[Message], buffer: torch.Tensor, rank: int, group: dist.ProcessGroup) -> None:
    operations, landed = [], []
    for m in batch:
        if m.dst == rank:
            part = _landing(m, buffer)
            landed.append((m, part))
            operations.append(dist.P2POp(dist.irecv, part, group=group, group_peer=m.src))
        else:
            part = buffer[m.start : m.stop]
            operations.append(dist.P2POp(dist.isend, part, group=group, group_peer=m.dst))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for m, part in landed:
        if m.adds:
            buffer[m.start : m.stop].add_(part)


def _landing(m: Message, buffer: torch.Tensor) -> torch.Tensor:
    """Where a message arrives: in place, or beside the buffer if it is to be added."""
    return buffer.new_empty(m.stop - m.start) if m.adds else buffer[m.start : m.stop]


def _take(m: Message, part: torch.Tensor, work: dist.Work, buffer: torch.Tensor) -> None:
    work.wait()
    if m.adds:
        buffer[m.start : m.stop].add_(part)


def swap(
    sent: torch.Tensor, outgoing: Sequence[int], incoming: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """All-to-all by pairs: ``sent`` has ``outgoing[s]`` elements for each rank s, the result ``incoming[r]`` from r."""
    rank, world_size = dist.get_rank(group), len(outgoing)
    received = sent.new_empty(sum(incoming))
    leave, come = list(accumulate(outgoing, initial=0)), list(accumulate(incoming, initial=0))
    received[come[rank] : come[rank + 1]] = sent[leave[rank] : leave[rank + 1]]
    operations = []
    for shift in range(1, world_size):
        to, origin = (rank + shift) % world_size, (rank - shift) % world_size
        if incoming[origin]:
            part = received[come[origin] : come[origin + 1]]
            operations.append(dist.P2POp(dist.irecv, part, group=group, group_peer=origin))
        if outgoing[to]:
            part = sent[leave[to] : leave[to + 1]]
            operations.append(dist.P2POp(dist.isend, part, group=group, group_peer=to))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return received
