"""The bound by cases: its boxes hold all batch sizes, their prices are below what is paid, it is below all plans."""

import itertools
import random

import numpy as np
import pytest

from hap.cluster import ClusterSpec
from hap.cost_models.collective import collective_seconds
from hap.cost_models.evaluate import evaluate
from hap.placement import Shard
from hap.search.bound import best_weights, make_bound
from hap.search.boxes import Box, Boxes, _crossing, _dealt
from hap.search.cases import _Cases, bound_by_cases, find_batch
from hap.search.prices import Facts
from hap.search.relaxation import Relaxation, lower_bound
from hap.search.rounding import round_shares
from tests.search.models import cluster, mlp
from tests.search.test_bound import random_strategies

HOST = """
  - name: {0}
    devices: [{{name: {1}, count: {2}, tflops: {{float32: {3}}}, memory: 16GB, memory_bandwidth: 500GB/s}}]
    link: {{bandwidth: 20GB/s, latency: 1us}}
    network: {{bandwidth: {4}, latency: 1us}}"""


def hosts(*kinds: tuple[str, int, float, str]) -> ClusterSpec:
    """One host each: (device, how many, TFLOP/s, network)."""
    return ClusterSpec.from_yaml("name: test\nhosts:" + "".join(HOST.format(f"h{i}", *k) for i, k in enumerate(kinds)))


MIXED = hosts(
    ("fast", 2, 4.0, "3GB/s"), ("slow", 2, 1.0, "1GB/s"), ("slow", 2, 1.0, "1GB/s"), ("slow", 2, 1.0, "1GB/s")
)


def cases(devices: ClusterSpec, batch: int = 24) -> _Cases:
    found = mlp(batch=batch, width=16)
    facts = Facts(found.graph, found.strategies, devices, "adamw")
    relaxed = Relaxation(facts, best_weights(make_bound(facts)), crowded=False)
    group = find_batch(facts)
    assert group is not None and group[1] == batch
    return _Cases(relaxed, Boxes(facts, relaxed, *group))


def test_alike_hosts_are_the_one_with_most_of_the_batch_and_the_others() -> None:
    parts = cases(MIXED).parts
    assert [(p.device.name.split("/")[1][:4], p.most, p.ranks, p.hosts) for p in parts] == [
        ("fast", True, 2, 1),
        ("slow", True, 2, 1),
        ("slow", False, 4, 2),
    ]


def test_every_vector_of_sizes_stays_in_one_of_the_halves() -> None:
    """All ways to deal 24 samples to the fast host, the slow host with most and the two others."""
    search = cases(MIXED)
    vectors = [
        (a, b, 24 - a - b)
        for a, b in itertools.product(range(25), repeat=2)
        if 0 <= 24 - a - b <= 2 * b  # the two others have no more than the first, each
    ]
    boxes = [search.boxes.everything]
    for _ in range(20):
        boxes = [half for box in boxes for half in (search.halves(box) or [box])]
        for vector in vectors:
            held = [all(low <= x <= high for low, x, high in zip(b.low, vector, b.high, strict=True)) for b in boxes]
            assert sum(held) == 1


def test_what_is_left_goes_where_it_costs_least() -> None:
    """Against all vectors in steps of a tenth."""
    low, high = np.array([0.1, 0.0, 0.2]), np.array([0.5, 0.6, 0.4])
    rng = np.random.default_rng(0)
    slopes = rng.random((20, 3))
    at = _dealt(slopes, low, high)
    assert np.allclose(at.sum(axis=1), 1.0) and (at >= low - 1e-12).all() and (at <= high + 1e-12).all()
    grid = [np.array([a, b, 10 - a - b]) / 10 for a in range(1, 6) for b in range(7) if 2 <= 10 - a - b <= 4]
    for slope, best in zip(slopes, at, strict=True):
        assert slope @ best == pytest.approx(min(float(slope @ g) for g in grid))


def test_an_all_to_all_between_halves_by_hand() -> None:
    """A host with half the batch, both ways at 2 bytes/s: with half of the other group a quarter goes out of it."""
    assert _crossing(0.5, 2.0, 2.0) == pytest.approx(0.25 / 2)
    assert _crossing(1.0, 2.0, 2.0) == _crossing(0.0, 2.0, 2.0) == 0.0


def test_no_shares_of_another_group_make_an_all_to_all_cheaper() -> None:
    search, rng, nbytes = cases(MIXED), random.Random(1), 1 << 24
    one, other = Shard(0, 1, 24, 1, "one"), Shard(1, 1, 24, 1, "other")
    for _ in range(60):
        rho = round_shares([rng.random() ** 3 + 1e-3 for _ in range(8)], 24)
        sigma = round_shares([rng.random() ** 3 + 1e-3 for _ in range(8)], 24)
        slow = sorted((sum(rho[i : i + 2]) for i in (2, 4, 6)), reverse=True)
        at = (sum(rho[:2]), slow[0], slow[1] + slow[2])
        least = search.boxes.crossing_s(Box(at, at)) * nbytes
        for sizes in ({"one": rho, "other": sigma}, {"one": rho, "other": rho}):
            for source, target in ((one, other), (other, one)):
                seconds = collective_seconds("all_to_all", "direct", nbytes, source, target, sizes, MIXED)
                assert least <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_below_random_plans(seed: int) -> None:
    rng = random.Random(seed)
    network = rng.choice(["0.1GB/s", "1GB/s", "10GB/s"])
    kinds = [("a", rng.randint(1, 2), rng.choice([0.1, 1.0]), network)] + [("b", 1, 0.2, network)] * rng.randint(1, 2)
    found, devices = mlp(batch=8, width=8), hosts(*kinds)
    facts = Facts(found.graph, found.strategies, devices, "adamw")
    base = lower_bound(facts)
    assert base is not None
    bound_s = bound_by_cases(facts, base.seconds, float("inf"))
    assert bound_s >= base.seconds
    for _ in range(40):
        strategies = random_strategies(found, rng)
        ratios = [rng.random() * rng.choice([0, 1, 1]) + 1e-3 for _ in devices.devices]
        sizes = {name: round_shares(ratios, g.n) for name, g in found.groups.items()}
        assert bound_s <= evaluate(found.graph, strategies, sizes, devices).step_s


def test_whole_samples_count() -> None:
    """Three samples on two equal devices that compute slowly: one has two of them, 4/3 of what halves would take."""
    found, devices = mlp(batch=3, width=1024), cluster((0.01, "16GB"), (0.01, "16GB"), network="100GB/s")
    batch = find_batch(Facts(found.graph, found.strategies, devices, "adamw"))
    assert batch is not None
    only = {
        name: tuple(
            s for s in options if all(p.group == batch[0] for p in (*s.inputs, *s.outputs) if isinstance(p, Shard))
        )
        for name, options in found.strategies.items()
    }
    facts = Facts(found.graph, only, devices, "adamw")
    base = lower_bound(facts)
    assert base is not None
    bound_s = bound_by_cases(facts, base.seconds, float("inf"))
    assert bound_s / base.seconds == pytest.approx(4 / 3, rel=0.08)


def test_no_more_than_enough_is_looked_for() -> None:
    found, devices = mlp(batch=8, width=8), cluster((1, "1GB"), (2, "1GB"))
    facts = Facts(found.graph, found.strategies, devices, "adamw")
    assert bound_by_cases(facts, 1.0, 0.5) == 1.0
