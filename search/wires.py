"""Seconds of many collectives at fixed sizes, quickly: forms are made once, whatever the shares.

By the formulas (``hap.cost_models.collective``) a decomposition takes a constant, which may bend at any size, as where
NCCL goes over from one protocol to another, and stages proportional to the size of the value: constants are asked for
at every size, whatever the shares, and stages at one. What was measured, and an all-to-all on links that are slower for
small messages, is asked for at the sizes of a ``GRID`` and joined by lines in between; the judge has the last word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from ortools.math_opt import model_pb2

from hap.cluster import ClusterSpec
from hap.cost_models.collective import CollectiveForm, candidates, collective_coefficients, collective_seconds, shares
from hap.cost_models.collective_form import Problem
from hap.cost_models.collective_formulas import exchanges_s_per_byte
from hap.cost_models.fold import Cluster, FoldedCluster, device_numbers, fold
from hap.cost_models.profile import CalibratedCluster
from hap.fabric import Array
from hap.placement import PARTIAL, REPLICATE, GroupSizes, Placement, Shard
from hap.plan import Collective
from hap.search.protos import fill_matrix, solve_once

GRID = (1, 1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 27, 1 << 30, 1 << 34, 1 << 38)  # bytes
UNIT_BYTES = 1 << 30
PLAINEST: Mapping[Collective, str] = {  # one call of the library's own, on pieces padded to the longest
    "all_gather": "padded",
    "all_reduce": "ring",
    "reduce_scatter": "padded",
    "all_to_all": "direct",
    "slice": "local",
}
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
        return float(self.of_many(source[:, None], target[:, None])[0])

    def of_many(self, source: Array, target: Array) -> Array:
        """(W,) from the shares of so many values (C, W)."""
        total = np.full(source.shape[1], self.constant_s)
        for seconds in self.of_stages(source, target):
            total += seconds
        return total

    def of_stages(self, source: Array, target: Array) -> list[Array]:
        """(W,) of each stage."""
        return [
            (s.constant[:, None] + s.source @ source + s.target @ target).max(axis=0, initial=0.0) for s in self.stages
        ]


class Wanted(NamedTuple):
    """Values of these sizes (ascending) go from one placement to another."""

    sizes_bytes: Array
    source: Placement
    target: Placement


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
    rounded = np.round(table / scale, 12) + 0.0  # -0.0 is 0.0
    kept: dict[bytes, int] = {}
    whole, length = rounded.tobytes(), rounded.shape[1] * rounded.itemsize
    for number in range(len(rounded)):
        kept.setdefault(whole[number * length : (number + 1) * length], number)
    table, width = table[list(kept.values())], source.shape[1]
    return Rows(table[:, 0], table[:, 1 : 1 + width], table[:, 1 + width :])


@dataclass(frozen=True, eq=False)
class ClassForms:
    """Forms in terms of the shares of classes of ranks, of which all members have the same."""

    cluster: ClusterSpec
    classes: RankClasses
    _forms: dict[tuple[Collective, str, int], Form] = field(default_factory=dict, repr=False)

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
        """``sizes``, of which only an all-to-all's depends: see ``collective_coefficients``; where alike ranks differ,
        their mean counts."""
        if kind == "all_to_all":
            return self._find(kind, name, nbytes, source, target, sizes)
        if (key := (kind, name, nbytes)) not in self._forms:
            self._forms[key] = self._find(kind, name, nbytes, source, target, sizes)
        return self._forms[key]

    def _find(
        self, kind: Collective, name: str, nbytes: int, source: Placement, target: Placement, sizes: GroupSizes | None
    ) -> Form:
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
    """The collectives of one cluster, which may be folded. ``plain``: each only in its plainest form."""

    cluster: Cluster
    plain: bool = False
    _names: dict[Collective, tuple[str, ...]] = field(default_factory=dict, repr=False)
    _forms: dict[tuple[Collective, str, int], Form] = field(default_factory=dict, repr=False)
    _constants: dict[tuple[Collective, int], list[float]] = field(default_factory=dict, repr=False)
    _others: dict[tuple[tuple[int, ...], bool], Wires] = field(default_factory=dict, repr=False)
    _best: dict[object, Array] = field(default_factory=dict, repr=False)
    _cuts: dict[int, tuple[Array, Array]] = field(default_factory=dict, repr=False)
    _cheapest: dict[int, Array | None] = field(default_factory=dict, repr=False)

    def of(self, cluster: Cluster, *, plain: bool) -> Wires:
        """Those of this cluster, or of one that it is folded to; the same every time."""
        key = (cluster.of if isinstance(cluster, FoldedCluster) else (), plain)
        if cluster is self.cluster and plain == self.plain:
            return self
        return self._others.setdefault(key, Wires(cluster, plain))

    def names(self, kind: Collective) -> tuple[str, ...]:
        if kind not in self._names:
            self._names[kind] = (PLAINEST[kind],) if self.plain else candidates(kind, self.cluster)
        return self._names[kind]

    def form(self, kind: Collective, name: str, nbytes: int) -> Form:
        """Of anything but an all-to-all, whose traffic depends on which ranges overlap."""
        key = (kind, name, nbytes)
        if key not in self._forms:
            self._forms[key] = reduce_form(self._whole_form(kind, name, nbytes), None)
        return self._forms[key]

    def _whole_form(self, kind: Collective, name: str, nbytes: int) -> CollectiveForm:
        ends = (_SHARD if kind == "all_gather" else REPLICATE, _SHARD if kind != "all_gather" else REPLICATE)
        source, target = ends if kind != "all_reduce" else (REPLICATE, REPLICATE)
        return collective_coefficients(kind, name, nbytes, source, target, self.cluster)

    def best_s(
        self, kind: Collective, sizes_bytes: Array, source: Placement, target: Placement, sizes: GroupSizes
    ) -> Array:
        """Seconds of the fastest decomposition for values of these sizes (ascending)."""
        return self.best_of_many(kind, [Wanted(sizes_bytes, source, target)], sizes)[0]

    def best_of_many(self, kind: Collective, wanted: Sequence[Wanted], sizes: GroupSizes) -> list[Array]:
        """The same of many at once; of the same ends at the same sizes once."""
        keys = [(kind, w.sizes_bytes.tobytes(), *(_seen(p, kind, sizes) for p in w[1:])) for w in wanted]
        new = {key: w for key, w in zip(keys, wanted, strict=True) if key not in self._best}
        if new:
            self._best.update(zip(new, self._find_best(kind, list(new.values()), sizes), strict=True))
        return [self._best[key] for key in keys]

    def _find_best(self, kind: Collective, wanted: Sequence[Wanted], sizes: GroupSizes) -> list[Array]:
        if self.cluster.fabric.world_size == 1:
            return [np.zeros(len(w.sizes_bytes)) for w in wanted]
        if kind == "all_to_all" and not isinstance(self.cluster, CalibratedCluster) and not self.cluster.fabric.by_size:
            return self._exchanges_s(wanted, sizes)
        if kind == "all_to_all" or isinstance(self.cluster, CalibratedCluster):
            return self._joined(kind, wanted, sizes)
        given, nothing = self._shares(wanted, sizes), np.zeros(len(wanted))
        stages = [sum(self.form(kind, name, UNIT_BYTES).of_stages(*given), nothing) for name in self.names(kind)]
        return [
            (self._constants_s(kind, w.sizes_bytes) + np.outer(per_unit / UNIT_BYTES, w.sizes_bytes)).min(axis=0)
            for w, per_unit in zip(wanted, np.array(stages).T, strict=True)
        ]

    def _shares(self, wanted: Sequence[Wanted], sizes: GroupSizes) -> tuple[Array, Array]:
        """(C, W) each: of the sources, of the targets."""
        sources, targets = (
            np.array([shares(end, sizes, self.cluster.world_size) for end in ends]).T
            for ends in ([w.source for w in wanted], [w.target for w in wanted])
        )
        return sources, targets

    def _constants_s(self, kind: Collective, sizes_bytes: Array) -> Array:
        """(decompositions, sizes)."""
        found = []
        for nbytes in map(int, sizes_bytes.tolist()):
            if (kind, nbytes) not in self._constants:
                self._constants[kind, nbytes] = [self._whole_form(kind, n, nbytes).constant_s for n in self.names(kind)]
            found.append(self._constants[kind, nbytes])
        return np.array(found).T

    def _joined(self, kind: Collective, wanted: Sequence[Wanted], sizes: GroupSizes) -> list[Array]:
        """What takes seconds of any kind, by lines between the sizes at which it is asked about."""
        grids, names = [_grid(w.sizes_bytes) for w in wanted], self.names(kind)
        if kind == "all_to_all":
            at = [
                [[collective_seconds(kind, name, b, *w[1:], sizes, self.cluster) for b in grid] for name in names]
                for w, grid in zip(wanted, grids, strict=True)
            ]
        else:
            given, places = self._shares(wanted, sizes), sorted({b for grid in grids for b in grid})
            asked = {b: np.array([self.form(kind, name, b).of_many(*given) for name in names]) for b in places}
            at = [np.array([asked[b][:, number] for b in grid]).T.tolist() for number, grid in enumerate(grids)]
        return [
            np.array([np.interp(w.sizes_bytes, grid, seconds) for seconds in table]).min(axis=0)
            for w, grid, table in zip(wanted, grids, at, strict=True)
        ]

    def cut_s(self, nbytes: int) -> tuple[Array, Array]:
        """Seconds of every rank (N,) for cutting its own piece out of a whole value, and those per share of it."""
        if nbytes not in self._cuts:
            (stage,) = collective_coefficients("slice", "local", nbytes, REPLICATE, _SHARD, self.cluster).stages
            self._cuts[nbytes] = stage.constant, np.diag(stage.by_target)
        return self._cuts[nbytes]

    def _exchanges_s(self, wanted: Sequence[Wanted], sizes: GroupSizes) -> list[Array]:
        """Of all-to-alls: by the formula a constant, and proportional to the bytes."""
        found = []
        for name in self.names("all_to_all"):
            first = Problem(self.cluster, self.cluster.fabric, 1.0, wanted[0].source, wanted[0].target, sizes)
            slopes = exchanges_s_per_byte(first, name, [(w.source, w.target) for w in wanted])
            constant_s = collective_coefficients("all_to_all", name, 1, *wanted[0][1:], self.cluster).constant_s
            found.append([constant_s + slope * w.sizes_bytes for slope, w in zip(slopes.tolist(), wanted, strict=True)])
        return [np.array(ways).min(axis=0) for ways in zip(*found, strict=True)]

    def cheapest_shares(self, nbytes: int) -> Array | None:
        """Shares (N,) at which gathering and reduce-scattering a value of ``nbytes`` together takes least: who stores
        what all need. None for a single rank. Of the best shares for each way to do either, those that do both best. A
        ring is shortest where few own all, so alike ranks may differ, if there are no more than ``MOST_APART``."""
        if nbytes not in self._cheapest:
            self._cheapest[nbytes] = self._find_cheapest(nbytes)
        return self._cheapest[nbytes]

    def _find_cheapest(self, nbytes: int) -> Array | None:
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


def _seen(placement: Placement, kind: Collective, sizes: GroupSizes) -> object:
    """What a collective knows of one of its ends."""
    if not isinstance(placement, Shard):
        return str(placement)
    own = sizes[placement.group], placement.n
    return (placement.dim, placement.outer, *own) if kind == "all_to_all" else own


def _grid(sizes_bytes: Array) -> list[int]:
    """The sizes for which seconds are asked: those of ``GRID`` around them, or themselves if they are no more."""
    first = max(0, int(np.searchsorted(GRID, sizes_bytes[0], side="right")) - 1)
    last = int(np.searchsorted(GRID, sizes_bytes[-1]))
    grid = [*GRID[first:last], *([GRID[last]] if last < len(GRID) else [int(sizes_bytes[-1])])]
    return [int(b) for b in sizes_bytes] if len(sizes_bytes) <= len(grid) else grid


def _cheapest(stages: Sequence[tuple[Array, Array]], classes: RankClasses) -> Array:
    """Shares of the classes (C,) for which the sum of the stages' largest rows, constant (K,) + slope (K, C) @ shares,
    is least; equal ones where the solver gives up for want of precision."""
    n, rows = len(classes.counts), sum(len(constants) for constants, _ in stages)
    program = model_pb2.ModelProto(name="cheapest")
    program.variables.ids.extend(range(n + len(stages)))
    program.variables.lower_bounds.extend([0.0] * (n + len(stages)))
    program.variables.upper_bounds.extend([1.0] * n + [np.inf] * len(stages))
    program.variables.integers.extend([False] * (n + len(stages)))
    program.objective.linear_coefficients.ids.extend(range(n, n + len(stages)))
    program.objective.linear_coefficients.values.extend([1.0] * len(stages))
    program.linear_constraints.ids.extend(range(1 + rows))
    program.linear_constraints.lower_bounds.extend(
        [1.0, *(MS * k for constants, _ in stages for k in constants.tolist())]
    )
    program.linear_constraints.upper_bounds.extend([1.0] + [np.inf] * rows)
    table = np.zeros((1 + rows, n + len(stages)))
    table[0, :n], row = classes.counts, 1
    for top, (constants, slopes) in enumerate(stages):
        table[row : row + len(constants), :n], table[row : row + len(constants), n + top] = -MS * slopes, 1.0
        row += len(constants)
    fill_matrix(program, (), table, 0)
    solved = solve_once(program)
    if solved is None:
        return np.full(n, 1.0 / classes.counts.sum())
    return np.maximum(0.0, solved.values[:n])
