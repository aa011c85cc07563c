"""Seconds of many collectives at fixed sizes, quickly: forms are made once, whatever the shares.

The seconds of a decomposition depend on the size of the value along few straight lines (``hap.cost_models.collective``:
latency, bytes, one segment more), so they are asked for at the sizes of a ``GRID`` and joined by lines in between. What
was measured of a collective may bend elsewhere too; the judge, which is exact, has the last word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from ortools.math_opt.python import mathopt

from hap.cluster import ClusterSpec
from hap.cost_models.collective import CollectiveForm, candidates, collective_coefficients, collective_seconds, shares
from hap.cost_models.fold import Cluster, FoldedCluster, device_numbers, fold
from hap.cost_models.profile import CalibratedCluster
from hap.fabric import Array
from hap.placement import PARTIAL, REPLICATE, GroupSizes, Placement, Shard
from hap.plan import Collective

GRID = (1, 1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 27, 1 << 30, 1 << 34, 1 << 38)  # bytes
MOST_APART = 64
MS = 1e3
_SHARD = Shard(0, 1, 1, 1, "any")  # forms depend on whether a placement is a shard, not on which


class Rows(NamedTuple):
    """One stage, equal rows once: seconds = max over rows of constant + source @ rho + target @ sigma, where rho and
    sigma are the shares of the rank classes: (K,), (K, C), (K, C)."""

    constant: Array
    source: Array
    target: Array


class Form(NamedTuple):
    constant_s: float
    stages: tuple[Rows, ...]

    def seconds(self, source: Array, target: Array) -> float:
        return self.constant_s + sum(
            float((s.constant + s.source @ source + s.target @ target).max(initial=0.0)) for s in self.stages
        )


@dataclass(frozen=True)
class RankClasses:
    """Ranks that could change places: equal devices at equal places of hosts that have the same of everything.

    ``of`` (N,) the class of every rank, ``members`` (C, N) of 0 and 1, ``counts`` (C,).
    """

    of: tuple[int, ...]

    @classmethod
    def find(cls, cluster: ClusterSpec, labels: Sequence[object] | None = None) -> RankClasses:
        """``labels``: one per rank; ranks with different ones are kept apart."""
        special = [name for path in cluster.links for name in (path.source, path.target)]
        within: dict[str, list[object]] = {h.name: [] for h in cluster.hosts}
        for device in cluster.devices:
            within[device.host].append(device_numbers(device))
        places = {}
        for h in cluster.hosts:
            network = None if h.network is None else h.network.duplex
            places[h.name] = tuple(within[h.name]), h.inside, network, h.name if h.name in special else ""
        numbers: dict[object, int] = {}
        keys = [
            (device_numbers(d), places[d.host], None if labels is None else labels[d.rank]) for d in cluster.devices
        ]
        return cls(tuple(numbers.setdefault(key, len(numbers)) for key in keys))

    @cached_property
    def members(self) -> Array:
        found = np.zeros((max(self.of) + 1, len(self.of)))
        found[list(self.of), range(len(self.of))] = 1.0
        return found

    @cached_property
    def counts(self) -> Array:
        counts: Array = self.members.sum(axis=1)
        return counts

    def mean(self, by_rank: Array) -> Array:
        """(..., N) -> (..., C)."""
        mean: Array = by_rank @ self.members.T / self.counts
        return mean

    def spread(self, by_class: Array) -> Array:
        """(C,) -> (N,)."""
        spread: Array = by_class[list(self.of)]
        return spread

    @cached_property
    def first(self) -> tuple[int, ...]:
        """One rank of each class."""
        return tuple(self.of.index(c) for c in range(len(self.members)))


def reduce_form(form: CollectiveForm, classes: RankClasses | None) -> Form:
    """Columns of a class added up, equal rows once."""
    return Form(form.constant_s, tuple(_reduce(s.constant, s.by_source, s.by_target, classes) for s in form.stages))


def _reduce(constant: Array, source: Array, target: Array, classes: RankClasses | None) -> Rows:
    if classes is not None:
        source, target = source @ classes.members.T, target @ classes.members.T
    table = np.concatenate([constant[:, None], source, target], axis=1)
    scale = np.abs(table).max(initial=0.0) or 1.0
    _, kept = np.unique(np.round(table / scale, 12), axis=0, return_index=True)
    table, width = table[np.sort(kept)], source.shape[1]
    return Rows(table[:, 0], table[:, 1 : 1 + width], table[:, 1 + width :])


@dataclass(frozen=True, eq=False)
class ClassForms:
    """Forms in terms of the shares of classes of ranks, of which all members have the same."""

    cluster: ClusterSpec
    classes: RankClasses

    @cached_property
    def folded(self) -> FoldedCluster | None:
        return fold(self.cluster, [self.classes.of])

    def form(
        self,
        kind: Collective,
        name: str,
        nbytes: int,
        source: Placement,
        target: Placement,
        sizes: GroupSizes | None = None,
    ) -> Form:
        """``sizes``: see ``collective_coefficients``; where alike ranks differ, their mean counts."""
        if self.folded is None:
            whole = collective_coefficients(kind, name, nbytes, source, target, self.cluster, sizes=sizes)
            return reduce_form(whole, self.classes)
        here = None if sizes is None else {g: self._mean(sizes[g]) for g in _groups(source, target)}
        return reduce_form(
            collective_coefficients(kind, name, nbytes, source, target, self.folded, sizes=here),  # type: ignore[arg-type]
            None,
        )

    def slices(self, nbytes: int, source: Placement, target: Placement) -> tuple[Array, Array]:
        """Seconds of cutting the own piece out of a whole value, and those per share, of each class (C,)."""
        cluster, first = (self.cluster, self.classes.first) if self.folded is None else (self.folded, None)
        stage = collective_coefficients("slice", "local", nbytes, source, target, cluster).stages[0]
        constant, slope = stage.constant, np.diag(stage.by_target)
        return (constant, slope) if first is None else (constant[list(first)], slope[list(first)])

    def _mean(self, sizes: Sequence[int]) -> tuple[float, ...]:
        return tuple(self.classes.mean(np.array(sizes, dtype=np.float64)).tolist())


def _groups(*placements: Placement) -> tuple[str, ...]:
    return tuple(dict.fromkeys(p.group for p in placements if isinstance(p, Shard)))


@dataclass(frozen=True, eq=False)
class Wires:
    """The collectives of one cluster, which may be folded."""

    cluster: Cluster
    _names: dict[Collective, tuple[str, ...]] = field(default_factory=dict, repr=False)
    _forms: dict[tuple[Collective, str, int], Form] = field(default_factory=dict, repr=False)

    def names(self, kind: Collective) -> tuple[str, ...]:
        if kind not in self._names:
            self._names[kind] = candidates(kind, self.cluster)
        return self._names[kind]

    def form(self, kind: Collective, name: str, nbytes: int) -> Form:
        """Of anything but an all-to-all, whose traffic depends on which ranges overlap."""
        key = (kind, name, nbytes)
        if key not in self._forms:
            ends = (_SHARD if kind == "all_gather" else REPLICATE, _SHARD if kind != "all_gather" else REPLICATE)
            source, target = ends if kind != "all_reduce" else (REPLICATE, REPLICATE)
            whole = collective_coefficients(kind, name, nbytes, source, target, self.cluster)
            self._forms[key] = reduce_form(whole, None)
        return self._forms[key]

    def best_s(
        self, kind: Collective, sizes_bytes: Array, source: Placement, target: Placement, sizes: GroupSizes
    ) -> Array:
        """Seconds of the fastest decomposition for values of these sizes (ascending)."""
        if self.cluster.fabric.world_size == 1:
            return np.zeros(len(sizes_bytes))
        first = max(0, int(np.searchsorted(GRID, sizes_bytes[0], side="right")) - 1)
        last = int(np.searchsorted(GRID, sizes_bytes[-1]))
        grid = [*GRID[first:last], *([GRID[last]] if last < len(GRID) else [int(sizes_bytes[-1])])]
        if len(sizes_bytes) <= len(grid):
            grid = [int(b) for b in sizes_bytes]
        if kind == "all_to_all" and not isinstance(self.cluster, CalibratedCluster) and not self.cluster.fabric.by_size:
            return self._exchange_s(sizes_bytes, source, target, sizes)
        at = [self._all_s(kind, nbytes, source, target, sizes) for nbytes in grid]
        return np.array([np.interp(sizes_bytes, grid, seconds) for seconds in zip(*at, strict=True)]).min(axis=0)

    def _exchange_s(self, sizes_bytes: Array, source: Placement, target: Placement, sizes: GroupSizes) -> Array:
        """Of an all-to-all: by the formula a constant, and proportional to the bytes."""
        n, unit = self.cluster.world_size, 1 << 20
        rho, sigma = shares(source, sizes, n), shares(target, sizes, n)
        found = []
        for name in self.names("all_to_all"):
            form = collective_coefficients("all_to_all", name, unit, source, target, self.cluster, sizes=sizes)
            slope = (form.seconds(rho, sigma) - form.constant_s) / unit
            found.append(form.constant_s + slope * sizes_bytes)
        return np.array(found).min(axis=0)

    def _all_s(
        self, kind: Collective, nbytes: int, source: Placement, target: Placement, sizes: GroupSizes
    ) -> list[float]:
        if kind == "all_to_all":
            return [
                collective_seconds(kind, name, nbytes, source, target, sizes, self.cluster) for name in self.names(kind)
            ]
        n = self.cluster.world_size
        rho, sigma = shares(source, sizes, n), shares(target, sizes, n)
        return [self.form(kind, name, nbytes).seconds(rho, sigma) for name in self.names(kind)]

    def cheapest_shares(self, nbytes: int) -> Array | None:
        """Shares (N,) at which gathering and reduce-scattering a value of ``nbytes`` together takes least: who stores
        what all need. None for a single rank. Of the best shares for each way to do either, those that do both best. A
        ring is shortest where few own all, so alike ranks may differ, if there are no more than ``MOST_APART``."""
        n = self.cluster.world_size
        if n == 1:
            return None
        assert isinstance(self.cluster, ClusterSpec), "asked of ranks"
        forms = ClassForms(self.cluster, RankClasses.find(self.cluster, range(n) if n <= MOST_APART else None))
        gather = [forms.form("all_gather", name, nbytes, _SHARD, REPLICATE) for name in self.names("all_gather")]
        scatter = [forms.form("reduce_scatter", name, nbytes, PARTIAL, _SHARD) for name in self.names("reduce_scatter")]
        nothing = np.zeros(len(forms.classes.counts))

        def both_s(rho: Array) -> float:
            return min(f.seconds(rho, nothing) for f in gather) + min(f.seconds(nothing, rho) for f in scatter)

        tried = [_cheapest([(rows.constant, rows.source) for rows in f.stages], forms.classes) for f in gather]
        tried += [_cheapest([(rows.constant, rows.target) for rows in f.stages], forms.classes) for f in scatter]
        return forms.classes.spread(min(tried, key=both_s))


def _cheapest(stages: Sequence[tuple[Array, Array]], classes: RankClasses) -> Array:
    """Shares of the classes (C,) for which the sum of the stages' largest rows, constant (K,) + slope (K, C) @ shares,
    is least."""
    model = mathopt.Model(name="cheapest")
    rho = [model.add_variable(lb=0, ub=1) for _ in classes.counts]
    model.add_linear_constraint(sum(float(k) * v for k, v in zip(classes.counts, rho, strict=True)) == 1)
    tops = [model.add_variable(lb=0) for _ in stages]
    for top, (constants, slopes) in zip(tops, stages, strict=True):
        for constant, row in zip(constants.tolist(), slopes.tolist(), strict=True):
            model.add_linear_constraint(top >= MS * constant + sum(MS * k * v for k, v in zip(row, rho, strict=True)))
    model.minimize(sum(tops))
    result = mathopt.solve(model, mathopt.SolverType.GLOP, params=mathopt.SolveParameters(random_seed=1))
    assert result.has_primal_feasible_solution(), "some rank can store it"
    values = result.variable_values()
    return np.array([max(0.0, values[v]) for v in rho])
