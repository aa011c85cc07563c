"""``hap.hosts_sum``: a tensor summed over the hosts of a mesh of two axes, where each host has a part of the batch.

``hap.hosts_sum.default(x, site, hosts, ranks)``: ``site`` numbers the sums of one program, ``hosts`` is how many take
part, ``ranks`` how many ranks this host has. Inside the host x lies whole on every rank, or as one shard on each; so
does the sum. Ranks call their communicator for it (``hap.runtime.hosts``); the function here is the operator where
there is one host, by which its rule is proved.

**Bytes** that pass the way out of each of H hosts, and as many the way in: each host sums a part of a tensor of W
bytes. Of a tensor that is dealt out inside it sends what it holds of the other parts, and then its own summed part to
each other host: ``2 (H - 1) / H * W``, as in a reduce-scatter and an all-gather. Where the host's k ranks hold the
whole, each of them gets every sum: ``(1 + k) (H - 1) / H * W``. The parts are equal: with parts l and one round after
the other, a host with rate r takes ``max(1 - l, (H - 1) l) W / r`` for each, so no parts make the slowest faster than
equal ones do.

**Messages.** Parts are cut along the longest dim. Where a host's k ranks hold the whole, or shards of another dim, each
of them has an equal piece of each part, and a message is one in ``H * k`` of the tensor. Where they hold shards of that
dim, a part may be in the shard of one rank.
"""

from __future__ import annotations

import torch

HOSTS_SUM = "hap.hosts_sum.default"
SITE = 1  # the position of ``site``
BUNDLES = 8  # exchanges of the sums that nobody waits for, about, each of ...
BUNDLE_BYTES = (500_000, 16_000_000)  # ... no fewer and no more bytes of whole tensors
SUM_LANES = 2  # on CPUs: while one bundle is packed or added up, another is on the wire


def hosts_sum(x: torch.Tensor, site: int, hosts: int, ranks: int) -> torch.Tensor:
    """The sum over one host: x, in memory of its own."""
    return x.clone()


def outward_bytes(nbytes: int, hosts: int, copies: int) -> float:
    """Of a tensor of ``nbytes`` that ``copies`` ranks of each host hold whole (1: that is dealt out)."""
    return (1 + copies) * nbytes * (hosts - 1) / hosts


def message_bytes(nbytes: int, hosts: int, ranks: int, blocks: int | None) -> float:
    """Of the largest message from rank to rank, where all hosts hold the tensor of ``nbytes`` alike. ``blocks``: how
    many of them each rank holds of the longest dim (a shard's ``outer``), if that is the one that is dealt out."""
    return nbytes / max(hosts, ranks * (hosts if blocks is None else min(blocks, hosts)))


def bundle_bytes(nbytes: int) -> int:
    """From how many bytes of whole tensors on sums that nobody waits for are exchanged together, of ``nbytes``."""
    return min(max(nbytes // BUNDLES, BUNDLE_BYTES[0]), BUNDLE_BYTES[1])
