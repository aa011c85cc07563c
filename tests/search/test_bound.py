"""The lower bound is below everything that can be done, and is tight where it should be."""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ortools.math_opt.python import mathopt
from torch import nn

from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.conversion import find_needs
from hap.cost_models.collective import best_decomposition
from hap.cost_models.evaluate import evaluate
from hap.graph import Value
from hap.placement import PARTIAL, REPLICATE, Shard
from hap.plan import Collective, Strategy
from hap.rules.choices import Choices, choices
from hap.search import plan_graph
from hap.search.blocks import find_blocks
from hap.search.bound import Bound, Line, best_weights, device_classes, make_bound, node_line
from hap.search.infeasible import state_bytes
from hap.search.least import Least, _game
from hap.search.milp import GB
from hap.search.prices import Facts
from hap.search.recompute import after_steps, steps_of
from hap.search.relaxation import Relaxation, lower_bound, relaxation
from hap.search.rounding import round_shares
from tests.search.models import cluster, gpt2, mlp, unrolled


def test_two_devices_by_hand() -> None:
    """Speeds 3 and 1; one node of 6 s (on the slow device) that can be split, one of 1 s that cannot.

    Weights proportional to speed (3/4, 1/4): the split node gives min(3/4 * 2, 1/4 * 6) = 1.5 = 6 / (3 + 1), the other
    3/4 / 3 + 1/4 = 0.5. All weight on the slow device gives 0 + 1.
    """
    split, whole = Line((0.0, 0.0), (2.0, 6.0)), Line((1 / 3, 1.0), (0.0, 0.0))
    bound = Bound((((split,), 1), ((whole,), 1)), (1, 1))
    assert bound.seconds((0.75, 0.25)) == pytest.approx(2.0)
    assert bound.seconds((0.0, 1.0)) == pytest.approx(1.0)
    assert bound.seconds(best_weights(bound)) == pytest.approx(2.0)


@pytest.mark.parametrize("make", [partial(gpt2, 3), partial(unrolled, 6), partial(mlp, 8, 16, 3)])
def test_nodes_of_one_class_take_as_long(make: Callable[[], Choices]) -> None:
    """The bound asks one of them, and counts the others."""
    found, devices = make(), cluster((1, "1GB"), (2, "1GB"), memory_bandwidth="1GB/s")
    facts = Facts(found.graph, found.strategies, devices, "adamw")
    kinds, _ = device_classes(devices)
    one_by_one = Counter(
        tuple(dict.fromkeys(node_line(facts, name, s, kinds) for s in options))
        for name, options in found.strategies.items()
    )
    asked = dict(make_bound(facts).menus)
    free = sum(one_by_one[menu] for menu in one_by_one if menu not in asked)
    assert len(asked) > 5 and all(one_by_one[menu] == count for menu, count in asked.items())
    assert free + sum(asked.values()) == len(found.graph.nodes)


def test_below_every_plan_of_a_tiny_model() -> None:
    """Every strategy of every matmul together with several sizes; the other nodes as the search leaves them."""
    found, devices = mlp(batch=4, width=4, layers=1), cluster((1, "1GB"), (2, "1GB"), memory_bandwidth="1GB/s")
    graph = found.graph
    facts = Facts(graph, found.strategies, devices, "adamw")
    bound = lower_bound(facts).seconds
    assert bound > 0
    busy = [n.name for n in graph.nodes if n.op.startswith("aten.mm")]
    least = float("inf")
    for picks in itertools.product(*(found.strategies[name] for name in busy)):
        strategies = {name: options[0] for name, options in found.strategies.items()} | dict(
            zip(busy, picks, strict=True)
        )
        for ratios in ((0, 1), (1, 3), (1, 1), (1, 0)):
            sizes = {name: round_shares(ratios, g.n) for name, g in found.groups.items()}
            try:
                least = min(least, evaluate(graph, strategies, sizes, devices).step_s)
            except AssertionError:  # a partial was asked of a node that does not make one
                continue
    assert bound <= least < float("inf")


def random_strategies(found: Choices, rng: random.Random) -> dict[str, Strategy]:
    """One for every node, such that no partial is asked of a node that does not make one."""
    strategies: dict[str, Strategy] = {}
    made: dict[Value, object] = {}
    for node in found.graph.nodes:
        fitting = [
            s
            for s in found.strategies[node.name]
            if all(p != PARTIAL or made[v] == PARTIAL for v, p in zip(node.inputs, s.inputs, strict=True))
        ]
        strategies[node.name] = rng.choice(fitting)
        made |= {Value(node.name, i): p for i, p in enumerate(strategies[node.name].outputs)}
    return strategies


@pytest.mark.parametrize("seed", range(12))
def test_the_joint_bound_is_below_random_plans(seed: int) -> None:
    """Any strategies that fit together, at any sizes, on links from slow to fast."""
    rng = random.Random(seed)
    network = rng.choice(["100MB/s", "1GB/s", "10GB/s"])
    speeds = [(rng.choice([0.1, 1, 4]), "1GB") for _ in range(rng.randint(2, 4))]
    found, devices = mlp(batch=8, width=8, layers=2), cluster(*speeds, network=network, memory_bandwidth="1GB/s")
    bound = lower_bound(Facts(found.graph, found.strategies, devices, "adamw"))
    assert bound is not None and bound.seconds >= bound.compute_s > 0
    for _ in range(20):
        strategies = random_strategies(found, rng)
        ratios = [rng.random() * rng.choice([0, 1, 1]) + 1e-3 for _ in speeds]
        sizes = {name: round_shares(ratios, g.n) for name, g in found.groups.items()}
        assert bound.seconds <= evaluate(found.graph, strategies, sizes, devices).step_s


@pytest.mark.parametrize("network", ["100MB/s", "10GB/s"])
def test_the_joint_bound_is_below_random_plans_of_steps_in_time(network: str) -> None:
    """Calls of one class read and make different pieces of what is cut into many."""
    rng = random.Random(3)
    found, devices = unrolled(12), cluster((4, "1GB"), (1, "1GB"), network=network, memory_bandwidth="1GB/s")
    bound = lower_bound(Facts(found.graph, found.strategies, devices, "adamw"))
    for _ in range(25):
        strategies = random_strategies(found, rng)
        sizes = {name: round_shares([rng.random(), 1], g.n) for name, g in found.groups.items()}
        assert bound.seconds <= evaluate(found.graph, strategies, sizes, devices).step_s
    plan = plan_graph(found, devices)
    assert bound.seconds <= plan.predicted.step_s < 3 * bound.seconds


@pytest.mark.parametrize("network", ["100MB/s", "10GB/s"])
def test_the_bound_of_many_devices_is_below_random_plans(network: str) -> None:
    """Eighty of two kinds, alike ones asked about once."""
    rng, kinds = random.Random(5), [4, 1]
    speeds = [(kinds[r >= 40], "1GB") for r in range(80)]
    found, devices = mlp(batch=160, width=80, layers=2), cluster(*speeds, network=network, memory_bandwidth="1GB/s")
    bound = lower_bound(Facts(found.graph, found.strategies, devices, "adamw"))
    assert bound is not None and bound.seconds > bound.compute_s > 0
    for _ in range(15):
        strategies = random_strategies(found, rng)
        ratios = [rng.choice([0, 1, 4]) + 1e-3 for _ in range(80)]
        if rng.random() < 0.5:
            ratios = [ratios[r >= 40] for r in range(80)]
        sizes = {name: round_shares(ratios, g.n) for name, g in found.groups.items()}
        assert bound.seconds <= evaluate(found.graph, strategies, sizes, devices).step_s


def test_the_joint_bound_is_near_the_plan_where_batches_are_all_that_counts() -> None:
    """Two equal devices and data parallel: all that the bound leaves out is what updating and launching cost twice."""
    found, devices = mlp(batch=4096, width=512), cluster((10, "16GB"), (10, "16GB"), network="50GB/s")
    plan = plan_graph(found, devices)
    assert plan.predicted.gap is not None and 0 <= plan.predicted.gap < 0.05


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_no_shares_beat_the_least_of_a_collective(kind: Collective) -> None:
    rng = random.Random(7)
    devices = cluster((1, "1GB"), (1, "1GB"), (2, "1GB"), (2, "1GB"), network="3GB/s")
    least = Least(Facts(mlp(4, 4, 1).graph, {}, devices, "adamw"))
    one, other = Shard(0, 1, 100, 1, "a"), Shard(1, 1, 100, 1, "b")
    source = one if kind in ("all_gather", "all_to_all") else PARTIAL
    target = other if kind in ("reduce_scatter", "all_to_all") else REPLICATE
    for nbytes in (100, 5_000, 300_000, 700_000, 30_000_000):
        for _ in range(20):
            sizes = {g: round_shares([rng.random() ** 3 for _ in range(4)], 100) for g in ("a", "b")}
            _, seconds = best_decomposition(kind, nbytes, source, target, sizes, devices)
            assert least.seconds(kind, nbytes) <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_least_of_an_all_reduce_is_what_it_takes(backend: str) -> None:
    """No shares count, so of any size nothing is lost."""
    gpus = "{count: 2, name: g, tflops: {float32: 2}, memory: 8GB, memory_bandwidth: 100GB/s}"
    ways = "link: {bandwidth: 100GB/s, latency: 4us}, network: {bandwidth: 3GB/s, latency: 20us}"
    each = "".join(f"  - {{name: {name}, devices: [{gpus}], {ways}}}\n" for name in "ab")
    devices = ClusterSpec.from_yaml(f"name: two hosts\nbackend: {backend}\nhosts:\n{each}")
    least = Least(Facts(mlp(4, 4, 1).graph, {}, devices, "adamw"))
    for nbytes in map(int, np.geomspace(1e3, 1e8, 40)):
        seconds = best_decomposition("all_reduce", nbytes, PARTIAL, REPLICATE, {}, devices)[1]
        assert least.seconds("all_reduce", nbytes) == pytest.approx(seconds, rel=1e-6)


def test_a_collective_takes_no_less_where_the_solver_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By equal weights of the rows."""
    devices, nbytes = cluster((1, "1GB"), (1, "1GB"), (2, "1GB"), network="3GB/s"), 30_000_000
    facts = Facts(mlp(4, 4, 1).graph, {}, devices, "adamw")
    solved_s = Least(facts).seconds("all_gather", nbytes)
    gives_up = SimpleNamespace(has_primal_feasible_solution=lambda: False)
    _game.cache_clear()
    monkeypatch.setattr(mathopt, "solve", lambda *arguments, **options: gives_up)
    found_s = Least(facts).seconds("all_gather", nbytes)
    _game.cache_clear()
    assert 0 < found_s <= solved_s * (1 + 1e-9)


def test_equals_the_balanced_time_where_everything_can_be_split() -> None:
    """Alike nodes, no intercepts: A / sum(speed)."""
    bound = Bound((((Line((0.0,) * 3, (1.0, 2.0, 4.0)),), 10),), (2, 1, 1))
    assert bound.seconds(best_weights(bound)) == pytest.approx(10 / (1 + 1 + 1 / 2 + 1 / 4))


def test_more_devices_of_a_kind_enter_as_a_count() -> None:
    found = mlp(batch=64, width=64)
    for count in (1, 4):
        facts = Facts(found.graph, found.strategies, cluster(*[(10.0, "1GB")] * count), "adamw")
        assert make_bound(facts).counts == (count,)


def test_the_weights_are_no_worse_than_speed_where_the_solver_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds 3 and 1 and 12 s of work (on the slow one): 3 s together, and 2 s by equal weights."""
    bound = Bound((((Line((0.0, 0.0), (4.0, 12.0)),), 1),), (1, 1))
    monkeypatch.setattr("hap.search.bound._solved", lambda bound: None)
    assert bound.seconds((1, 1)) == pytest.approx(2)
    assert bound.seconds(best_weights(bound)) == pytest.approx(3)


@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1e6])
def test_the_unit_of_time_does_not_matter(unit: float) -> None:
    """Nanoseconds would fall under the solver's tolerances."""
    split, whole = Line((0.0, 0.0), (2.0 * unit, 6.0 * unit)), Line((unit / 3, unit), (0.0, 0.0))
    bound = Bound((((split,), 1), ((whole,), 1)), (1, 1))
    assert bound.seconds(best_weights(bound)) == pytest.approx(2.0 * unit)


# ---- memory ----


def tight(memory: str) -> ClusterSpec:
    """Four equal devices whose network is slow enough for every gather to show."""
    return cluster(*[(10, memory)] * 4, network="1GB/s")


def relaxed_s(facts: Facts) -> float:
    found = Relaxation(facts, best_weights(make_bound(facts))).seconds
    assert found is not None
    return found


def test_where_memory_is_ample_it_does_not_matter() -> None:
    """Three layers of 1024 x 1024 parameters: gathered once, and nothing is computed again."""
    found = mlp(batch=4096, width=1024, layers=3)
    some, plenty = (Facts(found.graph, found.strategies, tight(m), "adamw") for m in ("8GB", "80GB"))
    assert relaxed_s(some) == pytest.approx(relaxed_s(plenty), rel=1e-9)


def test_where_copies_do_not_fit_the_bound_rises_until_all_are_gathered_twice() -> None:
    """Parameters, gradients and two moments of three layers are 50 MB, dealt out 13 MB; 12.6 MB of gathered copies and
    a quarter of what the forward pass saves do not fit beside them. Less memory, more is gathered again."""
    found = mlp(batch=4096, width=1024, layers=3)
    seconds = [relaxed_s(Facts(found.graph, found.strategies, tight(m), "adamw")) for m in ("17MB", "24MB", "80GB")]
    assert seconds[0] > seconds[1] * 1.001 > seconds[2] * 1.002


def test_the_bound_is_below_random_plans_that_fit() -> None:
    """Strategies drawn for parameters and calls, all copies kept, one, or none, calls repeated or not, shares even or
    not."""
    rng, fitting = random.Random(3), 0
    found = mlp(batch=1024, width=1024, layers=3)
    parameters = [n.name for n in found.graph.sources("parameter")]
    for memory in ("20MB", "26MB", "34MB", "60MB"):
        devices = tight(memory)
        facts = Facts(found.graph, found.strategies, devices, "adamw")
        bound = lower_bound(facts)
        assert bound is not None
        blocks = find_blocks(found.graph, facts.evaluator.strides)
        levels = [(), after_steps(blocks, len(steps_of(blocks)))]
        for _ in range(10):
            strategies = _dealt_out(found, rng)
            ratios = [rng.choice([1.0, 1.0, 1.2]) for _ in range(4)]
            sizes = {name: round_shares(ratios, g.n) for name, g in found.groups.items()}
            some = frozenset(rng.sample(parameters, 1))
            for kept, recomputed in itertools.product((frozenset(parameters), some, frozenset[str]()), levels):
                names = [name for r in recomputed for name in r.calls]
                needs = find_needs(found.graph, strategies, regather=True, kept=kept)
                done = evaluate(found.graph, strategies, sizes, devices, needs=needs, recomputed=names)
                fitting += done.fits
                assert not done.fits or bound.seconds <= done.step_s
    assert fitting >= 20


@pytest.mark.parametrize("memory", ["37MB", "40MB"])
def test_the_bound_is_below_the_plan_found_where_memory_is_short(memory: str) -> None:
    plan = plan_graph(mlp(batch=1024, width=1024, layers=3), tight(memory))
    assert plan.predicted.lower_bound_s is not None and plan.predicted.lower_bound_s <= plan.predicted.step_s


class Summed(nn.Module):
    """A weight that is the sum of two parameters, the second as it is, turned, or spread from one number by a sum."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.empty(512, 512)) for _ in range(2))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "spread":
            return (x @ self.one).sum() + self.other.sum()
        return x @ (self.one + (self.other.t() if self.how == "turned" else self.other))


@pytest.mark.parametrize("how", ["as it is", "turned", "spread"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_gradient_of_two_parameters_is_there_once(how: str, optimizer: str) -> None:
    """The ledger holds no less than the rows of memory count, wherever the parameters lie; and hardly more where both
    are whole, but for what is multiplied: on CPUs, where an update makes nothing."""
    with torch.device("meta"):
        graph = capture(Summed(how), torch.empty(4, 512), loss_fn=torch.sum, name="summed")
    found, devices, rng = choices(graph), tight("1GB").model_copy(update={"backend": "gloo"}), random.Random(1)
    facts = Facts(graph, found.strategies, devices, optimizer)
    relaxed, state, nearest = relaxation(facts), state_bytes(graph, optimizer), 0.0
    row = relaxed.row_names.index("state")
    sources = [n.name for n in graph.sources("parameter")]
    for number in range(30):
        strategies = random_strategies(found, rng)
        if number == 0:
            strategies = {name: options[0] for name, options in found.strategies.items()}
        sizes = {name: round_shares([rng.random() + 0.1 for _ in range(4)], g.n) for name, g in found.groups.items()}
        held = sum(evaluate(graph, strategies, sizes, devices, optimizer=optimizer).memory_bytes)
        taken = Counter[int]()
        for name in sources:
            kind = relaxed.fine[name]
            variable = relaxed.x[kind][found.strategies[name].index(strategies[name])]
            taken[variable] += 1 / relaxed.count[kind]  # type: ignore[assignment]
        counted = sum(k * taken[v] for at, v, k in relaxed.entries if at == row) / GB
        assert state <= counted * (1 + 1e-9) <= held * (1 + 1e-9)
        nearest = max(nearest, counted / held)
    assert nearest > 0.9


def _dealt_out(found: Choices, rng: random.Random) -> dict[str, Strategy]:
    """Parameters mostly sharded, calls mostly on the batch's pieces, the rest drawn."""
    strategies: dict[str, Strategy] = {}
    made: dict[Value, object] = {}
    batch = next(p.group for s in found.strategies["i_args_0"] for p in s.outputs if isinstance(p, Shard))
    for node in found.graph.nodes:
        fitting = [
            s
            for s in found.strategies[node.name]
            if all(p != PARTIAL or made[v] == PARTIAL for v, p in zip(node.inputs, s.inputs, strict=True))
        ]
        wanted = [s for s in fitting if any(isinstance(p, Shard) for p in s.outputs)] if node.is_source else []
        wanted = wanted or [s for s in fitting if any(isinstance(p, Shard) and p.group == batch for p in s.inputs)]
        strategies[node.name] = rng.choice(wanted if wanted and rng.random() < 0.95 else fitting)
        made |= {Value(node.name, i): p for i, p in enumerate(strategies[node.name].outputs)}
    return strategies
