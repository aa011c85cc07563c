"""Steps of several batches, measured: gradients summed over unequal ranks once a step, or in every backward pass.

    python benchmarks/accumulate.py [--quick] [--rounds 2] [--clusters both,links]

The race's models, clusters and bed; a profile of each cluster is measured first. A step has four batches: HAP's plan
for such steps, with all backward passes but the last under ``no_sync()``; its plan for steps of one batch run so, and
with gradients summed in every backward pass; DDP with batches in proportion to speed, under its own ``no_sync()``; and
ACCO with HAP's plan, which exchanges gradients and updates beside computing, and is not what one device computes. They
take turns in one run; steps are those of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.accumulate_rank import ACCO, BATCHES, DDP, EACH, FOR_ONE, OURS, enter
from benchmarks.common import Report, Spread, parse
from benchmarks.race import CLUSTERS, chosen, cluster, dealt, entry_of, profiled
from benchmarks.race_models import MODELS, build
from benchmarks.race_rank import race
from benchmarks.testbed import Testbed
from hap.capture import capture
from hap.cost_models.profile import CalibratedCluster
from hap.rules.choices import choices
from hap.runtime.emulate import measure_host
from hap.search.planner import plan_graph

NAME = "accumulate"
WHO = (OURS, FOR_ONE, EACH, DDP, ACCO)
CASES = ("both", "links", "compute")
ROUNDS, SESSIONS = 2, 2
NEAR = 1e-3  # relatively, of losses


@dataclass(frozen=True)
class Row:
    """One model on one cluster. ``told_s``: what is predicted of a step."""

    case: str
    steps: dict[str, Spread]
    told_s: float

    def over(self, who: str) -> float:
        return self.steps[who].median / self.steps[OURS].median


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clusters", default="", help=f"some of {', '.join(CLUSTERS)}; default: {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=0, help="blocks of two steps in a session")
    options = parse(
        NAME, "Gradients of several batches: summed once a step, or each time.", argv, parser, ("--clusters",)
    )
    report = Report(NAME, f"Steps of {BATCHES} batches: gradients summed once, or in every backward pass", options)
    models = ("GPT-2",) if options.quick else tuple(MODELS)
    rounds = options.extra.rounds or (1 if options.quick else ROUNDS)
    call_s, rows = measure_host().launch_s, []
    for name in chosen(options.extra.clusters, CLUSTERS, CASES[:1] if options.quick else CASES):
        told = profiled(name, call_s, models)
        for model in models:
            rows.append(run(model, name, told, rounds))
            print(rows[-1], flush=True)
    write(report, rows)


def run(model: str, name: str, told: CalibratedCluster, rounds: int) -> Row:
    built = build(model)
    given = {"loss_fn": built.loss_fn, "example_targets": built.example_targets, "name": model}
    possible = choices(capture(built.model, built.example_inputs, **given))
    plans = [plan_graph(possible, told, batches=count) for count in (BATCHES, 1)]
    batch = len(built.example_inputs)
    sizes, equal = dealt(batch, CLUSTERS[name][0]), dealt(batch, (1,) * 4)
    texts = (json.dumps([plan.to_json() for plan in plans]), told.described.to_yaml(), told.profile.model_dump_json())
    with Testbed(cluster(name)) as bed:
        found = [bed.run(race, WHO, model, sizes, equal, *texts, rounds, enter, timeout=900.0) for _ in range(SESSIONS)]
    entries = {who: entry_of([[ranks[who] for ranks in session] for session in found]) for who in WHO}
    for who in (OURS, FOR_ONE, EACH):  # ACCO does not compute what they do
        for a, b in zip(entries[who].losses, entries[DDP].losses, strict=True):
            assert math.isclose(a, b, rel_tol=NEAR), f"{model}, {name}: {who} has loss {a}, DDP {b}"
    told_s = BATCHES * plans[0].predicted.as_run_s
    return Row(f"{model}, {name}", {who: entries[who].steps for who in WHO}, told_s)


def write(report: Report, rows: Sequence[Row]) -> None:
    report.figure("cases", len(rows))
    errors = [abs(r.told_s / r.steps[OURS].median - 1) for r in rows]
    report.figure("worst_error_of_prediction", max(errors))
    for who, key in ((FOR_ONE, "planned_for_one"), (EACH, "summed_each_time"), (DDP, "ddp_no_sync"), (ACCO, "acco")):
        report.figure(f"best_over_{key}", max(r.over(who) for r in rows))
        report.figure(f"worst_over_{key}", min(r.over(who) for r in rows))
    cells = [
        (
            r.case,
            *(t for w in WHO for t in (f"{1e3 * r.steps[w].median:.0f}", f"{r.steps[w].relative:.0%}")),
            f"{1e3 * r.told_s:.0f}",
            *(f"{r.over(who):.2f}" for who in WHO[1:]),
        )
        for r in rows
    ]
    columns = [
        "case",
        *(text for w in ("HAP", "for one", "each time", "DDP", "ACCO") for text in (f"{w} ms", "spread")),
    ]
    columns += ["told", "over for one", "over each time", "over DDP", "over ACCO"]
    report.table(f"Interleaved, slowest rank, {BATCHES} batches a step", columns, cells)
    report.text(
        "Emulated speeds, real bytes: compute is this machine's CPU, stretched to a device's speed by deadline; links "
        "are shaped by the kernel. All of a case took turns in one run. *Told*: predicted of HAP's step. "
        "ACCO trains by other equations, and its exchanges and updates are not stretched to a device's speed."
    )
    report.write(None)


if __name__ == "__main__":
    main()
