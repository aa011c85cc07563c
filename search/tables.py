"""Prices of everything that a MILP may choose, at fixed sizes.

``Tables`` holds what the payers of a skeleton pay for, counted up once, with groups that always have equal sizes called
by one name: which calls, which bytes at which moments, which conversions. ``Prices`` adds sizes: every distinct call,
shard and conversion is priced once, whatever the number of layers, and sums over entries do the rest. Units: seconds
and bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hap.conversion import collective_kind
from hap.cost_models.collective import collective_coefficients, shares
from hap.cost_models.compute import Parts
from hap.cost_models.memory import local_bytes
from hap.fabric import Array
from hap.placement import GroupSizes, Placement, Shard
from hap.search.milp import ConversionPayer, NodePayer, Skeleton
from hap.search.prices import MOMENTS, Facts
from hap.search.wires import device_numbers


class Coefficients(NamedTuple):
    """What a variable of the program costs when it is 1: ``together_s`` (V,) in which all ranks are busy together,
    ``compute_s`` (R, V) of one rank of every kind, ``held_bytes`` (moments, R, V); ``capacity_bytes`` (R,)."""

    together_s: Array
    compute_s: Array
    held_bytes: Array
    capacity_bytes: Array


@dataclass
class _Entries:
    """(payer, what, weight (W,)) many times; ``what`` is numbered in order of appearance."""

    width: int
    numbers: dict[object, int] = field(default_factory=dict)
    places: dict[tuple[int, int], int] = field(default_factory=dict)
    weights: list[Array] = field(default_factory=list)

    def add(self, payer: int, what: object, weight: Array) -> None:
        place = (payer, self.numbers.setdefault(what, len(self.numbers)))
        if place in self.places:
            self.weights[self.places[place]] = self.weights[self.places[place]] + weight
        else:
            self.places[place] = len(self.weights)
            self.weights.append(weight)

    def sum(self, values: Array, payers: int, column: int = 0) -> Array:
        """values (what, R) -> (R, payers): weighted by column ``column`` of the weights."""
        total = np.zeros((payers, values.shape[1]))
        if self.places:
            payer, what = np.array(list(self.places)).T
            np.add.at(total, payer, values[what] * self._table[:, column, None])
        return total.T

    @cached_property
    def _table(self) -> Array:
        return np.array(self.weights).reshape(len(self.weights), self.width)


class _Conversion(NamedTuple):
    nbytes: int
    source: Placement
    target: Placement


@dataclass(eq=False)
class Tables:
    """What the payers of one skeleton pay for. ``same``: group -> the name of all groups that have its sizes."""

    facts: Facts
    skeleton: Skeleton
    same: Mapping[str, str]

    def __post_init__(self) -> None:
        self.calls, self.updates, self.conversions = _Entries(1), _Entries(1), _Entries(1)
        self.held, self.copies = _Entries(MOMENTS), _Entries(MOMENTS)
        self._signatures: dict[object, Parts] = {}
        once = np.ones(1)
        for number, payer in enumerate(self.skeleton.payers):
            if isinstance(payer, NodePayer):
                for name in self.skeleton.classes.nodes[payer.node_class].members:
                    self._node(number, name, payer.option, once)
            else:
                self._conversions(number, payer, once)
        payer, self.variable = np.array(
            [(i, v) for i, p in enumerate(self.skeleton.payers) for v in p.variables], dtype=np.int64
        ).T
        self.payer = payer

    def on(self, facts: Facts) -> Tables:
        """The same entries for another cluster: none of them depends on it."""
        other = copy(self)
        other.facts = facts
        return other

    def _node(self, number: int, name: str, option: int, once: Array) -> None:
        facts, strategy = self.facts, self.facts.candidates[name][option]
        node = facts.graph.by_name[name]
        for placement, nbytes, moments in facts.held(name, strategy):
            self.held.add(number, (self._named(placement), nbytes), moments[:, 0])
        if not node.is_source:
            self.calls.add(number, self._signature(facts.parts(name, strategy)), once)
        elif node.op == "parameter" and node.target in facts.graph.gradients:
            home = strategy.outputs[0]
            assert home is not None
            self.updates.add(number, (node.meta.nbytes, self._named(home)), once)
            self._first_update.setdefault((node.meta.nbytes, self._named(home)), (name, option))

    @cached_property
    def _first_update(self) -> dict[object, tuple[str, int]]:
        return {}

    def _signature(self, parts: Parts) -> object:
        """Equal for calls that take equally long at any sizes."""
        group = None if parts.group is None else self.same.get(parts.group, parts.group)
        key = (parts.call, parts.op_class, parts.dtype, group, parts.n, parts.fixed_flops, parts.shared_flops)
        key += (parts.fixed_bytes, parts.shared_bytes, parts.idle_when_empty)  # type: ignore[assignment]
        self._signatures.setdefault(key, parts)
        return key

    def _named(self, placement: Placement) -> Placement:
        if isinstance(placement, Shard) and placement.group in self.same:
            return replace(placement, group=self.same[placement.group])
        return placement

    def _conversions(self, number: int, payer: ConversionPayer, once: Array) -> None:
        facts = self.facts
        for value, source, target in zip(payer.values, payer.sources, payer.targets, strict=True):
            what = _Conversion(facts.graph.meta(value).nbytes, self._named(source), self._named(target))
            self.conversions.add(number, what, once)
            if value not in facts.homes:
                self.copies.add(number, (what.target, what.nbytes), facts.copy_alive(value, payer.copy)[:, 0])


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices at fixed sizes. ``capacity_bytes`` (N,) is what each rank may hold. ``per_collective_s`` is added to every
    collective: a preference for short programs over gains that nobody could measure."""

    tables: Tables
    sizes: GroupSizes
    capacity_bytes: Array
    per_collective_s: float = 0.0

    @property
    def facts(self) -> Facts:
        return self.tables.facts

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """One rank of every kind: same device numbers, same sizes of all groups."""
        sizes = np.array(list(self.sizes.values())).reshape(len(self.sizes), self.facts.cluster.world_size).T
        kinds: dict[object, int] = {}
        for d in self.facts.cluster.devices:
            kinds.setdefault((device_numbers(d), float(self.capacity_bytes[d.rank]), sizes[d.rank].tobytes()), d.rank)
        return tuple(kinds.values())

    def coefficients(self) -> Coefficients:
        t, ranks, payers = self.tables, list(self.ranks), len(self.tables.skeleton.payers)
        n = self.facts.cluster.world_size
        compute = t.calls.sum(self._calls_s()[:, ranks], payers) + t.updates.sum(self._updates_s()[:, ranks], payers)
        together, slices = self._conversions_s()
        compute += t.conversions.sum(slices[:, ranks], payers)
        kept = self._local(t.held)[:, ranks], self._local(t.copies)[:, ranks]
        held = np.array([t.held.sum(kept[0], payers, m) + t.copies.sum(kept[1], payers, m) for m in range(MOMENTS)])
        together_s = t.conversions.sum(together[:, None], payers)[0]
        width = len(t.skeleton.names)
        spread = [np.zeros((*a.shape[:-1], width)) for a in (together_s, compute, held)]
        for whole, of_payers in zip(spread, (together_s, compute, held), strict=True):
            np.add.at(whole.T, t.variable, of_payers.T[t.payer])
        assert n == len(self.capacity_bytes)
        return Coefficients(spread[0], spread[1], spread[2], self.capacity_bytes[ranks])

    def _calls_s(self) -> Array:
        """(calls, N)."""
        n, known = self.facts.cluster.world_size, self.tables._signatures
        rho = {g: np.array(s, dtype=np.float64) / sum(s) for g, s in self.sizes.items()}
        ones, found = np.ones(n), np.zeros((len(self.tables.calls.numbers), n))
        for i, key in enumerate(self.tables.calls.numbers):
            parts = known[key]
            found[i] = self.facts.compute.seconds(parts, ones if parts.group is None else rho[parts.group])
        return found

    def _updates_s(self) -> Array:
        found = np.zeros((len(self.tables.updates.numbers), self.facts.cluster.world_size))
        for i, key in enumerate(self.tables.updates.numbers):
            name, option = self.tables._first_update[key]
            found[i] = self.facts.update_s(name, self.facts.candidates[name][option], self.sizes)
        return found

    def _local(self, entries: _Entries) -> Array:
        """Bytes of every (placement, bytes of the whole) on every rank (what, N)."""
        n = self.facts.cluster.world_size
        found = np.zeros((len(entries.numbers), n))
        for i, what in enumerate(entries.numbers):
            assert isinstance(what, tuple)
            placement, nbytes = what
            found[i] = local_bytes(nbytes, placement, self.sizes, n)
        return found

    def _conversions_s(self) -> tuple[Array, Array]:
        """Of every distinct conversion: seconds of all together (C,), seconds of each rank (C, N)."""
        n, conversions = self.facts.cluster.world_size, self.tables.conversions.numbers
        together, slices = np.zeros(len(conversions)), np.zeros((len(conversions), n))
        alike: dict[object, dict[int, list[int]]] = {}
        first: dict[object, _Conversion] = {}
        for i, c in enumerate(conversions):
            assert isinstance(c, _Conversion)
            kind = collective_kind(c.source, c.target)
            if kind == "slice":
                form = collective_coefficients("slice", "local", c.nbytes, c.source, c.target, self.facts.cluster)
                slices[i] = form.stages[0].rows(shares(c.source, self.sizes, n), shares(c.target, self.sizes, n))
                continue
            key = (kind, self._with_sizes(c.source, kind), self._with_sizes(c.target, kind))
            first.setdefault(key, c)
            alike.setdefault(key, {}).setdefault(c.nbytes, []).append(i)
        for same, by_bytes in alike.items():
            c, amounts = first[same], sorted(by_bytes)
            kind = collective_kind(c.source, c.target)
            seconds = self.facts.wires.best_s(kind, np.array(amounts, dtype=np.float64), c.source, c.target, self.sizes)
            for nbytes, s in zip(amounts, seconds.tolist(), strict=True):
                together[by_bytes[nbytes]] = s + self.per_collective_s
        return together, slices

    def _with_sizes(self, placement: Placement, kind: str) -> object:
        if not isinstance(placement, Shard):
            return str(placement)
        shard = self.sizes[placement.group]
        return (placement.dim, placement.outer, shard) if kind == "all_to_all" else shard
