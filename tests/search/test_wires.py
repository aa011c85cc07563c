"""Many collectives priced at once cost what each costs alone: the fastest of its decompositions."""

import numpy as np
import pytest

from hap.cluster import ClusterSpec
from hap.cost_models.collective import best_decomposition, candidates, collective_seconds
from hap.cost_models.fold import FoldedCluster
from hap.placement import PARTIAL, REPLICATE, Placement, Shard
from hap.search import wires
from hap.search.wires import Wanted, Wires

HOSTS = """
name: three hosts
backend: {backend}
hosts:
  - {{name: a, devices: [{{gpu: A100-40GB, count: 2}}], link: nvlink, network: {{bandwidth: 100Gbit/s, latency: 20us}}}}
  - {{name: b, devices: [{{gpu: V100-16GB, count: 2}}], link: nvlink, network: {{bandwidth: 25Gbit/s, latency: 30us}}}}
  - {{name: c, devices: [{{gpu: T4, count: 2}}], link: pcie3, network: {{bandwidth: 10Gbit/s, latency: 50us}}}}
"""
BATCH, HEADS, MIDDLE = Shard(0, 1, 12, 1, "batch"), Shard(2, 1, 8, 4, "heads"), Shard(0, 1, 24, 1, "middle")
SIZES = {"batch": (4, 3, 2, 2, 1, 0), "heads": (2, 2, 2, 1, 1, 0), "middle": (9, 9, 2, 2, 1, 1)}
CURVED = HOSTS.replace("latency: 30us}}", "latency: 30us, curve: {{1MB: 2GB/s, 100kB: 1GB/s}}}}")
AMOUNTS = np.array([0.0, 4096.0, 1e6])
KINDS: list[tuple[str, list[tuple[Placement, Placement]]]] = [
    ("all_gather", [(BATCH, REPLICATE), (HEADS, REPLICATE)]),
    ("reduce_scatter", [(PARTIAL, HEADS), (PARTIAL, MIDDLE)]),
    ("all_reduce", [(PARTIAL, REPLICATE)]),
    ("all_to_all", [(BATCH, HEADS), (HEADS, MIDDLE), (BATCH, MIDDLE), (MIDDLE, BATCH)]),
]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("hosts", [HOSTS, CURVED])
@pytest.mark.parametrize(("kind", "pairs"), KINDS)
def test_many_at_once(kind, pairs, backend, hosts, folded) -> None:  # type: ignore[no-untyped-def]
    """Of ends and sizes of many sorts, one of them empty."""
    spec = ClusterSpec.from_yaml(hosts.format(backend=backend))
    cluster = FoldedCluster(spec, (0, 1, 2, 2, 3, 4)) if folded else spec
    sizes = cluster.take(SIZES) if isinstance(cluster, FoldedCluster) else SIZES
    found = Wires(cluster).best_of_many(kind, [Wanted(AMOUNTS, *pair) for pair in pairs], sizes)
    for (source, target), seconds in zip(pairs, found, strict=True):
        alone = [
            min(
                collective_seconds(kind, name, int(nbytes), source, target, sizes, cluster)
                for name in candidates(kind, cluster)
            )
            for nbytes in AMOUNTS
        ]
        assert seconds == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("hosts", [HOSTS, CURVED])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(("kind", "pairs"), KINDS[:3])
def test_of_any_size(kind, pairs, backend, hosts) -> None:  # type: ignore[no-untyped-def]
    """However many sizes are asked about, each costs what it costs alone: NCCL goes over to another algorithm or
    protocol, a pipeline to another segment, a link to another delay, somewhere between two of them."""
    cluster = ClusterSpec.from_yaml(hosts.format(backend=backend))
    amounts = np.unique(np.geomspace(1e3, 1e8, 40).round())
    found = Wires(cluster).best_of_many(kind, [Wanted(amounts, *pair) for pair in pairs], SIZES)
    for pair, seconds in zip(pairs, found, strict=True):
        alone = [best_decomposition(kind, int(nbytes), *pair, SIZES, cluster)[1] for nbytes in amounts]
        assert seconds == pytest.approx(alone, rel=1e-9)


def test_plainly() -> None:
    """In its plainest form a gather is padded: of 12 atoms the longest piece has 4, so 6 x 4 / 12 times the value goes
    round, whoever holds it, and other forms only make it shorter."""
    cluster = ClusterSpec.from_yaml(HOSTS.format(backend="nccl"))
    wanted = [Wanted(AMOUNTS, BATCH, REPLICATE)]
    (plain,), (best,) = (Wires(cluster, only).best_of_many("all_gather", wanted, SIZES) for only in (True, False))
    padded = [collective_seconds("all_gather", "padded", int(b), BATCH, REPLICATE, SIZES, cluster) for b in AMOUNTS]
    assert plain == pytest.approx(padded, rel=1e-9) and (best <= plain).all() and best[2] < plain[2]


def test_all_store_as_much_where_the_solver_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ClusterSpec.from_yaml(HOSTS.format(backend="nccl"))
    monkeypatch.setattr(wires, "solve_once", lambda program: None)
    assert Wires(cluster).cheapest_shares(1 << 20) == pytest.approx([1 / 6] * 6)
