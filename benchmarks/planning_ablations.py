"""What each of the search's decisions is worth: every case planned again with one of them taken away.

    shares by FLOP/s       every group by the data sheet's rates
    even shares            every group alike on every device
    one segment            one share vector for all groups: the best of several, the free plan's own among them
    one way per collective padded all-gather and reduce-scatter, ring all-reduce, direct all-to-all: no choice of how
    no factor sending      no weight gradient is computed whole by all from gathered factors instead of being reduced
    no start on the fastest the search never begins with everything on the fastest kinds of devices

The figure is how much longer the step is without, by the clock that plans are chosen by: the program as it runs. None
may be shorter. A second table has the step with nothing overlapped, by which nothing is chosen. A third has plans in
which alike layers hold alike parameters alike (``search/mixing.py`` left out), plans in which both readers of a weight
are served together (``search/apart.py`` left out), plans that leave out all devices of a kind or none, and plans whose
collectives go in the order in which what they carry is made (nothing is urgent for ``codegen/passes``), and plans whose
calls run in the order of the backward pass (``search/postponing.py`` left out), and plans whose parameters are gathered
where the program of strategies has it (``search/gathers.py`` left out), or whose other values are converted there
(``search/sliding.py``), and plans whose shards are stored in the shares that were found with nothing overlapped
(``search/storing.py``), and plans for all devices, where slow devices may be left out. Beside it A* against the MILP:
the same strategies' prices at fixed shares, both solved.

    python benchmarks/planning_ablations.py [--cases gpt2@mix-4,vgg19@mix-16] [--astar gpt2@mix-4]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from benchmarks.common import Report, parse
from benchmarks.planning_cases import PER_DEVICE, SMALL, captured, cluster
from hap.cluster import ClusterSpec
from hap.codegen.passes.windows import Window
from hap.cost_models import collective
from hap.errors import HapError, InfeasibleError
from hap.graph import Graph, Value
from hap.placement import PARTIAL, REPLICATE, Shard
from hap.plan import Plan
from hap.rules.choices import Choices, choices
from hap.search import Pins, astar, milp, plan_graph
from hap.search.classes import find_classes
from hap.search.judge import TIE
from hap.search.milp import make_skeleton
from hap.search.prices import Facts
from hap.search.problem import Problem
from hap.search.refine import INPUT_TOLERANCE
from hap.search.rounding import round_shares
from hap.search.starts import Start, find_starts
from hap.search.subsets import slowest_kinds
from hap.search.tables import Prices, Tables

NAME = "planning_ablations"
CASES = tuple(f"{model}@{name}" for name in ("mix-4", "mix-16") for model in PER_DEVICE)
ASTAR = ("vgg19@mix-4", "gpt2@mix-4", "vit@mix-16", "bert@mix-16")
MOVED: tuple[str, ...] = (
    "gpt2@mix-4",
    "bert@mix-4",
    "gpt2@mix-16",
    "bert@mix-16",
    "hap_bert_moe@mix-16",
    "gpt2@hap",
    "hap_bert_moe@hap",
)
MOVED += ("gpt2@mix-128", "bert@mix-128")
MOVED += tuple(f"{model}@{name}" for model in ("vgg19", "resnet50", "unet") for name in ("mix-4", "mix-16"))
MOVED += ("vgg19@hap", "vgg19@mix-128", "bert@hap", "hap_bert_moe@mix-4", "hap_bert_moe@mix-128")
MOVED += tuple(f"vit@{name}" for name in SMALL)
UNMOVED = {  # what is left out: what is changed, and to what
    "parameters held alike": ("hap.search.planner.or_mixed", lambda _, best, overlapped_s: (best, overlapped_s)),
    "readers served together": ("hap.search.planner.or_apart", lambda _, best, overlapped_s: (best, overlapped_s)),
    "whole kinds left out": ("hap.search.fewer.fewer_hosts", lambda *of: list(slowest_kinds(*of))),
    "nothing postponed": ("hap.search.planner.or_postponed", lambda _, best, overlapped_s: (best, overlapped_s)),
    "gathers where found": ("hap.search.gathers._shorter", lambda _, start, found, seconds, *how: (found, seconds)),
    "stored as found": ("hap.search.planner.or_stored", lambda _, best, overlapped_s: (best, overlapped_s)),
    "conversions where found": ("hap.search.planner.or_slid", lambda _, best, overlapped_s: (best, overlapped_s)),
    "nothing urgent": ("hap.codegen.passes.windows.Window", lambda *fields: replace(Window(*fields), is_urgent=False)),
}
ALL_OF_THEM = "for all devices"
PLAIN = {
    (kind, backend): (name,)
    for backend in ("nccl", "gloo")
    for kind, name in (("all_gather", "padded"), ("all_reduce", "ring"), ("reduce_scatter", "padded"))
}
MOST_VECTORS = 4
ROUNDING = 2e-4  # relative: a step that is shorter by more than this without a feature is counted


@dataclass
class Case:
    """A model on a cluster, its plan, and what was planned at fixed shares."""

    found: Choices
    spec: ClusterSpec
    _at: dict[tuple[float, ...], Plan | InfeasibleError] = field(default_factory=dict)

    @classmethod
    def named(cls, name: str) -> Case:
        model, _, mix = name.partition("@")
        spec = cluster(mix)
        return cls(choices(captured(model, spec.world_size)), spec)

    @cached_property
    def free(self) -> Plan:
        return plan_graph(self.found, self.spec)

    @property
    def by_rates(self) -> tuple[float, ...]:
        return tuple(d.tflops["float32"] for d in self.spec.devices)

    @property
    def even(self) -> tuple[float, ...]:
        return (1.0,) * self.spec.world_size

    def at(self, ratios: tuple[float, ...]) -> Plan:
        if ratios not in self._at:
            try:
                self._at[ratios] = plan_graph(self.found, self.spec, pins=Pins(ratios=ratios))
            except InfeasibleError as e:
                self._at[ratios] = e
        plan = self._at[ratios]
        if isinstance(plan, InfeasibleError):
            raise plan
        return plan


Ablation = Callable[[Case], Plan]


# ---- what is taken away ----


def by_flops(case: Case) -> Plan:
    return case.at(case.by_rates)


def even(case: Case) -> Plan:
    return case.at(case.even)


def one_segment(case: Case) -> Plan:
    """The best of plans with one vector each: by the data sheet, even, those of the free plan's groups."""
    vectors = [case.by_rates, case.even]
    vectors += [tuple(float(s) for s in g.sizes) for g in case.free.groups.values()]
    different: dict[tuple[float, ...], tuple[float, ...]] = {}
    for vector in vectors:
        different.setdefault(tuple(round(x / sum(vector), 2) for x in vector), vector)
    plans, refusals = [], []
    for vector in list(different.values())[:MOST_VECTORS]:
        try:
            plans.append(case.at(vector))
        except InfeasibleError as e:
            refusals.append(e)
    if not plans:
        raise refusals[0]
    return min(plans, key=lambda p: p.predicted.as_run_s)


def one_way(case: Case) -> Plan:
    with plainest():
        return plan_graph(case.found, case.spec)


@contextmanager
def plainest() -> Iterator[None]:
    with mock.patch.dict(collective._DECOMPOSITIONS, PLAIN):
        yield


def no_factors(case: Case) -> Plan:
    return plan_graph(without_factors(case.found), case.spec)


def no_start_on_the_fastest(case: Case) -> Plan:
    def elsewhere(problem: Problem) -> list[Start]:
        return [start for start in find_starts(problem) if not start.left_out]

    with mock.patch("hap.search.planner.find_starts", elsewhere):
        return plan_graph(case.found, case.spec)


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
    found, pending = dict[str, None](), list(graph.gradients.values())
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
    "no start on the fastest": no_start_on_the_fastest,
}


def unmoved(name: str) -> tuple[Plan, dict[str, Plan]]:
    """The plan of a case on what is best left of its cluster; the same with one thing after another left out."""
    case, without = Case.named(name), dict[str, Plan]()
    for what, (changed, instead) in UNMOVED.items():
        with mock.patch(changed, instead):
            without[what] = plan_graph(case.found, case.spec, leave_out=True)
    without[ALL_OF_THEM] = case.free
    return plan_graph(case.found, case.spec, leave_out=True), without


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
    parser.add_argument("--moved", default=",".join(MOVED), metavar="CASES")
    parser.add_argument("--astar", default=",".join(ASTAR), metavar="CASES")
    options = parse(NAME, "What each decision of the search is worth.", argv, parser, ("--cases", "--moved", "--astar"))
    torch.set_num_threads(1)
    report = Report(NAME, "What each decision of the search is worth", options)
    as_run: list[list[str]] = []
    alone: list[list[str]] = []
    shorter: dict[str, float] = {}
    for name in options.extra.cases.split(",")[: 1 if options.quick else None]:
        case = Case.named(name)
        as_run.append([name, f"{case.free.predicted.as_run_s * 1e3:.1f}"])
        alone.append([name, f"{case.free.predicted.step_s * 1e3:.1f}"])
        for what, ablation in ABLATIONS.items():
            slower = _slower(ablation, case)
            as_run[-1].append("no plan" if slower is None else f"{slower.as_run:+.2%}")
            alone[-1].append("no plan" if slower is None else f"{slower.alone:+.2%}")
            print(name, what, as_run[-1][-1], alone[-1][-1], file=sys.stderr, flush=True)
            if slower is not None:
                report.figure(f"slower with {what}, {name}", slower.as_run)
                shorter[f"{what}, {name}"] = slower.as_run
    last = options.extra.moved.split(",")[: 1 if options.quick else None]
    moved = [_moved_row(report, name, shorter) for name in last]
    named = [what for what, longer in shorter.items() if longer < -ROUNDING]
    report.figure("cases_where_a_feature_makes_a_plan_slower", len(named))
    report.figure("most_that_a_feature_makes_a_plan_slower", -min(0.0, *shorter.values()))
    report.table("How much longer the step as run is without", ["case", "step ms", *ABLATIONS], as_run)
    report.text(
        f"Plans are chosen by this clock: the program as it runs, collectives beside compute. Steps that differ by "
        f"less than {TIE:.0%} are not told apart there (the plan with fewer conversions is taken), and inputs are "
        f"dealt out where that costs at most {INPUT_TOLERANCE:.0%}: what is below that is not what a decision is "
        f"worth. Shorter without by over {ROUNDING:.2%}, here and in the third table: {'; '.join(named) or 'none'}."
    )
    report.table("The same plans, nothing overlapped", ["case", "step ms", *ABLATIONS], alone)
    report.text(
        "By this clock no plan is chosen: a plan may be longer here that is shorter as it runs, and a minus says so."
    )
    columns = ("case", "ms", *(column for what in (*UNMOVED, ALL_OF_THEM) for column in (what, "longer")))
    report.table("What is changed last: the step as run", columns, moved)
    both = [compared(case) for case in options.extra.astar.split(",")[: 1 if options.quick else None]]
    report.figure("astar_agrees_with_milp", sum(bool(row[-1]) for row in both))
    report.figure("astar_against_milp_cases", len(both))
    columns = ("case", "MILP's step ms", "A*'s step ms", "MILP CPU s", "A* CPU s", "states", "agree")
    report.table("A* against the MILP, shares by FLOP/s, every node waiting for its slowest rank", columns, both)
    report.write(None)
    return 0


def _moved_row(report: Report, name: str, shorter: dict[str, float]) -> list[str]:
    """``shorter``: by which part the step is longer without each, to be added to."""
    plan, others = unmoved(name)
    row = [name, f"{plan.predicted.as_run_s * 1e3:.1f}"]
    for what, other in others.items():
        longer = other.predicted.as_run_s / plan.predicted.as_run_s - 1
        report.figure(f"slower with {what}, {name}", longer)
        shorter[f"{what}, {name}"] = longer
        row += [f"{other.predicted.as_run_s * 1e3:.1f}", f"{longer:+.2%}"]
    return row


class _Slower(NamedTuple):
    """By how much of the free plan's step, as run and with nothing overlapped."""

    as_run: float
    alone: float


def _slower(ablation: Ablation, case: Case) -> _Slower | None:
    try:
        without, free = ablation(case).predicted, case.free.predicted
    except HapError:
        return None
    return _Slower(without.as_run_s / free.as_run_s - 1, without.step_s / free.step_s - 1)


if __name__ == "__main__":
    sys.exit(main())
