"""The bound by cases: its boxes hold all batch sizes, their prices are below what is paid, it is below all plans."""

import itertools
import random

import numpy as np
import pytest

from hap.cluster import ClusterSpec
from hap.cost_models.collective import collective_seconds
from hap.cost_models.evaluate import evaluate
from hap.placement import Shard, Sizes
from hap.rules.choices import Choices
from hap.search import plan_graph
from hap.search.boxes import Boxes, _dealt
from hap.search.cases import _Cases, bound_by_cases, find_batch, find_shared
from hap.search.crossing import Box, crossing_s, whatever
from hap.search.pins import Pins
from hap.search.prices import Facts
from hap.search.relaxation import lower_bound, relaxation
from hap.search.rounding import round_shares
from tests.search.models import cluster, mixer, mlp
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


def cases(devices: ClusterSpec, found: Choices | None = None) -> _Cases:
    found = found or mlp(batch=24, width=16)
    facts = Facts(found.graph, found.strategies, devices, "adamw")
    relaxed, batch = relaxation(facts), find_batch(facts)
    assert batch is not None
    return _Cases(Boxes(facts, relaxed, batch), relaxed.solver)


def test_alike_hosts_are_the_one_with_most_of_the_batch_and_the_others() -> None:
    parts = cases(MIXED).parts
    assert [(p.device.name.split("/")[1][:4], p.most, p.ranks, p.hosts) for p in parts] == [
        ("fast", True, 2, 1),
        ("slow", True, 2, 1),
        ("slow", False, 4, 2),
    ]


def test_every_vector_of_sizes_stays_in_one_of_the_halves() -> None:
    """All ways to deal 12 samples to the fast host, the slow host with most and the two others."""
    search = cases(MIXED, mixer(12, 4, 8))
    own = [
        (a, b, 12 - a - b)
        for a, b in itertools.product(range(13), repeat=2)
        if 0 <= 12 - a - b <= 2 * b  # the two others have no more than the first, each
    ]
    boxes, search.spent = [search.boxes.everything], np.random.default_rng(0).random(3)
    for _ in range(8):
        boxes = [half for box in boxes for half in (search.halves(box) or [box])]
    for vector in own:
        held = [all(low <= x <= high for low, x, high in zip(b.low, vector, b.high, strict=True)) for b in boxes]
        assert sum(held) == 1


def test_boxes_are_split_along_the_part_that_has_most_to_do() -> None:
    search = cases(MIXED, mixer(12, 4, 8))
    box = search.boxes.everything
    search.spent = np.array([1.0, 0.5, 0.5])
    first, second = search.halves(box)
    assert first.high[0] < box.high[0] and second.low[0] == first.high[0] + 1
    search.spent = np.zeros(3)
    assert search.halves(box) == []


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
    assert whatever(0.5, 2.0, 2.0) == pytest.approx(0.25 / 2)
    assert whatever(1.0, 2.0, 2.0) == whatever(0.0, 2.0, 2.0) == 0.0


def test_no_shares_of_another_group_make_an_all_to_all_cheaper() -> None:
    search, rng, nbytes = cases(MIXED), random.Random(1), 1 << 24
    one, other = Shard(0, 1, 24, 1, "one"), Shard(1, 1, 24, 1, "other")
    for _ in range(60):
        rho = round_shares([rng.random() ** 3 + 1e-3 for _ in range(8)], 24)
        sigma = round_shares([rng.random() ** 3 + 1e-3 for _ in range(8)], 24)
        for sizes in ({"one": rho, "other": sigma}, {"one": rho, "other": rho}):
            at = np.array(totals(sizes["one"], rho)) / 24
            least_s = crossing_s(search.boxes.ports, at, at) * nbytes
            for source, target in ((one, other), (other, one)):
                seconds = collective_seconds("all_to_all", "direct", nbytes, source, target, sizes, MIXED)
                assert least_s <= seconds * (1 + 1e-9)


def totals(sizes: Sizes, batch: Sizes) -> tuple[int, ...]:
    """What the parts of ``MIXED`` hold of a group: the fast host, the slow one with most of the batch, the others."""
    fast, *slow = (sum(sizes[i : i + 2]) for i in (0, 2, 4, 6))
    most = max(range(3), key=lambda h: sum(batch[2 + 2 * h : 4 + 2 * h]))
    return fast, slow[most], sum(slow) - slow[most]


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_of_a_point_is_below_random_plans_of_these_sizes(seed: int) -> None:
    """Of the batch the parts have exactly what the plan gives them; other groups have sizes of their own. And below the
    plan whose strategies are the best for these sizes."""
    rng = random.Random(seed)
    found = mixer(6, 4, rng.choice([8, 64]))
    search = cases(MIXED, found)
    batch = search.boxes.group
    for _ in range(4):
        sizes = {g: round_shares([rng.random() ** 4 for _ in range(8)], group.n) for g, group in found.groups.items()}
        at = totals(sizes[batch], sizes[batch])
        bound_s = search.bound_s(Box(at, at), 0.0, float("inf"))
        assert 0 < bound_s <= plan_graph(found, MIXED, pins=Pins(sizes=sizes)).predicted.step_s
        for _ in range(20):
            strategies = random_strategies(found, rng)
            assert bound_s <= evaluate(found.graph, strategies, sizes, MIXED).step_s


@pytest.mark.parametrize("seed", range(8))
def test_below_random_plans(seed: int) -> None:
    rng = random.Random(seed)
    network = rng.choice(["0.1GB/s", "1GB/s", "10GB/s"])
    kinds = [("a", rng.randint(1, 2), rng.choice([0.1, 1.0]), network)] + [("b", 1, 0.2, network)] * rng.randint(1, 2)
    found, devices = rng.choice([mlp(batch=8, width=8), mixer(4, 8, 8)]), hosts(*kinds)
    facts = Facts(found.graph, found.strategies, devices, "adamw")
    base = lower_bound(facts)
    assert base is not None
    bound_s = bound_by_cases(facts, base.seconds, float("inf"))
    assert bound_s >= base.seconds
    for _ in range(40):
        strategies = random_strategies(found, rng)
        sizes = {name: round_shares(_ratios(rng, devices), g.n) for name, g in found.groups.items()}
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


def _ratios(rng: random.Random, devices: ClusterSpec) -> list[float]:
    return [rng.random() * rng.choice([0, 1, 1]) + 1e-3 for _ in devices.devices]


def test_groups_of_single_layers_have_no_boxes() -> None:
    """Twelve alike layers: the middle ones are of one type, and what is inside of each is a group of its own."""
    found = mlp(batch=8, width=8, layers=12)
    facts = Facts(found.graph, found.strategies, cluster((10, "16GB"), (5, "16GB")), "adamw")
    relaxed, batch = relaxation(facts), find_batch(facts)
    assert batch is not None and batch[0] in find_shared(relaxed.facts, relaxed.fine)
    assert 0 < len(find_shared(relaxed.facts, relaxed.fine)) < len(found.groups)
