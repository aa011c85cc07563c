"""Muon on unequal ranks, measured: matrices that one rank owns and updates, against the same update on every rank.

    python benchmarks/owners.py [--quick] [--rounds 4] [--clusters compute,both]

The race's models, clusters and bed; a profile of each cluster is measured first, with Muon's products. One plan is the
search's own, in which a matrix may have an owner; for the other all matrices are pinned whole to every rank, as any
optimizer that looks at whole parameters would have it. They take turns in one run; steps are those of the slowest rank.
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
from hap.cost_models.optimizers import sees_whole
from hap.cost_models.profile import CalibratedCluster
from hap.plan import Plan
from hap.rules.choices import choices
from hap.runtime.emulate import measure_host
from hap.search import Pins
from hap.search.planner import plan_graph

NAME = "owners"
OWNED, WHOLE = "owners", "whole on every rank"
MODELS, BATCH, SESSIONS = ("GPT-2", "BERT", "ViT"), 16, 2
CASES = ("compute", "both", "weak host", "equal")
NEAR = 1e-3  # relatively, of losses after updates in bfloat16


@dataclass(frozen=True)
class Row:
    """One model on one cluster. ``told``: predicted steps; ``owned``: how many matrices each rank has."""

    case: str
    owned: tuple[int, ...]
    steps: dict[str, Spread]
    told: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.steps[WHOLE].median / self.steps[OWNED].median


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clusters", default="", help=f"some of {', '.join(CLUSTERS)}; default: {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=0, help="turns of each plan in a session")
    options = parse(
        NAME, "Muon on unequal ranks: owners against the same update everywhere.", argv, parser, ("--clusters",)
    )
    report = Report(NAME, "Muon: an owner for each matrix, or the same update on every rank", options)
    models = MODELS[:1] if options.quick else MODELS
    rounds, call_s = options.extra.rounds or (2 if options.quick else 4), measure_host().launch_s
    rows = []
    for name in chosen(options.extra.clusters, CLUSTERS, CASES[:1] if options.quick else CASES):
        told = profiled(name, call_s, models, "muon")
        for model in models:
            rows.append(run(model, name, told, rounds))
            print(rows[-1], flush=True)
    write(report, rows)


def run(model: str, name: str, told: CalibratedCluster, rounds: int) -> Row:
    plans = planned(model, told)
    texts = {who: plan.to_json() for who, plan in plans.items()}
    with Testbed(cluster(name)) as bed:
        sessions = [bed.run(race, model, BATCH, texts, rounds, timeout=600.0) for _ in range(SESSIONS)]
    for first in sessions[0]:
        for a, b in zip(first[OWNED].losses, first[WHOLE].losses, strict=True):
            assert math.isclose(a, b, rel_tol=NEAR), f"{model}, {name}: losses {a} and {b}"
    own = [g.sizes for group, g in plans[OWNED].groups.items() if group.startswith("own")]
    return Row(
        f"{model}, {name}",
        tuple(sum(sizes[r] > 0 for sizes in own) for r in range(told.world_size)),
        {
            who: Spread.of(
                [max(s) for ranks in sessions for s in zip(*(rank[who].steps_s for rank in ranks), strict=True)]
            )
            for who in plans
        },
        {who: plan.predicted.as_run_s for who, plan in plans.items()},
    )


def planned(model: str, told: CalibratedCluster) -> dict[str, Plan]:
    built = cut(model, BATCH)
    given = {"loss_fn": built.loss_fn, "example_targets": built.example_targets, "name": model}
    possible = choices(capture(built.model, built.example_inputs, **given))
    matrices = [n for n in possible.graph.sources("parameter") if sees_whole("muon", possible.graph, n)]
    pins = Pins(placements={n.target: "R" for n in matrices})
    return {
        OWNED: plan_graph(possible, told, optimizer="muon"),
        WHOLE: plan_graph(possible, told, optimizer="muon", pins=pins),
    }


def write(report: Report, rows: Sequence[Row]) -> None:
    report.figure("cases", len(rows))
    report.figure("best_of_whole_over_owners", max(r.ratio for r in rows))
    report.figure("worst_of_whole_over_owners", min(r.ratio for r in rows))
    errors = [abs(r.told[who] / r.steps[who].median - 1) for r in rows for who in (OWNED, WHOLE)]
    report.figure("worst_error_of_prediction", max(errors))
    columns = ["case", "owned by rank", "owners ms", "spread", "told", "whole ms", "spread", "told", "x faster"]
    cells = [
        (
            r.case,
            " ".join(map(str, r.owned)),
            *(
                text
                for who in (OWNED, WHOLE)
                for text in (
                    f"{1e3 * r.steps[who].median:.0f}",
                    f"{r.steps[who].relative:.0%}",
                    f"{1e3 * r.told[who]:.0f}",
                )
            ),
            f"{r.ratio:.2f}",
        )
        for r in rows
    ]
    report.table("Interleaved, slowest rank", columns, cells)
    report.text(
        "Emulated speeds, real bytes: compute, with Muon's products, is this machine's CPU, stretched to a device's "
        "speed by deadline; links are shaped by the kernel. Both plans of a case took turns in one run."
    )
    report.write(None)


if __name__ == "__main__":
    main()
