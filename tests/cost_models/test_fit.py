"""Fits recover what made the numbers; noise is pooled; nothing becomes negative."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hap.cost_models.fit import (
    CopyTiming,
    Timing,
    WireTiming,
    call_curves,
    fit_collectives,
    fit_copies,
    fit_seconds,
    fit_steps,
    fit_update,
    non_decreasing,
    non_negative,
    pool,
    with_products,
)
from hap.cost_models.profile import UpdateFit

positive = st.floats(1e-9, 1e-3)


@given(positive, positive, positive)
def test_an_exact_law_is_found(launch: float, per_flop: float, per_byte: float) -> None:
    flops, nbytes = np.array([1.0, 10, 100, 1000, 5]), np.array([7.0, 3, 50, 2, 900])
    found = fit_seconds(flops.tolist(), nbytes.tolist(), (launch + per_flop * flops + per_byte * nbytes).tolist())
    assert found.residual < 1e-6 and found.worst < 1e-6
    assert found.seconds(40, 60) == pytest.approx(launch + 40 * per_flop + 60 * per_byte, rel=1e-5)


def test_coefficients_are_never_negative() -> None:
    """Seconds that fall with size: the best line would have a negative slope; a constant is what is left."""
    columns = np.array([[1.0, 1], [1, 2], [1, 3]])
    found = non_negative(columns, np.array([3.0, 2.0, 1.0]))
    assert found[1] == 0 and found[0] > 0


def test_the_factor_follows_the_size() -> None:
    """Sixteen sizes; from 1e6 bytes on everything takes twice as long (a cache ends)."""
    nbytes = [10.0**k * m for k in range(3, 7) for m in (1, 2, 4, 8)]
    seconds = [1e-9 * n * (2 if n >= 1e6 else 1) for n in nbytes]
    found = fit_seconds([0.0] * 16, nbytes, seconds)
    assert len(found.sizes) == 4 and found.residual < 0.1
    assert found.seconds(0, 4e6) / found.seconds(0, 4e4) == pytest.approx(200, rel=0.2)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8))
def test_rising_sequences(values: list[float]) -> None:
    found = non_decreasing(values)
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(found))
    assert np.prod(found) == pytest.approx(np.prod(values))
    assert non_decreasing(sorted(values)) == pytest.approx(sorted(values))


def test_a_collective_is_its_formula_times_a_factor_by_size() -> None:
    """1 kB takes thrice the formula, 1 MB 1.1 times; 32 kB, half way in logarithms, the geometric mean of both."""
    timed = [WireTiming("all_reduce", "ring", n, n * 1e-8, f * n * 1e-8, 0.0) for n, f in ((1024, 3.0), (1 << 20, 1.1))]
    (found,) = fit_collectives(timed)
    assert found.residual == pytest.approx(0)
    assert found.factor(1 << 15) == pytest.approx((3 * 1.1) ** 0.5)
    assert found.factor(1) == pytest.approx(3) and found.factor(1 << 30) == pytest.approx(1.1)


def test_routings_of_a_name_are_one_collective() -> None:
    timed = [WireTiming("all_gather", way, 1024, 1.0, s, 0.0) for way, s in (("relay[0]", 1.0), ("relay[0,1]", 3.0))]
    (found,) = fit_collectives(timed)
    assert found.decomposition == "relay" and found.factor(1024) == 2 and found.samples == 2


def test_who_is_done_first_is_told_by_the_larger_values() -> None:
    """The median of 0.5, 0.6 and 0.9; what small values did is not asked."""
    early = ((1 << 10, (0.0, 0.0)), (1 << 16, (0.5, 0.0)), (1 << 17, (0.6, 0.1)), (1 << 20, (0.9, 0.0)))
    (found,) = fit_collectives([WireTiming("all_reduce", "ring", n, 1.0, 1.0, 0.0, ahead) for n, ahead in early])
    assert found.ahead == (0.6, 0.0)


def test_copies() -> None:
    timed = [CopyTiming("slice", "local", 0.0, local, 1e-5 + 2e-9 * local) for local in (1e3, 1e5, 1e6)]
    found = fit_copies(timed)["slice/local"]
    assert (found.launch_s, found.s_per_whole, found.s_per_local) == pytest.approx((1e-5, 0, 2e-9))


def timing(share: float, seconds: float, call: str = "mm") -> Timing:
    return Timing(call, "aten.mm.default", "matmul", "float32", share, 10.0, 10.0, seconds, 0.01)


def test_curves_join_the_points() -> None:
    curve = call_curves([timing(0.75, 4.0), timing(0.25, 2.0)])["mm"]
    assert [curve.at(s) for s in (0.25, 0.5, 0.75, 1.0, 0.0)] == pytest.approx([2, 3, 4, 5, 1])


def test_equal_devices_are_pooled() -> None:
    """The median counts. A rank that is twice as slow throughout has a factor."""
    ranks = [[timing(1.0, 1.0), timing(1.0, 10.0, "b")], [timing(1.0, 1.1), timing(1.0, 11.0, "b")]]
    ranks.append([timing(1.0, 2.2), timing(1.0, 22.0, "b")])
    pooled, factors = pool(ranks)
    assert [t.seconds for t in pooled] == [1.1, 11.0]
    assert factors == pytest.approx((1 / 1.1, 1.0, 2.0))


def test_steps_and_updates() -> None:
    """Two graphs tell the share of the calls from that of the nodes; one gives all to the calls."""
    in_step, node_s = fit_steps(calls=[10.0, 1.0], nodes=[100, 50], seconds=[12 + 1.0, 1.2 + 0.5])
    assert (in_step, node_s) == pytest.approx((1.2, 0.01))
    assert fit_steps(calls=[10.0], nodes=[100], seconds=[13.0])[0] == pytest.approx(1.3)
    assert fit_steps(calls=[10.0], nodes=[100], seconds=[9.0]) == (1.0, 0.0)
    assert fit_steps(calls=[], nodes=[], seconds=[]) == (1.0, 0.0)
    found = fit_update(parameters=[1, 4, 8], nbytes=[0, 1000, 500], seconds=[2.0, 9.0, 16.5])
    assert (found.parameter_s, found.s_per_byte) == pytest.approx((2.0, 1e-3))


def test_products_are_what_an_update_takes_beside() -> None:
    """Three matrices of 1, 4 and 8 bytes, beside an update of 2 s and one a byte: 3 s each, and 0.5 s a FLOP."""
    base = UpdateFit(parameter_s=2.0, s_per_byte=1.0, residual=0.0, samples=1)
    found = with_products(base, flops=[2, 10, 20], nbytes=[1, 4, 8], seconds=[3 + 3 + 1, 6 + 3 + 5, 10 + 3 + 10])
    assert (found.matrix_s, found.s_per_flop) == pytest.approx((3.0, 0.5))
    assert (found.parameter_s, found.s_per_byte) == (2.0, 1.0)
    less = with_products(base, flops=[2, 10], nbytes=[1, 4], seconds=[1.0, 2.0])  # than the rest alone: noise
    assert (less.matrix_s, less.s_per_flop) == pytest.approx((0.0, 0.0), abs=1e-8)
