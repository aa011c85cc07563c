"""How long a quick search takes (``effort="quick"``), and how much longer its plans' steps are than a whole search's.

The cases are those of ``planning.py``, planned in the same way: seconds are of ``plan_graph`` with its choices by the
wall clock, on two cores, capture apart, and devices may be left out. What a whole search finds is read from
``planning.json``, whose seconds may be of another machine; what has no plan there is left out. Steps are compared as
they are run, those of graphs that are too large to be played with nothing overlapped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.common import Report, parse
from benchmarks.planning_cases import LARGE, SMALL, USUAL, asked, captured, cluster, plans_before, titled
from hap.rules.choices import choices
from hap.search import plan_graph

NAME = "planning_quick"
QUICK = ("gpt2@mix-4", "vgg19@mix-16")
ALIKE = 0.01  # of a step
COLUMNS = ("model", "cluster", "devices", "used", "s", "step ms", "bound ms", "gap", "as run ms", "longer")


@dataclass(frozen=True)
class Row:
    """``devices`` of the cluster, ``used`` by the plan; steps and bound in seconds, ``overlapped_s`` as run, where that
    was played."""

    model: str
    cluster: str
    devices: int
    used: int
    wall_s: float
    step_s: float
    bound_s: float
    overlapped_s: float | None

    @property
    def gap(self) -> float:
        return 1.0 - self.bound_s / self.step_s

    def longer(self, normal: Mapping[str, Any]) -> float:
        """The step's part above that of a whole search's plan."""
        if self.overlapped_s is None or normal["overlapped_s"] is None:
            return float(self.step_s / normal["step_s"] - 1.0)
        return float(self.overlapped_s / normal["overlapped_s"] - 1.0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="CASES", help="such as gpt2@mix-4, separated by commas")
    options = parse(NAME, "How long a quick search takes, and what its plans are worth.", argv, parser, ("--only",))
    torch.set_num_threads(1)
    normal, only = plans_before(options.out), asked(options.extra.only, parser)
    wanted = only or (QUICK if options.quick else (*USUAL, *LARGE))
    unknown = [case for case in wanted if case not in normal]
    if unknown and (only or len(unknown) == len(wanted)):
        parser.error(f"planning.py has no plan of {', '.join(unknown)}; run it first")
    report = Report(NAME, "Planning: a quick search", options)
    for case in unknown:
        report.missing(case, "planning.py has no plan of it")
        print(f"{case}: left out, as planning.py has no plan of it", file=sys.stderr, flush=True)
    rows: dict[str, Row] = {}
    for case in (case for case in wanted if case in normal):
        rows[case] = row = planned(case)
        print(f"{case}: {row.wall_s:.1f} s, {row.longer(normal[case]):+.1%}", file=sys.stderr, flush=True)
    _figures(report, rows, normal)
    report.table("Cases", COLUMNS, [_cells(row, row.longer(normal[case])) for case, row in rows.items()])
    report.text(
        "Seconds are of the whole search by the clock on the wall, capture apart. Step and bound have nothing "
        "overlapped; the bound is not raised. *Longer*: the step as run, or where it is not played with nothing "
        "overlapped, beside that of the plan in `planning.json`."
    )
    path = report.write(None)
    body = json.loads(path.read_text())
    body["cases"] = {
        case: asdict(row)
        | {"gap": row.gap, "longer": row.longer(normal[case]), "normal_wall_s": normal[case]["wall_s"]}
        for case, row in rows.items()
    }
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return 0


def planned(case: str) -> Row:
    """Capture, then plan by the clock."""
    model, name = case.split("@")
    spec = cluster(name)
    graph = captured(model, spec.world_size)
    began = time.perf_counter()
    plan = plan_graph(choices(graph), spec, leave_out=True, effort="quick")
    wall_s, p = time.perf_counter() - began, plan.predicted
    assert p.lower_bound_s is not None
    return Row(model, name, spec.world_size, plan.world_size, wall_s, p.step_s, p.lower_bound_s, p.overlapped_s)


def _figures(report: Report, rows: Mapping[str, Row], normal: Mapping[str, Any]) -> None:
    small = {case: row for case, row in rows.items() if row.cluster in SMALL}
    report.figure("cases", len(rows))
    if small:
        longer = [row.longer(normal[case]) for case, row in small.items()]
        report.figure("worst_seconds_to_128", max(row.wall_s for row in small.values()))
        report.figure("worst_seconds_to_16", max((r.wall_s for r in small.values() if r.devices <= 16), default=0.0))
        report.figure("cases_to_128", len(small))
        report.figure("cases_to_128_within_1_percent", sum(part <= ALIKE for part in longer))
        report.figure("worst_longer_to_128", max(longer))
        report.figure("median_longer_to_128", statistics.median(longer))
        report.figure("worst_gap_to_128", max(row.gap for row in small.values()))
    for case, row in rows.items():
        if case not in small:
            report.figure(f"seconds_{row.devices}", row.wall_s)
            report.figure(f"gap_{row.devices}", row.gap)
            report.figure(f"longer_{row.devices}", row.longer(normal[case]))


def _cells(row: Row, longer: float) -> list[str]:
    run = "" if row.overlapped_s is None else f"{row.overlapped_s * 1e3:.1f}"
    numbers = [f"{row.wall_s:.1f}", f"{row.step_s * 1e3:.1f}", f"{row.bound_s * 1e3:.1f}", f"{row.gap:.1%}"]
    return [titled(row.model), row.cluster, str(row.devices), str(row.used), *numbers, run, f"{longer:+.1%}"]


if __name__ == "__main__":
    sys.exit(main())
