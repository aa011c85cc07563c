"""A folded cluster costs what the whole one does: ranks that are alike and hold alike are asked about once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hap.cluster import ClusterSpec
from hap.conversion import find_needs
from hap.cost_models.collective import candidates, collective_seconds
from hap.cost_models.compute import Calls
from hap.cost_models.evaluate import Evaluator
from hap.cost_models.fold import FoldedCluster, fold
from hap.cost_models.memory import memory_use
from hap.placement import PARTIAL, REPLICATE, Placement, Shard
from hap.search.rounding import round_shares
from tests.search.models import mlp

HOSTS = """
  - {name: a, devices: [{gpu: A100-40GB, count: 40}], link: nvlink, network: {bandwidth: 100Gbit/s, latency: 20us}}
  - {name: b, devices: [{gpu: T4, count: 20}], link: pcie3, network: {up: 10Gbit/s, down: 20Gbit/s, latency: 50us}}
  - {name: c, devices: [{gpu: T4, count: 20}], link: pcie3, network: {up: 10Gbit/s, down: 20Gbit/s, latency: 50us}}
"""
CLUSTER = ClusterSpec.from_yaml(f"backend: nccl\nhosts:{HOSTS}")
ROWS, COLUMNS = Shard(0, 1, 160, 1, "rows"), Shard(1, 1, 96, 2, "columns")
SIZES = {"rows": (3,) * 40 + (1,) * 40, "columns": (2,) * 40 + (1,) * 16 + (0,) * 24}


def folded() -> FoldedCluster:
    found = fold(CLUSTER, SIZES.values())
    assert found is not None
    return found


def test_ranks_that_compute_alike_and_hold_alike_are_one_class() -> None:
    assert folded().of == (0,) * 40 + (1,) * 16 + (2,) * 24
    assert folded().take(SIZES) == {"rows": (3, 1, 1), "columns": (2, 1, 0)}
    assert folded().spread("xyz") == ("x",) * 40 + ("y",) * 16 + ("z",) * 24


def test_ports_that_carry_alike_are_one_row() -> None:
    """In and out of a device of each class (and of the first and last of a host, which pass on round the ring), and the
    two ways of every host's network."""
    assert len(CLUSTER.fabric.ports) == 2 * 80 + 2 * 3
    assert len(folded().fabric.rates) < 30
    assert folded().fabric.world_size == 80 and folded().world_size == 3


def test_few_ranks_are_not_folded() -> None:
    few = ClusterSpec.from_yaml("hosts: [{name: a, devices: [{gpu: T4, count: 64}], link: pcie3}]")
    assert fold(few) is None


@pytest.mark.parametrize(
    ("kind", "source", "target"),
    [
        ("all_gather", COLUMNS, REPLICATE),
        ("all_reduce", PARTIAL, REPLICATE),
        ("reduce_scatter", PARTIAL, COLUMNS),
        ("all_to_all", ROWS, COLUMNS),
        ("all_to_all", Shard(0, 1, 96, 2, "columns"), Shard(0, 1, 160, 1, "rows")),
        ("slice", REPLICATE, COLUMNS),
    ],
)
def test_every_collective_takes_as_long(kind: str, source: Placement, target: Placement) -> None:
    found = folded()
    for name in candidates(kind, CLUSTER):  # type: ignore[arg-type]
        whole = collective_seconds(kind, name, 10**8, source, target, SIZES, CLUSTER)  # type: ignore[arg-type]
        here = collective_seconds(kind, name, 10**8, source, target, found.take(SIZES), found)  # type: ignore[arg-type]
        assert here == pytest.approx(whole, rel=1e-12), name


def test_alike_devices_in_one_class_still_count_as_many() -> None:
    """One kind of GPU, one class: N ranks all the same."""
    alike = ClusterSpec.from_yaml("hosts: [{name: a, devices: [{gpu: T4, count: 80}], link: pcie3}]")
    found = fold(alike)
    assert found is not None and found.world_size == 1
    whole = collective_seconds("all_reduce", "ring", 10**8, PARTIAL, REPLICATE, {}, alike)
    assert whole > 0
    assert collective_seconds("all_reduce", "ring", 10**8, PARTIAL, REPLICATE, {}, found) == pytest.approx(whole)


def test_a_whole_step_costs_the_same() -> None:
    """Random strategies and sizes: seconds of every rank and bytes at its peak, against the cluster not folded."""
    found, rng = mlp(batch=160, width=160), random.Random(3)
    for _ in range(5):
        strategies = {name: rng.choice(options) for name, options in found.strategies.items()}
        strategies = {
            name: s if all(p != PARTIAL for p in s.inputs) else found.strategies[name][0]
            for name, s in strategies.items()
        }
        speed = [rng.choice((1.0, 3.0)) for _ in range(2)]
        sizes = {g.name: round_shares([speed[r >= 40] for r in range(80)], g.n) for g in found.groups.values()}
        needs = find_needs(found.graph, strategies)
        evaluator = Evaluator(found.graph, CLUSTER, "adamw", Calls(found.graph))
        here = evaluator.evaluate(strategies, sizes, needs)
        whole = evaluator._evaluate(evaluator.prepare(strategies, needs), sizes, CLUSTER, evaluator.forms)
        assert here.step_s == pytest.approx(whole.step_s, rel=1e-12)
        assert np.allclose(here.compute_s, whole.compute_s, rtol=1e-12)
        assert here.devices == whole.devices and len(here.devices) == 80
        ways = [c.decomposition for c in whole.conversions]
        ledger = memory_use(found.graph, strategies, sizes, needs, 80, "adamw", decompositions=ways)
        assert here.memory_bytes == ledger.peak_bytes and here.usable_bytes == whole.usable_bytes
