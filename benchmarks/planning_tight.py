"""Planning where memory is nearly full: seconds, and each integer program with rows of memory by HiGHS alone beside it.

Multi-layer perceptrons of width 1024 on small clusters whose memory they nearly fill, four equal devices and drawn
unequal ones, and a small GPT-2: the rows of memory are knapsacks there, and decide everything. Every integer program
that the planner solves with such rows is solved once more, as it stands, by HiGHS alone, which the planner's clock does
not count: the seconds of both, in one run, program by program, and whether they found the same.

    python benchmarks/planning_tight.py [--quick]
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

from benchmarks.common import Options, Report, Spread, parse
from benchmarks.zoo_models import find
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.errors import InfeasibleError
from hap.plan import Plan
from hap.rules.choices import Choices, choices
from hap.search import milp, plan_graph
from hap.search.protos import HIGHS, Solution, branching, solve_once

NAME = "planning_tight"
WIDTH, BATCH, LAYERS = 1024, 1024, 6
EQUAL_MB = range(52, 77, 4)
DRAWN, SEED, QUICK = 6, 7, 2
AGREE = 1e-5  # relative: HiGHS alone is asked for the optimum to 1e-6, as the planner asks
NODE = "  - {{name: d{i}, devices: [{{name: d{i}, tflops: {{float32: {tflops}}}, memory: {memory}, "
NODE += "memory_bandwidth: 2TB/s}}], link: {{bandwidth: {network}, latency: 10us}}, "
NODE += "network: {{bandwidth: {network}, latency: 10us}}}}\n"


@dataclass
class Beside:
    """Seconds of every program with rows of memory, here and by HiGHS alone, and how far apart both optima are."""

    here_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)

    def solved(self, own: Callable[..., Solution | None]) -> Callable[..., Solution | None]:
        """In the place of ``milp._solved``."""

        def both(skeleton: Any, proto: Any, start: Any, gap: float, nodes: int) -> Solution | None:
            began = time.process_time()
            found = own(skeleton, proto, start, gap, nodes)
            ended = time.process_time()
            if len(proto.linear_constraints.ids) > len(skeleton.row_names):
                alone = solve_once(proto, HIGHS, branching(gap, nodes))
                self.alone_s.append(time.process_time() - ended)
                self.here_s.append(ended - began)
                assert (found is None) == (alone is None), "one finds a point where the other finds none"
                if found is not None and alone is not None:
                    self.apart.append(found.objective / alone.objective - 1)
            return found

        return both


@dataclass(frozen=True)
class Row:
    case: str
    planning_s: float
    plan: Plan | None
    beside: Beside


def perceptron(layers: int) -> Choices:
    with torch.device("meta"):
        steps = [step for _ in range(layers) for step in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        model, x = nn.Sequential(*steps[:-1]), torch.empty(BATCH, WIDTH)
    return choices(capture(model, x, loss_fn=nn.functional.mse_loss, example_targets=x, name="perceptron"))


def gpt2() -> Choices:
    case = find("gpt2").build("small")
    return choices(capture(case.model, case.inputs, loss_fn=case.loss_fn, example_targets=case.targets, name="gpt2"))


def devices(kinds: list[tuple[float, str]], network: str) -> ClusterSpec:
    """(TFLOP/s, memory) of each, a host of its own."""
    nodes = [NODE.format(i=i, tflops=t, memory=m, network=network) for i, (t, m) in enumerate(kinds)]
    return ClusterSpec.from_yaml("name: tight\nhosts:\n" + "".join(nodes))


def cases(quick: bool) -> Iterator[tuple[str, Choices, ClusterSpec]]:
    equal = list(EQUAL_MB)[: QUICK if quick else None]
    for mb in equal:
        yield f"{LAYERS} layers, 4 x {mb} MB", perceptron(LAYERS), devices([(10, f"{mb}MB")] * 4, "1GB/s")
    rng = random.Random(SEED)
    for _ in range(0 if quick else DRAWN):
        layers, n = rng.randint(4, 8), rng.choice([4, 6, 8])
        even_mb = layers * WIDTH * WIDTH * 16 / 1e6 / n  # parameters, gradients and AdamW's state, dealt out evenly
        kinds = [(rng.choice([4.0, 6.0, 8.0, 10.0]), round(even_mb * rng.uniform(1.6, 3.2) + 12)) for _ in range(3)]
        found = [(t, f"{mb}MB") for t, mb in (kinds[i % 3] for i in range(n))]
        yield f"{layers} layers, {n} unlike", perceptron(layers), devices(found, rng.choice(["1GB/s", "4GB/s"]))
    yield "small GPT-2, 4 x 2 MB", gpt2(), devices([(10, "2MB")] * 4, "1GB/s")
    if not quick:
        yield "small GPT-2, 2 + 1 + 1 MB", gpt2(), devices([(30, "2MB"), (10, "1MB"), (10, "1MB")], "1GB/s")


def plan(case: str, found: Choices, cluster: ClusterSpec) -> Row:
    beside = Beside()
    with mock.patch.object(milp, "_solved", beside.solved(milp._solved)):
        began = time.process_time()
        try:
            made: Plan | None = plan_graph(found, cluster)
        except InfeasibleError:
            made = None
        seconds = time.process_time() - began - sum(beside.alone_s)
    return Row(case, seconds, made, beside)


def main(options: Options) -> None:
    report = Report(NAME, "Planning where memory is nearly full", options)
    rows = []
    for case in cases(options.quick):
        rows.append(plan(*case))
        print(f"{case[0]}: {rows[-1].planning_s:.1f} s", file=sys.stderr, flush=True)
    ratios = [sum(r.beside.alone_s) / sum(r.beside.here_s) for r in rows if r.beside.here_s]
    apart = [a for r in rows for a in r.beside.apart]
    report.figure("planning_worst_s", max(r.planning_s for r in rows))
    report.figure("planning_median_s", statistics.median(r.planning_s for r in rows))
    report.figure("programs", sum(len(r.beside.here_s) for r in rows))
    report.figure("slowest_program_s", max(s for r in rows for s in r.beside.here_s))
    report.figure("slowest_program_alone_s", max(s for r in rows for s in r.beside.alone_s))
    report.figure("alone_over_here", statistics.median(ratios), Spread.of(ratios))
    report.figure("programs_longer_than_alone", sum(a > AGREE for a in apart))
    columns = ["case", "CPU s of planning", "programs", "of these s", "by HiGHS alone s", "step ms", "gap"]
    report.table("Planning, and its programs with rows of memory", columns, [_cells(r) for r in rows])
    report.write(None)


def _cells(row: Row) -> list[object]:
    p, b = row.plan, row.beside
    said = ["does not fit", ""] if p is None else [f"{1e3 * p.predicted.step_s:.3f}", f"{p.predicted.gap:.1%}"]
    return [row.case, f"{row.planning_s:.1f}", len(b.here_s), f"{sum(b.here_s):.1f}", f"{sum(b.alone_s):.1f}", *said]


if __name__ == "__main__":
    main(parse(NAME, "Planning where memory is nearly full: seconds, and the same programs by HiGHS alone."))
