"""Whether and when a series of measured seconds changed its level: one change-point, by medians."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hap.fabric import Array

LEAST = 5  # values on either side
CLEAR = 7.0  # times what medians of so many values scatter by
MOST = 0.75  # of the values of either side lie on their median's side of the middle
SPREAD = 1.4826  # of a normal distribution's standard deviation to its median absolute deviation
FLOOR = 0.02  # of the logarithm: steps that scatter less are not trusted more


class Change(NamedTuple):
    """From the value of index ``at`` on, times ``factor``."""

    at: int
    factor: float


def find_change(series: Array, least_factor: float) -> Change | None:
    """Where two levels describe the series (its logarithm, whose scatter is that of factors) best, by the sum of
    absolute distances from medians, so that single slow steps are none, nor three of five that happen to be close. None
    if the two are less than ``least_factor`` apart or not clearly so, or if there are too few values."""
    if len(series) < 2 * LEAST or (series <= 0).any():
        return None
    logs = np.log(series)
    splits = range(LEAST, len(logs) - LEAST + 1)
    apart = [np.concatenate([_from_median(logs[:at]), _from_median(logs[at:])]) for at in splits]
    best = min(range(len(splits)), key=lambda i: float(np.abs(apart[i]).sum()))
    at = splits[best]
    before, after = float(np.median(logs[:at])), float(np.median(logs[at:]))
    jump = after - before
    later = (logs > (before + after) / 2) == (jump > 0)
    if min(1 - later[:at].mean(), later[at:].mean()) < MOST:
        return None
    scatter = max(SPREAD * float(np.median(np.abs(apart[best]))), FLOOR)
    clear = abs(jump) * np.sqrt(at * (len(logs) - at) / len(logs)) / scatter
    if clear < CLEAR or abs(jump) < np.log(least_factor):
        return None
    return Change(at, float(np.exp(jump)))


def _from_median(values: Array) -> Array:
    found: Array = values - np.median(values)
    return found
