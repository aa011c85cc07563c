"""Small phrases: quantities a person reads at a glance, tables, and lists that do not run on."""

from __future__ import annotations

import re
from collections.abc import Sequence


def seconds(value: float) -> str:
    """Three significant digits in the unit that fits: ``412 ms``, ``1.37 s``, ``85.2 us``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= 0.9995 * scale:
            return f"{_three(value / scale)} {unit}"
    return "0 s" if value == 0 else f"{value / 1e-9:.3g} ns"


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
