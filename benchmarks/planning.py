"""How long planning takes, and how far a plan is from the best: seconds, variables, predicted step, bound, gap.

Models at their published size, with a batch that grows with the cluster, on HAP's testbed and on mixes of three
generations of GPUs. Seconds are those of the whole ``plan_graph`` with its choices, in one process on one core; capture
is apart. The ablations fix what the search decides: shares by FLOP/s, even shares.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.common import COLOURS, ROOT, Report, drawing, parse
from benchmarks.zoo_models import find
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.errors import HapError
from hap.graph import Graph
from hap.plan import Plan
from hap.rules.choices import choices
from hap.search import Pins, plan_graph

NAME = "planning"
PER_DEVICE = {"gpt2": 4, "bert": 8, "vit": 32, "vgg19": 32, "hap_bert_moe": 32}  # samples
QUICK = ("gpt2@mix-4", "vgg19@mix-16")
ABLATED = ("gpt2@mix-16", "vgg19@mix-16")
COLUMNS = ("model", "cluster", "devices", "CPU s", "wall s", "variables", "step ms", "bound ms", "gap", "tight")
HOST = "  - {{name: h{i}, devices: [{{gpu: {gpu}, count: {count}}}], link: {link}, network: {network}}}\n"
FABRIC = {
    "A100-40GB": ("nvlink", "{bandwidth: 100Gbit/s, latency: 20us}"),
    "V100-16GB": ("nvlink", "{bandwidth: 25Gbit/s, latency: 30us}"),
    "T4": ("pcie3", "{bandwidth: 10Gbit/s, latency: 50us}"),
}
MIXES = {
    "mix-4": (("A100-40GB", 2), ("V100-16GB", 2)),
    "mix-16": (("A100-40GB", 4), ("V100-16GB", 4), ("V100-16GB", 4), ("T4", 4)),
    "mix-128": (("A100-40GB", 8),) * 4 + (("V100-16GB", 8),) * 8 + (("T4", 8),) * 4,
}


@dataclass(frozen=True)
class Row:
    """One planned case; ``plan`` is None where it failed, and ``failure`` says why."""

    model: str
    cluster: str
    devices: int
    cpu_s: float
    wall_s: float
    plan: Plan | None
    failure: str = ""

    @property
    def name(self) -> str:
        return f"{self.model}@{self.cluster}"

    @property
    def gap(self) -> float:
        return 1.0 if self.plan is None or self.plan.predicted.gap is None else self.plan.predicted.gap


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="CASES", help="such as gpt2@mix-4, separated by commas")
    options = parse(NAME, "How long planning takes, and how far a plan is from the best.", argv, parser)
    torch.set_num_threads(1)
    clusters = {"hap": ClusterSpec.load(ROOT / "examples" / "hap-paper.yaml")} | {m: mix(m) for m in MIXES}
    every = [f"{model}@{cluster}" for model in PER_DEVICE for cluster in clusters]
    wanted = options.extra.only.split(",") if options.extra.only else QUICK if options.quick else every
    report = Report(NAME, "Planning: seconds, and the gap to a proved bound", options)
    rows, ablations = [], []
    for case in wanted:
        model, _, name = case.partition("@")
        graph = captured(model, clusters[name].world_size)
        rows.append(planned(model, name, graph, clusters[name]))
        print(_line(rows[-1]), file=sys.stderr, flush=True)
        if case in ABLATED:
            ablations.append((rows[-1], ablated(graph, clusters[name])))
    _figures(report, rows, ablations)
    report.table("Cases", COLUMNS, [_cells(row) for row in rows])
    if ablations:
        table = [_ablation(*a) for a in ablations]
        report.table("Steps in ms, with a decision fixed", ["case", "free", *_FIXED], table)
    with drawing(1, 2, width=6.0, height=1.0 + 0.25 * len(rows)) as (figure, axes):
        _draw(axes, rows)
        report.write(figure)
    return 0


def mix(name: str) -> ClusterSpec:
    """Hosts of one kind of GPU each."""
    hosts = ""
    for i, (gpu, count) in enumerate(MIXES[name]):
        link, network = FABRIC[gpu]
        hosts += HOST.format(i=i, gpu=gpu, count=count, link=link, network=network)
    return ClusterSpec.from_yaml(f"name: {name}\nbackend: nccl\nhosts:\n{hosts}")


def captured(model: str, devices: int) -> Graph:
    """The model's step with ``PER_DEVICE`` samples for each device."""
    case = find(model).build("real")
    batch = PER_DEVICE[model] * devices
    first = next(t for t in _tensors(case.inputs))
    inputs, targets = (_resized(tree, first.shape[0], batch) for tree in (case.inputs, case.targets))
    return capture(case.model, inputs, loss_fn=case.loss_fn, example_targets=targets, name=model)


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, Mapping) else tree
    return [t for value in values for t in _tensors(value)]


def _resized(tree: Any, old: int, new: int) -> Any:
    """The same tree with tensors of ``old`` samples replaced by empty ones of ``new``."""
    if isinstance(tree, Mapping):
        return {k: _resized(v, old, new) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(_resized(v, old, new) for v in tree)
    assert isinstance(tree, torch.Tensor)
    return tree.new_empty((new, *tree.shape[1:])) if tree.shape[:1] == (old,) else tree


def planned(model: str, name: str, graph: Graph, cluster: ClusterSpec, pins: Pins | None = None) -> Row:
    began, wall = time.process_time(), time.perf_counter()
    plan, failure = None, ""
    try:
        plan = plan_graph(choices(graph), cluster, pins=pins)
    except HapError as e:
        failure = str(e)
    return Row(model, name, cluster.world_size, time.process_time() - began, time.perf_counter() - wall, plan, failure)


def by_flops(cluster: ClusterSpec) -> Pins:
    return Pins(ratios=tuple(d.tflops["float32"] for d in cluster.devices))


def even(cluster: ClusterSpec) -> Pins:
    return Pins(ratios=(1.0,) * cluster.world_size)


_FIXED = {"shares by FLOP/s": by_flops, "even shares": even}


def ablated(graph: Graph, cluster: ClusterSpec) -> list[Row]:
    return [planned(graph.name, what, graph, cluster, fix(cluster)) for what, fix in _FIXED.items()]


# ---- what is said ----


def _figures(report: Report, rows: Sequence[Row], ablations: Sequence[tuple[Row, list[Row]]]) -> None:
    known = [r for r in rows if r.plan is not None]
    report.figure("cases_planned", len(known))
    report.figure("cases", len(rows))
    if known:
        report.figure("worst_gap_to_128", max(r.gap for r in known))
        report.figure("worst_seconds_to_128", max(r.wall_s for r in known))
        report.figure("worst_cpu_seconds_to_128", max(r.cpu_s for r in known))
    for r in known:
        report.figure(f"cpu_seconds {r.name}", r.cpu_s)
        report.figure(f"gap {r.name}", r.gap)
    for free, fixed in ablations:
        for row in fixed:
            if free.plan is not None and row.plan is not None:
                slower = row.plan.predicted.step_s / free.plan.predicted.step_s - 1
                report.figure(f"slower with {row.cluster}, {free.name}", slower)
    for name in ("seconds_1024", "gap_1024"):
        report.missing(name, "1,024 devices are not planned yet: classes of ranks end at the judge and the collectives")
    report.missing("share_of_bound", "the published profiles are not read yet")
    report.missing("a_star_against_milp", "there is no A* search yet")
    report.text(
        "Seconds of the whole search, capture apart, one core; wall seconds grow with what else the machine does. The "
        "step and the bound are the cost model's. The bound holds for all strategies and all shares on all devices of "
        "the cluster; `tight` says what limits the step, and where a job on fewer devices would be faster."
    )


def _line(row: Row) -> str:
    if row.plan is None:
        return f"{row.name}: {row.failure}"
    p = row.plan.predicted
    return f"{row.name}: {row.cpu_s:.1f} s, step {p.step_s * 1e3:.1f} ms, gap {row.gap:.1%}"


def _cells(row: Row) -> list[str]:
    first = [find(row.model).title, row.cluster, str(row.devices), f"{row.cpu_s:.1f}", f"{row.wall_s:.1f}"]
    if row.plan is None:
        return [*first, "", "", "", "", row.failure]
    p, solver = row.plan.predicted, row.plan.provenance.solver
    bound = "" if p.lower_bound_s is None else f"{p.lower_bound_s * 1e3:.1f}"
    return [*first, str(solver["variables"]), f"{p.step_s * 1e3:.1f}", bound, f"{row.gap:.1%}", p.tight]


def _ablation(free: Row, fixed: Sequence[Row]) -> list[str]:
    steps = ["no plan" if r.plan is None else f"{r.plan.predicted.step_s * 1e3:.1f}" for r in (free, *fixed)]
    return [free.name, *steps]


def _draw(axes: Sequence[Any], rows: Sequence[Row]) -> None:
    places, titles = range(len(rows)), [r.name for r in rows]
    left, right = axes
    left.barh(places, [r.cpu_s for r in rows], color=COLOURS[0])
    left.set(title="Planning, capture apart", xlabel="CPU s", yticks=places, yticklabels=titles)
    right.barh(places, [100 * r.gap for r in rows], color=COLOURS[1])
    right.set(title="Gap to the bound", xlabel="% of the step", yticks=places)
    right.set_yticklabels([])


if __name__ == "__main__":
    sys.exit(main())
