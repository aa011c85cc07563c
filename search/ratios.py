"""The best shares at fixed strategies: a linear program (GLOP), one share vector per bundle of groups.

Symbols: bundle b (groups that correspond in equal layers), rank r, stage k (what runs between two collectives; the last
one with the optimizer's update), conversion m, node i with group b(i), ``fixed`` and ``slope`` its line on the device
of r (``parts_coefficients``, a tangent of the roofline at the present share).

    share[b,r] >= 0,  sum_r share[b,r] = 1                                                          (_shares)
    stage[k] >= sum_{i in k} fixed[i,r] + slope[i,r] share[b(i),r]          for every r             (_maximum)
    wire[m] >= constant[m,j] + by_source[m,j] share + by_target[m,j] share  for every port j        (_collective)
    held[r,t] affine in share <= capacity[r]                                for every r, moment t   (_memory)
    away[b,r] >= +-(share[b,r] - share at the present sizes)                                        (_stay)

    minimise  sum_k stage[k] + sum_m wire[m] + STAY step sum away

The last term makes groups that hardly matter stay where they are, instead of in some corner of the optimal face.
It mirrors ``hap.cost_models.evaluate`` stage by stage. Memory is the estimate of ``hap.search.prices`` shifted by what
the ledger says at the present sizes. A rank that is to be left out has all its shares fixed at zero, and then no
launches for what it skips. With several groups, shares of different groups need not be equal: a rank with a slow link
may have little of one and more of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.math_opt.python import mathopt

from hap.cost_models.collective import Stage, collective_coefficients
from hap.cost_models.compute import parts_coefficients
from hap.cost_models.evaluate import ConversionCost, Evaluation
from hap.cost_models.memory import local_bytes
from hap.fabric import Array
from hap.placement import GroupSizes, Placement, Shard
from hap.plan import Strategy
from hap.search.milp import GB, MS, SEED, SMALLEST
from hap.search.prices import MOMENTS, Facts

Shares = tuple[float, ...]
STAY = 1e-4  # of the step, for a share of one that goes from one rank to another


def best_shares(
    facts: Facts,
    strategies: Mapping[str, Strategy],
    sizes: GroupSizes,
    evaluation: Evaluation,
    *,
    bundles: Sequence[Sequence[str]],
    fixed: Mapping[str, object],
    left_out: Sequence[int] = (),
    regather: bool = False,
) -> dict[str, Shares] | None:
    """Group -> shares, for every group of ``bundles`` that is used and not ``fixed``. None if no shares fit the memory.

    ``evaluation`` is that of ``strategies`` at ``sizes``; its conversions say which decomposition each collective
    takes.
    """
    program = _Program(facts, strategies, sizes, evaluation, bundles, fixed, left_out, regather)
    return program.solve()


@dataclass
class _Lines:
    """One affine expression of the shares per rank: constant (N,) and a coefficient (N,) per group."""

    constant: Array
    slopes: dict[str, Array] = field(default_factory=dict)

    def add(self, group: str | None, fixed: Array, slope: Array) -> None:
        self.constant = self.constant + fixed
        if group is not None:
            self.slopes[group] = self.slopes.get(group, np.zeros_like(slope)) + slope


@dataclass
class _Program:
    facts: Facts
    strategies: Mapping[str, Strategy]
    sizes: GroupSizes
    evaluation: Evaluation
    bundles: Sequence[Sequence[str]]
    fixed: Mapping[str, object]
    left_out: Sequence[int]
    regather: bool

    def __post_init__(self) -> None:
        self.n = self.facts.cluster.world_size
        self.here = {g: np.array(s, dtype=np.float64) / sum(s) for g, s in self.sizes.items()}
        self.model = mathopt.Model(name="shares")
        self._shares()
        self._stages()
        self._memory()

    def _shares(self) -> None:
        self.of: dict[str, list[mathopt.Variable]] = {}
        for bundle in self.bundles:
            if any(name in self.fixed for name in bundle):
                continue
            upper = [0.0 if r in self.left_out else 1.0 for r in range(self.n)]
            terms = [self.model.add_variable(lb=0, ub=upper[r], name=f"share[{bundle[0]},{r}]") for r in range(self.n)]
            row = self.model.add_linear_constraint(lb=1, ub=1, name=f"whole[{bundle[0]}]")
            for variable in terms:
                row.set_coefficient(variable, 1.0)
            self.of.update((name, terms) for name in bundle)
            self._stay(bundle[0], terms)

    def _stay(self, group: str, terms: Sequence[mathopt.Variable]) -> None:
        for r, share in enumerate(terms):
            away, here = self.model.add_variable(lb=0, name=f"away[{group},{r}]"), float(self.here[group][r])
            self.model.objective.set_linear_coefficient(away, STAY * self.evaluation.step_s * MS / 2)
            for sign in (1.0, -1.0):
                row = self.model.add_linear_constraint(lb=-sign * here, name=f"away[{group},{r},{sign:+.0f}]")
                row.set_coefficient(away, 1.0)
                row.set_coefficient(share, -sign)

    def _stages(self) -> None:
        """The program in order, cut where ``evaluate`` cuts it."""
        at: dict[str, list[ConversionCost]] = {}
        for cost in self.evaluation.conversions:
            at.setdefault(cost.need.before or f"after {cost.need.value.node}", []).append(cost)
        stage, update, number = self._lines(), self._lines(), 0
        for node in self.facts.graph.nodes:
            for moment in (node.name, f"after {node.name}"):
                for cost in at.get(moment, ()):
                    if cost.need.collective == "slice":
                        self._slice(stage, cost)
                    else:
                        self._maximum(f"stage[{number}]", stage)
                        self._collective(f"wire[{number}]", cost)
                        stage, number = self._lines(), number + 1
                if moment == node.name and node.is_source:
                    self._update(update, node.name)
                elif moment == node.name:
                    self._node(stage, node.name)
        for group, slope in update.slopes.items():
            stage.add(group, np.zeros(self.n), slope)
        stage.add(None, update.constant, np.zeros(self.n))
        self._maximum(f"stage[{number}]", stage)

    def _lines(self) -> _Lines:
        return _Lines(np.zeros(self.n))

    def _node(self, lines: _Lines, name: str) -> None:
        parts = self.facts.parts(name, self.strategies[name])
        here = np.ones(self.n) if parts.group is None else self.here[parts.group]
        pairs = [
            (0.0, 0.0)
            if parts.idle_when_empty and r in self.left_out
            else parts_coefficients(parts, device, at_share=float(here[r]))
            for r, device in enumerate(self.facts.cluster.devices)
        ]
        fixed, slope = (np.array(column) for column in zip(*pairs, strict=True))
        lines.add(parts.group, fixed if parts.group else fixed + slope, slope)

    def _update(self, lines: _Lines, name: str) -> None:
        placement = self.strategies[name].outputs[0]
        if not isinstance(placement, Shard):
            lines.add(None, self.facts.update_s(name, self.strategies[name], self.sizes), np.zeros(self.n))
            return
        everything = {placement.group: (placement.n,) * self.n}
        lines.add(placement.group, np.zeros(self.n), self.facts.update_s(name, self.strategies[name], everything))

    def _slice(self, lines: _Lines, cost: ConversionCost) -> None:
        stage = self._form(cost)[1][0]
        assert isinstance(cost.need.target, Shard)
        lines.add(cost.need.target.group, stage.constant, np.diag(stage.by_target))

    def _form(self, cost: ConversionCost) -> tuple[float, tuple[Stage, ...]]:
        need, cluster = cost.need, self.facts.cluster
        form = collective_coefficients(
            need.collective, cost.decomposition, cost.nbytes, need.source, need.target, cluster, sizes=self.sizes
        )
        return form.constant_s, form.stages

    def _collective(self, label: str, cost: ConversionCost) -> None:
        """One variable per stage of the collective, above each of its rows. The constant does not matter."""
        for number, stage in enumerate(self._form(cost)[1]):
            if not stage.by_source.any() and not stage.by_target.any():
                continue
            wire = self._minimised(f"{label}.{number}")
            for j, name in enumerate(stage.names):
                terms = _Terms(float(stage.constant[j]))
                for placement, by in ((cost.need.source, stage.by_source[j]), (cost.need.target, stage.by_target[j])):
                    self._extend(terms, placement, by)
                self._above(f"{label}.{number}[{name}]", wire, terms)

    def _maximum(self, label: str, lines: _Lines) -> None:
        """A minimised variable above the line of every rank."""
        top = self._minimised(label)
        for r in range(self.n):
            terms = _Terms(float(lines.constant[r]))
            for group, slope in lines.slopes.items():
                terms.add(self._share(group, r), float(slope[r]))
            self._above(f"{label}[{r}]", top, terms)

    def _extend(self, terms: _Terms, placement: Placement, coefficients: Array) -> None:
        for r in range(self.n):
            if isinstance(placement, Shard):
                terms.add(self._share(placement.group, r), float(coefficients[r]))
            else:
                terms.constant += float(coefficients[r])

    def _share(self, group: str, r: int) -> mathopt.Variable | float:
        """The variable, or the number where the group is fixed."""
        return self.of[group][r] if group in self.of else float(self.here[group][r])

    def _minimised(self, name: str) -> mathopt.Variable:
        variable = self.model.add_variable(lb=0, name=name)
        self.model.objective.set_linear_coefficient(variable, 1.0)
        return variable

    def _above(self, name: str, top: mathopt.Variable, terms: _Terms) -> None:
        row = self.model.add_linear_constraint(lb=terms.constant * MS, name=name)
        row.set_coefficient(top, 1.0)
        for variable, seconds in terms.coefficients.items():
            if abs(seconds * MS) >= SMALLEST:
                row.set_coefficient(variable, -seconds * MS)

    def _memory(self) -> None:
        """Rows of what is held, moved up or down so that they agree with the ledger's peak at the present sizes."""
        held = [_Lines(np.zeros(self.n)) for _ in range(MOMENTS)]
        for name, strategy in self.strategies.items():
            for placement, nbytes, moments in self.facts.held(name, strategy):
                self._hold(held, placement, nbytes, moments)
        for cost in self.evaluation.conversions:
            if cost.need.value not in self.facts.homes:
                again = self.regather and self.facts.graph.by_name[cost.need.value.node].op == "parameter"
                alive = self.facts.copy_alive(cost.need.value, cost.need.phase if again else "")
                self._hold(held, cost.need.target, cost.nbytes, alive)
        now = np.array([h.constant + sum(s * self.here[g] for g, s in h.slopes.items()) for h in held])
        error = np.array(self.evaluation.memory_bytes) - now.max(axis=0)
        for t, lines in enumerate(held):
            for r in range(self.n):
                room = self.evaluation.usable_bytes[r] - float(lines.constant[r]) - float(error[r])
                terms = _Terms(0.0)
                for group, per_share in lines.slopes.items():
                    terms.add(self._share(group, r), float(per_share[r]))
                row = self.model.add_linear_constraint(ub=(room - terms.constant) * GB, name=f"memory[{r},{t}]")
                for variable, held_per_share in terms.coefficients.items():
                    if abs(held_per_share * GB) >= SMALLEST:
                        row.set_coefficient(variable, held_per_share * GB)

    def _hold(self, held: Sequence[_Lines], placement: Placement, nbytes: int, moments: Array) -> None:
        zeros = np.zeros(self.n)
        for t, lines in enumerate(held):
            if moments[t, 0] and isinstance(placement, Shard):
                lines.add(placement.group, zeros, zeros + nbytes)
            elif moments[t, 0]:
                lines.add(None, local_bytes(nbytes, placement, self.sizes, self.n), zeros)

    def solve(self) -> dict[str, Shares] | None:
        parameters = mathopt.SolveParameters(random_seed=SEED)
        result = mathopt.solve(self.model, mathopt.SolverType.GLOP, params=parameters)
        if not result.has_primal_feasible_solution():
            return None
        values = result.variable_values()
        return {name: tuple(max(0.0, values[v]) for v in terms) for name, terms in self.of.items()}


@dataclass
class _Terms:
    """constant + sum of coefficient x variable."""

    constant: float
    coefficients: dict[mathopt.Variable, float] = field(default_factory=dict)

    def add(self, what: mathopt.Variable | float, coefficient: float) -> None:
        if isinstance(what, float):
            self.constant += coefficient * what
        else:
            self.coefficients[what] = self.coefficients.get(what, 0.0) + coefficient
