"""HAP against what people use, on unequal clusters played by the testbed, all contestants interleaved in one run.

    python benchmarks/race.py [--quick] [--models GPT-2,VGG] [--clusters both] [--rounds 8]

Contestants: HAP (its planner's own choice for the cluster), the same plan without its passes, DDP with equal batches,
DDP with batches in proportion to the devices' speeds (weighted so that the gradient is the global batch's), ZeRO-1
(``ZeroRedundancyOptimizer``), FSDP2 (``fully_shard``). All train the same: the losses of the
first three steps are compared.
Steps per second are those of the slowest rank. *Exposed* is a step's time beyond the busiest rank's compute. The
*limit* of a case is the step that deals the least compute seen perfectly to all devices and communicates for free.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import hap
from benchmarks.common import COLOURS, Report, Spread, drawing, parse
from benchmarks.race_models import MODELS, build
from benchmarks.race_rank import Result, race
from benchmarks.testbed import RankError, Testbed, played
from hap.cluster import ClusterSpec, Link
from hap.plan import Plan
from hap.runtime.emulate import HostRate, measure_host

NAME = "race"
CLUSTERS: Mapping[str, tuple[tuple[float, ...], tuple[int, ...]]] = {  # TFLOP/s and network Mbit/s, by rank
    "compute": ((3, 3, 1, 1), (1000, 1000, 1000, 1000)),
    "links": ((1, 1, 1, 1), (1000, 1000, 200, 200)),
    "both": ((3, 3, 1, 1), (1000, 1000, 200, 200)),
    "weak host": ((3, 3, 3, 1), (1000, 1000, 1000, 100)),
    "equal": ((1, 1, 1, 1), (1000, 1000, 1000, 1000)),
}
OURS = "HAP"
BARE = "HAP, no passes"
BASELINES = ("DDP", "DDP, by speed", "ZeRO-1", "FSDP2")
ROUNDS = 6


def cluster(name: str) -> ClusterSpec:
    """Four hosts with a device each."""
    speeds, rates = CLUSTERS[name]
    hosts = [
        {
            "name": f"h{r}",
            "devices": [
                {
                    "name": f"c{speed:g}",
                    "tflops": {"float32": speed},
                    "memory": "4GB",
                    "memory_bandwidth": f"{10 * speed:g}GB/s",
                }
            ],
            "network": {"bandwidth": f"{rate}Mbit/s", "latency": "250us"},
        }
        for r, (speed, rate) in enumerate(zip(speeds, rates, strict=True))
    ]
    return ClusterSpec.model_validate({"name": name, "backend": "gloo", "hosts": hosts})


def dealt(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers that sum to ``total``, nearest to the weights (largest remainders)."""
    exact = [total * w / sum(weights) for w in weights]
    found = [math.floor(e) for e in exact]
    for r in sorted(range(len(weights)), key=lambda r: (found[r] - exact[r], r))[: total - sum(found)]:
        found[r] += 1
    return tuple(found)


@dataclass(frozen=True)
class Case:
    """One model on one cluster: what every contestant did, by rank; ``absent`` has the reasons of those who could
    not."""

    model: str
    cluster: str
    plan: Plan
    slowdowns: tuple[float, ...]
    results: Mapping[str, Sequence[Result]]
    absent: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.model}, {self.cluster}"

    def steps(self, who: str) -> Spread:
        """Seconds of a step, each the slowest rank's."""
        return Spread.of([max(s) for s in zip(*(r.steps_s for r in self.results[who]), strict=True)])

    def exposed_s(self, who: str) -> float:
        return self.steps(who).median - max(r.compute_s for r in self.results[who])

    @property
    def best(self) -> str:
        return min((who for who in BASELINES if who in self.results), key=lambda who: self.steps(who).median)

    def speedup(self, over: str) -> float:
        return self.steps(over).median / self.steps(OURS).median

    @property
    def limit_s(self) -> float:
        work = min(
            sum(r.compute_s / s for r, s in zip(ranks, self.slowdowns, strict=True)) for ranks in self.results.values()
        )
        return work / sum(1 / s for s in self.slowdowns)

    def verify(self) -> None:
        """All have trained the same: the losses of the first steps, summed over ranks, after each one's updates."""
        for who, ranks in self.results.items():
            for step, expected in enumerate(zip(*(r.losses for r in self.results["DDP"]), strict=True)):
                found = sum(r.losses[step] for r in ranks)
                same = math.isclose(found, sum(expected), rel_tol=1e-3)
                assert same, f"{self.name}: {who} has loss {found} in step {step}, DDP {sum(expected)}"


def cannot_run(model: str) -> str | None:
    """Why FSDP2 does not run this model on CPUs here, on a bed of its own; None if it does."""
    built = build(model)
    equal = dealt(len(built.example_inputs), (1,) * 4)
    with Testbed(cluster("equal")) as bed:
        try:
            bed.run(race, ["FSDP2"], model, equal, equal, "", "", 1, timeout=120.0)
        except RankError as error:
            return str(error).strip().splitlines()[-1]
    return None


def run_case(model: str, name: str, host: HostRate, rounds: int, absent: Mapping[str, str]) -> Case:
    """Plan, then race all that are not ``absent``."""
    spec = cluster(name)
    told = played(spec, host, Link(1e9, 1e-4))
    built = build(model)
    plan = hap.plan(
        built.model,
        told,
        example_inputs=built.example_inputs,
        example_targets=built.example_targets,
        loss_fn=built.loss_fn,
    )
    batch = len(built.example_inputs)
    sizes, equal = dealt(batch, CLUSTERS[name][0]), dealt(batch, (1,) * 4)
    names = [who for who in (OURS, BARE, *BASELINES) if who not in absent]
    with Testbed(spec) as bed:
        slowdowns = tuple(r.slowdown for r in bed.layout.ranks)
        text, told_text = plan.to_json(), told.to_yaml()
        by_rank = bed.run(race, names, model, sizes, equal, text, told_text, rounds, timeout=900.0)
    results = {who: [ranks[who] for ranks in by_rank] for who in names}
    case = Case(model, name, plan, slowdowns, results, absent)
    case.verify()
    return case


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="", help=f"some of {', '.join(MODELS)}; default: all")
    parser.add_argument("--clusters", default="", help=f"some of {', '.join(CLUSTERS)}; default: all")
    parser.add_argument("--rounds", type=int, default=0, help=f"blocks of two steps each; default {ROUNDS}")
    options = parse(NAME, "HAP against what people use, on unequal clusters.", parser=parser)
    models = chosen(options.extra.models, MODELS, ("GPT-2", "VGG") if options.quick else tuple(MODELS))
    clusters = chosen(options.extra.clusters, CLUSTERS, ("both", "equal") if options.quick else tuple(CLUSTERS))
    rounds = options.extra.rounds or (2 if options.quick else ROUNDS)
    report = Report(NAME, "The race: HAP against DDP, ZeRO-1 and FSDP2 on unequal clusters", options)
    host = measure_host()
    reasons = {model: cannot_run(model) for model in models}
    absent = {model: {"FSDP2": why} if why else {} for model, why in reasons.items()}
    cases = []
    for name in clusters:
        for model in models:
            cases.append(run_case(model, name, host, rounds, absent[model]))
            print(line(cases[-1]), flush=True)
    write(report, cases)


def chosen(text: str, known: Mapping[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text else default
    for name in names:
        if name not in known:
            raise SystemExit(f"unknown {name!r} (known: {', '.join(known)})")
    return names


def line(case: Case) -> str:
    """One case in one line, while it runs."""
    times = ", ".join(f"{who} {case.steps(who).median * 1e3:.0f}" for who in case.results)
    return f"{case.name}: {times} ms; {case.speedup(case.best):.2f} x {case.best}"


def write(report: Report, cases: Sequence[Case]) -> None:
    unequal = [c for c in cases if c.cluster != "equal"]
    over_best = [c.speedup(c.best) for c in cases]
    if unequal:
        mean = statistics.geometric_mean([c.speedup(c.best) for c in unequal])
        report.figure("geomean_over_best_baseline_unequal", mean)
    report.figure("best_over_equal_ddp", max(c.speedup("DDP") for c in cases))
    report.figure("worst_over_best_baseline", min(over_best))
    report.figure("share_of_limit", statistics.geometric_mean([c.limit_s / c.steps(OURS).median for c in cases]))
    rows = []
    for c in cases:
        key = c.name.replace(", ", "_").replace(" ", "_")
        report.figure(f"over_best_baseline_{key}", c.speedup(c.best), c.steps(OURS))
        report.figure(f"share_of_limit_{key}", c.limit_s / c.steps(OURS).median)
        for who, ranks in c.results.items():
            spread = c.steps(who)
            rows.append(
                (
                    f"{c.name}: {who}",
                    f"{1 / spread.median:.2f}",
                    f"{spread.relative:.0%}",
                    f"{spread.median * 1e3:.0f}",
                    f"{c.exposed_s(who) * 1e3:.0f}",
                    f"{max(r.held_bytes for r in ranks) / 1e6:.1f}",
                    f"{max(r.missed for r in ranks):.0%}",
                    f"{c.steps(who).median / c.steps(OURS).median:.2f}",
                )
            )
    columns = ["case: contestant", "steps/s", "spread", "ms", "exposed ms", "held MB", "late", "HAP is x faster"]
    report.table("Interleaved, slowest rank", columns, rows)
    summary = [
        (
            c.name,
            c.best,
            f"{c.speedup(c.best):.2f}",
            f"{c.speedup('DDP'):.2f}",
            f"{c.limit_s / c.steps(OURS).median:.0%}",
            f"{c.plan.predicted.step_s / c.steps(OURS).median:.2f}",
        )
        for c in cases
    ]
    columns = ["case", "best baseline", "HAP over it", "over DDP", "of the limit", "predicted / measured"]
    report.table("Summary", columns, summary)
    report.text(
        "Emulated speeds, real bytes: compute is this machine's CPU, stretched to a device's speed by deadline; links "
        "are shaped by the kernel. *Held*: parameters, gradients and optimizer state of the fullest rank. *Late*: "
        "sections whose real work did not fit its deadline. *Limit*: the least compute seen, dealt perfectly, and "
        "communication for free."
    )
    for name, reason in {n: r for c in cases for n, r in c.absent.items()}.items():
        report.missing(name, reason)
    with drawing(1, 1, width=max(6.0, 0.9 * len(cases))) as (figure, (axis,)):
        draw(axis, cases)
        report.write(figure)


def draw(axis: Any, cases: Sequence[Case]) -> None:
    """Steps per second over the best baseline's."""
    who = [OURS, *BASELINES]
    for i, name in enumerate(who):
        heights = [c.steps(c.best).median / c.steps(name).median if name in c.results else 0.0 for c in cases]
        x = [k + (i - len(who) / 2 + 0.5) * 0.16 for k in range(len(cases))]
        axis.bar(x, heights, 0.15, color=COLOURS[i], label=name)
    axis.axhline(1, color="#999999", linewidth=1)
    axis.set_xticks(range(len(cases)), [c.name.replace(", ", "\n") for c in cases], fontsize=7)
    axis.set(ylabel="speed over the best baseline's", title="Steps per second, interleaved on one testbed")
    axis.legend(fontsize=8, ncols=len(who))


if __name__ == "__main__":
    main()
