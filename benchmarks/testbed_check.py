"""Does the testbed play what it says? Links against their nominal rates, Gloo's collectives against the alpha-beta
model that their rates imply, unequal compute against itself. Needs root.

Samples of different things are interleaved (ABAB), so that a neighbour's minute does not fall on one of them. A round
in which a queue dropped a packet or more than 5 % of the CPU was stolen is repeated, once; which were is said.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from benchmarks.common import COLOURS, NOISY_STEAL, Report, Spread, drawing, parse
from benchmarks.testbed import Testbed, cgroup, deadline, network, throttle
from benchmarks.testbed.layout import GOODPUT, LATENCY_S
from hap.cluster import ClusterSpec
from hap.runtime.emulate import Core
from hap.runtime.exchange import all_gather_single

NAME = "testbed"
MB = 1 << 20
P2P_BYTES = 4 * MB
MATMUL = 384  # three of them are a small layer: about 3 ms on a core
RECORDED = 25
WARM_UP = (("all_reduce", 4 * MB), ("all_gather", 4 * MB))  # new connections begin slowly


def four_hosts(networks: Sequence[tuple[str, str]], tflops: Sequence[float]) -> ClusterSpec:
    """Hosts h0 to h3 with a device each; networks are (up, down)."""
    hosts = [
        {
            "name": f"h{i}",
            "devices": [{"name": "d", "tflops": {"float32": f}, "memory": "1GB", "memory_bandwidth": "5GB/s"}],
            "network": {"up": up, "down": down, "latency": "250us"},
        }
        for i, ((up, down), f) in enumerate(zip(networks, tflops, strict=True))
    ]
    return ClusterSpec.model_validate({"name": "check", "backend": "gloo", "hosts": hosts})


SPEEDS = (2.0, 2.0, 1.0, 1.0)
SYMMETRIC = four_hosts([("1Gbit/s",) * 2] * 2 + [("200Mbit/s",) * 2] * 2, SPEEDS)
DIRECTED = four_hosts(
    [("1Gbit/s", "1Gbit/s"), ("1Gbit/s", "500Mbit/s"), ("200Mbit/s", "400Mbit/s"), ("200Mbit/s", "100Mbit/s")], SPEEDS
)


@dataclass(frozen=True)
class Sample:
    key: tuple[str, int]  # what, and its size in bytes
    seconds: float


# ---- on the ranks ----


def transfers(rank: int, pairs: Sequence[tuple[int, int]]) -> list[float]:
    """By pair: when this rank began to send or ended to receive, on the machine's one clock; 0 if it did neither."""
    payload, seen = torch.zeros(P2P_BYTES, dtype=torch.uint8), []
    for source, target in pairs:
        dist.barrier()
        seen.append(0.0)
        if rank == source:
            seen[-1] = time.perf_counter()
            dist.send(payload, target)
        elif rank == target:
            request = dist.irecv(payload, source)
            assert request is not None
            request.wait()
            seen[-1] = time.perf_counter()
    return seen


def collectives(rank: int, cases: Sequence[tuple[str, int]]) -> list[float]:
    """Seconds by (name, bytes), of this rank."""
    world, seconds = dist.get_world_size(), []
    for name, nbytes in cases:
        whole = torch.zeros(nbytes // 4)
        piece = torch.zeros(nbytes // 4 // world)
        dist.barrier()
        begin = time.perf_counter()
        if name == "all_reduce":
            dist.all_reduce(whole)
        else:
            all_gather_single(whole, piece)
        seconds.append(time.perf_counter() - begin)
    return seconds


def paced(rank: int, variant: str, steps: int, standard_s: float) -> list[float]:
    """Seconds of each step of three matrix products. ``deadline`` first records its nominal time, on a core of full
    speed (``Core``'s ``standard_s``)."""
    a = torch.ones(MATMUL, MATMUL)

    def work() -> None:
        for _ in range(3):
            torch.mm(a, a)

    seconds = []
    if variant == "deadline":
        pace = deadline(core=Core(standard_s))
        for _ in range(RECORDED):
            with pace.step():
                work()
        pace.hold()
        for _ in range(steps):
            begin = time.perf_counter()
            with pace.step():
                work()
            seconds.append(time.perf_counter() - begin)
        return seconds
    held = throttle()  # in quota mode its slow-down is 1: the kernel does it
    for _ in range(RECORDED + steps):
        begin = time.perf_counter()
        held.resume()
        work()
        held.settle()
        seconds.append(time.perf_counter() - begin)
    return seconds[RECORDED:]


# ---- in the runner ----


class Rounds:
    """Runs a measurement on a bed, and once more if the bed or the machine was disturbed."""

    def __init__(self) -> None:
        self.repeated: list[str] = []
        self.drops = self.timeouts = 0

    def __call__(self, bed: Testbed, function: Callable[..., Any], *args: Any) -> list[Any]:
        for attempt in range(2):
            before = bed.counters()
            results = bed.run(function, *args)
            went = bed.counters() - before
            disturbed = went.drops > 0 or went.steal_share > NOISY_STEAL
            if not disturbed or attempt == 1:
                break
            self.repeated.append(f"{function.__name__}: {went.drops} drops, {went.steal_share:.0%} stolen")
        self.drops += went.drops
        self.timeouts += went.timeouts
        return results


def model_s(name: str, nbytes: int, bytes_per_s: float, world: int = 4) -> float:
    """Gloo's rings on links of which the slowest carries ``bytes_per_s``: 2(n-1) or n-1 steps of 1/n of the bytes."""
    steps = (world - 1) * (2 if name == "all_reduce" else 1)
    return steps * (LATENCY_S + nbytes / world / bytes_per_s)


def measure_links(rounds: Rounds, repeats: int) -> dict[tuple[int, int], Spread]:
    """Goodput in bytes/s by (from, to)."""
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    seen: dict[tuple[int, int], list[float]] = {pair: [] for pair in pairs}
    with Testbed(DIRECTED) as bed:
        for _ in range(repeats):
            times = rounds(bed, transfers, pairs)
            for i, (a, b) in enumerate(pairs):
                seen[a, b].append(P2P_BYTES / (times[b][i] - times[a][i]))
    return {pair: Spread.of(samples) for pair, samples in seen.items()}


def measure_collectives(rounds: Rounds, repeats: int, sizes: Sequence[int]) -> dict[tuple[str, int], Spread]:
    """Seconds of the slowest rank by (name, bytes)."""
    cases = [(name, size) for size in sizes for name in ("all_reduce", "all_gather")]
    seen: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    with Testbed(SYMMETRIC) as bed:
        for _ in range(repeats):
            by_rank = rounds(bed, collectives, [*WARM_UP, *cases])
            for i, case in enumerate(cases):
                seen[case].append(max(times[len(WARM_UP) + i] for times in by_rank))
    return {case: Spread.of(samples) for case, samples in seen.items()}


@dataclass(frozen=True)
class Compute:
    """Of one way to make compute unequal: step times of rank 0 and of rank 2, half as fast."""

    within: Spread  # (95th - 5th percentile) / median of the steps of one rank in one run; over runs and ranks
    runs: Spread  # medians of the runs, rank 0, seconds
    ratio: Spread  # of the medians, rank 2 / rank 0, by run: 2 is asked


def measure_compute(rounds: Rounds, repeats: int, steps: int, can_hold: bool) -> dict[str, Compute]:
    """``can_hold``: by quotas, too."""
    runs: dict[str, list[list[list[float]]]] = {v: [] for v in ("deadline", "throttle", *("quota",) * can_hold)}
    standard_s = Core.work_seconds()
    with contextlib.ExitStack() as stack:
        timed = stack.enter_context(Testbed(SYMMETRIC, "deadline"))
        held = stack.enter_context(Testbed(SYMMETRIC, "quota")) if can_hold else timed
        for _ in range(repeats):
            for variant, found in runs.items():
                found.append(rounds(held if variant == "quota" else timed, paced, variant, steps, standard_s))
    return {variant: _compute(found) for variant, found in runs.items()}


def _compute(runs: Sequence[Sequence[Sequence[float]]]) -> Compute:
    within = []
    for by_rank in runs:
        for times in by_rank:
            twentieths = statistics.quantiles(times, n=20)
            within.append((twentieths[-1] - twentieths[0]) / statistics.median(times))
    medians = [[statistics.median(times) for times in by_rank] for by_rank in runs]
    return Compute(Spread.of(within), Spread.of([m[0] for m in medians]), Spread.of([m[2] / m[0] for m in medians]))


def nominal(pair: tuple[int, int]) -> float:
    """Goodput in bytes/s that the cluster file promises."""
    return DIRECTED.link(*pair).bandwidth_bytes_per_s * GOODPUT


def report_links(report: Report, links: dict[tuple[int, int], Spread]) -> None:
    errors = {pair: spread.median / nominal(pair) - 1 for pair, spread in links.items()}
    worst = max(errors, key=lambda pair: abs(errors[pair]))
    report.figure("link_worst_error", abs(errors[worst]), links[worst])
    report.figure("link_median_error", statistics.median(abs(e) for e in errors.values()))
    rows = [
        (f"h{a} to h{b}", f"{nominal((a, b)) * 8e-6:.0f}", f"{s.median * 8e-6:.0f}", f"{errors[a, b]:+.1%}", _width(s))
        for (a, b), s in links.items()
    ]
    report.table(
        f"One link at a time, {P2P_BYTES // MB} MB, Mbit/s of payload (nominal = the lesser of up and down x "
        f"{GOODPUT:.3f})",
        ["link", "nominal", "median", "error", "spread"],
        rows,
    )


def report_collectives(report: Report, found: dict[tuple[str, int], Spread]) -> None:
    slowest = min(h.up_bytes_per_s or 0 for h in _hosts()) * GOODPUT
    errors = {case: spread.median / model_s(*case, slowest) - 1 for case, spread in found.items()}
    for name in ("all_reduce", "all_gather"):
        worst = max((case for case in found if case[0] == name and case[1] >= 4 * MB), key=lambda c: abs(errors[c]))
        report.figure(f"{name}_worst_error", abs(errors[worst]), found[worst])
    rows = [
        (
            name,
            f"{nbytes // MB} MB",
            f"{model_s(name, nbytes, slowest) * 1e3:.1f}",
            f"{s.median * 1e3:.1f}",
            f"{errors[name, nbytes]:+.1%}",
            _width(s),
        )
        for (name, nbytes), s in found.items()
    ]
    report.table(
        "Gloo on 1 Gbit/s, 1 Gbit/s, 200 Mbit/s, 200 Mbit/s, ms of the slowest rank (figures: 4 MB and more)",
        ["collective", "size", "model", "median", "error", "spread"],
        rows,
    )


def report_compute(report: Report, found: dict[str, Compute]) -> None:
    for variant, compute in found.items():
        report.figure(f"{variant}_step_spread", compute.within.median)
        report.figure(f"{variant}_run_spread", compute.runs.relative, compute.runs)
        report.figure(f"{variant}_ratio_error", abs(compute.ratio.median / 2 - 1), compute.ratio)
    rows = [
        (
            variant,
            f"{compute.within.median:.1%}",
            f"{compute.within.most:.1%}",
            f"{compute.runs.median * 1e3:.2f}",
            _width(compute.runs),
            f"{compute.ratio.median:.3f}",
            _width(compute.ratio),
        )
        for variant, compute in found.items()
    ]
    report.table(
        "Unequal compute, four ranks at once, one half as fast as the other (spread of steps: 95th - 5th percentile)",
        ["by", "spread of steps", "the worst", "ms a step", "spread of runs", "slow / fast", "spread of runs"],
        rows,
    )
    report.text(
        "*deadline* holds each section of a step to the time recorded once, on a core of full speed, x the slow-down; "
        "*throttle* stretches the CPU time that it took, anew each step; *quota* is CFS, 10 ms, on the main thread "
        "where cgroup v1 allows it."
    )


def _hosts() -> Sequence[Any]:
    return [rates for host in SYMMETRIC.hosts if (rates := SYMMETRIC.network(host.name)) is not None]


def _width(spread: Spread) -> str:
    return f"{spread.relative:.1%} of {spread.n}"


def draw(axes: Sequence[Any], links: Any, found: Any, compute: dict[str, Compute]) -> None:
    """Goodput against nominal, collectives against the model, spread of the three ways to be slow."""
    axis = axes[0]
    x = [nominal(pair) * 8e-6 for pair in links]
    y = [s.median * 8e-6 for s in links.values()]
    below = [(s.median - s.least) * 8e-6 for s in links.values()]
    above = [(s.most - s.median) * 8e-6 for s in links.values()]
    axis.plot([min(x), max(x)], [min(x), max(x)], color="#999999", linewidth=1, label="nominal")
    axis.errorbar(x, y, yerr=[below, above], fmt="o", markersize=5, capsize=2, label="one pair, median and range")
    axis.set(title="Links", xlabel="nominal goodput, Mbit/s", ylabel="measured, Mbit/s", xscale="log", yscale="log")
    axis.legend()

    axis = axes[1]
    slowest = min(h.up_bytes_per_s for h in _hosts()) * GOODPUT
    for colour, name in zip(COLOURS, ("all_reduce", "all_gather"), strict=False):
        cases = [case for case in found if case[0] == name]
        sizes = [nbytes / MB for _, nbytes in cases]
        axis.plot(
            sizes, [model_s(name, n, slowest) * 1e3 for _, n in cases], "--", color=colour, label=f"{name}, model"
        )
        axis.plot(sizes, [found[c].median * 1e3 for c in cases], "o", color=colour, label=f"{name}, measured")
    axis.set(title="Gloo, 1G 1G 200M 200M", xlabel="MB", ylabel="ms", xscale="log", yscale="log")
    axis.legend()

    axis = axes[2]
    names = list(compute)
    places = range(len(names))
    axis.bar(
        [p - 0.2 for p in places], [compute[n].within.median * 100 for n in names], 0.38, label="steps of a run, median"
    )
    axis.bar([p + 0.2 for p in places], [compute[n].runs.relative * 100 for n in names], 0.38, label="medians of runs")
    axis.set(title="Unequal compute: what repeats", ylabel="spread, % of the median", yscale="log")
    axis.set_xticks(list(places), names)
    axis.legend()


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("testbed_check", "Does the testbed play what it says?", argv)
    report = Report(NAME, "The testbed", options)
    if reason := network.missing():
        for name in ("link_worst_error", "all_reduce_worst_error", "all_gather_worst_error", "deadline_step_spread"):
            report.missing(name, reason)
        report.write(None)
        return 0
    rounds = Rounds()
    quick = options.quick
    links = measure_links(rounds, 3 if quick else 10)
    sizes = [n * MB for n in ((1, 4, 16) if quick else (1, 2, 4, 8, 16))]
    found = measure_collectives(rounds, 3 if quick else 10, sizes)
    can_hold = cgroup.find() is not None
    compute = measure_compute(rounds, 3 if quick else 8, 60 if quick else 200, can_hold)
    report_links(report, links)
    report_collectives(report, found)
    report_compute(report, compute)
    if not can_hold:
        for name in ("step_spread", "run_spread", "ratio_error"):
            report.missing(f"quota_{name}", "a quota needs a cpu cgroup (v1 or v2) that this process can write")
    again = f" Repeated once: {'; '.join(rounds.repeated)}." if rounds.repeated else ""
    report.text(f"In what is shown: {rounds.drops} packets dropped, {rounds.timeouts} TCP timeouts.{again}")
    with drawing(1, 3) as (figure, axes):
        draw(axes, links, found, compute)
        report.write(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
