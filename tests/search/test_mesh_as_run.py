"""Plans of two axes as they are run: the clocks agree, hosts wait for each other, and late sums hide."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest
import torch
from torch import nn

from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.codegen.lowering import lower
from hap.codegen.passes.runner import run_passes, standard_passes
from hap.cost_models.compute import Calls
from hap.cost_models.evaluate import update_seconds
from hap.cost_models.timeline import play
from hap.graph import Graph
from hap.mesh import graph_of, play_mesh
from hap.plan import Plan
from hap.rules.choices import Choices, choices
from hap.rules.host_graph import summed
from hap.search.mesh import plan_mesh
from hap.search.score import Score, Times, score_of
from tests._support.plans import make_plan, random_sizes, random_strategies
from tests.search.models import mlp
from tests.search.test_mesh import BUSY, SMALL, UNEQUAL, cluster, quick, unequal


def score_and_times(graph: Graph, plan: Plan, on: ClusterSpec) -> tuple[Score, Times]:
    program = run_passes(lower(graph, plan), standard_passes()).program
    strategies = {name: plan.strategy(name) for name in plan.strategies}
    score = score_of(program, graph, strategies, Calls(graph), measured=False)
    update_s = update_seconds(graph, strategies, plan.sizes, on, "adamw")
    return score, Times.of(score, [w.decomposition for w in score.works], on, plan.sizes, update_s)


@cache
def one_host() -> tuple[Choices, ClusterSpec]:
    """A host of three devices with half of the batch, on a network that is slow enough to be seen."""
    on = cluster((0.05, 0.02, 0.01), (0.08,), network="0.05GB/s", latency="20us")
    plan = quick(SMALL, on)
    return choices(graph_of(SMALL.graph, plan, 0)), ClusterSpec(name="part", hosts=on.hosts[:1])


@pytest.mark.parametrize("seed", range(12))
def test_the_clocks_say_what_the_events_say(seed: int) -> None:
    """Of any strategies, with sums over hosts that are waited for at once, and at the end."""
    found, on = one_host()
    source = random.Random(seed)
    plan = make_plan(found, random_strategies(found, source), random_sizes(found, 3, source), world_size=3)
    score, times = score_and_times(found.graph, plan, on)
    names = tuple(d.name for d in on.devices)
    played = play(score.events(times), names)
    assert score.step_s(times) == pytest.approx(played.step_s, rel=1e-12)
    late = [s for s in played.spans if s.kind == "hosts_sum"]
    assert len(late) == sum(act.over_hosts for act in score.acts)
    assert all(a.end_s <= b.start_s * (1 + 1e-12) for a, b in itertools.pairwise(late))
    updates = [s.start_s for s in played.spans if s.kind == "update"]
    assert not late or min(updates) >= late[-1].end_s * (1 - 1e-12)


def test_some_sums_are_late_and_some_are_not() -> None:
    """So that the test above compares both."""
    found, on = one_host()
    late, at_once = 0, 0
    for seed in range(12):
        source = random.Random(seed)
        plan = make_plan(found, random_strategies(found, source), random_sizes(found, 3, source), world_size=3)
        acts = sum(act.over_hosts for act in score_and_times(found.graph, plan, on)[0].acts)
        late, at_once = late + acts, at_once + len(summed(found.graph)) - acts
    assert late > 10 and at_once > 10


def test_the_plan_s_own_step_as_run_is_its_program_s() -> None:
    plan = unequal()
    for number, host in enumerate(UNEQUAL.hosts):
        inside, graph = plan.inside_of(number), graph_of(BUSY.graph, plan, number)
        score, times = score_and_times(graph, inside, ClusterSpec(name="part", hosts=(host,)))
        assert inside.predicted.as_run_s == pytest.approx(score.step_s(times), rel=0.02)  # bundles may go other ways


@cache
def normed() -> Choices:
    """Every batch norm sums over hosts, forward and backward, and all wait for each other there."""
    layers = [m for _ in range(3) for m in (nn.Linear(256, 256), nn.BatchNorm1d(256), nn.GELU())]
    with torch.device("meta"):
        model, x = nn.Sequential(*layers), torch.empty(512, 256)
    return choices(capture(model, x, loss_fn=lambda out: out.square().mean(), name="normed"))


@pytest.mark.parametrize("batches", [1, 4])
def test_what_hosts_wait_for_each_other_is_in_the_step_as_run(batches: int) -> None:
    """One host has quick products and slow memory, the other one the opposite: each is ahead by turns."""
    on = cluster((8,), (0.5,), memory_bandwidth=("5GB/s", "2000GB/s"), launch="1us")
    plan = plan_mesh(normed(), on, effort="quick", batches=batches)
    alone_s = max(plan.inside_of(h).predicted.as_run_s for h in range(2))
    assert plan.predicted.as_run_s > 1.1 * alone_s
    if batches == 1:
        assert plan.predicted.as_run_s == pytest.approx(play_mesh(normed().graph, plan, on).step_s, rel=1e-9)


def test_late_sums_hide_behind_the_backward_pass() -> None:
    """One device a host: the first gradients are on their way while others are made, and the last is waited for."""
    found, on = mlp(batch=256, width=64, layers=6), cluster((0.05,), (0.05,), network="1GB/s")
    plan = quick(found, on)
    score, times = score_and_times(
        graph_of(found.graph, plan, 0), plan.inside_of(0), ClusterSpec(name="part", hosts=on.hosts[:1])
    )
    played = play(score.events(times), ("only",))
    late = [s.seconds for s in played.spans if s.kind == "hosts_sum"]
    assert len(late) == 12  # six weights, six biases
    (computing,) = played.busy_s
    assert max(computing, sum(late)) + min(late) <= played.step_s <= computing + 0.8 * sum(late)
