"""OPT-350M on A100-40 and V100-16 by published measurements: how much of the compute bound a plan reaches.

Sequence 2048, 1,024 samples a step, hosts of four; seconds of every layer and curves of every link as measured by the
authors of Sailor (SOSP 2025; ``benchmarks/data/README.md``). The bound is the batch over the sum of every device's best
measured rate; the best published planner reaches ``PUBLISHED`` of it in their simulator, by their own planner.

The plan is the sharded member of the data-parallel family, in this house's terms: the batch dealt out in whole samples
(``deal``: the least time in which all are done, exactly), every rank working through its samples in microbatches that
fit, parameters and optimizer state sharded, gathered for the first forward pass and kept; gradients, summed over the
microbatches, reduce-scattered in the last backward pass. Collectives are those of ``hap.cost_models`` on a cluster
with the measured links (``cluster``). Two clocks (``step_seconds``):

    apart     slowest compute + all collectives, nothing overlaps
    beside    one stream of collectives beside compute, layers in so many bundles as is best: a layer's forward pass
              waits for its bundle, a bundle's reduction for the last rank's backward pass of it

Every 16-GB device takes one sample at a time, as the source's memory model allows it no more; of 40 GB, two.
"""

from __future__ import annotations

import csv
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from benchmarks.common import COLOURS, ROOT, Report, drawing, parse
from hap.cluster import ClusterSpec
from hap.cost_models.collective import best_decomposition
from hap.placement import PARTIAL, REPLICATE, Shard
from hap.search.rounding import round_shares
from hap.search.wires import Wires

NAME = "planning_sailor"
DATA = ROOT / "benchmarks" / "data"
BATCH, LENGTH, WIDTH, VOCABULARY, HIDDEN = 1024, 2048, 1024, 50272, 4096
CLUSTERS = ((8, 8), (16, 16), (32, 32), (64, 64), (32, 96), (80, 240), (128, 384))
PUBLISHED = (0.82, 0.72, 0.63, 0.51, 0.54, 0.46, 0.42)
PUBLISHED_S = (0.1, 0.2, 1.1, 2.4, 2.9, 9.3, 18.3)
KINDS = ("A100-40", "V100-16")
FITS = {"A100-40": 2, "V100-16": 1}  # samples at a time, tensor parallelism 1
DEVICE = {  # the cost model needs a rate; no time here comes from it, but packing from the memory's bandwidth
    "A100-40": "tflops: {float32: 19.5}, memory: 40GB, memory_bandwidth: 1555GB/s",
    "V100-16": "tflops: {float32: 15.7}, memory: 16GB, memory_bandwidth: 900GB/s",
}
HOST = 4  # devices
LAYERS = 26  # embeddings, 24 blocks, head
STORED = 4e9  # bytes of weights, gradients and two moments that one device may own at most
BUNDLES = (26, 13, 9, 7, 5, 4, 3, 2, 1)  # of layers, for one collective each
PARTS = 1 << 14  # a parameter's atoms, for the shares of storing


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer for a microbatch."""

    forward_s: float
    backward_s: float
    update_s: float


def measured() -> dict[tuple[str, int], tuple[Layer, ...]]:
    """(device, microbatch) -> its layers, without tensor parallelism."""
    found: dict[tuple[str, int], tuple[Layer, ...]] = {}
    with (DATA / "sailor_layer_profiles.csv").open() as file:
        for row in csv.DictReader(file):
            if row["model"] == "OPT-350" and row["gpu"] in KINDS and row["tp"] == "1":
                count = int(row["layer_last"]) - int(row["layer_first"]) + 1
                layer = Layer(float(row["fwd_s"]), float(row["bwd_s"]), float(row["update_s"]))
                key = row["gpu"], int(row["microbatch"])
                found[key] = found.get(key, ()) + (layer,) * count
    assert all(len(layers) == LAYERS for layers in found.values())
    return found


def parameter_bytes() -> tuple[int, ...]:
    """Of every layer in float32, embedding and head apart."""
    block = 4 * WIDTH * (WIDTH + 1) + 2 * WIDTH * HIDDEN + HIDDEN + WIDTH + 4 * WIDTH
    first, last = (VOCABULARY + LENGTH) * WIDTH, VOCABULARY * WIDTH
    return tuple(4 * n for n in (first, *(block,) * (LAYERS - 2), last))


def seconds_of(layers: Sequence[Layer]) -> float:
    return sum(layer.forward_s + layer.backward_s for layer in layers)


def cluster(counts: Sequence[int]) -> ClusterSpec:
    """Hosts of four with the measured links at the size of one block's message."""
    megabytes = parameter_bytes()[1] / 1e6
    rate = {}
    with (DATA / "sailor_links.csv").open() as file:
        for row in csv.DictReader(file):
            x = float(np.log2(megabytes))
            fitted = 1e9 * (float(row["c2"]) * x * x + float(row["c1"]) * x + float(row["c0"]))
            if row["gpu_a"] == row["gpu_b"]:
                rate[row["scope"], row["gpu_a"]] = min(fitted, float(row["max_bw_bytes_per_s"]))
    hosts = ""
    for kind, count in zip(KINDS, counts, strict=True):
        for i in range(count // HOST):
            hosts += f"""
  - name: {kind.lower()}-{i}
    devices: [{{name: {kind}, {DEVICE[kind]}, count: {HOST}}}]
    link: {{bandwidth: {rate["intra", kind] / 1e9:.3f}GB/s, latency: 5us}}
    network: {{bandwidth: {rate["inter", kind] / 1e9:.3f}GB/s, latency: 30us}}"""
    return ClusterSpec.from_yaml(f"name: sailor\nbackend: nccl\nhosts:{hosts}\n")


# ---- who computes how much ----


@dataclass(frozen=True)
class Worker:
    """A kind of device: what its microbatches take."""

    by_microbatch: Mapping[int, tuple[Layer, ...]]
    most: int

    def rounds(self, samples: int) -> tuple[int, ...]:
        """Microbatches, largest first."""
        return (self.most,) * (samples // self.most) + ((samples % self.most,) if samples % self.most else ())

    @cached_property
    def times(self) -> Mapping[int, float]:
        """Microbatch -> its seconds."""
        return {m: seconds_of(layers) for m, layers in self.by_microbatch.items()}

    def seconds(self, samples: int) -> float:
        whole, rest = divmod(samples, self.most)
        return whole * self.times[self.most] + (self.times[rest] if rest else 0.0)

    @cached_property
    def best_rate(self) -> float:
        """Samples per second, over every microbatch that was measured, whether it fits or not."""
        return max(m / seconds_of(layers) for m, layers in self.by_microbatch.items())


def workers() -> tuple[Worker, ...]:
    table = measured()
    return tuple(Worker({m: layers for (k, m), layers in table.items() if k == kind}, FITS[kind]) for kind in KINDS)


def deal(kinds: Sequence[Worker], counts: Sequence[int], batch: int) -> tuple[tuple[int, ...], ...]:
    """Samples of every device, kind by kind, such that the last one is done as early as possible."""
    most = min(batch, 64 * (batch // sum(counts) + 1))  # no device is 64 times as fast as the mean
    done = [np.array([k.seconds(n) for n in range(1, most + 1)]) for k in kinds]
    times = np.unique(np.concatenate(done))
    totals = sum(c * np.searchsorted(d, times * (1 + 1e-12), side="right") for d, c in zip(done, counts, strict=True))
    soonest = times[int(np.argmax(totals >= batch))] * (1 + 1e-12)
    able = [int(np.searchsorted(d, soonest, side="right")) for d in done]
    spare = sum(x * c for x, c in zip(able, counts, strict=True)) - batch
    given = [[x] * c for x, c in zip(able, counts, strict=True)]
    slowest = [k.seconds(x) for k, x in zip(kinds, able, strict=True)]
    while spare:  # from those that would finish last
        kind = max(range(len(kinds)), key=lambda k: (max(given[k]) == able[k], slowest[k]))
        given[kind][given[kind].index(max(given[kind]))] -= 1
        spare -= 1
    return tuple(tuple(g) for g in given)


# ---- a step ----


@dataclass(frozen=True)
class Step:
    """Seconds. ``share``: bound over step."""

    bound_s: float
    compute_s: float
    collectives_s: float
    apart_s: float
    beside_s: float
    samples: tuple[tuple[int, int], ...]  # of the kinds, least and most of a device
    bundles: int
    search_s: float


def plan(counts: Sequence[int]) -> Step:
    """The samples dealt out, and the number of bundles with the shortest step."""
    began, kinds, spec = time.process_time(), workers(), cluster(counts)
    bound = BATCH / sum(k.best_rate * c for k, c in zip(kinds, counts, strict=True))
    given = deal(kinds, counts, BATCH)
    loads = [(k, n) for k, g in zip(kinds, given, strict=True) for n in sorted(set(g))]
    compute = max(k.seconds(n) for k, n in loads)
    samples, steps = tuple((min(g), max(g)) for g in given), []
    whole_update = max(sum(layer.update_s for layer in k.by_microbatch[1]) for k in kinds)
    for stored, bundles in itertools.product(storing(spec), BUNDLES):
        update = whole_update * max(stored)
        bundle_of = tuple(layer * bundles // LAYERS for layer in range(LAYERS))
        gathers, scatters = collectives(spec, bundle_of, stored)
        wire = sum(gathers) + sum(scatters)
        beside = beside_seconds(loads, gathers, scatters, bundle_of) + update
        apart = compute + wire + update
        steps.append(Step(bound, compute, wire, apart, beside, samples, bundles, 0.0))
    best = min(steps, key=lambda step: step.beside_s)
    return replace(best, apart_s=min(s.apart_s for s in steps), search_s=time.process_time() - began)


def storing(spec: ClusterSpec) -> list[tuple[float, ...]]:
    """What share of the state every rank may store: evenly, or as is cheapest for the links where that fits."""
    found = [(1.0 / spec.world_size,) * spec.world_size]
    cheapest = Wires(spec).cheapest_shares(parameter_bytes()[1])
    if cheapest is not None and 4 * max(cheapest) * sum(parameter_bytes()) < STORED:
        found.append(tuple(cheapest.tolist()))
    return found


def collectives(
    spec: ClusterSpec, bundle_of: Sequence[int], stored: tuple[float, ...]
) -> tuple[list[float], list[float]]:
    """Seconds to gather and to reduce-scatter each bundle."""
    sizes, shard = {"g": round_shares(stored, PARTS)}, Shard(0, 1, PARTS, 1, "g")
    by_bytes, gathers, scatters = {}, [], []
    for bundle in range(max(bundle_of) + 1):
        nbytes = sum(b for b, of in zip(parameter_bytes(), bundle_of, strict=True) if of == bundle)
        if nbytes not in by_bytes:
            gather = best_decomposition("all_gather", nbytes, shard, REPLICATE, sizes, spec)[1]
            by_bytes[nbytes] = gather, best_decomposition("reduce_scatter", nbytes, PARTIAL, shard, sizes, spec)[1]
        gathers.append(by_bytes[nbytes][0])
        scatters.append(by_bytes[nbytes][1])
    return gathers, scatters


def beside_seconds(
    loads: Sequence[tuple[Worker, int]],
    gathers: Sequence[float],
    scatters: Sequence[float],
    bundle_of: Sequence[int],
) -> float:
    """One stream of collectives beside compute. Gathers go first, in order; a rank's first forward pass of a layer
    waits for its bundle; reductions go in the order of the backward pass, each when all ranks have finished theirs."""
    arrived, finished = list(accumulate(gathers)), np.zeros(len(gathers))
    for worker, samples in loads:
        rounds, now = worker.rounds(samples), 0.0
        for number, microbatch in enumerate(rounds):
            layers = worker.by_microbatch[microbatch]
            for layer, bundle in zip(layers, bundle_of, strict=True):
                now = (max(now, arrived[bundle]) if number == 0 else now) + layer.forward_s
            for layer, bundle in reversed(list(zip(layers, bundle_of, strict=True))):
                now += layer.backward_s
                if number == len(rounds) - 1:
                    finished[bundle] = max(finished[bundle], now)
    stream = arrived[-1]
    for bundle in reversed(range(len(gathers))):
        stream = max(stream, finished[bundle]) + scatters[bundle]
    return float(max(stream, finished.max()))


# ---- what is said ----


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(
        NAME, "OPT-350M by published measurements: the share of the compute bound that a plan reaches.", argv
    )
    report = Report(NAME, "OPT-350M on A100-40 and V100-16, by published measurements", options)
    steps = {f"{a}+{v}": plan((a, v)) for a, v in CLUSTERS[: 3 if options.quick else None]}
    rows, better = [], 0
    for (name, s), published, their_s in zip(steps.items(), PUBLISHED, PUBLISHED_S, strict=False):
        report.figure(f"share_of_bound {name}", s.bound_s / s.beside_s)
        report.figure(f"share_of_bound, nothing overlapped, {name}", s.bound_s / s.apart_s)
        better += s.bound_s / s.beside_s > published
        spread = " / ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in s.samples)
        shares = (s.bound_s / s.beside_s, s.bound_s / s.apart_s, published)
        seconds = (s.bound_s, s.compute_s, s.collectives_s, s.beside_s)
        rows.append(
            [
                name,
                spread,
                *(f"{x:.3f}" for x in seconds),
                *(f"{x:.0%}" for x in shares),
                s.bundles,
                f"{s.search_s:.2f}",
                their_s,
            ]
        )
    report.figure("clusters_where_more_than_the_best_published", better)
    report.figure("worst_search_seconds", max(s.search_s for s in steps.values()))
    columns = ("A100+V100", "samples each", "bound s", "compute s", "collectives s", "step s")
    columns += ("share", "nothing overlapped", "best published", "bundles", "our CPU s", "its CPU s")
    report.table("One step of 1,024 samples", columns, rows)
    report.text(
        "Times of layers and links are measured by others; the steps are computed from them, not run. The published "
        "shares are from its own simulator, which has tensor and pipeline parallelism; ours deals out the batch alone. "
        "Gradients of several microbatches are exchanged once."
    )
    with drawing(1, 1, width=6.0, height=3.0) as (figure, (axis,)):
        places = np.arange(len(steps))
        axis.bar(
            places - 0.2, [100 * s.bound_s / s.beside_s for s in steps.values()], 0.4, color=COLOURS[0], label="here"
        )
        axis.bar(
            places + 0.2, [100 * p for p in PUBLISHED[: len(steps)]], 0.4, color=COLOURS[1], label="best published"
        )
        axis.set(title="Share of the compute bound", ylabel="%", xticks=places, xticklabels=list(steps))
        axis.legend()
        report.write(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
