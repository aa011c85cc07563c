"""Variables and rows of the relaxation that are the same on every cluster: types, flows between them, conversions.

They are those of ``relaxation``, whose docstring has them all, but for what memory says. What a variable costs depends
on the cluster, so here it is only said what it is paid for.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from hap.conversion import collective_kind
from hap.cost_models.work import is_view
from hap.fabric import Array
from hap.graph import Value
from hap.placement import REPLICATE, Partial, Placement, Shard
from hap.search.classes import Read, who_reads
from hap.search.prices import Facts
from hap.search.rows import Rows
from hap.search.saved import parts_of_calls

RADIUS = 3  # of the colours that types are. A finer partition takes longer and shows no more here, and hardly more in
# ``masses``; by a coarser one, layers of two kinds in turn have attention in common, and what goes between them is lost


class Transport(NamedTuple):
    """What one slot reads of the values of a class, where they are produced and wanted, by number, the flow between any
    two of those, and the rows of either end."""

    reads: Sequence[Read]
    produced: Sequence[Placement | None]
    wanted: Sequence[Placement]
    flows: Mapping[tuple[int, int], int]
    produced_rows: Mapping[int, int]
    wanted_rows: Mapping[int, int]


class Paid(NamedTuple):
    """A conversion that a variable is paid for, so many units of it once: bytes, from, to."""

    variable: int
    each: int
    nbytes: int
    source: Placement
    target: Placement


class Flows(Rows):
    """Nothing costs anything yet. ``crowded``: with copies that both passes read. Found once for a graph and its
    candidates (``of``)."""

    @classmethod
    def of(cls, facts: Facts, *, crowded: bool = True) -> Self:
        key = f"{cls.__qualname__}, crowded: {crowded}"
        if key not in facts.found:
            facts.found[key] = cls(facts, crowded=crowded)
        found = facts.found[key]
        assert isinstance(found, cls)
        return found

    def __init__(self, facts: Facts, *, crowded: bool) -> None:
        super().__init__()
        self.facts, self.crowded = facts, crowded
        self.parts = parts_of_calls(facts.graph)
        rounds = facts.colours[: RADIUS + 1]
        last, self.of_value, self.of_reader = (rounds[max(0, len(rounds) - 1 - back)] for back in range(3))
        self.fine = facts.timed_alike(last)
        self.x: dict[int, list[int]] = {}
        self.options: list[tuple[int, int, str, int]] = []  # variable, how many nodes, the first of them, its option
        self.count: dict[int, int] = {}
        self.first: dict[int, str] = {}
        self.transports: list[Transport] = []
        self.shared: dict[int, tuple[int, int]] = {}  # flow of another slot than the first -> E and row
        self.conversions: list[Paid] = []
        self._of_batches: list[float] = []  # of every conversion: what of it a batch pays
        self.kept: list[tuple[int, int]] = []  # copies that both passes read, and bytes of one
        self.most_kept = 0  # bytes of all of them
        self._types()
        for reads in self.reads():
            self._value(reads)

    @cached_property
    def kinds(self) -> list[object]:
        """Of every option: equal where it takes as long on any cluster."""
        facts, measured = self.facts, self.facts.compute.is_measured
        by_name, kind = facts.graph.by_name, facts.calls.kind
        return [
            (name, i) if by_name[name].is_source else kind(name, facts.candidates[name][i], measured=measured)
            for _, _, name, i in self.options
        ]

    def _types(self) -> None:
        members: dict[int, list[str]] = {}
        for node in self.facts.graph.nodes:
            members.setdefault(self.fine[node.name], []).append(node.name)
        for a, (name, *others) in members.items():
            self.count[a], self.first[a] = 1 + len(others), name
            self.x[a] = [self._variable("x") for _ in self.facts.candidates[name]]
            self.options += [(v, self.count[a], name, i) for i, v in enumerate(self.x[a])]
            self._row("one", 1.0, 1.0, [(v, 1.0) for v in self.x[a]])

    def ends(self, reads: Sequence[Read]) -> tuple[Placement | None, ...]:
        """Between which a value of these ``reads`` is converted: those that it is produced in, and wanted in, in the
        order in which those of another value of its class are."""
        value, wants = reads[0].value, {r.number: r.wants for r in reads}
        produced = (s.outputs[reads[0].index] for s in self.facts.candidates[value.node])
        return (*produced, *(p for number in sorted(wants) for p in wants[number]))

    def reads(self) -> Sequence[Sequence[Sequence[Read]]]:
        """The reads of the values of every class."""
        classes: dict[object, list[Sequence[Read]]] = {}
        for value, users in self.facts.every_read.items():
            who = who_reads(self.facts.graph, users, self.of_reader)
            classes.setdefault((self.of_value[value.node], users[0].index, who), []).append(users)
        return tuple(classes.values())

    def _value(self, reads: Sequence[Sequence[Read]]) -> None:
        supply: dict[int, list[tuple[int, float]]] = {}  # placement number -> terms
        first, index = reads[0][0].value, reads[0][0].index
        produced = [s.outputs[index] for s in self.facts.candidates[first.node]]
        numbers = _numbered(produced)
        makers = [self.fine[r[0].value.node] for r in reads]
        for a in dict.fromkeys(makers):
            for i, variable in enumerate(self.x[a]):
                supply.setdefault(numbers[i], []).append((variable, float(makers.count(a))))
        slots: dict[object, list[Read]] = {}
        for users in reads:
            for read in users:
                reader = None if read.reader is None else self.of_reader[read.reader]
                slots.setdefault((reader, read.position, read.phase, read.number), []).append(read)
        users_of: dict[tuple[int, Placement], list[tuple[int, int]]] = {}
        reads_of: dict[tuple[int, Placement], dict[str, list[tuple[int, int]]]] = {}
        for same in slots.values():
            each = len(same) // len(reads)
            assert each * len(reads) == len(same), "a colour says how often a value is read"
            wants = next(r for r in reads[0] if r.number == same[0].number).wants
            flows, part = self._transport(supply, produced, same, wants, each), self._part(same)
            for (p, q), flow in flows.items():
                users_of.setdefault((p, q), []).append((flow, each))
                reads_of.setdefault((p, q), {}).setdefault(part, []).append((flow, each))
        self._converted(first, produced, users_of, min(self.facts.batches.part(r[0].value) for r in reads))
        if self.crowded and all(r[0].value.node in self._stored for r in reads):
            self._copies(first, produced, reads_of, supply, len(reads))

    def _transport(
        self,
        supply: Mapping[int, list[tuple[int, float]]],
        produced: Sequence[Placement | None],
        same: Sequence[Read],
        wants: Sequence[Placement],
        each: int,
    ) -> dict[tuple[int, Placement], int]:
        """The flows that need a conversion: (number of the produced placement, placement wanted) -> variable."""
        demand: dict[int, list[tuple[int, float]]] = {}
        numbers = _numbered(wants)
        readers: dict[int | None, int] = {}
        for read in same:
            a = None if read.reader is None else self.fine[read.reader]
            readers[a] = readers.get(a, 0) + 1
        for a, times in readers.items():
            for j, variable in enumerate(self.x[a] if a is not None else [self._always()]):
                demand.setdefault(numbers[j], []).append((variable, float(times)))
        pairs = self.pairs({p: produced[p] for p in supply}, {q: wants[q] for q in demand})
        flows: dict[tuple[int, int], int] = {}
        out, came = ({number: list[tuple[int, float]]() for number in ends} for ends in (supply, demand))
        for p, q in pairs:
            flows[p, q] = flow = self._variable("F")
            out[p].append((flow, -1.0))
            came[q].append((flow, -1.0))
        made = {
            p: self._row("produced", 0.0, 0.0, [*((v, each * k) for v, k in s), *out[p]]) for p, s in supply.items()
        }
        met = {q: self._row("wanted", 0.0, 0.0, [*terms, *came[q]]) for q, terms in demand.items()}
        self.transports.append(Transport(same, produced, wants, flows, made, met))
        return {(p, wants[q]): f for (p, q), f in flows.items() if produced[p] != wants[q]}

    def pairs(self, produced: Mapping[int, Placement | None], wanted: Mapping[int, Placement]) -> list[tuple[int, int]]:
        """Numbers of placements of which what is produced in the first can be read in the second."""
        summed = {p for p, source in produced.items() if isinstance(source, Partial)}
        whole = {q for q, target in wanted.items() if not isinstance(target, Partial)}
        return [(p, q) for p in produced for q in wanted if q in whole or p in summed]

    def is_free(self, source: Placement, target: Placement) -> bool:
        """Whether a conversion costs nothing on any cluster."""
        return False

    def _converted(
        self,
        value: Value,
        produced: Sequence[Placement | None],
        users_of: Mapping[tuple[int, Placement], Sequence[tuple[int, int]]],
        part: float,
    ) -> None:
        """``part``: what of a conversion a batch pays."""
        nbytes = self.facts.graph.meta(value).nbytes
        for (p, target), users in users_of.items():
            source, ((first, each), *others) = produced[p], users
            assert source is not None
            if self.is_free(source, target):
                continue
            self._pay(part, Paid(first, each, nbytes, source, target))
            if others:
                more = self._variable("E")
                self._pay(part, Paid(more, 1, nbytes, source, target))
                for flow, times in others:
                    terms = [(more, float(times)), (first, times / each), (flow, -1.0)]
                    self.shared[flow] = more, self._row("shared", 0.0, np.inf, terms)

    @cached_property
    def prices(self) -> tuple[list[Paid], NDArray[np.int64]]:
        """Conversions of which no two cost alike, and of every conversion which of them it costs as much as."""
        first, found = dict[object, int](), list[Paid]()
        numbers = np.zeros(len(self.conversions), dtype=np.int64)
        for i, paid in enumerate(self.conversions):
            number = first.setdefault(self.price_of(paid), len(found))
            if number == len(found):
                found.append(paid)
            numbers[i] = number
        return found, numbers

    @cached_property
    def units(self) -> Array:
        """Of every conversion: what of it a batch pays for a unit of its variable."""
        return np.array(self._of_batches) / np.array([paid.each for paid in self.conversions])

    def price_of(self, paid: Paid) -> object:
        """Equal for conversions that cost alike on every cluster."""
        return paid.nbytes, collective_kind(paid.source, paid.target)

    def _pay(self, part: float, paid: Paid) -> None:
        self.conversions.append(paid)
        self._of_batches.append(part)

    @cached_property
    def _stored(self) -> frozenset[str]:
        """Parameters and views of them."""
        found: set[str] = set()
        for node in self.facts.graph.nodes:
            if node.op == "parameter" or (not node.is_source and is_view(node) and node.inputs[0].node in found):
                found.add(node.name)
        return frozenset(found)

    def _part(self, reads: Sequence[Read]) -> str:
        """The part in which all of these reads are; "" where they are in both, or results."""
        found = {self.parts.get(read.reader or "", "") for read in reads}
        return min(found) if len(found) == 1 else ""

    def _copies(
        self,
        value: Value,
        produced: Sequence[Placement | None],
        reads_of: Mapping[tuple[int, Placement], Mapping[str, Sequence[tuple[int, int]]]],
        supply: Mapping[int, Sequence[tuple[int, float]]],
        many: int,
    ) -> None:
        """What is gathered for both passes lies on all ranks where one ends and the other begins."""
        nbytes = self.facts.graph.meta(value).nbytes
        for (p, target), by_part in reads_of.items():
            source = produced[p]
            if not isinstance(source, Shard) or target != REPLICATE:
                continue
            pairs = list(itertools.product(by_part.get("forward", ()), by_part.get("backward", ())))
            if not pairs:
                continue
            copy, both = self._variable("K"), list[tuple[int, float]]()
            self.kept.append((copy, nbytes))
            self.most_kept += nbytes * many
            if self.facts.graph.by_name[value.node].op == "parameter":
                again = self._variable("A")
                self._pay(1.0, Paid(again, 1, nbytes, source, target))
                both.append((again, 1.0))
            for (f, times), (b, more) in pairs:
                without = [(v, k) for v, k in supply[p]]
                flows = [(copy, 1.0), *both, (f, -1.0 / times), (b, -1.0 / more)]
                self._row("kept", 0.0, np.inf, [*flows, *without])


def _numbered(placements: Sequence[Placement | None]) -> list[int]:
    """For each placement the index of its first equal."""
    first: dict[object, int] = {}
    return [first.setdefault(p, i) for i, p in enumerate(placements)]
