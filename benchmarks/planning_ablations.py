"""What each of the search's decisions is worth: every case planned again with one of them taken away.

    shares by FLOP/s       every group by the data sheet's rates
    even shares            every group alike on every device
    one segment            one share vector for all groups: the best of several, the free plan's own among them
    one way per collective padded all-gather and reduce-scatter, ring all-reduce, direct all-to-all: no choice of how
    no factor sending      no weight gradient is computed whole by all from gathered factors instead of being reduced

A plan is one whose program, as it runs, has the shortest step; the figure is how much longer that step is without.
None may be shorter. Beside it A* against the MILP: the same strategies' prices at fixed shares, both solved.

    python benchmarks/planning_ablations.py [--cases gpt2@mix-4,vgg19@mix-16] [--astar gpt2@mix-4]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from benchmarks.common import Report, parse
from benchmarks.planning_cases import captured, cluster
from hap.cluster import ClusterSpec
from hap.cost_models import collective
from hap.errors import HapError, InfeasibleError
from hap.graph import Graph, Value
from hap.placement import PARTIAL, REPLICATE, Shard
from hap.plan import Plan
from hap.rules.choices import Choices, choices
from hap.search import Pins, astar, milp, plan_graph
from hap.search.classes import find_classes
from hap.search.milp import make_skeleton
from hap.search.prices import Facts
from hap.search.rounding import round_shares
from hap.search.tables import Prices, Tables

NAME = "planning_ablations"
CASES = ("gpt2@mix-4", "vgg19@mix-4", "vgg19@mix-16")
ASTAR = ("vgg19@mix-4", "gpt2@mix-4", "vit@mix-16", "bert@mix-16")
PLAIN = {
    (kind, backend): (name,)
    for backend in ("nccl", "gloo")
    for kind, name in (("all_gather", "padded"), ("all_reduce", "ring"), ("reduce_scatter", "padded"))
}
MOST_VECTORS = 4
ROUNDING = 1e-6  # relative: a step that is shorter by more than this without a feature is counted

Ablation = Callable[[Choices, ClusterSpec, Plan], Plan]


# ---- what is taken away ----


def by_flops(found: Choices, spec: ClusterSpec, free: Plan) -> Plan:
    return plan_graph(found, spec, pins=Pins(ratios=tuple(d.tflops["float32"] for d in spec.devices)))


def even(found: Choices, spec: ClusterSpec, free: Plan) -> Plan:
    return plan_graph(found, spec, pins=Pins(ratios=(1.0,) * spec.world_size))


def one_segment(found: Choices, spec: ClusterSpec, free: Plan) -> Plan:
    """The best of plans with one vector each: those of the free plan's groups, by the data sheet, even."""
    vectors = [tuple(float(s) for s in g.sizes) for g in free.groups.values()]
    vectors += [tuple(d.tflops["float32"] for d in spec.devices), (1.0,) * spec.world_size]
    scaled = {tuple(round(x / sum(v), 2) for x in v): v for v in vectors}
    plans, refusals = [], []
    for vector in list(scaled.values())[:MOST_VECTORS]:
        try:
            plans.append(plan_graph(found, spec, pins=Pins(ratios=vector)))
        except InfeasibleError as e:
            refusals.append(e)
    if not plans:
        raise refusals[0]
    return min(plans, key=lambda p: p.predicted.as_run_s)


def one_way(found: Choices, spec: ClusterSpec, free: Plan) -> Plan:
    with plainest():
        return plan_graph(found, spec)


@contextmanager
def plainest() -> Iterator[None]:
    with mock.patch.dict(collective._DECOMPOSITIONS, PLAIN):  # type: ignore[arg-type]
        yield


def no_factors(found: Choices, spec: ClusterSpec, free: Plan) -> Plan:
    return plan_graph(without_factors(found), spec)


def without_factors(found: Choices) -> Choices:
    """A product that makes a gradient is reduced or sharded, never whole from whole factors, where it has a choice."""
    strategies = dict(found.strategies)
    for name in gradient_products(found.graph):
        kept = tuple(s for s in strategies[name] if s.outputs[0] != REPLICATE)
        if any(s.outputs[0] == PARTIAL or isinstance(s.outputs[0], Shard) for s in kept):
            strategies[name] = kept
    return replace(found, strategies=strategies)


def gradient_products(graph: Graph) -> list[str]:
    """Products whose value is a parameter's gradient, by itself or through views."""
    found, pending = {}, list(graph.gradients.values())
    while pending:
        value = pending.pop()
        node = graph.by_name[value.node]
        name = node.op.split(".")[1] if "." in node.op else ""
        if name in ("mm", "bmm", "convolution_backward"):
            found[node.name] = None
        elif name in ("view", "t", "transpose", "permute", "reshape", "squeeze", "unsqueeze", "_unsafe_view"):
            pending += [v for v in node.inputs if isinstance(v, Value)]
    return list(found)


ABLATIONS: Mapping[str, Ablation] = {
    "shares by FLOP/s": by_flops,
    "even shares": even,
    "one segment": one_segment,
    "one way per collective": one_way,
    "no factor sending": no_factors,
}


# ---- A* and the MILP ----


def compared(case: str) -> list[object]:
    """A row: seconds of the step that both find at shares by speed, and the seconds that each takes."""
    model, _, name = case.partition("@")
    spec = cluster(name)
    found = choices(captured(model, spec.world_size))
    candidates = {n: tuple(s) for n, s in found.strategies.items()}
    rates = tuple(d.tflops["float32"] for d in spec.devices)
    total = sum(rates)
    sizes = {g: round_shares(tuple(r / total for r in rates), group.n) for g, group in found.groups.items()}
    skeleton = make_skeleton(find_classes(found.graph, candidates))
    tables = Tables(Facts(found.graph, candidates, spec, "adamw"), skeleton, {})
    prices = Prices(tables, sizes, np.array([0.9 * d.memory_bytes for d in spec.devices]))
    times, solved = [], []
    for solve in (lambda: milp.choose(skeleton, prices, barriers=True, gap=1e-4), _astar(prices)):
        began = time.process_time()
        solved.append(solve())
        times.append(time.process_time() - began)
    one, other = solved
    if one is None or other is None:
        return [case, "nothing fits" if one is other else "differ", "", "", "", "", one is other]
    agree = math.isclose(one.objective_s, other.objective_s, rel_tol=3e-4)
    steps = (f"{one.objective_s * 1e3:.3f}", f"{other.objective_s * 1e3:.3f}")
    return [case, *steps, f"{times[0]:.2f}", f"{times[1]:.2f}", other.variables, agree]


def _astar(prices: Prices) -> Callable[[], milp.Choice | None]:
    return lambda: astar.choose(prices, barriers=True, nodes=20_000, gap=1e-4)


# ---- what is said ----


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(CASES), metavar="CASES")
    parser.add_argument("--astar", default=",".join(ASTAR), metavar="CASES")
    options = parse(NAME, "What each decision of the search is worth.", argv, parser)
    torch.set_num_threads(1)
    report = Report(NAME, "What each decision of the search is worth", options)
    rows, shorter = [], 0
    for case in options.extra.cases.split(",")[: 1 if options.quick else None]:
        model, _, name = case.partition("@")
        spec = cluster(name)
        found = choices(captured(model, spec.world_size))
        free = plan_graph(found, spec)
        cells = [case, f"{free.predicted.as_run_s * 1e3:.1f}"]
        for what, ablation in ABLATIONS.items():
            slower = _slower(ablation, found, spec, free)
            cells.append("no plan" if slower is None else f"{slower:+.1%}")
            if slower is not None:
                report.figure(f"slower with {what}, {case}", slower)
                shorter += slower < -ROUNDING
            print(case, what, cells[-1], file=sys.stderr, flush=True)
        rows.append(cells)
    report.figure("cases_where_a_feature_makes_a_plan_slower", shorter)
    report.table("How much longer the step is without", ["case", "step ms", *ABLATIONS], rows)
    both = [compared(case) for case in options.extra.astar.split(",")[: 1 if options.quick else None]]
    report.figure("astar_agrees_with_milp", sum(bool(row[-1]) for row in both))
    report.figure("astar_against_milp_cases", len(both))
    columns = ("case", "MILP's step ms", "A*'s step ms", "MILP CPU s", "A* CPU s", "states", "agree")
    report.table("A* against the MILP, shares by FLOP/s, every node waiting for its slowest rank", columns, both)
    report.write(None)
    return 0


def _slower(ablation: Ablation, found: Choices, spec: ClusterSpec, free: Plan) -> float | None:
    try:
        return ablation(found, spec, free).predicted.as_run_s / free.predicted.as_run_s - 1
    except HapError:
        return None


if __name__ == "__main__":
    sys.exit(main())
