"""Step times: models x clusters x plans on the testbed, predicted from one calibration of each cluster.

A step is cut at its collectives, on the clock that all ranks of one machine share: the *stage* before a collective ends
when the last rank enters the wire, the collective when the last one leaves it. Both are predicted and measured, so that
an error has a place.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from benchmarks.accuracy_cases import LOAD, Model, cluster, find, keep_to_batch, pins, plans_of
from benchmarks.accuracy_rank import Run, calibrate, capture_built, run_plans
from benchmarks.common import Report, Spread
from benchmarks.testbed import Testbed, network
from hap.codegen.lowering import lower
from hap.cost_models.collective import course
from hap.cost_models.profile import CalibratedCluster, Profile, base_name
from hap.cost_models.timeline import simulate
from hap.placement import parse_placement
from hap.plan import Conversion, Plan, Strategy
from hap.rules.choices import choices
from hap.runtime.emulate import Core
from hap.search.planner import plan_graph

ROUNDS = 3  # in each of which every plan runs a few steps


@dataclass(frozen=True)
class Call:
    """One collective of a plan: seconds on the wire."""

    kind: str
    decomposition: str
    nbytes: int
    predicted_s: float
    measured_s: float


@dataclass(frozen=True)
class Row:
    """One plan of one model on one cluster: seconds of a step, and of its collectives on the wire."""

    cluster: str
    model: str
    plan: str
    predicted_s: float
    steps_s: tuple[float, ...]
    late_s: float
    calls: tuple[Call, ...]

    @property
    def measured_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def wire_s(self) -> tuple[float, float]:
        """Predicted, measured."""
        return sum(c.predicted_s for c in self.calls), sum(c.measured_s for c in self.calls)

    @classmethod
    def load(cls, data: dict[str, Any]) -> Row:
        calls = tuple(Call(**c) for c in data["calls"])
        return cls(**{**data, "steps_s": tuple(data["steps_s"]), "calls": calls})


def run_cluster(name: str, models: Sequence[Model], enforced: bool) -> dict[str, Any]:
    """Calibrate, plan, run: what ``accuracy.py`` keeps of a cluster."""
    spec, names = cluster(name), [m.name for m in models]
    standard_s = Core.work_seconds()
    with Testbed(spec, enforced=enforced, load=LOAD) as bed:
        before = bed.counters()
        started = time.monotonic()
        profile = Profile.model_validate_json(bed.run(calibrate, name, names, standard_s, timeout=200.0)[0])
        calibration_s = time.monotonic() - started
        calibrated = profile.calibrate(spec)
        made = make_plans(calibrated, name, names)
        runs = bed.run(
            run_plans, [(model, plan.to_json()) for model, _, plan in made], ROUNDS, standard_s, timeout=400.0
        )
        went = bed.counters() - before
    rows = [
        row_of(name, model, plan, found, calibrated, [ranks[i] for ranks in runs])
        for i, (model, plan, found) in enumerate(made)
    ]
    return {
        "rows": [asdict(row) for row in rows],
        "calibration_s": calibration_s,
        "drops": went.drops,
        "steal_share": went.steal_share,
    }


def make_plans(calibrated: CalibratedCluster, name: str, models: Sequence[str]) -> list[tuple[str, str, Plan]]:
    made = []
    for model in models:
        found = choices(capture_built(find(model)))
        for plan in plans_of(name):
            allowed = found if plan == "planner" else keep_to_batch(found)
            made.append((model, plan, plan_graph(allowed, calibrated, pins=pins(plan), effort="quick")))
    return made


def in_order(model: str, plan: Plan) -> list[Conversion]:
    """The plan's conversions that use the wire, in the order in which the program makes them."""
    program = lower(capture_built(find(model)), plan)
    known = {(c.value, c.source, c.target, c.phase): c for c in plan.conversions}
    held = [(program.held[c.input].value, c) for c in program.conversions if c.kind != "slice"]
    return [known[str(value), str(c.source), str(c.target), c.phase] for value, c in held]


def row_of(name: str, model: str, plan: str, found: Plan, calibrated: CalibratedCluster, runs: Sequence[Run]) -> Row:
    ended = [max(step) for step in zip(*(run.ended for run in runs), strict=True)]
    begun = [max(step) for step in zip(*(run.begun for run in runs), strict=True)]
    steps = tuple(end - begin for begin, end in zip(begun, ended, strict=True))
    calls = tuple(
        Call(c.collective, c.decomposition, c.nbytes, wire_seconds(c, found, calibrated), measured)
        for c, measured in zip(in_order(model, found), wires(runs), strict=True)
    )
    predicted, late = predicted_seconds(model, found, calibrated), max(run.late_s for run in runs)
    return Row(name, model, plan, predicted, steps, late, calls)


def predicted_seconds(model: str, plan: Plan, calibrated: CalibratedCluster) -> float:
    """Of a step as the plan is written, by the timeline, which knows who packs and who is done before others."""
    strategies = {name: Strategy.parse(text) for name, text in plan.strategies.items()}
    return simulate(capture_built(find(model)), strategies, plan.sizes, calibrated).step_s


def wires(runs: Sequence[Run]) -> list[float]:
    """Seconds of every collective of a step, the median of the steps: from the last to enter to the last to leave."""
    found = []
    for calls in zip(*(run.ends for run in runs), strict=True):  # one step on every rank
        found.append([max(left for _, left in c) - max(entered for entered, _ in c) for c in zip(*calls, strict=True)])
    return [statistics.median(seconds) for seconds in zip(*found, strict=True)]


def wire_seconds(c: Conversion, plan: Plan, calibrated: CalibratedCluster) -> float:
    """Predicted, without packing and joining."""
    ends = parse_placement(c.source), parse_placement(c.target)
    return course(c.collective, c.decomposition, c.nbytes, *ends, calibrated, plan.sizes).wire_s


def kendall_tau(predicted: Sequence[float], measured: Sequence[float], tolerance: float = 0.0) -> tuple[float, int]:
    """(Kendall's tau of predicted and measured, how many pairs count): (agreeing - disagreeing pairs) / pairs, over the
    pairs whose measured times are further apart than ``tolerance`` of the lesser: of others the order is not known."""
    agree = count = 0
    for i, j in combinations(range(len(predicted)), 2):
        if abs(measured[i] - measured[j]) > tolerance * min(measured[i], measured[j]):
            count += 1
            agree += 1 if (predicted[i] - predicted[j]) * (measured[i] - measured[j]) > 0 else -1
    return agree / count, count


def rounds_tau(rows: Sequence[Row]) -> float:
    """The median of Kendall's tau between every two rounds of the same plans, over all pairs of plans."""
    block = len(rows[0].steps_s) // ROUNDS
    rounds = [[statistics.median(r.steps_s[k * block : (k + 1) * block]) for r in rows] for k in range(ROUNDS)]
    return statistics.median(kendall_tau(a, b)[0] for a, b in combinations(rounds, 2))


def distinct(rows: Sequence[Row]) -> list[Row]:
    """Without plans that are an earlier one under another name, as where the planner chose data parallelism: two such
    have no order. The same plan has the same collectives and the same predicted time to the last bit."""
    first: dict[object, Row] = {}
    for row in rows:
        first.setdefault((row.model, row.predicted_s, *((c.kind, c.decomposition, c.nbytes) for c in row.calls)), row)
    return list(first.values())


def spread_of(rows: Sequence[Row]) -> float:
    """The median over plans of (the last but one - the second of the sorted steps) / their median: what the same plan
    differs by from step to step."""
    found = []
    for row in rows:
        rising = sorted(row.steps_s)
        found.append((rising[-2] - rising[1]) / row.measured_s)
    return statistics.median(found)


def tell_steps(report: Report, sessions: dict[str, dict[str, Any]]) -> list[Row]:
    """Figures and tables of the clusters that were run; their rows."""
    if (reason := network.missing()) is not None:
        report.text(f"Links are this machine's loopback and not enforced: {reason}.")
    by_cluster = {name: [Row.load(r) for r in data["rows"]] for name, data in sessions.items()}
    rows = [row for found in by_cluster.values() for row in found]
    errors = [abs(row.error) for row in rows]
    report.figure("step_time_median_error", statistics.median(errors), Spread.of(errors))
    report.figure("step_time_worst_error", max(errors))
    taus: list[float] = []
    apart_taus: list[float] = []
    for name, every in by_cluster.items():
        found = distinct(every)
        times = [r.predicted_s for r in found], [r.measured_s for r in found]
        spread = spread_of(found)
        (all_pairs, pairs), (tau, apart) = kendall_tau(*times), kendall_tau(*times, spread)
        taus.append(all_pairs)
        apart_taus.append(tau)
        report.text(
            f"{name}: calibrated in {sessions[name]['calibration_s']:.0f} s, {sessions[name]['drops']} packets "
            f"dropped, steal {sessions[name]['steal_share']:.1%}. Kendall's tau {all_pairs:.2f} over all {pairs} pairs "
            f"of {len(found)} plans ({len(every) - len(found)} more are one of these under another name), "
            f"{tau:.2f} over the {apart} whose measured steps are further apart than steps of one plan ({spread:.1%}). "
            f"One round of the same steps against another: {rounds_tau(found):.2f} over all pairs, "
            "which is as well as the measurement knows the order."
        )
    report.figure("kendall_tau_worst_cluster", min(taus), Spread.of(taus))
    report.figure("kendall_tau_worst_cluster_pairs_apart", min(apart_taus), Spread.of(apart_taus))
    report.table(
        "Steps: predicted against measured",
        [
            "cluster",
            "model",
            "plan",
            "predicted ms",
            "measured ms",
            "min",
            "max",
            "error",
            "of it wire",
            "wire",
            "late",
        ],
        [cells(row) for row in rows],
    )
    report.text(
        "All in ms. *Of it wire* and *wire* are on the wire, predicted and measured, *late* by how much deadlines were "
        "missed in all steps. Passes are off: a plan is predicted, and run, as it is written."
    )
    report.table(
        "Collectives in these steps, ms on the wire",
        ["cluster", "collective", "by", "kB", "calls", "predicted", "measured", "min", "max"],
        collective_rows(rows),
    )
    return rows


def cells(row: Row) -> list[object]:
    shown = [f"{1e3 * s:.1f}" for s in (row.predicted_s, row.measured_s, min(row.steps_s), max(row.steps_s))]
    wire = [f"{1e3 * s:.1f}" for s in row.wire_s]
    return [row.cluster, row.model, row.plan, *shown, f"{row.error:+.1%}", *wire, f"{1e3 * row.late_s:.0f}"]


def collective_rows(rows: Sequence[Row]) -> list[list[object]]:
    """By cluster, collective, decomposition and size to the next lower power of two."""
    groups: dict[tuple[str, str, str, int], list[Call]] = {}
    for row in rows:
        for c in row.calls:
            size = 1 << (c.nbytes.bit_length() - 1)
            groups.setdefault((row.cluster, c.kind, base_name(c.decomposition), size), []).append(c)
    found: list[list[object]] = []
    for (cluster_name, kind, decomposition, size), calls in sorted(groups.items()):
        predicted, measured = [1e3 * c.predicted_s for c in calls], [1e3 * c.measured_s for c in calls]
        three = (statistics.mean(measured), min(measured), max(measured))
        shown = [f"{s:.2f}" for s in (statistics.mean(predicted), *three)]
        found.append([cluster_name, kind, decomposition, f"{size / 1e3:.3g}", len(calls), *shown])
    return found
