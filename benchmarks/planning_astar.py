"""A* against exhaustive search and against the MILP, on random small steps and random unequal clusters.

A step has a forward and a backward part of matmuls, sums, transposes, ReLUs, additions and products over the real rule
table; a cluster has two to four devices of random speed, memory and links; the sizes of the groups are random too, zero
among them. Exhaustive search asks ``find_needs`` what each of all combinations of strategies implies and adds it up by
the clock's definition, with no code of the search but its prices.

    python benchmarks/planning_astar.py [--cases N]
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from benchmarks.common import Report, parse
from hap.cluster import ClusterSpec
from hap.conversion import find_needs
from hap.graph import Graph, Node, Phase, TensorMeta, Value, verify_graph
from hap.placement import GroupSizes, Placement
from hap.plan import Strategy
from hap.rules.choices import choices
from hap.search import milp
from hap.search.astar import synthesise
from hap.search.classes import Candidates
from hap.search.milp import Skeleton, make_skeleton
from hap.search.payers import NodePayer
from hap.search.prices import Facts
from hap.search.tables import Coefficients, Prices, Tables
from hap.search.theory import Bill, Clock, background_theory, bill_prices, unmerged

NAME = "planning_astar"
CLOCKS: tuple[Clock, ...] = ("node", "stage", "step")
MOST_COMBINATIONS = 20_000
TOLERANCE = 1e-6  # relative
SOLVER_S = 2e-9  # of the MILP: its rows, in milliseconds, hold up to 1e-6


@dataclass(frozen=True)
class Case:
    """A step, its candidates, a cluster, fixed sizes. ``memory`` of a device, in copies of all values."""

    seed: int
    graph: Graph
    candidates: Candidates
    cluster: ClusterSpec
    sizes: GroupSizes
    memory: float

    def priced(self) -> tuple[Skeleton, Prices]:
        facts = Facts(self.graph, self.candidates, self.cluster, "adamw")
        skeleton = make_skeleton(unmerged(self.graph, self.candidates))
        capacity = np.full(self.cluster.world_size, self._bytes())
        return skeleton, Prices(Tables(facts, skeleton, {}), self.sizes, capacity)

    def _bytes(self) -> float:
        """So much of what everything replicated would hold."""
        return self.memory * sum(m.nbytes for n in self.graph.nodes for m in n.outputs if m is not None)


# ---- random cases ----


class _Builder:
    """Nodes in order; values that may be read, by shape."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.nodes: list[Node] = []
        self.phase: Phase = "forward"

    def source(self, kind: str, name: str, *shape: int) -> Value:
        target = f"args.{name}" if kind == "input" else name
        self.nodes.append(Node(name, kind, outputs=(TensorMeta(shape, torch.float32),), target=target))
        return Value(name)

    def call(self, op: str, *args: Any, shape: Sequence[int]) -> Value:
        name = f"{op.split('.')[1]}_{len(self.nodes)}"
        meta = TensorMeta(tuple(shape), torch.float32)
        self.nodes.append(Node(name, op, args, outputs=(meta,), phase=self.phase))
        return Value(name)

    def shape(self, value: Value) -> tuple[int, ...]:
        return next(n.meta.shape for n in self.nodes if n.name == value.node)

    def grow(self, pool: list[Value]) -> Value:
        """One more operator on some of the values."""
        kind = self.rng.choice(("mm", "mm", "relu", "add", "mul", "t", "sum"))
        x = self.rng.choice(pool)
        a, b = self.shape(x)
        if kind == "mm" and (fitting := [y for y in pool if self.shape(y)[0] == b]):
            y = self.rng.choice(fitting)
            return self.call("aten.mm.default", x, y, shape=(a, self.shape(y)[1]))
        if kind in ("add", "mul"):
            y = self.rng.choice([y for y in pool if self.shape(y) == (a, b)])
            return self.call(f"aten.{kind}.Tensor", x, y, shape=(a, b))
        if kind == "t":
            return self.call("aten.t.default", x, shape=(b, a))
        if kind == "sum":
            return self.call("aten.sum.dim_IntList", x, (0,), True, shape=(1, b))
        return self.call("aten.relu.default", x, shape=(a, b))


def random_graph(rng: random.Random) -> Graph:
    """x (B, D), w (D, H), perhaps x2 (B, D); operators, a loss, and the gradient of w from whatever fits."""
    b = _Builder(rng)
    batch, wide, hidden = (rng.choice((2, 4, 6, 8, 12)) * 64 for _ in range(3))
    w = b.source("parameter", "w", wide, hidden)
    pool = [b.source("input", "x", batch, wide)]
    if rng.random() < 0.3:
        pool.append(b.source("input", "x2", batch, wide))
    y = b.call("aten.mm.default", pool[0], w, shape=(batch, hidden))
    pool += [w, y]
    for _ in range(rng.randint(0, 2)):
        pool.append(b.grow(pool))
    if rng.random() < 0.4:
        for _ in range(rng.randint(0, 3)):
            pool.append(b.grow(pool))
        loss = b.call("aten.sum.default", pool[-1], shape=())
        return Graph("random", tuple(b.nodes), loss, {})
    loss = b.call("aten.sum.default", pool[-1], shape=())
    b.phase = "backward"
    dy = rng.choice([v for v in pool if b.shape(v) == (batch, hidden)])
    xt = b.call("aten.t.default", pool[0], shape=(wide, batch))
    dw = b.call("aten.mm.default", xt, dy, shape=(wide, hidden))
    graph = Graph("random", tuple(b.nodes), loss, {"w": dw})
    verify_graph(graph)
    return graph


def random_cluster(rng: random.Random) -> ClusterSpec:
    """Two to four devices, some in one host."""
    hosts, left = "", rng.randint(2, 4)
    while left:
        count = rng.randint(1, left)
        device = f"tflops: {{float32: {rng.uniform(1, 20):.2f}}}, memory: 16GB, "
        device += f"memory_bandwidth: {rng.uniform(100, 900):.0f}GB/s, launch: {rng.choice((1, 5))}us"
        network = f"bandwidth: {10 ** rng.uniform(0.5, 2.5):.2f}Gbit/s, latency: {rng.choice((1, 10, 50))}us"
        hosts += f"  - name: h{left}\n    devices: [{{name: gpu, {device}, count: {count}}}]\n"
        hosts += f"    link: {rng.choice(('pcie3', 'pcie4'))}\n    network: {{{network}}}\n"
        left -= count
    return ClusterSpec.from_yaml(f"name: random\nbackend: {rng.choice(('nccl', 'gloo'))}\nhosts:\n{hosts}")


def random_case(seed: int, most: int = MOST_COMBINATIONS) -> Case:
    """The first random case of this seed that has at most so many combinations of strategies."""
    rng = random.Random(seed)
    while True:
        graph = random_graph(rng)
        found = choices(graph)
        if math.prod(len(s) for s in found.strategies.values()) > most:
            continue
        cluster = random_cluster(rng)
        sizes = {}
        for name, group in found.groups.items():
            cuts = sorted(rng.randint(0, group.n) for _ in range(cluster.world_size - 1))
            sizes[name] = tuple(b - a for a, b in itertools.pairwise((0, *cuts, group.n)))
        return Case(seed, graph, found.strategies, cluster, sizes, rng.choice((0.6, 0.8, 1.0, 10.0, 10.0, 10.0)))


# ---- exhaustive search ----


@dataclass(frozen=True)
class _Costs:
    """The prices of the search by what they are for."""

    coefficients: Coefficients
    nodes: dict[tuple[str, int], int]
    conversions: dict[tuple[Value, Placement, Placement], int]

    @classmethod
    def of(cls, skeleton: Bill, coefficients: Coefficients) -> _Costs:
        nodes, conversions = {}, {}
        for payer in skeleton.payers:
            if isinstance(payer, NodePayer):
                nodes[skeleton.classes.nodes[payer.node_class].members[0], payer.option] = payer.variables[0]
            else:
                conversions[payer.values[0], payer.sources[0], payer.targets[0]] = payer.variables[0]
        return cls(coefficients, nodes, conversions)


def exhaustive(case: Case, costs: _Costs) -> dict[Clock, float]:
    """The least seconds of all combinations by every clock; infinite if none fits."""
    names = [n.name for n in case.graph.nodes]
    every = itertools.product(*(range(len(case.candidates[n])) for n in names))
    seconds = (step_seconds(case, costs, dict(zip(names, picks, strict=True))) for picks in every)
    return dict(zip(CLOCKS, map(min, zip(*seconds, strict=True)), strict=True))


def step_seconds(case: Case, costs: _Costs, picks: dict[str, int]) -> tuple[float, ...]:
    """One combination by each clock's definition; infinite where something becomes partial, inputs disagree, or memory
    is exceeded."""
    strategies = {name: case.candidates[name][i] for name, i in picks.items()}
    program = list(_program(case, costs, picks, strategies))
    variables = [variable for variable, _ in program if variable is not None]
    if len(variables) < len(program) or not _inputs_agree(case, strategies):
        return (math.inf,) * len(CLOCKS)
    found = costs.coefficients
    if (found.held_bytes[:, :, variables].sum(axis=2) > found.capacity_bytes).any():
        return (math.inf,) * len(CLOCKS)
    together, alone = found.together_s[variables], found.compute_s[:, variables]
    stages, last = 0.0, 0
    for i, (_, collective) in enumerate(program):
        if collective:
            stages += float(alone[:, last:i].sum(axis=1).max()) + float(together[i])
            last = i
    stages += float(alone[:, last:].sum(axis=1).max())
    return float((together + alone.max(axis=0)).sum()), stages, float(together.sum() + alone.sum(axis=1).max())


def _program(
    case: Case, costs: _Costs, picks: dict[str, int], strategies: dict[str, Strategy]
) -> Iterator[tuple[int | None, bool]]:
    """(variable that pays, whether all ranks take part) in the program's order."""
    before: dict[str, list[Any]] = {}
    for need in find_needs(case.graph, strategies):
        before.setdefault(need.before or f"after {need.value.node}", []).append(need)
    for node in case.graph.nodes:
        for moment in (node.name, f"after {node.name}"):
            for need in before.get(moment, ()):
                key = (need.value, need.source, need.target)
                yield costs.conversions.get(key), key in costs.conversions and need.collective != "slice"
            if moment == node.name:
                yield costs.nodes[node.name, picks[node.name]], False


def _inputs_agree(case: Case, strategies: dict[str, Strategy]) -> bool:
    return len({str(strategies[n.name].outputs[0])[:1] for n in case.graph.sources("input")}) == 1


# ---- the comparison ----


@dataclass(frozen=True)
class Outcome:
    """Seconds by clock: of exhaustive search, of A*, of the MILP where it has that clock; infinite if nothing fits."""

    seed: int
    combinations: int
    every: dict[Clock, float]
    astar: dict[Clock, float]
    milp: dict[Clock, float]
    expanded: int
    start_gap: float  # of the bound at the start, clock "node"


def compare(case: Case) -> Outcome:
    skeleton, prices = case.priced()
    bill, itemised = bill_prices(prices)
    coefficients = itemised.coefficients()
    costs = _Costs.of(bill, coefficients)
    every, found, other = exhaustive(case, costs), dict[Clock, float](), dict[Clock, float]()
    expanded, gap = 0, 0.0
    for number, clock in enumerate(CLOCKS):
        synthesis = synthesise(background_theory(bill, coefficients, clock))
        found[clock] = math.inf if synthesis is None else synthesis.seconds
        if synthesis is not None:
            assert synthesis.proved
            names = [n.members[0] for n in skeleton.classes.nodes]
            again = step_seconds(case, costs, dict(zip(names, synthesis.picks, strict=True)))[number]
            assert math.isclose(again, synthesis.seconds, rel_tol=1e-9), (
                f"seed {case.seed}: {again} is not what was said"
            )
            expanded = max(expanded, synthesis.expanded)
            if clock == "node":
                gap = 1 - synthesis.start_bound_s / synthesis.seconds
        if clock != "stage":
            choice = milp.choose(skeleton, prices, barriers=clock == "node")
            other[clock] = math.inf if choice is None else choice.objective_s
    combinations = math.prod(len(s) for s in case.candidates.values())
    return Outcome(case.seed, combinations, every, found, other, expanded, gap)


def same(a: float, b: float, tolerance: float, least_s: float = 0.0) -> bool:
    return a == b or math.isclose(a, b, rel_tol=tolerance, abs_tol=least_s)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=0, metavar="N", help="default: 400, or 40 with --quick")
    options = parse(
        NAME, "A* against exhaustive search and the MILP on random small steps.", argv, parser, ("--cases",)
    )
    torch.set_num_threads(1)
    report = Report(NAME, "A* against exhaustive search and the MILP", options)
    began, outcomes = time.process_time(), []
    for seed in range(options.extra.cases or (40 if options.quick else 400)):
        outcomes.append(compare(random_case(seed)))
        if seed % 20 == 19:
            print(f"{seed + 1} cases, {time.process_time() - began:.0f} CPU s", file=sys.stderr, flush=True)
    report.figure("graphs", len(outcomes))
    report.figure("graphs_where_nothing_fits", sum(o.every["node"] == math.inf for o in outcomes))
    for clock in CLOCKS:
        equal = sum(same(o.astar[clock], o.every[clock], 1e-9) for o in outcomes)
        report.figure(f"astar_equals_exhaustive {clock}", equal)
    for clock in ("node", "step"):
        equal = sum(same(o.astar[clock], o.milp[clock], TOLERANCE, SOLVER_S) for o in outcomes)
        report.figure(f"astar_equals_milp {clock}", equal)
    report.figure("combinations", sum(o.combinations for o in outcomes))
    report.figure("most_states_expanded", max(o.expanded for o in outcomes))
    report.figure("worst_gap_of_the_bound_at_the_start", max(o.start_gap for o in outcomes))
    report.text(
        "Every graph is solved under three clocks: every instruction waits for its slowest rank (node), only "
        "collectives do (stage), nobody does (step). The MILP has the first and the last; it is taken for equal within "
        "the tolerance of its solver, 2 ns."
    )
    report.write(None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
