"""Who is slow, from records of jobs of which everything is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hap.diagnosis.change import find_change
from hap.diagnosis.run import Run
from hap.diagnosis.slow import Slow
from hap.diagnosis.verdict import diagnose, told
from hap.fabric import Array
from tests._support.jobs import CALLS, job, plan_of, steady

UNEQUAL = (0.30, 0.30, 0.24, 0.27)  # what the plan gives each rank: slow devices less, but not so much less


def syndromes(run: Run) -> list[tuple[str, tuple[int, ...]]]:
    return [(f.syndrome, f.ranks) for f in diagnose(run).findings]


def test_waits_are_told_apart_from_the_wire() -> None:
    compute = np.array([[0.3, 0.1, 0.2]] * 5)
    run = job(compute, np.zeros((5, 3)), 0.01)
    waits = run.waits[0].world
    assert waits.shared_s == pytest.approx(np.full(CALLS, 0.01))
    assert waits.waited_for_s == pytest.approx([0.1, 0, 0], abs=1e-5)  # rank 0 comes 0.1 s later than the second last
    assert run.compute_s[0] == pytest.approx([0.3, 0.1, 0.2], abs=1e-5)
    assert run.shared_s[0] == pytest.approx(0.06, abs=1e-5)


def test_devices_that_are_unequal_as_planned_are_no_finding() -> None:
    run = job(*steady(UNEQUAL), plan=plan_of(UNEQUAL, step_s=0.4))
    assert syndromes(run) == []
    assert told(diagnose(run)).startswith("healthy: 27 steps")


@pytest.mark.parametrize("measured", [True, False])
def test_a_kind_of_device_that_the_catalogue_misjudges_is_no_straggler(measured: bool) -> None:
    """Ranks 2 and 3 are the two of their kind; with a measured profile the prediction is not what is wrong."""
    compute, outside = steady(UNEQUAL)
    compute[:, 2:] *= 1.7
    plan = plan_of([s + 0.02 for s in UNEQUAL], step_s=0.4)
    told = {"profile_fingerprint": "0" * 64 if measured else None}
    plan = plan.model_copy(update={"provenance": plan.provenance.model_copy(update=told)})
    run = job(compute, outside, plan=plan, devices=("a/fast#0", "a/fast#1", "b/slow#0", "b/slow#1"))
    found = diagnose(run).findings
    if measured:
        assert found[0].syndrome == "compute straggler"
        return
    assert [(f.syndrome, f.ranks) for f in found] == [("misjudged devices", (2, 3))]
    assert found[0].factor == pytest.approx(1.7, rel=0.1) and found[0].summary.startswith("slow computes 1.")


@settings(max_examples=60, deadline=None)
@given(rank=st.integers(0, 3), factor=st.floats(1.5, 4.0), off=st.floats(0.7, 2.0))
def test_whoever_computes_longer_than_planned_is_found(rank: int, factor: float, off: float) -> None:
    """``off``: by so much the plan is wrong for all."""
    compute, outside = steady([off * s for s in UNEQUAL])
    compute[:, rank] *= factor
    found = diagnose(job(compute, outside, plan=plan_of([s + 0.02 for s in UNEQUAL], step_s=0.4))).findings
    assert (found[0].syndrome, found[0].ranks, found[0].since_step) == ("compute straggler", (rank,), None)
    assert found[0].factor == pytest.approx(factor, rel=0.1)
    assert found[0].lost_s is not None and found[0].lost_s > 0
    assert len(found) == 1


@settings(max_examples=60, deadline=None)
@given(rank=st.integers(0, 3), factor=st.floats(1.3, 4.0), at=st.integers(9, 23))
def test_whoever_computes_longer_than_before_is_found_with_the_step(rank: int, factor: float, at: int) -> None:
    compute, outside = steady(UNEQUAL)
    compute[at:, rank] *= factor
    found = diagnose(job(compute, outside)).findings  # without a plan
    assert (found[0].syndrome, found[0].ranks, found[0].since_step) == ("compute straggler", (rank,), at + 1)
    assert found[0].factor == pytest.approx(factor, rel=0.05)
    assert len(found) == 1


def test_work_that_changes_for_all_is_nobodys_fault() -> None:
    compute, outside = steady(UNEQUAL)
    compute[15:] *= 1.6  # longer sequences, say
    assert syndromes(job(compute, outside)) == []


def test_a_rank_that_the_plan_gave_most_work_is_waited_for_and_well() -> None:
    lopsided = (0.3, 0.1, 0.1, 0.1)
    run = job(*steady(lopsided), plan=plan_of(lopsided, step_s=0.4))
    slow = Slow.of(run)
    assert slow.waited_for_s[0] == pytest.approx(0.2, rel=0.05)
    assert syndromes(run) == []


@pytest.mark.parametrize("changes", [True, False])
def test_late_data_are_told_apart_from_slow_compute(changes: bool) -> None:
    compute, outside = steady(UNEQUAL)
    outside[15 if changes else 0 :, 2] += 0.15
    found = diagnose(job(compute, outside, plan=plan_of([s + 0.02 for s in UNEQUAL], step_s=0.4))).findings
    assert [(f.syndrome, f.ranks) for f in found] == [("late between steps", (2,))]
    assert found[0].since_step == (16 if changes else None)
    assert found[0].factor == pytest.approx(8.5, rel=0.1)


def test_late_data_are_told_where_compute_has_become_a_little_longer_too() -> None:
    """By another factor, and by less. A device that has become slow takes longer for both alike."""
    compute, outside = steady(UNEQUAL)
    compute[15:, 2] *= 1.3
    outside[15:, 2] += 0.15
    found = diagnose(job(compute, outside)).findings
    assert [(f.syndrome, f.ranks, f.since_step) for f in found] == [("late between steps", (2,), 16)]
    compute, outside = steady(UNEQUAL, outside_s=0.3)
    compute[15:, 2], outside[15:, 2] = compute[15:, 2] * 2, outside[15:, 2] * 2  # most of it between steps
    found = diagnose(job(compute, outside)).findings
    assert [(f.syndrome, f.ranks, f.since_step) for f in found] == [("compute straggler", (2,), 16)]


def test_an_optimizer_that_takes_long_where_planned_is_not_late() -> None:
    """A rank with most of the parameters updates for longest, and that is in what its plan says."""
    outside = (0.02, 0.02, 0.12, 0.02)
    planned = [c + o for c, o in zip(UNEQUAL, outside, strict=True)]
    assert syndromes(job(*steady(UNEQUAL, outside), plan=plan_of(planned, step_s=0.5))) == []


def test_a_wire_that_becomes_slower_is_no_ranks_fault() -> None:
    compute, outside = steady(UNEQUAL)
    found = diagnose(job(compute, outside, [0.01] * 15 + [0.03] * 15)).findings
    assert [(f.syndrome, f.since_step) for f in found] == [("slow communication", 16)]
    assert found[0].lost_s == pytest.approx(CALLS * 0.02, rel=0.1)


def test_ranks_are_put_beside_their_plan_as_they_were_before_steps_became_longer() -> None:
    compute, outside = steady(UNEQUAL)
    slow = Slow.of(job(compute, outside, [0.01] * 15 + [0.05] * 15, plan_of(UNEQUAL)))
    assert (slow.since_step, slow.window.start, slow.before.window) == (16, 12, slice(0, 12))
    assert slow.step_s - slow.before.step_s == pytest.approx(CALLS * 0.04, rel=0.05)
    assert slow.before.wire_s == pytest.approx(CALLS * 0.01, rel=0.01)
    steadily = Slow.of(job(compute, outside))
    assert steadily.before is steadily


def test_slower_than_planned_everywhere_says_measure() -> None:
    run = job(*steady([2 * s for s in UNEQUAL]), plan=plan_of(UNEQUAL, step_s=0.36))
    (found,) = diagnose(run).findings
    assert found.syndrome == "slower than planned" and "hap profile" in found.next_step
    assert found.factor == pytest.approx((0.6 + CALLS * 0.01 + 0.02) / 0.36, rel=0.03)


def test_of_steps_told_as_sums_who_is_waited_for_is_not_known() -> None:
    """Of a rank that is beyond its plan from the start; one that changed is known by itself."""
    slow = list(UNEQUAL)
    slow[1] *= 2
    found = diagnose(as_sums(job(*steady(slow), plan=plan_of(UNEQUAL))))
    assert [f.syndrome for f in found.findings if f.ranks] == []
    text = told(found)
    assert "who is waited for is not known" in text and "nan" not in text
    assert {row["waited_for_s"] for row in found.to_json()["ranks"]} == {None}
    compute, outside = steady(UNEQUAL)
    compute[15:, 1] *= 2
    (changed, *_) = diagnose(as_sums(job(compute, outside))).findings
    assert changed.ranks == (1,) and changed.lost_s is None and "nan" not in str(changed)


def as_sums(run: Run) -> Run:
    """Without the calls of any step."""
    ranks = (r._replace(steps=tuple(s.model_copy(update={"calls": None}) for s in r.steps)) for r in run.ranks)
    return Run(tuple(ranks), run.plan)


def test_two_steps_are_too_few_to_say() -> None:
    compute, outside = steady(UNEQUAL, steps=2)
    found = diagnose(job(compute, outside, plan=plan_of(UNEQUAL)))
    assert found.findings == () and found.verdict.startswith("too few steps")


# ---- change-points ----


@settings(max_examples=80, deadline=None)
@given(at=st.integers(5, 35), factor=st.floats(1.25, 5.0), seed=st.integers(0, 99), down=st.booleans())
def test_a_change_is_found_where_it_is(at: int, factor: float, seed: int, down: bool) -> None:
    series = np.random.default_rng(seed).normal(1, 0.02, 40)
    series[at:] *= 1 / factor if down else factor
    found = find_change(series, 1.15)
    assert found is not None and abs(found.at - at) <= 1
    assert found.factor == pytest.approx(1 / factor if down else factor, rel=0.06)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 9999), noise=st.floats(0.0, 0.05), spikes=st.integers(0, 3))
def test_noise_and_single_slow_steps_are_no_change(seed: int, noise: float, spikes: int) -> None:
    assert find_change(noisy(seed, noise, spikes), 1.15) is None


def test_of_two_thousand_series_of_much_noise_hardly_one_has_a_change() -> None:
    found = [find_change(noisy(seed, 0.2, seed % 4), 1.15) for seed in range(2000)]
    assert sum(change is not None for change in found) <= 1


def noisy(seed: int, noise: float, spikes: int) -> Array:
    source = np.random.default_rng(seed)
    series = np.abs(source.normal(1, noise, 40)) + 1e-3
    series[source.choice(40, spikes, replace=False)] *= 5
    return series


@pytest.mark.parametrize("slow", [[5, 7, 8], [9, 11, 12], [0, 2, 3], [9, 10, 12]])
@pytest.mark.parametrize("steps", [13, 40])
def test_three_slow_steps_close_together_are_no_change(slow: list[int], steps: int) -> None:
    series = np.ones(steps)
    series[slow] = [9.0, 5.0, 3.0]
    assert find_change(series, 1.15) is None


def test_too_few_values_have_no_change() -> None:
    assert find_change(np.array([1.0] * 4 + [9.0] * 5), 1.15) is None
