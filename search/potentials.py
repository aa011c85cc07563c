"""A lower bound on what is left to do, for every unfinished program: potentials from one linear program.

Symbols as in ``hap.search.milp``: node a with options i that cost t[a,i,r] on rank r; tensor v, its uses k, produced in
p and wanted in q; C[v,p,q] what converting it costs. The flow form's LP relaxation has the dual

    maximise  sum_a level[a] + sum_{uses by the step} need[v,k,q] - sum_m full[m] capacity[m]
    level[a] <= sum_r w[r] t[a,i,r] + sum_m full[m] held[a,i,m]
                + sum_{v of a, k} made[v,k,p(i)] + sum_{(v,k) read by a} need[v,k,q(i)]      for every option i
    made[v,k,p] + need[v,k,q] <= part[v,k,p,q]                  (0 where p = q; no row where it cannot be converted)
    sum_k part[v,k,p,q] <= C[v,p,q]                             (the uses of one copy share its cost)
    sum_r w[r] = 1,   w, part, full >= 0

(``best_potentials``, GLOP). Potentials of facts as heuristics are from planning (Pommerening, Helmert, Roeger, Seipp,
AAAI 2015). For a state that has decided the nodes of a set D, with tensors in place and copies made,

    left = sum_{a not in D} level[a] + sum_{v made, use k not in D} min_q (part'[v,k,p,q] - need[v,k,q])
           + sum_{v not made, use k in D wanting q} need[v,k,q]                                 (``Potentials.waiting``)

where part' is 0 for a placement that v already has. It never exceeds what is left, whatever the numbers, as long as the
rows above hold: adding them up over any completion cancels made and need. So nothing rests on the solver: ``part`` is
scaled down, and ``need`` and ``level`` are computed anew in plain arithmetic, from ``made`` and ``w`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from ortools.math_opt.python import mathopt

from hap.search.milp import GB, MS
from hap.search.protos import SEED
from hap.search.theory import Cost, Tensor, Theory, Vector

Copies = frozenset[tuple[int, str]]  # (place, copy)
NOTHING: Copies = frozenset()


@dataclass(frozen=True)
class Potentials:
    """Seconds. ``weights`` (R,), ``full`` (M * R,) seconds per byte, ``level`` of each class, ``need[v][k][q]``,
    ``part[v][k][p, q]``. ``taken[a][i]``: how much of option i the relaxation takes, in [0, 1]: where to look first."""

    theory: Theory
    weights: Vector
    full: Vector
    level: Vector
    need: tuple[tuple[dict[int, float], ...], ...]
    part: tuple[tuple[dict[tuple[int, int], float], ...], ...]
    taken: tuple[Mapping[int, float], ...]
    _known: dict[tuple[int, int, int, Copies], float] = field(default_factory=dict, repr=False)

    @property
    def start_s(self) -> float:
        """Of a whole step: the relaxation's bound."""
        asked = sum(self.asked(v) for v in range(len(self.need)))
        return sum(self.level) + asked - dot(self.full, self.theory.capacity_bytes)

    def asked(self, v: int) -> float:
        """What the step itself wants of tensor v, before it is made."""
        uses = self.theory.tensors[v].uses
        return sum(self.need[v][k][use.wants[0]] for k, use in enumerate(uses) if use.reader is None)

    def waiting(self, v: int, place: int, copies: Copies, decided: int) -> float:
        """Of the uses of tensor v, made in ``place``, by classes after ``decided``."""
        key = (v, place, decided, copies)
        if key not in self._known:
            uses = enumerate(self.theory.tensors[v].uses)
            later = ((k, use.copy) for k, use in uses if use.reader is not None and use.reader > decided)
            self._known[key] = sum(self._least(v, k, place, copies, copy) for k, copy in later)
        return self._known[key]

    def _least(self, v: int, k: int, place: int, copies: Copies, copy: str) -> float:
        found = inf
        for q, need in self.need[v][k].items():
            if need == inf:  # nothing that is made can be brought there
                continue
            free = q == place or (q, copy) in copies
            found = min(found, (0.0 if free else self.part[v][k].get((place, q), inf)) - need)
        return found


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def best_potentials(theory: Theory) -> Potentials | None:
    """Potentials that make the bound of the whole step largest; where the solver gives up for want of precision, those
    at equal weights with which no reader pays for what another makes, which prove less. None if nothing fits the
    memory."""
    solved = _Dual(theory).solve()
    return None if solved is None else _repaired(theory, solved)


@dataclass(frozen=True)
class _Solution:
    """What the solver says, in seconds and bytes."""

    weights: Vector
    full: Vector
    made: list[list[dict[int, float]]]
    part: list[list[dict[tuple[int, int], float]]]
    taken: tuple[Mapping[int, float], ...]


class _Dual:
    """The linear program of the module's docstring, in ms and GB."""

    def __init__(self, theory: Theory) -> None:
        self.theory = theory
        self.model = mathopt.Model(name="potentials")
        self.weights = [self.model.add_variable(lb=0) for _ in range(theory.ranks)]
        self.model.add_linear_constraint(mathopt.LinearSum(self.weights) == 1)
        self.full = [self.model.add_variable(lb=0) for _ in theory.capacity_bytes]
        self.made: list[list[dict[int, mathopt.Variable]]] = []
        self.need: list[list[dict[int, mathopt.Variable]]] = []
        self.part: list[list[dict[tuple[int, int], mathopt.LinearExpression | mathopt.Variable]]] = []
        for tensor in theory.tensors:
            self._tensor(tensor)
        self.rows: list[dict[int, mathopt.LinearConstraint]] = []
        self._nodes()

    def solve(self) -> _Solution | None:
        result = mathopt.solve(self.model, mathopt.SolverType.GLOP, params=mathopt.SolveParameters(random_seed=SEED))
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.UNBOUNDED, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return None
        if not result.has_primal_feasible_solution():
            return self._nothing()
        values = result.variable_values()

        def number(expression: mathopt.LinearExpression | mathopt.Variable) -> float:
            return mathopt.evaluate_expression(expression, values) / MS

        weights = tuple(max(0.0, values[w]) for w in self.weights)
        full = tuple(max(0.0, values[f]) * GB / MS for f in self.full)
        made = [[{p: values[m] / MS for p, m in use.items()} for use in tensor] for tensor in self.made]
        part = [[{pq: number(e) for pq, e in use.items()} for use in tensor] for tensor in self.part]
        dual = result.dual_values()
        taken = tuple({i: dual[row] for i, row in rows.items()} for rows in self.rows)
        return _Solution(tuple(w / sum(weights) for w in weights), full, made, part, taken)

    def _nothing(self) -> _Solution:
        """Nothing is taken, made or shared; valid, as any numbers are."""
        weights = (1.0 / len(self.weights),) * len(self.weights)
        made = [[dict.fromkeys(use, 0.0) for use in tensor] for tensor in self.made]
        part = [[dict.fromkeys(use, 0.0) for use in tensor] for tensor in self.part]
        taken = tuple(dict.fromkeys(rows, 0.0) for rows in self.rows)
        return _Solution(weights, (0.0,) * len(self.full), made, part, taken)

    def _price(self, cost: Cost) -> mathopt.LinearExpression:
        terms = [w * (s * MS) for w, s in zip(self.weights, cost.alone_s, strict=True) if s]
        terms += [f * (b * GB) for f, b in zip(self.full, cost.held_bytes, strict=True) if b]
        return mathopt.LinearSum(terms) + cost.together_s * MS

    def _tensor(self, tensor: Tensor) -> None:
        made = [{p: self.model.add_variable() for p in dict.fromkeys(tensor.gives)} for _ in tensor.uses]
        need = [{q: self.model.add_variable() for q in dict.fromkeys(use.wants)} for use in tensor.uses]
        part: list[dict[tuple[int, int], mathopt.LinearExpression | mathopt.Variable]] = [{} for _ in tensor.uses]
        for (p, q, copy), cost in tensor.conversions.items():
            sharing = [k for k, use in enumerate(tensor.uses) if use.copy == copy and q in use.wants]
            if len(sharing) == 1:
                part[sharing[0]][p, q] = self._price(cost)
                continue
            parts = [self.model.add_variable(lb=0) for _ in sharing]
            self.model.add_linear_constraint(mathopt.LinearSum(parts) <= self._price(cost))
            for k, variable in zip(sharing, parts, strict=True):
                part[k][p, q] = variable
        for k in range(len(tensor.uses)):
            for p, m in made[k].items():
                for q, n in need[k].items():
                    if p == q:
                        self.model.add_linear_constraint(m + n <= 0)
                    elif (p, q) in part[k]:
                        self.model.add_linear_constraint(m + n <= part[k][p, q])
        self.made.append(made)
        self.need.append(need)
        self.part.append(part)

    def _nodes(self) -> None:
        theory = self.theory
        reads: list[list[tuple[int, int]]] = [[] for _ in theory.costs]
        goal = []
        for v, tensor in enumerate(theory.tensors):
            for k, use in enumerate(tensor.uses):
                if use.reader is None:
                    goal.append(self.need[v][k][use.wants[0]])
                else:
                    reads[use.reader].append((v, k))
        for a, options in enumerate(theory.options):
            level = self.model.add_variable()
            goal.append(level)
            self.rows.append({})
            for i in options:
                terms = [self.need[v][k][theory.tensors[v].uses[k].wants[i]] for v, k in reads[a]]
                for v in theory.made[a]:
                    terms += [use[theory.tensors[v].gives[i]] for use in self.made[v]]
                price = self._price(theory.costs[a][i])
                self.rows[a][i] = self.model.add_linear_constraint(level <= price + mathopt.LinearSum(terms))
        full = [f * (c * GB) for f, c in zip(self.full, theory.capacity_bytes, strict=True)]
        self.model.maximize(mathopt.LinearSum(goal) - mathopt.LinearSum(full))


def _repaired(theory: Theory, found: _Solution) -> Potentials:
    """The rows of the docstring made exact, whatever the solver's tolerance."""

    weights, full, made, part = found.weights, found.full, found.made, found.part

    def price(cost: Cost) -> float:
        return cost.together_s + dot(weights, cost.alone_s) + dot(full, cost.held_bytes)

    need = []
    for tensor, parts, mades in zip(theory.tensors, part, made, strict=True):
        for (p, q, copy), cost in tensor.conversions.items():
            sharing = [k for k, use in enumerate(tensor.uses) if use.copy == copy and q in use.wants]
            given = [max(0.0, parts[k][p, q]) for k in sharing]
            scale = min(1.0, price(cost) / sum(given)) if sum(given) > 0 else 0.0
            parts_now = [price(cost)] if len(sharing) == 1 else [scale * g for g in given]
            for k, value in zip(sharing, parts_now, strict=True):
                parts[k][p, q] = value
        need.append(
            tuple(
                {
                    q: min((0.0 if p == q else parts[k].get((p, q), inf)) - m for p, m in mades[k].items())
                    for q in dict.fromkeys(use.wants)
                }
                for k, use in enumerate(tensor.uses)
            )
        )
    level = []
    asked: list[list[tuple[int, int]]] = [[] for _ in theory.costs]
    for v, tensor in enumerate(theory.tensors):
        for k, use in enumerate(tensor.uses):
            if use.reader is not None:
                asked[use.reader].append((v, k))
    for a, options in enumerate(theory.options):
        level.append(
            min(
                price(theory.costs[a][i])
                + sum(need[v][k][theory.tensors[v].uses[k].wants[i]] for v, k in asked[a])
                + sum(use[theory.tensors[v].gives[i]] for v in theory.made[a] for use in made[v])
                for i in options
            )
        )
    return Potentials(theory, weights, full, tuple(level), tuple(need), tuple(map(tuple, part)), found.taken)
