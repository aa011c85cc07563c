"""``hap.hosts_sum``: a tensor summed over the hosts of a mesh of two axes, where each host has a part of the batch.

``hap.hosts_sum.default(x, site, hosts, ranks)``: ``site`` numbers the sums of one program, ``hosts`` is how many take
part, ``ranks`` how many ranks this host has. Inside the host x lies whole on every rank, or as one shard on each; so
does the sum. Ranks call their communicator for it (``hap.runtime.hosts``); the function here is the operator where
there is one host, by which its rule is proved.

**Bytes** that pass the way out of each of H hosts, and as many the way in: of a tensor of W bytes dealt out inside, a
host that sums a part ``l`` of it sends what it holds of the other parts, and then its own summed part to each other
host: ``W (1 + (H - 2) l)``. With equal parts that is ``2 (H - 1) / H * W``, as of a reduce-scatter and an all-gather.
Where the host's k ranks hold the whole, each of them gets every sum: ``(1 + k) (H - 1) / H * W``.

**Parts.** At rates r the slowest host takes ``max_h W (1 + (H - 2) l[h]) / r[h]``. As the parts sum to 1, that is never
less than ``W max(1 / min r, 2 (H - 1) / sum r)``, and ``owned_parts`` reach it: slow hosts sum less, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

HOSTS_SUM = "hap.hosts_sum.default"
SITE = 1  # the position of ``site``


def hosts_sum(x: torch.Tensor, site: int, hosts: int, ranks: int) -> torch.Tensor:
    """The sum over one host: x, in memory of its own."""
    return x.clone()


def outward_bytes(nbytes: int, hosts: int, copies: int) -> int:
    """Of a tensor of ``nbytes`` that ``copies`` ranks of each host hold whole (1: that is dealt out)."""
    return (1 + copies) * nbytes * (hosts - 1) // hosts


def least_seconds_per_byte(rates: Sequence[float]) -> float:
    """Of a tensor dealt out inside hosts whose ways out and in have these rates (bytes/s), with the best parts."""
    return max(1 / min(rates), 2 * (len(rates) - 1) / sum(rates))


def owned_parts(rates: Sequence[float]) -> tuple[float, ...]:
    """Which part of every tensor each host sums; see the module docstring. They sum to 1."""
    seconds = least_seconds_per_byte(rates)
    room = [seconds * rate - 1 for rate in rates]  # (H - 2) l[h], at most
    if len(rates) <= 2 or sum(room) <= 1e-12:
        return (1 / len(rates),) * len(rates)
    return tuple(max(0.0, r) / sum(room) for r in room)
