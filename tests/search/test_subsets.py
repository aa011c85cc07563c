"""Devices that cost more than they bring, and what the others would do alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hap.cluster import ClusterSpec
from hap.search import plan_graph, postponing
from hap.search.planner import Search
from hap.search.problem import Problem
from hap.search.subsets import Advice, Kind, fewer_hosts, kinds_of, slowest_kinds, without
from tests.search.models import cluster, mlp

MIXED = ClusterSpec.from_yaml("""
name: mixed
hosts:
  - name: new
    devices: [{gpu: A100-40GB, count: 2}, {gpu: T4, count: 2}]
    link: pcie3
    network: {bandwidth: 100Gbit/s, latency: 20us}
  - name: old
    devices: [{gpu: T4, count: 2}]
    link: pcie3
    network: {bandwidth: 10Gbit/s, latency: 20us}
links: [{from: new, to: old, bandwidth: 1Gbit/s}]
""")


def test_a_cluster_without_some_devices() -> None:
    found = without(MIXED, (1, 3))
    assert [d.name for d in found.devices] == ["new/A100-40GB#0", "new/T4#1", "old/T4#0", "old/T4#1"]
    assert found.links == MIXED.links


def test_a_host_without_devices_goes_with_its_links() -> None:
    found = without(MIXED, (2, 4, 5))
    assert [h.name for h in found.hosts] == ["new"] and found.links == () and found.world_size == 3


def test_kinds_go_slowest_first_and_the_fastest_stays() -> None:
    assert list(slowest_kinds(MIXED.devices, [1, 1, 5, 5, 5, 5])) == [(2, 3, 4, 5)]
    assert list(slowest_kinds(MIXED.devices, [1, 2, 5, 5, 5, 5])) == [(2, 3, 4, 5), (1, 2, 3, 4, 5)]


def test_hosts_go_half_by_half_and_those_behind_slow_networks_first() -> None:
    """The slower kind is on all three hosts, one of which has the faster kind, too; the last but one is reached less
    quickly than the last."""
    host = "  - {{name: {0}, devices: {1}, link: pcie3, network: {{bandwidth: {2}, latency: 20us}}}}\n"
    both, old = "[{gpu: A100-40GB, count: 2}, {gpu: T4, count: 1}]", "[{gpu: T4, count: 2}]"
    hosts = host.format("a", both, "100Gbit/s") + host.format("b", old, "5Gbit/s") + host.format("c", old, "10Gbit/s")
    devices = ClusterSpec.from_yaml(f"name: three\nhosts:\n{hosts}").devices
    assert fewer_hosts(devices, [1, 1, 5, 5, 5, 5, 5]) == [(3, 4), (3, 4, 5, 6), (2, 3, 4, 5, 6)]


def hosts_of(*kinds: tuple[str, str]) -> ClusterSpec:
    """(devices, network) of each."""
    host = "  - {{name: h{0}, devices: [{1}], link: pcie3, network: {{bandwidth: {2}, latency: 20us}}}}\n"
    lines = [host.format(i, devices, network) for i, (devices, network) in enumerate(kinds)]
    return ClusterSpec.from_yaml(f"name: some\nhosts:\n{''.join(lines)}")


def test_hosts_of_many_devices_stay() -> None:
    """Of one, two and eight devices the eight; of more on a slower network those that bring more in proportion. What is
    on a host that faster devices keep costs no network."""
    one, two, eight = (f"{{gpu: T4, count: {n}}}" for n in (1, 2, 8))
    alike = hosts_of((one, "5GB/s"), (two, "5GB/s"), (eight, "5GB/s")).devices
    assert fewer_hosts(alike, [1] * 11) == [(0,), (0, 1, 2)]
    slower = hosts_of((two, "5GB/s"), (eight, "2GB/s"), (eight, "1GB/s")).devices
    assert fewer_hosts(slower, [1] * 18) == [tuple(range(10, 18)), (0, 1, *range(10, 18))]
    mixed = hosts_of((eight, "5GB/s"), (f"{{gpu: A100-40GB, count: 1}}, {one}", "5GB/s")).devices
    assert fewer_hosts(mixed, [5] * 8 + [1, 5]) == [tuple(range(8)), (*range(8), 9)]


@pytest.mark.parametrize("counts", [(1, 2, 8), (8, 2, 1)])
def test_the_host_that_does_best_alone_is_found(counts: Sequence[int]) -> None:
    """On networks that take longer than they bring, in any order of hosts."""
    device = "{{name: new, count: {}, tflops: {{float32: 10}}, memory: 16GB, memory_bandwidth: 2000GB/s}}"
    found, where = mlp(batch=4096, width=512), hosts_of(*((device.format(n), "0.05GB/s") for n in counts))
    plan = plan_graph(found, where, effort="quick", leave_out=True)
    kept = [d.host for d in where.devices if d.rank not in plan.provenance.solver["left_out"]]
    assert kept == [f"h{counts.index(8)}"] * 8


def test_of_the_fastest_kind_one_host_stays() -> None:
    devices = cluster(*[(10, "16GB")] * 5, *[(5, "16GB")] * 2).devices
    without_kind = (5, 6)
    assert list(slowest_kinds(devices, [1] * 5 + [2] * 2)) == [without_kind]
    found = fewer_hosts(devices, [1] * 5 + [2] * 2)
    assert found == [(6,), without_kind, (3, 4, 5, 6), (2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6)]
    assert fewer_hosts(devices[:1], [1]) == []


def test_says_how_many_of_a_kind() -> None:
    assert kinds_of(MIXED, (3, 4, 5)) == (Kind("T4", 3, 4),) and str(Kind("T4", 3, 4)) == "3 of the 4 T4"
    assert [str(kind) for kind in kinds_of(MIXED, (0, 1, 2, 3, 4, 5))] == ["the 2 A100-40GB", "the 4 T4"]


def test_advises_hosts_of_a_kind_to_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hosts alike, whose networks take longer than three of them bring. Each cluster is looked at once; nothing is
    postponed there."""
    looked_at, alone_s = list[int](), Search.alone_s

    def noted(search: Search, problem: Problem, *rest: Any, **options: Any) -> float | None:
        looked_at.append(problem.world_size)
        return alone_s(search, problem, *rest, **options)

    monkeypatch.setattr(Search, "alone_s", noted)
    found, host = mlp(batch=4096, width=512), "  - {{name: {0}, devices: {1}, link: {2}, network: {3}}}\n"
    two = "[{name: new, count: 2, tflops: {float32: 10}, memory: 16GB, memory_bandwidth: 2000GB/s}]"
    rates = "{bandwidth: 50GB/s, latency: 1us}", "{bandwidth: 0.05GB/s, latency: 1us}"
    hosts = [host.format(name, two, *rates) for name in "abcd"]
    plan = plan_graph(found, ClusterSpec.from_yaml(f"name: four\nhosts:\n{''.join(hosts)}"))
    assert looked_at == [4, 2]
    monkeypatch.setattr(postponing, "PARTS", ())
    one = plan_graph(found, ClusterSpec.from_yaml(f"name: one\nhosts:\n{hosts[0]}"), effort="quick")
    assert plan.provenance.solver["leave_out"] == [2, 3, 4, 5, 6, 7]
    assert plan.provenance.solver["leave_out_overlapped_s"] == pytest.approx(one.predicted.as_run_s, rel=0.02)
    assert "leaving out 6 of the 8 new would make the step as it is run " in plan.predicted.tight


def test_says_in_numbers_when_a_device_costs_more_than_it_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old device has no share of anything that matters, but a slow network that every gradient passes."""
    found = mlp(batch=4096, width=512)
    new = "[{name: new, count: 2, tflops: {float32: 10}, memory: 16GB, memory_bandwidth: 2000GB/s}]"
    old = "[{name: old, tflops: {float32: 0.01}, memory: 16GB, memory_bandwidth: 20GB/s}]"
    hosts = f"""
  - {{name: a, devices: {new}, link: {{bandwidth: 50GB/s, latency: 1us}}, network: {{bandwidth: 1GB/s, latency: 1us}}}}
"""
    more = f"  - {{name: b, devices: {old}, network: {{bandwidth: 1GB/s, latency: 1us}}}}\n"
    plan = plan_graph(found, ClusterSpec.from_yaml(f"name: all\nhosts:{hosts}{more}"))
    monkeypatch.setattr(postponing, "PARTS", ())
    alone = plan_graph(found, ClusterSpec.from_yaml(f"name: new\nhosts:{hosts}"), effort="quick")
    alone_s = alone.predicted.overlapped_s
    whole_s = plan.predicted.overlapped_s
    assert plan.provenance.solver["leave_out"] == [2]
    assert plan.provenance.solver["leave_out_overlapped_s"] == pytest.approx(alone_s, rel=0.02)
    assert alone_s is not None and whole_s is not None and alone_s < 0.97 * whole_s
    assert "leaving out the 1 old would make the step as it is run " in plan.predicted.tight


def test_names_the_clock_that_it_compares_by() -> None:
    one = Advice((2,), (Kind("old", 1, 1),), 1.5, 2.0, as_run=True)
    assert (
        str(one)
        == "leaving out the 1 old would make the step as it is run 1.5s instead of 2s: run on the other devices"
    )
    assert one.figures() == {"leave_out": [2], "leave_out_overlapped_s": 1.5}
    other = replace(one, as_run=False)
    assert "the step with nothing overlapped 1.5s instead" in str(other)
    assert other.figures() == {"leave_out": [2], "leave_out_step_s": 1.5}


def test_says_nothing_where_all_are_worth_it() -> None:
    plan = plan_graph(mlp(batch=4096, width=512), cluster((10, "16GB"), (5, "16GB"), network="50GB/s"))
    assert "leave_out" not in plan.provenance.solver and "leaving out" not in plan.predicted.tight
