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
    node_coefficients,
    node_seconds,
    parts_coefficients,
    parts_seconds,
    peak_flops_per_s,
    split_work,
)
from hap.cost_models.work import node_work
from hap.errors import ClusterError
from hap.hosts import Device, Duplex
from hap.hosts_sum import HOSTS_SUM, outward_bytes
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


def networked(up: float, down: float, latency: float = 0.0) -> Device:
    return replace(device({"float32": 1.0}), outward=Duplex(up, down, latency))


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


def test_a_small_sum_over_hosts_takes_two_rounds() -> None:
    for strategy in (DEALT, WHOLE):
        on = networked(1e9, 1e9, latency=0.25)
        assert node_seconds(SUM, SUM.by_name["s"], strategy, {"g": (8, 0)}, on, 1) == pytest.approx(1e-3 + 0.5)


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
    """Counted in its splits, where hosts are alike and the tensor can be cut evenly: out of each host, and into it."""
    by_rows = Layout(0, 1, 1, tuple(24 // ranks for _ in range(ranks)))
    for layout, copies in ((None, ranks), (by_rows, 1)):
        site = Site((24, 3), (layout,) * hosts)
        sent, received = [0] * hosts, [0] * hosts
        for rank in range(hosts * ranks):
            for splits in Exchange([site], (ranks,) * hosts, rank).splits:
                for other in range(hosts * ranks):
                    if other // ranks != rank // ranks:
                        sent[rank // ranks] += splits.outgoing[other]
                        received[rank // ranks] += splits.incoming[other]
        expected = outward_bytes(24 * 3, hosts, copies)
        assert sent == received == [expected] * hosts


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
