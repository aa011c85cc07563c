"""Does the clock tell the time? Predicted against measured, three ways:

- *steps*: models x clusters x plans on the testbed in deadline mode, each cluster calibrated once, before its plans are
  made; the profile never sees a plan's step. Needs root; without it links are not enforced, and the report says so.
- *memory*: each rank's peak against what a tracker of every allocation saw in real steps of the zoo's small models.
- *public*: GPU measurements of others; fitted on a stated third, predicted on the rest.

    python benchmarks/accuracy.py [--quick] [--only steps,memory,public]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.accuracy_cases import CLUSTERS, MODELS, PLANS, cluster, find, keep_to_batch, pins
from benchmarks.accuracy_rank import Run, calibrate, capture_built, run_plans
from benchmarks.common import COLOURS, Report, Spread, drawing, parse
from benchmarks.testbed import Counters, Testbed, network
from hap.cost_models.profile import CalibratedCluster, Profile
from hap.plan import Plan
from hap.rules.choices import choices
from hap.search.planner import plan_graph

STEPS = 7
PARTS = ("steps", "memory", "public")


@dataclass(frozen=True)
class Row:
    """One plan of one model on one cluster: seconds of a step."""

    cluster: str
    model: str
    plan: str
    predicted_s: float
    steps_s: tuple[float, ...]
    late_s: float

    @property
    def measured_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Session:
    """What one cluster gave."""

    rows: tuple[Row, ...]
    calibration_s: float
    went: Counters


def run_cluster(name: str, models: Sequence[str], plans: Sequence[str], enforced: bool) -> Session:
    """Calibrate, plan, run."""
    spec = cluster(name)
    with Testbed(spec, enforced=enforced) as bed:
        before = bed.counters()
        started = time.monotonic()
        profile = Profile.model_validate_json(bed.run(calibrate, name, models, timeout=200.0)[0])
        calibration_s = time.monotonic() - started
        made = make_plans(profile.calibrate(spec), models, plans)
        runs = bed.run(run_plans, [(model, plan.to_json()) for model, _, plan in made], STEPS, timeout=400.0)
        went = bed.counters() - before
    rows = [
        row_of(name, model, plan, found.predicted.step_s, [ranks[i] for ranks in runs])
        for i, (model, plan, found) in enumerate(made)
    ]
    return Session(tuple(rows), calibration_s, went)


def make_plans(
    calibrated: CalibratedCluster, models: Sequence[str], plans: Sequence[str]
) -> list[tuple[str, str, Plan]]:
    made = []
    for model in models:
        found = choices(capture_built(find(model)))
        for plan in plans:
            allowed = found if plan == "planner" else keep_to_batch(found)
            made.append((model, plan, plan_graph(allowed, calibrated, pins=pins(plan), effort="quick")))
    return made


def row_of(name: str, model: str, plan: str, predicted_s: float, runs: Sequence[Run]) -> Row:
    slowest = tuple(max(step) for step in zip(*(run.steps for run in runs), strict=True))
    return Row(name, model, plan, predicted_s, slowest, max(run.late_s for run in runs))


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-a of two lists without ties: (agreeing - disagreeing pairs) / pairs."""
    pairs = list(combinations(range(len(first)), 2))
    signs = [(first[i] - first[j]) * (second[i] - second[j]) for i, j in pairs]
    return sum(1 if s > 0 else -1 if s < 0 else 0 for s in signs) / len(pairs)


def steps(report: Report) -> list[Row]:
    quick = report.options.quick
    reason = network.missing()
    if reason is not None:
        report.text(f"Links are this machine's loopback and not enforced: {reason}.")
    models = [m.name for m in MODELS][: 2 if quick else None]
    names = ["both"] if quick else list(CLUSTERS)
    plans = PLANS[:3] if quick else PLANS
    sessions = {name: run_cluster(name, models, plans, reason is None) for name in names}
    rows = [row for session in sessions.values() for row in session.rows]
    taus = {name: tau_of(session.rows) for name, session in sessions.items()}
    errors = [abs(row.error) for row in rows]
    report.figure("step_time_median_error", statistics.median(errors), Spread.of(errors))
    report.figure("step_time_worst_error", max(errors))
    report.figure("kendall_tau_worst_cluster", min(taus.values()), Spread.of(list(taus.values())))
    for name, session in sessions.items():
        report.text(
            f"{name}: calibrated in {session.calibration_s:.0f} s, Kendall's tau {taus[name]:.2f}, "
            f"{session.went.drops} packets dropped, steal {session.went.steal_share:.1%}."
        )
    report.table(
        "Steps: predicted against measured",
        ["cluster", "model", "plan", "predicted ms", "measured ms", "min", "max", "error", "late ms"],
        [cells(row) for row in rows],
    )
    return rows


def tau_of(rows: Sequence[Row]) -> float:
    return kendall_tau([r.predicted_s for r in rows], [r.measured_s for r in rows])


def cells(row: Row) -> list[object]:
    shown = [f"{1e3 * s:.1f}" for s in (row.predicted_s, row.measured_s, min(row.steps_s), max(row.steps_s))]
    return [row.cluster, row.model, row.plan, *shown, f"{row.error:+.1%}", f"{1e3 * row.late_s:.0f}"]


def draw(axis: Any, rows: Sequence[Row]) -> None:
    for colour, name in zip(COLOURS, dict.fromkeys(r.cluster for r in rows), strict=False):
        some = [r for r in rows if r.cluster == name]
        axis.scatter(
            [1e3 * r.measured_s for r in some], [1e3 * r.predicted_s for r in some], s=22, color=colour, label=name
        )
    ends = [1e3 * min(r.measured_s for r in rows) * 0.8, 1e3 * max(r.measured_s for r in rows) * 1.25]
    axis.plot(ends, ends, color="#888888", linewidth=1)
    axis.fill_between(ends, [0.8 * e for e in ends], [1.2 * e for e in ends], color="#dddddd", alpha=0.5, linewidth=0)
    axis.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="predicted ms", title="Step time (band: 20 %)")
    axis.legend()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    options = parse("accuracy", "Predicted against measured: steps, memory, public GPU measurements.", parser=parser)
    wanted = options.extra.only.split(",")
    if unknown := [w for w in wanted if w not in PARTS]:
        parser.error(f"--only {unknown[0]}: one of {', '.join(PARTS)}")
    report = Report("accuracy", "Predicted against measured", options)
    rows: list[Row] = []
    if "public" in wanted:
        from benchmarks.accuracy_public import public

        public(report)
    if "memory" in wanted:
        from benchmarks.accuracy_memory import memory

        memory(report)
    if "steps" in wanted:
        rows = steps(report)
    if not rows:
        report.write(None)
        return
    with drawing(1, 1, width=6.0, height=5.0) as (figure, axes):
        draw(axes[0], rows)
        report.write(figure)


if __name__ == "__main__":
    main()
