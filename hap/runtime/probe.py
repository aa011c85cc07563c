"""Timing every link with nothing else under way: the delay matrix that tells a slow sender from a slow receiver.

Ranks meet in pairs, as the teams of a league do: in each of the rounds everyone has one partner, so that a matrix of N
ranks takes N rounds (N - 1 if N is even) and no two messages have an end in common. Both directions of a pair follow
each other. The receiver's clock alone decides: it asks, and counts until the answer is there, so a message takes two
latencies and its bytes. The rule that reads the matrix is C4D's (arXiv 2406.04594): ``hap.diagnosis.links``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hap.routes import league

if TYPE_CHECKING:
    from hap.runtime.collectives import Communicator

PROBE_BYTES = 1 << 20  # so many times what a shaper lets through at once, and two hundredths of a second at 400 Mbit/s
REPEATS = 5


def probe(comm: Communicator, nbytes: int = PROBE_BYTES) -> tuple[tuple[float | None, ...], int]:
    """(seconds from each rank to this one, the least of some repeats and None from itself; bytes). Collective."""
    found: list[float | None] = [None] * comm.world_size
    if comm.group is None:
        return tuple(found), nbytes
    answer, ask = (torch.zeros(size, dtype=torch.uint8, device=comm.device) for size in (nbytes, 1))
    for pairs in league(comm.world_size):
        mine = next((pair for pair in pairs if comm.rank in pair), None)
        for turn in range(2):
            dist.barrier(group=comm.group)
            if mine is None:
                continue
            source, target = mine if turn == 0 else mine[::-1]
            for _ in range(REPEATS):
                if comm.rank == source:
                    dist.recv(ask, group=comm.group, group_src=target)
                    dist.send(answer, group=comm.group, group_dst=target)
                else:
                    _settle(comm.device)
                    begun = time.perf_counter()
                    dist.send(ask, group=comm.group, group_dst=source)
                    dist.recv(answer, group=comm.group, group_src=source)
                    _settle(comm.device)
                    seconds, before = time.perf_counter() - begun, found[source]
                    found[source] = seconds if before is None else min(before, seconds)
    return tuple(found), nbytes


def _settle(device: torch.device) -> None:
    """A GPU's calls return before they are done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
