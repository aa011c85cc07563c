"""How long planning takes, and how far a plan is from the best: seconds, variables, predicted step, bound, gap.

The cases are those of ``planning_cases``. Seconds are of ``plan_graph`` with its choices by the wall clock, on two
cores, as bounds are proved in a process of their own; CPU seconds are of both processes. Each case is planned in a new
process, after its capture, which is apart: nothing is known or loaded from the case before; what takes less than
``SHORT_S`` so ``RUNS`` times, as machines are shared, and the median counts. Rows that are not planned stay as they
were in the last result, each with the commit and the CPU that it was taken on, so that a long list can be run in
pieces. What ``planning_ablations.py``,
``planning_sailor.py``, ``planning_hap.py`` and ``planning_astar.py`` found is read from their results, if any.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.common import COLOURS, RESULTS, Report, Spread, drawing, machine, markdown_table, parse
from benchmarks.planning_cases import LARGE, SMALL, USUAL, asked, captured, cluster, titled, used_by
from hap.cluster import ClusterSpec
from hap.deferral import Batches
from hap.errors import HapError, InfeasibleError
from hap.plan import Plan
from hap.rules.choices import Choices, choices
from hap.search import plan_graph
from hap.search.gap import gap_terms
from hap.search.pins import Pins
from hap.search.prices import Facts
from hap.search.problem import Problem
from hap.search.relaxation import lower_bound
from hap.search.subsets import slowest_kinds, without

NAME = "planning"
PARTS = ("ablations", "sailor", "hap", "astar")
QUICK = ("gpt2@mix-4", "vgg19@mix-16")
MANY = 1024  # devices of the largest case
SHORT_S, RUNS = 5.0, 3  # of a search that takes less, the median of so many
T = TypeVar("T")
CLOSE = 0.005  # of a step: what is nearer is not another
COLUMNS: tuple[str, ...] = ("model", "cluster", "devices", "used", "s", "CPU s", "variables", "step ms", "bound ms")
COLUMNS += ("gap", "shortest ms", "its gap", "as run ms", "its gap", "tight")
TERMS = (
    "case",
    "step - bound",
    "waiting",
    "on every rank",
    "collectives",
    "strategies",
    "devices",
    "bound: compute",
    "bound: wire",
)


@dataclass(frozen=True)
class Row:
    """One planned case. Where no plan was found, ``failure`` says why and the rest is zero. ``terms_ms``: what the
    step, and the bound, consist of. ``least_s``: the shortest step with nothing overlapped that was found on any of the
    clusters that the bound is for, where that is another plan's. ``overlapped_bound_s``: what was proved of the step as
    it is run, on the devices used. ``runs_s``: seconds of each search, of which ``wall_s`` is the median. ``commit``,
    ``cpu``: of the run that planned it, None where an old result does not tell."""

    model: str
    cluster: str
    devices: int
    cpu_s: float
    wall_s: float
    variables: int = 0
    step_s: float = 0.0
    bound_s: float = 0.0
    overlapped_s: float | None = None
    tight: str = ""
    terms_ms: tuple[float, ...] = ()
    failure: str = ""
    used: int = 0  # devices that take part
    least_s: float | None = None
    overlapped_bound_s: float | None = None
    runs_s: Sequence[float] = ()
    batches: int = 1
    commit: str | None = None
    cpu: str | None = None

    @property
    def name(self) -> str:
        return f"{self.model}@{self.cluster}"

    @property
    def gap(self) -> float:
        return 1.0 - self.bound_s / self.step_s if self.step_s else 1.0

    @property
    def least_gap(self) -> float:
        """How far the search is from the best by the clock that the bound is for."""
        return self.gap if self.least_s is None else 1.0 - self.bound_s / self.least_s

    @property
    def given_up(self) -> float:
        """What of the gap no bound can close: another plan that was found is shorter by its clock."""
        return 0.0 if self.least_s is None else 1.0 - self.least_s / self.step_s

    @property
    def gap_as_run(self) -> float | None:
        """Of the step as it is run, to the bound for that."""
        if self.overlapped_s is None or self.overlapped_bound_s is None:
            return None
        return 1.0 - self.overlapped_bound_s / self.overlapped_s


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="CASES", help="such as gpt2@mix-4, separated by commas")
    parser.add_argument("--batches", type=int, default=1, help="of a step, whose gradients are added up; with --out")
    parser.add_argument("--tables", action="store_true", help="plan nothing: the rows of the last result again")
    options = parse(NAME, "How long planning takes, and how far a plan is from the best.", argv, parser)
    if options.extra.batches != 1 and options.out.resolve() == RESULTS:
        parser.error("--batches: the results are of steps of one batch; --out another folder")
    every = [*USUAL, *LARGE]
    wanted = asked(options.extra.only, parser) or (QUICK if options.quick else every)
    wanted = [] if options.extra.tables else wanted
    known = _known(options.out, options.extra.batches)
    report = Report(NAME, "Planning: seconds, and the gap to a proved bound", options)
    if options.extra.tables:
        if not known:
            parser.error(f"--tables: {options.out} has no result of this benchmark")
        body = json.loads((options.out / f"{NAME}.json").read_text())
        if "command" in body:  # else its first run was cut off
            report.taken_by(body)
    cpu = machine()["cpu"]
    for case in wanted:
        row = _timed(case, options.extra.batches)
        known[case] = replace(row, batches=options.extra.batches, commit=report.commit, cpu=cpu)
        print(_line(known[case]), file=sys.stderr, flush=True)
        _keep(options.out, known)
    rows = [known[case] for case in dict.fromkeys([*every, *known]) if case in known]
    parts = {part: json.loads(p.read_text()) for part in PARTS if (p := options.out / f"{NAME}_{part}.json").is_file()}
    _figures(report, rows, parts)
    if left := [case for case in every if case not in known]:
        report.missing("other cases", f"not in this result, `--only` adds them: {', '.join(left)}")
    of = Counter(f"{row.commit or 'a commit not told'} on {row.cpu or 'a CPU not told'}" for row in rows)
    if len(of) > 1:
        report.text(f"Rows are of several runs: {', '.join(f'{count} at {run}' for run, count in of.items())}.")
    report.table("Cases", COLUMNS, [_cells(row) for row in rows])
    report.text(
        "What lies between step and bound, in ms: ranks wait for the slowest (whole numbers of samples, one vector of "
        "shares for unlike stages); launches and whole operands on every rank, which the relaxation lets shares scale; "
        "collectives above the least that any shares allow; strategies that would be cheaper if relaxed; other "
        "devices, whose bound is less. And what the bound for the devices used consists of.\n\n"
        + markdown_table(TERMS, [[r.name, *(f"{t:.1f}" for t in r.terms_ms)] for r in rows if r.terms_ms])
    )
    with drawing(1, 2, width=6.0, height=1.0 + 0.25 * len(rows)) as (figure, axes):
        _draw(axes, rows)
        path = report.write(figure)
    assert path == options.out / f"{NAME}.json"
    _keep(options.out, {r.name: r for r in rows})
    return 0


def _keep(out: Path, rows: Mapping[str, Row]) -> None:
    """The rows beside the figures, after every case: a run that is cut off loses none."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{NAME}.json"
    body = json.loads(path.read_text()) if path.is_file() else {}
    body["cases"] = {case: asdict(r) | {"gap": r.gap, "gap_as_run": r.gap_as_run} for case, r in rows.items()}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def _known(out: Path, batches: int) -> dict[str, Row]:
    """The rows of the last result that are of as many batches. Old ones without a commit are of the run that left the
    result, if that was of all cases."""
    path = out / f"{NAME}.json"
    if not path.is_file():
        return {}
    body = json.loads(path.read_text())
    whole = "command" in body and "--only" not in body["command"]
    about = {"commit": body["commit"], "cpu": body["machine"]["cpu"]} if whole else {}
    found = body.get("cases", {}).items()
    rows = {case: Row(**about | {k: v for k, v in row.items() if not k.startswith("gap")}) for case, row in found}
    return {case: row for case, row in rows.items() if row.batches == batches}


def _timed(case: str, batches: int) -> Row:
    """With the median of several runs, each in a process that ends with it, where one does not take long."""
    row = _alone(planned, case, batches)
    more = RUNS - 1 if row.wall_s < SHORT_S and not row.failure else 0
    runs = sorted([(row.wall_s, row.cpu_s), *(_alone(seconds, case, batches) for _ in range(more))])
    wall_s, cpu_s = runs[len(runs) // 2]
    return replace(row, wall_s=wall_s, cpu_s=cpu_s, runs_s=[wall_s for wall_s, _ in runs])


def _alone(what: Callable[[str, str, int], T], case: str, batches: int) -> T:
    """In a process that ends with it."""
    new = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=new, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        model, name = case.split("@")
        return pool.submit(what, model, name, batches).result()


def seconds(model: str, name: str, batches: int = 1) -> tuple[float, float]:
    """Of planning, by the clock and of CPUs, capture apart."""
    spec = cluster(name)
    graph = captured(model, spec.world_size)
    began, wall = _cpu_s(), time.perf_counter()
    plan_graph(choices(graph), spec, leave_out=True, batches=batches)
    return time.perf_counter() - wall, _cpu_s() - began


def planned(model: str, name: str, batches: int = 1) -> Row:
    """Capture, then plan by the clock, then ask what the bound consists of."""
    spec = cluster(name)
    graph = captured(model, spec.world_size)
    began, wall = _cpu_s(), time.perf_counter()
    try:
        found = choices(graph)
        plan = plan_graph(found, spec, leave_out=True, batches=batches)
    except HapError as e:
        cpu_s, wall_s = _cpu_s() - began, time.perf_counter() - wall
        return Row(model, name, spec.world_size, cpu_s, wall_s, failure=str(e))
    cpu_s, wall_s = _cpu_s() - began, time.perf_counter() - wall
    p = plan.predicted
    of_step = Batches.of(graph, batches)
    facts = Problem.state(found, used_by(plan, spec), plan.provenance.optimizer, Pins(), of_step).facts
    return Row(
        model,
        name,
        spec.world_size,
        cpu_s,
        wall_s,
        variables=plan.provenance.solver["variables"],
        step_s=p.step_s,
        bound_s=p.lower_bound_s or 0.0,
        overlapped_s=p.overlapped_s,
        tight=p.tight,
        terms_ms=_terms(facts, plan),
        used=plan.world_size,
        least_s=_shortest_s(found, spec, plan, apart=batches == 1 and name in SMALL),
        overlapped_bound_s=p.overlapped_bound_s,
    )


def _shortest_s(found: Choices, spec: ClusterSpec, plan: Plan, *, apart: bool) -> float | None:
    """With nothing overlapped, of all plans met; ``apart``: also by a search of its own for all devices, and for those
    left without each of the slowest kinds. None where that is the plan's own."""
    whole_s = Problem.state(found, spec, plan.provenance.optimizer, Pins()).whole_s.tolist()
    plans = [plan]
    for ranks in ((), *slowest_kinds(spec.devices, whole_s)) if apart else ():
        try:
            plans.append(plan_graph(found, without(spec, ranks) if ranks else spec))
        except InfeasibleError:
            continue
    least_s = min(p.provenance.solver.get("least_step_s", p.predicted.step_s) for p in plans)
    return least_s if least_s < plan.predicted.step_s * (1 - CLOSE) else None


def _cpu_s() -> float:
    """Of this process and those that it made and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _terms(facts: Facts, plan: Plan) -> tuple[float, ...]:
    p, terms, lower = plan.predicted, gap_terms(facts, plan), lower_bound(facts)
    if terms is None or lower is None or p.lower_bound_s is None:
        return ()
    between = (p.step_s - p.lower_bound_s, *terms, lower.compute_s, lower.seconds - lower.compute_s)
    return tuple(1e3 * t for t in between)


# ---- what is said ----


def _figures(report: Report, rows: Sequence[Row], parts: Mapping[str, Any]) -> None:
    known = [r for r in rows if not r.failure]
    small, large = [r for r in known if r.cluster in SMALL], [r for r in known if r.devices == MANY]
    report.figure("cases", len(rows))
    report.figure("cases_planned", len(known))
    if small:
        report.figure("worst_gap_to_128", max(r.gap for r in small))
        report.figure("worst_gap_to_128_of_the_shortest_found", max(r.least_gap for r in small))
        report.figure("worst_gap_to_128_that_no_bound_can_close", max(r.given_up for r in small))
        report.figure("gaps_to_128_within_3_percent", sum(r.gap <= 0.03 for r in small))
        report.figure("gaps_to_128_within_3_percent_of_the_shortest_found", sum(r.least_gap <= 0.03 for r in small))
        if as_run := [r.gap_as_run for r in small if r.gap_as_run is not None]:
            report.figure("worst_gap_to_128_as_run", max(as_run))
            report.figure("gaps_to_128_as_run_within_3_percent", sum(gap <= 0.03 for gap in as_run))
        for most in (128, 16):
            worst = max((r for r in small if r.devices <= most), key=lambda r: r.wall_s, default=None)
            if worst is not None:
                report.figure(f"worst_seconds_to_{most}", worst.wall_s, Spread.of(worst.runs_s or [worst.wall_s]))
    for r in known:
        if r.cluster not in SMALL and r not in large:
            key = r.devices if r.name in LARGE else r.name
            report.figure(f"seconds_{key}", r.wall_s)
            report.figure(f"gap_{key}", r.gap)
    if large:
        report.figure("seconds_1024", max(r.wall_s for r in large))
        report.figure("gap_1024", max(r.gap for r in large))
    else:
        for name in ("seconds_1024", "gap_1024"):
            report.missing(name, "no case of 1,024 devices has been planned")
    for part in PARTS:
        for name, value in parts.get(part, {}).get("figures", {}).items():
            report.figure(f"{part}: {name}" if name in report.figures else name, value)
        if part not in parts:
            report.missing(part, f"planning_{part}.py has not been run")
    report.text(
        "Seconds are of the whole search by the clock on the wall, on two cores, capture apart, and where that takes "
        f"less than {SHORT_S:.0f} of them the median of {RUNS} searches, each in a process of its own; CPU seconds of "
        "the search and of the process beside it that proves bounds, which may be ended before it is done. Step and "
        "bound are the cost model's, without overlap; `as run` is the step of the program after its passes, and `its "
        "gap` is to what no plan for the devices used runs in less than. The bound of the other step holds "
        "for all strategies and all shares on all devices of the cluster, and on those that are left without its "
        "slowest kinds, or are the plan's: where a job on fewer devices is faster, the plan is for these. `shortest`: "
        "another plan that is shorter with nothing overlapped, met on the way or, outside the seconds, by searches for "
        "all devices and for those left without the slowest kinds; the one chosen is so by its step as run, and no "
        "bound can close that part of its gap. `tight` says what limits the step."
    )


def _line(row: Row) -> str:
    if row.failure:
        return f"{row.name}: {row.failure}"
    return f"{row.name}: {row.wall_s:.1f} s, step {row.step_s * 1e3:.1f} ms, gap {row.gap:.1%}"


def _cells(row: Row) -> list[str]:
    first = [titled(row.model), row.cluster, str(row.devices), str(row.used or ""), f"{row.wall_s:.1f}"]
    first.append(f"{row.cpu_s:.1f}")
    if row.failure:
        return [*first, "", "", "", "", "", "", "", "", row.failure]
    run = ["" if row.overlapped_s is None else f"{row.overlapped_s * 1e3:.1f}"]
    run.append("" if row.gap_as_run is None else f"{row.gap_as_run:.1%}")
    numbers = [str(row.variables), f"{row.step_s * 1e3:.1f}", f"{row.bound_s * 1e3:.1f}", f"{row.gap:.1%}"]
    other = ["", ""] if row.least_s is None else [f"{row.least_s * 1e3:.1f}", f"{row.least_gap:.1%}"]
    return [*first, *numbers, *other, *run, row.tight]


def _draw(axes: Sequence[Any], rows: Sequence[Row]) -> None:
    places, titles = range(len(rows)), [r.name for r in rows]
    left, right = axes
    left.barh(places, [r.wall_s for r in rows], color=COLOURS[0])
    left.set(title="Planning, capture apart", xlabel="s", yticks=places, yticklabels=titles)
    right.barh(places, [100 * r.gap for r in rows], color=COLOURS[1])
    right.set(title="Gap to the bound", xlabel="% of the step", yticks=places)
    right.set_yticklabels([])


if __name__ == "__main__":
    sys.exit(main())
