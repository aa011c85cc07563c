"""The joint bound where a group's mass may lie anywhere: what is kept off the wire is paid for on the path.

The relaxation lets an all-to-all between two groups be free, as both may lie on one host; but what lies on one host is
worked on by that host alone. For every group g let m[g] >= 1/H be the share of the host, of H, that has most of it.
With shares rho of g and sigma of another group h,

    all-to-all  >=  B W (1 - min(m[g], m[h]))                                                                  (wire)

as what leaves a host goes by its way out; ``crossing`` says what W is. In the stages of ``chain``'s path all its calls
are dealt out by one group, or by none, so the busiest rank of the host with most of it, of n ranks, bounds them all:
with ``F + s x`` below a call's seconds at share x,

    T >= sum over the path's calls of  min over kinds of hosts of  F + s m[g] / n                              (path)
    T >= the same of all calls that are dealt out by one g that means the same everywhere: one rank            (group)
    T >= sum over all calls, weighted, as in ``relaxation``                                                    (mean)

Calls beside the path count in (path), too: ``companions`` says where one may run beside another group than its own. The
part M of its options for which that may be so, which is no more than any of several sums of options and flows, is taken
off again; where the path's call has had a value turned that the companion reads as it was, only what is not made up for
by what crosses then (``_paid_s``).

All of it is linear in m, so m need not be known: every option of g is there twice, as if g were spread evenly (m = 1/H)
and as if it were on one host (m = 1), and a plan is the mixture with (m - 1/H) / (1 - 1/H) of the second. A value that
goes from g to h goes from one host to one host for the lesser of both parts at most, and any other part of it crosses
with 1 - 1/H of its bytes: together 1 - min(m[g], m[h]). Of groups of which every layer has its own, the mixture is of
all these layers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from ortools.math_opt import parameters_pb2, solution_pb2

from hap.conversion import collective_kind
from hap.cost_models.compute import Parts, parts_seconds
from hap.cost_models.floors import floor_line
from hap.graph import Value
from hap.placement import REPLICATE, Partial, Placement, Shard
from hap.search.bound import by_speed, computes_like, device_classes, weighted_bound
from hap.search.cases import find_main
from hap.search.chain import find_chain
from hap.search.classes import Read
from hap.search.companions import Companion, find_companions
from hap.search.copies import with_copies
from hap.search.crossing import find_parts, find_ports, seconds_apart
from hap.search.doubled import (
    ANYWHERE,
    SPREAD,
    TOGETHER,
    Doubled,
    DoubledFlows,
    Renamed,
    crosses,
    ends_of,
    same_ranges,
    taken_apart,
)
from hap.search.flows import Transport
from hap.search.least import Least
from hap.search.milp import MS
from hap.search.prices import Facts
from hap.search.protos import DUAL_STEPS, seeded, until
from hap.search.relaxation import SAFETY, Relaxation

ALONE = 2 / 3  # of all power on one host: what lies there is hardly worked on more slowly, and nothing is gained
PRIMAL = seeded(lp_algorithm=parameters_pb2.LP_ALGORITHM_PRIMAL_SIMPLEX)


class Masses:
    """The bounds of nested clusters. Their programs have the same rows, so each is solved from where the last one
    ended, and the first from where it ends if nothing may be spread, which is found sooner, with what may be spread as
    what is together: any basis is one to begin from, and the optimum is the same. From there, dual steps are the
    quicker ones, but not those that favour small norms, of which it takes more."""

    def __init__(self) -> None:
        self._ended: solution_pb2.BasisProto | None = None
        self._shape = (0, 0)  # of that program: variables, rows
        self._begun: tuple[Facts, _Program, solution_pb2.BasisProto | None] | None = None

    def begin(self, facts: Facts) -> None:
        """What will be asked about first may be written out sooner; what is found is the same."""
        if self._ended is None and self._begun is None and (program := _Program.of(facts)) is not None:
            self._begun = facts, program, program.all_together()

    def bound_s(self, facts: Facts, known_s: float, enough_s: float = np.inf) -> float:
        """Seconds that every plan takes at least: ``known_s``, which is proved, or more; of more than ``enough_s`` no
        more is proved."""
        assert facts.batches.count == 1, "every conversion is priced whole"
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] is facts:
            _, program, start = begun
        elif (found := _Program.of(facts)) is None:
            return known_s
        else:
            program = found
            start = self._ended if program.shape == self._shape else program.all_together()
        limit = enough_s * MS * (1 + 2 * SAFETY)
        solved = program.solver.solve(until(DUAL_STEPS, limit), start=start)
        if solved is not None and solved.is_optimal:
            self._ended, self._shape = program.solver.basis, program.shape
            return max(known_s, solved.bound / MS * (1 - SAFETY))
        is_enough = program.solver.ended == "no_solution_found" and program.solver.proved >= limit
        return max(known_s, program.solver.proved / MS * (1 - SAFETY)) if is_enough else known_s


def _rate(facts: Facts) -> tuple[int, float, float] | None:
    """How many hosts there are, or ranks where there is one host, and ``seconds_apart``. None if some have no ways of
    their own."""
    hosts = len({d.host for d in facts.cluster.devices})
    units = hosts if hosts > 1 else facts.cluster.world_size
    ports = find_ports(facts, find_parts(facts))
    if sum(port.alike for port in ports) != units or units == 1:
        return None
    return units, *seconds_apart(ports)


def _strongest(facts: Facts) -> float:
    """The part of all computing power that is on one host, or one rank where there is one host."""
    bound, of = weighted_bound(facts)[0], {computes_like(d): c for c, d in enumerate(device_classes(facts.cluster)[0])}
    speeds, power = by_speed(bound), Counter[object]()
    alone = len({d.host for d in facts.cluster.devices}) == 1
    for d in facts.cluster.devices:
        power[d.rank if alone else d.host] += speeds[of[computes_like(d)]]  # type: ignore[assignment]
    return max(power.values()) / sum(power.values())


class _Program(Relaxation):
    """See the module docstring."""

    @classmethod
    def of(cls, facts: Facts) -> _Program | None:
        """None where nothing is gained, or ways are shared."""
        rate = _rate(facts) if facts.cluster.world_size > 1 else None
        return None if rate is None or _strongest(facts) > ALONE else cls(facts, *rate)

    def __init__(self, facts: Facts, hosts: int, apart_s: float, beside_s: float) -> None:
        self.hosts, self.apart_s, self.beside_s = hosts, apart_s, beside_s
        self.doubled = doubled = Doubled.of(facts)
        self.where = doubled.where
        here: dict[str, object] = {"least": Least.of(facts)}
        other = replace(facts, candidates=doubled.candidates, _held={}, _alive={}, found=doubled.found, here=here)
        other.__dict__.update(colours=doubled.colours, calls=facts.calls)
        super().__init__(other, weighted_bound(facts)[1], DoubledFlows.of(other, crowded=False))
        on_host = Counter(d.host for d in facts.cluster.devices)
        kinds = {}
        for d in facts.cluster.devices:
            kinds[computes_like(d), on_host[d.host]] = d, on_host[d.host] if len(on_host) > 1 else 1
        self._kinds, self._busy = tuple(kinds.values()), dict[object, float]()
        self._compute(facts)

    def all_together(self) -> solution_pb2.BasisProto | None:
        """The basis of the optimum where no option of a spread group may be taken, with all that has to do with such
        groups taken into it as if they were together."""
        copies, rows, between = self._twins()
        free = self.solver.upper
        limited = free.copy()
        limited[[*copies, *between]] = 0.0
        self.solver.limit(limited)
        self.solver.solve(PRIMAL)
        self.solver.limit(free)
        basis = self.solver.basis
        return None if basis is None else with_copies(basis, copies, rows, self.flows.entries)

    def _twins(self) -> tuple[dict[int, int], dict[int, int], set[int]]:
        """Variables and rows of which a spread group is a part -> those of the same group together; and what goes
        between the two."""
        option = {(name, *self.where[name][number]): v for v, _, name, number in self.options}
        copies = {v: option[name, i, TOGETHER] for (name, i, where), v in option.items() if where == SPREAD}
        rows, between = dict[int, int](), set[int]()
        for one in self.transports:
            makes, reads = ends_of(one.produced, one.produced_rows), ends_of(one.wanted, one.wanted_rows)
            for twins, of in ((makes, one.produced_rows), (reads, one.wanted_rows)):
                rows.update((of[p], of[twin]) for p, (where, twin) in twins.items() if where == SPREAD)
            for (p, q), flow in one.flows.items():
                (here, source), (there, target) = makes[p], reads[q]
                if SPREAD in (here, there):
                    if TOGETHER in (here, there):
                        between.add(flow)
                    else:
                        copies[flow] = one.flows[source, target]
        for flow, (converted, row) in self.flows.shared.items():
            if flow in between:
                between.add(converted)
            elif flow in copies:
                copies[converted], rows[row] = self.flows.shared[copies[flow]]
        return copies, rows, between

    def conversion_s(self, nbytes: int, source: Placement, target: Placement) -> float:
        """Of what is not free."""
        kind = collective_kind(source, target)
        crossing_s = nbytes * (1 - 1 / self.hosts) * self.apart_s if crosses(source, target) else 0.0
        return self.least.seconds(kind, nbytes) + crossing_s

    # -- compute -----------------------------------------------------------------------------------------------------

    def _compute(self, facts: Facts) -> None:
        """The objective's seconds of calls become those of three kinds of rows, of which the largest counts. Rows are
        the same on every cluster: by which groups much can be dealt out depends on the devices, so every shared group
        has one, which says nothing where that is not so."""
        slowest = self._variable("T", 1 / MS)
        chain, main = find_chain(facts), frozenset(find_main(facts, self.doubled.shared))
        others = {self.fine[node.name] for node in facts.graph.nodes if node.name not in chain}
        mean, path = [(slowest, 1.0)], [(slowest, 1.0)]
        groups: dict[str, list[tuple[int, float]]] = {}
        for variable, count, name, number in self.options:
            mean.append((variable, -self.cost[variable]))
            self.cost[variable] = 0.0
            if facts.graph.by_name[name].is_source:
                continue
            option, where = self.where[name][number]
            parts = facts.parts(name, facts.candidates[name][option])
            busiest_ms = count * self._busiest_s(parts, where) * MS
            if self.fine[name] not in others or parts.group is None:
                path.append((variable, -busiest_ms))
            if parts.group in self.doubled.shared:
                row = groups.setdefault(parts.group, [(slowest, 1.0)])
                if parts.group in main:
                    row.append((variable, -busiest_ms))
        path += self._companions(facts, find_companions(facts, chain))
        for terms in (mean, path, *groups.values()):
            self._row("busiest", 0.0, np.inf, terms)

    def _companions(self, facts: Facts, found: Mapping[str, Companion]) -> Iterator[tuple[int, float]]:
        """What calls beside the path add to it: all they take, less what those take that may be beside other groups."""
        slots = {(r.value, r.reader): (t, r) for t in self.transports for r in t.reads}
        members: dict[int, list[str]] = {}
        for name in facts.graph.by_name:
            members.setdefault(self.fine[name], []).append(name)
        for kind, names in members.items():
            ours = [found[name] for name in names if name in found]
            if len(ours) < len(names) or len({c.is_sibling for c in ours}) > 1:
                continue
            renamed = [self._renamed(name) for name in names]
            ends = self._ends(ours, renamed, slots)
            if ends is None:
                continue
            through = any(c.reader != name for c, name in zip(ours, names, strict=True))
            claimed: dict[tuple[str, str, bool], list[tuple[int, Parts]]] = {}
            for number, variable in enumerate(self.x[kind]):
                option, where = self.where[names[0]][number]
                parts = facts.parts(names[0], facts.candidates[names[0]][option])
                made = self.facts.candidates[names[0]][number].outputs
                closes = all(c.closes for c in ours) and all(isinstance(p, Partial) for p in made)
                if where != ANYWHERE and (closes or all(c.is_last for c in ours)):
                    assert parts.group is not None
                    claimed.setdefault((parts.group, where, closes), []).append((variable, parts))
            for (own_name, where, closes), options in claimed.items():
                group, _ = renamed[0][f"{own_name}@{where}"].rsplit("@", 1)
                variables = [variable for variable, _ in options]
                seconds = [self._busiest_s(parts, where) for _, parts in options]
                yield from ((v, -len(names) * s * MS) for v, s in zip(variables, seconds, strict=True))
                if closes and not ours[0].is_sibling:
                    continue
                lost = list[int]()
                lies = group, where
                apart = [_apart(ours[0], lies, closes, through, call, reader) for call, reader in ends]
                for away, own, is_paid in itertools.chain(*apart):
                    if not away or own == []:
                        continue
                    paid = [self._paid_s(facts, ours, p, where) if is_paid else 0.0 for _, p in options]
                    left = max(s - p for s, p in zip(seconds, paid, strict=True))
                    both = [[(flow, 1.0) for flow in flows] for flows in (away, own) if flows is not None]
                    lost.append(self._lost(both))
                    yield lost[-1], left * MS
                if closes and (whole := self._by_others(ours, renamed, group)):
                    lost.append(self._lost([whole]))
                    yield lost[-1], max(seconds) * MS
                if lost:
                    here = [(v, float(len(names))) for v in variables]
                    self._row("apart", 0.0, np.inf, [*here, *((v, -1.0) for v in lost)])

    def _renamed(self, name: str) -> Renamed:
        """The names of groups for a call: those of its own options come first."""
        found = Renamed(self.doubled.shared)
        for option in self.facts.candidates[name]:
            found.all_of((*option.inputs, *option.outputs))
        return found

    def _ends(
        self,
        ours: Sequence[Companion],
        renamed: Sequence[Renamed],
        slots: Mapping[tuple[Value, str | None], tuple[Transport, Read]],
    ) -> list[tuple[Transport, Transport]] | None:
        """Where the path's calls read what these companions read, and where these do, with the names that groups have
        there: a transport has those of the first of its values, among which two groups may have changed places. None if
        companions of one kind do not read alike."""
        found: dict[tuple[int, int], tuple[Transport, Transport]] = {}
        for one, names in zip(ours, renamed, strict=True):
            call, reader = slots[one.value, one.call], slots[one.value, one.reader]
            named = self._named(*call, names), self._named(*reader, names)
            first = found.setdefault((id(call[0]), id(reader[0])), named)
            for here, there in zip(named, first, strict=True):
                if [*here.produced, *here.wanted] != [*there.produced, *there.wanted]:
                    return None
        return list(found.values())

    def _named(self, transport: Transport, read: Read, names: Renamed) -> Transport:
        produced = [s.outputs[read.index] for s in self.facts.candidates[read.value.node]]
        wanted = [p for p in names.all_of(read.wants) if p is not None]
        return transport._replace(produced=names.all_of(produced), wanted=wanted)

    def _lost(self, limits: Iterable[list[tuple[int, float]]]) -> int:
        """A variable that is no more than any of these sums."""
        lost = self._variable("M", 0.0)
        for terms in limits:
            self._row("apart", 0.0, np.inf, [(lost, -1.0), *terms])
        return lost

    def _by_others(self, ours: Iterable[Companion], renamed: Iterable[Renamed], group: str) -> list[tuple[int, float]]:
        """How many of the path's calls read the whole value and are dealt out by another group, as what else they read
        is."""
        found = dict[int, float]()
        for one, names in zip(ours, renamed, strict=True):
            position = self.facts.graph.by_name[one.call].inputs.index(one.value)
            kind = self.fine[one.call]
            for variable, option in zip(self.x[kind], self.facts.candidates[one.call], strict=True):
                lies = {_lying(p)[0] for p in names.all_of((*option.inputs, *option.outputs)) if isinstance(p, Shard)}
                if option.inputs[position] == REPLICATE and lies - {group}:
                    found[variable] = float(self.count[kind])
        return list(found.items())

    def _paid_s(self, facts: Facts, ours: Iterable[Companion], parts: Parts, where: str) -> float:
        """What a sibling is claimed for though the path's call has the value turned to another group g: c below.

        On a host j both take ``(s[c] rho[j] + s sigma[j]) / n`` at least. Let m[g] <= m[h], and k be the host with most
        of h: beside what the rows count the exchange takes ``E (m[g] - rho[k])`` at least, with E seconds for all of
        the value (``crossing``). On k what is claimed for c, and a part y of that for the sibling, is more than both
        take by ``(s[c] (m[g] - rho[k]) - (1 - y) s m[h]) / n`` at most; and m[h] >= m[g] - rho[k]. Where m[h] < m[g],
        by ``y s (m[h] - sigma[k]) / n``, with k the host with most of g. So it is paid for with

            y <= 1,  y <= n E / s,  s[c] - (1 - y) s <= n E        for every kind of hosts

        ranks of k that have nothing of either do not even launch, so launches are not claimed."""
        wire_s = min(facts.graph.meta(c.value).nbytes for c in ours) * self.beside_s
        own = self._slopes(parts)
        part, launch_s = 1.0, 0.0
        for name in {self.fine[c.call]: c.call for c in ours}.values():
            for option, where_call in self.where[name]:
                if where_call == ANYWHERE:
                    continue
                call = facts.parts(name, facts.candidates[name][option])
                for (_, s), (f, other) in zip(own, self._slopes(call), strict=True):
                    if max(s, other) > wire_s:
                        part = min(part, wire_s / s, 1.0 - (other - wire_s) / s) if s > 0.0 else 0.0
                    launch_s = max(launch_s, f)
        most = 1.0 if where == TOGETHER else 1 / self.hosts
        return max(0.0, part) * min(s for _, s in own) * most - launch_s

    def _slopes(self, parts: Parts) -> list[tuple[float, float]]:
        """(fixed seconds, seconds of all of it on the ranks of one host) for every kind of hosts, neither negative."""
        lines = [floor_line(parts, d, at_share=1 / self.facts.cluster.world_size) for d, _ in self._kinds]
        return [(f, s / n) for (f, s), (_, n) in zip(lines, self._kinds, strict=True)]

    def _busiest_s(self, parts: Parts, where: str) -> float:
        """What a call takes on the busiest rank of the host with most of its group, of whatever kind that is."""
        if parts.group is None:
            return min(parts_seconds(parts, 1.0, d) for d in self.devices)
        key = (parts, parts.call if self.facts.compute.is_measured else "", where)
        if key not in self._busy:
            most = 1.0 if where == TOGETHER else 1 / self.hosts
            self._busy[key] = min(f + s * most for f, s in self._slopes(parts))
        return self._busy[key]


def _apart(
    one: Companion, lies: tuple[str, str], closes: bool, through: bool, call: Transport, own: Transport
) -> Iterator[tuple[list[int], list[int] | None, bool]]:
    """Where a companion whose group ``lies`` so may be in a stage of another (``companions``): flows of the path's call
    and, where those are known, of the companion, which both are no less; and whether that is paid for. ``through``:
    whether it reads through another call."""
    for source in {call.produced[p]: None for p, _ in call.flows}:
        flows = [(f, call.wanted[q]) for (p, q), f in call.flows.items() if call.produced[p] == source]
        elsewhere = [(f, q) for f, q in flows if _lying(q)[0] != lies[0]]
        others = [(f, q) for f, q in elsewhere if _lying(q)[1] != ANYWHERE]
        mine = [(f, own.wanted[q]) for (p, q), f in own.flows.items() if own.produced[p] == source]
        if not one.is_sibling:
            yield [f for f, q in mine if REPLICATE in (source, q)], None, False
        if one.is_sibling and not closes:
            yield [f for f, _ in elsewhere], None, False
        elif (through and not one.is_sibling) or (source == REPLICATE and one.is_sibling):
            yield [f for f, _ in others], None, False
        elif one.is_sibling and _lying(source) == lies:
            same = [f for f, q in mine if q == source]
            yield [f for f, q in others if same_ranges(source, q)], same, False
            yield [f for f, q in others if not same_ranges(source, q)], same, True
        elif not one.is_sibling and _lying(source)[1] != ANYWHERE and _lying(source)[0] != lies[0]:
            turned = [f for f, q in mine if _lying(q) == lies]
            yield [f for f, q in others if q == source], turned, False


def _lying(placement: Placement | None) -> tuple[str, str]:
    """The group, and where its mass lies; "" and anywhere if it is dealt out by none."""
    return taken_apart(placement) if isinstance(placement, Shard) else ("", ANYWHERE)
