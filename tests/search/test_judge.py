"""Plans are chosen by the step of their programs as they run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.planning_cases import cluster as planned_cluster
from benchmarks.zoo_models.case import class_loss, tokens
from benchmarks.zoo_models.hap_paper import Shape, TextModel, top_two_gate
from hap.capture import capture, interpret, source_values
from hap.codegen.lowering import lower
from hap.codegen.passes.runner import run_passes, standard_passes
from hap.cost_models.evaluate import evaluate
from hap.placement import REPLICATE
from hap.plan import Plan
from hap.rules.choices import Choices, choices
from hap.runtime.lockstep import run_lockstep
from hap.search import Pins, judge, plan_graph
from hap.search.judge import played
from hap.search.limits import LIMITS
from hap.search.problem import Problem
from hap.search.refine import at_sizes
from hap.search.strategies import Chooser
from hap.search.tempo import played_s
from tests.search.models import cluster, mlp

SMALL = mlp(batch=256, width=256)
TALL = mlp(batch=1 << 20, width=64)  # gradients are nothing beside what they are made of
EVERY_PASS = ("renames", "dead_code", "fuse", "hoist", "sink", "bucket", "prefetch", "overlap")
DATA_PARALLEL = Pins(placements={"*": "R", "args.0": "S(0)"})
ZERO = Pins(placements={"*": "S(0)", "args.0": "S(0)"})


def as_run(found: Choices, plan: Plan, on: object, off: tuple[str, ...] = ()) -> float:
    return played(found.graph, plan, lower(found.graph, plan), on, off=off).step_s  # type: ignore[arg-type]


def test_without_passes_it_is_the_bulk_synchronous_step_and_the_packing() -> None:
    """An all-reduce copies its value once into a flat tensor (8 bytes moved for each float32, at 80 % of the memory's
    rate) and makes 11 calls, which a bulk-synchronous step leaves out. All devices are alike, so they add up."""
    on = cluster((0.05, "64GB"), (0.05, "64GB"), network="1GB/s")
    plan = plan_graph(TALL, on, pins=DATA_PARALLEL)
    sums = [c for c in plan.conversions if c.collective == "all_reduce"]
    assert len(sums) == len([c for c in plan.conversions if c.collective != "slice"]) >= 5
    packing = sum(2 * c.nbytes / (0.8 * 2e12) + 11 * on.devices[0].launch_s for c in sums)
    strategies = {name: plan.strategy(name) for name in plan.strategies}
    added = evaluate(TALL.graph, strategies, plan.sizes, on)
    assert plan.predicted.step_s == pytest.approx(added.step_s)
    assert as_run(TALL, plan, on, EVERY_PASS) == pytest.approx(added.step_s + packing)


def test_bundles_pay_their_latency_once() -> None:
    """Four gradients at two messages of 10 ms each: bundled, all but one of them are saved."""
    on = cluster(*[(0.05, "64GB")] * 4, network="10GB/s", latency="10ms")
    plan = plan_graph(TALL, on, pins=DATA_PARALLEL)
    alone, bundled = as_run(TALL, plan, on, ("bucket", "overlap")), as_run(TALL, plan, on, ("overlap",))
    sums = len([c for c in plan.conversions if c.collective == "all_reduce" and c.phase == "backward"])
    latency = 2 * 10e-3  # to the owners of the segments and back
    assert alone - bundled == pytest.approx((sums - 1) * latency, rel=0.05)
    assert plan.predicted.overlapped_s is not None and plan.predicted.overlapped_s <= bundled * (1 + 1e-9)


@pytest.mark.parametrize("ranks", [3, 66])
@pytest.mark.parametrize("network", ["0.05GB/s", "1GB/s"])
def test_a_candidate_is_timed_as_the_program_of_its_plan_is_played(network: str, ranks: int) -> None:
    """The search times drafts, of 66 ranks by their kinds, with the clocks alone; the plan's program says the same."""
    on = cluster(*[(2, "1GB")] * (ranks - 1), (1, "1GB"), network=network)
    plan = plan_graph(SMALL, on)
    assert plan.predicted.overlapped_s == pytest.approx(as_run(SMALL, plan, on), rel=1e-9)


@pytest.mark.parametrize("pins", [DATA_PARALLEL, ZERO])
def test_a_program_is_drafted_once_and_played_at_other_sizes_as_if_it_were_drafted_at_them(pins: Pins) -> None:
    """A rank without a share, too; collectives take other ways at other sizes, and bundles do not."""
    on = cluster((2, "1GB"), (2, "1GB"), (1, "1GB"), network="1GB/s")
    problem = Problem.state(SMALL, on, "adamw", pins)
    first = Chooser(problem, LIMITS["quick"]).strategies(problem.round({}, (0.4, 0.4, 0.2), (0.4, 0.4, 0.2)), False, ())
    assert first is not None
    steps = [played_s(problem, first)]
    for shares in ((0.8, 0.1, 0.1), (0.5, 0.5, 0.0), (0.0, 0.1, 0.9)):
        fresh = Problem.state(SMALL, on, "adamw", pins)
        found = at_sizes(fresh, first, fresh.round({}, shares, shares))
        steps.append(played_s(fresh, found))
        assert played_s(problem, found) == steps[-1]
    assert len(problem.scores) == 1 and len(set(steps)) == 4


@pytest.mark.parametrize("network", ["0.05GB/s", "1GB/s", "100GB/s"])
def test_no_plan_runs_longer_than_data_parallel_or_zero(network: str) -> None:
    on = cluster((2, "1GB"), (2, "1GB"), (1, "1GB"), network=network)
    free = plan_graph(SMALL, on).predicted.overlapped_s
    assert free is not None
    for pins in (DATA_PARALLEL, ZERO):
        pinned = plan_graph(SMALL, on, pins=pins, effort="quick").predicted.overlapped_s
        assert pinned is not None and free <= 1.01 * pinned


class Picker(nn.Module):
    """Many layers on every token, some on the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.ReLU())))
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[:, 0])


def test_a_small_model_is_computed_by_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dealt out it takes less with nothing overlapped, and more with the launches of its collectives. A larger one is
    dealt out."""
    on, small = cluster((4, "16GB"), (4, "16GB"), network="50GB/s"), mlp(batch=64, width=512, layers=4)
    plan, large = plan_graph(small, on), plan_graph(mlp(batch=1024, width=1024), on)
    assert not plan.conversions and [c for c in large.conversions if c.collective == "all_reduce"]
    assert plan.predicted.as_run_s == pytest.approx(as_run(small, plan, on))
    monkeypatch.setattr(judge, "_everywhere", lambda *_: ())
    dealt = plan_graph(small, on).predicted
    assert dealt.step_s < plan.predicted.step_s and dealt.as_run_s > 1.2 * plan.predicted.as_run_s


def test_does_not_join_the_ranks_in_mid_step_to_save_what_a_bundle_takes_along() -> None:
    """Counted one by one, gathering the head's input costs less than a sum for each of its gradients, and the search
    proposes that; bundled, the sums cost nothing more."""
    with torch.device("meta"):
        model, x, target = Picker(), torch.empty(4096, 16, 64), torch.empty(4096, dtype=torch.int64)
    found = choices(capture(model, x, loss_fn=nn.functional.cross_entropy, example_targets=target))
    plan = plan_graph(found, cluster(*[(0.05, "64GB")] * 4, network="1GB/s", latency="1ms"))
    assert {c.collective for c in plan.conversions} == {"all_reduce"}
    assert {c.value for c in plan.conversions if c.phase == "forward"} <= {
        "sum_1",
        "sum_2",
        "to_copy_1",
        "div_1",
    }  # loss


def factors() -> tuple[Choices, nn.Module, torch.Tensor]:
    """Two wide layers, two samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96)).double()
    x = torch.randn(2, 96, dtype=torch.float64)
    return choices(capture(model, x, loss_fn=nn.functional.mse_loss, example_targets=x)), model, x


def test_sends_the_factors_of_a_weight_gradient_where_they_are_smaller() -> None:
    """A gradient has 96 x 96 numbers, its factors 2 x 96 each: on a slow link both are gathered and multiplied on
    every rank, as the rules of a matmul's gradient allow. No rule is for it alone."""
    found, model, x = factors()
    on = cluster((1, "1GB"), (1, "1GB"), network="1MB/s", latency="1us")
    pins = Pins(placements={"*": "R", "args.0": "S(0)"}, sizes={"batch": (1, 1)})
    plan = plan_graph(found, on, pins=pins)
    gradient = 96 * 96 * 8
    assert all(c.nbytes < gradient for c in plan.conversions if c.collective == "all_reduce")
    gathered = [c for c in plan.conversions if c.collective == "all_gather" and c.nbytes == 2 * 96 * 8]
    assert len(gathered) >= 2
    values = interpret(found.graph, source_values(found.graph, model, x, x, tangent=1.0))
    step = run_lockstep(run_passes(lower(found.graph, plan), standard_passes()).program, values, check=True)
    for target, value in found.graph.gradients.items():
        torch.testing.assert_close(step.gradients[target], values[value], rtol=1e-10, atol=1e-12)


def test_sends_the_gradient_where_it_is_smaller() -> None:
    """512 samples of 16: a gradient of 16 x 16 numbers, factors of 512 x 16."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        x = torch.empty(512, 16)
    found = choices(capture(model, x, loss_fn=nn.functional.mse_loss, example_targets=x))
    plan = plan_graph(found, cluster((1, "1GB"), (1, "1GB"), network="1MB/s", latency="1us"), pins=DATA_PARALLEL)
    assert sum(c.nbytes == 16 * 16 * 4 for c in plan.conversions if c.collective == "all_reduce") == 2
    assert not [c for c in plan.conversions if c.collective == "all_gather" and c.nbytes == 512 * 16 * 4]


def test_whole_parameters_are_compared_with_calls_as_the_solver_would_have_them() -> None:
    """8 samples of 256: a layer's gradient takes longer to sum than its factors to gather, which the data-parallel
    family has no calls for."""
    found, on = mlp(batch=8, width=256), cluster((0.01, "1GB"), (0.01, "1GB"), network="10MB/s", latency="1us")
    chooser = Chooser(Problem.state(found, on, "adamw", Pins()), LIMITS["normal"])
    first = chooser.strategies(chooser.problem.round({}, (0.5, 0.5), (0.5, 0.5)), False, ())
    assert first is not None
    judge.finest(chooser, first, [first])
    parameters, compared = found.graph.sources("parameter"), [seconds for seconds, _ in chooser.compared]
    free = next(judge._calls_free(chooser, sharded=False))
    assert all(free.strategies[n.name].outputs[0] == REPLICATE for n in parameters)
    family_s = min(judge.as_run_s(chooser, f) for f in judge._family(chooser, 1.0, sharded=False))
    assert judge.as_run_s(chooser, free) in compared and judge.as_run_s(chooser, free) < 0.1 * family_s


@pytest.mark.long
def test_parameters_in_shards_are_a_beginning_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, one a mixture of 16 experts, on 16 unlike GPUs: no other round comes to so short a step."""
    with torch.device("meta"):
        model = TextModel(Shape(2, 768, 12, 3072, 128, 16, 512), 30522, top_two_gate, 2.5)
        ids = tokens(30522, 512, 128)
    found = choices(capture(model, ids, loss_fn=class_loss, example_targets=ids))
    whole = plan_graph(found, planned_cluster("mix-16")).predicted
    monkeypatch.setattr(judge, "_calls_free", lambda chooser, *, sharded: iter(()))
    without = plan_graph(found, planned_cluster("mix-16")).predicted
    assert whole.as_run_s < 0.97 * without.as_run_s and whole.step_s < 0.98 * without.step_s
