"""What a call takes at least at every share: straight lines that are nowhere above its seconds.

A described device is a roofline, whose sides are such lines (``compute.parts_coefficients``). What was measured of a
call is joined by lines between shares, and bent below the first; what a fit says of a call that was not measured has a
factor by size. For both a few points (share, seconds) are found so that the seconds are nowhere below the lines that
join them; of their lower convex hull the edge at a share is the highest line there that is nowhere above.

    curve   at 0, where the line through the first two points meets half of the first point, at its shares, where the
            line through the last two meets nothing, at 1
    fit     at 0 and 1, with the least factor of all sizes in between: the rest is affine in the share
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from hap.cost_models.compute import Parts, parts_coefficients, parts_seconds
from hap.cost_models.profile import CallCurve, Fit, MeasuredDevice
from hap.hosts import Device

Points = Sequence[tuple[float, float]]  # (share, seconds), shares rising from 0 to 1


def floor_line(parts: Parts, device: Device, *, at_share: float) -> tuple[float, float]:
    """``(fixed_s, per_share_s)``, neither negative: of such lines that are nowhere above the call's seconds one that is
    highest at this share; a rank that is idle without a share takes less there."""
    if not isinstance(device, MeasuredDevice):
        return parts_coefficients(parts, device, at_share=at_share)
    hull = _lower_hull(_points(parts, device))
    (a, u), (b, v) = next(pair for pair in itertools.pairwise(hull) if at_share <= pair[1][0])
    slope = (v - u) / (b - a)
    if slope < 0:
        return min(seconds for _, seconds in hull), 0.0
    fixed = u - slope * a
    return (fixed, slope) if fixed >= 0 else (0.0, min(seconds / share for share, seconds in hull if share > 0))


def floor_slope(parts: Parts, device: Device) -> float:
    """The most seconds per share with which the call takes no less than that times its share, whatever it is."""
    if not isinstance(device, MeasuredDevice):
        return parts_seconds(parts, 1.0, device)  # launches and whole operands are shared out last
    return min(seconds / share for share, seconds in _points(parts, device) if share > 0)


def _points(parts: Parts, device: MeasuredDevice) -> Points:
    kind = device.kind
    curve = kind.calls.get(parts.call)
    if parts.op_class == "view":
        alone: Points = ((0.0, 0.0), (1.0, 0.0))
    elif curve is not None:
        alone = _of_curve(curve)
    else:
        fit = kind.fits.get(f"{parts.op}/{parts.dtype_name}") or kind.fits.get(f"{parts.op_class}/{parts.dtype_name}")
        parts_seconds(parts, 1.0, device)  # says what the profile lacks, if it does
        assert fit is not None
        alone = _of_fit(fit, parts)
    return [(share, (seconds * kind.in_step + kind.node_s) * device.factor) for share, seconds in alone]


def _of_curve(curve: CallCurve) -> Points:
    shares = {0.0, 1.0, *curve.shares}
    first, half = curve.shares[0], 0.5 * curve.seconds[0]
    if len(curve.shares) == 1:
        shares.add(0.5 * first)
    else:
        slope = (curve.seconds[1] - curve.seconds[0]) / (curve.shares[1] - first)
        bend = first - half / slope if slope > 0 else 0.0
        shares.add(min(max(bend, 0.0), first))
        (a, u), (b, v) = zip(curve.shares[-2:], curve.seconds[-2:], strict=True)
        shares.add(min(b + v * (b - a) / (u - v), 1.0) if u > v else 1.0)
    return [(share, curve.at(share)) for share in sorted(shares)]


def _of_fit(fit: Fit, parts: Parts) -> Points:
    ends = [
        fit.launch_s
        + fit.s_per_flop * (parts.fixed_flops + share * parts.shared_flops)
        + fit.s_per_byte * (parts.fixed_bytes + share * parts.shared_bytes)
        for share in (0.0, 1.0)
    ]
    if not fit.sizes:
        return [(0.0, ends[0]), (1.0, ends[1])]
    inside = [f for size, f in zip(fit.sizes, fit.factors, strict=True) if ends[0] < size < ends[1]]
    logs = [math.log(max(s, 1e-30)) for s in ends]
    outer = np.interp(logs, [math.log(s) for s in fit.sizes], fit.factors)
    least = min([*inside, *outer.tolist()])
    return [(0.0, ends[0] * least), (1.0, ends[1] * least)]


def _lower_hull(points: Points) -> list[tuple[float, float]]:
    hull: list[tuple[float, float]] = []
    for c in points:
        while len(hull) > 1:
            (ax, ay), (bx, by) = hull[-2:]
            if (by - ay) * (c[0] - ax) < (c[1] - ay) * (bx - ax):
                break  # b is below the line from a to c
            hull.pop()
        hull.append(c)
    return hull
