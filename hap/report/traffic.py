"""Who sends how many bytes to whom in one step, as the plan's collectives are performed.

Routed ways follow their trees (``hap.routes``); rings send to the next rank; an all-to-all sends overlaps. What a
backend does inside a collective of its own (NCCL's trees, Gloo's halving) is drawn as the ring or the exchange that the
cost model takes it for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hap.cost_models.collective import overlaps, shares
from hap.errors import PlanError
from hap.fabric import Array
from hap.placement import parse_placement
from hap.plan import Conversion, Plan
from hap.routes import ROUTED, Way, segment_owners, tree


def traffic_bytes(plan: Plan) -> Array:
    """(N, N): bytes that rank i sends rank j in one step."""
    n = plan.world_size
    total = np.zeros((n, n))
    for c in plan.conversions:
        if c.collective != "slice" and n > 1:
            total += _bytes(c, plan)
    np.fill_diagonal(total, 0.0)
    return total


def between(matrix: Array, classes: tuple[tuple[int, ...], ...]) -> Array:
    """The same between classes of ranks: the sum over their pairs."""
    member = np.zeros((len(classes), len(matrix)))
    for row, ranks in enumerate(classes):
        member[row, list(ranks)] = 1.0
    found: Array = member @ matrix @ member.T
    return found


def _bytes(c: Conversion, plan: Plan) -> Array:
    n = plan.world_size
    source, target = parse_placement(c.source), parse_placement(c.target)
    rho, sigma = shares(source, plan.sizes, n), shares(target, plan.sizes, n)
    try:
        way = Way.parse(c.decomposition)
        way.check(n)
    except ValueError as e:
        raise PlanError(f"{c.value}: {e}") from None
    if c.collective == "all_to_all":
        return c.nbytes * overlaps(source, target, rho, sigma)
    if way.name in ROUTED and not (c.collective == "all_reduce" and way.name == "ring"):
        if c.collective == "all_gather":
            return c.nbytes * _down(way, rho)
        if c.collective == "reduce_scatter":
            return c.nbytes * _down(way, sigma).T
        owners = segment_owners(way, n)
        down = _down(way, np.bincount(owners, minlength=n) / len(owners))
        return c.nbytes * (down + down.T)
    if (c.collective, way.name) not in _BACKENDS:
        raise PlanError(f"{c.value}: {c.collective} has no decomposition {c.decomposition!r}")
    return c.nbytes * _BACKENDS[c.collective, way.name](n, rho, sigma)


def _down(way: Way, weight: Array) -> Array:
    """(N, N): each owner's share down its tree."""
    n = len(weight)
    if way.name in ("pairs", "owners"):
        return np.repeat(weight[:, None], n, axis=1)
    found = np.zeros((n, n))
    for root in range(n):
        for edge in tree(way, root, n):
            found[edge.parent, edge.child] += weight[root]
    return found


def _to_next(amount: Array) -> Array:
    """(N, N): rank i sends ``amount[i]`` to its successor."""
    found = np.zeros((len(amount), len(amount)))
    ranks = np.arange(len(amount))
    found[ranks, np.roll(ranks, -1)] = amount
    return found


_BACKENDS: dict[tuple[str, str], Callable[[int, Array, Array], Array]] = {
    ("all_gather", "all_to_all"): lambda n, rho, sigma: np.repeat(rho[:, None], n, axis=1),
    ("all_gather", "padded"): lambda n, rho, sigma: _to_next(np.full(n, (n - 1) * rho.max())),
    ("all_gather", "broadcast"): lambda n, rho, sigma: _to_next(1.0 - np.roll(rho, -1)),
    ("all_reduce", "ring"): lambda n, rho, sigma: _to_next(np.full(n, 2 * (n - 1) / n)),
    ("reduce_scatter", "all_to_all_sum"): lambda n, rho, sigma: np.repeat(sigma[None, :], n, axis=0),
    ("reduce_scatter", "padded"): lambda n, rho, sigma: _to_next(np.full(n, (n - 1) * sigma.max())),
}
