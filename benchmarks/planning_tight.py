"""Planning where memory is nearly full: seconds, and each integer program with rows of memory by HiGHS alone beside it.

Multi-layer perceptrons of width 1024 on small clusters whose memory they nearly fill, four equal devices and drawn
unequal ones, and a small GPT-2: the rows of memory are knapsacks there, and decide everything. Every integer program
that the planner solves with such rows is solved once more, as it stands, by HiGHS alone, which the planner's clock does
not count: the seconds of both, in one run, program by program, and whether they found the same. The one of every case
that took the planner longest is then given to CP-SAT for some seconds.

The planner looks for what costs less than the best plan known, if there is one; HiGHS alone, which is not told, for the
optimum. Part of what it takes longer is that.

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
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from ortools.math_opt import model_pb2, parameters_pb2
from ortools.sat import sat_parameters_pb2
from torch import nn

from benchmarks.common import Options, Report, Spread, parse
from benchmarks.zoo_models import find
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.errors import InfeasibleError
from hap.plan import Plan
from hap.rules.choices import Choices, choices
from hap.search import milp, plan_graph
from hap.search.protos import HIGHS, Solution, branching, seeded, solve_once

NAME = "planning_tight"
WIDTH, BATCH, LAYERS = 1024, 1024, 6
EQUAL_MB = range(52, 77, 4)
DRAWN, SEED, QUICK = 6, 7, 2
CP_SAT, CP_SAT_S = parameters_pb2.SOLVER_TYPE_CP_SAT, 15
TICK_MS = 1e-5  # CP-SAT's time is in whole ticks, of less than a millionth of a step; all other variables are 0 or 1
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
    slowest: tuple[float, model_pb2.ModelProto, float] | None = None  # seconds here, program, optimum

    def solved(self, own: Callable[..., Solution | None]) -> Callable[..., Solution | None]:
        """In the place of ``milp._solved``."""

        def both(
            skeleton: Any, proto: Any, stakes: Any, start: Any, gap: float, nodes: int, below: float, check: Any
        ) -> Solution | None:
            began = time.process_time()
            found = own(skeleton, proto, stakes, start, gap, nodes, below, check)
            ended = time.process_time()
            if len(proto.linear_constraints.ids) > len(skeleton.row_names):
                alone = solve_once(proto, HIGHS, branching(gap, nodes))
                self.alone_s.append(time.process_time() - ended)
                self.here_s.append(ended - began)
                if alone is not None and alone.objective >= below * (1 - 2 * gap):
                    return found  # whether a point is one hangs on the tolerance
                assert (found is None) == (alone is None), "one finds a point where the other finds none"
                if found is not None and alone is not None:
                    self.apart.append(found.objective / alone.objective - 1)
                    if self.slowest is None or self.here_s[-1] > self.slowest[0]:
                        kept = model_pb2.ModelProto()
                        kept.CopyFrom(proto)
                        self.slowest = self.here_s[-1], kept, alone.objective
            return found

        return both


class Tried(NamedTuple):
    """What CP-SAT came to: its seconds, and relative distances of its point from the optimum and from its bound."""

    seconds: float
    above: float
    unproved: float


@dataclass(frozen=True)
class Row:
    """``cp_sat``: None where it had no point, or was not asked."""

    case: str
    planning_s: float
    plan: Plan | None
    beside: Beside
    cp_sat: Tried | None


def by_cp_sat(proto: model_pb2.ModelProto, optimum: float) -> Tried | None:
    """The last variable is the time of the slowest rank; with all decisions 0 or 1 so are all others."""
    program, last = model_pb2.ModelProto(), len(proto.variables.ids) - 1
    program.CopyFrom(proto)
    program.variables.integers[:] = [True] * (last + 1)
    program.variables.upper_bounds[last] = 10 * optimum / TICK_MS
    linear, matrix = program.objective.linear_coefficients, program.linear_constraint_matrix
    linear.values[:] = [v * TICK_MS if i == last else v for i, v in zip(linear.ids, linear.values, strict=True)]
    entries = zip(matrix.column_ids, matrix.coefficients, strict=True)
    matrix.coefficients[:] = [v * TICK_MS if i == last else v for i, v in entries]
    limited = seeded(relative_gap_tolerance=1e-6, cp_sat=sat_parameters_pb2.SatParameters(num_workers=1))
    limited.time_limit.seconds = CP_SAT_S
    began = time.process_time()
    found = solve_once(program, CP_SAT, limited)
    seconds = time.process_time() - began
    return found and Tried(seconds, found.objective / optimum - 1, 1 - found.bound / found.objective)


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
    tried = None if beside.slowest is None else by_cp_sat(*beside.slowest[1:])
    return Row(case, seconds, made, beside, tried)


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
    asked = [(r.beside.slowest[0], r.cp_sat) for r in rows if r.beside.slowest is not None]
    report.figure("given_to_cp_sat", len(asked))
    solved = [(here_s, sat.seconds) for here_s, sat in asked if sat is not None and sat.unproved <= AGREE]
    report.figure("solved_by_cp_sat", len(solved))
    report.figure("solved_sooner_by_cp_sat", sum(sat_s < here_s for here_s, sat_s in solved))
    report.text(
        f"Of every case the program that took the planner longest was given to CP-SAT, too, for at most {CP_SAT_S} s: "
        "how far its best point was from the optimum then, and how far below that point its bound."
    )
    columns = ["case", "CPU s of planning", "programs", "of these s", "by HiGHS alone s"]
    columns += ["slowest of them s", "CP-SAT s", "its point", "its bound below", "step ms", "gap"]
    report.table("Planning, and its programs with rows of memory", columns, [_cells(r) for r in rows])
    report.write(None)


def _cells(row: Row) -> list[object]:
    p, b = row.plan, row.beside
    said = ["does not fit", ""] if p is None else [f"{1e3 * p.predicted.step_s:.3f}", f"{p.predicted.gap:.1%}"]
    sat = ["", "none", ""]
    if row.cp_sat is not None:
        sat = [f"{row.cp_sat.seconds:.1f}", f"{row.cp_sat.above:+.2%}", f"{row.cp_sat.unproved:.1%}"]
    slowest = ["", "", "", ""] if b.slowest is None else [f"{b.slowest[0]:.1f}", *sat]
    first = [row.case, f"{row.planning_s:.1f}", len(b.here_s), f"{sum(b.here_s):.1f}", f"{sum(b.alone_s):.1f}"]
    return [*first, *slowest, *said]


if __name__ == "__main__":
    main(parse(NAME, "Planning where memory is nearly full: seconds, and the same programs by HiGHS alone."))
