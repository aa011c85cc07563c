"""What a bed looks like, from the cluster alone: no root, nothing built."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.testbed import cgroup, network
from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.layout import GOODPUT, Layout, played
from benchmarks.testbed.network import shaping
from hap.cluster import ClusterSpec, Link
from hap.runtime.emulate import HostRate

CLUSTER = ClusterSpec.from_yaml(
    """
backend: gloo
hosts:
  - name: big
    devices: [{name: fast, count: 2, tflops: {float32: 2}, memory: 1GB, memory_bandwidth: 10GB/s}]
    link: {bandwidth: 1GB/s, latency: 10us}
    network: {bandwidth: 1Gbit/s, latency: 250us}
  - name: small
    devices: [{name: slow, tflops: {float32: 1}, memory: 1GB, memory_bandwidth: 5GB/s}]
    network: {up: 200Mbit/s, down: 400Mbit/s, latency: 250us}
links:
  - {from: big, to: small, bandwidth: 100Mbit/s}
"""
)
LAYOUT = Layout.of(CLUSTER, "deadline", "abc123", cores=(0, 1))


def test_a_namespace_for_each_host_and_one_for_the_switch() -> None:
    assert LAYOUT.namespaces == ("hapbed-abc123-sw", "hapbed-abc123-0", "hapbed-abc123-1")


def test_ranks_of_one_host_share_its_namespace() -> None:
    assert [(r.rank, r.local_rank, r.host) for r in LAYOUT.ranks] == [(0, 0, 0), (1, 1, 0), (2, 0, 1)]


def test_rates_are_the_cluster_file_s_for_each_direction() -> None:
    big, small = LAYOUT.hosts
    assert (big.up_bytes_per_s, big.down_bytes_per_s) == (125e6, 125e6)
    assert (small.up_bytes_per_s, small.down_bytes_per_s) == (25e6, 50e6)
    assert big.paths == ((small.address, 12.5e6),)


def test_slowdowns_leave_half_of_the_cores() -> None:
    # Speeds 2, 2, 1: 1/s sums to 1 core of the 2 for s = 2.5, 2.5, 5.
    assert [r.slowdown for r in LAYOUT.ranks] == pytest.approx([2.5, 2.5, 5.0])


def test_the_busiest_ranks_get_a_core_each_and_the_slow_one_the_first() -> None:
    assert [r.core for r in LAYOUT.ranks] == [0, 1, 0]


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_new_rate_leaves_paths_theirs(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is promised to all classes stays within it."""
    sent: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(network, "_batch", lambda tool, namespace, commands: sent.append((namespace, list(commands))))
    big = LAYOUT.hosts[0]
    network.set_rate(LAYOUT, big, direction, 1e6)
    ((namespace, commands),) = sent
    assert namespace == (big.namespace if direction == "up" else LAYOUT.switch)
    assert all(c.startswith("class change") for c in commands)
    leaves = {c.split("classid 1:")[1].split()[0]: c for c in commands[1:]}
    assert set(leaves) == ({"10", "20", "30"} if direction == "up" else {"10", "20"})
    assert sum(int(c.split(" rate ")[1].split("bit")[0]) for c in leaves.values()) <= 8e6


def test_a_rank_s_environment_is_torchrun_s() -> None:
    environment = LAYOUT.environment(LAYOUT.ranks[1], 29500, enforced=True)
    assert environment["RANK"] == "1" and environment["WORLD_SIZE"] == "3"
    assert environment["LOCAL_RANK"] == "1" and environment["LOCAL_WORLD_SIZE"] == "2"
    assert environment["MASTER_ADDR"] == LAYOUT.hosts[0].address and environment["GLOO_SOCKET_IFNAME"] == "eth0"
    assert LAYOUT.environment(LAYOUT.ranks[1], 29500, enforced=False)["MASTER_ADDR"] == "127.0.0.1"


def test_it_says_what_is_not_enforced() -> None:
    assert any("links inside big" in sentence for sentence in LAYOUT.not_enforced(CLUSTER, root=True))
    assert any("needs root" in sentence for sentence in LAYOUT.not_enforced(CLUSTER, root=False))


def test_the_planner_s_cluster_has_goodputs_and_this_machine_s_speed() -> None:
    # slowdowns() asks this machine for its cores, so compare ratios: the slow device has half of the fast one's speed.
    own = played(CLUSTER, HostRate(50e9, 8e9, 2e-6), Link(1e9, 20e-6))
    fast, _, slow = own.devices
    assert fast.tflops["float32"] == pytest.approx(2 * slow.tflops["float32"])
    rates = own.network("small")
    assert rates is not None
    assert rates.up_bytes_per_s == pytest.approx(25e6 * GOODPUT, rel=1e-3)
    assert rates.down_bytes_per_s == pytest.approx(50e6 * GOODPUT, rel=1e-3)
    assert own.link(0, 2).bandwidth_bytes_per_s == pytest.approx(12.5e6 * GOODPUT)


def test_shaping_never_promises_more_than_the_rate() -> None:
    lines = shaping("eth0", 125e6, [("10.77.0.2", 12.5e6), ("10.77.0.3", 62.5e6)])
    leaves = [line.split() for line in lines if "parent 1:1 " in line]
    promised = sum(int(words[words.index("rate") + 1].removesuffix("bit")) for words in leaves)
    ceilings = [int(words[words.index("ceil") + 1].removesuffix("bit")) for words in leaves]
    assert promised <= 1_000_000_000
    assert ceilings == [1_000_000_000, 1_000_000_000, 100_000_000, 500_000_000]
    assert any("match ip dst 10.77.0.3/32 flowid 1:31" in line for line in lines)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.5, (5_000, 10_000)), (0.1, (1_000, 10_000)), (0.05, (1_000, 20_000)), (1.0, (10_000, 10_000))],
)
def test_a_quota_is_never_below_what_the_kernel_takes(share: float, expected: tuple[int, int]) -> None:
    assert cgroup.quota(share) == expected


def test_a_quota_that_cannot_repeat_is_refused() -> None:
    with pytest.raises(TestbedError, match="deadline"):
        cgroup.quota(0.005)


def test_cgroup_v2_holds_the_process(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io")
    mounts = f"cgroup2 {tmp_path} cgroup2 rw 0 0\n"
    controller = cgroup.find(mounts, "0::/user.slice\n")
    assert controller is not None and (controller.version, controller.parent) == (2, tmp_path)
    cgroup.create(controller, "abc123", {0: 0.4})
    top = tmp_path / "hapbed-abc123"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (top / "cpu.weight").read_text() == "10000"
    assert (top / "r0" / "cpu.max").read_text() == "4000 10000"
    cgroup.join(controller, "abc123", 77, rank=0)
    assert (top / "r0" / "cgroup.procs").read_text() == "77"


def test_cgroup_v1_holds_the_main_thread(tmp_path: Path) -> None:
    mounts = f"cgroup {tmp_path} cgroup rw,cpu,cpuacct 0 0\n"
    controller = cgroup.find(mounts, "4:cpu,cpuacct:/docker/not-here\n")
    assert controller is not None and (controller.version, controller.parent) == (1, tmp_path)
    cgroup.create(controller, "abc123", {0: 0.4})
    top = tmp_path / "hapbed-abc123"
    assert (top / "cpu.shares").read_text() == "200000"
    assert (top / "r0" / "cpu.cfs_quota_us").read_text() == "4000"
    cgroup.join(controller, "abc123", 77, rank=0)
    assert (top / "r0" / "tasks").read_text() == "77"


def test_no_cpu_controller_is_none() -> None:
    assert cgroup.find("proc /proc proc rw 0 0\n", "0::/\n") is None
