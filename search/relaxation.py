"""A lower bound of the cost model's step time that counts communication: over all strategies and all shares.

``bound`` proves, for weights w of the ranks, that a node under strategy s takes at least ``line(s)`` seconds of a step,
whatever the shares. Here every conversion is added with the least that any decomposition takes for any shares, and
strategies have to agree:

    T >= sum_n line[n, s(n)] + sum of the conversions that s implies, each at its least                      (joint)

whose minimum over s is a program in the flow form of ``milp``. Its LP relaxation is solved for all nodes at once by
adding up its rows over what looks alike, which can only make the minimum smaller: so the bound holds.

    x[a,i] >= 0           of the nodes of type a (colour after R rounds, and what tells calls apart that were measured
                          each), the fraction that takes option i
    F[v,k,p,q] >= 0       of the values v (colour of the producer after R - 1 rounds, which output, and of one of many
                          who reads it, in colours after R - 2), how many are read by slot k (the reader's colour after
                          R - 2) in q when they were produced in p
    E[v,p,q] >= 0         how many more are converted from p to q than the first slot, f, reads so, which come to
                          C[v,p,q] = E[v,p,q] + F[v,f,p,q] / m[v,f]

    one:      sum_i x[a,i] = 1
    produced: sum_q F[v,k,p,q] = m[v,k] sum_{a in v, i gives p} n[v,a] x[a,i]     m: such reads of each of these values,
                                                                                  n: of which so many are made by a's
    wanted:   sum_p F[v,k,p,q] = sum_{a in k, j wants q} |a| x[a,j]
    shared:   m[v,k] C[v,p,q] >= F[v,k,p,q]                                             for every other slot k
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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from ortools.math_opt import solution_pb2

from hap.conversion import collective_kind
from hap.cost_models.memory import usable_bytes
from hap.cost_models.optimizers import optimizer_state_bytes
from hap.cost_models.profile import MeasuredDevice
from hap.cost_models.sequence import ConversionCost
from hap.placement import Placement, Shard
from hap.search.bound import Line, device_classes, line_seconds, node_line, weighted_bound
from hap.search.flows import Flows
from hap.search.infeasible import gradient_bytes
from hap.search.least import Least
from hap.search.milp import GB, MS
from hap.search.prices import Facts
from hap.search.protos import dual_steps
from hap.search.rows import Rows
from hap.search.saved import saved_bytes
from hap.search.wires import ClassForms, RankClasses

STEPS = dual_steps()
SAFETY = 1e-6  # of the bound: what the solver's tolerances may be worth


@dataclass(frozen=True)
class LowerBound:
    """``seconds`` is proved; ``compute_s`` of it without any communication; ``variables`` of the program."""

    seconds: float
    compute_s: float
    variables: int


def lower_bound(facts: Facts, others: Sequence[Facts] = ()) -> LowerBound:
    """The bound. ``others``: of other clusters, of which it is known."""
    separate, weights = weighted_bound(facts)
    if not separate.menus:
        return LowerBound(0.0, 0.0, 0)
    beside_s = around_s(facts, weights)
    compute_s = separate.seconds(weights) + beside_s
    if facts.cluster.world_size == 1:
        return LowerBound(compute_s, compute_s, 0)
    relaxed = relaxation(facts)
    relaxed.begin_like(map(relaxation, reversed(others)))
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


class Relaxation(Rows):
    """See the module docstring. Variables are named as there."""

    def __init__(self, facts: Facts, weights: Sequence[float], flows: Flows | None = None) -> None:
        """``flows``: other ones than those of the facts."""
        flows = Flows.of(facts) if flows is None else flows
        super().__init__(flows)
        self.flows = flows
        self.facts, self.least = facts, Least.of(facts)
        self.slices = ClassForms(facts.cluster, RankClasses.find(facts.cluster))
        self.devices, counts = device_classes(facts.cluster)
        self.weight = np.array(weights) / float(np.array(weights) @ np.array(counts))
        self.many = self.weight * np.array(counts)
        self._known: dict[Line, float] = {}
        self._cut: dict[int, float] = {}  # seconds of a slice, by the bytes of the whole
        self.options, self.conversions, self.transports = flows.options, flows.conversions, flows.transports
        self.x, self.count, self.first, self.fine = flows.x, flows.count, flows.first, flows.fine
        seconds: dict[object, float] = {}
        for (variable, count, name, option), kind in zip(self.options, flows.kinds, strict=True):
            if kind not in seconds:
                seconds[kind] = self.node_s(name, option)
            self.cost[variable] = count * seconds[kind] * MS
        different, numbers = flows.prices
        prices = np.array([self.conversion_s(p.nbytes, p.source, p.target) for p in different])
        for paid, ms in zip(self.conversions, (flows.units * prices[numbers] * MS).tolist(), strict=True):
            self.cost[paid.variable] = ms
        self._state()
        self._start: solution_pb2.BasisProto | None = None

    def node_s(self, name: str, option: int) -> float:
        """What a node takes at least under one of its strategies, whatever the shares."""
        line = node_line(self.facts, name, self.facts.candidates[name][option], self.devices)
        if line not in self._known:
            self._known[line] = line_seconds(line, self.weight, self.many)
        return self._known[line]

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

    def of_plan_s(self, picks: Sequence[int], conversions: Iterable[ConversionCost]) -> float:
        """What a plan comes to here, whose conversions these are. ``picks``: see ``Found.picks``."""
        calls_s = sum(self.node_s(name, pick) for name, pick in zip(self.facts.candidates, picks, strict=True))
        part = self.facts.batches.part
        ends = ((c, c.need.source, c.need.target) for c in conversions)
        return calls_s + sum(part(c.need.value) * self.conversion_s(c.nbytes, *both) for c, *both in ends)

    def _state(self) -> None:
        """All ranks' memory: at the end of the step parameters, their gradients and the optimizer's state; between both
        passes what they have gathered instead of the gradients."""
        graph, n = self.facts.graph, self.facts.cluster.world_size
        flows, parameters = self.flows, {n.target: n.name for n in graph.sources("parameter")}
        kept = [(variable, nbytes * n * GB) for variable, nbytes in flows.kept]
        ending, between, gradients = [], list(kept), dict[int, float]()  # of one parameter of a type, at least
        for target, nbytes in gradient_bytes(graph).items():
            a = self.fine[parameters[target]]
            gradients[a] = min(gradients.get(a, nbytes), nbytes)
        for a, name in self.first.items():
            node = graph.by_name[name]
            if node.op != "parameter":
                continue
            trained = node.target in graph.gradients
            state = optimizer_state_bytes(self.facts.optimizer, node.meta.nbytes) if trained else 0
            gradient = gradients.get(a, 0.0)
            for variable, strategy in zip(self.x[a], self.facts.candidates[name], strict=True):
                copies = self.count[a] * (1 if isinstance(strategy.outputs[0], Shard) else n)
                between.append((variable, copies * (node.meta.nbytes + state) * GB))
                ending.append((variable, copies * (node.meta.nbytes + state + gradient) * GB))
        saved = {a: held for a, name in self.first.items() if (held := saved_bytes(graph, flows.parts, name))}
        room = sum(usable_bytes(d.memory_bytes) for d in self.facts.cluster.devices)
        left = room - sum(self.count[a] * held for a, held in saved.items())
        self._row("state", -np.inf, room * GB, ending)
        if not flows.crowded or flows.most_kept * n * GB + sum(k for _, k in between[len(kept) :]) <= left * GB:
            return  # whatever is chosen, it fits
        for a, held in saved.items():
            least = min(self.node_s(self.first[a], i) for i in range(len(self.x[a])))
            again = self._variable("Z", self.count[a] * least)
            self.upper[again] = 1.0
            between.append((again, -self.count[a] * held * GB))
        self._row("between", -np.inf, left * GB, between)

    def begin_like(self, others: Iterable[Relaxation]) -> None:
        """It is solved from where the first of these ended that has as many rows and variables."""
        alike = (other for other in others if other.shape == self.shape)
        self._start = next((other.solver.basis for other in alike), None)

    @cached_property
    def seconds(self) -> float | None:
        """The minimum; None if the solver finds no optimum. The solver may be asked for others from then on."""
        solved = self.solver.solve(STEPS, start=self._start)
        if solved is None or not solved.is_optimal:
            return None
        return solved.bound / MS
