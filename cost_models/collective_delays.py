"""Seconds of a conversion on links that are slower for small messages: a latency that grows with the message.

A link's curve says what messages of some sizes reach. What they take beside latency and bytes over bandwidth is a delay
(``hap.hosts.find_delays``), which the fabric knows for every pair of ranks at every size that any curve names
(``Fabric.by_size``). A formula's constant, asked at each of these sizes, grows by the delays that it waits for:

    seconds = formula + D(bytes of one message)       D: the lowest curve that bends down above those points

As the bytes of one message are proportional to the value's, or stop growing at a segment, the constant stays concave in
the bytes, and a straight line between two sizes is never above it: what the search relies on. The stages, affine in the
shares, do not change; a message is that of a value dealt evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hap.cost_models.collective_form import CollectiveForm, Problem
from hap.cost_models.collective_formulas import formula
from hap.plan import Collective
from hap.routes import ROUTED, SEGMENT_BYTES, Way, depth, segment_owners


def delayed(p: Problem, kind: Collective, decomposition: str) -> CollectiveForm:
    """The plain form with the delays of its messages."""
    form = formula(p, kind, decomposition)
    if kind == "slice":
        return form
    constants = [formula(replace(p, fabric=f), kind, decomposition).constant_s for _, f in p.fabric.by_size]
    points = [(size, c - form.constant_s) for (size, _), c in zip(p.fabric.by_size, constants, strict=True)]
    sizes, seconds = zip(*concave([(0.0, 0.0), *points]), strict=True)
    delay_s = float(np.interp(message_bytes(p, kind, decomposition), sizes, seconds))
    return replace(form, constant_s=form.constant_s + delay_s)


def concave(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the lowest curve above the points (rising in x) that bends down and never falls."""
    top = max(range(len(points)), key=lambda i: points[i][1])  # the first of equals
    corners: list[tuple[float, float]] = []
    for x, y in points[: top + 1]:
        while len(corners) > 1 and _below(corners[-2], corners[-1], (x, y)):
            corners.pop()
        corners.append((x, y))
    return corners


def _below(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """``b`` is not above the line from ``a`` to ``c``."""
    return (b[1] - a[1]) * (c[0] - a[0]) <= (c[1] - a[1]) * (b[0] - a[0])


def message_bytes(p: Problem, kind: Collective, decomposition: str) -> float:
    """Of one message when the value is dealt evenly: a shard, a shard of a shard, at most a segment where segments are
    passed on."""
    way = Way.parse(decomposition)
    if kind == "all_to_all":
        return p.nbytes / p.n**2
    if way.name not in ROUTED or (kind, way.name) == ("all_reduce", "ring"):
        return p.nbytes / p.n
    if kind == "all_reduce":
        return min(p.nbytes / len(segment_owners(way, p.n)), float(SEGMENT_BYTES))
    passed_on = depth(way, p.n) > 1
    return min(p.nbytes / p.n, float(SEGMENT_BYTES)) if passed_on else p.nbytes / p.n
