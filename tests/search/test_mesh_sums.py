"""What sums over hosts wait for, and that many small ones take no less than the bound says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hap.cost_models.compute import Calls, parts_seconds
from hap.deferral import Batches
from hap.graph import Value
from hap.hosts import Duplex
from hap.hosts_sum import HOSTS_SUM, outward_bytes
from hap.placement import REPLICATE
from hap.plan import Strategy
from hap.search.mesh import host_cluster, plan_mesh
from tests.cost_models.build import loose, node, source
from tests.search.models import mlp
from tests.search.test_mesh import cluster

CURVE = "curve: {100kB: 50MB/s, 1MB: 250MB/s}"  # beside 1 us and 1 GB/s 100 kB take 1.899 ms longer, 1 MB 2.999


@pytest.mark.parametrize(
    ("network", "links"),
    [
        ((f"1GB/s, {CURVE}",) * 3, ""),
        (("1GB/s", f"1GB/s, {CURVE}", "1GB/s"), ""),
        ("1GB/s", f"links: [{{from: host2, to: host0, bandwidth: 1GB/s, {CURVE}}}]"),
    ],
    ids=["all hosts", "one host", "a link"],
)
def test_sums_over_hosts_wait_for_what_small_messages_wait_for(network: Sequence[str] | str, links: str) -> None:
    """The curve of any way that they go by, as on one axis; inside a host nothing of it is seen."""
    plain, on = cluster((1, 1), (1,), (1, 1, 1)), cluster((1, 1), (1,), (1, 1, 1), network=network, links=links)
    for number in range(3):
        part = host_cluster(on, number)
        outward = part.devices[0].outward
        assert outward is not None and outward[:3] == (1e9, 1e9, 1e-6)
        assert outward.delays == ((100e3, pytest.approx(1.899e-3)), (1e6, pytest.approx(2.999e-3)))
        assert part.fabric.by_size == () and part.fingerprint != host_cluster(plain, number).fingerprint
    possible = mlp(batch=256, width=64)
    slower, quick = (plan_mesh(possible, spec, effort="quick").predicted.sums_s for spec in (on, plain))
    assert slower > 2 * quick


def test_a_link_s_own_latency_is_what_sums_over_hosts_take() -> None:
    """As on one axis: it stands in the place of the networks' latencies."""
    both = ", ".join(f"{{from: host{i}, to: host{1 - i}, latency: 7us}}" for i in (0, 1))
    (device, *_) = host_cluster(cluster((1,), (1,), latency="5ms", links=f"links: [{both}]"), 0).devices
    assert device.outward is not None and device.outward.latency_s == 7e-6


def test_many_small_sums_take_no_less_than_the_bound_says() -> None:
    """Of four bytes on three hosts 16 / 3 go out; a hundred of them are not rounded one by one."""
    shape, hosts = (), 3
    nodes = [node(f"s{i}", HOSTS_SUM, [Value(f"g{i}"), i, hosts, 1], shape) for i in range(100)]
    graph = loose(*(source(f"g{i}", shape) for i in range(100)), *nodes)
    network = Duplex(1.0, 1.0, 0.0)
    on = replace(cluster((1,), launch="0s").devices[0], outward=network)
    for batches in (1, 3):
        calls = Calls(graph, Batches(batches, {Value(n.name): torch.float32 for n in nodes} if batches > 1 else {}))
        found = sum(parts_seconds(calls.parts(n.name, Strategy((REPLICATE,), (REPLICATE,))), 1.0, on) for n in nodes)
        assert found == pytest.approx(outward_bytes(400, hosts, 1) / batches)
