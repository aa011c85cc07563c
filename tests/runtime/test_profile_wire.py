"""Links: what is asked of them, what is made of the times."""

from __future__ import annotations

import pytest
import torch

from benchmarks.testbed import Testbed
from hap.cluster import ClusterSpec
from hap.cost_models.profile import LinkProfile, ProfileError
from hap.placement import PARTIAL, REPLICATE
from hap.runtime.profile_wire import Case, fit_link, link_times, measure_links

MB = 1 << 20
PAIR = ClusterSpec.from_yaml("""
backend: gloo
hosts:
  - name: here
    devices: [{name: d, count: 2, tflops: {float32: 1}, memory: 1GB, memory_bandwidth: 10GB/s}]
    link: {bandwidth: 1GB/s, latency: 50us}
""")


def link(trip_s: float, bytes_per_s: float) -> tuple[dict[int, list[float]], list[int]]:
    """The times of an ideal link, and the sizes that it was asked for, each once."""
    asked: list[int] = []

    def answer_s(size: int) -> float:
        asked.append(size)
        return trip_s + size / bytes_per_s

    return link_times(answer_s, 3), list(dict.fromkeys(asked))


def links_of(rank: int) -> tuple[LinkProfile, ...]:
    return measure_links(torch.device("cpu"))


def test_a_slow_link_is_asked_for_a_megabyte() -> None:
    seconds, asked = link(0.25e-3, 25e6)
    assert asked == [1, MB, MB // 16, MB // 4] and [len(seconds[s]) for s in asked[1:]] == [3, 3, 3]
    found = fit_link(0, 1, seconds)
    assert found.bytes_per_s == pytest.approx(25e6, rel=1e-6) and found.spread == 0.0
    assert found.latency_s == pytest.approx(0.125e-3, rel=1e-3)


def test_a_fast_link_is_asked_for_more_until_bytes_outweigh_the_round_trip() -> None:
    seconds, asked = link(40e-6, 50e9)  # 1 MB: 61 us, 4 MB: 124, 16 MB: 376; ten round trips: 400
    assert asked == [1, MB, 4 * MB, 16 * MB, 64 * MB]  # and parts of 64 MB: 4 MB and 16 MB
    assert fit_link(0, 1, seconds).bytes_per_s == pytest.approx(50e9, rel=1e-6)


@pytest.mark.parametrize(("disturbed", "spread", "answers"), [(0, 0.0, 3), (3, 0.0, 6), (99, 0.9, 9)])
def test_a_link_that_was_disturbed_is_asked_again_and_one_that_is_in_use_stays_so(
    disturbed: int, spread: float, answers: int
) -> None:
    """Of the large answers that count, so many take other times than the link does."""
    large = -2  # two are to find the size

    def answer_s(size: int) -> float:
        nonlocal large
        large += size == MB
        factor = (1.0, 10.0, 19.0)[(large - 1) % 3] if 0 < large <= disturbed else 1.0
        return 0.25e-3 + size / 25e6 * (factor if size == MB else 1.0)

    found = fit_link(0, 1, link_times(answer_s, 3))
    assert large == answers and found.spread == pytest.approx(spread, abs=0.01)


def test_the_rate_is_of_the_median_and_the_spread_is_stated() -> None:
    found = fit_link(2, 3, {1: [0.003, 0.002], MB: [0.102, 0.110, 0.502]})
    assert (found.source, found.target, found.latency_s) == (2, 3, 0.001)
    assert found.bytes_per_s == pytest.approx(MB / 0.108)
    assert found.spread == pytest.approx(0.008 / 0.110)


def test_sizes_above_the_line_of_latency_and_rate_have_a_delay() -> None:
    """10 MB/s and 2 ms a round trip: 250 kB take 27 ms by the line, 30 as measured; 62.5 kB 8.25, and 8 as measured."""
    seconds = {1: [0.002], 62_500: [0.008], 250_000: [0.030, 0.029, 0.040], 1_000_000: [0.102]}
    found = fit_link(0, 1, seconds)
    assert found.delays == ((62_500, 0.0), (250_000, pytest.approx(0.003)))


def test_a_collective_lasts_from_the_last_to_enter_to_the_last_to_leave() -> None:
    """Two repeats: 2 s from 1 to 3, and 4 s from 1 to 5; the first rank leaves 1 s and 3 s before the second."""
    case = Case("all_reduce", "ring", 1 << 16, (8, 8), PARTIAL, REPLICATE)
    found = case.timed([[(0.0, 2.0), (1.0, 2.0)], [(1.0, 3.0), (0.5, 5.0)]], PAIR)
    assert found.seconds == 3.0 and found.spread == pytest.approx(1 / 3)
    assert found.ahead == (pytest.approx((1 / 2 + 3 / 4) / 2), 0.0)


def test_a_link_whose_bytes_take_no_time_is_refused() -> None:
    with pytest.raises(ProfileError, match="link from rank 0 to 1: 1048576 bytes took no longer than one"):
        fit_link(0, 1, {1: [0.002, 0.003], MB: [0.001, 0.002, 0.002]})


def test_every_ordered_pair_is_measured_and_all_ranks_know_it() -> None:
    with Testbed(PAIR, enforced=False) as bed:
        first, second = bed.run(links_of)
    assert first == second and [(k.source, k.target) for k in first] == [(0, 1), (1, 0)]
    assert all(k.latency_s > 0 and 1e6 < k.bytes_per_s < 1e12 for k in first)
