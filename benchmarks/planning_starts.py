"""Whether the search would find a shorter step if it began elsewhere.

Every case of ``planning_cases`` on up to 128 devices is planned with its slowest devices left out where that is
faster. The devices that the plan is for are then planned for again, from one beginning alone and another one each time:
how much of the work and of the parameters lies on each host is drawn at random (a Dirichlet distribution; on some hosts
nothing), and inside a host devices share by speed. All else is the search as it is: its rounds, the plans that the
judge knows without a beginning, and what is moved at the end. A proved gap says how far a plan may be from the best at
most; this, what was met on the way to it.

    python benchmarks/planning_starts.py [--only gpt2@mix-4,vit@hap] [--beginnings 8]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from benchmarks.common import Report, parse
from benchmarks.planning_cases import USUAL, asked, captured, cluster, titled, used_by
from hap.errors import InfeasibleError
from hap.fabric import Array
from hap.plan import Plan
from hap.rules.choices import choices
from hap.search import plan_graph
from hap.search.judge import TIE
from hap.search.problem import Problem
from hap.search.starts import Start

NAME = "planning_starts"
QUICK = ("vgg19@mix-4",)
EMPTY = 0.4  # of the beginnings leave hosts without anything, each with a chance of one half
COLUMNS: tuple[str, ...] = ("model", "cluster", "devices", "s", "as run ms", "others' shortest")
COLUMNS += ("nothing overlapped ms", "shortest", "unfit")


@dataclass(frozen=True)
class Row:
    """Seconds: the plan's step as run and the shortest of all from other beginnings, and likewise of the shortest step
    with nothing overlapped that either met. ``unfit``: beginnings from which nothing was found that fits."""

    model: str
    cluster: str
    used: int
    wall_s: float
    run_s: float
    other_run_s: float
    bulk_s: float
    other_bulk_s: float
    unfit: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="CASES", help="such as gpt2@mix-4, separated by commas")
    parser.add_argument("--beginnings", type=int, default=8, help="of every case")
    options = parse(NAME, "Whether another beginning leads to a shorter step.", argv, parser, ("--only",))
    torch.set_num_threads(1)
    every = USUAL
    wanted = asked(options.extra.only, parser) or (QUICK if options.quick else every)
    report = Report(NAME, "Planning from other beginnings", options)
    rows = []
    for case in wanted:
        rows.append(compared(*case.split("@"), beginnings=options.extra.beginnings))
        print(f"{case}: {rows[-1].other_run_s / rows[-1].run_s:.4f} as run", file=sys.stderr, flush=True)
    if left := [case for case in every if case not in wanted]:
        report.missing("other cases", f"not in this result: {', '.join(left)}")
    runs = [r.other_run_s / r.run_s for r in rows]
    bulk = [r.other_bulk_s / r.bulk_s for r in rows]
    report.figure("cases", len(rows))
    report.figure("beginnings", options.extra.beginnings)
    report.figure("shortest_over_plan_as_run", min(runs))
    report.figure("cases_shorter_as_run", sum(x < 1 - TIE for x in runs))
    report.figure("shortest_over_plan_nothing_overlapped", min(bulk))
    report.figure("cases_shorter_nothing_overlapped", sum(x < 1 - TIE for x in bulk))
    report.text(
        f"From {options.extra.beginnings} random beginnings each, on the devices that the plan is for. Counted as "
        f"shorter is more than {TIE:.0%}, which the judge does not tell apart. The step with nothing overlapped is the "
        "shortest that was met; plans are chosen by the other. `unfit`: beginnings from which nothing fits."
    )
    report.table("Cases", COLUMNS, [_cells(row) for row in rows])
    report.write(None)
    return 0


def compared(model: str, name: str, *, beginnings: int) -> Row:
    """The plan, and what other beginnings come to on its devices."""
    began, spec = time.perf_counter(), cluster(name)
    found = choices(captured(model, spec.world_size))
    plan = plan_graph(found, spec, leave_out=True)
    used, others, unfit = used_by(plan, spec), list[Plan](), 0
    for seed in range(beginnings):
        with mock.patch("hap.search.planner.find_starts", _beginning(seed)):
            try:
                others.append(plan_graph(found, used))
            except InfeasibleError:
                unfit += 1
    if not others:
        raise SystemExit(f"{model}@{name}: nothing fits from any of {beginnings} beginnings; ask for more")
    return Row(
        model,
        name,
        used.world_size,
        time.perf_counter() - began,
        plan.predicted.as_run_s,
        min(p.predicted.as_run_s for p in others),
        _least_s(plan),
        min(_least_s(p) for p in others),
        unfit,
    )


def _least_s(plan: Plan) -> float:
    """The shortest step with nothing overlapped that was met."""
    return min(plan.predicted.step_s, plan.provenance.solver.get("least_step_s", np.inf))


def _beginning(seed: int) -> Callable[[Problem], list[Start]]:
    def drawn(problem: Problem) -> list[Start]:
        rng = np.random.default_rng(seed)
        working, storing = (_drawn(problem, rng) for _ in range(2))
        return [Start(tuple(working.tolist()), tuple(storing.tolist()))]

    return drawn


def _drawn(problem: Problem, rng: np.random.Generator) -> Array:
    """(N,) shares."""
    hosts, speed = [d.host for d in problem.cluster.devices], 1.0 / problem.whole_s
    names = list(dict.fromkeys(hosts))
    parts = rng.dirichlet(np.ones(len(names)))
    kept = rng.random(len(names)) < 0.5
    if rng.random() < EMPTY and kept.any():
        parts = np.where(kept, parts, 0.0)
    of = np.array([names.index(host) for host in hosts])
    shares: Array = parts[of] * speed / np.bincount(of, weights=speed)[of]
    return shares / shares.sum()


def _cells(row: Row) -> list[str]:
    run, bulk = (f"{x * 1e3:.1f}" for x in (row.run_s, row.bulk_s))
    other, least = f"{row.other_run_s / row.run_s:.4f}", f"{row.other_bulk_s / row.bulk_s:.4f}"
    return [titled(row.model), row.cluster, str(row.used), f"{row.wall_s:.0f}", run, other, bulk, least, str(row.unfit)]


if __name__ == "__main__":
    raise SystemExit(main())
