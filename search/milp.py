"""The choice of strategies at fixed shard sizes, as a mixed-integer program in flow form.

Symbols. ``a`` a node class with options ``i`` (strategies); ``v`` a value class, produced by class ``a(v)`` in one of
the placements ``p`` and read by slots ``k``, each wanting one of the placements ``q``; ``r`` a rank, standing for all
equal ones. Coefficients are sums over the members of a class, so twelve equal layers cost what one does. Units:
milliseconds and gigabytes (HiGHS drops coefficients under 1e-9).

    x[a,i] in {0,1}     option i is taken by class a                                       (_decisions)
    f[v,k,p,q] in [0,1] slot k reads in q what was produced in p                           (_transport)
    c[v,p,q] in [0,1]   v is converted from p to q, once for all slots that want q: the flow of one of them, and a
                        variable for what is converted for the others alone                (_converted)
    T >= 0              the compute time of the slowest rank (slices are compute, and are in its rows)

    one:      sum_i x[a,i] = 1                                                             (_decisions)
    produced: sum_q f[v,k,p,q] = sum_{i gives p} x[a(v),i]                                 (_transport)
    wanted:   sum_p f[v,k,p,q] = sum_{j wants q} x[reader(k),j]                            (_transport)
    shared:   c[v,p,q] >= f[v,k,p,q]   for every other slot k that wants q                 (_converted)
    together: sum of x of input u sharded in group g = the same of input u'                (_together)
    compute:  T >= sum seconds[a,i,r] x[a,i] + sum slice[v,q,r] c[v,p,q]   for every r     (_device_rows)
    memory:   sum held[a,i,r,m] x[a,i] + sum copy[v,q,r,m] c[v,p,q] <= capacity[r]
              for every r and moment m of the step (see ``hap.search.prices``)             (_device_rows)

    minimise  T + sum_v,p,q seconds[v,p,q] c[v,p,q]                                        (_priced)

``T`` lets a slow rank catch up behind a fast one's back, which ``evaluate``, where every collective is a barrier, does
not: the objective is a lower estimate at these sizes. With ``barriers=True`` every node waits for its slowest rank,
``T = sum_{a,i} max_r seconds[a,i,r] x[a,i]``: an upper estimate, exact where shares match speeds, and solved several
times faster, as no dense row is left. ``evaluate`` decides between the two.

Memory is asked about only where the choice without it would not fit, and a solver only if what every class holds at its
least would. With x integral all f and c are fixed by the rows, so only x is declared integer. No conversion makes a
``Partial``: such pairs do not exist. The rows up to "together" do not depend on sizes: a ``Skeleton`` is built once and
priced often. With ``regather`` a parameter is converted once in the forward and once in the backward phase, and has one
c for each. This is the transportation form, whose LP relaxation is nearly integral; "a
product variable per pair of strategies" and "materialise" are far weaker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt import model_pb2, solution_pb2

from hap.fabric import Array
from hap.placement import PARTIAL, Placement
from hap.search.branches import Decision
from hap.search.classes import Classes, Slot, ValueClass
from hap.search.payers import ConversionPayer, NodePayer
from hap.search.protos import HIGHS, Solution, branching, fill_matrix, solve_once, with_rows
from hap.search.warm import WarmProgram

if TYPE_CHECKING:
    from hap.search.tables import Coefficients

MS, GB = 1e3, 1e-9  # seconds -> milliseconds, bytes -> gigabytes
MARGIN = 1e-5  # of memory
SMALLEST = 1e-9  # a coefficient below this is nothing in ms or GB, and HiGHS would drop it

Terms = list[int]  # the sum of these variables


class Priced(Protocol):
    """What a program costs at some sizes: ``hap.search.tables.Prices``."""

    def coefficients(self) -> Coefficients: ...


@dataclass(frozen=True)
class Choice:
    """A solved program: the option of every class, objective and proved bound in seconds, and what the solver did.
    ``fullness``: the part of the memory it was asked for that it takes, where it takes most; by A* 1 where whatever is
    chosen fits."""

    picks: tuple[int, ...]
    objective_s: float
    bound_s: float
    variables: int
    rows: int
    status: str
    fullness: float = 1.0

    @property
    def gap(self) -> float:
        """(objective - bound) / objective."""
        return max(0.0, 1.0 - self.bound_s / self.objective_s) if self.objective_s > 0 else 0.0


@dataclass
class Skeleton:
    """Variables and rows that do not depend on sizes, and who pays for what."""

    classes: Classes
    regather: tuple[bool, ...]  # value class -> converted once per phase
    names: list[str] = field(default_factory=list)  # of the kinds of variables, as in the module docstring
    integers: list[bool] = field(default_factory=list)
    row_names: list[str] = field(default_factory=list)
    row_bounds: list[tuple[float, float]] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)  # row, variable, coefficient
    x: list[Terms] = field(default_factory=list)
    payers: list[NodePayer | ConversionPayer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.always = self._unit("always")
        self._row("always", 1.0, 1.0, [self.always])
        self._decisions()
        for number, v in enumerate(self.classes.values):
            self._value(number, v)
        self._together()

    @cached_property
    def kept(self) -> WarmProgram:
        """The program without device rows, as it was solved last."""
        return WarmProgram(self.program)

    @cached_property
    def program(self) -> model_pb2.ModelProto:
        """The skeleton with ``T``; nothing costs anything."""
        width, rows = len(self.names) + 1, len(self.row_names)
        proto = model_pb2.ModelProto(name="strategies")
        proto.variables.ids.extend(range(width))
        proto.variables.lower_bounds.extend([0.0] * width)
        proto.variables.upper_bounds.extend([1.0] * (width - 1) + [np.inf])
        proto.variables.integers.extend([*self.integers, False])
        proto.linear_constraints.ids.extend(range(rows))
        proto.linear_constraints.lower_bounds.extend([lb for lb, _ in self.row_bounds])
        proto.linear_constraints.upper_bounds.extend([ub for _, ub in self.row_bounds])
        fill_matrix(proto, self.entries, np.zeros((0, width)), rows)
        return proto

    @cached_property
    def options(self) -> NDArray[np.int64]:
        """(classes, most options): the variables of every class, the last one again where there are no more."""
        widest = max(map(len, self.x))
        return np.array([terms + terms[-1:] * (widest - len(terms)) for terms in self.x])

    @cached_property
    def decisions(self) -> list[Decision]:
        """The variables of every class, of which exactly one is 1."""
        return [np.array(terms) for terms in self.x]

    def _decisions(self) -> None:
        for a, node_class in enumerate(self.classes.nodes):
            terms = [self._unit("x", integer=True) for _ in range(node_class.options)]
            self.x.append(terms)
            self._row("one", 1.0, 1.0, terms)
            self.payers += [NodePayer((variable,), a, i) for i, variable in enumerate(terms)]

    def _value(self, number: int, v: ValueClass) -> None:
        """Flows of every slot of v, and the conversions that the slots share."""
        supply = _grouped(v.produced[0], self.x[v.producer])
        users: dict[tuple[Placement, Placement, str], list[tuple[int, Terms]]] = {}
        for k, slot in enumerate(v.slots):
            reader, copy = [self.always] if slot.reader is None else self.x[slot.reader], self._copy(number, slot)
            demand = _grouped(v.needed[0][k], reader)
            pairs = [(p, q) for p in supply for q in demand if q is not PARTIAL or p == q]
            for (p, q), terms in self._transport(supply, demand, pairs).items():
                if p != q:
                    users.setdefault((p, q, copy), []).append((k, terms))
        made: dict[Placement, tuple[Placement, ...]] = {}  # the same of all members
        wanted: dict[tuple[int, Placement], tuple[Placement, ...]] = {}
        for (p, q, copy), flows in users.items():
            terms, k = self._converted([terms for _, terms in flows]), flows[0][0]
            if p not in made:
                i = v.produced[0].index(p)
                made[p] = tuple([m[i] for m in v.produced])
            if (k, q) not in wanted:
                j = v.needed[0][k].index(q)
                wanted[k, q] = tuple([m[k][j] for m in v.needed])
            self.payers.append(ConversionPayer(tuple(terms), v.members, made[p], wanted[k, q], copy))

    def _copy(self, number: int, slot: Slot) -> str:
        """Slots of one name share their conversions."""
        return slot.phase if self.regather[number] else ""

    def _transport(
        self,
        supply: Mapping[Placement, Terms],
        demand: Mapping[Placement, Terms],
        pairs: Sequence[tuple[Placement, Placement]],
    ) -> dict[tuple[Placement, Placement], Terms]:
        """A flow per pair with row sums ``supply`` and column sums ``demand``; with one row, the demand is the flow."""
        if len(supply) == 1 or len(demand) == 1:
            reached, left = {q for _, q in pairs}, {p for p, _ in pairs}
            for q in demand:
                if q not in reached:
                    self._row("wanted", 0.0, 0.0, demand[q])
            for p in supply:
                if p not in left:
                    self._row("produced", 0.0, 0.0, supply[p])
            return {(p, q): demand[q] if len(supply) == 1 else supply[p] for p, q in pairs}
        out: dict[Placement, Terms] = {p: [] for p in supply}
        into: dict[Placement, Terms] = {q: [] for q in demand}
        flows: dict[tuple[Placement, Placement], Terms] = {}
        for pair in pairs:
            number = self._unit("f")
            flows[pair] = [number]
            out[pair[0]].append(number)
            into[pair[1]].append(number)
        for p, terms in supply.items():
            self._row("produced", 0.0, 0.0, terms, out[p])
        for q, terms in demand.items():
            self._row("wanted", 0.0, 0.0, terms, into[q])
        return flows

    def _converted(self, users: Sequence[Terms]) -> Terms:
        """One conversion for all its users: the flow of the one of fewest terms, and, where there are others, what is
        converted for these alone."""
        shortest = min(range(len(users)), key=lambda k: len(users[k]))
        if len(users) == 1:
            return users[shortest]
        converted = [*users[shortest], self._unit("c")]
        for k, flow in enumerate(users):
            if k != shortest:
                self._row("shared", 0.0, 1.0, converted, flow)
        return converted

    def _together(self) -> None:
        """Inputs that can be sharded in the same group are, or none of them is."""
        for (first, options), *rest in self.classes.together:
            for other, others in rest:
                left, right = [self.x[first][i] for i in options], [self.x[other][i] for i in others]
                self._row("together", 0.0, 0.0, left, right)

    def _unit(self, name: str, *, integer: bool = False) -> int:
        self.names.append(name)
        self.integers.append(integer)
        return len(self.names) - 1

    def _row(self, name: str, lb: float, ub: float, plus: Iterable[int], minus: Iterable[int] = ()) -> None:
        row = len(self.row_names)
        self.row_names.append(name)
        self.row_bounds.append((lb, ub))
        self.entries += [(row, v, 1.0) for v in plus]
        self.entries += [(row, v, -1.0) for v in minus]


def make_skeleton(classes: Classes, *, regathered: frozenset[str] = frozenset()) -> Skeleton:
    """The rows of a partition. ``regathered``: nodes (parameters) whose values are converted once per phase."""
    return Skeleton(classes, tuple(v.members[0].node in regathered for v in classes.values))


def choose(
    skeleton: Skeleton,
    prices: Priced,
    *,
    forced: Mapping[int, Sequence[int]] | None = None,
    barriers: bool = False,
    nodes: int = 2000,
    gap: float = 1e-6,
    warm: bool = False,
    below_s: float = np.inf,
    check: Callable[[], None] = lambda: None,
) -> Choice | None:
    """The cheapest strategies at the sizes of ``prices``; None if none fits the memory, or none that does comes to less
    than ``below_s``.

    ``forced``: node class -> the only options it may take. ``barriers``: see the module docstring. HiGHS, one thread,
    fixed seed, at most ``nodes`` branch-and-bound nodes. ``warm``: without memory rows the linear relaxation is asked
    first, from where it ended last for this skeleton (``hap.search.warm``). ``check`` is called during what may take
    long and may end it by an exception.
    """
    found = prices.coefficients()
    upper, unlimited = _upper(skeleton, forced or {}), None
    if barriers and warm:
        unlimited = skeleton.kept.solve(_objective_ms(found, True), upper, gap=gap, nodes=nodes)
    if unlimited is not None and _fits(found, unlimited.values[:-1]):
        return _choice(skeleton, found, unlimited, len(skeleton.row_names))
    for limited in (False, True) if unlimited is None else (True,):
        if limited and _is_too_much(skeleton, found, upper):
            return None
        rows, most = _device_rows(found, barriers, limited)
        proto = _priced(skeleton, rows, most, _objective_ms(found, barriers))
        proto.variables.upper_bounds[:] = upper.tolist()
        start = None if unlimited is None else skeleton.kept.basis
        below = below_s * MS if limited else np.inf
        solved = _solved(skeleton, proto, _stakes(rows, most), start, gap, nodes, below, check)
        if solved is None:
            return None
        if limited or _fits(found, solved.values[:-1]):
            return _choice(skeleton, found, solved, len(proto.linear_constraints.ids))
    raise AssertionError("what is limited is taken as it is")


def _solved(
    skeleton: Skeleton,
    proto: model_pb2.ModelProto,
    stakes: Array,
    start: solution_pb2.BasisProto | None,
    gap: float,
    nodes: int,
    below: float,
    check: Callable[[], None],
) -> Solution | None:
    """By the linear relaxation and branching on what it leaves open; where that comes to nothing, by HiGHS alone.
    ``start``: the basis of its optimum without device rows."""
    cost, linear = np.zeros(len(proto.variables.ids)), proto.objective.linear_coefficients
    cost[list(linear.ids)] = list(linear.values)
    first = len(skeleton.row_names)
    begin = None if start is None else with_rows(start, first, len(proto.linear_constraints.ids) - first)
    program = WarmProgram(proto, skeleton.decisions, stakes, check)
    found = program.solve(cost, start=begin, gap=gap, nodes=nodes, below=below)
    if found is None and not program.is_empty and not program.is_given_up:
        found = solve_once(proto, HIGHS, branching(gap, nodes))
    return found if found is None or found.objective < below else None


def _stakes(rows: Array, most: Array) -> Array:
    """Of every variable (V,) what it takes of that one of ``rows`` (K, V), at most ``most`` (K,), that it takes most
    of, as a part of the row's limit; where that is 0, of the most that any variable takes."""
    limits = np.where(most > 0.0, most, rows.max(axis=1, initial=0.0))
    parts: Array = np.divide(rows, limits[:, None], out=np.zeros_like(rows), where=rows > 0.0)
    return parts.max(axis=0, initial=0.0)


def _choice(skeleton: Skeleton, found: Coefficients, solved: Solution, rows: int) -> Choice:
    return Choice(
        picks=tuple(solved.values[skeleton.options].argmax(axis=1).tolist()),
        objective_s=solved.objective / MS,
        bound_s=solved.bound / MS,
        variables=len(skeleton.names) + 1,
        rows=rows,
        status=solved.status,
        fullness=float((found.held.at(solved.values[:-1]) / found.capacity_bytes).max()),
    )


def _upper(skeleton: Skeleton, forced: Mapping[int, Sequence[int]]) -> Array:
    """Upper bounds of all variables (V + 1,), the last of ``T``."""
    upper = np.append(np.ones(len(skeleton.names)), np.inf)
    upper[[v for a, options in forced.items() for i, v in enumerate(skeleton.x[a]) if i not in options]] = 0.0
    return upper


def _objective_ms(found: Coefficients, barriers: bool) -> Array:
    """(V + 1,) with that of ``T`` last."""
    cost = found.together_s * MS + (found.compute_s.max(axis=0) * MS if barriers else 0.0)
    cost[np.abs(cost) < SMALLEST] = 0.0
    return np.append(cost, 1.0)


def _fits(found: Coefficients, values: Array) -> bool:
    """Whether a point of the program without memory rows obeys them."""
    return bool((found.held.at(values) * GB <= found.capacity_bytes * GB + SMALLEST).all())


def _is_too_much(skeleton: Skeleton, found: Coefficients, upper: Array) -> bool:
    """Whether even the options that hold least do not fit, with a margin for what a solver takes for nothing: then it
    need not be asked. What is converted holds more, never less."""
    variables = np.concatenate(skeleton.decisions)
    first = np.cumsum([0, *map(len, skeleton.decisions[:-1])])
    held = np.where(upper[variables] > 0.0, found.held.of(variables), np.inf)
    least = np.minimum.reduceat(held, first, axis=2).sum(axis=2)
    return bool((least > found.capacity_bytes * (1 + MARGIN)).any())


def _device_rows(found: Coefficients, barriers: bool, limited: bool) -> tuple[Array, Array]:
    """The rows of every kind of rank (K, V + 1), and what each is at most (K,); of memory, if ``limited``."""
    compute_ms = found.compute_s[:0] if barriers else found.compute_s * MS
    dense = [np.append(compute_ms, np.full((len(compute_ms), 1), -1.0), axis=1)]
    most = [np.zeros(len(compute_ms))]
    for held in found.held_bytes if limited else ():
        dense.append(np.append(held * GB, np.zeros((len(held), 1)), axis=1))
        most.append(found.capacity_bytes * GB)
    rows = np.concatenate(dense)
    rows[np.abs(rows) < SMALLEST] = 0.0
    return rows, np.concatenate(most)


def _priced(skeleton: Skeleton, rows: Array, most: Array, cost_ms: Array) -> model_pb2.ModelProto:
    """The whole program: skeleton, objective (V + 1,), and device rows (K, V + 1) that are at most ``most`` (K,)."""
    proto, first = model_pb2.ModelProto(), len(skeleton.row_names)
    proto.CopyFrom(skeleton.program)
    proto.linear_constraints.ids.extend(range(first, first + len(rows)))
    proto.linear_constraints.lower_bounds.extend([-np.inf] * len(rows))
    proto.linear_constraints.upper_bounds.extend(most.tolist())
    fill_matrix(proto, (), rows, first)
    used = np.flatnonzero(cost_ms)
    proto.objective.linear_coefficients.ids.extend(used.tolist())
    proto.objective.linear_coefficients.values.extend(cost_ms[used].tolist())
    return proto


def _grouped(placements: Sequence[Placement], terms: Terms) -> dict[Placement, Terms]:
    """Placement -> the terms of the options that have it, in order of first appearance."""
    found: dict[Placement, Terms] = {}
    for placement, term in zip(placements, terms, strict=True):
        found.setdefault(placement, []).append(term)
    return found
