"""Plans of two axes against plans of one, measured: hosts of several ranks on the testbed, in turns in one run.

    python benchmarks/mesh.py [--quick] [--rounds 6] [--batches 4] [--clusters "slow networks"]

Two or three hosts of two ranks each; inside a host ranks talk over its loopback, between hosts over links that the
kernel shapes; compute is stretched to each device's speed. Both plans are made from one description of the bed, in
which the links inside hosts are as measured while all hosts use theirs. The losses of the first steps are compared;
steps are those of the slowest rank, over several sessions of fresh processes.
With ``--batches`` a step has so many, whose gradients are summed once, and both plans are for that; its results stand
beside those for one (``mesh_batches``).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import Report, Spread, parse
from benchmarks.mesh_rank import cut, link_inside, race
from benchmarks.testbed import Testbed
from benchmarks.testbed.layout import played
from hap.capture import capture
from hap.cluster import ClusterSpec, Link
from hap.rules.choices import choices
from hap.runtime.emulate import measure_host
from hap.search.mesh import plan_mesh
from hap.search.planner import plan_graph

NAME = "mesh"
ONE, TWO = "one axis", "two axes"
CLUSTERS: Mapping[str, tuple[tuple[float, ...], tuple[int, ...]]] = {  # of each host: TFLOP/s of a device; Mbit/s
    "equal hosts": ((1, 1), (1000, 1000)),
    "a fast host": ((3, 1), (1000, 1000)),
    "slow networks": ((1, 1), (200, 200)),
    "one fast network": ((2, 1, 1), (1000, 250, 250)),
}
CASES = (("GPT-2", 16), ("BERT", 16), ("ViT", 16), ("GPT-2", 3))  # samples: many, or fewer than ranks
QUICK = (("GPT-2", 3),)
SESSIONS = 2


@dataclass(frozen=True)
class Row:
    case: str
    one: Spread
    two: Spread
    told: tuple[float, float]
    parts: str

    @property
    def ratio(self) -> float:
        return self.one.median / self.two.median


def cluster(name: str) -> ClusterSpec:
    speeds, rates = CLUSTERS[name]
    hosts = [
        {
            "name": f"h{i}",
            "devices": [
                {
                    "name": f"c{speed:g}",
                    "count": 2,
                    "tflops": {"float32": speed},
                    "memory": "4GB",
                    "memory_bandwidth": f"{10 * speed:g}GB/s",
                }
            ],
            "link": {"bandwidth": "1GB/s", "latency": "100us"},
            "network": {"bandwidth": f"{rate}Mbit/s", "latency": "250us"},
        }
        for i, (speed, rate) in enumerate(zip(speeds, rates, strict=True))
    ]
    return ClusterSpec.model_validate({"name": name, "backend": "gloo", "hosts": hosts})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=0, help="turns of each plan in a session")
    parser.add_argument("--batches", type=int, default=1, help="batches of a step")
    parser.add_argument("--clusters", nargs="+", choices=tuple(CLUSTERS), default=tuple(CLUSTERS))
    options = parse(
        NAME, "Plans of two axes against plans of one, measured on the testbed.", argv, parser, ("--clusters",)
    )
    batches = options.extra.batches
    report = Report(NAME if batches == 1 else f"{NAME}_batches", "One axis and two, measured", options)
    rounds = options.extra.rounds or (2 if options.quick else 6)
    names = tuple(options.extra.clusters)[: 1 if options.quick else None]
    rate = measure_host()
    rows, links = list[Row](), list[Link]()
    for name in names:
        with Testbed(cluster(name)) as bed:
            inside = bed.run(link_inside, [host.ranks for host in bed.layout.hosts], timeout=60.0)[0]
            links.append(inside)
            told = played(cluster(name), rate, inside)
            for model, batch in QUICK if options.quick else CASES:
                rows.append(run(bed, told, model, batch, name, rounds, batches))
                print(rows[-1], flush=True)
    report.figure("batches_of_a_step", batches)
    report.figure("inside_bytes_per_s", statistics.median(link.bandwidth_bytes_per_s for link in links))
    report.figure("inside_latency_s", statistics.median(link.latency_s for link in links))
    write(report, rows)


def run(bed: Testbed, told: ClusterSpec, model: str, batch: int, name: str, rounds: int, batches: int) -> Row:
    built = cut(model, batch)
    given = {"loss_fn": built.loss_fn, "example_targets": built.example_targets, "name": model}
    possible = choices(capture(built.model, built.example_inputs, **given))
    one, two = plan_graph(possible, told, batches=batches), plan_mesh(possible, told, batches=batches)
    plans = {ONE: one.to_json(), TWO: two.to_json()}
    sessions = [bed.run(race, model, batch, plans, rounds, batches, timeout=600.0) for _ in range(SESSIONS)]
    for first in sessions[0]:
        for a, b in zip(first[ONE].losses, first[TWO].losses, strict=True):
            assert math.isclose(a, b, rel_tol=1e-3), f"{model}, {name}: losses {a} and {b}"
    steps = {
        who: Spread.of([max(s) for ranks in sessions for s in zip(*(rank[who].steps_s for rank in ranks), strict=True)])
        for who in plans
    }
    predicted = (batches * one.predicted.as_run_s, batches * two.predicted.as_run_s)
    parts = "+".join(str(h.batch) for h in two.hosts)
    return Row(f"{model} of {batch}, {name}", steps[ONE], steps[TWO], predicted, parts)


def write(report: Report, rows: Sequence[Row]) -> None:
    report.figure("cases", len(rows))
    report.figure("faster_on_two_axes", sum(r.ratio > 1 for r in rows))
    report.figure("best_of_two_over_one", max(r.ratio for r in rows))
    report.figure("worst_of_two_over_one", min(r.ratio for r in rows))
    right = sum((r.told[0] > r.told[1]) == (r.ratio > 1) for r in rows)
    report.figure("winner_predicted", right)
    columns = ["case", "one axis ms", "spread", "two axes ms", "spread", "two is x faster", "predicted", "batch"]
    cells = [
        (
            r.case,
            f"{1e3 * r.one.median:.0f}",
            f"{r.one.relative:.0%}",
            f"{1e3 * r.two.median:.0f}",
            f"{r.two.relative:.0%}",
            f"{r.ratio:.2f}",
            f"{r.told[0] / r.told[1]:.2f}",
            r.parts,
        )
        for r in rows
    ]
    report.table("Interleaved, slowest rank", columns, cells)
    report.text(
        "Emulated speeds, real bytes: compute is this machine's CPU, stretched to a device's speed by deadline; links "
        "between hosts are shaped by the kernel, inside a host they are its loopback. Both plans of a case took turns "
        "in one run."
    )
    report.write(None)


if __name__ == "__main__":
    main()
