"""The joint bound where a group's mass may lie anywhere: what is kept off the wire is paid for on the path.

The relaxation lets an all-to-all between two groups be free, as both may lie on one host; but what lies on one host is
worked on by that host alone. For every group g that means the same everywhere let m[g] >= 1/H be the share of the host,
of H, that has most of it. With shares rho of g and sigma of another group h,

    of B bytes stay on their host  B sum_j rho[j] sigma[j] <= B min(m[g], m[h])
    all-to-all  >=  B (1 - min(m[g], m[h])) / (all hosts' ways out together)                                   (wire)

as what leaves a host goes by its way out. In the stages of ``chain``'s path all its calls are dealt out by one
group, or by none, so the busiest rank of the host with most of it, of n ranks, bounds them all: with ``F + s x`` below
a call's seconds at share x,

    T >= sum over the path's calls of  min over kinds of hosts of  F + s m[g] / n                              (path)
    T >= the same of all calls that are dealt out by g, for any one g: the same rank in every stage            (group)
    T >= sum over all calls, weighted, as in ``relaxation``                                                    (mean)

All of it is linear in m, so m need not be known: every option of g is there twice, as if g were spread evenly (m = 1/H)
and as if it were on one host (m = 1), and a plan is the mixture with (m - 1/H) / (1 - 1/H) of the second. A value that
goes from g to h goes from one host to one host for the lesser of both parts at most, and any other part of it crosses
with 1 - 1/H of its bytes: together 1 - min(m[g], m[h]). Groups of which every layer has its own stand once, as if
they lay where whatever they meet on one host does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from ortools.math_opt import parameters_pb2, solution_pb2

from hap.conversion import collective_kind
from hap.cost_models.compute import Parts, parts_coefficients, parts_seconds
from hap.placement import Placement, Shard
from hap.plan import Strategy
from hap.search.bound import by_speed, computes_like, device_classes, weighted_bound
from hap.search.cases import find_main, find_shared
from hap.search.chain import find_chain
from hap.search.classes import find_colours
from hap.search.copies import with_copies
from hap.search.crossing import find_parts, find_ports
from hap.search.milp import MS
from hap.search.prices import Facts
from hap.search.protos import seeded, until
from hap.search.relaxation import SAFETY, Relaxation

SPREAD, TOGETHER, ANYWHERE = "spread", "together", "anywhere"
ALONE = 2 / 3  # of all power on one host: what lies there is hardly worked on more slowly, and nothing is gained
RADIUS = 3  # of the colours that types are. A finer partition takes several times as long and shows hardly more; by a
# coarser one, layers of two kinds in turn have attention in common, and what goes from one kind to the other is lost
PRIMAL = seeded(lp_algorithm=parameters_pb2.LP_ALGORITHM_PRIMAL_SIMPLEX)


class Masses:
    """The bounds of nested clusters. Their programs have the same rows, so each is solved from where the last one
    ended, and the first from where it ends if nothing may be spread, which is found sooner, with what may be spread as
    what is together: any basis is one to begin from, and the optimum is the same. From there, dual steps are the
    quicker ones."""

    def __init__(self) -> None:
        self._ended: solution_pb2.BasisProto | None = None

    def bound_s(self, facts: Facts, known_s: float, enough_s: float = np.inf) -> float:
        """Seconds that every plan takes at least: ``known_s``, which is proved, or more; of more than ``enough_s`` no
        more is proved. Asked of described devices."""
        assert facts.batches.count == 1, "every conversion is priced whole"
        rate = _rate(facts) if facts.cluster.world_size > 1 else None
        if rate is None or _strongest(facts) > ALONE:
            return known_s
        program = _Program(facts, *rate)
        start = program.all_together() if self._ended is None else self._ended
        limit = enough_s * MS * (1 + 2 * SAFETY)
        solved = program.solver.solve(until(program.solving, limit), start=start)
        if solved is not None and solved.is_optimal:
            self._ended = program.solver.basis
            return max(known_s, solved.bound / MS * (1 - SAFETY))
        is_enough = program.solver.ended == "no_solution_found" and program.solver.proved >= limit
        return max(known_s, program.solver.proved / MS * (1 - SAFETY)) if is_enough else known_s


def _rate(facts: Facts) -> tuple[int, float] | None:
    """How many hosts there are, or ranks where there is one host, and bytes/s of all their ways out, or in, together,
    whichever is less. None if some have none of their own."""
    hosts = len({d.host for d in facts.cluster.devices})
    units = hosts if hosts > 1 else facts.cluster.world_size
    ports = find_ports(facts, find_parts(facts))
    if sum(port.alike for port in ports) != units or units == 1:
        return None
    return units, min(sum(p.alike * p.up for p in ports), sum(p.alike * p.down for p in ports))


def _strongest(facts: Facts) -> float:
    """The part of all computing power that is on one host, or one rank where there is one host."""
    bound, of = weighted_bound(facts)[0], {computes_like(d): c for c, d in enumerate(device_classes(facts.cluster)[0])}
    speeds, power = by_speed(bound), Counter[object]()
    alone = len({d.host for d in facts.cluster.devices}) == 1
    for d in facts.cluster.devices:
        power[d.rank if alone else d.host] += speeds[of[computes_like(d)]]  # type: ignore[assignment]
    return max(power.values()) / sum(power.values())


@dataclass(frozen=True)
class _Doubled:
    """Every option of a shared group twice. ``where``: of every option of the doubled candidates which option it is,
    and where the mass of its group lies."""

    candidates: Mapping[str, tuple[Strategy, ...]]
    where: Mapping[str, tuple[tuple[int, str], ...]]
    colours: tuple[Mapping[str, int], ...]
    found: dict[str, object] = field(default_factory=dict)  # of these candidates, on any cluster

    @classmethod
    def of(cls, facts: Facts) -> _Doubled:
        """Found once for a graph and its candidates."""
        found = facts.found.get("doubled")
        if found is None:
            found = facts.found["doubled"] = cls._find(facts)
        assert isinstance(found, _Doubled)
        return found

    @classmethod
    def _find(cls, facts: Facts) -> _Doubled:
        shared, lying = find_main(facts, find_shared(facts, facts.colours[RADIUS])), _Lying()
        where: dict[str, tuple[tuple[int, str], ...]] = {}
        candidates: dict[str, tuple[Strategy, ...]] = {}
        for name, options in facts.candidates.items():
            pairs = [(i, w) for i, option in enumerate(options) for w in _places(option, shared)]
            where[name] = tuple(pairs)
            candidates[name] = tuple(lying.strategy(options[i], w) for i, w in pairs)
        return cls(candidates, where, find_colours(facts.graph, candidates, radius=RADIUS))


def _places(option: Strategy, shared: Collection[str]) -> tuple[str, ...]:
    groups = {p.group for p in (*option.inputs, *option.outputs) if isinstance(p, Shard)}
    assert len(groups) <= 1, "a strategy is of one mesh axis"
    return (SPREAD, TOGETHER) if any(g in shared for g in groups) else (ANYWHERE,)


class _Lying(dict[tuple[Placement | None, str], Placement | None]):
    """Placements with the group's name saying where its mass lies."""

    def __missing__(self, key: tuple[Placement | None, str]) -> Placement | None:
        placement, where = key
        found = replace(placement, group=f"{placement.group}@{where}") if isinstance(placement, Shard) else placement
        return self.setdefault(key, found)

    def strategy(self, option: Strategy, where: str) -> Strategy:
        inputs = tuple(p for p in (self[p, where] for p in option.inputs) if p is not None)
        return Strategy(inputs, tuple(self[p, where] for p in option.outputs))


def _taken_apart(placement: Shard) -> tuple[str, str]:
    group, where = placement.group.rsplit("@", 1)
    return group, where


def _ends(placements: Sequence[Placement | None], numbers: Collection[int]) -> dict[int, tuple[str, int]]:
    """Of some of the placements, by number: where the mass of the group lies, and the number of the same placement with
    it together, if it is spread, or else its own."""
    number, found = {placements[p]: p for p in numbers}, dict[int, tuple[str, int]]()
    for p in numbers:
        placement, where = placements[p], ANYWHERE
        if isinstance(placement, Shard):
            group, where = _taken_apart(placement)
            if where == SPREAD:
                placement = replace(placement, group=f"{group}@{TOGETHER}")
        found[p] = where, number[placement]
    return found


class _Program(Relaxation):
    """See the module docstring."""

    def __init__(self, facts: Facts, hosts: int, bytes_per_s: float) -> None:
        self.hosts, self.bytes_per_s = hosts, bytes_per_s
        doubled = _Doubled.of(facts)
        self.where = doubled.where
        other = replace(facts, candidates=doubled.candidates, _held={}, _alive={}, found=doubled.found, here={})
        other.__dict__.update(colours=doubled.colours, calls=facts.calls)
        super().__init__(other, weighted_bound(facts)[1], crowded=False, radius=RADIUS)
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
        return None if basis is None else with_copies(basis, copies, rows, self.entries)

    def _twins(self) -> tuple[dict[int, int], dict[int, int], set[int]]:
        """Variables and rows of which a spread group is a part -> those of the same group together; and what goes
        between the two."""
        option = {(name, *self.where[name][number]): v for v, _, name, number in self.options}
        copies = {v: option[name, i, TOGETHER] for (name, i, where), v in option.items() if where == SPREAD}
        rows, between = dict[int, int](), set[int]()
        for one in self.transports:
            makes, reads = _ends(one.produced, one.produced_rows), _ends(one.wanted, one.wanted_rows)
            for twins, of in ((makes, one.produced_rows), (reads, one.wanted_rows)):
                rows.update((of[p], of[twin]) for p, (where, twin) in twins.items() if where == SPREAD)
            for (p, q), flow in one.flows.items():
                (here, source), (there, target) = makes[p], reads[q]
                if SPREAD in (here, there):
                    if TOGETHER in (here, there):
                        between.add(flow)
                    else:
                        copies[flow] = one.flows[source, target]
        for flow, (converted, row) in self.shared.items():
            if flow in between:
                between.add(converted)
            elif flow in copies:
                copies[converted], rows[row] = self.shared[copies[flow]]
        return copies, rows, between

    def conversion_s(self, nbytes: int, source: Placement, target: Placement) -> float:
        """Cutting a piece out is left out: it is compute."""
        kind = collective_kind(source, target)
        if kind == "slice":
            return 0.0
        seconds = self.least.seconds(kind, nbytes)
        if isinstance(source, Shard) and isinstance(target, Shard):
            (g, here), (h, there) = (_taken_apart(p) for p in (source, target))
            ranges = source.dim == target.dim and source.outer == target.outer
            if not ranges and g != h and SPREAD in (here, there):
                seconds += nbytes * (1 - 1 / self.hosts) / self.bytes_per_s
        return seconds

    def is_converted(self, source: Placement | None, target: Placement) -> bool:
        """A group does not move."""
        if isinstance(source, Shard) and isinstance(target, Shard):
            (g, here), (h, there) = (_taken_apart(p) for p in (source, target))
            if g == h and here != there:
                return False
        return super().is_converted(source, target)

    # -- compute -----------------------------------------------------------------------------------------------------

    def _compute(self, facts: Facts) -> None:
        """The objective's seconds of calls become those of three kinds of rows, of which the largest counts."""
        slowest = self._variable("T", 1 / MS)
        chain = find_chain(facts)
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
            if self.fine[name] not in others:
                path.append((variable, -busiest_ms))
            if where != ANYWHERE:
                assert parts.group is not None
                groups.setdefault(parts.group, [(slowest, 1.0)]).append((variable, -busiest_ms))
        for terms in (mean, path, *groups.values()):
            self._row("busiest", 0.0, np.inf, terms)

    def _busiest_s(self, parts: Parts, where: str) -> float:
        """What a call takes on the busiest rank of the host with most of its group, of whatever kind that is."""
        if parts.group is None:
            return min(parts_seconds(parts, 1.0, d) for d in self.devices)
        if where == ANYWHERE:
            return 0.0
        key = (parts, where)
        if key not in self._busy:
            most = 1.0 if where == TOGETHER else 1 / self.hosts
            lines = [parts_coefficients(parts, d, at_share=1 / self.facts.cluster.world_size) for d, _ in self._kinds]
            ranks = [n for _, n in self._kinds]
            self._busy[key] = min(f + s * most / n for (f, s), n in zip(lines, ranks, strict=True))
        return self._busy[key]
