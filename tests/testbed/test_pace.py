"""Deadlines, on a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks.testbed import pace as module
from benchmarks.testbed.pace import Deadline


@dataclass
class Clock:
    """Stands in for ``time``: sleeping and working move it."""

    now: float = 0.0
    cpu: float = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-9  # so that a spin ends
        return self.now

    def thread_time(self) -> float:
        return self.cpu

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def work(self, seconds: float, waiting: float = 0.0) -> None:
        self.cpu += seconds
        self.now += seconds + waiting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "_SPIN_S", 1e-6)
    return clock


def test_recording_does_not_stretch_and_keeps_the_medians_scaled_to_the_least_step(clock: Clock) -> None:
    """Medians of 20 and 40 ms; the least step takes 45 ms: three quarters of their sum."""
    pace = Deadline(2.0)
    for first, second in ((0.010, 0.050), (0.030, 0.040), (0.020, 0.025)):
        with pace.step():
            clock.work(first, waiting=1.0)
            pace.settle()
            pace.resume()
            clock.work(second)
    assert pace.hold() == pytest.approx((0.015, 0.030))
    assert clock.now == pytest.approx(3 + 0.175, abs=1e-6)


class Neighbours:
    """Stands in for ``Core``: what its factor is, read by read."""

    def __init__(self, *factors: float) -> None:
        self.factors = iter(factors)

    def factor(self) -> float:
        return next(self.factors)


def test_with_a_core_recorded_steps_are_in_its_seconds_and_the_median_counts(clock: Clock) -> None:
    """Steps of 30, 60 and 36 ms while the core does 1, 2/3 to 1/3 and 1 of its speed: 30, 30 and 36 ms of it."""
    core = Neighbours(1.0, 1.0, 2 / 3, 1 / 3, 1.0, 1.0)
    pace = Deadline(2.0, core=core)  # type: ignore[arg-type]
    for seconds in (0.010, 0.020, 0.012):
        with pace.step():
            clock.work(seconds)
            pace.settle()
            pace.resume()
            clock.work(2 * seconds)
    assert pace.hold() == pytest.approx((0.010, 0.020))
    with pace.step():  # held to its deadlines, it asks no more
        pace.settle()
        pace.resume()


def test_a_held_section_takes_nominal_times_slowdown_whatever_it_really_took(clock: Clock) -> None:
    pace = Deadline(2.0, nominal_s=[0.010, 0.020])
    for real in (0.001, 0.015):
        start = clock.now
        with pace.step():
            clock.work(real)
            pace.settle()
            clock.now += 0.5  # on the wire
            pace.resume()
            clock.work(real)
        assert clock.now - start == pytest.approx(0.020 + 0.5 + 0.040, abs=1e-5)
    assert (pace.sections, pace.missed) == (4, 0)


def test_real_work_that_does_not_fit_is_counted(clock: Clock) -> None:
    pace = Deadline(2.0, nominal_s=[0.010])
    with pace.step():
        clock.work(0.025)
    assert (pace.sections, pace.missed) == (1, 1)
    assert pace.late_s == pytest.approx(0.005, abs=1e-6)


@pytest.mark.parametrize(("overrun", "total"), [(0.003, 0.020), (0.005, 0.021)])
def test_what_was_overrun_is_made_good_up_to_four_milliseconds(clock: Clock, overrun: float, total: float) -> None:
    pace = Deadline(1.0, nominal_s=[0.010, 0.010])
    with pace.step():
        clock.work(0.010 + overrun)
        pace.settle()
        clock.now += 0.0001  # something is issued
        pace.resume()
        clock.work(0.001)
    assert clock.now == pytest.approx(total + 0.0001, abs=1e-5)
    assert pace.late_s == pytest.approx(overrun, abs=1e-6)


def test_who_waits_for_the_wire_is_late_no_more(clock: Clock) -> None:
    pace = Deadline(1.0, nominal_s=[0.010, 0.010])
    with pace.step():
        clock.work(0.012)
        pace.settle()
        clock.now += 0.001
        pace.resume()
        clock.work(0.001)
    assert clock.now == pytest.approx(0.012 + 0.001 + 0.010, abs=1e-5)


@pytest.mark.parametrize(
    ("slowdown", "waited", "later"), [(4.0, 0.5, 0.002), (4.0, 0.0001, 0.0), (2.1, 0.5, 0.001), (2.0, 0.5, 0.0)]
)
def test_after_waiting_for_the_wire_others_go_first(clock: Clock, slowdown: float, waited: float, later: float) -> None:
    """Two milliseconds, of a section that takes 10 alone, if twice that still fits its deadline with them."""
    pace = Deadline(slowdown, nominal_s=[0.010, 0.010])
    with pace.step():
        pace.settle()
        left = clock.now + waited
        clock.now = left
        pace.resume()
        assert clock.now == pytest.approx(left + later, abs=1e-6)
        clock.work(0.010)
    assert clock.now == pytest.approx(left + 0.010 * slowdown, abs=1e-5)  # and it ends when it would have


def test_steps_with_other_sections_are_refused(clock: Clock) -> None:
    pace = Deadline(1.0, nominal_s=[0.010])
    with pytest.raises(AssertionError, match="more than its 1 sections"), pace.step():
        pace.settle()
        pace.resume()


def test_a_device_faster_than_this_machine_is_refused() -> None:
    with pytest.raises(AssertionError, match="cannot play"):
        Deadline(0.5)
