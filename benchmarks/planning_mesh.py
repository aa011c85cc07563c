"""Plans of two axes beside plans of one, by the cost model: the cases of ``planning_cases`` with more than one host.

Both are planned in one run, with ``leave_out``. Steps are predicted with nothing overlapped and as run;
``benchmarks/mesh.py`` measures some. Llama 2 7B also gets small batches on equal hosts whose devices do not hold it
alone.

    python benchmarks/planning_mesh.py [--quick] [--only gpt2@mix-4,...]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.common import Report, parse
from benchmarks.planning_cases import LLAMAS, USUAL, asked, captured, cluster, of_graph
from hap.cluster import ClusterSpec
from hap.errors import InfeasibleError, PlanError
from hap.graph import Graph
from hap.rules.choices import Choices, choices
from hap.search.mesh import plan_mesh
from hap.search.planner import plan_graph

NAME = "planning_mesh"
QUICK = ("gpt2@mix-4", "vgg19@mix-4")
SMALL_BATCHES = (8, 16, 32)  # of Llama 2 7B, on as many hosts of 4 A100-40GB as ``SAME``
SAME = (2, 4)
HOST = (
    "  - {{name: h{i}, devices: [{{gpu: A100-40GB, count: 4}}], link: nvlink, "
    "network: {{bandwidth: 400Gbit/s, latency: 20us}}}}\n"
)


@dataclass(frozen=True)
class Row:
    """Seconds; the bounds are for steps with nothing overlapped, each for plans of its kind. ``why`` says what there is
    instead of a plan."""

    case: str
    flat_s: float = 0.0
    flat_as_run_s: float = 0.0
    mesh_s: float = 0.0
    mesh_as_run_s: float = 0.0
    sums_s: float = 0.0
    flat_bound_s: float = 0.0
    mesh_bound_s: float = 0.0
    searched_s: tuple[float, float] = (0.0, 0.0)
    parts: str = ""
    why: str = ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="CASES", help="such as gpt2@mix-4, separated by commas")
    options = parse(NAME, "Plans of two axes beside plans of one, by the cost model.", argv, parser, ("--only",))
    torch.set_num_threads(1)
    every = [*USUAL]
    every += [f"llama_7b/{batch}@{hosts}x4" for hosts in SAME for batch in SMALL_BATCHES]
    alone = rf"({'|'.join(LLAMAS)})/[1-9]\d*@[1-9]\d*x4"
    wanted = asked(options.extra.only, parser, alone) or (QUICK if options.quick else every)
    report = Report(NAME, "Planning: one axis and two", options)
    rows = []
    for case in wanted:
        rows.append(compare(case))
        print(rows[-1], file=sys.stderr, flush=True)
    write(report, rows)


def compare(case: str) -> Row:
    graph, spec = stated(case)
    possible = choices(graph)
    began = time.monotonic()
    flat, why = _flat(possible, spec)
    middle = time.monotonic()
    row = Row(case, *flat[:2], flat_bound_s=flat[2], why=why)
    try:
        mesh = plan_mesh(possible, spec, leave_out=True)
    except (InfeasibleError, PlanError) as e:
        return replace(row, why="; ".join(filter(None, [why, f"two axes: {e}"])))
    return replace(
        row,
        mesh_s=mesh.predicted.step_s,
        mesh_as_run_s=mesh.predicted.as_run_s,
        sums_s=mesh.predicted.sums_s,
        mesh_bound_s=mesh.predicted.lower_bound_s,
        searched_s=(middle - began, time.monotonic() - middle),
        parts="+".join(str(h.batch) for h in mesh.hosts),
    )


def _flat(possible: Choices, spec: ClusterSpec) -> tuple[tuple[float, float, float], str]:
    try:
        predicted = plan_graph(possible, spec, leave_out=True).predicted
    except InfeasibleError as e:
        return (0.0, 0.0, 0.0), f"one axis: {e}"
    return (predicted.step_s, predicted.as_run_s, predicted.lower_bound_s or 0.0), ""


def stated(case: str) -> tuple[Graph, ClusterSpec]:
    """``model@cluster`` of ``planning_cases``, or ``llama_7b/BATCH@HOSTSx4``."""
    model, name = case.split("@")
    if "/" not in model:
        spec = cluster(name)
        return captured(model, spec.world_size), spec
    model, batch = model.split("/")
    hosts = "".join(HOST.format(i=i) for i in range(int(name.removesuffix("x4"))))
    spec = ClusterSpec.from_yaml(f"name: same-{name}\nbackend: nccl\nhosts:\n{hosts}")
    llama = replace(LLAMAS[model], batch=(int(batch), LLAMAS[model].batch[1]))
    return of_graph(model, llama.build()), spec


def write(report: Report, rows: Sequence[Row]) -> None:
    both = [r for r in rows if r.mesh_s and r.flat_s]
    report.figure("cases", len(rows))
    report.figure("two_axes_only", sum(bool(r.mesh_s) and not r.flat_s for r in rows))
    report.figure("shorter_on_two_axes", sum(r.mesh_as_run_s < r.flat_as_run_s for r in both))
    report.figure("shorter_with_nothing_overlapped", sum(r.mesh_s < r.flat_s for r in both))
    best = min((r.mesh_as_run_s / r.flat_as_run_s for r in both), default=1.0)
    report.figure("best_ratio_as_run", best)
    report.figure("best_ratio", min((r.mesh_s / r.flat_s for r in both), default=1.0))
    report.figure("worst_gap_of_two_axes", max((1 - r.mesh_bound_s / r.mesh_s for r in both), default=0.0))
    columns = ["case", "one axis ms", "bound", "as run", "two axes ms", "bound", "as run", "sums over hosts"]
    columns += ["two / one", "as run"]
    report.table("Predicted steps", [*columns, "searched s", "batch", ""], [_cells(r) for r in rows])
    report.text("Predicted by the cost model: nothing here was timed but the searches, one after the other.")
    report.write(None)


def _cells(r: Row) -> list[str]:
    def ms(seconds: float) -> str:
        return f"{1e3 * seconds:.1f}" if seconds else "-"

    ratios = ["-", "-"]
    if r.mesh_s and r.flat_s:
        ratios = [f"{r.mesh_s / r.flat_s:.3f}", f"{r.mesh_as_run_s / r.flat_as_run_s:.3f}"]
    flat, mesh = (r.flat_s, r.flat_bound_s, r.flat_as_run_s), (r.mesh_s, r.mesh_bound_s, r.mesh_as_run_s)
    return [
        r.case,
        *map(ms, (*flat, *mesh, r.sums_s)),
        *ratios,
        " + ".join(f"{s:.1f}" for s in r.searched_s),
        r.parts,
        r.why,
    ]


if __name__ == "__main__":
    main()
