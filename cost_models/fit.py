"""From measurements to a profile's numbers: least squares on relative errors, medians, and the residuals of both.

    seconds = launch + flops * a + nbytes * b,      launch, a, b >= 0, sum of ((fit - measured) / measured)^2 least

and, with enough samples, a factor by size: the median of measured / fit in each of a few ranges. Three unknowns, so the
constraint is met by trying every subset of them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hap.cost_models.profile import CallCurve, CollectiveProfile, CopyFit, Fit, UpdateFit, base_name, between
from hap.fabric import Array
from hap.plan import Collective

BINS = 4
PER_BIN = 4  # samples, at least, for a factor by size
AHEAD_BYTES = 1 << 16  # who is done before others is told by larger values


@dataclass(frozen=True)
class Timing:
    """One call at one share of its group: what it does there and its seconds. ``call`` is ``Parts.call``."""

    call: str
    op: str
    op_class: str
    dtype: str
    share: float
    flops: float
    nbytes: float
    seconds: float
    spread: float


@dataclass(frozen=True)
class WireTiming:
    """One collective on one value: seconds on the wire beside the plain formula's, the spread over repeats, and for how
    much of these seconds every rank was done before the last one."""

    kind: Collective
    decomposition: str
    nbytes: float
    formula_s: float
    seconds: float
    spread: float
    ahead: tuple[float, ...] = ()


@dataclass(frozen=True)
class CopyTiming:
    """What packing and joining took one rank: ``whole`` and ``local`` as in ``CopyFit``."""

    kind: Collective
    decomposition: str
    whole: float
    local: float
    seconds: float


def non_negative(columns: Array, seconds: Array) -> Array:
    """The coefficients >= 0 (K,) of ``columns`` (M, K) with the least squared relative error against ``seconds``."""
    count, best, least = columns.shape[1], np.zeros(columns.shape[1]), float("inf")
    scaled, ones = columns / seconds[:, None], np.ones(len(seconds))
    norms = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            some = list(chosen)
            found = np.linalg.lstsq(scaled[:, some] / norms[some], ones, rcond=None)[0] / norms[some]
            error = float(((scaled[:, some] @ found - ones) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9) - 1e-18:
                best, least = np.zeros(count), error
                best[some] = found
    return best


def fit_seconds(flops: Sequence[float], nbytes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """The fit of one operator or class, with its factors by size where there are enough samples."""
    measured = np.array(seconds, dtype=np.float64)
    columns = np.stack([np.ones(len(measured)), np.array(flops, float), np.array(nbytes, float)], axis=1)
    launch, per_flop, per_byte = non_negative(columns, measured).tolist()
    affine = columns @ np.array([launch, per_flop, per_byte])
    sizes, factors = _by_size(affine, measured / affine)
    fitted = np.array([a * between(a, sizes, factors) for a in affine.tolist()])
    errors = np.abs(fitted / measured - 1)
    return Fit(
        launch_s=launch,
        s_per_flop=per_flop,
        s_per_byte=per_byte,
        sizes=sizes,
        factors=factors,
        residual=float(np.median(errors)),
        worst=float(errors.max()),
        samples=len(measured),
    )


def _by_size(affine: Array, ratios: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if len(affine) < BINS * PER_BIN:
        return (), ()
    order = np.argsort(affine, kind="stable")
    sizes: list[float] = []
    factors: list[float] = []
    for part in np.array_split(order, BINS):
        size = float(np.exp(np.log(affine[part]).mean()))
        if not sizes or size > sizes[-1]:
            sizes.append(size)
            factors.append(float(np.median(ratios[part])))
    return tuple(sizes), tuple(factors)


def fit_timings(timings: Sequence[Timing]) -> dict[str, Fit]:
    """Fits by ``op/dtype`` and ``class/dtype``, sorted by name."""
    groups: dict[str, list[Timing]] = {}
    for t in timings:
        groups.setdefault(f"{t.op}/{t.dtype}", []).append(t)
        groups.setdefault(f"{t.op_class}/{t.dtype}", []).append(t)
    return {
        name: fit_seconds([t.flops for t in found], [t.nbytes for t in found], [t.seconds for t in found])
        for name, found in sorted(groups.items())
    }


def call_curves(timings: Iterable[Timing]) -> dict[str, CallCurve]:
    """One curve for each call."""
    points: dict[str, list[Timing]] = {}
    for t in timings:
        points.setdefault(t.call, []).append(t)
    found = {}
    for call in sorted(points):
        rising = sorted(points[call], key=lambda t: t.share)
        shares, seconds = tuple(t.share for t in rising), tuple(t.seconds for t in rising)
        found[call] = CallCurve(shares=shares, seconds=seconds, spread=max(t.spread for t in rising))
    return found


def pool(by_rank: Sequence[Sequence[Timing]]) -> tuple[list[Timing], tuple[float, ...]]:
    """One kind's timings from its ranks': the median of each call and share; and each rank's factor, the median of its
    ratios to them over that of all ranks."""
    seen: dict[tuple[str, float], list[tuple[int, Timing]]] = {}
    for rank, timings in enumerate(by_rank):
        for t in timings:
            seen.setdefault((t.call, t.share), []).append((rank, t))
    pooled: list[Timing] = []
    ratios: list[list[float]] = [[] for _ in by_rank]
    for found in seen.values():
        seconds = [t.seconds for _, t in found]
        chosen = statistics.median(seconds)
        first = found[0][1]
        spread = statistics.median(t.spread for _, t in found)
        pooled.append(Timing(*_described(first), chosen, spread))
        for rank, t in found:
            ratios[rank].append(t.seconds / chosen)
    middle = [statistics.median(r) if r else 1.0 for r in ratios]
    return pooled, tuple(m / statistics.median(middle) for m in middle)


def _described(t: Timing) -> tuple[str, str, str, str, float, float, float]:
    return t.call, t.op, t.op_class, t.dtype, t.share, t.flops, t.nbytes


def fit_steps(*, calls: Sequence[float], nodes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(in_step, node_s) of ``seconds = in_step * calls + nodes * node_s`` over whole graphs; (1, 0) without any."""
    if not seconds:
        return 1.0, 0.0
    columns = np.stack([np.array(calls), np.array(nodes, dtype=np.float64)], axis=1)
    in_step, node_s = non_negative(columns, np.array(seconds)).tolist()
    if in_step >= 1:
        return in_step, node_s
    beyond = [max(0.0, s - c) / n for s, c, n in zip(seconds, calls, nodes, strict=True)]
    return 1.0, statistics.median(beyond)


def fit_update(*, parameters: Sequence[int], nbytes: Sequence[int], seconds: Sequence[float]) -> UpdateFit:
    """Over whole models, and a parameter of next to no bytes."""
    columns, measured = np.array([parameters, nbytes], dtype=np.float64).T, np.maximum(seconds, 1e-9)
    each, per_byte = non_negative(columns, measured).tolist()
    errors = np.abs(columns @ np.array([each, per_byte]) / measured - 1)
    return UpdateFit(parameter_s=each, s_per_byte=per_byte, residual=float(np.median(errors)), samples=len(seconds))


def with_products(fit: UpdateFit, flops: Sequence[float], nbytes: Sequence[int], seconds: Sequence[float]) -> UpdateFit:
    """Of updates of single matrices, what ``fit`` does not have."""
    rest = [max(1e-9, s - fit.parameter_s - fit.s_per_byte * n) for s, n in zip(seconds, nbytes, strict=True)]
    columns = np.array([np.ones(len(flops)), flops]).T
    matrix_s, s_per_flop = non_negative(columns, np.array(rest)).tolist()
    return fit.model_copy(update={"matrix_s": matrix_s, "s_per_flop": s_per_flop})


def fit_copies(timings: Sequence[CopyTiming]) -> dict[str, CopyFit]:
    """By ``collective/decomposition``."""
    groups: dict[str, list[CopyTiming]] = {}
    for t in timings:
        groups.setdefault(f"{t.kind}/{base_name(t.decomposition)}", []).append(t)
    found = {}
    for name, some in sorted(groups.items()):
        columns = np.array([[1.0, t.whole, t.local] for t in some])
        seconds = np.array([t.seconds for t in some])
        launch, whole, local = non_negative(columns, seconds).tolist()
        errors = np.abs(columns @ np.array([launch, whole, local]) / seconds - 1)
        found[name] = CopyFit(
            launch_s=launch,
            s_per_whole=whole,
            s_per_local=local,
            residual=float(np.median(errors)),
            samples=len(some),
        )
    return found


def fit_collectives(timings: Sequence[WireTiming]) -> tuple[CollectiveProfile, ...]:
    """By collective: measured over formula by size, after the seconds of rising sizes were made to rise."""
    groups: dict[tuple[Collective, str], list[WireTiming]] = {}
    for t in timings:
        groups.setdefault((t.kind, base_name(t.decomposition)), []).append(t)
    found = []
    for (kind, decomposition), some in sorted(groups.items()):
        sizes = sorted({t.nbytes for t in some})
        by_size = [[t for t in some if t.nbytes == size] for size in sizes]
        measured = [statistics.median(t.seconds for t in same) for same in by_size]
        rising = non_decreasing(measured)
        factors = tuple(
            statistics.median(t.seconds / t.formula_s for t in same) * up / was
            for same, up, was in zip(by_size, rising, measured, strict=True)
        )
        errors = [
            abs(factor * t.formula_s / t.seconds - 1)
            for same, factor in zip(by_size, factors, strict=True)
            for t in same
        ]
        found.append(
            CollectiveProfile(
                kind=kind,
                decomposition=decomposition,
                sizes=tuple(sizes),
                factors=factors,
                seconds=tuple(rising),
                residual=statistics.median(errors),
                spread=statistics.median(t.spread for t in some),
                samples=len(some),
                ahead=_ahead([t.ahead for t in some if t.nbytes >= AHEAD_BYTES]),
            )
        )
    return tuple(found)


def _ahead(samples: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The median of every rank."""
    return tuple(statistics.median(own) for own in zip(*samples, strict=True))


def non_decreasing(values: Sequence[float]) -> list[float]:
    """The nearest rising sequence in logarithms (pool adjacent violators): noise makes a larger message no faster."""
    blocks: list[tuple[float, int]] = []  # (mean of the logarithms, how many)
    for value in values:
        mean, count = float(np.log(value)), 1
        while blocks and blocks[-1][0] > mean:
            before, several = blocks.pop()
            mean, count = (before * several + mean * count) / (several + count), several + count
        blocks.append((mean, count))
    return [float(np.exp(mean)) for mean, count in blocks for _ in range(count)]
