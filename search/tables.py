"""Prices of everything that a MILP may choose, at fixed sizes.

``Tables`` holds what the payers of a skeleton pay for, counted up once, with groups that always have equal sizes called
by one name: which calls, which bytes at which moments, which conversions. ``Prices`` adds sizes: every distinct call,
shard and conversion is priced once, whatever the number of layers, and sums over entries do the rest. Units: seconds
and bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hap.conversion import collective_kind
from hap.cost_models.collective import shares
from hap.cost_models.compute import ComputeTable, Parts
from hap.cost_models.evaluate import UpdateTable
from hap.cost_models.fold import Cluster, FoldedCluster, device_numbers
from hap.cost_models.optimizers import update_flops
from hap.cost_models.pieces import many_local_bytes
from hap.fabric import Array
from hap.graph import Value
from hap.placement import GroupSizes, Placement, Shard, Sizes
from hap.plan import Collective
from hap.search.entries import Entries
from hap.search.milp import Skeleton
from hap.search.payers import ConversionPayer, NodePayer
from hap.search.prices import MOMENTS, Facts
from hap.search.wires import Wanted, Wires

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Held:
    """Bytes (moments, R, V) of every variable; or of every payer, if ``tables`` are theirs, and spread over the
    variables when they are asked for: mostly it is asked about one point, at which few are not 0."""

    given: Array
    tables: Tables | None = None

    @cached_property
    def bytes(self) -> Array:
        return self.given if self.tables is None else self.tables.of_variables(self.given)

    def of(self, variables: NDArray[np.int64]) -> Array:
        """(moments, R, variables): of some."""
        return self.given[:, :, variables] if self.tables is None else self.tables.of_some(self.given, variables)

    def at(self, values: Array) -> Array:
        """(moments, R) at a point (V,). No product of whole matrices, which would wake all cores."""
        used = np.flatnonzero(values)
        held: Array = (self.of(used) * values[used]).sum(axis=2)
        return held


class Coefficients(NamedTuple):
    """What a variable of the program costs when it is 1: ``together_s`` (V,) in which all ranks are busy together,
    ``compute_s`` (R, V) of one rank of every kind, ``held`` (moments, R, V); ``capacity_bytes`` (R,)."""

    together_s: Array
    compute_s: Array
    held: Held
    capacity_bytes: Array

    @property
    def held_bytes(self) -> Array:
        return self.held.bytes


class _Conversion(NamedTuple):
    nbytes: int
    source: Placement
    target: Placement


class _Alike(NamedTuple):
    """Conversions between ends that cost alike at any sizes: ``numbers`` of those of so many bytes."""

    source: Placement
    target: Placement
    numbers: defaultdict[int, list[int]]


def _end(placement: Placement) -> object:
    """What a price depends on, of one end."""
    if not isinstance(placement, Shard):
        return type(placement)
    return placement.group, placement.n, placement.dim, placement.outer


@dataclass(eq=False)
class Tables:
    """What the payers of one skeleton pay for. ``same``: group -> the name of all groups that have its sizes."""

    facts: Facts
    skeleton: Skeleton
    same: Mapping[str, str]
    pinned: bool = False

    def __post_init__(self) -> None:
        self.calls, self.updates, self.conversions = Entries(1), Entries(1), Entries(1)
        self.held, self.copies = Entries(MOMENTS), Entries(MOMENTS)
        self._signatures: dict[object, Parts] = {}
        self._summed: dict[object, Array] = {}
        self._copied: dict[object, Array | None] = {}
        self._names: dict[int, Placement] = {}  # by the placement's id, which the skeleton keeps
        self._is_measured = self.facts.compute.is_measured  # calls of as much work may take different times
        for number, payer in enumerate(self.skeleton.payers):
            if isinstance(payer, NodePayer):
                for members in self._alike(self.skeleton.classes.nodes[payer.node_class].members):
                    self._node(number, members, payer.option)
            else:
                self._conversions(number, payer)
        self.by_kind: dict[Collective, dict[object, _Alike]] = {}
        for i, c in enumerate(self.conversions.numbers):
            assert isinstance(c, _Conversion)
            alike = self.by_kind.setdefault(collective_kind(c.source, c.target), {})
            ends = _end(c.source), _end(c.target)
            if ends not in alike:
                alike[ends] = _Alike(c.source, c.target, defaultdict(list))
            alike[ends].numbers[c.nbytes].append(i)
        payer, self.variable = np.array(
            [(i, v) for i, p in enumerate(self.skeleton.payers) for v in p.variables], dtype=np.int64
        ).T
        self.payer = payer

    def of_variables(self, of_payers: Array) -> Array:
        """(..., payers) -> (..., V): what each variable is paid for."""
        rows, width = of_payers.reshape(-1, of_payers.shape[-1]), len(self.skeleton.names)
        found = np.zeros((len(rows), width))
        for total, row in zip(found, rows, strict=True):
            total += np.bincount(self.variable, row[self.payer], width)
        return found.reshape(*of_payers.shape[:-1], width)

    def of_some(self, of_payers: Array, variables: NDArray[np.int64]) -> Array:
        """The same of these variables alone, (moments, R, payers) -> (moments, R, variables)."""
        place = np.full(len(self.skeleton.names), -1)
        place[variables] = np.arange(len(variables))
        kept = np.flatnonzero(place[self.variable] >= 0)
        variable, payer = place[self.variable[kept]], self.payer[kept]
        found = np.zeros((len(variables), *of_payers.shape[:-1]))
        for at in np.ndindex(of_payers.shape[:-1]):
            found[:, *at] = np.bincount(variable, of_payers[at][payer], len(variables))
        return found.transpose(1, 2, 0)  # as indexing leaves them, so that they are added up in the same order

    def on(self, facts: Facts) -> Tables:
        """The same entries for another cluster: none of them depends on it."""
        other = copy(self)
        other.facts = facts
        return other

    def _ends(self, payer: ConversionPayer) -> list[tuple[Sequence[Value], Placement, Placement]]:
        """Values that are converted alike, and of the first from what and to what; see ``_alike``."""
        if not self.pinned:
            return [(payer.values, payer.sources[0], payer.targets[0])]
        return [((v,), p, q) for v, p, q in zip(payer.values, payer.sources, payer.targets, strict=True)]

    def _alike(self, members: Sequence[T]) -> list[Sequence[T]]:
        """Parts of a class whose members pay for the same: all of them, as corresponding groups have equal sizes;
        unless some of the sizes are pinned."""
        return [[m] for m in members] if self.pinned else [members]

    def _node(self, number: int, members: Sequence[str], option: int) -> None:
        facts, name = self.facts, members[0]
        strategy, node = facts.candidates[name][option], facts.graph.by_name[name]
        many = float(facts.times(members))
        for place, (output, nbytes, _) in enumerate(facts.allocations(name)):
            placement = strategy.outputs[output]
            if placement is not None:
                self.held.add(number, (self._named(placement), nbytes), self._moments(tuple(members), place))
        if not node.is_source:
            self.calls.add(number, self._signature(facts.parts(name, strategy)), many)
        elif node.op == "parameter" and node.target in facts.graph.gradients:
            home = strategy.outputs[0]
            assert home is not None
            flops = update_flops(facts.optimizer, facts.graph, node)
            self.updates.add(number, (node.meta.nbytes, self._named(home), flops), many)

    def _moments(self, members: tuple[str, ...], place: int) -> Array:
        """Of so many allocations, how many are there at every moment (MOMENTS,)."""
        key = (members[0], len(members), place)
        if key not in self._summed:
            self._summed[key] = sum(self.facts.allocations(m)[place][2][:, 0] for m in members)  # type: ignore[assignment]
        return self._summed[key]

    def _signature(self, parts: Parts) -> object:
        """Equal for calls that take equally long at any sizes."""
        group = None if parts.group is None else self.same.get(parts.group, parts.group)
        key = (
            parts.call if self._is_measured else "",
            parts.op_class,
            parts.dtype,
            group,
            parts.n,
            parts.fixed_flops,
            parts.shared_flops,
        )
        key += (parts.fixed_bytes, parts.shared_bytes, parts.message_bytes)  # type: ignore[assignment]
        key += (parts.idle_when_empty,)  # type: ignore[assignment]
        self._signatures.setdefault(key, parts)
        return key

    def _named(self, placement: Placement) -> Placement:
        named = self._names.get(id(placement))
        if named is None:
            named = placement
            if isinstance(placement, Shard) and placement.group in self.same:
                named = placement._replace(group=self.same[placement.group])
            self._names[id(placement)] = named
        return named

    def _conversions(self, number: int, payer: ConversionPayer) -> None:
        facts, once = self.facts, self.facts.batches.once
        for values, source, target in self._ends(payer):
            nbytes = facts.graph.by_name[values[0].node].outputs[values[0].index].nbytes  # type: ignore[union-attr]
            what = _Conversion(nbytes, self._named(source), self._named(target))
            self.conversions.add(number, what, sum(map(facts.batches.part, values)) if once else float(len(values)))
            alive = self._copies(values, payer.copy)
            if alive is not None:
                self.copies.add(number, (what.target, nbytes), alive)
            if once and (late := [v for v in values if v in once]):
                left: Array = np.sum([facts.left(v, source, target)[:, 0] for v in late], axis=0)
                held = facts.batches.left_bytes(late[0], facts.graph.meta(late[0]))
                self.copies.add(number, (what.source, held), left)

    def _copies(self, values: Sequence[Value], copy: str) -> Array | None:
        """Of copies of these values, how many are there at every moment (MOMENTS,); None if there never is one.
        Gradients are counted elsewhere."""
        key = (values[0], len(values), copy)
        if key not in self._copied:
            facts = self.facts
            kept = [facts.copy_alive(v, copy)[:, 0] for v in values if v not in facts.homes]
            alive: Array = np.sum(kept, axis=0) if kept else np.zeros(MOMENTS)
            self._copied[key] = alive if alive.any() else None
        return self._copied[key]


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices at fixed sizes. ``capacity_bytes`` (N,) is what each rank may hold. ``per_collective_s`` is added to every
    collective: a preference for short programs over gains that nobody could measure. ``plain``: see ``Wires``."""

    tables: Tables
    sizes: GroupSizes
    capacity_bytes: Array
    per_collective_s: float = 0.0
    plain: bool = False

    @property
    def facts(self) -> Facts:
        return self.tables.facts

    def holding(self, capacity_bytes: Array) -> Prices:
        """The same where each rank may hold so much; nothing else is priced anew where alike ranks stay alike."""
        other = replace(self, capacity_bytes=capacity_bytes)
        if self.folded is other.folded and self.ranks == other.ranks:
            other.__dict__["_coefficients"] = self._coefficients._replace(capacity_bytes=other.capacity)
        return other

    @cached_property
    def folded(self) -> FoldedCluster | None:
        """Ranks that are alike and hold alike once each, if there are many."""
        return self.facts.evaluator.folds.find([self.capacity_bytes.tolist(), *dict.fromkeys(self.sizes.values())])

    @cached_property
    def cluster(self) -> Cluster:
        return self.facts.cluster if self.folded is None else self.folded

    @cached_property
    def here(self) -> GroupSizes:
        """The sizes on the ranks of ``cluster``."""
        return self.sizes if self.folded is None else self.folded.take(self.sizes)

    @cached_property
    def wires(self) -> Wires:
        return self.facts.wires.of(self.cluster, plain=self.plain)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """One rank of ``cluster`` of every kind: same device numbers, same sizes of all groups."""
        if self.folded is not None:
            return tuple(range(self.folded.world_size))
        sizes = np.array(list(self.sizes.values())).reshape(len(self.sizes), self.facts.cluster.world_size).T
        kinds: dict[object, int] = {}
        for d in self.facts.cluster.devices:
            kinds.setdefault((device_numbers(d), float(self.capacity_bytes[d.rank]), sizes[d.rank].tobytes()), d.rank)
        return tuple(kinds.values())

    @cached_property
    def capacity(self) -> Array:
        """What one rank of every kind may hold."""
        by_rank = self.capacity_bytes if self.folded is None else self.capacity_bytes[list(self.folded.first)]
        return by_rank[list(self.ranks)]

    def coefficients(self) -> Coefficients:
        return self._coefficients

    @cached_property
    def _coefficients(self) -> Coefficients:
        t, ranks, payers = self.tables, list(self.ranks), len(self.tables.skeleton.payers)
        together, slices = self._conversions_s()
        compute = t.calls.sum(self._calls_s()[:, ranks], payers) + t.updates.sum(self._updates_s()[:, ranks], payers)
        compute += t.conversions.sum(slices[:, ranks], payers)
        held = t.held.sum(self._local(t.held)[:, ranks], payers)
        held += t.copies.sum(self._local(t.copies)[:, ranks], payers)
        together_s = t.conversions.sum(together[:, None], payers)
        spread = [t.of_variables(of_one[0]) for of_one in (together_s[:, 0], compute)]
        return Coefficients(spread[0], spread[1], Held(held, t), self.capacity)

    def _calls_s(self) -> Array:
        """(calls, N)."""
        calls, n = [self.tables._signatures[key] for key in self.tables.calls.numbers], self.cluster.world_size
        compute = self.facts.compute if self.folded is None else ComputeTable(self.folded.devices)
        rho = {g: np.array(s, dtype=np.float64) / sum(self.sizes[g]) for g, s in self.here.items()}
        ones = np.ones(n)
        given = [ones if parts.group is None else rho[parts.group] for parts in calls]
        return compute.of_many(calls, np.array(given)) if calls else np.zeros((0, n))

    def _updates_s(self) -> Array:
        """(updates, N)."""
        whats = list(cast(Iterable[tuple[int, Placement, float]], self.tables.updates.numbers))
        own = many_local_bytes(((nbytes, p) for nbytes, p, _ in whats), self.here, self.cluster.world_size)
        flops = np.array([flops for *_, flops in whats]).reshape(-1, 1)
        return UpdateTable(self.cluster, self.facts.optimizer).seconds(own, flops) / self.facts.batches.count

    def _local(self, entries: Entries) -> Array:
        """Bytes of every (placement, bytes of the whole) on every rank (what, N)."""
        whats = cast(Iterable[tuple[Placement, int]], entries.numbers)
        return many_local_bytes(((nbytes, p) for p, nbytes in whats), self.here, self.cluster.world_size)

    def _conversions_s(self) -> tuple[Array, Array]:
        """Of every distinct conversion: seconds of all together (C,), seconds of each rank (C, N)."""
        n, count = self.cluster.world_size, len(self.tables.conversions.numbers)
        together, slices = np.zeros(count), np.zeros((count, n))
        distinct: dict[Sizes, int] = {}
        number = {group: distinct.setdefault(tuple(sizes), len(distinct)) for group, sizes in self.sizes.items()}
        for kind, alike in self.tables.by_kind.items():
            if kind == "slice":
                self._cut(alike.values(), slices)
            else:
                self._price_alike(kind, alike.values(), number, together)
        return together, slices

    def _cut(self, cuts: Iterable[_Alike], into: Array) -> None:
        """Pieces cut out of whole values."""
        for cut in cuts:
            share = shares(cut.target, self.here, self.cluster.world_size)
            for nbytes, numbers in cut.numbers.items():
                constant, slope = self.wires.cut_s(nbytes)
                into[numbers] = constant + slope * share

    def _price_alike(
        self, kind: Collective, conversions: Iterable[_Alike], number: Mapping[str, int], into: Array
    ) -> None:
        """Those of one kind: of the same ends, by their sizes' ``number``, all at once."""

        def end(placement: Placement) -> object:
            if not isinstance(placement, Shard):
                return type(placement)
            own = number[placement.group]
            return (placement.dim, placement.outer, own) if kind == "all_to_all" else own

        alike: dict[object, dict[int, list[int]]] = {}
        first: dict[object, _Alike] = {}
        for c in conversions:
            key = (end(c.source), end(c.target))
            first.setdefault(key, c)
            own = alike.setdefault(key, {})
            for nbytes, numbers in c.numbers.items():
                own.setdefault(nbytes, []).extend(numbers)
        wanted = [
            Wanted(np.array(sorted(alike[key]), dtype=np.float64), c.source, c.target) for key, c in first.items()
        ]
        for same, seconds in zip(first, self.wires.best_of_many(kind, wanted, self.here), strict=True):
            for nbytes, s in zip(sorted(alike[same]), seconds.tolist(), strict=True):
                into[alike[same][nbytes]] = s + self.per_collective_s
