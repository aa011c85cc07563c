"""OPT-350M on A100-40 and V100-16 by published measurements: how much of the compute bound a plan reaches.

Sequence 2048, 1,024 samples a step, hosts of four; seconds of every layer and curves of every link as measured by the
authors of Sailor (SOSP 2025; ``benchmarks/data/README.md``). The bound is the batch over the sum of every device's best
measured rate; the best published planner reaches ``PUBLISHED`` of it in their simulator, by their own planner.

Two members of the data-parallel family, in whole samples:

    in lockstep   as the runtime runs it: all ranks go through equal rounds, each kind of device with as many samples at
                  a time as is best and fits (``most_samples``); every round exchanges its gradients. Parameters whole
                  and all-reduced, or sharded, gathered and reduce-scattered; all that is enumerated (``in_lockstep``)
    on its own    every rank goes through as many microbatches as it likes (``deal``: the least time in which all are
                  done, exactly), gradients are exchanged once, parameters and state sharded (``on_its_own``); what
                  deferred exchange would bring

Collectives are those of ``hap.cost_models`` on a cluster with the measured links (``cluster``). One stream of them runs
beside compute, layers in so many bundles as is best: a layer's forward pass waits for its bundle's gather, a bundle's
reduction for the last rank's backward pass of it (``beside_seconds``). A microbatch that was not measured is on the
line between its neighbours. On its own, every 16-GB device takes one sample at a time and every 40-GB one two, as in
the source; in lockstep it is what this house's ledger says of the captured step, whose
attention keeps no scores, and, beside it, what the source allows.
"""

from __future__ import annotations

import csv
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from benchmarks.common import COLOURS, ROOT, Report, drawing, parse
from hap.cluster import ClusterSpec
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
HELD = {"A100-40": 40e9, "V100-16": 16e9}
USABLE = 0.9  # of a device's memory, as in ``hap.cost_models.memory``
KEPT_PER_SAMPLE = 3.67e9  # bytes, by ``hap.cost_models.memory`` on the captured step, logits among them
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


def on_its_own(counts: Sequence[int]) -> Step:
    """The samples dealt out, and the number of bundles with the shortest step."""
    began, kinds, spec = time.process_time(), workers(), cluster(counts)
    bound = BATCH / sum(k.best_rate * c for k, c in zip(kinds, counts, strict=True))
    given = deal(kinds, counts, BATCH)
    loads = [(k, n) for k, g in zip(kinds, given, strict=True) for n in sorted(set(g))]
    compute = max(k.seconds(n) for k, n in loads)
    samples, steps = tuple((min(g), max(g)) for g in given), []
    for (gathers, scatters, of), update, whole in _exchanges(spec, kinds):
        if not whole:
            wire = sum(gathers) + sum(scatters)
            beside = beside_seconds(loads, gathers, scatters, of) + update
            steps.append(Step(bound, compute, wire, compute + wire + update, beside, samples, len(gathers), 0.0))
    best = min(steps, key=lambda step: step.beside_s)
    return replace(best, apart_s=min(s.apart_s for s in steps), search_s=time.process_time() - began)


@dataclass(frozen=True)
class Lockstep:
    """Every rank takes part in every round; ``rounds``: (samples of each kind, how many rounds are so)."""

    step_s: float
    rounds: tuple[tuple[tuple[int, ...], int], ...]
    whole: bool  # parameters whole on every rank, gradients all-reduced; else sharded, gathered in every round


def in_lockstep(counts: Sequence[int], most: Sequence[int]) -> Lockstep:
    """The shortest step of equal rounds and perhaps a smaller last one, with an exchange of gradients in each; ``most``
    samples at a time on each kind of device."""
    spec, table = cluster(counts), measured()
    kinds = [Worker(_filled(kind, m, table), m) for kind, m in zip(KINDS, most, strict=True)]
    exchanges = list(_exchanges(spec, kinds))
    menu = [m for m in itertools.product(*(range(m + 1) for m in most)) if any(m)]
    took: dict[tuple[int, ...], list[float]] = {}
    for each in menu:
        loads = [(k, n) for k, n in zip(kinds, each, strict=True) if n]
        took[each] = [beside_seconds(loads, *wires) for wires, _, _ in exchanges]
    found = []
    for each in menu:
        full, rest = divmod(BATCH, int(np.dot(each, counts)))
        lasts = [m for m in menu if np.dot(m, counts) >= rest] if rest else [()]
        for x, (_, update, whole) in enumerate(exchanges):
            last = min(lasts, key=lambda m: took[m][x] if m else 0.0)
            seconds = full * took[each][x] + (took[last][x] if last else 0.0) + update
            rounds = tuple((m, many) for m, many in ((each, full), (last, 1)) if m and many)
            found.append(Lockstep(seconds, rounds, whole))
    return min(found, key=lambda f: f.step_s)


def most_samples(kind: str) -> int:
    """That a device holds at a time beside whole weights, gradients and two moments, by this house's ledger."""
    room = USABLE * HELD[kind] - 4 * sum(parameter_bytes())
    return int(room // KEPT_PER_SAMPLE)


def _filled(kind: str, most: int, table: Mapping[tuple[str, int], tuple[Layer, ...]]) -> dict[int, tuple[Layer, ...]]:
    """Every microbatch up to ``most``: as measured, or on the line between the two measured around it."""
    known = sorted(m for k, m in table if k == kind)
    found = {}
    for m in range(1, most + 1):
        low, high = max(k for k in known if k <= m), min(k for k in known if k >= m)
        at = 0.0 if low == high else (m - low) / (high - low)
        pairs = zip(table[kind, low], table[kind, high], strict=True)
        found[m] = tuple(
            Layer(*(a + at * (b - a) for a, b in zip(astuple(x), astuple(y), strict=True))) for x, y in pairs
        )
    return found


Wiring = tuple[list[float], list[float], tuple[int, ...]]  # gathers, reductions, the bundle of each layer


def _exchanges(spec: ClusterSpec, kinds: Sequence[Worker]) -> Iterator[tuple[Wiring, float, bool]]:
    """(collectives of a round, seconds of the update, whether parameters are whole)."""
    whole_update, wires = max(sum(layer.update_s for layer in k.by_microbatch[1]) for k in kinds), Wires(spec)
    for stored in (None, *storing(wires)):
        known = tariff(wires, stored)
        for bundles in BUNDLES:
            amounts, of = bundle_bytes(bundles_of(bundles)), bundles_of(bundles)
            if stored is None:
                yield ([0.0] * bundles, [known["all_reduce"][b] for b in amounts], of), whole_update, True
            else:
                gathers, scatters = ([known[kind][b] for b in amounts] for kind in ("all_gather", "reduce_scatter"))
                yield (gathers, scatters, of), whole_update * max(stored), False


def bundle_bytes(bundle_of: Sequence[int]) -> list[int]:
    found = [0] * (max(bundle_of) + 1)
    for nbytes, bundle in zip(parameter_bytes(), bundle_of, strict=True):
        found[bundle] += nbytes
    return found


def storing(wires: Wires) -> list[tuple[float, ...]]:
    """What share of the state every rank may store: evenly, or as is cheapest for the links where that fits."""
    n = wires.cluster.world_size
    found = [(1.0 / n,) * n]
    cheapest = wires.cheapest_shares(parameter_bytes()[1])
    if cheapest is not None and 4 * max(cheapest) * sum(parameter_bytes()) < STORED:
        found.append(tuple(cheapest.tolist()))
    return found


def tariff(wires: Wires, stored: tuple[float, ...] | None) -> Mapping[str, Mapping[int, float]]:
    """Kind of collective -> bytes of a bundle -> seconds; of all-reduces if nothing is ``stored`` in shards."""
    amounts = np.unique([b for bundles in BUNDLES for b in bundle_bytes(bundles_of(bundles))])
    if stored is None:
        seconds = {"all_reduce": wires.best_s("all_reduce", amounts, PARTIAL, REPLICATE, {})}
    else:
        sizes, shard = {"g": round_shares(stored, PARTS)}, Shard(0, 1, PARTS, 1, "g")
        seconds = {
            "all_gather": wires.best_s("all_gather", amounts, shard, REPLICATE, sizes),
            "reduce_scatter": wires.best_s("reduce_scatter", amounts, PARTIAL, shard, sizes),
        }
    return {kind: dict(zip(amounts.tolist(), s.tolist(), strict=True)) for kind, s in seconds.items()}


def bundles_of(bundles: int) -> tuple[int, ...]:
    """The bundle of every layer."""
    return tuple(layer * bundles // LAYERS for layer in range(LAYERS))


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
    rows, shares, slowest, better = [], [], 0.0, np.zeros(4, dtype=int)
    cases = list(zip(CLUSTERS, PUBLISHED, PUBLISHED_S, strict=True))[: 3 if options.quick else None]
    for counts, published, their_s in cases:
        name, began = "+".join(map(str, counts)), time.process_time()
        lockstep = in_lockstep(counts, [most_samples(kind) for kind in KINDS])
        took, alone = time.process_time() - began, on_its_own(counts)
        narrow = in_lockstep(counts, [FITS[kind] for kind in KINDS])
        found = [alone.bound_s / s for s in (lockstep.step_s, narrow.step_s, alone.beside_s, alone.apart_s)]
        report.figure(f"share_of_bound {name}", found[0])
        report.figure(f"share_of_bound, the source's memory, {name}", found[1])
        report.figure(f"share_of_bound, exchanged once, {name}", found[2])
        report.figure(f"share_of_bound, exchanged once, nothing overlapped, {name}", found[3])
        better, slowest = better + (np.array(found) > published), max(slowest, took)
        rounds = ", ".join(f"{many} x {' / '.join(map(str, each))}" for each, many in lockstep.rounds)
        seconds = [f"{s:.3f}" for s in (alone.bound_s, lockstep.step_s, alone.beside_s)]
        percents = [f"{x:.0%}" for x in (*found, published)]
        rows.append([name, rounds, *seconds, *percents, f"{took:.2f}", their_s])
        shares.append((name, found[0], found[2], published))
    report.figure("share_of_bound_clusters_above_published", int(better[0]))
    report.figure("share_of_bound_clusters_above_published, the source's memory", int(better[1]))
    report.figure("share_of_bound_clusters_above_published, exchanged once", int(better[2]))
    report.figure("share_of_bound_search_seconds", slowest)
    columns: tuple[str, ...] = ("A100+V100", "rounds x samples each", "bound s", "step s", "exchanged once s", "share")
    columns += (
        "the source's memory",
        "exchanged once",
        "and nothing overlapped",
        "best published",
        "our CPU s",
        "its CPU s",
    )
    report.table("One step of 1,024 samples", columns, rows)
    report.text(
        "Times of layers and links are measured by others; the steps are computed from them, not run. The published "
        "shares are from its authors' simulator, whose plans have tensor and pipeline parallelism.\n\n"
        "`share` is of the step as the runtime runs it: equal rounds on all ranks, so many samples at a time on an "
        "A100 / a V100, as many as fit by this house's ledger. `the source's memory`: the same with two / one, as the "
        f"source allows, which is above the published share on {better[1]} of {len(cases)} clusters. `exchanged once`: "
        f"two / one again, but gradients are exchanged when all rounds are done, which the runtime does not do: above "
        f"on {better[2]}; with nothing overlapped on {better[3]}. CPU seconds are of `share`."
    )
    with drawing(1, 1, width=7.0, height=3.2) as (figure, (axis,)):
        places, bars = np.arange(len(shares)), ("here", "here, two / one at a time, exchanged once", "best published")
        for number, (label, colour) in enumerate(zip(bars, (COLOURS[0], COLOURS[5], COLOURS[1]), strict=True)):
            heights = [100 * row[1 + number] for row in shares]
            axis.bar(places + 0.27 * (number - 1), heights, 0.27, color=colour, label=label)
        axis.set(title="Share of the compute bound", ylabel="%", xticks=places, xticklabels=[row[0] for row in shares])
        axis.set(ylim=(0, 118), yticks=range(0, 101, 20))
        axis.legend(ncols=3, loc="upper center")
        report.write(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
