"""Plans for steps of several batches: what travels once, and the update, are paid once; memory for what is kept."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import hap
from benchmarks.allocations import Allocations
from hap.axes import plan_axes
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.cost_models.evaluate import Evaluation, evaluate
from hap.deferral import Batches, deferrable_values
from hap.errors import PlanError
from hap.graph import Graph, Value
from hap.mesh_plan import MeshPlan
from hap.plan import Plan
from hap.report.diff import diff
from hap.report.explain import explain
from hap.report.summary import summarize
from hap.search import Pins, plan_graph
from hap.search.limits import Method
from hap.search.prices import Facts
from hap.search.relaxation import lower_bound
from hap.search.rounding import round_shares
from tests._support import cases, gpt2
from tests._support.lab import lab
from tests._support.ranks import run_alike
from tests.search.models import cluster, mixer, mlp, unrolled
from tests.search.models import gpt2 as language
from tests.search.test_bound import random_strategies

DATA_PARALLEL = Pins(placements={"*": "R", "args.0": "S(0)"})
SLOW = {"network": "1GB/s", "memory_bandwidth": "100GB/s"}


def of(plan: Plan, graph: Graph, on: ClusterSpec, batches: int) -> Evaluation:
    strategies = {n: plan.strategy(n) for n in plan.strategies}
    return evaluate(graph, strategies, plan.sizes, on, batches=batches, postponed=plan.postponed)


# ---- which values ----


def test_gradients_and_what_only_they_are_made_of_can_wait() -> None:
    graph = gpt2.graph()
    once = deferrable_values(graph)
    assert set(graph.gradients.values()) <= once.keys() and set(once.values()) == {torch.float64}
    ops = {graph.by_name[v.node].op for v in once}
    assert {"aten.mm.default", "aten.embedding_dense_backward.default"} <= ops, "which make them"
    activations = [n for n in graph.nodes if n.op == "aten.gelu_backward.default" and Value(n.name) in once]
    assert not activations and graph.loss not in once
    assert all(graph.by_name[v.node].phase == "backward" for v in once)


def test_a_gradient_that_is_read_for_something_else_cannot_wait() -> None:
    model = nn.Linear(4, 4, dtype=torch.float64)
    graph = capture(model, torch.zeros(8, 4, dtype=torch.float64), loss_fn=lambda out: out.square().sum())
    value = graph.gradients["weight"]
    assert value in deferrable_values(graph)
    other = graph.gradients["bias"]
    assert other not in deferrable_values(replace(graph, updates={"seen": other}))


def test_batches_are_added_up_in_the_gradients_dtype() -> None:
    """Under autocast products are in bfloat16, gradients in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(nn.Linear(64, 64), torch.zeros(8, 64), loss_fn=lambda out: out.square().sum())
    batches = Batches.of(graph, 4)
    narrow = [v for v in batches.once if graph.meta(v).dtype == torch.bfloat16]
    assert narrow and set(batches.once.values()) == {torch.float32}
    assert all(batches.left_bytes(v, graph.meta(v)) == 2 * graph.meta(v).nbytes for v in narrow)


# ---- seconds ----


def test_sums_of_gradients_and_the_update_are_paid_once() -> None:
    found, on = mlp(batch=4096, width=256), cluster((10, "16GB"), (10, "16GB"), **SLOW)
    plan = plan_graph(found, on, pins=DATA_PARALLEL)
    one, four = of(plan, found.graph, on, 1), of(plan, found.graph, on, 4)
    once = deferrable_values(found.graph)
    sums = sum(c.seconds for c in one.conversions if c.need.value in once)
    assert sums > 0.2 * one.communication_s
    assert four.communication_s == pytest.approx(one.communication_s - 3 / 4 * sums)
    assert four.update_s == pytest.approx(one.update_s / 4)
    assert four.stages_s == pytest.approx(one.stages_s)


@pytest.mark.parametrize("method", ["milp", "astar"])
@pytest.mark.parametrize("batches", [2, 16])
def test_plans_for_several_batches_are_better_for_them(batches: int, method: Method) -> None:
    """Than the plan for one, by the clock that the search minimises; where gradients cost as much as computing."""
    found, on = mlp(batch=2048, width=512, layers=3), cluster((10, "16GB"), (2, "16GB"), **SLOW)
    one, several = plan_graph(found, on), plan_graph(found, on, batches=batches, method=method)
    assert several.gradient_accumulation_steps == batches and one.gradient_accumulation_steps == 1
    again = of(several, found.graph, on, batches)
    assert several.predicted.step_s == pytest.approx(again.step_s) and several.memory_bytes == again.memory_bytes
    assert several.predicted.step_s < 0.97 * of(one, found.graph, on, batches).step_s
    assert several.predicted.lower_bound_s is not None
    assert 0 < several.predicted.lower_bound_s <= several.predicted.step_s


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_is_below_random_plans(seed: int) -> None:
    rng = random.Random(seed)
    found = (mlp(batch=8, width=8, layers=2), unrolled(12), mixer(8, 8, 8))[seed % 3]
    speeds = [(rng.choice([0.1, 1, 4]), "1GB") for _ in range(rng.randint(2, 4))]
    on = cluster(*speeds, network=rng.choice(["100MB/s", "1GB/s", "10GB/s"]), memory_bandwidth="1GB/s")
    batches = rng.choice([2, 5, 100])
    facts = Facts(found.graph, found.strategies, on, "adamw", batches=Batches.of(found.graph, batches))
    bound, plain = lower_bound(facts), lower_bound(Facts(found.graph, found.strategies, on, "adamw"))
    assert 0 < bound.seconds < plain.seconds
    for _ in range(30):
        strategies = random_strategies(found, rng)
        ratios = [rng.random() * rng.choice([0, 1, 1]) + 1e-3 for _ in speeds]
        sizes = {name: round_shares(ratios, g.n) for name, g in found.groups.items()}
        assert bound.seconds <= evaluate(found.graph, strategies, sizes, on, batches=batches).step_s


def test_as_run_a_batch_takes_the_mean() -> None:
    """Of many batches hardly more than one without the sums of gradients, which the last one has to wait for."""
    speeds = (10, "16GB"), (10, "16GB")
    found, on = mlp(batch=4096, width=256), cluster(*speeds, network="100MB/s", memory_bandwidth="100GB/s")
    plans = {n: plan_graph(found, on, pins=DATA_PARALLEL, batches=n) for n in (1, 2, 4, 10**6)}
    assert all(p.sizes == plans[1].sizes for p in plans.values())
    products = [name for name in plans[1].strategies if name.startswith(("mm", "addmm"))]  # a number is summed anywhere
    assert products and all(p.strategies[n] == plans[1].strategies[n] for p in plans.values() for n in products)
    run = {n: p.predicted.as_run_s for n, p in plans.items()}
    first, least = run[10**6], max(plans[10**6].predicted.compute_s)
    assert 0.9 * least < first < 1.5 * least < run[1] / 4, "gradients make up most of a step"
    last = run[4] * 4 - 3 * first
    assert run[2] == pytest.approx((first + last) / 2, rel=1e-5)
    assert run[1] < last < 1.05 * run[1], "the last one adds up, too"


# ---- bytes ----


def held(rank: int, plan: Plan | MeshPlan) -> tuple[int, int]:
    """(the most that a batch of a step of three needs, what the ledger says without inputs and state)."""
    x = gpt2.batch()
    program = hap.compile(gpt2.build(), plan=plan, example_inputs=(x,), example_targets=x, loss_fn=gpt2.lm_loss)
    share, targets = program.shard_batch((x,), x)

    def batch() -> None:
        program(*share, targets=targets).backward()

    def step() -> None:
        with program.no_sync():
            batch()
            batch()
        batch()

    step()
    program.zero_grad()
    seen = Allocations()
    seen.keep([share[0], targets, *program.parameters(), *program.buffers()])
    most = seen.least_peak(step, between=program.zero_grad)
    kinds = program.plan.predicted.memory_by_kind[program._comm.rank]
    needs = sum(n for kind, n in kinds.items() if kind != "optimizer")
    return most, needs


@pytest.mark.parametrize("name", [pytest.param("data", marks=pytest.mark.long), "zero"])
def test_the_ledger_holds_what_batches_leave(name: str) -> None:
    """Never less than a rank holds, and for data parallel, whose gradients wait whole, hardly more."""
    plan = cases.data_parallel((5, 2, 1)) if name == "data" else cases.zero((5, 2, 1))
    several = of(plan, gpt2.graph(), lab(), 3).to_prediction()
    told = plan.model_copy(update={"predicted": several})
    plain = of(plan, gpt2.graph(), lab(), 1).memory_bytes
    gradients = sum(n.meta.nbytes for n in gpt2.graph().sources("parameter"))
    if name == "data":
        for more, less in zip(several.memory_bytes, plain, strict=True):
            assert 0.9 * gradients < more - less < 2.1 * gradients
    for most, needs in run_alike(3, held, told):
        assert most <= needs * 1.02, (most, needs)
        assert name != "data" or needs <= 1.25 * most, (most, needs)


# ---- the doors ----


def model() -> dict[str, object]:
    with torch.device("meta"):
        return {"model": nn.Linear(512, 512), "example_inputs": torch.empty(4096, 512)}


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def test_a_plan_says_how_many_batches_it_is_for() -> None:
    on = cluster((10, "16GB"), (2, "16GB"), **SLOW)
    plan = hap.plan(**model(), cluster=on, loss_fn=loss, gradient_accumulation_steps=8)  # type: ignore[arg-type]
    one = hap.plan(**model(), cluster=on, loss_fn=loss)  # type: ignore[arg-type]
    assert Plan.from_json(plan.to_json()) == plan and '"gradient_accumulation_steps": 8' in plan.to_json()
    assert "gradient_accumulation_steps" not in one.to_json()
    assert "a step has 8 batches, whose gradients are added up; times are of one batch, their mean" in summarize(
        plan, on
    )
    assert "A step has 8 batches; each is predicted to take" in explain(plan)
    assert "batches of a step: 1; now 8" in str(diff(one, plan))


def test_what_several_batches_do_not_go_with() -> None:
    on = cluster((10, "16GB"), (2, "16GB"), **SLOW)
    given = {**model(), "cluster": on, "loss_fn": loss}
    with pytest.raises(PlanError, match=r"a step has at least one batch, not 0"):
        hap.plan(**given, gradient_accumulation_steps=0)  # type: ignore[arg-type]
    with pytest.raises(
        PlanError, match=r"a step has a whole number of batches, not 'best'; hap.plan finds the best one"
    ):
        plan_graph(mlp(batch=8, width=8), on, batches="best")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"a step has at least one batch, not 0"):
        plan_axes("hosts", **given, gradient_accumulation_steps=0)  # type: ignore[arg-type]


def test_slow_devices_are_left_out_of_fewer_plans() -> None:
    """Where a step has many batches, what a slow device behind a slow network costs is paid once."""
    found = language(layers=2)
    on = cluster((10, "16GB"), (10, "16GB"), (4, "16GB"), network="1GB/s")
    plans = {n: plan_graph(found, on, leave_out=True, batches=n) for n in (1, 64)}
    assert plans[1].world_size < 3 == plans[64].world_size
    for batches, plan in plans.items():
        assert 0 < (plan.predicted.lower_bound_s or 0) <= plan.predicted.step_s
        with_all = plan_graph(found, on, batches=batches)
        assert plan.predicted.as_run_s <= with_all.predicted.as_run_s * (1 + 1e-9)


def test_a_language_model_is_planned_for_more_data_parallelism() -> None:
    """Fewer bytes are exchanged in a batch, and by several batches a slow device is worth its gradients."""
    found, on = language(layers=2), cluster((10, "16GB"), (10, "16GB"), (3, "16GB"), network="300MB/s")
    one, many = plan_graph(found, on), plan_graph(found, on, batches=32)
    assert many.predicted.step_s < 0.8 * one.predicted.step_s
