"""What a collective holds beside its argument and its result while it runs (``hap/runtime/transfer.py``).

It packs, moves and unpacks, one after another; what counts is the fullest of these moments. N ranks, a whole value of W
bytes, a rank's source piece of S, its target piece of T, the largest of all pieces L. *Cut*: what is copied before it
is packed, a piece that is not contiguous, or places of a dim that stays sharded. *Landing*: partial sums that wait
beside the buffer to be added.

    all_gather      all_to_all       (N-1) S sent, W - S received
                    padded           L sent, N L received unless that is the result
                    others           nothing; they receive in place
                    any              W, if the value must be joined across its memory
    reduce_scatter  all_to_all_sum   W + N T
                    padded           W + (N+1) L; W + L if all are alike
                    routed           W + landing - T
    all_reduce      ring             nothing
                    owners, ...      landing
    all_to_all      any              cut and packed S, then S with T, then T received with T joined, if across

The backend's own buffers are not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hap.cost_models.pieces import local_bytes
from hap.fabric import Array
from hap.placement import REPLICATE, GroupSizes, Placement
from hap.plan import Collective
from hap.routes import ROUTED, Way, segment_owners, tree

UNASKED: dict[Collective, str] = {  # what a communicator does that is told no decomposition
    "all_gather": "all_to_all",
    "all_reduce": "ring",
    "reduce_scatter": "all_to_all_sum",
    "all_to_all": "direct",
    "slice": "local",
}


@dataclass(frozen=True, eq=False)
class Pieces:
    """Bytes (N,) of what a conversion reads, makes, and of the whole value. ``cut``: what is sent is copied before;
    ``across``: what arrives lies across the result's memory."""

    source: Array
    target: Array
    whole: Array
    cut: bool
    across: bool
    ranks: int


class Staging(NamedTuple):
    """A conversion of a value of ``nbytes``; see ``Pieces``."""

    kind: Collective
    nbytes: int
    source: Placement
    target: Placement
    cut: bool
    across: bool


def staged_bytes(staging: Staging, decomposition: str, sizes: GroupSizes, world_size: int, ranks: int) -> Array:
    """(N,): what the conversion holds on ``ranks`` ranks, of which ``world_size`` are asked about."""
    s = staging
    source, target, whole = (local_bytes(s.nbytes, p, sizes, world_size) for p in (s.source, s.target, REPLICATE))
    return staging_bytes(s.kind, decomposition, Pieces(source, target, whole, s.cut, s.across, ranks))


def staging_bytes(kind: Collective, decomposition: str, p: Pieces) -> Array:
    """(N,)."""
    match kind:
        case "all_gather":
            return np.maximum(_gathering(decomposition, p), p.whole * p.across)
        case "reduce_scatter":
            return _scattering(decomposition, p)
        case "all_reduce" if decomposition != "ring":
            return reduce_landing(decomposition, p.ranks) * p.whole
        case "all_to_all":
            packed = p.source * (1 + p.cut) - p.target
            return np.maximum.reduce((packed, p.source, p.target * p.across))
    return np.zeros_like(p.whole)


def _gathering(decomposition: str, p: Pieces) -> Array:
    packed = p.source * p.cut
    if decomposition == "all_to_all":
        return np.maximum(packed, (p.ranks - 1) * p.source + p.whole - p.source)
    if decomposition == "padded":
        longest = np.full_like(p.whole, p.source.max())
        equal = bool((p.source == p.source.max()).all())
        return packed + longest + (0 if equal else p.ranks * longest)
    return packed


def _scattering(decomposition: str, p: Pieces) -> Array:
    if decomposition == "all_to_all_sum":
        return p.whole + p.ranks * p.target
    if decomposition == "padded":
        longest = p.target.max()
        return p.whole + longest + (0 if bool((p.target == longest).all()) else p.ranks * longest)
    return p.whole + np.maximum(0, scatter_landing(decomposition, p.ranks) @ p.target - p.target)


@lru_cache(maxsize=1024)
def scatter_landing(decomposition: str, ranks: int) -> Array:
    """[r, o]: how many partial sums of owner o's piece rank r receives."""
    way = Way.parse(decomposition)
    assert way.name in ROUTED, decomposition
    found = np.zeros((ranks, ranks))
    for owner in range(ranks):
        for edge in tree(way, owner, ranks):
            found[edge.parent, owner] += 1
    return found


@lru_cache(maxsize=1024)
def reduce_landing(decomposition: str, ranks: int) -> Array:
    """(N,) of the whole value: what every rank receives of it to add."""
    owners = segment_owners(Way.parse(decomposition), ranks)
    owned = np.bincount(owners, minlength=ranks) / len(owners)
    found: Array = scatter_landing(decomposition, ranks) @ owned
    return found
