"""Shares to whole numbers: the one place where a group's ratio becomes its sizes.

Largest remainder: every rank first gets the whole atoms of its ideal share, then the atoms left go to the largest
remainders. A rank whose ideal is under half an atom gets nothing (a shard smaller than one unit must be zero, not
rounded up). Ties go to the lower rank, so the result depends on nothing but its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from hap.placement import GroupSizes, Sizes, verify_sizes

NOISE = 1e-9  # a solver's 2.9999999999 is 3


def round_shares(shares: Sequence[float], n: int, at_most: Sequence[int] | None = None) -> Sizes:
    """Whole sizes near ``shares * n`` that sum to n, none above ``at_most`` (which must leave room for n atoms)."""
    world_size, total = len(shares), math.fsum(shares)
    assert total > 0 and all(s >= -NOISE for s in shares), f"not shares: {tuple(shares)}"
    limits = [n] * world_size if at_most is None else [min(n, int(m)) for m in at_most]
    assert sum(limits) >= n, f"{n} atoms do not fit under {limits}"
    ideal = [max(0.0, s) / total * n for s in shares]
    sizes = [min(limits[r], math.floor(ideal[r] + NOISE)) if ideal[r] >= 0.5 - NOISE else 0 for r in range(world_size)]
    by_remainder = sorted(range(world_size), key=lambda r: (sizes[r] - round(ideal[r], 9), r))
    order = [r for r in by_remainder if ideal[r] >= 0.5 - NOISE]
    order += [r for r in sorted(range(world_size), key=lambda r: (-round(ideal[r], 9), r)) if ideal[r] < 0.5 - NOISE]
    left = n - sum(sizes)
    while left:
        willing = [r for r in order if sizes[r] < limits[r]]
        large = [r for r in willing if ideal[r] >= 0.5 - NOISE] or willing
        for r in large[:left]:
            sizes[r] += 1
        left = n - sum(sizes)
    verify_sizes(tuple(sizes), n, world_size)
    return tuple(sizes)


def improve(
    sizes: GroupSizes,
    bundles: Sequence[Sequence[str]],
    cost: Callable[[GroupSizes], tuple[float, float]],
    *,
    evaluations: int,
) -> dict[str, Sizes]:
    """Move atoms between two ranks while the cost falls, at most ``evaluations`` calls of ``cost``.

    A cost is (bytes that do not fit, seconds), compared in that order. A bundle is a list of groups of equal length
    that move together (the same group of twelve equal layers). Moves are of a sixteenth of the group first, then of one
    atom.
    """
    best: Mapping[str, Sizes] = dict(sizes)
    best_cost, used, moved = cost(best), 1, True
    while moved:
        moved = False
        for bundle in bundles:
            for trial in _moves(best[bundle[0]]):
                if used >= evaluations:
                    return dict(best)
                candidate = {**best, **dict.fromkeys(bundle, trial)}
                found, used = cost(candidate), used + 1
                if found[0] < best_cost[0] or (found[0] == best_cost[0] and found[1] < best_cost[1] * (1 - NOISE)):
                    best, best_cost, moved = candidate, found, True
                    break
    return dict(best)


def _moves(sizes: Sizes) -> list[Sizes]:
    """Neighbours of a size vector: from every rank to every other, large steps first."""
    n, found = sum(sizes), []
    for step in sorted({1, max(1, n // 16)}, reverse=True):
        for giver in range(len(sizes)):
            for taker in range(len(sizes)):
                if giver != taker and sizes[giver] >= step:
                    moved = list(sizes)
                    moved[giver] -= step
                    moved[taker] += step
                    found.append(tuple(moved))
    return found
