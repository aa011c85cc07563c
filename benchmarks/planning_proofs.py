"""How near the best plan the planner's plans are, where more is proved of them: ``effort="thorough"``.

The cases are those of ``planning_cases`` on up to 128 devices, as ``planning.py`` plans them, and of them those whose
gap is above 3 % there, unless ``--all``. Plans are the same; the bound is raised by boxes of the batch's and other
groups' sizes (``search/cases.py``) until the gap is 2 %, or 500 boxes have been looked at. With ``--only`` the other
rows stay as they were in the last result, each with the commit and the CPU that it was taken on, if ``planning.py``
still has that plan.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.common import Report, machine, parse
from benchmarks.planning_cases import USUAL, asked, captured, cluster, plans_before, titled
from hap.rules.choices import choices
from hap.search import plan_graph

NAME = "planning_proofs"
QUICK = ("gpt2@mix-4",)
ASKED = 0.03  # of a gap
SAME = 1e-3  # of the step: plans that differ by more are not the same
COLUMNS = ("model", "cluster", "s", "on", "step ms", "bound ms", "gap", "normal gap")


@dataclass(frozen=True)
class Row:
    """``wall_s`` on ``cpu``, at ``commit``, None where an old result does not tell."""

    model: str
    cluster: str
    wall_s: float
    step_s: float
    bound_s: float
    cpu: str
    commit: str | None = None

    @property
    def gap(self) -> float:
        return 1.0 - self.bound_s / self.step_s


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="CASES", help="such as gpt2@mix-4, separated by commas")
    parser.add_argument("--all", action="store_true", help="those with small gaps, too")
    options = parse(NAME, "How near the best plan plans are, where more is proved of them.", argv, parser)
    torch.set_num_threads(1)
    normal, every, only = plans_before(options.out), USUAL, asked(options.extra.only, parser)
    loose = [case for case in every if case in normal and (options.extra.all or normal[case]["gap"] > ASKED)]
    wanted = only or (QUICK if options.quick else loose)
    if others := [case for case in wanted if case not in every]:
        parser.error(f"{', '.join(others)}: not one of the cases on up to 128 devices")
    if unknown := [case for case in wanted if case not in normal]:
        parser.error(f"planning.py has no plan of {', '.join(unknown)}; run it first")
    path = options.out / f"{NAME}.json"
    known: dict[str, Row] = {}
    if only and path.is_file():
        stored = json.loads(path.read_text())
        about = {} if "--only" in stored["command"] else {"commit": stored["commit"]}
        rows_of = stored["cases"].items()
        known = {case: Row(**about | {k: v for k, v in row.items() if k != "normal_gap"}) for case, row in rows_of}
    report = Report(NAME, "Planning: gaps to bounds that more was done for", options)
    for case in wanted:
        known[case] = row = replace(proved(case), commit=report.commit)
        raised = f"gap {normal[case]['gap']:.1%} -> {row.gap:.1%}"
        print(f"{case}: {row.wall_s:.1f} s, {raised}", file=sys.stderr, flush=True)
    for case in every:
        if case not in normal:
            report.missing(case, "planning.py has no plan of it")
            print(f"{case}: left out, as planning.py has no plan of it", file=sys.stderr, flush=True)
    there = {case: row for case, row in known.items() if case in normal}
    other = [case for case, row in there.items() if abs(row.step_s / normal[case]["step_s"] - 1) > SAME]
    for case in other:
        report.missing(case, "planning.py has another plan by now; ask both again")
    rows = {case: there[case] for case in every if case in there and case not in other}
    if not rows:
        parser.error("planning.py's result is of other plans than these; run it first")
    small = [normal[case]["gap"] for case in every if case in normal and case not in known]
    report.figure("cases", len(rows))
    report.figure("worst_gap", max(row.gap for row in rows.values()))
    report.figure("worst_seconds", max(row.wall_s for row in rows.values()))
    if len(rows) + len(small) == len(every):
        report.figure("cases_to_128", len(every))
        gaps = [*small, *(row.gap for row in rows.values())]
        report.figure("cases_to_128_within_3_percent", sum(gap <= ASKED for gap in gaps))
        report.figure("the_same_by_planning_alone", sum(normal[case]["gap"] <= ASKED for case in every))
    if len(commits := dict.fromkeys(str(row.commit) for row in rows.values())) > 1:
        report.text(f"Rows are of several runs, at {', '.join(commits)}.")
    report.table("Cases", COLUMNS, [_cells(row, normal[case]["gap"]) for case, row in rows.items()])
    report.text(
        "Seconds are of the whole search by the clock on the wall, capture apart. Step and bound have nothing "
        "overlapped. *Normal gap* is read from `planning.json`; cases that are not here are within 3 % there."
    )
    report.write(None)
    body = json.loads(path.read_text())
    body["cases"] = {case: asdict(row) | {"normal_gap": normal[case]["gap"]} for case, row in rows.items()}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return 0


def proved(case: str) -> Row:
    """Capture, then plan by the clock."""
    model, name = case.split("@")
    spec = cluster(name)
    found = choices(captured(model, spec.world_size))
    began = time.perf_counter()
    p = plan_graph(found, spec, leave_out=True, effort="thorough").predicted
    wall_s = time.perf_counter() - began
    assert p.lower_bound_s is not None
    return Row(model, name, wall_s, p.step_s, p.lower_bound_s, machine()["cpu"])


def _cells(row: Row, normal_gap: float) -> list[str]:
    numbers = [f"{1e3 * row.step_s:.1f}", f"{1e3 * row.bound_s:.1f}", f"{row.gap:.1%}", f"{normal_gap:.1%}"]
    return [titled(row.model), row.cluster, f"{row.wall_s:.1f}", row.cpu, *numbers]


if __name__ == "__main__":
    raise SystemExit(main())
