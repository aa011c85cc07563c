"""The choice of strategies at fixed shard sizes, as a mixed-integer program in flow form.

Symbols. ``a`` a node class with options ``i`` (strategies); ``v`` a value class, produced by class ``a(v)`` in one of the
placements ``p`` and read by slots ``k``, each wanting one of the placements ``q``; ``r`` a rank, standing for all equal
ones. Coefficients are sums over the members of a class, so twelve equal layers cost what one does. Units: milliseconds
and gigabytes (HiGHS drops coefficients under 1e-9; feasibility-details.md, trap 19).

    x[a,i] in {0,1}     option i is taken by class a                                       (_decisions)
    f[v,k,p,q] in [0,1] slot k reads in q what was produced in p                           (_transport)
    c[v,p,q] in [0,1]   v is converted from p to q, once for all slots that want q         (_converted)
    T >= 0              the compute time of the slowest rank (slices are compute, and are in its rows)

    one:      sum_i x[a,i] = 1                                                             (_decisions)
    produced: sum_q f[v,k,p,q] = sum_{i gives p} x[a(v),i]                                 (_transport)
    wanted:   sum_p f[v,k,p,q] = sum_{j wants q} x[reader(k),j]                            (_transport)
    shared:   c[v,p,q] >= f[v,k,p,q]   for every slot k that wants q                       (_converted)
    together: sum of x of input u sharded in group g = the same of input u'                (_together)
    compute:  T >= sum seconds[a,i,r] x[a,i] + sum slice[v,q,r] c[v,p,q]   for every r     (_device_rows)
    memory:   sum held[a,i,r,m] x[a,i] + sum copy[v,q,r,m] c[v,p,q] <= capacity[r]
              for every r and moment m of the step (see ``hap.search.prices``)             (_device_rows)

    minimise  T + sum_v,p,q seconds[v,p,q] c[v,p,q]                                        (_objective)

With x integral all f and c are fixed by the rows, so only x is declared integer. No conversion makes a ``Partial``: such
pairs do not exist. With ``regather`` a parameter is converted once in the forward and once in the backward phase, and
has one c for each. This is the transportation form of feasibility.md section 5, whose LP relaxation is nearly integral;
"a product variable per pair of strategies" and "materialise" are far weaker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2

from hap.placement import Partial, Placement
from hap.search.classes import Classes, ValueClass
from hap.search.prices import Price, Prices

MS, GB = 1e3, 1e-9  # seconds -> milliseconds, bytes -> gigabytes
SMALLEST = 1e-9  # a coefficient below this is nothing in ms or GB, and HiGHS would drop it
GAP = 1e-6
SEED = 20240601

Terms = list[mathopt.Variable]  # the sum of these


@dataclass(frozen=True)
class Choice:
    """A solved program: the option of every class, objective and proved bound in seconds, and what the solver did."""

    picks: tuple[int, ...]
    objective_s: float
    bound_s: float
    variables: int
    rows: int
    status: str

    @property
    def gap(self) -> float:
        """(objective - bound) / objective."""
        return max(0.0, 1.0 - self.bound_s / self.objective_s) if self.objective_s > 0 else 0.0


def choose(classes: Classes, prices: Prices, *, nodes: int = 2000) -> Choice | None:
    """The cheapest strategies at the sizes of ``prices``; None if none fits the memory."""
    return Formulation(classes, prices).solve(nodes)


@dataclass
class Formulation:
    """The program under construction."""

    classes: Classes
    prices: Prices
    model: mathopt.Model = field(default_factory=lambda: mathopt.Model(name="strategies"))
    x: list[Terms] = field(default_factory=list)
    seconds: list[tuple[mathopt.Variable, float]] = field(default_factory=list)  # objective terms, ms
    compute: list[tuple[mathopt.Variable, np.ndarray]] = field(default_factory=list)  # per rank, ms
    memory: list[tuple[mathopt.Variable, np.ndarray]] = field(default_factory=list)  # per moment and rank, GB

    def __post_init__(self) -> None:
        self.always = self.model.add_variable(lb=1, ub=1, name="always")
        self._decisions()
        for number, value_class in enumerate(self.classes.values):
            self._value(f"v{number}", value_class)
        self._together()
        self.slowest = self.model.add_variable(lb=0, name="T")
        self._device_rows()
        self._objective()

    def _decisions(self) -> None:
        for node_class in self.classes.nodes:
            name = node_class.members[0]
            terms = [self._unit(f"x[{name},{i}]", integer=True) for i in range(node_class.options)]
            self.x.append(terms)
            self._row(f"one[{name}]", 1.0, 1.0, terms)
            for i, variable in enumerate(terms):
                self._pay(variable, _total(self.prices.node(member, i) for member in node_class.members))

    def _value(self, label: str, v: ValueClass) -> None:
        """Flows of every slot of v, and the conversions that the slots share."""
        supply = _grouped(v.produced[0], self.x[v.producer])
        users: dict[tuple[Placement, Placement, str], list[Terms]] = {}
        prices: dict[tuple[Placement, Placement, str], Price] = {}
        for k, slot in enumerate(v.slots):
            reader = [self.always] if slot.reader is None else self.x[slot.reader]
            demand = _grouped(v.needed[0][k], reader)
            pairs = [(p, q) for p in supply for q in demand if p == q or not isinstance(q, Partial)]
            copy = self.prices.copy_name(v.members[0], slot)
            costs = {(*pair, copy): self._conversion(v, k, pair, copy) for pair in pairs}
            if len(pairs) == len(supply) * len(demand) and all(cost.is_free for cost in costs.values()):
                continue
            flows = self._transport(f"{label},{k}", supply, demand, pairs)
            for (p, q), terms in flows.items():
                if p != q:
                    users.setdefault((p, q, copy), []).append(terms)
            prices.update(costs)
        for (p, q, copy), terms_of in users.items():
            self._converted(f"{label},{p}>{q}{copy}", prices[p, q, copy], terms_of)

    def _conversion(self, v: ValueClass, k: int, pair: tuple[Placement, Placement], copy: str) -> Price:
        """The price of converting all members, when the first one's placements are ``pair``."""
        i, j = v.produced[0].index(pair[0]), v.needed[0][k].index(pair[1])
        return _total(
            self.prices.conversion(value, produced[i], needed[k][j], copy)
            for value, produced, needed in zip(v.members, v.produced, v.needed, strict=True)
        )

    def _transport(
        self,
        label: str,
        supply: Mapping[Placement, Terms],
        demand: Mapping[Placement, Terms],
        pairs: Sequence[tuple[Placement, Placement]],
    ) -> dict[tuple[Placement, Placement], Terms]:
        """A flow per pair with row sums ``supply`` and column sums ``demand``; with one row, the demand is the flow."""
        if len(supply) == 1:
            for q in demand:
                if not any(pair[1] == q for pair in pairs):
                    self._row(f"wanted[{label},{q}]", 0.0, 0.0, demand[q])
            return {(p, q): demand[q] for p, q in pairs}
        if len(demand) == 1:
            for p in supply:
                if not any(pair[0] == p for pair in pairs):
                    self._row(f"produced[{label},{p}]", 0.0, 0.0, supply[p])
            return {(p, q): supply[p] for p, q in pairs}
        flows = {(p, q): [self._unit(f"f[{label},{p}>{q}]")] for p, q in pairs}
        for p, terms in supply.items():
            self._row(f"produced[{label},{p}]", 0.0, 0.0, terms, [f for (s, _), (f,) in flows.items() if s == p])
        for q, terms in demand.items():
            self._row(f"wanted[{label},{q}]", 0.0, 0.0, terms, [f for (_, t), (f,) in flows.items() if t == q])
        return flows

    def _converted(self, label: str, price: Price, users: list[Terms]) -> None:
        """One conversion for all its users: the flow itself if there is one user, else a variable above each."""
        if price.is_free:
            return
        terms = users[0]
        if len(users) > 1:
            terms = [self._unit(f"c[{label}]")]
            for k, flow in enumerate(users):
                self._row(f"shared[{label},{k}]", 0.0, 1.0, terms, flow)
        for variable in terms:
            self._pay(variable, price)

    def _pay(self, variable: mathopt.Variable, price: Price) -> None:
        self.seconds.append((variable, price.together_s * MS))
        self.compute.append((variable, price.compute_s * MS))
        self.memory.append((variable, price.held_bytes * GB))

    def _together(self) -> None:
        """Inputs that can be sharded in the same group are, or none of them is."""
        for (first, options), *rest in self.classes.together:
            for other, others in rest:
                left, right = [self.x[first][i] for i in options], [self.x[other][i] for i in others]
                self._row(f"together[{first},{other}]", 0.0, 0.0, left, right)

    def _device_rows(self) -> None:
        for r in self.prices.ranks:
            row = self.model.add_linear_constraint(lb=0, name=f"compute[{r}]")
            row.set_coefficient(self.slowest, 1.0)
            _set(row, ((v, -float(ms[r])) for v, ms in self.compute))
            for m in range(len(self.memory[0][1])):
                row = self.model.add_linear_constraint(ub=self.prices.capacity_bytes[r] * GB, name=f"memory[{r},{m}]")
                _set(row, ((v, float(gb[m, r])) for v, gb in self.memory))

    def _objective(self) -> None:
        total: dict[mathopt.Variable, float] = {self.slowest: 1.0}
        for variable, ms in self.seconds:
            total[variable] = total.get(variable, 0.0) + ms
        self.model.minimize(mathopt.LinearSum(v * c for v, c in total.items()))

    def _unit(self, name: str, *, integer: bool = False) -> mathopt.Variable:
        return self.model.add_variable(lb=0, ub=1, is_integer=integer, name=name)

    def _row(self, name: str, lb: float, ub: float, plus: Terms, minus: Terms | None = None) -> None:
        row = self.model.add_linear_constraint(lb=lb, ub=ub, name=name)
        _set(row, [*((v, 1.0) for v in plus), *((v, -1.0) for v in minus or [])])

    # -- solving -----------------------------------------------------------------------------------------------------

    def solve(self, nodes: int) -> Choice | None:
        """Run HiGHS, one thread, fixed seed, at most ``nodes`` branch-and-bound nodes; None without a solution."""
        highs = highs_pb2.HighsOptionsProto()
        highs.string_options["parallel"] = "off"
        parameters = mathopt.SolveParameters(
            random_seed=SEED, relative_gap_tolerance=GAP, node_limit=nodes, highs=highs
        )
        result = mathopt.solve(self.model, mathopt.SolverType.HIGHS, params=parameters)
        if not result.has_primal_feasible_solution():
            return None
        values = result.variable_values()
        picks = tuple(max(range(len(xs)), key=lambda i: values[xs[i]]) for xs in self.x)  # noqa: B023
        return Choice(
            picks=picks,
            objective_s=result.objective_value() / MS,
            bound_s=result.dual_bound() / MS,
            variables=self.model.get_num_variables(),
            rows=self.model.get_num_linear_constraints(),
            status=result.termination.reason.name.lower(),
        )


def _total(prices: Iterable[Price]) -> Price:
    """The price of doing all of them."""
    total, *rest = prices
    for price in rest:
        total = Price(*(a + b for a, b in zip(total, price, strict=True)))
    return total


def _grouped(placements: Sequence[Placement], terms: Terms) -> dict[Placement, Terms]:
    """Placement -> the terms of the options that have it, in order of first appearance."""
    found: dict[Placement, Terms] = {}
    for placement, term in zip(placements, terms, strict=True):
        found.setdefault(placement, []).append(term)
    return found


def _set(row: mathopt.LinearConstraint, terms: Iterable[tuple[mathopt.Variable, float]]) -> None:
    """Write a row; coefficients of one variable add up."""
    total: dict[mathopt.Variable, float] = {}
    for variable, coefficient in terms:
        total[variable] = total.get(variable, 0.0) + coefficient
    for variable, coefficient in total.items():
        if abs(coefficient) >= SMALLEST:
            row.set_coefficient(variable, coefficient)
