"""A line that is said to be below what a call takes is, at every share, and is as high as can be."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hap.cost_models import node_work, parts_seconds, split_work
from hap.cost_models.compute import Parts
from hap.cost_models.floors import floor_line, floor_slope
from hap.cost_models.profile import CallCurve, Fit, MeasuredDevice
from tests.cost_models.build import data_parallel, relu_step
from tests.cost_models.test_profile import TWO, made

SHARES = [*np.linspace(1e-6, 1.0, 200).tolist(), 1e-9]
MATMUL = split_work(node_work(relu_step(), relu_step().by_name["a"]), data_parallel()["a"])


def device(**kind: object) -> MeasuredDevice:
    """The second of two, which takes twice as long."""
    found = made(kind={"in_step": 1.25, "node_s": 0.1, **kind}).calibrate(TWO).devices[1]
    assert isinstance(found, MeasuredDevice)
    return found


def on_curve(shares: tuple[float, ...], seconds: tuple[float, ...]) -> MeasuredDevice:
    return device(calls={MATMUL.call: CallCurve(shares=shares, seconds=seconds, spread=0.0)})


def check(parts: Parts, on: MeasuredDevice) -> None:
    busy = dataclasses.replace(parts, idle_when_empty=False)
    for at_share in (0.01, 0.25, 0.5, 0.9):
        fixed, slope = floor_line(busy, on, at_share=at_share)
        lines = np.array([fixed + slope * share for share in (*SHARES, 0.0)])
        seconds = np.array([parts_seconds(busy, share, on) for share in (*SHARES, 0.0)])
        assert (lines <= seconds * (1 + 1e-9) + 1e-15).all()
    each = floor_slope(parts, on)
    ratios = [parts_seconds(parts, share, on) / share for share in SHARES]
    assert each <= min(ratios) * (1 + 1e-9)
    assert each >= min(ratios) * 0.97  # at one of the points, which may lie between two of the shares


PERCENT = st.integers(1, 100).map(lambda n: n / 100)


@given(
    points=st.lists(st.tuples(PERCENT, st.floats(1e-5, 1e-2)), min_size=1, max_size=5, unique_by=lambda p: p[0]),
)
def test_below_every_measured_curve(points: list[tuple[float, float]]) -> None:
    shares, seconds = zip(*sorted(points), strict=True)
    check(MATMUL, on_curve(shares, seconds))


@given(
    launch=st.floats(0.0, 1e-3),
    per_flop=st.floats(1e-9, 1e-5),
    points=st.lists(st.tuples(st.floats(1e-6, 1e-1), st.floats(0.3, 3.0)), max_size=4, unique_by=lambda p: p[0]),
)
def test_below_every_fit(launch: float, per_flop: float, points: list[tuple[float, float]]) -> None:
    sizes, factors = zip(*sorted(points), strict=True) if points else ((), ())
    fit = Fit(
        launch_s=launch, s_per_flop=per_flop, s_per_byte=1e-9, sizes=sizes, factors=factors,
        residual=0.0, worst=0.0, samples=9,
    )  # fmt: skip
    on = device(fits={"matmul/float32": fit})
    busy = dataclasses.replace(MATMUL, idle_when_empty=False)
    fixed, slope = floor_line(busy, on, at_share=0.5)
    for share in (*SHARES, 0.0):
        assert fixed + slope * share <= parts_seconds(busy, share, on) * (1 + 1e-9)
    assert floor_slope(MATMUL, on) <= min(parts_seconds(MATMUL, s, on) / s for s in SHARES) * (1 + 1e-9)


def test_a_curve_by_hand() -> None:
    """2 s at a quarter, 3 s at a half, 9 s at all; half of 2 s without anything, which the line to the left reaches at
    no share (1 s at zero). Of 1.25 times that and 0.1 s, twice: the lower edge goes from zero to a half."""
    on = on_curve((0.25, 0.5, 1.0), (2.0, 3.0, 9.0))
    fixed, slope = floor_line(MATMUL, on, at_share=0.3)
    assert (fixed, slope) == (pytest.approx(2 * (1.25 * 1.0 + 0.1)), pytest.approx(2 * 1.25 * 4.0))
    # from a half to all it would be less than nothing at zero; so the line from there to a half
    assert floor_line(MATMUL, on, at_share=0.7) == (0.0, pytest.approx(2 * (1.25 * 3 + 0.1) / 0.5))
    assert floor_slope(MATMUL, on) == pytest.approx(2 * (1.25 * 3 + 0.1) / 0.5)
