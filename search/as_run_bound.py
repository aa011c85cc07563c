"""What a step takes at least as it is run, its collectives bundled and beside compute, over all strategies and shares.

A program is played with one clock for each rank and one wire (``score``). Whatever is beside what, no rank ends before
it has made all of its calls, and packed and joined what it sends, and the wire not before it has carried everything:

    T >= max_r compute[r]  >=  sum_n line[n, s(n)] + sum packing(p, q, bytes) C[v,p,q]         (compute)
    T >= wire              >=  sum wire(p, q, bytes) C[v,p,q]                                    (wire)

with the weights, lines, variables and rows of ``relaxation``. For any lambda in [0, 1]

    T  >=  min over the relaxation's points of  lambda compute + (1 - lambda) wire

and the lambda that makes it largest is found by cutting planes: every solution is a line in lambda, which bounds what
any lambda can gain from above. The passes may fold a bias into its product, with a view between the two, zeros into
what is written among them, and the cast that widens a sum over hosts into the sum, so what may be such a call counts as
nothing. They bundle what is small: a bundle of no more than ``LIMIT_BYTES`` costs, of its members, each the part that
its bytes are of that limit. What an all-to-all between shards carries may be nothing; its latency and its copies count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hap.codegen.passes.bucket import LIMIT_BYTES
from hap.conversion import collective_kind
from hap.cost_models.collective import candidates, collective_coefficients
from hap.cost_models.profile import CalibratedCluster
from hap.fabric import Array
from hap.graph import CAST, Graph, Node, Value
from hap.hosts_sum import HOSTS_SUM
from hap.plan import Collective
from hap.search.bound import computes_like
from hap.search.least import ends_of, least_curve, stage_least_s
from hap.search.milp import MS
from hap.search.prices import Facts
from hap.search.protos import DUAL_STEPS, KeptSolver
from hap.search.relaxation import SAFETY, Relaxation, around_s, relaxation
from hap.search.score import flat_copies, packing_calls
from hap.search.wires import UNIT_BYTES

SOLVED = 5  # programs
WORTH = 1e-3  # of the bound: no further lambda is tried for less
ADD, VIEW = "aten.add.Tensor", "aten.view.default"


def as_run_bound_s(facts: Facts) -> float | None:
    """Seconds; None if the solver finds no optimum. Of steps of one batch. Of measured collectives it is not known what
    bundles of other sizes take, so there it is of computing alone."""
    assert facts.batches.count == 1, "every conversion is priced whole"
    relaxed = relaxation(facts)
    if relaxed.seconds is None:
        return None
    solver = KeptSolver(relaxed.program())  # of its own: others go on from where the relaxation's ended
    start = relaxed.solver.basis
    compute, wire = Streams(relaxed).costs()
    points: list[tuple[float, float]] = []  # of solutions: compute and wire, ms
    best_ms, part = 0.0, 1.0
    for _ in range(SOLVED):
        solver.minimise(part * compute + (1 - part) * wire)
        solved = solver.solve(DUAL_STEPS, start=start)
        if solved is None or not solved.is_optimal:
            break
        start = None
        best_ms = max(best_ms, solved.bound)
        points.append((float(compute @ solved.values), float(wire @ solved.values)))
        promised_ms, part = _most_promising(points)
        if promised_ms <= best_ms * (1 + WORTH):
            break
    if not points:
        return None
    return (best_ms / MS + around_s(facts, relaxed.weight.tolist())) * (1 - SAFETY)


def _most_promising(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The most that a lambda can come to by the lines so far, and that lambda."""
    crossings = [
        (w2 - w1) / slope
        for i, (c1, w1) in enumerate(points)
        for c2, w2 in points[:i]
        if (slope := (c1 - w1) - (c2 - w2)) != 0
    ]
    tried = [1.0, 0.0, *(x for x in crossings if 0 < x < 1)]
    return max((min(x * c + (1 - x) * w for c, w in points), x) for x in tried)


def may_be_folded(graph: Graph, node: Node) -> bool:
    """Whether it adds a bias to a product, stands between the two as a view, makes zeros that something is written
    among, or widens a sum over hosts, as far as can be told before it is known what is in between."""
    if node.op == VIEW:
        return any(user.op == ADD and may_be_folded(graph, user) for user in _readers(graph, node))
    if node.op == CAST:
        return graph.by_name[node.inputs[0].node].op == HOSTS_SUM
    if node.op == "aten.zeros_like.default":
        return any(user.op == "aten.scatter.src" for user in _readers(graph, node))
    if node.op != ADD or len(node.inputs) != 2:
        return False
    product, bias = (graph.by_name[v.node] for v in node.inputs)
    if product.op == VIEW:
        product = graph.by_name[product.inputs[0].node]
    return product.op == "aten.mm.default" and len(graph.meta(node.inputs[1]).shape) == 1 and bias is not product


def _readers(graph: Graph, node: Node) -> list[Node]:
    return [user for user, _ in graph.users.get(Value(node.name, 0), ())]


@dataclass(eq=False)
class Streams:
    """What the relaxation's variables cost either stream."""

    relaxed: Relaxation
    _packing: dict[Collective, float] = field(default_factory=dict)  # seconds a byte
    _curves: dict[Collective, Callable[[int], float]] = field(default_factory=dict)  # seconds of the wire, by bytes

    def __post_init__(self) -> None:
        self.facts, self.cluster = self.relaxed.facts, self.relaxed.facts.cluster
        kinds = [computes_like(d) for d in self.relaxed.devices]
        of = [kinds.index(computes_like(d)) for d in self.cluster.devices]
        self.weights: Array = self.relaxed.weight[of]  # (N,), together one
        self.launch_s = float(self.weights @ np.array([d.launch_s for d in self.cluster.devices]))

    def costs(self) -> tuple[Array, Array]:
        """(V,) each: compute and wire, in ms."""
        relaxed, free = self.relaxed, self._free()
        compute, wire = np.zeros((2, len(relaxed.cost)))
        for v, count, name, option in relaxed.options:
            if relaxed.fine[name] not in free:
                compute[v] = count * relaxed.node_s(name, option) * MS
        if not isinstance(self.cluster, CalibratedCluster):
            for v, each, nbytes, source, target in relaxed.conversions:
                kind = collective_kind(source, target)
                if kind != "slice":
                    compute[v] += self.packing_s(kind, nbytes) * MS / each
                    wire[v] += self.wire_s(kind, nbytes) * MS / each
        return compute, wire

    def _free(self) -> frozenset[int]:
        """The types of which some call may be folded into another, or is on a wire of its own."""
        graph = self.facts.graph
        free = (n.name for n in graph.nodes if n.op == HOSTS_SUM or may_be_folded(graph, n))
        return frozenset(self.relaxed.fine[name] for name in free)

    def packing_s(self, kind: Collective, nbytes: int) -> float:
        """Of the ranks, weighted: what is copied, the value's own calls, and its part of the collective's."""
        if kind not in self._packing:
            copies = []
            for how in candidates(kind, self.cluster):
                form = collective_coefficients(kind, how, UNIT_BYTES, *ends_of(kind), self.cluster)
                copies.append(sum(stage_least_s(s, self.weights) for s in form.stages if s.in_memory))
            flat = float(self.weights @ flat_copies(kind, self.cluster.devices))
            self._packing[kind] = min(copies) / UNIT_BYTES + flat
        return self._packing[kind] * nbytes + self._calls(kind, nbytes) * self.launch_s

    def _calls(self, kind: Collective, nbytes: int) -> float:
        """Alone, or as a part of the largest bundle."""
        ranks = self.cluster.world_size
        alone, beside = packing_calls(kind, 1, ranks), packing_calls(kind, 3, ranks) - packing_calls(kind, 2, ranks)
        return min(alone, beside + packing_calls(kind, 0, ranks) * _part(nbytes))

    def wire_s(self, kind: Collective, nbytes: int) -> float:
        """By the fastest way of ``nbytes``, or of the largest bundle that it may be part of."""
        if kind not in self._curves:
            may_be_nothing = kind == "all_to_all"
            self._curves[kind] = least_curve(kind, self.cluster, lambda s: not (s.in_memory or may_be_nothing))
        return _part(nbytes) * self._curves[kind](max(nbytes, LIMIT_BYTES))


def _part(nbytes: int) -> float:
    """Of a collective that a value is at least: it may be bundled with others, up to ``LIMIT_BYTES``."""
    return min(1.0, nbytes / LIMIT_BYTES)
