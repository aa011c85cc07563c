"""The least that a collective takes, for any shares.

Its seconds are ``constant + sum over stages of max_j (c_j + s_j rho + t_j sigma)``. For any weights y of a stage's rows
(>= 0, sum 1) the maximum is at least ``y c + min_r (y s)_r + min_r (y t)_r``, as shares sum to 1. Good
weights come from a small LP (the value of a matrix game) over the classes of alike ranks; any are
valid. The wire of an all-to-all between shards may be empty, so only its latency and copies count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from operator import attrgetter

import numpy as np
from ortools.math_opt.python import mathopt

from hap.cluster import ClusterSpec
from hap.cost_models.collective import Stage, candidates, collective_coefficients
from hap.cost_models.fold import fold
from hap.cost_models.profile import CalibratedCluster
from hap.fabric import Array
from hap.placement import REPLICATE, Placement, Shard
from hap.plan import Collective
from hap.search.prices import Facts
from hap.search.protos import SEED
from hap.search.wires import UNIT_BYTES, RankClasses

_SHARD = Shard(0, 1, 1, 1, "any")


@dataclass(eq=False)
class Least:
    """The least seconds of collectives on one cluster."""

    facts: Facts
    _curves: dict[Collective, Callable[[int], float]] = field(default_factory=dict)
    _measured: dict[tuple[Collective, int], float] = field(default_factory=dict)
    _weights: dict[tuple[Collective, str], list[Array]] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: Facts) -> Least:
        """Found once for a cluster."""
        found = facts.here.setdefault("least", cls(facts))
        assert isinstance(found, cls)
        return found

    def seconds(self, kind: Collective, nbytes: int) -> float:
        if isinstance(self.facts.cluster, CalibratedCluster):
            return self._as_measured(kind, nbytes)
        if kind not in self._curves:
            counts = attrgetter("in_memory") if kind == "all_to_all" else lambda stage: True
            self._curves[kind] = least_curve(kind, self.facts.cluster, counts)
        return self._curves[kind](nbytes)

    def _as_measured(self, kind: Collective, nbytes: int) -> float:
        """At just this size, as what was measured of a collective may bend anywhere; with weights found once."""
        if (kind, nbytes) in self._measured:
            return self._measured[kind, nbytes]
        cluster, found = self.facts.cluster, list[float]()
        source, target = ends_of(kind)
        classes = RankClasses.find(cluster)
        for name in candidates(kind, cluster):
            form = collective_coefficients(kind, name, nbytes, source, target, cluster)
            stages = [s for s in form.stages if kind != "all_to_all" or s.in_memory]
            if (kind, name) not in self._weights:
                self._weights[kind, name] = [row_weights(s, classes) for s in stages]
            weighed = zip(stages, self._weights[kind, name], strict=True)
            found.append(form.constant_s + sum(stage_least_s(s, w) for s, w in weighed))
        return self._measured.setdefault((kind, nbytes), min(found))


def least_curve(kind: Collective, cluster: ClusterSpec, counts: Callable[[Stage], bool]) -> Callable[[int], float]:
    """Seconds of the latencies and of the stages that count, the least over all decompositions, by bytes.

    A stage's seconds are proportional to the bytes, so each is weighed once, rank by rank. The rest does not depend on
    shares, and may bend at any size: of many ranks it is asked of kinds of devices.
    """
    source, target = ends_of(kind)
    classes, kinds = RankClasses.find(cluster), fold(cluster) or cluster
    per_byte = dict[str, float]()
    for name in candidates(kind, cluster):
        whole = collective_coefficients(kind, name, UNIT_BYTES, source, target, cluster)
        weighed = (stage_least_s(s, row_weights(s, classes)) for s in whole.stages if counts(s))
        per_byte[name] = sum(weighed) / UNIT_BYTES

    @cache
    def seconds(nbytes: int) -> float:
        return min(
            collective_coefficients(kind, name, nbytes, source, target, kinds).constant_s + by * nbytes
            for name, by in per_byte.items()
        )

    return seconds


def ends_of(kind: Collective) -> tuple[Placement, Placement]:
    """A source and a target of such a collective."""
    source: Placement = _SHARD if kind in ("all_gather", "all_to_all") else REPLICATE
    target: Placement = _SHARD._replace(dim=1) if kind in ("reduce_scatter", "all_to_all") else REPLICATE
    return source, target


def stage_least_s(stage: Stage, weights: Array) -> float:
    """What a stage takes at least, whatever the shares, by these weights of its rows (K,)."""
    terms = weights @ stage.constant, (weights @ stage.by_source).min(), (weights @ stage.by_target).min()
    return max(0.0, float(sum(terms)))


def row_weights(stage: Stage, classes: RankClasses) -> Array:
    """Weights of the rows (K,) that make ``stage_least_s`` large. Rows that are equal for alike ranks share theirs."""
    tables = [m @ classes.members.T / classes.counts for m in (stage.by_source, stage.by_target)]
    table = np.concatenate([stage.constant[:, None], *tables], axis=1)
    scale = np.abs(table).max(initial=0.0)
    if scale == 0:
        return np.full(len(table), 1 / len(table))
    rows, inverse, counts = np.unique(np.round(table / scale, 10), axis=0, return_inverse=True, return_counts=True)
    found = _game(rows.tobytes(), len(classes.counts))
    weights: Array = (found / found.sum() / counts)[inverse.ravel()]
    return weights


@lru_cache(maxsize=1024)
def _game(table: bytes, n: int) -> Array:
    """The best weights of the rows of such a table, of ``n`` kinds of ranks, not scaled to add up to one; equal ones
    where the solver gives up for want of precision, as any are valid. Many stages have the same one."""
    rows = np.frombuffer(table).reshape(-1, 1 + 2 * n)
    model = mathopt.Model(name="game")
    y = [model.add_variable(lb=0) for _ in rows]
    least = [model.add_variable(lb=-np.inf) for _ in range(2)]
    model.add_linear_constraint(sum(y) == 1)
    for side, variable in enumerate(least):
        for c in range(n):
            column = rows[:, 1 + side * n + c]
            model.add_linear_constraint(variable <= sum(float(k) * v for k, v in zip(column, y, strict=True)))
    model.maximize(sum(float(k) * v for k, v in zip(rows[:, 0], y, strict=True)) + sum(least))
    result = mathopt.solve(model, mathopt.SolverType.GLOP, params=mathopt.SolveParameters(random_seed=SEED))
    if not result.has_primal_feasible_solution():
        return np.ones(len(rows))
    found = np.maximum(0.0, np.array([result.variable_values()[v] for v in y]))
    return found if found.sum() > 0 else np.ones(len(rows))
