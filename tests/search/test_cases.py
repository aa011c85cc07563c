"""The bound by cases: its boxes hold all batch sizes, their prices are below what is paid, it is below all plans."""

import itertools
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from hap.cluster import ClusterSpec
from hap.cost_models.collective import collective_seconds
from hap.cost_models.compute import parts_seconds
from hap.cost_models.evaluate import evaluate
from hap.placement import Shard, Sizes
from hap.rules.choices import Choices
from hap.search import plan_graph
from hap.search.boxes import Boxes, _dealt
from hap.search.cases import BOXES, Cases, _Bounds, find_batch, find_boxed, find_main
from hap.search.crossing import Box, Fractions, crossing_s, of_host
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

SLOW = """
name: slow
hosts:
  - name: a
    devices: [{name: d, count: 2, tflops: {float32: 0.000000001}, memory: 16GB, memory_bandwidth: 100000GB/s}]
    link: {bandwidth: 100000GB/s, latency: 0us}
"""


def hosts(*kinds: tuple[str, int, float, str]) -> ClusterSpec:
    """One host each: (device, how many, TFLOP/s, network)."""
    return ClusterSpec.from_yaml("name: test\nhosts:" + "".join(HOST.format(f"h{i}", *k) for i, k in enumerate(kinds)))


MIXED = hosts(
    ("fast", 2, 4.0, "3GB/s"), ("slow", 2, 1.0, "1GB/s"), ("slow", 2, 1.0, "1GB/s"), ("slow", 2, 1.0, "1GB/s")
)


def cases(devices: ClusterSpec, found: Choices | None = None, *, alone: bool = True) -> _Bounds:
    found = found or mlp(batch=24, width=16)
    facts = Facts(found.graph, found.strategies, devices, "adamw")
    relaxed, batch = relaxation(facts), find_batch(facts)
    assert batch is not None and relaxed.seconds is not None
    shared = find_boxed(facts, relaxed.fine)
    others = [] if alone else [(g, shared[g]) for g in find_main(facts, shared) if g != batch[0]]
    return _Bounds(Boxes(facts, relaxed, (batch, *others)))


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
    boxes, search.often = [search.boxes.everything], np.random.default_rng(0).random(len(search.often))
    for _ in range(8):
        boxes = [half for box in boxes for half in (search.halves(box, search.points[0]) or [box])]
    for vector in own:
        held = [all(low <= x <= high for low, x, high in zip(b.low[0], vector, b.high[0], strict=True)) for b in boxes]
        assert sum(held) == 1


def test_every_pair_of_vectors_stays_in_one_of_the_halves() -> None:
    """Of two groups on two devices, each with all that it may have."""
    search = cases(cluster((2, "16GB"), (1, "16GB")), mixer(4, 4, 64), alone=False)
    assert len(search.boxes.groups) >= 2
    boxes, rng = [search.boxes.everything], np.random.default_rng(0)
    for _ in range(7):
        point = search.points[0]._replace(times=rng.random(len(search.often)))
        boxes = [half for box in boxes for half in (search.halves(box, point) or [box])]
    assert len({box.low[0] for box in boxes}) > 1 and len({box.low[1] for box in boxes}) > 1
    for _ in range(2_000):
        vectors, held = [int(rng.integers(n + 1)) for n in search.boxes.atoms], 0
        for low, high in boxes:
            pairs = zip(low, high, vectors, search.boxes.atoms, strict=True)
            held += all(a[0] <= x <= b[0] and a[1] <= n - x <= b[1] for a, b, x, n in pairs)
        assert held == 1


def test_boxes_are_split_along_the_part_that_has_most_to_do() -> None:
    search = cases(MIXED, mixer(12, 4, 8))
    box, width = search.boxes.everything, search.boxes.whole.copy()
    search.boxes.whole = width * np.array([1.0, 0.0, 0.0])
    first, second = search.halves(box, search.points[0])
    assert first.high[0][0] < box.high[0][0] and second.low[0][0] == first.high[0][0] + 1
    search.boxes.whole = 0 * width
    assert search.halves(box, search.points[0]) == []


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
    """A host with half the batch, both ways at 2 bytes/s: with half of the other group a quarter goes out of it. With
    all of the batch and at most 3/4 of the other group, a quarter; with 3/4 to all of both, nothing need."""
    anything = (0.0, 1.0)
    assert of_host((0.5, 0.5), anything, 2.0, 2.0) == pytest.approx(0.25 / 2)
    assert of_host((1.0, 1.0), anything, 2.0, 2.0) == of_host((0.0, 0.0), anything, 2.0, 2.0) == 0.0
    assert of_host((1.0, 1.0), (0.0, 0.75), 2.0, 1.0) == pytest.approx(0.25 / 2)
    assert of_host((0.75, 1.0), (0.75, 1.0), 2.0, 2.0) == 0.0


def test_no_parts_of_a_host_in_a_box_take_less() -> None:
    """Against a grid of parts, at unlike speeds both ways."""
    rng = random.Random(0)
    for _ in range(200):
        x, y = (tuple(sorted((rng.random(), rng.random()))) for _ in range(2))
        up, down = rng.uniform(0.5, 4), rng.uniform(0.5, 4)
        grid = itertools.product(np.linspace(*x, 40), np.linspace(*y, 40))
        best = min(max(a * (1 - b) / up, (1 - a) * b / down) for a, b in grid)
        least = of_host((x[0], x[1]), (y[0], y[1]), up, down)
        assert least <= best + 1e-12 and best - least < 0.05


@pytest.mark.parametrize("width", [0.0, 0.2])
def test_no_shares_make_an_all_to_all_cheaper(width: float) -> None:
    """Where the box says what hosts have of one group, of the other, or of both, to a point or within a range."""
    search, rng, nbytes = cases(MIXED), random.Random(1), 1 << 24
    one, other = Shard(0, 1, 24, 1, "one"), Shard(1, 1, 24, 1, "other")
    free, hosts_of = Fractions(np.zeros(3), np.ones(3)), search.boxes.hosts
    raised = 0
    for _ in range(60):
        rho = round_shares([rng.random() ** 3 + 1e-3 for _ in range(8)], 24)
        sigma = round_shares([rng.random() ** 3 + 1e-3 for _ in range(8)], 24)
        for mine, theirs in ((rho, sigma), (rho, rho)):
            at, there = (around(np.array(totals(sizes, rho)) / 24, width) for sizes in (mine, theirs))
            sizes = {"one": mine, "other": theirs}
            seconds = collective_seconds("all_to_all", "direct", nbytes, one, other, sizes, MIXED)
            known = [
                crossing_s(search.boxes.ports, *pair, hosts_of) for pair in ((at, free), (free, there), (at, there))
            ]
            assert max(known) * nbytes <= seconds * (1 + 1e-9)
            assert known[2] >= max(known[:2]) * (1 - 1e-9)
            raised += known[2] > 1.2 * max(known[:2])
        both = crossing_s(search.boxes.ports, at, at, hosts_of)
        sizes = {"one": rho}
        itself = Shard(1, 1, 24, 1, "one")
        assert both * nbytes <= collective_seconds("all_to_all", "direct", nbytes, one, itself, sizes, MIXED) * (
            1 + 1e-9
        )
    assert raised > 10


def around(at: np.ndarray, width: float) -> Fractions:
    return Fractions(np.maximum(at - width, 0.0), np.minimum(at + width, 1.0))


def totals(sizes: Sizes, batch: Sizes) -> tuple[int, ...]:
    """What the parts of ``MIXED`` hold of a group: the fast host, the slow one with most of the batch, the others."""
    fast, *slow = (sum(sizes[i : i + 2]) for i in (0, 2, 4, 6))
    most = max(range(3), key=lambda h: sum(batch[2 + 2 * h : 4 + 2 * h]))
    return fast, slow[most], sum(slow) - slow[most]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 6))])
def test_the_bound_of_a_point_is_below_random_plans_of_these_sizes(seed: int, alone: bool) -> None:
    """Of the groups with boxes the parts have exactly what the plan gives them; others have sizes of their own. And
    below the plan whose strategies are the best for these sizes."""
    rng = random.Random(seed)
    found = mixer(6, 4, rng.choice([8, 64]))
    search = cases(MIXED, found, alone=alone)
    names = [name for name, _ in search.boxes.groups]
    assert alone or len(names) > 1
    for _ in range(4):
        sizes = {g: round_shares([rng.random() ** 4 for _ in range(8)], group.n) for g, group in found.groups.items()}
        at = tuple(totals(sizes[name], sizes[names[0]]) for name in names)
        bound_s, _ = search.bound_s(Box(at, at), 0.0, float("inf"))
        assert 0 < bound_s <= plan_graph(found, MIXED, pins=Pins(sizes=sizes)).predicted.step_s
        for _ in range(20):
            strategies = random_strategies(found, rng)
            assert bound_s <= evaluate(found.graph, strategies, sizes, MIXED).step_s


@pytest.mark.parametrize("alone", [True, False])
def test_no_call_costs_more_than_the_chosen_ranks_take_for_it(alone: bool) -> None:
    """Whatever group has most on which rank of a part, in stages of whichever group that call may be."""
    rng, found = random.Random(0), mixer(6, 4, 8)
    boxes = cases(MIXED, found, alone=alone).boxes
    names, chained, compared = [name for name, _ in boxes.groups], boxes._chained(), 0
    for _ in range(30):
        sizes = {g: round_shares([rng.random() ** 4 for _ in range(8)], group.n) for g, group in found.groups.items()}
        at = tuple(totals(sizes[name], sizes[names[0]]) for name in names)
        box = Box(at, at)
        groups = (*boxes.restricted(box), boxes.other)
        one = [rng.random() ** 3 * often for often in (1.0, 0.01) for _ in boxes.parts]
        one = np.array(one) * np.repeat([1.0, rng.choice([0.0, 1.0])], len(boxes.parts))
        one /= one @ np.concatenate([np.ones(len(boxes.parts)), boxes.ranks])
        price = boxes.coefficients(box, np.tile(one, boxes.other + 1)) @ np.tile(one, boxes.other + 1)
        for (_, _, name, option), line in zip(boxes.relaxed.options, boxes.line, strict=False):
            how, parts = boxes.how[line], boxes.facts.parts(name, boxes.facts.candidates[name][option])
            if found.graph.by_name[name].is_source or how not in groups[:-1]:
                continue
            n, own = boxes.atoms[how], sizes[names[how]]
            seconds = [parts_seconds(parts, x / n, d) for x, d in zip(own, MIXED.devices, strict=True)]
            for k in [how] if name in chained else groups:
                weights = rank_weights(one, sizes[names[0 if k == boxes.other else k]], sizes[names[0]])
                assert price[line] <= weights @ seconds * (1 + 1e-9)
                compared += 1
    assert compared > 1_000


def rank_weights(one: np.ndarray, sizes: Sizes, batch: Sizes) -> np.ndarray:
    """Of the ranks of ``MIXED``: u of the rank of every part that has most of these sizes, v of all."""
    most = max(range(3), key=lambda h: sum(batch[2 + 2 * h : 4 + 2 * h]))
    slow = [2 + 2 * most, 3 + 2 * most]
    found = np.zeros(8)
    for j, ranks in enumerate(([0, 1], slow, [r for r in range(2, 8) if r not in slow])):
        found[ranks] = one[3 + j]
        found[max(ranks, key=lambda r: sizes[r])] += one[j]
    return found


@pytest.mark.parametrize("make", [partial(mlp, 3, 3), partial(mixer, 3, 2, 2)])
def test_below_plans_whose_busiest_ranks_differ_from_group_to_group(make: Callable[[], Choices]) -> None:
    """One rank has two of three samples, the other one two of three columns: together no more than three halves of
    each. By a point of sizes, and by all of them."""
    rng, found = random.Random(0), make()
    devices = ClusterSpec.from_yaml(SLOW)
    search = cases(devices, found, alone=False)
    point = tuple((n,) for n in search.boxes.atoms)
    bound_s, _ = search.bound_s(Box(point, point), 0.0, float("inf"))
    every = Cases.of(search.boxes.facts, lower_bound(search.boxes.facts).seconds, alone=False)
    assert every is not None and len(search.boxes.groups) > 1
    bound_s = max(bound_s, every.raised_s(float("inf")))
    for _ in range(4):
        sizes = {g: round_shares(rng.choice([(1.0, 1.2), (1.2, 1.0)]), group.n) for g, group in found.groups.items()}
        assert bound_s <= plan_graph(found, devices, pins=Pins(sizes=sizes), effort="quick").predicted.step_s
    sizes = {
        g: round_shares((1.0, 1.2) if g == search.boxes.groups[0][0] else (1.2, 1.0), group.n)
        for g, group in found.groups.items()
    }
    assert bound_s <= plan_graph(found, devices, pins=Pins(sizes=sizes), effort="quick").predicted.step_s


def test_what_thorough_plans_prove_is_below_the_plan_where_atoms_are_few() -> None:
    p = plan_graph(mlp(3, 3), ClusterSpec.from_yaml(SLOW), effort="thorough").predicted
    assert p.lower_bound_s is not None and p.lower_bound_s <= p.step_s


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 8))])
def test_below_random_plans(seed: int) -> None:
    rng = random.Random(seed)
    network = rng.choice(["0.1GB/s", "1GB/s", "10GB/s"])
    kinds = [("a", rng.randint(1, 2), rng.choice([0.1, 1.0]), network)] + [("b", 1, 0.2, network)] * rng.randint(1, 2)
    found, devices = rng.choice([mlp(batch=8, width=8), mixer(4, 8, 8)]), hosts(*kinds)
    facts = Facts(found.graph, found.strategies, devices, "adamw")
    base = lower_bound(facts)
    assert base is not None
    bound_s = _raised_s(facts, base.seconds, float("inf"))
    every = Cases.of(facts, base.seconds, alone=False)
    assert bound_s >= base.seconds and every is not None
    for _ in range(60):
        before = every.bound_s
        if not every.step(float("inf")):
            break
        assert every.bound_s >= before
    for _ in range(40):
        strategies = random_strategies(found, rng)
        sizes = {name: round_shares(_ratios(rng, devices), g.n) for name, g in found.groups.items()}
        assert max(bound_s, every.bound_s) <= evaluate(found.graph, strategies, sizes, devices).step_s


def test_where_the_batch_lies_together_other_groups_are_split() -> None:
    """On one of two devices lies the whole batch: dealt out by positions a mixer could still use both, and exchanges
    with the batch would be free only if the positions lay there, too."""
    found, devices = mixer(2, 64, 512), cluster((1, "16GB"), (1, "16GB"), network="1GB/s")
    facts = Facts(found.graph, found.strategies, devices, "adamw")
    known_s = lower_bound(facts).seconds
    step_s = plan_graph(found, devices).predicted.step_s
    alone, every = (Cases.of(facts, known_s, alone=alone) for alone in (True, False))
    assert alone is not None and every is not None
    for one in (alone, every):
        for _ in range(200):
            if not one.step(step_s):
                break
    assert alone.bound_s < every.bound_s <= step_s


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
    bound_s = _raised_s(facts, base.seconds, float("inf"))
    assert bound_s / base.seconds == pytest.approx(4 / 3, rel=0.08)


def test_no_more_than_enough_is_looked_for() -> None:
    found, devices = mlp(batch=8, width=8), cluster((1, "1GB"), (2, "1GB"))
    facts = Facts(found.graph, found.strategies, devices, "adamw")
    assert _raised_s(facts, 1.0, 0.5) == 1.0


def test_boxes_are_looked_at_once_for_whatever_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    found, devices = mlp(batch=64, width=64), hosts(("a", 2, 1.0, "0.1GB/s"), ("b", 1, 0.2, "0.1GB/s"))
    facts = Facts(found.graph, found.strategies, devices, "adamw")
    known_s, seen = lower_bound(facts).seconds, list[Box]()
    solve = _Bounds.bound_s

    def counted(bounds: _Bounds, box: Box, known_s: float, enough_s: float) -> object:
        seen.append(box)
        return solve(bounds, box, known_s, enough_s)

    monkeypatch.setattr(_Bounds, "bound_s", counted)
    cases = Cases.of(facts, known_s, alone=True)
    assert cases is not None
    near_s = cases.raised_s(known_s * 1.03)
    first = len(seen)
    assert first and cases.raised_s(known_s * 1.02) == near_s and len(seen) == first
    far_s = cases.raised_s(float("inf"))
    assert far_s > near_s and len(seen) > first
    assert len(set(seen)) == len(seen) <= BOXES


def _ratios(rng: random.Random, devices: ClusterSpec) -> list[float]:
    return [rng.random() * rng.choice([0, 1, 1]) + 1e-3 for _ in devices.devices]


def test_groups_of_single_layers_have_no_boxes() -> None:
    """Twelve alike layers: the middle ones are of one type, and what is inside of each is a group of its own."""
    found = mlp(batch=8, width=8, layers=12)
    facts = Facts(found.graph, found.strategies, cluster((10, "16GB"), (5, "16GB")), "adamw")
    relaxed, batch = relaxation(facts), find_batch(facts)
    assert batch is not None and batch[0] in find_boxed(relaxed.facts, relaxed.fine)
    assert 0 < len(find_boxed(relaxed.facts, relaxed.fine)) < len(found.groups)


def _raised_s(facts: Facts, known_s: float, enough_s: float) -> float:
    """By cases of the batch."""
    cases = Cases.of(facts, known_s, alone=True)
    assert cases is not None
    return cases.raised_s(enough_s)
