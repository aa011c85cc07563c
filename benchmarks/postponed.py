"""Calls of the backward pass that run out of turn, measured: the same plan, with and without.

    python benchmarks/postponed.py [--quick] [--turns 20]

An autoencoder whose last layer's weight is the first one's, too, on two ranks with a core of this machine each, joined
by a slow network, data parallel: of that weight's gradient one term is made first, and their sum sent last. HAP plans
with parameters pinned whole; the plan and the same one with all calls in the order of the backward pass take turns,
step by step, at this machine's own speed. Steps are those of the slower rank. Both compute the same numbers: losses
must be equal to rounding.
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
from benchmarks.mesh_rank import cut
from benchmarks.postponed_rank import turns
from benchmarks.testbed import Testbed
from benchmarks.testbed.layout import GOODPUT, LATENCY_S
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.codegen.lowering import lower
from hap.rules.choices import choices
from hap.runtime.emulate import HostRate, measure_host
from hap.search import Pins
from hap.search.judge import played
from hap.search.planner import plan_graph

NAME = "postponed"
LATE, ORDER = "postponed", "in order"
MODEL, BATCHES, SESSIONS = "tied", (4096, 2048), 3
NETWORKS = (200, 100, 50)  # Mbit/s
NEAR = 1e-4  # relatively, of losses after updates
DATA_PARALLEL = Pins(placements={"*": "R", "args.*": "S(0)", "targets.*": "S(0)"})


@dataclass(frozen=True)
class Row:
    """One size of the batch on one cluster. ``calls`` that are postponed; ``told``: predicted steps."""

    case: str
    calls: int
    steps: dict[str, Spread]
    told: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.steps[ORDER].median / self.steps[LATE].median

    @property
    def told_ratio(self) -> float:
        return self.told[ORDER] / self.told[LATE]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=0, help="steps of each plan in a session")
    options = parse(NAME, "Gradients made as soon as they can be, or when the wire has enough to do.", argv, parser)
    report = Report(NAME, "Calls of the backward pass that run out of turn", options)
    count, rate = options.extra.turns or (6 if options.quick else 20), measure_host()
    rows = []
    for rates in NETWORKS[: 1 if options.quick else None]:
        for batch in BATCHES[: 1 if options.quick else None]:
            rows.append(run(batch, rates, rate, count, 1 if options.quick else SESSIONS))
            print(rows[-1], flush=True)
    write(report, rows)


def cluster(mbit: int, rate: HostRate, *, told: bool) -> ClusterSpec:
    """Two hosts of a core each, with so much of a network: as the links are shaped, or ``told`` to a planner, what they
    carry of that."""
    device = {
        "name": "core",
        "tflops": {"float32": rate.flops_per_s / 1e12},
        "memory": "8GB",
        "memory_bandwidth": f"{rate.bytes_per_s / 1e9:.6f}GB/s",
        "launch": f"{1e6 * rate.launch_s:.3f}us",
    }
    network = {"bandwidth": f"{mbit * (GOODPUT if told else 1):.3f}Mbit/s", "latency": f"{1e6 * LATENCY_S:.0f}us"}
    hosts = [{"name": f"h{i}", "devices": [device], "network": network} for i in range(2)]
    return ClusterSpec.model_validate({"name": f"{mbit} Mbit/s", "backend": "gloo", "hosts": hosts})


def run(batch: int, mbit: int, rate: HostRate, count: int, sessions: int) -> Row:
    built, told = cut(MODEL, batch), cluster(mbit, rate, told=True)
    given = {"loss_fn": built.loss_fn, "example_targets": built.example_targets, "name": MODEL}
    graph = capture(built.model, built.example_inputs, **given)
    late = plan_graph(choices(graph), told, pins=DATA_PARALLEL)
    plans = {LATE: late, ORDER: late.model_copy(update={"postponed": {}})}
    texts = {who: plan.to_json() for who, plan in plans.items()}
    with Testbed(cluster(mbit, rate, told=False)) as bed:
        found = [bed.run(turns, MODEL, batch, texts, count, timeout=600.0) for _ in range(sessions)]
    for first in found[0]:
        for a, b in zip(first[LATE].losses, first[ORDER].losses, strict=True):
            assert math.isclose(a, b, rel_tol=NEAR), f"{batch}, {mbit}: losses {a} and {b}"
    slowest = {
        who: [max(s) for ranks in found for s in zip(*(rank[who].steps_s for rank in ranks), strict=True)]
        for who in plans
    }
    return Row(
        f"batch {batch}, {mbit} Mbit/s",
        sum(len(names) for names in late.postponed.values()),
        {who: Spread.of(steps_s) for who, steps_s in slowest.items()},
        {who: played(graph, plan, lower(graph, plan), told).step_s for who, plan in plans.items()},
    )


def write(report: Report, rows: Sequence[Row]) -> None:
    report.figure("cases", len(rows))
    report.figure("cases_with_calls_postponed", sum(r.calls > 0 for r in rows))
    report.figure("best_over_order", max(r.ratio for r in rows))
    report.figure("worst_over_order", min(r.ratio for r in rows))
    report.figure("worst_error_of_predicted_ratio", max(abs(r.told_ratio / r.ratio - 1) for r in rows))
    columns = ["case", "calls"]
    columns += [text for who in (LATE, ORDER) for text in (f"{who} ms", "spread", "told")]
    columns += ["x faster", "told x faster"]
    cells = [
        (r.case, str(r.calls), *_cells(r, LATE), *_cells(r, ORDER), f"{r.ratio:.3f}", f"{r.told_ratio:.3f}")
        for r in rows
    ]
    report.table("Interleaved, slowest rank", columns, cells)
    report.text(
        "Real compute on a core for each rank, which sends and receives, too; links are shaped by the kernel. Both "
        "plans of a case took turns, step by step. *Told*: predicted, as run, from what the core and the links do."
    )
    report.write(None)


def _cells(row: Row, who: str) -> tuple[str, ...]:
    steps = row.steps[who]
    return f"{1e3 * steps.median:.0f}", f"{steps.relative:.0%}", f"{1e3 * row.told[who]:.0f}"


if __name__ == "__main__":
    main()
