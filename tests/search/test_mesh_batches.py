"""Plans of two axes for steps of several batches: sums over hosts are paid once, and what waits for them is held."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import hap
from hap.axes import plan_axes
from hap.cluster import ClusterSpec
from hap.cost_models.evaluate import evaluate
from hap.errors import PlanError
from hap.hosts_sum import HOSTS_SUM
from hap.mesh import deferred_sums, graph_of, program_of
from hap.mesh_plan import MeshPlan, parse_plan, verify_mesh_plan
from hap.plan import Plan
from hap.report.diff import diff
from hap.report.mesh import mesh_to_json, summarize_mesh
from hap.rules.host_graph import summed
from hap.search.mesh import plan_mesh
from tests._support import gpt2
from tests._support.lab import lab
from tests._support.mesh import make_mesh
from tests._support.ranks import run_alike
from tests.search.models import mlp
from tests.search.test_batches import held, loss, model
from tests.search.test_mesh import cluster, sums_by_hand

BUSY = mlp(batch=4096, width=256)
SLOW = cluster((2, 1), (1,), network="0.1GB/s", launch="0s", latency="0s")


def planned(batches: int, on: ClusterSpec = SLOW) -> MeshPlan:
    return plan_mesh(BUSY, on, effort="quick", batches=batches)


# ---- seconds ----


def test_sums_over_hosts_are_paid_once_a_step() -> None:
    """All but the loss's, which each batch has."""
    plan = planned(4)
    by_hand = []
    for host, part in enumerate(plan.hosts):
        graph, inside = graph_of(BUSY.graph, plan, host), plan.inside_of(host)
        assert inside.gradient_accumulation_steps == 4 and inside.world_size == part.ranks
        (first, *rest) = summed(graph)
        assert first.meta.shape == () and len(rest) == 4, "the loss, two weights and two biases"
        assert deferred_sums(program_of(BUSY.graph, plan, host).program) == (1, 2, 3, 4)
        whole = sums_by_hand(graph, inside, 2, 1e8, 0.0, 0.0)
        alone = sums_by_hand(without_gradients_sums(graph), inside, 2, 1e8, 0.0, 0.0)
        by_hand.append(alone + (whole - alone) / 4)
    assert plan.predicted.sums_s == pytest.approx(max(by_hand), rel=1e-3)
    assert plan.predicted.lower_bound_s <= plan.predicted.step_s < planned(1).predicted.step_s


def without_gradients_sums(graph: hap.Graph) -> hap.Graph:
    gradients = {v.node for v in graph.gradients.values()}
    return replace(graph, nodes=tuple(n for n in graph.nodes if n.op != HOSTS_SUM or n.name not in gradients))


def test_the_bound_has_a_part_of_the_sums() -> None:
    """And of the update; what is left is of each batch. Where sums are most of a step, it is nearly all of the step."""
    on = cluster((1,), (1,), network="20MB/s", latency="0s")
    plans = {n: planned(n, on).predicted for n in (1, 2, 4)}
    one, two, four = (p.lower_bound_s for p in plans.values())
    once = 2 * (one - two)
    assert four == pytest.approx(one - 0.75 * once) and once > 0.8 * one
    assert all(0 <= p.gap < 0.05 for p in plans.values())


def test_a_step_as_run_is_its_batches_and_the_last_one() -> None:
    """Of many batches hardly more than the time of one without sums."""
    on = cluster((1,), (1,), network="20MB/s", latency="0s")
    run = {n: planned(n, on).predicted.as_run_s for n in (1, 2, 4, 10**6)}
    first = run[10**6]
    last = 4 * run[4] - 3 * first
    assert run[2] == pytest.approx((first + last) / 2, rel=1e-5)
    assert run[1] <= last < 1.05 * run[1] and first < run[1] / 4, "the last one adds up, too"


def test_where_sums_are_dear_several_batches_are_dealt_out_by_speed() -> None:
    """A host alone on a slow network is worth its part of the batch where sums are rare."""
    on = cluster((4, 4), (4,), network=("0.1GB/s", "0.1GB/s"))
    plan = planned(64, on)
    assert plan.hosts[0].batch == pytest.approx(4096 * 2 / 3, rel=0.05)


# ---- bytes ----


@pytest.mark.parametrize("ranks", [pytest.param((2, 1), marks=pytest.mark.long), (1, 1)])
def test_the_ledger_holds_what_batches_leave(ranks: tuple[int, int]) -> None:
    """Never less than a rank holds; on a host of one rank, whose gradients wait whole, hardly more."""
    graph = gpt2.graph()
    plan = make_mesh(graph, ranks, (5, 3))
    told, found = list[Plan](), dict[int, list[tuple[int, ...]]]()
    for host, part in enumerate(plan.hosts):
        of_host, inside = graph_of(graph, plan, host), plan.inside_of(host)
        strategies = {n: inside.strategy(n) for n in inside.strategies}
        own = lab().model_copy(update={"hosts": (lab().hosts[0],)})
        on = hosts_of(own, part.ranks)
        for batches in (1, 3):
            cost = evaluate(of_host, strategies, inside.sizes, on, batches=batches)
            found.setdefault(host, []).append(cost.memory_bytes)
        told.append(inside.model_copy(update={"predicted": cost.to_prediction()}))
    gradients = sum(n.meta.nbytes for n in graph.sources("parameter"))
    (plain,), (several,) = (row for row in found[1])
    assert 0.9 * gradients < several - plain < 2.1 * gradients
    for rank, (most, needs) in enumerate(run_alike(sum(ranks), held, plan.model_copy(update={"inside": tuple(told)}))):
        assert most <= needs * 1.02, (rank, most, needs)
        assert plan.hosts[plan.host_of(rank)[0]].ranks > 1 or needs <= 1.25 * most, (rank, most, needs)


def hosts_of(on: ClusterSpec, ranks: int) -> ClusterSpec:
    """One host of so many devices like its first, with a network."""
    body = on.model_dump(mode="json", by_alias=True, exclude_none=True)
    host = body["hosts"][0]
    host["devices"] = [{**host["devices"][0], "count": ranks}]
    host |= {"network": {"bandwidth": "1GB/s", "latency": "1us"}, "link": {"bandwidth": "1GB/s", "latency": "1us"}}
    return ClusterSpec.model_validate({**body, "hosts": [host]})


# ---- the doors ----


def test_a_plan_of_two_axes_says_how_many_batches_it_is_for() -> None:
    given = {**model(), "cluster": SLOW, "loss_fn": loss, "effort": "quick"}
    one, plan = (hap.plan_mesh(**given, gradient_accumulation_steps=n) for n in (1, 8))  # type: ignore[arg-type]
    assert parse_plan(plan.to_json()) == plan and plan.gradient_accumulation_steps == 8
    words = "a step has 8 batches, whose gradients are added up; times are of one batch, their mean"
    assert words in summarize_mesh(plan).split("\n\n")[0] and "8 batches" not in summarize_mesh(one)
    assert mesh_to_json(plan)["gradient_accumulation_steps"] == 8
    assert "batches of a step: 1; now 8" in str(diff(one, plan))
    mixed = plan.model_copy(update={"inside": (plan.inside[0], one.inside[1])})
    with pytest.raises(PlanError, match=r"hosts' plans are for steps of different numbers of batches"):
        verify_mesh_plan(mixed)


def test_the_number_of_batches_is_found_and_of_both_kinds_the_faster_is_taken() -> None:
    """As many as there are samples for both hosts, and no more are asked for."""
    with torch.device("meta"):
        given = {"model": nn.Linear(64, 64), "example_inputs": torch.empty(4, 64)}
    rest = {"cluster": SLOW, "loss_fn": loss, "effort": "quick"}
    found = hap.plan_mesh(**given, **rest, gradient_accumulation_steps="best")  # type: ignore[arg-type]
    assert found.gradient_accumulation_steps in (1, 2), "of four samples each of two hosts has one"
    for batches in (2, "best"):
        flat, both, best = (
            plan_axes(mesh, **given, **rest, gradient_accumulation_steps=batches)  # type: ignore[arg-type]
            for mesh in ("flat", "hosts", "best")
        )
        assert isinstance(flat, Plan) and isinstance(both, MeshPlan)
        step_s = [p.predicted.as_run_s * p.gradient_accumulation_steps for p in (flat, both, best)]
        assert step_s[2] == min(step_s[:2])
