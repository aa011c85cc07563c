"""Seconds of collectives: rings, uneven shards on uneven links, shared networks, and the linear form."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hap.cluster import ClusterSpec
from hap.codegen.program import is_decomposition
from hap.cost_models.collective import (
    CALL_S,
    GLOO_ALL_TO_ALL_EFFICIENCY,
    best_decomposition,
    candidates,
    collective_coefficients,
    collective_seconds,
    decompositions,
    overlaps,
    shares,
)
from hap.placement import Placement, Shard
from hap.plan import Collective
from hap.routes import SEGMENT_BYTES
from tests.cost_models.build import P, R, cluster

CALL = CALL_S["nccl"]
MB12 = 12_000_000
ROWS, COLUMNS = Shard(0, 1, 12, 1, "g"), Shard(1, 1, 12, 1, "g")
OTHER_ROWS, OTHER_COLUMNS = Shard(0, 1, 12, 1, "h"), Shard(1, 1, 12, 1, "h")
STAR = cluster([1000, 1000, 200, 200])  # 125 and 25 MB/s
EVEN, TO_FAST, TO_SLOW = (3, 3, 3, 3), (5, 5, 1, 1), (1, 1, 5, 5)
TWO_HOSTS = ClusterSpec.from_yaml(
    """
hosts:
  - name: a
    devices: [{count: 2, tflops: {float32: 1}, memory: 1GB, memory_bandwidth: 1000000TB/s, launch: 0s}]
    link: {bandwidth: 10GB/s, latency: 0s}
    network: {bandwidth: 1GB/s, latency: 0s}
  - name: b
    devices: [{count: 2, tflops: {float32: 1}, memory: 1GB, memory_bandwidth: 1000000TB/s, launch: 0s}]
    link: {bandwidth: 10GB/s, latency: 0s}
    network: {bandwidth: 1GB/s, latency: 0s}
"""
)


def gather(way: str, sizes: Sequence[int], on: ClusterSpec = STAR, nbytes: int = MB12) -> float:
    return collective_seconds("all_gather", way, nbytes, ROWS, R, {"g": tuple(sizes)}, on)


def reduce(nbytes: int, on: ClusterSpec) -> float:
    return collective_seconds("all_reduce", "ring", nbytes, P, R, {}, on)


# ------------------------------------------------------------------------------------------------ rings


def test_ring_all_reduce() -> None:
    """2 (N-1)/N B / b: 6/4 of 12 MB over the slowest link, 25 MB/s."""
    assert reduce(MB12, STAR) == pytest.approx(CALL + 1.5 * 12 / 25)


def test_ring_latency() -> None:
    """2 (N-1) steps on Gloo. NCCL has a tree too: 2 log2(4) = 4 hops for a small payload."""
    gloo, nccl = (cluster([1000] * 4, backend=b, latency="1ms") for b in ("gloo", "nccl"))
    assert reduce(0, gloo) == pytest.approx(CALL_S["gloo"] + 6e-3)
    assert reduce(0, nccl) == pytest.approx(CALL + 4e-3)


def test_measured_rings_are_predicted() -> None:
    """Measured by hand: Gloo, 957 and 192 Mbit/s of goodput, 16 MiB: all-reduce 1054 ms, even all-gather 538 ms."""
    testbed = cluster([957, 957, 192, 192], backend="gloo", latency="0.25ms")
    assert reduce(16 << 20, testbed) == pytest.approx(1.054, rel=0.02)
    assert gather("padded", EVEN, testbed, 16 << 20) == pytest.approx(0.538, rel=0.04)


# ------------------------------------------------------------------------------------------------ uneven all-gather


@pytest.mark.parametrize(
    ("way", "sizes", "seconds"),
    [
        ("all_to_all", EVEN, 9 / 25),  # a slow rank receives 9 MB
        ("all_to_all", TO_FAST, 11 / 25),  # it receives 11 MB
        ("all_to_all", TO_SLOW, 3 * 5 / 25),  # it sends 5 MB three times
        ("padded", EVEN, 3 * 3 / 25),
        ("padded", TO_FAST, 3 * 5 / 25),  # everybody's shard is padded to 5 MB
        ("padded", TO_SLOW, 3 * 5 / 25),
        ("broadcast", TO_FAST, 11 / 25),  # the ring's edge into a slow rank carries all but its own 1 MB
        ("broadcast", TO_SLOW, 11 / 25),  # the edge out of rank 3 carries all but rank 0's 1 MB
    ],
)
def test_all_gather_on_1g_1g_200m_200m(way: str, sizes: Sequence[int], seconds: float) -> None:
    assert gather(way, sizes) == pytest.approx(CALL + seconds)


def test_measured_uneven_gathers_are_ranked_rightly() -> None:
    """Measured by hand, 8.39 MB: for 5:5:1:1 the all-to-all (347 ms) beats padding (446), for even shares not."""
    testbed = cluster([957, 957, 192, 192], backend="gloo")
    ways = ("all_to_all", "padded")
    measured = {EVEN: (0.394, 0.269), TO_FAST: (0.347, 0.446), TO_SLOW: (0.458, 0.448)}
    for sizes, seconds in measured.items():
        for way, expected in zip(ways, seconds, strict=True):
            assert gather(way, sizes, testbed, 8_390_000) == pytest.approx(expected, rel=0.25)
    best = best_decomposition("all_gather", 8_390_000, ROWS, R, {"g": EVEN}, testbed)
    assert best[0] == "padded"


# ------------------------------------------------------------------------------------------------ routes


@pytest.mark.parametrize(
    ("way", "sizes", "seconds"),
    [
        ("pairs", EVEN, 9 / 25),  # a slow rank receives 9 MB
        ("pairs", TO_FAST, 11 / 25),
        ("pairs", TO_SLOW, 15 / 25),  # it sends 5 MB three times
        ("ring", TO_FAST, 11 / 25),  # the edge into a slow rank carries all but its own 1 MB
        ("ring", TO_SLOW, 11 / 25),  # the edge from rank 3 to rank 0 carries all but rank 0's
        ("ring[0,2,1,3]", TO_SLOW, 11 / 25),
        ("relay[0,1]", EVEN, 9 / 25),
        ("relay[0,1]", TO_SLOW, 7 / 25),  # a slow rank sends its 5 MB once and receives 7
    ],
)
def test_routes_on_1g_1g_200m_200m(way: str, sizes: Sequence[int], seconds: float) -> None:
    """The busiest port, and a segment once more where it is passed on."""
    again = 0.0 if way == "pairs" else SEGMENT_BYTES / 25e6
    assert gather(way, sizes) == pytest.approx(CALL + seconds + again, rel=1e-6)


def test_measured_routes_are_predicted() -> None:
    """Measured by hand: 8.39 MB on 957 and 192 Mbit/s of goodput, 256 KB segments."""
    testbed = cluster([957, 957, 192, 192], backend="gloo", latency="0.25ms")
    for way, sizes, seconds in (
        ("pairs", EVEN, 0.264),
        ("pairs", TO_FAST, 0.322),
        ("pairs", TO_SLOW, 0.437),
        ("ring", TO_FAST, 0.325),
        ("ring", TO_SLOW, 0.324),
        ("relay[0,1]", TO_SLOW, 0.213),
    ):
        assert gather(way, sizes, testbed, 8_390_000) == pytest.approx(seconds, rel=0.065), way


def test_the_fast_ranks_own_a_reduction() -> None:
    """Up and down at once: the slow ranks' 12 MB each way at 25 MB/s; an owner's half from 3 peers at 125 is less."""
    busiest = max(12 / 25, 3 * 6 / 125)
    first = SEGMENT_BYTES / 25e6
    found = collective_seconds("all_reduce", "owners[0,1]", MB12, P, R, {}, STAR)
    assert found == pytest.approx(CALL + busiest + first)
    assert best_decomposition("all_reduce", MB12, P, R, {}, STAR)[0] == "owners[0,1]"


def test_small_all_reduces_go_straight_to_owners() -> None:
    """Two steps where the ring takes six."""
    gloo = cluster([1000] * 4, backend="gloo", latency="1ms")
    name, seconds = best_decomposition("all_reduce", 4, P, R, {}, gloo)
    assert name == "owners[0,1,2,3]" and seconds == pytest.approx(CALL_S["gloo"] + 2e-3, rel=1e-3)


def test_two_levels_cross_the_networks_once() -> None:
    """24 MB between two hosts at 1 GB/s: half of it is summed on each side, so 12 go each way, twice."""
    found = collective_seconds("all_reduce", "two_level[0,1|2,3]", 24_000_000, P, R, {}, TWO_HOSTS)
    assert found == pytest.approx(CALL + 24e6 / 1e9, rel=0.03)
    assert found < collective_seconds("all_reduce", "owners[0,1,2,3]", 24_000_000, P, R, {}, TWO_HOSTS)


def test_what_a_cluster_suggests() -> None:
    assert candidates("all_gather", STAR)[3:] == ("ring", "relay[0,1]")
    assert candidates("all_reduce", STAR) == ("ring", "owners[0,1,2,3]", "owners[0,1]")
    assert candidates("all_reduce", TWO_HOSTS) == ("ring", "owners[0,1,2,3]", "two_level[0,1|2,3]")
    assert candidates("all_reduce", cluster([100] * 4)) == ("ring", "owners[0,1,2,3]")
    for kind, _, _ in KINDS:
        for on in (STAR, TWO_HOSTS):
            assert all(is_decomposition(kind, way, 4) for way in candidates(kind, on))


# ------------------------------------------------------------------------------------------------


def test_the_fastest_way_depends_on_the_shares() -> None:
    def best(sizes: tuple[int, ...]) -> str:
        return best_decomposition("all_gather", MB12, ROWS, R, {"g": sizes}, STAR)[0]

    assert best(TO_SLOW) == "relay[0,1]" and best(TO_FAST) == "all_to_all"


def test_a_gloo_all_to_all_loses_to_its_own_collisions() -> None:
    gloo = cluster([1000, 1000, 200, 200], backend="gloo")
    assert gather("all_to_all", EVEN, gloo) == pytest.approx(CALL_S["gloo"] + 9 / 25 / GLOO_ALL_TO_ALL_EFFICIENCY)


def test_gloo_broadcasts_go_down_trees() -> None:
    """Four ranks, even: each sends 3 MB twice as a root and once as a relay: 9 MB; the slow ones at half of 25 MB/s."""
    gloo = cluster([1000, 1000, 200, 200], backend="gloo")
    assert gather("broadcast", EVEN, gloo) == pytest.approx(4 * CALL_S["gloo"] + 9 / 12.5)


# ------------------------------------------------------------------------------------------------ reduce-scatter


def scatter(way: str, sizes: Sequence[int], on: ClusterSpec = STAR, nbytes: int = MB12) -> float:
    return collective_seconds("reduce_scatter", way, nbytes, P, ROWS, {"g": tuple(sizes)}, on)


def test_reduce_scatter_is_the_all_gather_backwards() -> None:
    for sizes in (EVEN, TO_FAST, TO_SLOW):
        assert scatter("all_to_all_sum", sizes) == pytest.approx(gather("all_to_all", sizes))
        assert scatter("padded", sizes) == pytest.approx(gather("padded", sizes))


def test_a_padded_reduce_scatter_on_gloo_moves_an_all_reduces_bytes() -> None:
    gloo = cluster([1000, 1000, 200, 200], backend="gloo")
    assert scatter("padded", EVEN, gloo) == pytest.approx(reduce(MB12, gloo))
    assert best_decomposition("reduce_scatter", MB12, P, ROWS, {"g": EVEN}, gloo)[0] == "pairs"


# ------------------------------------------------------------------------------------------------ shared networks


def test_ranks_of_a_host_share_its_network() -> None:
    """1 GB a rank. All-to-all: host a sends each of its 2 shards to 2 ranks, 4 GB at 1 GB/s. A ring crosses once."""
    gb4, quarters = 4 * 10**9, {"g": (3, 3, 3, 3)}
    seconds = collective_seconds("all_gather", "all_to_all", gb4, ROWS, R, quarters, TWO_HOSTS)
    assert seconds == pytest.approx(CALL + 4.0)
    assert collective_seconds("all_gather", "padded", gb4, ROWS, R, quarters, TWO_HOSTS) == pytest.approx(CALL + 3.0)
    assert reduce(gb4, TWO_HOSTS) == pytest.approx(CALL + 6.0)


# ------------------------------------------------------------------------------------------------ all-to-all, slice


def exchange(source: Placement, target: Placement, sizes: dict[str, tuple[int, ...]], on: ClusterSpec) -> float:
    return collective_seconds("all_to_all", "direct", MB12, source, target, sizes, on)


def test_ranges_of_one_dim_overlap_and_other_dims_mix() -> None:
    rho, sigma = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    assert overlaps(ROWS, OTHER_ROWS, rho, sigma).tolist() == [[0.25, 0.25], [0, 0.5]]
    assert overlaps(ROWS, COLUMNS, rho, sigma).tolist() == [[0.125, 0.375], [0.125, 0.375]]


def test_all_to_all() -> None:
    two = cluster([1000, 1000])
    sizes = {"g": (6, 6), "h": (3, 9)}
    assert exchange(ROWS, OTHER_ROWS, sizes, two) == pytest.approx(CALL + 3 / 125)  # rank 1 lacks a quarter of 12 MB
    assert exchange(ROWS, OTHER_COLUMNS, sizes, two) == pytest.approx(CALL + 4.5 / 125)  # rank 0 sends 6 MB x 3/4


def test_a_slice_is_a_copy() -> None:
    """Rank 0 reads and writes 1/3 of 12 MB at 0.8 of 1 GB/s; nothing crosses the network."""
    on = cluster([1, 1], memory_bandwidth="1GB/s", launch="1ms")
    seconds = collective_seconds("slice", "local", MB12, R, ROWS, {"g": (4, 8)}, on)
    assert seconds == pytest.approx(1e-3 + 2 * 8e6 / 0.8e9)


def test_packing_takes_memory_bandwidth() -> None:
    on = cluster([1000, 1000, 200, 200], memory_bandwidth="1GB/s")
    assert gather("all_to_all", EVEN, on) - gather("all_to_all", EVEN) == pytest.approx(2 * 12e6 / 0.8e9, rel=1e-3)


def test_one_rank_needs_no_links() -> None:
    alone = cluster([1000])
    assert collective_seconds("all_gather", "padded", MB12, ROWS, R, {"g": (12,)}, alone) == 0
    assert reduce(MB12, alone) == 0


# ------------------------------------------------------------------------------------------------ properties

KINDS: list[tuple[Collective, Placement, Placement]] = [
    ("all_gather", ROWS, R),
    ("all_reduce", P, R),
    ("reduce_scatter", P, ROWS),
    ("all_to_all", ROWS, OTHER_ROWS),
    ("all_to_all", ROWS, OTHER_COLUMNS),
    ("slice", R, ROWS),
]
dealt = (
    st.lists(st.integers(0, 12), min_size=3, max_size=3)
    .map(lambda cuts: [0, *sorted(cuts), 12])
    .map(lambda cuts: tuple(b - a for a, b in pairwise(cuts)))
)


@settings(max_examples=40, deadline=None)
@given(dealt, dealt, st.sampled_from([TWO_HOSTS, STAR]), st.integers(1, 10**9), st.integers(0, 10**9))
def test_more_bytes_take_more_time(g: tuple[int, ...], h: tuple[int, ...], on: ClusterSpec, b: int, more: int) -> None:
    for kind, source, target in KINDS:
        for way in decompositions(kind, on.backend):
            less, greater = (
                collective_seconds(kind, way, n, source, target, {"g": g, "h": h}, on) for n in (b, b + more)
            )
            assert 0 <= less <= greater * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(dealt, st.sampled_from([STAR, TWO_HOSTS, cluster([3, 70, 200, 1], backend="gloo")]))
def test_all_gather_never_beats_its_lower_bound(sizes: tuple[int, ...], on: ClusterSpec) -> None:
    """Without relays: each host receives what it lacks once, and sends out what it has once."""
    held = dict.fromkeys((h.name for h in on.hosts), 0.0)
    for rank, size in enumerate(sizes):
        held[on.host_of(rank)] += size * 1e6
    for way in ("all_to_all", "padded", "broadcast"):
        seconds = gather(way, sizes, on)
        for host, own in held.items():
            rates = on.network(host)
            assert rates is not None
            assert seconds >= max((MB12 - own) / rates.down_bytes_per_s, own / rates.up_bytes_per_s) * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(dealt, dealt, dealt, dealt)
def test_the_linear_form(g: tuple[int, ...], h: tuple[int, ...], g2: tuple[int, ...], h2: tuple[int, ...]) -> None:
    """Exact for any shares, except ``direct``: exact where it was asked for, and a bound otherwise."""
    for kind, source, target in KINDS:
        for way in decompositions(kind, "nccl"):
            form = collective_coefficients(kind, way, MB12, source, target, STAR)
            here, there = {"g": g, "h": h}, {"g": g2, "h": h2}
            for sizes in (here, there):
                seconds = form.seconds(shares(source, sizes, 4), shares(target, sizes, 4))
                exact = collective_seconds(kind, way, MB12, source, target, sizes, STAR)
                assert seconds >= exact * (1 - 1e-9) if kind == "all_to_all" else math.isclose(seconds, exact)


@given(dealt, dealt)
def test_all_to_all_against_every_pair_of_ranges(g: tuple[int, ...], h: tuple[int, ...]) -> None:
    """Brute force: 12 atoms of 1 MB, each moved from who has it to who wants it."""
    owner = [r for r in range(4) for _ in range(g[r])]
    wanted = [r for r in range(4) for _ in range(h[r])]
    moved = [(a, b) for a, b in zip(owner, wanted, strict=True) if a != b]
    rate = [125e6, 125e6, 25e6, 25e6]
    out = [1e6 * sum(a == r for a, _ in moved) / rate[r] for r in range(4)]
    into = [1e6 * sum(b == r for _, b in moved) / rate[r] for r in range(4)]
    assert exchange(ROWS, OTHER_ROWS, {"g": g, "h": h}, STAR) == pytest.approx(CALL + max(*out, *into), abs=1e-9)
