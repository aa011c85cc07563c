"""A lower bound of the cost model's step time that counts communication: over all strategies and all shares.

``bound`` proves, for weights w of the ranks, that a node under strategy s takes at least ``line(s)`` seconds of a step,
whatever the shares. Here every conversion is added with the least that any decomposition takes for any shares, and
strategies have to agree:

    T >= sum_n line[n, s(n)] + sum of the conversions that s implies, each at its least                      (joint)

whose minimum over s is a program in the flow form of ``milp``. Its LP relaxation is solved for all nodes at once by
adding up its rows over what looks alike, which can only make the minimum smaller: so the bound holds.

    x[a,i] >= 0           of the nodes of type a (colour after R rounds), the fraction that takes option i
    F[v,k,p,q] >= 0       of the values v (colour of the producer after R - 1 rounds, which output, and of one of many
                          who reads it, in colours after R - 2), how many are read by slot k (the reader's colour after
                          R - 2) in q when they were produced in p
    C[v,p,q] >= 0         how many are converted from p to q

    one:      sum_i x[a,i] = 1
    produced: sum_q F[v,k,p,q] = m[v,k] sum_{a in v, i gives p} n[v,a] x[a,i]     m: such reads of each of these values,
                                                                                  n: of which so many are made by a's
    wanted:   sum_p F[v,k,p,q] = sum_{a in k, j wants q} |a| x[a,j]
    shared:   m[v,k] C[v,p,q] >= F[v,k,p,q]
    kept:     K[v,p] + A[v,p] >= F[v,k,p,R] / m[v,k] + F[v,l,p,R] / m[v,l] - sum_{i gives p} |a| x[a,i]
                                                    for a parameter v, or a view of one, that k reads in the forward
                                                    and l in the backward pass: gathered copies there between the two;
                                                    of parameters, unless they are dropped and gathered again: A
    state:    what parameters, gradients and the optimizer take in all memory <= all usable memory
    between:  what parameters, the optimizer, K and what calls of the forward pass save take in all memory <= all usable
              memory; the calls of type a save nothing for the fraction Z[a] that the backward pass makes again

    minimise  sum |a| line[a,i] x[a,i] + sum least(p, q, bytes) C[v,p,q] + sum least(p, R, bytes) A[v,p]
              + sum |a| min_i line[a,i] Z[a]

A node's colour says how many reads of which colour it has, so all nodes of a type are in the same rows the same number
of times, and each row above is the sum of the rows of a flow program that merges nothing. What a conversion takes at
least is said in ``least``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np

from hap.conversion import collective_kind
from hap.cost_models.memory import usable_bytes
from hap.cost_models.optimizers import optimizer_state_bytes
from hap.cost_models.profile import MeasuredDevice
from hap.cost_models.sequence import ConversionCost
from hap.cost_models.work import is_view
from hap.graph import Value
from hap.placement import REPLICATE, Partial, Placement, Shard
from hap.plan import Strategy
from hap.search.bound import Line, device_classes, line_seconds, node_line, weighted_bound
from hap.search.classes import Read, find_reads, who_reads
from hap.search.least import Least
from hap.search.milp import GB, MS
from hap.search.prices import Facts
from hap.search.protos import DUAL, OFF, seeded
from hap.search.rows import Rows
from hap.search.saved import parts_of_calls, saved_bytes
from hap.search.wires import ClassForms, RankClasses

SAFETY = 1e-6  # of the bound: what the solver's tolerances may be worth
RADIUS = 3  # of the colours that types are. A finer partition takes longer and shows no more here, and hardly more in
# ``masses``; by a coarser one, layers of two kinds in turn have attention in common, and what goes between them is lost


@dataclass(frozen=True)
class LowerBound:
    """``seconds`` is proved; ``compute_s`` of it without any communication; ``variables`` of the program."""

    seconds: float
    compute_s: float
    variables: int


def lower_bound(facts: Facts) -> LowerBound:
    """The bound."""
    separate, weights = weighted_bound(facts)
    if not separate.menus:
        return LowerBound(0.0, 0.0, 0)
    beside_s = around_s(facts, weights)
    compute_s = separate.seconds(weights) + beside_s
    if facts.cluster.world_size == 1:
        return LowerBound(compute_s, compute_s, 0)
    relaxed = relaxation(facts)
    joint_s = relaxed.seconds
    seconds = compute_s if joint_s is None else max(compute_s, (joint_s + beside_s) * (1 - SAFETY))
    return LowerBound(seconds, compute_s, len(relaxed.cost))


def around_s(facts: Facts, weights: Sequence[float]) -> float:
    """What a step takes beside its calls, where that was measured, by these weights of the kinds of devices."""
    devices, counts = device_classes(facts.cluster)
    many = np.array(weights) * counts
    own = [d.kind.step_s * d.factor if isinstance(d, MeasuredDevice) else 0.0 for d in devices]
    return float(many @ np.array(own) / many.sum())


def relaxation(facts: Facts) -> Relaxation:
    """The program of these facts, at the weights that are best for the bound of computing. Made once."""
    known = facts.here.get("relaxation")
    if known is None:
        known = facts.here["relaxation"] = Relaxation(facts, weighted_bound(facts)[1])
    assert isinstance(known, Relaxation)
    return known


# ---- the program ----


class Transport(NamedTuple):
    """What one slot reads of the values of a class, where they are produced and wanted, by number, the flow between any
    two of those, and the rows of either end."""

    reads: Sequence[Read]
    produced: Sequence[Placement | None]
    wanted: Sequence[Placement]
    flows: Mapping[tuple[int, int], int]
    produced_rows: Mapping[int, int]
    wanted_rows: Mapping[int, int]


class Relaxation(Rows):
    """See the module docstring. Variables are named as there."""

    solving = seeded(lp_algorithm=DUAL, presolve=OFF)

    def __init__(
        self,
        facts: Facts,
        weights: Sequence[float],
        *,
        crowded: bool = True,
    ) -> None:
        """``crowded`` False: without the rows of memory between the passes."""
        super().__init__()
        self.facts, self.least, self.crowded = facts, Least(facts), crowded
        self.slices = ClassForms(facts.cluster, RankClasses.find(facts.cluster))
        self.devices, counts = device_classes(facts.cluster)
        self.weight = np.array(weights) / float(np.array(weights) @ np.array(counts))
        self.many = self.weight * np.array(counts)
        self._parts = parts_of_calls(facts.graph)
        self._known: dict[Line, float] = {}
        self._cut: dict[int, float] = {}  # seconds of a slice, by the bytes of the whole
        rounds = facts.colours[: RADIUS + 1]
        self.rounds = len(rounds)
        self.fine, self.of_value, self.of_reader = (rounds[max(0, len(rounds) - 1 - back)] for back in range(3))
        self.kept: list[tuple[int, float]] = []  # copies that both passes read
        self.most_kept = 0  # bytes, if all of them are made
        self.transports: list[Transport] = []
        self.shared: dict[int, tuple[int, int]] = {}  # flow -> C and row, where there is one
        self._types()
        self._values()
        self._state()

    def _types(self) -> None:
        members: dict[int, list[str]] = {}
        for node in self.facts.graph.nodes:
            members.setdefault(self.fine[node.name], []).append(node.name)
        self.x: dict[int, list[int]] = {}
        self.options: list[tuple[int, int, str, int]] = []  # variable, how many nodes, the first of them, its option
        self.count = {a: len(names) for a, names in members.items()}
        self.first = {a: names[0] for a, names in members.items()}
        for a, (name, *_) in members.items():
            costs = [self.node_s(name, i) for i in range(len(self.facts.candidates[name]))]
            self.x[a] = [self._variable("x", self.count[a] * c) for c in costs]
            self.options += [(v, self.count[a], name, i) for i, v in enumerate(self.x[a])]
            self._row("one", 1.0, 1.0, [(v, 1.0) for v in self.x[a]])

    def node_s(self, name: str, option: int) -> float:
        """What a node takes at least under one of its strategies, whatever the shares."""
        line = node_line(self.facts, name, self.facts.candidates[name][option], self.devices)
        if line not in self._known:
            self._known[line] = line_seconds(line, self.weight, self.many)
        return self._known[line]

    def _values(self) -> None:
        """Flows and conversions of every class of values."""
        # variable, flows of one conversion, bytes, from, to
        self.conversions: list[tuple[int, int, int, Placement, Placement]] = []
        for reads in self._reads():
            self._value(reads)

    def _reads(self) -> Sequence[Sequence[Sequence[Read]]]:
        """The reads of the values of every class; on every cluster the same."""
        key = f"reads by values of {self.rounds} rounds"
        if key not in self.facts.found:
            reads = find_reads(self.facts.graph, self.facts.candidates)
            classes: dict[object, list[Sequence[Read]]] = {}
            for value, users in reads.items():
                who = who_reads(self.facts.graph, users, self.of_reader)
                classes.setdefault((self.of_value[value.node], users[0].index, who), []).append(users)
            self.facts.found[key] = tuple(classes.values())
        return cast(Sequence[Sequence[Sequence[Read]]], self.facts.found[key])

    def _value(self, reads: Sequence[Sequence[Read]]) -> None:
        supply: dict[int, list[tuple[int, float]]] = {}  # placement number -> terms
        first, index = reads[0][0].value, reads[0][0].index
        numbers = _numbered([s.outputs[index] for s in self.facts.candidates[first.node]])
        makers = [self.fine[r[0].value.node] for r in reads]
        for a in dict.fromkeys(makers):
            for i, variable in enumerate(self.x[a]):
                supply.setdefault(numbers[i], []).append((variable, float(makers.count(a))))
        slots: dict[object, list[Read]] = {}
        for users in reads:
            for read in users:
                reader = None if read.reader is None else self.of_reader[read.reader]
                slots.setdefault((reader, read.position, read.phase, read.number), []).append(read)
        produced = [s.outputs[index] for s in self.facts.candidates[first.node]]
        users_of: dict[tuple[int, Placement], list[tuple[int, int]]] = {}
        reads_of: dict[tuple[int, Placement], dict[str, list[tuple[int, int]]]] = {}
        for same in slots.values():
            each = len(same) // len(reads)
            assert each * len(reads) == len(same), "a colour says how often a value is read"
            wants = next(r for r in reads[0] if r.number == same[0].number).wants
            flows = self._transport(supply, produced, same, wants, each)
            for (p, q), flow in flows.items():
                users_of.setdefault((p, q), []).append((flow, each))
                reads_of.setdefault((p, q), {}).setdefault(self._part(same), []).append((flow, each))
        once = min(self.facts.batches.part(r[0].value) for r in reads)
        self._converted(first, produced, users_of, once)
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
        pairs = [(p, q) for p in supply for q in demand if self.is_converted(produced[p], wants[q])]
        flows: dict[tuple[int, int], int] = {}
        out, came = ({number: list[tuple[int, float]]() for number in ends} for ends in (supply, demand))
        for p, q in pairs:
            flows[p, q] = flow = self._variable("F", 0.0)
            out[p].append((flow, -1.0))
            came[q].append((flow, -1.0))
        made = {
            p: self._row("produced", 0.0, 0.0, [*((v, each * k) for v, k in s), *out[p]]) for p, s in supply.items()
        }
        met = {q: self._row("wanted", 0.0, 0.0, [*terms, *came[q]]) for q, terms in demand.items()}
        self.transports.append(Transport(same, produced, wants, flows, made, met))
        return {(p, wants[q]): f for (p, q), f in flows.items() if produced[p] != wants[q]}

    def is_converted(self, source: Placement | None, target: Placement) -> bool:
        """Whether what is produced in the one can be read in the other."""
        return source == target or not isinstance(target, Partial)

    def _converted(
        self,
        value: Value,
        produced: Sequence[Placement | None],
        users_of: Mapping[tuple[int, Placement], Sequence[tuple[int, int]]],
        once: float,
    ) -> None:
        """``once``: the part of a conversion that a batch pays."""
        nbytes = self.facts.graph.meta(value).nbytes
        for (p, target), users in users_of.items():
            source = produced[p]
            assert source is not None
            seconds = once * self.conversion_s(nbytes, source, target)
            if len(users) == 1:
                flow, each = users[0]
                self.cost[flow] += seconds * MS / each
                self.conversions.append((flow, each, nbytes, source, target))
                continue
            converted = self._variable("C", seconds)
            self.conversions.append((converted, 1, nbytes, source, target))
            for flow, each in users:
                self.shared[flow] = converted, self._row("shared", 0.0, np.inf, [(converted, each), (flow, -1.0)])

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
        found = {self._parts.get(read.reader or "", "") for read in reads}
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
        everywhere = nbytes * self.facts.cluster.world_size
        for (p, target), by_part in reads_of.items():
            source = produced[p]
            if not isinstance(source, Shard) or target != REPLICATE:
                continue
            pairs = list(itertools.product(by_part.get("forward", ()), by_part.get("backward", ())))
            if not pairs:
                continue
            copy, both = self._variable("K", 0.0), list[tuple[int, float]]()
            self.kept.append((copy, everywhere * GB))
            self.most_kept += everywhere * many
            if self.facts.graph.by_name[value.node].op == "parameter":
                again = self._variable("A", self.conversion_s(nbytes, source, target))
                self.conversions.append((again, 1, nbytes, source, target))
                both.append((again, 1.0))
            for (f, times), (b, more) in pairs:
                without = [(v, k) for v, k in supply[p]]
                flows = [(copy, 1.0), *both, (f, -1.0 / times), (b, -1.0 / more)]
                self._row("kept", 0.0, np.inf, [*flows, *without])

    def conversion_s(self, nbytes: int, source: Placement, target: Placement) -> float:
        """What a conversion takes at least, whatever the shares."""
        kind = collective_kind(source, target)
        if kind != "slice":
            return self.least.seconds(kind, nbytes)
        if nbytes not in self._cut:
            constant, slope = self.slices.slices(nbytes, source, target)
            classes = [self.slices.classes.of[d.rank] for d in self.devices]
            line = Line(tuple(constant[classes].tolist()), tuple(slope[classes].tolist()))
            self._cut[nbytes] = line_seconds(line, self.weight, self.many)
        return self._cut[nbytes]

    def of_plan_s(self, strategies: Mapping[str, Strategy], conversions: Iterable[ConversionCost]) -> float:
        """What a plan comes to here, whose conversions these are."""
        candidates = self.facts.candidates
        calls_s = sum(self.node_s(name, candidates[name].index(chosen)) for name, chosen in strategies.items())
        part = self.facts.batches.part
        ends = ((c, c.need.source, c.need.target) for c in conversions)
        return calls_s + sum(part(c.need.value) * self.conversion_s(c.nbytes, *both) for c, *both in ends)

    def _state(self) -> None:
        """All ranks' memory: at the end of the step parameters, their gradients and the optimizer's state; between both
        passes what they have gathered instead of the gradients."""
        graph, n = self.facts.graph, self.facts.cluster.world_size
        ending, between = [], list(self.kept)
        for a, name in self.first.items():
            node = graph.by_name[name]
            if node.op != "parameter":
                continue
            trained = node.target in graph.gradients
            state = optimizer_state_bytes(self.facts.optimizer, node.meta.nbytes) if trained else 0
            gradient = node.meta.nbytes if trained else 0
            for variable, strategy in zip(self.x[a], self.facts.candidates[name], strict=True):
                copies = self.count[a] * (1 if isinstance(strategy.outputs[0], Shard) else n)
                between.append((variable, copies * (node.meta.nbytes + state) * GB))
                ending.append((variable, copies * (node.meta.nbytes + state + gradient) * GB))
        saved = {a: held for a, name in self.first.items() if (held := saved_bytes(graph, self._parts, name))}
        room = sum(usable_bytes(d.memory_bytes) for d in self.facts.cluster.devices)
        left = room - sum(self.count[a] * held for a, held in saved.items())
        self._row("state", -np.inf, room * GB, ending)
        if not self.crowded or self.most_kept * GB + sum(k for _, k in between[len(self.kept) :]) <= left * GB:
            return  # whatever is chosen, it fits
        for a, held in saved.items():
            least = min(self.node_s(self.first[a], i) for i in range(len(self.x[a])))
            again = self._variable("Z", self.count[a] * least)
            self.upper[again] = 1.0
            between.append((again, -self.count[a] * held * GB))
        self._row("between", -np.inf, left * GB, between)

    @cached_property
    def seconds(self) -> float | None:
        """The minimum; None if the solver finds no optimum. The solver may be asked for others from then on."""
        solved = self.solver.solve(self.solving)
        if solved is None or not solved.is_optimal:
            return None
        return solved.bound / MS


def _numbered(placements: Sequence[Placement | None]) -> list[int]:
    """For each placement the index of its first equal."""
    first: dict[object, int] = {}
    return [first.setdefault(p, i) for i, p in enumerate(placements)]
