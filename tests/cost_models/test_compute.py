"""Seconds of one call: the roofline by hand, shares, and its linear form."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hap.codegen.layout import Layout
from hap.cost_models.compute import (
    ComputeTable,
    Parts,
    node_coefficients,
    node_seconds,
    parts_coefficients,
    parts_seconds,
    peak_flops_per_s,
    split_work,
)
from hap.cost_models.floors import floor_line
from hap.cost_models.work import node_work
from hap.errors import ClusterError
from hap.hosts import Delays, Device, Duplex
from hap.hosts_sum import HOSTS_SUM, message_bytes, outward_bytes
from hap.placement import Shard
from hap.plan import Strategy
from hap.runtime.ragged import Exchange, Site
from tests.cost_models.build import IDEAL, P, R, V, cluster, loose, node, source

ROWS, DEEP = Shard(0, 1, 8, 1, "g"), Shard(1, 1, 8, 1, "g")
NODES = (
    source("a", (8, 8)),
    source("b", (8, 16)),
    node("c", "aten.mm.default", [V("a"), V("b")], (8, 16)),
    node("v", "aten.view.default", [V("c"), (128,)], (128,)),
)
GRAPH = loose(*NODES)
MM = GRAPH.by_name["c"]
BY_ROWS = Strategy((ROWS, R), (ROWS,))
BY_DEPTH = Strategy((DEEP, ROWS), (P,))


def device(tflops: dict[str, float], bandwidth: float = 1e9, launch: float = 1e-3) -> Device:
    return Device(0, "h/d#0", "h", "d", tflops, 10**9, bandwidth, launch)


COMPUTE_BOUND = device({"float32": 1e-9})  # 1 kFLOP/s
MEMORY_BOUND = device({"float32": 1e6}, bandwidth=1e3)  # 1 kB/s


def seconds(strategy: Strategy, share: int, on: Device) -> float:
    return node_seconds(GRAPH, MM, strategy, {"g": (share, 8 - share)}, on, 0, IDEAL)


def test_whole_call() -> None:
    """2 * 8 * 8 * 16 = 2048 FLOP; 256 + 512 + 512 = 1280 bytes."""
    whole = Strategy((R, R), (R,))
    assert seconds(whole, 2, COMPUTE_BOUND) == pytest.approx(1e-3 + 2.048)
    assert seconds(whole, 2, MEMORY_BOUND) == pytest.approx(1e-3 + 1.280)


def test_a_replicated_weight_is_read_whole() -> None:
    """A quarter of the rows: 512 FLOP; bytes 256 / 4 + 512 + 512 / 4 = 704."""
    assert seconds(BY_ROWS, 2, COMPUTE_BOUND) == pytest.approx(1e-3 + 0.512)
    assert seconds(BY_ROWS, 2, MEMORY_BOUND) == pytest.approx(1e-3 + 0.704)


def test_a_partial_output_is_written_whole() -> None:
    """A quarter of the depth: bytes 256 / 4 + 512 / 4 + 512 = 704."""
    assert seconds(BY_DEPTH, 2, MEMORY_BOUND) == pytest.approx(1e-3 + 0.704)


def test_no_share_no_time_but_zeros_must_be_written() -> None:
    assert seconds(BY_ROWS, 0, MEMORY_BOUND) == 0
    assert seconds(BY_DEPTH, 0, MEMORY_BOUND) == pytest.approx(1e-3 + 0.512)


def test_views_are_free() -> None:
    assert node_seconds(GRAPH, GRAPH.by_name["v"], Strategy((R,), (R,)), {}, MEMORY_BOUND, 0) == 0


@pytest.mark.parametrize("on", [COMPUTE_BOUND, MEMORY_BOUND])
@pytest.mark.parametrize("strategy", [BY_ROWS, BY_DEPTH, Strategy((R, R), (R,))])
@pytest.mark.parametrize("share", range(1, 9))
def test_the_line_agrees_where_it_was_asked_for(on: Device, strategy: Strategy, share: int) -> None:
    fixed, slope = node_coefficients(GRAPH, MM, strategy, on, IDEAL, at_share=share / 8)
    assert fixed + slope * share / 8 == pytest.approx(seconds(strategy, share, on))


@given(st.floats(0.01, 100), st.floats(0, 1), st.floats(0.001, 1))
def test_the_line_is_never_above_the_roofline(balance: float, at: float, share: float) -> None:
    on = device({"float32": 1e-9}, bandwidth=1e3 * balance)
    parts = split_work(node_work(GRAPH, MM), BY_ROWS)
    fixed, slope = parts_coefficients(parts, on, IDEAL, at_share=at)
    assert fixed + slope * share <= parts_seconds(parts, share, on, IDEAL) * (1 + 1e-9)


@given(st.integers(1, 7))
def test_more_share_is_more_time(share: int) -> None:
    for on in (COMPUTE_BOUND, MEMORY_BOUND):
        assert seconds(BY_ROWS, share, on) < seconds(BY_ROWS, share + 1, on)


def test_all_ranks_at_once_equal_one_by_one() -> None:
    devices = cluster([1000] * 4, tflops=[4, 3, 2, 1], memory_bandwidth="1GB/s", launch="2us").devices
    sizes = {"g": (4, 3, 1, 0)}
    for strategy in (BY_ROWS, BY_DEPTH):
        parts = split_work(node_work(GRAPH, MM), strategy)
        shares = torch.tensor(sizes["g"], dtype=torch.float64).numpy() / 8
        one_by_one = [node_seconds(GRAPH, MM, strategy, sizes, d, d.rank) for d in devices]
        assert ComputeTable(devices).seconds(parts, shares).tolist() == pytest.approx(one_by_one)


HOSTS, RANKS = 4, 3
SUM = loose(source("a", (8, 8)), node("s", HOSTS_SUM, [V("a"), 5, HOSTS, RANKS], (8, 8)))  # 256 bytes
DEALT, WHOLE = Strategy((ROWS,), (ROWS,)), Strategy((R,), (R,))


def networked(up: float, down: float, latency: float = 0.0, delays: Delays = ()) -> Device:
    return replace(device({"float32": 1.0}), outward=Duplex(up, down, latency, delays))


@pytest.mark.parametrize(("up", "down"), [(1e3, 4e3), (4e3, 1e3)])
def test_a_sum_over_hosts_takes_what_passes_the_host_s_slower_way(up: float, down: float) -> None:
    """Of 256 bytes three quarters go out, and another three quarters for each rank that needs the sum: 384 bytes where
    it is dealt out inside, 768 where three ranks hold it whole; at 1 kB/s."""
    on = networked(up, down)
    for strategy, expected in ((DEALT, 0.384), (WHOLE, 0.768)):
        for share in range(9):  # all ranks wait for the whole
            sizes = {"g": (share, 8 - share)}
            seconds = node_seconds(SUM, SUM.by_name["s"], strategy, sizes, on, 0)
            assert seconds == pytest.approx(1e-3 + expected)


def test_a_sum_over_hosts_takes_two_rounds_and_its_bytes() -> None:
    """As any message does, not the longer of both."""
    for strategy, moved in ((DEALT, 384), (WHOLE, 768)):
        on = networked(1e3, 1e3, latency=0.25)
        found = node_seconds(SUM, SUM.by_name["s"], strategy, {"g": (8, 0)}, on, 1)
        assert found == pytest.approx(1e-3 + 0.5 + moved / 1e3)


def test_a_sum_over_hosts_waits_for_what_its_messages_wait_for() -> None:
    """Of 256 bytes on 4 hosts of 3 ranks a message is a twelfth; a quarter where a rank has a host's part alone: delays
    of 0.2 and 0.5 s in either round."""
    on = networked(1e9, 1e9, delays=((256 / 12, 0.2), (64, 0.5), (1e3, 9.0)))
    columns = Strategy((DEEP,), (DEEP,))
    for strategy, delay_s in ((DEALT, 0.5), (WHOLE, 0.2), (columns, 0.2)):
        found = node_seconds(SUM, SUM.by_name["s"], strategy, {"g": (3, 3, 2)}, on, 1)
        assert found == pytest.approx(1e-3 + 2 * delay_s, rel=1e-5)


CALLS = [
    *(split_work(node_work(GRAPH, MM), s) for s in (BY_ROWS, BY_DEPTH, Strategy((R, R), (R,)))),
    split_work(node_work(GRAPH, GRAPH.by_name["v"]), Strategy((R,), (R,))),
    *(split_work(node_work(SUM, SUM.by_name["s"]), s) for s in (DEALT, WHOLE)),
]


@given(
    st.lists(st.sampled_from(CALLS), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 8), st.floats(0.1, 10)), min_size=1, max_size=3),
    st.floats(0, 1e-2),
    st.lists(st.floats(0, 1e-2), max_size=2),
)
def test_all_ways_to_ask_for_seconds_agree(
    calls: list[Parts], ranks: list[tuple[int, float]], latency_s: float, delays_s: list[float]
) -> None:
    delays = tuple((16.0 * (i + 1), d) for i, d in enumerate(delays_s))
    outward = Duplex(2e6, 1e6, latency_s, delays)
    on = [replace(device({"float32": 1e-6 * speed}, 1e6, 1e-4), outward=outward) for _, speed in ranks]
    share = np.array([atoms / 8 for atoms, _ in ranks])
    shares = np.array([share if parts.group else np.ones(len(on)) for parts in calls])
    expected = [
        [parts_seconds(c, s, d) for s, d in zip(row, on, strict=True)] for c, row in zip(calls, shares, strict=True)
    ]
    table = ComputeTable(on)
    assert table.of_many(calls, shares) == pytest.approx(np.array(expected))
    assert table.of_many(calls, shares) == pytest.approx(np.array(expected)), "nor does asking change anything"
    for parts, row, seconds_of in zip(calls, shares, expected, strict=True):
        assert table.seconds(parts, row) == pytest.approx(np.array(seconds_of))
        for at, d, s in zip(row, on, seconds_of, strict=True):
            fixed, slope = parts_coefficients(parts, d, at_share=at)
            low, per_share = floor_line(parts, d, at_share=at)
            if at or not parts.idle_when_empty:
                assert fixed + slope * at == pytest.approx(s) == low + per_share * at


def test_a_view_of_integers_needs_no_rate() -> None:
    """A device that lists bfloat16 alone does all of a model in that."""
    graph = loose(
        source("i", (4, 2), dtype=torch.int64),
        node("flat", "aten.view.default", [V("i"), (8,)], (8,), dtype=torch.int64),
        source("t", (8,), dtype=torch.bfloat16),
        node("twice", "aten.add.Tensor", [V("t"), V("t")], (8,), dtype=torch.bfloat16),
    )
    on = device({"bfloat16": 1.0})
    names, whole = ("flat", "twice"), (Strategy((R,), (R,)), Strategy((R, R), (R,)))
    calls = [split_work(node_work(graph, graph.by_name[n]), s) for n, s in zip(names, whole, strict=True)]
    found = ComputeTable([on]).of_many(calls, np.ones((2, 1)))
    assert found.ravel().tolist() == pytest.approx([0.0, parts_seconds(calls[1], 1.0, on)])


def test_a_sum_over_hosts_has_one_price_wherever_it_is_asked_for() -> None:
    spec = cluster([1000, 1000], memory_bandwidth="1GB/s", launch="2us", latency="3us")
    for strategy in (DEALT, WHOLE):
        parts = split_work(node_work(SUM, SUM.by_name["s"]), strategy)
        shares = np.array([0.0, 1.0])
        one_by_one = [parts_seconds(parts, share, d) for share, d in zip(shares, spec.devices, strict=True)]
        table = ComputeTable(spec.devices)
        assert table.seconds(parts, shares).tolist() == pytest.approx(one_by_one)
        assert table.of_many([parts], shares[None])[0].tolist() == pytest.approx(one_by_one)
        fixed, slope = parts_coefficients(parts, spec.devices[0])
        assert (fixed, slope) == pytest.approx((one_by_one[0], 0.0))


def test_a_host_without_a_network_sums_nothing() -> None:
    for strategy in (DEALT, WHOLE):
        with pytest.raises(ClusterError, match=r"^host 'h' has no network, so nothing can be summed over hosts$"):
            node_seconds(SUM, SUM.by_name["s"], strategy, {"g": (4, 4)}, COMPUTE_BOUND, 0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_outward_bytes_are_those_that_the_runtime_sends(hosts: int, ranks: int) -> None:
    """Counted in its splits, where hosts are alike and the tensor can be cut evenly: out of each host, and into it; and
    the largest message."""
    by_rows, by_columns = Layout(0, 1, 1, (72 // ranks,) * ranks), Layout(1, 1, 1, (6 // ranks,) * ranks)
    halves = Layout(0, 2, 1, (36 // ranks,) * ranks)
    for layout, copies, blocks in ((None, ranks, None), (by_rows, 1, 1), (by_columns, 1, None), (halves, 1, 2)):
        site = Site((72, 6), (layout,) * hosts)
        sent, received, largest = [0] * hosts, [0] * hosts, 0
        for rank in range(hosts * ranks):
            for splits in Exchange([site], (ranks,) * hosts, rank).splits:
                for other in range(hosts * ranks):
                    if other // ranks != rank // ranks:
                        sent[rank // ranks] += splits.outgoing[other]
                        received[rank // ranks] += splits.incoming[other]
                        largest = max(largest, splits.outgoing[other])
        expected = outward_bytes(72 * 6, hosts, copies)
        assert sent == received == [expected] * hosts
        assert largest == message_bytes(72 * 6, hosts, ranks, blocks)


def test_a_missing_dtype_has_a_stated_stand_in() -> None:
    only = device({"float32": 4.0})
    assert peak_flops_per_s(only, torch.float32) == 4e12
    assert peak_flops_per_s(only, torch.float64) == 2e12
    assert peak_flops_per_s(only, torch.bfloat16) == 4e12
    assert peak_flops_per_s(only, torch.int64) == 4e12
    assert peak_flops_per_s(device({"float32": 4.0, "tf32": 16.0}), torch.float32) == 4e12
    assert peak_flops_per_s(device({"float32": 4.0, "tf32": 16.0}), torch.float32, tf32=True) == 16e12
    with pytest.raises(ClusterError, match=r"device h/d#0 lists no tflops for float32 \(only bfloat16\); add float32"):
        peak_flops_per_s(device({"bfloat16": 4.0}), torch.float32)
