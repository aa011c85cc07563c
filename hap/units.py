"""Quantities with units, read strictly: ``"10 Gbit/s"``, ``"900GB/s"``, ``"16GiB"``, ``"30us"``.

Units are spelled as the SI does and are case sensitive: ``k`` = 10^3, ``Ki`` = 2^10, ``B`` = byte, ``bit`` = bit. A
bare number, an unknown unit, a negative or infinite amount is refused with a ``ValueError`` that says what is expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal, DecimalException
from typing import Any

_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

SIZE: Mapping[str, Decimal] = {f"{p}B": Decimal(f) for p, f in {**_PREFIXES, **_BINARY}.items()}
RATE: Mapping[str, Decimal] = {
    **{f"{unit}/s": factor for unit, factor in SIZE.items()},
    **{f"{p}bit/s": Decimal(f) / 8 for p, f in _PREFIXES.items()},
}
TIME: Mapping[str, Decimal] = {
    "s": Decimal(1),
    "ms": Decimal("1e-3"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "ns": Decimal("1e-9"),
}
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s.][^\s]*)?\s*")


def parse_rate(text: Any) -> float:
    """Bytes per second, more than zero."""
    return _parse(text, RATE, "a rate such as '10Gbit/s' or '900GB/s'", zero=False)


def parse_size(text: Any) -> int:
    """Whole bytes, more than zero."""
    nbytes = round(_parse(text, SIZE, "a size such as '16GB' or '16GiB'", zero=False))
    if nbytes == 0:
        raise ValueError(f"must be a byte at least, not {text}")
    return nbytes


def parse_time(text: Any) -> float:
    """Seconds, zero allowed."""
    return _parse(text, TIME, "a time such as '30us' or '1ms'", zero=True)


def _parse(text: Any, units: Mapping[str, Decimal], expected: str, *, zero: bool) -> float:
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else _QUANTITY.fullmatch(repr(text))
    if match is None or isinstance(text, bool):
        raise ValueError(f"expected {expected}, not {text!r}")
    if match[2] is None:
        raise ValueError(f"{text} has no unit; expected {expected}")
    unit = match[2].replace("\u03bc", "\u00b5")  # the Greek letter looks like the micro sign
    if unit not in units:
        raise ValueError(f"unknown unit {match[2]!r}; expected {expected} (units: {', '.join(units)})")
    try:
        amount = float(Decimal(match[1]) * units[unit])
    except (DecimalException, OverflowError):
        amount = math.inf
    if not math.isfinite(amount):
        raise ValueError(f"{text} is too large")
    if amount < 0 or (amount == 0 and not zero):
        raise ValueError(f"must be {'zero or more' if zero else 'more than zero'}, not {text}")
    return amount


def format_rate(bytes_per_s: float) -> str:
    return _format(bytes_per_s, ("TB/s", "GB/s", "MB/s", "kB/s", "B/s"), RATE)


def format_size(nbytes: float) -> str:
    return _format(nbytes, ("TB", "GB", "MB", "kB", "B"), SIZE)


def format_time(seconds: float) -> str:
    return _format(seconds, ("s", "ms", "us", "ns"), TIME)


def _format(amount: float, units: tuple[str, ...], factors: Mapping[str, Decimal]) -> str:
    """The amount in the largest unit of which it is at least one; exact, so that parsing gives the same float."""
    exact = Decimal(repr(amount))
    unit = next((u for u in units if exact >= factors[u]), units[-1])
    number = f"{(exact / factors[unit]).normalize():f}"
    return f"{number}{unit}"
