"""How well a cluster file can describe a measured link: latency and bandwidth, or a curve of so many points.

The links are Sailor's (``data/sailor_link_curves.csv``): GB/s = c2 x^2 + c1 x + c0, x = log2(message in MB), at most
the largest seen, and at its top beyond it. They are asked for messages of 1 MB to 1 GB, powers of two; below, the
polynomials mean nothing.

    stated      the largest bandwidth and a latency of 5 us, as a data sheet has them
    one line    the latency and the bandwidth that fit this link best, by relative error: no two numbers do better
    n points    stated, with a curve of n of its own points (``ClusterSpec``); the others are predicted
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import COLOURS, Report, Spread, drawing, parse
from hap.cost_models.fit import non_negative
from hap.fabric import Array
from hap.hosts import delay_s, find_delays

DATA = Path(__file__).parent / "data" / "sailor_link_curves.csv"
SIZES: Array = 1e6 * 2.0 ** np.arange(11, dtype=np.float64)  # bytes: 1 MB to 1 GB
POINTS = {2: (1, 64), 3: (1, 16, 256), 5: (1, 4, 16, 64, 256)}  # MB
LATENCY_S = 5e-6


@dataclass(frozen=True)
class Link:
    """One measured curve; ``pairs``: how many links of the source have it."""

    scope: str
    name: str
    coefficients: tuple[float, float, float]
    most_bytes_per_s: float
    pairs: int

    def seconds(self, nbytes: Array) -> Array:
        a, b, _ = self.coefficients
        x = np.log2(nbytes / 1e6)
        top = np.minimum(x, -b / (2 * a)) if a < 0 else x
        rate = 1e9 * np.polyval(self.coefficients, top)
        found: Array = nbytes / np.minimum(rate, self.most_bytes_per_s)
        return found


def links() -> list[Link]:
    found = []
    with DATA.open(encoding="utf-8", newline="") as lines:
        for r in csv.DictReader(lines):
            name = f"{r['gpus_a']} {r['gpu_a']} to {r['gpus_b']} {r['gpu_b']}"
            fit = float(r["c2"]), float(r["c1"]), float(r["c0"])
            found.append(Link(r["scope"], name, fit, float(r["max_bw_bytes_per_s"]), int(r["pairs"])))
    return found


def stated(link: Link) -> Array:
    seconds: Array = LATENCY_S + SIZES / link.most_bytes_per_s
    return seconds


def one_line(link: Link) -> Array:
    columns = np.stack([np.ones_like(SIZES), SIZES], axis=1)
    seconds: Array = columns @ non_negative(columns, link.seconds(SIZES))
    return seconds


def curve(link: Link, points_mb: Sequence[int]) -> Array:
    """As a cluster file says it; a point that latency and bandwidth do not allow counts as what they do."""
    sizes = np.array([1e6 * mb for mb in points_mb])
    plain = LATENCY_S + sizes / link.most_bytes_per_s
    rates = sizes / np.maximum(link.seconds(sizes), plain)
    said = {int(size): float(rate) for size, rate in zip(sizes, rates, strict=True)}
    delays = find_delays(said, link.most_bytes_per_s, LATENCY_S)
    return stated(link) + np.array([delay_s(delays, nbytes) for nbytes in SIZES])


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("links", "How well a cluster file can describe a measured link.", argv)
    report = Report("links", "Measured links, described", options)
    found = links()
    ways: dict[str, tuple[Callable[[Link], Array], tuple[int, ...]]]
    ways = {"stated": (stated, ()), "one line": (one_line, ())}
    ways |= {f"{n} points": (partial(curve, points_mb=points), points) for n, points in POINTS.items()}
    errors = {
        (scope, way): [_errors(link, seconds(link), told) for link in found if link.scope == scope]
        for way, (seconds, told) in ways.items()
        for scope in ("intra", "inter")
    }
    rows = []
    for (scope, way), each in errors.items():
        every = [float(e) for of_link in each for e in of_link]
        rows.append([scope, way, len(each), f"{statistics.median(every):.1%}", f"{max(every):.1%}"])
    report.table("Error of a message's seconds, 1 MB to 1 GB", ["links", "told", "curves", "median", "worst"], rows)
    for way in ways:
        every = [float(e) for scope in ("intra", "inter") for of_link in errors[scope, way] for e in of_link]
        name = way.replace(" ", "_")
        report.figure(f"{name}_median_error", statistics.median(every), Spread.of(every))
        report.figure(f"{name}_worst_error", max(every))
    report.figure("curves", len(found))
    report.figure("pairs", sum(link.pairs for link in found))
    with drawing(1, 2, width=8.0, height=3.2) as (figure, axes):
        for ax, link in zip(axes, (found[0], next(f for f in found if f.scope == "inter")), strict=True):
            ax.loglog(SIZES / 1e6, SIZES / link.seconds(SIZES) / 1e9, "o", color="black", label="measured (fit)")
            for colour, way in zip(COLOURS, ("stated", "one line", "3 points"), strict=False):
                ax.loglog(SIZES / 1e6, SIZES / ways[way][0](link) / 1e9, color=colour, label=way)
            ax.set_title(f"{link.name}, {link.scope}", fontsize=8)
            ax.set_xlabel("message, MB")
            ax.set_ylabel("GB/s")
            ax.legend(fontsize=7)
        report.write(figure)
    return 0


def _errors(link: Link, predicted: Array, told_mb: Sequence[int]) -> Array:
    """At the sizes that were not told."""
    errors: Array = np.abs(predicted / link.seconds(SIZES) - 1)
    return errors[~np.isin(SIZES, [1e6 * mb for mb in told_mb])]


if __name__ == "__main__":
    raise SystemExit(main())
