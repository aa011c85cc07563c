"""Small phrases: quantities a person reads at a glance, tables, and lists that do not run on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

MANY = 6  # rank numbers, or runs of equal sizes, that are listed one by one
FEW_RANKS = 16  # up to here every rank is a row or a number of its own
LEDGER = {"parameters": "parameters and inputs"}  # kinds of memory in a plan whose names say less than they hold


def seconds(value: float) -> str:
    """Three significant digits in the unit that fits: ``412 ms``, ``1.37 s``, ``85.2 us``. Less than a picosecond is
    what sums were rounded by."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= 0.9995 * scale:
            return f"{_three(value / scale)} {unit}"
    return "0 s" if abs(value) < 1e-12 else f"{value / 1e-9:.3g} ns"


def quantity(value: float, unit: str = "") -> str:
    """Three significant digits with an SI prefix: ``3.29 M``, ``64 MB``, ``12 kB``, ``7``."""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * scale:
            return f"{_three(value / scale)} {prefix}{unit}"
    return f"{value:.3g} {unit}".strip()


def _three(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def counted(number: int, noun: str) -> str:
    """``1 layer``, ``3 layers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(items: Sequence[str], limit: int = 4) -> str:
    """``a, b, c and 5 more``."""
    shown = list(items[:limit])
    if len(items) > limit:
        return f"{', '.join(shown)} and {len(items) - limit} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def starred(label: str) -> str:
    """Layer numbers replaced, so that alike layers share one line."""
    return re.sub(r"\.\d+(?=\.|$| )", ".*", label)


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Columns padded to their widest cell, two blanks apart; those in ``right`` are flush right."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``0-3, 8``; long lists end in how many more there are."""
    spans: list[tuple[int, int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    left = sum(b - a + 1 for a, b in spans[MANY:])
    shown = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans[:MANY])
    return shown + (f" and {left} more" if left else "")


def sizes_in_words(sizes: Sequence[int]) -> str:
    """``413 + 413 + 196 + 2``; of many ranks the runs of equal sizes: ``512 x 5 + 256 x 4 + 256 x 2``."""
    if len(sizes) <= FEW_RANKS:
        return " + ".join(map(str, sizes))
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    shown = [f"{n} x {size}" if n > 1 else str(size) for size, n in runs[:MANY]]
    left = sum(n for _, n in runs[MANY:])
    return " + ".join(shown) + (f" + {left} more ranks" if left else "")
