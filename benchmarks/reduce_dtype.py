"""Gradients exchanged in bfloat16, measured: steps of unequal ranks on slow links, with and without.

    python benchmarks/reduce_dtype.py [--quick] [--rounds 4] [--clusters both,links]

The race's models, clusters and bed; a profile of each cluster is measured first, with the casts. HAP plans once for
gradients in their own dtype and once for bfloat16, each as it finds best. The two plans take turns in one run; steps
are those of the slowest rank. Both must train alike: losses of the first steps differ by rounding.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import Report, Spread, parse
from benchmarks.mesh_rank import cut, race
from benchmarks.race import CLUSTERS, chosen, cluster, profiled
from benchmarks.testbed import Testbed
from hap.capture import capture
from hap.capture.narrow import narrowed
from hap.cost_models.profile import CalibratedCluster
from hap.plan import Plan
from hap.reduce_dtype import REDUCE_DTYPES, ReduceName
from hap.rules.choices import choices
from hap.runtime.emulate import measure_host
from hap.search.planner import plan_graph

NAME = "reduce_dtype"
OWN = "float32"
NARROW: ReduceName = "bfloat16"
MODELS, BATCH = ("GPT-2", "BERT", "VGG"), 16
SESSIONS = 4  # of fresh processes: a plan's pace is recorded once in each, and differs from the next one's by 20 %
CASES = ("both", "links", "equal")
NEAR = 1e-2  # relatively, of losses after updates by gradients of three digits


@dataclass(frozen=True)
class Row:
    """One model on one cluster. ``told``: predicted steps; ``sent``: bytes of the whole values that are exchanged."""

    case: str
    steps: dict[str, Spread]
    told: dict[str, float]
    sent: dict[str, int]

    @property
    def ratio(self) -> float:
        return self.steps[OWN].median / self.steps[NARROW].median

    @property
    def told_ratio(self) -> float:
        return self.told[OWN] / self.told[NARROW]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clusters", default="", help=f"some of {', '.join(CLUSTERS)}; default: {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=0, help="turns of each plan in a session")
    options = parse(NAME, "Gradients exchanged in bfloat16 or in their own dtype.", argv, parser, ("--clusters",))
    report = Report(NAME, "Gradients exchanged in bfloat16, or in float32", options)
    models = MODELS[:1] if options.quick else MODELS
    rounds, call_s = options.extra.rounds or (1 if options.quick else 4), measure_host().launch_s
    sessions = 1 if options.quick else SESSIONS
    rows = []
    for name in chosen(options.extra.clusters, CLUSTERS, CASES[:1] if options.quick else CASES):
        told = profiled(name, call_s, models, reduce_dtype=NARROW)
        for model in models:
            rows.append(run(model, name, told, rounds, sessions))
            print(rows[-1], flush=True)
    write(report, rows)


def run(model: str, name: str, told: CalibratedCluster, rounds: int, sessions: int) -> Row:
    plans = planned(model, told)
    texts = {who: plan.to_json() for who, plan in plans.items()}
    with Testbed(cluster(name)) as bed:
        found = [bed.run(race, model, BATCH, texts, rounds, timeout=600.0) for _ in range(sessions)]
    for first in found[0]:
        for a, b in zip(first[OWN].losses, first[NARROW].losses, strict=True):
            assert math.isclose(a, b, rel_tol=NEAR), f"{model}, {name}: losses {a} and {b}"
    slowest = {
        who: [max(s) for ranks in found for s in zip(*(rank[who].steps_s for rank in ranks), strict=True)]
        for who in plans
    }
    return Row(
        f"{model}, {name}",
        {who: Spread.of(steps_s) for who, steps_s in slowest.items()},
        {who: plan.predicted.as_run_s for who, plan in plans.items()},
        {who: sum(c.nbytes for c in plan.conversions if c.collective != "slice") for who, plan in plans.items()},
    )


def planned(model: str, told: CalibratedCluster) -> dict[str, Plan]:
    """The plans for both dtypes; plans bring theirs, so ranks need not be told."""
    built = cut(model, BATCH)
    given = {"loss_fn": built.loss_fn, "example_targets": built.example_targets, "name": model}
    graph = capture(built.model, built.example_inputs, **given)
    graphs = {OWN: graph, NARROW: narrowed(graph, REDUCE_DTYPES[NARROW])}
    return {who: plan_graph(choices(graph), told) for who, graph in graphs.items()}


def write(report: Report, rows: Sequence[Row]) -> None:
    report.figure("cases", len(rows))
    report.figure("best_over_float32", max(r.ratio for r in rows))
    report.figure("worst_over_float32", min(r.ratio for r in rows))
    report.figure("worst_error_of_predicted_ratio", max(abs(r.told_ratio / r.ratio - 1) for r in rows))
    errors = [abs(r.told[who] / r.steps[who].median - 1) for r in rows for who in (OWN, NARROW)]
    report.figure("worst_error_of_prediction", max(errors))
    columns = ["case"]
    columns += [text for who in (OWN, NARROW) for text in (f"{who} ms", "spread", "told", "exchanged MB")]
    columns += ["x faster", "told x faster"]
    cells = [(r.case, *_cells(r, OWN), *_cells(r, NARROW), f"{r.ratio:.2f}", f"{r.told_ratio:.2f}") for r in rows]
    report.table("Interleaved, slowest rank", columns, cells)
    report.text(
        "Emulated speeds, real bytes: compute, with the casts, is this machine's CPU, stretched to a device's speed by "
        "deadline; links are shaped by the kernel. Both plans of a case took turns in one run. *Told*: predicted, as "
        "run. *Exchanged*: whole values, each once, of activations and parameters, too."
    )
    report.write(None)


def _cells(row: Row, who: str) -> tuple[str, ...]:
    steps = row.steps[who]
    ms, told_ms = 1e3 * steps.median, 1e3 * row.told[who]
    return f"{ms:.0f}", f"{steps.relative:.0%}", f"{told_ms:.0f}", f"{row.sent[who] / 1e6:.1f}"


if __name__ == "__main__":
    main()
