"""Reading the delay matrix, and the cluster as it was found."""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hap.cluster import ClusterSpec
from hap.diagnosis.finding import Finding
from hap.diagnosis.links import expected_s, find_slow_links
from hap.diagnosis.mended import as_found
from hap.diagnosis.run import Run
from hap.errors import ClusterError
from hap.report.explanation import cluster_body
from hap.routes import league
from tests._support.jobs import job, steady, with_probes

NBYTES = 1 << 20


def four(rates: tuple[int, ...] = (1000, 1000, 200, 200)) -> ClusterSpec:
    """Hosts with a device each; Mbit/s."""
    device = {"name": "gpu", "tflops": {"float32": 1.0}, "memory": "4GB", "memory_bandwidth": "10GB/s"}
    hosts = [
        {"name": f"h{i}", "devices": [device], "network": {"bandwidth": f"{rate}Mbit/s", "latency": "250us"}}
        for i, rate in enumerate(rates)
    ]
    return ClusterSpec.model_validate({"name": "four", "backend": "gloo", "hosts": hosts})


def two_of_two() -> ClusterSpec:
    device = {"gpu": "V100-16GB", "count": 2}
    hosts = [
        {"name": n, "devices": [device], "link": "nvlink", "network": {"bandwidth": "10Gbit/s", "latency": "20us"}}
        for n in ("a", "b")
    ]
    return ClusterSpec.model_validate({"name": "two", "backend": "nccl", "hosts": hosts})


def timed(up: tuple[float, ...], down: tuple[float, ...]) -> np.ndarray[Any, Any]:
    """Seconds of each message, by Mbit/s of its sender and its receiver."""
    rates = np.minimum.outer(np.array(up), np.array(down)) * 1e6 / 8
    return NBYTES / rates + 5e-4


def run_with(*matrices: np.ndarray[Any, Any]) -> Run:
    return with_probes(job(*steady([0.1] * 4)), *matrices)


def told(found: tuple[Finding, ...]) -> list[tuple[str, tuple[int, ...]]]:
    return [(f.syndrome, f.ranks) for f in found]


@pytest.mark.parametrize("ranks", range(2, 12))
def test_in_a_league_everyone_meets_everyone_once(ranks: int) -> None:
    rounds = list(league(ranks))
    assert len(rounds) == ranks - 1 + ranks % 2
    for pairs in rounds:
        ends = [end for pair in pairs for end in pair]
        assert len(set(ends)) == len(ends)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(ranks), 2))


def test_unequal_links_as_described_are_no_finding() -> None:
    rates = (1000.0, 1000.0, 200.0, 200.0)
    assert find_slow_links(run_with(timed(rates, rates)), four()) == ()
    assert find_slow_links(run_with(1.8 * timed(rates, rates)), four()) == ()  # all of them alike: the description's
    assert find_slow_links(run_with(), four()) == ()


@settings(max_examples=60, deadline=None)
@given(rank=st.integers(0, 3), sends=st.booleans(), factor=st.floats(2.5, 20.0), again=st.booleans())
def test_a_slow_side_is_told_from_a_slow_link(rank: int, sends: bool, factor: float, again: bool) -> None:
    rates = (1000.0,) * 4
    slow = tuple(rate / factor if r == rank else rate for r, rate in enumerate(rates))
    after = timed(slow, rates) if sends else timed(rates, slow)
    run = run_with(timed(rates, rates), after) if again else run_with(after)
    (found,) = find_slow_links(run, four((1000,) * 4))
    assert (found.syndrome, found.ranks) == ("slow sender" if sends else "slow receiver", (rank,))
    assert found.factor == pytest.approx(factor, rel=0.15)
    assert found.since_step == (10 if again else None)


def test_one_slow_cell_is_a_link() -> None:
    rates = (1000.0,) * 4
    after = timed(rates, rates)
    after[1, 3] *= 5
    (found,) = find_slow_links(run_with(timed(rates, rates), after), None)
    assert (found.syndrome, found.ranks) == ("slow link", (1, 3)) and found.factor == pytest.approx(5)


def test_a_slow_sender_shows_only_to_those_who_are_quick() -> None:
    """Rank 1 sends at 250 instead of 1000 Mbit/s: what takes 200 anyway is as it was, and does not speak against it."""
    fast, slow = (1000.0, 1000.0, 1000.0, 200.0), (1000.0, 250.0, 1000.0, 200.0)
    assert told(find_slow_links(run_with(timed(fast, fast), timed(slow, fast)), None)) == [("slow sender", (1,))]
    few, slow = (1000.0, 1000.0, 200.0, 200.0), (1000.0, 250.0, 200.0, 200.0)
    assert told(find_slow_links(run_with(timed(few, few), timed(slow, few)), None)) == [("slow link", (1, 0))]


def test_noise_below_a_tick_is_no_finding() -> None:
    rates = (40000.0,) * 4
    after = timed(rates, rates)
    after[2, 0] += 1.5e-3
    assert find_slow_links(run_with(timed(rates, rates), after), None) == ()


def test_what_is_expected_shares_the_ports_of_a_host() -> None:
    found = expected_s(two_of_two(), NBYTES)
    network, inside = NBYTES / (10e9 / 8), NBYTES / 150e9
    across = [found[s, t] for s in (0, 1) for t in (2, 3)]
    assert across == pytest.approx([2 * network + 4e-5] * 4)  # both pairs of a round cross it at once
    assert inside < found[0, 1] < network


def test_the_cluster_as_found_has_what_was_found() -> None:
    def finding(syndrome: str, *ranks: int, factor: float) -> Finding:
        return Finding(syndrome, ranks, "", factor=factor)  # type: ignore[arg-type]

    before = two_of_two()
    found = (
        finding("compute straggler", 1, factor=2.0),
        finding("slow sender", 2, factor=4.0),
        finding("slow link", 0, 3, factor=5.0),
        finding("late between steps", 3, factor=9.0),
    )
    after, said = as_found(before, found)
    assert said == ("a/V100-16GB#1: 1/2.00 of its rates", "b: 1/4.00 of its network's rate out", "a to b: 250MB/s")
    assert [d.name for d in after.devices] == [d.name for d in before.devices]
    assert [d.memory_bytes for d in after.devices] == [d.memory_bytes for d in before.devices]
    rates = [d.tflops["float16"] / b.tflops["float16"] for d, b in zip(after.devices, before.devices, strict=True)]
    assert rates == pytest.approx([1, 0.5, 1, 1], rel=1e-5)
    up, down = after.network("b") or (0, 0)
    assert (up, down) == pytest.approx((10e9 / 32, 10e9 / 8))
    assert after.link(0, 2).bandwidth_bytes_per_s == pytest.approx(10e9 / 40)
    assert ClusterSpec.from_yaml(after.to_yaml()).fingerprint == after.fingerprint
    assert cluster_body(before) == cluster_body(two_of_two())


def test_of_findings_about_one_thing_the_largest_counts() -> None:
    """Both ways of a network that ranks of a host share, and a device twice."""
    before, finding = two_of_two(), partial(Finding, summary="")
    after, said = as_found(
        before,
        (
            finding("slow sender", (2,), factor=4.0),
            finding("slow receiver", (3,), factor=2.0),
            finding("slow sender", (3,), factor=3.0),
            finding("compute straggler", (1,), factor=2.0),
            finding("misjudged devices", (0, 1), factor=1.5),
            finding("slow link", (0, 3), factor=5.0),
            finding("slow link", (1, 2), factor=2.0),
        ),
    )
    assert after.network("b") == pytest.approx((10e9 / 32, 10e9 / 16))
    rates = [d.tflops["float16"] / b.tflops["float16"] for d, b in zip(after.devices, before.devices, strict=True)]
    assert rates == pytest.approx([1 / 1.5, 0.5, 1, 1], rel=1e-5)
    assert after.link(0, 2).bandwidth_bytes_per_s == pytest.approx(10e9 / 40)
    assert said[:2] == ("b: 1/4.00 of its network's rate out", "b: 1/2.00 of its network's rate in") and len(said) == 5


def test_what_no_cluster_file_tells_of_is_refused() -> None:
    late = Finding("late between steps", (0,), "", factor=3.0)
    with pytest.raises(ClusterError, match="nothing was found that a cluster file can tell of"):
        as_found(four(), (late,))
