"""A lower bound of the cost model's step time that counts communication: over all strategies and all shares.

``bound`` proves, for weights w of the ranks, that a node under strategy s takes at least ``line(s)`` seconds of a step,
whatever the shares. Here every conversion is added with the least that any decomposition takes for any shares, and
strategies have to agree:

    T >= sum_n line[n, s(n)] + sum of the conversions that s implies, each at its least                      (joint)

whose minimum over s is a program in the flow form of ``milp``. Its LP relaxation is solved for all nodes at once by
adding up its rows over what looks alike, which can only make the minimum smaller: so the bound holds.

    x[a,i] >= 0           of the nodes of type a (colour after R rounds), the fraction that takes option i
    F[v,k,p,q] >= 0       of the values v (colour of the producer after R - 1 rounds), how many are read by slot k (the
                          reader's colour after R - 2) in q when they were produced in p
    C[v,p,q] >= 0         how many are converted from p to q

    one:      sum_i x[a,i] = 1
    produced: sum_q F[v,k,p,q] = m[v,k] sum_{a in v, i gives p} |a| x[a,i]        m: such reads of each of these values
    wanted:   sum_p F[v,k,p,q] = sum_{a in k, j wants q} |a| x[a,j]
    shared:   m[v,k] C[v,p,q] >= F[v,k,p,q]
    state:    what parameters, gradients and the optimizer take in all memory <= all usable memory

    minimise  sum |a| line[a,i] x[a,i] + sum least(p, q, bytes) C[v,p,q]

A node's colour says how many reads of which colour it has, so all nodes of a type are in the same rows the same number
of times, and each row above is the sum of the rows of a flow program that merges nothing.

**The least of a collective.** Its seconds are ``constant + sum over stages of max_j (c_j + s_j rho + t_j sigma)``. For
any weights y of a stage's rows (>= 0, sum 1) the maximum is at least ``y c + min_r (y s)_r + min_r (y t)_r``, as shares
sum to 1. Good weights come from a small LP (the value of a matrix game) over the classes of alike ranks; any are valid.
The wire of an all-to-all between shards may be empty, so only its latency and copies count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from hap.conversion import collective_kind
from hap.cost_models.collective import Stage, candidates, collective_coefficients
from hap.cost_models.fold import fold
from hap.cost_models.memory import optimizer_state_bytes, usable_bytes
from hap.fabric import Array
from hap.graph import Value
from hap.hosts import Device
from hap.placement import REPLICATE, Partial, Placement, Shard
from hap.plan import Collective
from hap.search.bound import Line, best_weights, device_classes, line_seconds, make_bound, node_line
from hap.search.classes import RADIUS, Read, find_colours, find_reads
from hap.search.milp import GB, MS, SMALLEST
from hap.search.prices import Facts
from hap.search.protos import SEED, fill_matrix, solve_once
from hap.search.wires import GRID, ClassForms, RankClasses

UNIT_BYTES = 1 << 30
SAFETY = 1e-6  # of the bound: what the solver's tolerances may be worth
_SHARD = Shard(0, 1, 1, 1, "any")


@dataclass(frozen=True)
class LowerBound:
    """``seconds`` is proved; ``compute_s`` of it without any communication; ``variables`` of the program."""

    seconds: float
    compute_s: float
    variables: int


def lower_bound(facts: Facts) -> LowerBound | None:
    """The bound. None where nothing is proved: a measured device has no roofline."""
    if any(type(d) is not Device for d in facts.cluster.devices):
        return None
    separate = make_bound(facts)
    if not separate.menus:
        return LowerBound(0.0, 0.0, 0)
    weights = best_weights(separate)
    compute_s = separate.seconds(weights)
    if facts.cluster.world_size == 1:
        return LowerBound(compute_s, compute_s, 0)
    relaxation = Relaxation(facts, weights)
    joint = relaxation.solve()
    seconds = compute_s if joint is None else max(compute_s, joint * (1 - SAFETY))
    return LowerBound(seconds, compute_s, len(relaxation.cost))


# ---- the least that a conversion takes ----


@dataclass(eq=False)
class Least:
    """The least seconds of collectives on one cluster, joined by lines between the sizes of ``GRID``: the seconds for
    given weights are straight between kinks at which they bend down, or at a size of the grid."""

    facts: Facts
    _curves: dict[Collective, list[float]] = field(default_factory=dict)

    def seconds(self, kind: Collective, nbytes: int) -> float:
        if kind not in self._curves:
            self._curves[kind] = self._curve(kind)
        return float(np.interp(nbytes, GRID, self._curves[kind]))

    def _curve(self, kind: Collective) -> list[float]:
        """The least over all decompositions at every size of the grid: a minimum of lines bends down.

        A stage's seconds are proportional to the bytes, so each is weighed once, rank by rank. The rest does not depend
        on shares: of many ranks it is asked of kinds of devices.
        """
        cluster = self.facts.cluster
        other = replace(_SHARD, dim=1)
        source: Placement = _SHARD if kind in ("all_gather", "all_to_all") else REPLICATE
        target: Placement = other if kind in ("reduce_scatter", "all_to_all") else REPLICATE
        classes, kinds = RankClasses.find(cluster), fold(cluster) or cluster
        curves = []
        for name in candidates(kind, cluster):
            whole = collective_coefficients(kind, name, UNIT_BYTES, source, target, cluster)
            stages = [s for s in whole.stages if kind != "all_to_all" or s.in_memory]
            per_byte = sum(stage_least_s(s, row_weights(s, classes)) for s in stages) / UNIT_BYTES
            constants = [collective_coefficients(kind, name, b, source, target, kinds).constant_s for b in GRID]
            curves.append([c + per_byte * b for c, b in zip(constants, GRID, strict=True)])
        return [min(column) for column in zip(*curves, strict=True)]


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
    model, n = mathopt.Model(name="game"), len(classes.counts)
    y = [model.add_variable(lb=0) for _ in rows]
    least = [model.add_variable(lb=-np.inf) for _ in tables]
    model.add_linear_constraint(sum(y) == 1)
    for side, variable in enumerate(least):
        for c in range(n):
            column = rows[:, 1 + side * n + c]
            model.add_linear_constraint(variable <= sum(float(k) * v for k, v in zip(column, y, strict=True)))
    model.maximize(sum(float(k) * v for k, v in zip(rows[:, 0], y, strict=True)) + sum(least))
    result = mathopt.solve(model, mathopt.SolverType.GLOP, params=mathopt.SolveParameters(random_seed=SEED))
    assert result.has_primal_feasible_solution(), "a game has a value"
    found = np.maximum(0.0, np.array([result.variable_values()[v] for v in y]))
    weights: Array = (found / found.sum() / counts)[inverse.ravel()]
    return weights


# ---- the program ----


class Relaxation:
    """See the module docstring."""

    def __init__(self, facts: Facts, weights: Sequence[float], *, radius: int = RADIUS) -> None:
        self.facts, self.least = facts, Least(facts)
        self.slices = ClassForms(facts.cluster, RankClasses.find(facts.cluster))
        self.devices, counts = device_classes(facts.cluster)
        self.weight = np.array(weights) / float(np.array(weights) @ np.array(counts))
        self.many = self.weight * np.array(counts)
        self._known: dict[Line, float] = {}
        self.cost: list[float] = []
        self.names: list[str] = []
        self.row_names: list[str] = []
        self.row_bounds: list[tuple[float, float]] = []
        self.entries: list[tuple[int, int, float]] = []
        rounds = facts.colours if radius == RADIUS else find_colours(facts.graph, facts.candidates, radius=radius)
        self.fine, self.of_value, self.of_reader = (rounds[max(0, len(rounds) - 1 - back)] for back in range(3))
        self._types()
        self._values()
        self._state()

    def _types(self) -> None:
        members: dict[int, list[str]] = {}
        for node in self.facts.graph.nodes:
            members.setdefault(self.fine[node.name], []).append(node.name)
        self.x: dict[int, list[int]] = {}
        self.count = {a: len(names) for a, names in members.items()}
        self.first = {a: names[0] for a, names in members.items()}
        for a, (name, *_) in members.items():
            costs = [self.node_s(name, i) for i in range(len(self.facts.candidates[name]))]
            self.x[a] = [self._variable(f"x[{name},{i}]", self.count[a] * c) for i, c in enumerate(costs)]
            self._row(f"one[{name}]", 1.0, 1.0, [(v, 1.0) for v in self.x[a]])

    def node_s(self, name: str, option: int) -> float:
        """What a node takes at least under one of its strategies, whatever the shares."""
        line = node_line(self.facts, name, self.facts.candidates[name][option], self.devices)
        if line not in self._known:
            self._known[line] = line_seconds(line, self.weight, self.many)
        return self._known[line]

    def _values(self) -> None:
        """Flows and conversions of every class of values."""
        reads = find_reads(self.facts.graph, self.facts.candidates)
        classes: dict[tuple[int, int], list[Value]] = {}
        for value in reads:
            classes.setdefault((self.of_value[value.node], value.index), []).append(value)
        for key, values in classes.items():
            self._value(f"{values[0]}", [reads[v] for v in values], key)

    def _value(self, label: str, reads: Sequence[Sequence[Read]], key: tuple[int, int]) -> None:
        supply: dict[int, list[tuple[int, float]]] = {}  # placement number -> terms
        first, index = reads[0][0].value, key[1]
        numbers = _numbered([s.outputs[index] for s in self.facts.candidates[first.node]])
        for a in dict.fromkeys(self.fine[r[0].value.node] for r in reads):
            for i, variable in enumerate(self.x[a]):
                supply.setdefault(numbers[i], []).append((variable, float(self.count[a])))
        slots: dict[object, list[Read]] = {}
        for users in reads:
            for read in users:
                reader = None if read.reader is None else self.of_reader[read.reader]
                slots.setdefault((reader, read.position, read.phase, read.number), []).append(read)
        produced = [s.outputs[index] for s in self.facts.candidates[first.node]]
        users_of: dict[tuple[int, Placement], list[tuple[int, int]]] = {}
        for k, same in enumerate(slots.values()):
            each = len(same) // len(reads)
            assert each * len(reads) == len(same), "a colour says how often a value is read"
            wants = next(r for r in reads[0] if r.number == same[0].number).wants
            flows = self._transport(f"{label},{k}", supply, produced, same, wants, each)
            for (p, q), flow in flows.items():
                users_of.setdefault((p, q), []).append((flow, each))
        self._converted(label, first, produced, users_of)

    def _transport(
        self,
        label: str,
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
        pairs = [(p, q) for p in supply for q in demand if produced[p] == wants[q] or not isinstance(wants[q], Partial)]
        flows = {pair: self._variable(f"F[{label},{pair[0]}>{pair[1]}]", 0.0) for pair in pairs}
        for p, terms in supply.items():
            out = [(f, -1.0) for pair, f in flows.items() if pair[0] == p]
            self._row(f"produced[{label},{p}]", 0.0, 0.0, [*((v, each * k) for v, k in terms), *out])
        for q, terms in demand.items():
            came = [(f, -1.0) for pair, f in flows.items() if pair[1] == q]
            self._row(f"wanted[{label},{q}]", 0.0, 0.0, [*terms, *came])
        return {(p, wants[q]): f for (p, q), f in flows.items() if produced[p] != wants[q]}

    def _converted(
        self,
        label: str,
        value: Value,
        produced: Sequence[Placement | None],
        users_of: Mapping[tuple[int, Placement], Sequence[tuple[int, int]]],
    ) -> None:
        nbytes = self.facts.graph.meta(value).nbytes
        for (p, target), users in users_of.items():
            source = produced[p]
            assert source is not None
            seconds = self.conversion_s(nbytes, source, target)
            if len(users) == 1:
                flow, each = users[0]
                self.cost[flow] += seconds * MS / each
                continue
            converted = self._variable(f"C[{label},{source}>{target}]", seconds)
            for number, (flow, each) in enumerate(users):
                self._row(f"shared[{label},{source}>{target},{number}]", 0.0, np.inf, [(converted, each), (flow, -1.0)])

    def conversion_s(self, nbytes: int, source: Placement, target: Placement) -> float:
        """What a conversion takes at least, whatever the shares."""
        kind = collective_kind(source, target)
        if kind != "slice":
            return self.least.seconds(kind, nbytes)
        constant, slope = self.slices.slices(nbytes, source, target)
        classes = [self.slices.classes.of[d.rank] for d in self.devices]
        line = Line(tuple(constant[classes].tolist()), tuple(slope[classes].tolist()))
        return line_seconds(line, self.weight, self.many)

    def _state(self) -> None:
        """Parameters, their gradients and the optimizer's state, on all ranks together at the end of the step."""
        graph, n = self.facts.graph, self.facts.cluster.world_size
        terms = []
        for a, name in self.first.items():
            node = graph.by_name[name]
            if node.op != "parameter":
                continue
            trained = node.target in graph.gradients
            state = optimizer_state_bytes(self.facts.optimizer, node.meta.nbytes) + node.meta.nbytes
            nbytes = node.meta.nbytes + (state if trained else 0)
            for variable, strategy in zip(self.x[a], self.facts.candidates[name], strict=True):
                copies = 1 if isinstance(strategy.outputs[0], Shard) else n
                terms.append((variable, self.count[a] * copies * nbytes * GB))
        room = sum(usable_bytes(d.memory_bytes) for d in self.facts.cluster.devices)
        self._row("state", -np.inf, room * GB, terms)

    # -- assembling --------------------------------------------------------------------------------------------------

    def _variable(self, name: str, seconds: float) -> int:
        self.names.append(name)
        self.cost.append(seconds * MS)
        return len(self.names) - 1

    def _row(self, name: str, lower: float, upper: float, terms: Sequence[tuple[int, float]]) -> None:
        self.entries += [(len(self.row_names), v, k) for v, k in terms]
        self.row_names.append(name)
        self.row_bounds.append((lower, upper))

    def _always(self) -> int:
        variable = self._variable("always", 0.0)
        self._row("always", 1.0, 1.0, [(variable, 1.0)])
        return variable

    def solve(self) -> float | None:
        """Seconds; None if the solver finds no optimum."""
        used = [i for i, c in enumerate(self.cost) if abs(c) >= SMALLEST]
        proto = model_pb2.ModelProto(name="relaxation")
        proto.variables.ids.extend(range(len(self.names)))
        proto.variables.lower_bounds.extend([0.0] * len(self.names))
        proto.variables.upper_bounds.extend([np.inf] * len(self.names))
        proto.variables.integers.extend([False] * len(self.names))
        proto.objective.linear_coefficients.ids.extend(used)
        proto.objective.linear_coefficients.values.extend([self.cost[i] for i in used])
        proto.linear_constraints.ids.extend(range(len(self.row_names)))
        proto.linear_constraints.lower_bounds.extend([lower for lower, _ in self.row_bounds])
        proto.linear_constraints.upper_bounds.extend([upper for _, upper in self.row_bounds])
        fill_matrix(proto, self.entries, np.zeros((0, len(self.names))), len(self.row_names))
        solved = solve_once(proto)
        return None if solved is None or not solved.is_optimal else solved.bound / MS


def _numbered(placements: Sequence[Placement | None]) -> list[int]:
    """For each placement the index of its first equal."""
    first: dict[object, int] = {}
    return [first.setdefault(p, i) for i, p in enumerate(placements)]
