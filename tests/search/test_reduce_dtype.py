"""Plans for gradients that are rounded before they are exchanged: half as many bytes, shorter steps on slow links."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn

import hap
from benchmarks.allocations import Allocations
from hap.axes import plan_axes
from hap.capture import capture, interpret, source_values
from hap.capture.narrow import narrowed
from hap.codegen.lowering import lower
from hap.cost_models.evaluate import evaluate
from hap.graph import CAST, Graph, Value
from hap.mesh_plan import MeshPlan
from hap.placement import PARTIAL
from hap.plan import Plan
from hap.rules.choices import Choices, choices
from hap.runtime.lockstep import run_lockstep
from hap.search.apart import _terms, or_apart
from hap.search.judge import as_run_s
from hap.search.limits import LIMITS
from hap.search.mixing import _Mixture
from hap.search.pins import Pins
from hap.search.planner import Search, plan_graph
from hap.search.prices import Facts
from hap.search.problem import Problem
from hap.search.relaxation import lower_bound
from hap.search.rounding import round_shares
from tests._support import gpt2 as two_layers
from tests._support.lab import lab
from tests._support.narrow import narrow_plan
from tests._support.plans import sizes_for
from tests._support.ranks import run_alike
from tests.search import test_apart as tied
from tests.search import test_mixing as mixed
from tests.search.models import cluster, mlp, plan_of
from tests.search.models import gpt2 as language
from tests.search.test_batches import of
from tests.search.test_bound import random_strategies

ETHERNET = cluster((10, "16GB"), (10, "16GB"), (5, "16GB"), network="10Gbit/s", latency="50us")
DATA_PARALLEL = Pins(placements={"*": "R", "args.*": "S(0)", "targets.*": "S(0)"})


class Vgg(nn.Module):
    """Convolutions on large maps, and most of the weights in two layers behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise((3, 32, 64, 128)))
        self.first, self.last = nn.Linear(128 * 64, 2048), nn.Linear(2048, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.features:
            x = nn.functional.max_pool2d(torch.relu(layer(x)), 2)
        return self.last(torch.relu(self.first(x.flatten(1))))


def vgg() -> Graph:
    with torch.device("meta"):
        x, y = torch.empty(96, 3, 64, 64), torch.empty(96, dtype=torch.int64)
        return capture(Vgg(), x, loss_fn=nn.functional.cross_entropy, example_targets=y, name="vgg")


def narrow(found: Choices) -> Choices:
    return choices(narrowed(found.graph, torch.bfloat16))


def sent_of_gradients(plan: Plan, graph: Graph) -> int:
    """Bytes of the whole values that are summed, of which nothing but gradients is made."""
    summed = [c for c in plan.conversions if c.collective in ("all_reduce", "reduce_scatter")]
    return sum(c.nbytes for c in summed if graph.by_name[Value.parse(c.value).node].phase == "backward")


def test_data_parallel_sends_half_of_the_bytes_in_half_of_the_time_but_for_latencies() -> None:
    plain = mlp(batch=4096, width=1024, layers=8)
    plans = [plan_graph(found, ETHERNET, pins=DATA_PARALLEL, effort="quick") for found in (plain, narrow(plain))]
    assert [plan.provenance.reduce_dtype for plan in plans] == [None, "bfloat16"]
    graphs = plain.graph, narrow(plain).graph
    wide, half = (sent_of_gradients(plan, graph) for plan, graph in zip(plans, graphs, strict=True))
    assert wide == sum(n.meta.nbytes for n in plain.graph.sources("parameter")) and half * 2 == wide
    before, after = (plan.predicted.communication_s for plan in plans)
    assert before / 2 <= after < 0.55 * before


@pytest.mark.parametrize(("model", "at_most"), [("gpt2", 0.75), ("vgg", 1.04)])
def test_steps_are_shorter_on_slow_links(model: str, at_most: float) -> None:
    """Of the VGG's last layers what gradients are made of is gathered either way: nothing is gained, and casts cost."""
    found = language(4) if model == "gpt2" else choices(vgg())
    plain, rounded = (plan_graph(f, ETHERNET) for f in (found, narrow(found)))
    assert rounded.predicted.as_run_s < at_most * plain.predicted.as_run_s


def test_casts_cost_what_reading_and_writing_takes() -> None:
    """On one device nothing is gained: of each parameter 4 + 2 bytes are moved, twice, at what calls reach of a
    memory's bandwidth, and nothing else is added."""
    one = cluster((10, "16GB"), memory_bandwidth="100GB/s")
    plain = mlp(batch=4096, width=1024, layers=8)
    before, after = (plan_graph(f, one, effort="quick").predicted.step_s for f in (plain, narrow(plain)))
    parameters = sum(n.meta.numel for n in plain.graph.sources("parameter"))
    assert 1 <= (after - before) / (12 * parameters / 100e9) < 1.5


# ---- what looks at how gradients are made ----


@pytest.fixture(scope="module")
def apart() -> tuple[Search, tied.Found, float]:
    """On links half as fast, so that half of the bytes take as long."""
    found, slow = narrow(tied.large()), cluster((10, "16GB"), (10, "16GB"), (5, "16GB"), network="1.5GB/s")
    best = Search(Problem.state(found, slow, "adamw", tied.DATA_PARALLEL), LIMITS["quick"]).run()
    search = Search(Problem.state(found, slow, "adamw", Pins()), LIMITS["normal"])
    return search, best, as_run_s(search.chooser, best)


def test_terms_go_apart_though_they_are_rounded_and_their_sum_is_widened(
    apart: tuple[Search, tied.Found, float],
) -> None:
    search, best, best_s = apart
    found, seconds = or_apart(search, best, best_s)
    assert seconds is not None and seconds < 0.95 * best_s and found.fits
    graph = search.problem.choices.graph
    widened = graph.by_name[tied.sum_of(graph)]
    added = widened.inputs[0].node
    assert widened.op == CAST and best.strategies[added].outputs == (PARTIAL,) != found.strategies[added].outputs


def test_every_way_to_send_terms_apart_computes_what_one_device_computes() -> None:
    """But for rounding, of three ranks' parts and sums."""
    torch.manual_seed(0)
    model = tied.Tied(500, 24, 2)
    batch = (torch.randint(500, (7, 3)), torch.randint(500, (7, 3)))
    graph = narrowed(capture(model, batch), torch.bfloat16)
    values = interpret(graph, source_values(graph, model, batch, tangent=1.3))
    three = cluster((0.01, "1GB"), (0.005, "1GB"), (0.002, "1GB"), network="1GB/s")
    made = tied.plans(choices(graph), "words.weight", _terms, tied.DEALT_OUT, on=three)
    assert len(made) >= 3
    for plan in made:
        step = run_lockstep(lower(graph, plan), values)
        torch.testing.assert_close(step.loss, values[graph.loss])
        for target, value in graph.gradients.items():
            size = float(values[value].abs().max())
            torch.testing.assert_close(step.gradients[target], values[value], rtol=2**-6, atol=2**-6 * size)


def test_parameters_are_turned_though_casts_follow() -> None:
    """Whole, what lies between the casts is summed onto every rank; in shards, into them, and widened there."""
    found = narrow(mixed.DEEP)
    problem = Problem.state(found, mixed.SLOW, "adamw", Pins())
    best = Search(Problem.state(found, mixed.SLOW, "adamw", mixed.WHOLE), LIMITS["quick"]).run()
    mixture = _Mixture.of(problem, best)
    turned = next(mixture.turned({0: 1.0})).found
    assert any(mixed.weights(turned, found.graph)) and not any(mixed.weights(best, found.graph))
    for which in (best, turned):
        graph, plan = found.graph, plan_of(found, mixed.SLOW, which)
        assert sent_of_gradients(plan, graph) == sum(n.meta.nbytes for n in graph.sources("parameter")) // 2


def test_several_batches_pay_once_for_what_travels_narrow() -> None:
    found, pins = narrow(language(2)), Pins(placements={"*": "R", "kwargs.*": "S(0)"})
    four, one = (plan_graph(found, ETHERNET, pins=pins, effort="quick", batches=count) for count in (4, 1))
    assert four.predicted.communication_s < 0.35 * one.predicted.communication_s


def test_on_two_axes_half_as_many_bytes_are_summed_over_hosts() -> None:
    """Beside the backward pass, as those of gradients in their own dtype are."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)), torch.empty(64, 1024)
    given = {"example_inputs": x, "loss_fn": torch.sum, "effort": "quick"}
    wide, narrow = (plan_axes("hosts", model, ETHERNET, **given, reduce_dtype=d) for d in (None, torch.bfloat16))
    assert isinstance(wide, MeshPlan) and isinstance(narrow, MeshPlan)
    assert narrow.provenance.reduce_dtype == "bfloat16" and wide.provenance.reduce_dtype is None
    assert narrow.predicted.sums_s == pytest.approx(wide.predicted.sums_s / 2, rel=0.1)
    assert narrow.predicted.as_run_s < 0.6 * wide.predicted.as_run_s
    best = plan_axes("best", model, ETHERNET, **given, reduce_dtype="bfloat16")
    assert best.predicted.as_run_s <= narrow.predicted.as_run_s


class Two(nn.Module):
    """A weight that is the sum of two parameters, whose gradients are one value."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.empty(1024, 1024)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.one + self.other)


@pytest.mark.parametrize("make", [lambda: nn.Linear(1024, 1024), Two])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_on_two_axes_the_bound_has_the_bytes_that_are_summed(
    make: Callable[[], nn.Module], dtype: torch.dtype | None
) -> None:
    """Where sums over hosts are most of the step, it is near what they take, and below it."""
    with torch.device("meta"):
        model, x = make(), torch.empty(64, 1024)
    on = cluster(*[(10, "16GB")] * 3, network="1Gbit/s")
    plan = plan_axes("hosts", model, on, example_inputs=x, loss_fn=torch.sum, effort="quick", reduce_dtype=dtype)
    assert isinstance(plan, MeshPlan) and plan.predicted.lower_bound_s is not None
    assert 0.95 < plan.predicted.lower_bound_s / plan.predicted.step_s <= 1


# ---- bounds and bytes ----


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_is_below_random_plans(seed: int) -> None:
    rng = random.Random(seed)
    speeds = [(rng.choice([0.1, 1, 4]), "1GB") for _ in range(3)]
    found = narrow(mlp(batch=8, width=8, layers=2))
    on = cluster(*speeds, network=rng.choice(["100MB/s", "10GB/s"]), memory_bandwidth="1GB/s")
    bound = lower_bound(Facts(found.graph, found.strategies, on, "adamw"))
    assert bound is not None and bound.seconds > 0
    for _ in range(40):
        sizes = {name: round_shares([rng.random() + 1e-3 for _ in speeds], g.n) for name, g in found.groups.items()}
        assert bound.seconds <= evaluate(found.graph, random_strategies(found, rng), sizes, on).step_s
    plan = plan_graph(found, on)
    assert bound.seconds <= plan.predicted.step_s
    assert plan_graph(found, on, method="astar").predicted.step_s == pytest.approx(plan.predicted.step_s, rel=0.05)


def held(rank: int, plan: Plan, batches: int) -> tuple[int, int]:
    """(the most that a step of so many batches needs, what the ledger says without inputs and state)."""
    x = two_layers.batch()
    given = {"example_inputs": (x,), "example_targets": x, "loss_fn": two_layers.lm_loss}
    program = hap.compile(two_layers.build(torch.float32), plan=plan, passes_off=("bucket",), **given)
    share, targets = program.shard_batch((x,), x)

    def step() -> None:
        for _ in range(batches - 1):
            with program.no_sync():
                program(*share, targets=targets).backward()
        program(*share, targets=targets).backward()

    step()
    program.zero_grad()
    seen = Allocations()
    seen.keep([share[0], targets, *program.parameters(), *program.buffers()])
    most = seen.least_peak(step, between=program.zero_grad)
    return most, sum(n for kind, n in plan.predicted.memory_by_kind[rank].items() if kind != "optimizer")


@pytest.mark.parametrize(
    ("name", "batches"),
    [("data", 3), *(pytest.param(*p, marks=pytest.mark.long) for p in (("data", 1), ("zero", 1), ("zero", 3)))],
)
def test_the_ledger_holds_what_is_rounded(name: str, batches: int) -> None:
    """Never less than a rank holds, but for a bundle, whose sums are there until the last of them is widened."""
    found = choices(narrowed(two_layers.graph(torch.float32), torch.bfloat16))
    wishes = {"args.0": (0, two_layers.BATCH), "targets.0": (0, two_layers.BATCH)}
    if name == "zero":
        wishes |= {n.target: (0, n.meta.shape[0]) for n in found.graph.sources("parameter")}
    plan = narrow_plan(found, wishes, sizes_for(found, (5, 2, 1)))
    told = of(plan, found.graph, lab(), batches).to_prediction()
    for most, needs in run_alike(3, held, plan.model_copy(update={"predicted": told}), batches):
        assert most <= needs * 1.02, (most, needs)
