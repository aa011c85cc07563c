"""Uneven collectives on links of 1G, 1G, 200M and 200M: every way that HAP may choose, against the lower bound and
against what the backend does by itself. Needs root (namespaces and traffic shaping).

A sample is the time of the slowest rank from a barrier to having the result in memory. All ways are interleaved, round
after round. ``chosen`` is what the cost model picks from the links' rates alone; ``bound`` is a time
which no schedule can beat:

    all-gather      max over ranks i of max((M - m_i) / down_i, m_i / up_i)
    reduce-scatter  the same with up and down exchanged
    all-reduce      max(max_i M / min(up_i, down_i), 2 (N-1) M / sum of up)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from benchmarks.common import COLOURS, Report, Spread, drawing, parse
from benchmarks.testbed import Testbed
from benchmarks.testbed.layout import GOODPUT, LATENCY_S
from hap.cluster import ClusterSpec
from hap.codegen.layout import Layout
from hap.cost_models.collective import best_decomposition, candidates, collective_seconds
from hap.placement import PARTIAL, REPLICATE, Placement, Shard
from hap.plan import Collective
from hap.runtime.collectives import Communicator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "collectives"
RATES = (1000, 1000, 200, 200)  # Mbit/s, both ways
ATOMS = 12
SHARES = {"even": (3, 3, 3, 3), "5:5:1:1": (5, 5, 1, 1), "1:1:5:5": (1, 1, 5, 5)}
GATHERED = 2048 * 1024  # float32 elements: 8.4 MB
REDUCED = 4096 * 1024  # 16.8 MB


@dataclass(frozen=True)
class Case:
    """One collective on one value. ``sizes``: atoms of its first dim by rank."""

    kind: Collective
    shares: str
    sizes: tuple[int, ...]
    elements: int

    @property
    def name(self) -> str:
        return self.kind if self.kind == "all_reduce" else f"{self.kind} {self.shares}"

    @property
    def nbytes(self) -> int:
        return self.elements // ATOMS * ATOMS * 4

    @property
    def layout(self) -> Layout:
        return Layout(0, 1, self.elements // ATOMS, self.sizes)

    @property
    def placements(self) -> tuple[Placement, Placement]:
        shard = Shard(0, 1, ATOMS, self.elements // ATOMS, "g")
        match self.kind:
            case "all_gather":
                return shard, REPLICATE
            case "reduce_scatter":
                return PARTIAL, shard
        return PARTIAL, REPLICATE

    def bound_s(self, bytes_per_s: Sequence[float]) -> float:
        """See the module docstring; up and down are equal here."""
        if self.kind == "all_reduce":
            n = len(bytes_per_s)
            return max(self.nbytes / min(bytes_per_s), 2 * (n - 1) * self.nbytes / sum(bytes_per_s))
        held = [self.nbytes * s / ATOMS for s in self.sizes]
        return max(max(self.nbytes - m, m) / rate for m, rate in zip(held, bytes_per_s, strict=True))


CASES = (
    *(Case("all_gather", name, sizes, GATHERED) for name, sizes in SHARES.items()),
    *(Case("reduce_scatter", name, sizes, GATHERED) for name, sizes in SHARES.items()),
    Case("all_reduce", "", SHARES["even"], REDUCED),
)


def star(rates: Sequence[float], latency: str = "0.25ms") -> ClusterSpec:
    """Four hosts of one device on one switch; rates in Mbit/s."""
    device = {"name": "d", "tflops": {"float32": 1.0}, "memory": "1GB", "memory_bandwidth": "8GB/s"}
    hosts = [
        {"name": f"h{i}", "devices": [device], "network": {"bandwidth": f"{r}Mbit/s", "latency": latency}}
        for i, r in enumerate(rates)
    ]
    return ClusterSpec.model_validate({"name": "1G 1G 200M 200M", "backend": "gloo", "hosts": hosts})


def measure(rank: int, work: Sequence[tuple[Case, Sequence[str]]], rounds: int) -> list[list[list[float]]]:
    """[case][way][round] -> this rank's seconds. The first round warms up and is left out."""
    comm = Communicator(dist.group.WORLD)
    prepared = [[prepare(comm, case, way, rank) for way in ways] for case, ways in work]
    seconds: list[list[list[float]]] = [[[] for _ in ways] for _, ways in work]
    for round_ in range(rounds + 1):
        for c, runs in enumerate(prepared):
            for w, run in enumerate(runs):
                dist.barrier()
                start = time.perf_counter()
                run()
                if round_:
                    seconds[c][w].append(time.perf_counter() - start)
    return seconds


def prepare(comm: Communicator, case: Case, way: str, rank: int) -> Callable[[], torch.Tensor]:
    """A call that performs the collective, after one that was checked."""
    layout = case.layout
    whole = (torch.arange(case.nbytes // 4) % 64).float()
    total = comm.world_size * whole
    if case.kind == "all_gather":
        piece = layout.take(whole, rank)
        run, expected = lambda: comm.all_gather(piece, **layout._asdict(), decomposition=way), whole
    elif case.kind == "reduce_scatter":
        run = lambda: comm.reduce_scatter(whole, **layout._asdict(), decomposition=way)  # noqa: E731
        expected = layout.take(total, rank)
    else:
        run, expected = lambda: comm.all_reduce(whole, decomposition=way), total
    assert torch.equal(run(), expected), f"{case.name} by {way} is wrong"
    return run


def main() -> None:
    options = parse(NAME, "Uneven collectives on unequal links.")
    report = Report(NAME, "Uneven collectives on links of 1G, 1G, 200M, 200M", options)
    rounds = 3 if options.quick else 10
    nominal = star(RATES)
    # What a planner is told: the payload that a shaped link carries, and what a Gloo step takes (testbed/layout.py).
    told = star([round(r * GOODPUT, 1) for r in RATES], f"{LATENCY_S * 1e3}ms")
    goodput = [r * GOODPUT * 1e6 / 8 for r in RATES]
    work = [(case, candidates(case.kind, told)) for case in CASES]
    with Testbed(nominal) as bed:
        by_rank = bed.run(measure, work, rounds, timeout=900.0)
    rows, picture = [], []
    for c, (case, ways) in enumerate(work):
        sizes = {"g": case.sizes}
        bound = case.bound_s(goodput)
        chosen, predicted = best_decomposition(case.kind, case.nbytes, *case.placements, sizes, told)
        spreads = {
            way: Spread.of([max(ranks) for ranks in zip(*(r[c][w] for r in by_rank), strict=True)])
            for w, way in enumerate(ways)
        }
        for way, spread in spreads.items():
            expected = collective_seconds(case.kind, way, case.nbytes, *case.placements, sizes, told)
            mark = " (chosen)" if way == chosen else ""
            rows.append(
                (
                    f"{case.name}: {way}{mark}",
                    f"{spread.median * 1e3:.0f}",
                    f"{spread.relative:.0%}",
                    f"{expected * 1e3:.0f}",
                    f"{bound * 1e3:.0f}",
                    f"{spread.median / bound:.2f}",
                )
            )
        key = case.name.replace(" ", "_").replace(":", "")
        taken = spreads[chosen]
        report.figure(f"{key}_seconds", taken.median, taken)
        report.figure(f"{key}_bound_seconds", bound)
        report.figure(f"{key}_chosen_over_bound", taken.median / bound)
        report.figure(f"{key}_predicted_over_measured", predicted / taken.median)
        report.choice(key, chosen)
        report.text(f"{case.name}: chosen `{chosen}`.")
        picture.append((case.name, spreads, chosen, bound))
        if case.kind == "all_reduce":
            report.figure("all_reduce_over_gloo", spreads["ring"].median / taken.median)
    worst = max(value for name, value in report.figures.items() if name.endswith("chosen_over_bound"))
    report.figure("worst_chosen_over_bound", worst)
    columns = ["collective: way", "median ms", "spread", "predicted ms", "bound ms", "over bound"]
    report.table("Slowest rank, all ways interleaved", columns, rows)
    report.text("All-reduce `ring` is Gloo's own, `padded` and `all_to_all` are Gloo's calls; the rest is isend/irecv.")
    with drawing(1, 1, width=11) as (figure, (axis,)):
        draw(axis, picture)
        report.write(figure)


def draw(axis: Axes, picture: Sequence[tuple[str, dict[str, Spread], str, float]]) -> None:
    """Bars of every way over the bound, the chosen one dark."""
    at, ticks = 0.0, []
    for name, spreads, chosen, bound in picture:
        first = at
        for way, spread in spreads.items():
            colour = COLOURS[0] if way == chosen else "#c3d3e0"
            axis.bar(at, spread.median / bound, color=colour)
            axis.text(at, 0.05, way, rotation=90, ha="center", va="bottom", fontsize=7)
            at += 1
        ticks.append(((first + at - 1) / 2, name.replace(" ", "\n")))
        at += 1
    axis.axhline(1, color=COLOURS[1], linewidth=1)
    axis.set_xticks([x for x, _ in ticks], [name for _, name in ticks], fontsize=8)
    axis.set(ylabel="seconds over the lower bound", title="Each collective in every way; dark: the cost model's choice")


if __name__ == "__main__":
    main()
