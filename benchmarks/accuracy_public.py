"""The cost model's formulas on other people's GPUs: fitted on a third of each data set, predicting the rest.

The third is stated before anything is fitted: in the file's order, rows 0, 3, 6, ... of each group. What is fitted are
the same forms that a profile fits (``hap.cost_models.fit``), on relative errors:

    layers        launch + a * microbatch / tp + b * microbatch + c / tp (arithmetic; what every tensor-parallel rank
                  repeats or sends; weights); a group is one GPU, model and kind of layer
    ResNet-50     launch + a * images + b * passes; a group is one GPU
    collectives   seconds per byte by size, as a profile's; JABAS's few points: latency and bandwidth; by curve
    iterations    (m + pp - 1) slots of [layers' FLOPs, tensor-parallel bytes, launches] + data-parallel bytes + update,
                  m microbatches in a pipeline of pp stages; one group, all models and parallelisms together
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.common import Report, Spread
from hap.cost_models.fit import WireTiming, fit_collectives, non_negative
from hap.cost_models.nccl import Communicator, fastest

T = TypeVar("T")
DATA = Path(__file__).parent / "data"
FITTED = 3  # one row in so many
LEAST_FITTED = 2  # of a group, else it is left out and counted


@dataclass(frozen=True)
class Held:
    """One row that was not fitted on."""

    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1)


@dataclass(frozen=True)
class Result:
    name: str
    fitted: int
    held: tuple[Held, ...]
    left_out: int


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def split(found: Sequence[T]) -> tuple[list[T], list[T]]:
    """(rows 0, 3, 6, ...; the others)."""
    return list(found[::FITTED]), [row for i, row in enumerate(found) if i % FITTED]


def grouped(found: Sequence[T], key: Callable[[T], object]) -> Iterator[list[T]]:
    groups: dict[object, list[T]] = {}
    for row in found:
        groups.setdefault(key(row), []).append(row)
    yield from groups.values()


@dataclass(frozen=True)
class Work:
    """A measurement and the quantities that its seconds are a sum of, each with a coefficient >= 0."""

    group: tuple[str, ...]
    terms: tuple[float, ...]
    seconds: float


def linear(name: str, found: Sequence[Work]) -> Result:
    """``non_negative`` of every group."""
    fitted, held, left_out = 0, [], 0
    for group in grouped(found, lambda w: w.group):
        known, rest = split(group)
        if len(known) < LEAST_FITTED:
            left_out += len(group)
            continue
        coefficients = non_negative(np.array([w.terms for w in known]), np.array([w.seconds for w in known]))
        fitted += len(known)
        held += [Held(float(np.array(w.terms) @ coefficients), w.seconds) for w in rest]
    return Result(name, fitted, tuple(held), left_out)


def layers() -> Result:
    found = []
    for r in rows("sailor_layer_profiles.csv"):
        first, last, count = int(r["layer_first"]), int(r["layer_last"]), int(r["num_layers_total"])
        kind = "embedding" if last == 0 else "head" if first == count - 1 else "middle"
        microbatch, tp = int(r["microbatch"]), int(r["tp"])
        terms = (1.0, microbatch / tp, float(microbatch), 1 / tp)
        found.append(Work((r["gpu"], r["model"], kind), terms, float(r["fwd_s"]) + float(r["bwd_s"])))
    return linear("layers, 7 GPUs (Sailor)", found)


def resnet() -> Result:
    found = []
    for r in rows("jabas_resnet50_v100_p100.csv"):
        passes = float(r["accum_steps"])
        found.append(Work((r["gpu"],), (1.0, float(r["local_batch"]) * passes, passes), float(r["total_ms"]) / 1e3))
    return linear("ResNet-50 on V100, P100 (JABAS)", found)


@dataclass(frozen=True)
class Message:
    """A collective of a curve: what one rank puts on the wire, and the seconds."""

    curve: tuple[str, ...]
    nbytes: float
    seconds: float


def curves(name: str, found: Sequence[Message]) -> Result:
    """``fit_collectives`` of every curve, as a profile does: measured over bytes by size."""
    fitted, held, left_out = 0, [], 0
    for curve in grouped(found, lambda m: m.curve):
        known, rest = split(sorted(curve, key=lambda m: m.nbytes))
        if len(known) < LEAST_FITTED:
            left_out += len(curve)
            continue
        (fit,) = fit_collectives([WireTiming("all_reduce", "ring", m.nbytes, m.nbytes, m.seconds, 0.0) for m in known])
        fitted += len(known)
        held += [Held(fit.factor(m.nbytes) * m.nbytes, m.seconds) for m in rest]
    return Result(name, fitted, tuple(held), left_out)


def bus_bandwidth() -> Result:
    found = []
    for r in rows("allreduce_busbw_measured.csv"):
        nodes, gpus = map(int, r["nodes_x_gpus"].split("x"))
        ranks = nodes * gpus
        sent = 2 * (ranks - 1) / ranks * float(r["payload_bytes"])
        found.append(Message((r["fabric"], r["nodes_x_gpus"]), sent, sent / (float(r["busbw_GBps"]) * 1e9)))
    return curves("all-reduce, A100 to B200, MI300X (ml-engineering)", found)


def galvatron() -> Result:
    found = [
        Message((r["collective"], r["group_size"]), float(r["message_MB"]) * 1e6, float(r["time_ms"]) / 1e3)
        for r in rows("galvatron_collectives.csv")
        if r["collective"] in ("allreduce", "all2all")
    ]
    return curves("all-reduce and all-to-all (Galvatron)", found)


def jabas() -> Result:
    """Two curves of nine noisy points: latency and bandwidth, no factors."""
    found = [
        Work((r["scope"],), (1.0, float(r["x_size_MB_ring_volume"])), float(r["time_ms"]) / 1e3)
        for r in rows("jabas_comm.csv")
    ]
    return linear("collectives inside and between nodes (JABAS)", found)


def iterations() -> Result:
    """vTrain's: one fit for all."""
    found = rows("vtrain_a100_single_node.csv")
    seconds = [float(r["iteration time (ms)"]) / 1e3 for r in found]
    work = [Work((), tuple(_slots(r)), t) for r, t in zip(found, seconds, strict=True)]
    return linear("iterations of GPT, 1 to 8 A100 (vTrain)", work)


def _slots(r: Mapping[str, str]) -> list[float]:
    """The quantities of one iteration; see the module docstring."""
    h, n, s = (int(r[k]) for k in ("hidden size", "# layers", "sequence length"))
    tp, dp, pp = (int(r[f"{k} parallelism"]) for k in ("tensor", "data", "pipeline"))
    mb, batch = int(r["micro batch"]), int(r["global batch"])
    slots = batch / (dp * mb) + pp - 1
    per_stage = n / pp
    flops = 3 * mb * s * (24 * h * h + 4 * s * h) * per_stage / tp  # forward 24 s h^2 + 4 s^2 h a layer; backward twice
    head = 6 * mb * s * h * 51200 / tp  # the last stage's, of a vocabulary such as Megatron pads it
    exchanged = 4 * mb * s * h * 2 * per_stage * 2 * (tp - 1) / tp
    elementwise = mb * s * h * per_stage
    parameters = (12 * h * h * n / pp + 51200 * h) / tp
    return [
        slots * flops,
        slots * head,
        slots * exchanged,
        slots * elementwise,
        slots * per_stage,
        parameters * 2 * (dp - 1) / dp,
        parameters,
    ]


NCCL_OF = {  # of rows of allreduce_busbw_measured.csv: what the fabric's name says, GB/s of the bus as NVIDIA states it
    ("A100 NVLink3", "1x8"): Communicator(8, 1, "nvlink", 240e9, "ampere"),
    ("B200 NVLink5", "1x8"): Communicator(8, 1, "nvlink", 720e9, "blackwell"),
    ("B200 NVLink5 + 8x50GB/s EFAv4", "4x8"): Communicator(32, 4, "nvlink", 400e9, "blackwell"),
}
NCCL_LARGE = 64 << 20  # bytes: from here on bandwidth counts, not latency


def by_nccl() -> dict[str, list[float]]:
    """What NCCL's own formulas, with nothing fitted, make of them: relative errors, of small and of large messages."""
    found: dict[str, list[float]] = {}
    for r in rows("allreduce_busbw_measured.csv"):
        fabric, shape = r["fabric"], r["nodes_x_gpus"]
        if (comm := NCCL_OF.get((fabric, shape))) is not None:
            nbytes = float(r["payload_bytes"])
            measured = 2 * (comm.ranks - 1) / comm.ranks * nbytes / (float(r["busbw_GBps"]) * 1e9)
            size = "64 MB and more" if nbytes >= NCCL_LARGE else "less than 64 MB"
            error = fastest("all_reduce", nbytes, comm).seconds / measured - 1
            found.setdefault(f"{fabric}, {shape}, {size}", []).append(error)
    return found


SETS: Sequence[Callable[[], Result]] = (layers, resnet, bus_bandwidth, galvatron, jabas, iterations)


def measure_public() -> list[dict[str, Any]]:
    """``Result``s as plain data."""
    return [asdict(make()) for make in SETS]


def tell_public(report: Report, data: Sequence[dict[str, Any]]) -> None:
    results = [Result(**{**r, "held": tuple(Held(**h) for h in r["held"])}) for r in data]
    errors = [h.error for r in results for h in r.held]
    report.figure("public_data_median_error", statistics.median(errors), Spread.of(errors))
    report.figure("public_data_90_percent_below", ninety(errors))
    report.table(
        "Measurements of others: fitted on rows 0, 3, 6, ... of each group, predicted on the rest",
        ["data", "fitted", "predicted", "left out", "median error", "90 % below", "worst"],
        [shown(r) for r in results],
    )
    report.table(
        "All-reduce by NCCL's own formulas (hap.cost_models.nccl), nothing fitted; in no figure",
        ["fabric", "messages", "median error", "least", "most"],
        [
            [name, len(e), f"{statistics.median(e):+.0%}", f"{min(e):+.0%}", f"{max(e):+.0%}"]
            for name, e in by_nccl().items()
        ],
    )
    report.text(
        "The forms were chosen with these data at hand, so this is no blind test: it says how well such forms describe "
        "real GPUs, not how well HAP predicts one that nobody has measured."
    )


def shown(result: Result) -> list[object]:
    errors = sorted(h.error for h in result.held)
    figures = [f"{e:.1%}" for e in (statistics.median(errors), ninety(errors), errors[-1])]
    return [result.name, result.fitted, len(errors), result.left_out, *figures]


def ninety(errors: Sequence[float]) -> float:
    """What nine of ten of them are at most."""
    return sorted(errors)[int(0.9 * (len(errors) - 1))]
