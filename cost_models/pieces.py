"""Bytes of what ranks hold of a value."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hap.fabric import Array
from hap.placement import GroupSizes, Placement, Shard


def local_bytes(nbytes: int, placement: Placement, sizes: GroupSizes, world_size: int) -> Array:
    """Bytes of every rank's piece of a value of ``nbytes`` (N,)."""
    if isinstance(placement, Shard):
        return np.array(sizes[placement.group], dtype=np.float64) * (nbytes // placement.n)
    return np.full(world_size, float(nbytes))


def many_local_bytes(pieces: Iterable[tuple[int, Placement]], sizes: GroupSizes, world_size: int) -> Array:
    """The same of many (P, N): (bytes of the whole, placement) each."""
    rows, vectors = dict[str, int](), [np.ones(world_size)]
    row, factor = list[int](), list[float]()
    for nbytes, placement in pieces:
        if not isinstance(placement, Shard):
            row.append(0)
            factor.append(nbytes)
            continue
        if placement.group not in rows:
            rows[placement.group] = len(vectors)
            vectors.append(np.array(sizes[placement.group], dtype=np.float64))
        row.append(rows[placement.group])
        factor.append(nbytes // placement.n)
    found: Array = np.array(vectors)[np.array(row, dtype=np.intp)] * np.array(factor, dtype=np.float64)[:, None]
    return found
