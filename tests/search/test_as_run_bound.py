"""Below every program as it is played, whatever its strategies and shares, and near to some."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from benchmarks import planning_cases
from benchmarks.zoo_models.case import class_loss, tokens
from benchmarks.zoo_models.hap_paper import Shape, TextModel, top_two_gate
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.codegen.lowering import lower
from hap.codegen.passes.bucket import LIMIT_BYTES
from hap.codegen.passes.runner import run_passes, standard_passes
from hap.codegen.program import Call
from hap.cost_models.collective import candidates
from hap.placement import PARTIAL, REPLICATE, Placement, Shard, Sizes
from hap.plan import Collective
from hap.rules.choices import Choices, choices
from hap.search import Pins, plan_graph, protos
from hap.search.as_run_bound import Streams, as_run_bound_s, may_be_folded
from hap.search.bound import weighted_bound
from hap.search.found import Found
from hap.search.judge import finest
from hap.search.limits import LIMITS
from hap.search.planner import Search
from hap.search.problem import Problem
from hap.search.refine import at_sizes, reshare
from hap.search.relaxation import relaxation
from hap.search.score import Score, Times, Work
from hap.search.tempo import played_s
from tests._support.plans import random_sizes, random_strategies
from tests.search.models import cluster, gpt2, mixer, mlp
from tests.search.test_bound_measured import measured

FREE, WHOLE, SHARDED = Pins(), Pins(placements={"*": "R"}), Pins(placements={"*": "S(0)"})
SLOW, FAST = "0.05GB/s", "20GB/s"


def on(network: str) -> ClusterSpec:
    return cluster((4, "16GB"), (2, "16GB"), (1, "16GB"), network=network)


def state(model: Choices, where: ClusterSpec, pins: Pins = FREE) -> Problem:
    return Problem.state(model, where, "adamw", pins)


@cache
def experts() -> Choices:
    """HAP's own mixture in small, half of its layers mixtures."""
    with torch.device("meta"):
        model = TextModel(Shape(2, 64, 4, 128, 16, 6, 12), 100, top_two_gate, 2.5)
        ids, labels = tokens(100, 12, 16), tokens(100, 12, 16)
    return choices(capture(model, ids, loss_fn=class_loss, example_targets=labels, name="experts"))


ONE, OTHER = Shard(0, 1, 12, 1, "g"), Shard(1, 1, 12, 1, "h")
ENDS: Mapping[Collective, tuple[Placement, Placement]] = {
    "all_gather": (ONE, REPLICATE),
    "all_reduce": (PARTIAL, REPLICATE),
    "reduce_scatter": (PARTIAL, ONE),
    "all_to_all": (ONE, OTHER),
}
SIZES = (4, 4, 4), (6, 4, 2), (12, 0, 0), (0, 5, 7)
MODELS: Mapping[str, Callable[[], Choices]] = {
    "mlp": lambda: mlp(512, 256, 3),
    "mixer": lambda: mixer(8, 64, 96),
    "gpt2": lambda: gpt2(1),
    "experts": experts,
}


def met(problem: Problem) -> Iterator[Found]:
    """All that a search meets and chooses, each with its shares dealt out anew, and evenly."""
    search = Search(problem, replace(LIMITS["normal"], starts=6))
    best = search.run()
    even = problem.round({}, (1.0,) * problem.world_size, (1.0,) * problem.world_size)
    for found in (finest(search.chooser, best, search.met)[0], *search.met):
        yield from (found, reshare(problem, found), at_sizes(problem, found, even))


def drawn(problem: Problem, seed: int) -> Iterator[Found]:
    """Any strategies at any sizes."""
    rng, one = random.Random(seed), next(met(problem))
    for _ in range(12):
        strategies = random_strategies(problem.choices, rng)
        sizes = random_sizes(problem.choices, problem.world_size, rng)
        yield replace(one, strategies=strategies, sizes=sizes, evaluation=problem.judge(strategies, sizes, False))


@pytest.mark.parametrize(
    ("model", "pins", "network"),
    [
        ("mlp", FREE, SLOW),
        ("mlp", SHARDED, FAST),
        ("mixer", WHOLE, SLOW),
        ("gpt2", FREE, SLOW),
        ("gpt2", SHARDED, FAST),
        pytest.param("experts", FREE, FAST, marks=pytest.mark.long),
        ("experts", SHARDED, SLOW),
    ],
)
def test_no_program_is_played_in_less(model: str, pins: Pins, network: str) -> None:
    problem = state(MODELS[model](), on(network), pins)
    bound_s, steps = as_run_bound_s(problem.facts), [played_s(problem, found) for found in met(problem)]
    if pins == FREE:
        steps += [played_s(problem, found) for found in drawn(problem, 3)]
    assert bound_s is not None and len(steps) > 5
    assert 0 < bound_s <= min(steps)


@pytest.mark.parametrize("seed", range(2))
def test_nor_on_measured_devices(seed: int) -> None:
    problem = state(mlp(batch=64, width=256), measured(seed))
    bound_s = as_run_bound_s(problem.facts)
    assert bound_s is not None
    assert 0 < bound_s <= min(played_s(problem, found) for found in (*met(problem), *drawn(problem, seed)))


def test_where_computing_takes_long_it_is_near() -> None:
    """A long batch on alike devices: gradients are nothing beside what they are made of. Biases go into the products:
    with them, the bound would be above the step."""
    problem = state(mlp(batch=1 << 20, width=64), cluster(*[(4, "64GB")] * 4, network=FAST))
    bound_s, least_s = as_run_bound_s(problem.facts), min(played_s(problem, found) for found in met(problem))
    assert bound_s is not None and 0.9 * least_s < bound_s <= least_s


def told_and_played(
    streams: Streams, kind: Collective, how: str, nbytes: Sequence[int], sizes: Sizes
) -> tuple[tuple[float, float], tuple[float, float]]:
    """What values of so many bytes cost at least, and their bundle as it is played: on the wire, and in packing."""
    work, given = Work(kind, how, len(nbytes), sum(nbytes), *ENDS[kind], None), {"g": sizes, "h": sizes}
    times = Times.of(Score((), (work,), (), (), ()), [how], streams.cluster, given, np.zeros(3))
    wire_s, packing_s = (sum(least(kind, n) for n in nbytes) for least in (streams.wire_s, streams.packing_s))
    return (wire_s, times.wire_s[0]), (packing_s, 2 * float(streams.weights @ times.table[0]))  # half at either end


@pytest.mark.parametrize("kind", list(ENDS))
def test_no_bundle_costs_less_than_its_members(kind: Collective) -> None:
    """Of any shares, by any way."""
    streams = Streams(relaxation(state(mlp(64, 64), on("1GB/s")).facts))
    for sizes, nbytes in product(SIZES, ([512], [1 << 17], [1 << 22], [512] * 5, [LIMIT_BYTES // 4] * 4, [9, 1 << 19])):
        for how in candidates(kind, streams.cluster):
            for least, seconds in told_and_played(streams, kind, how, nbytes, sizes):
                assert 0 <= least <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("kind", list(ENDS))
def test_of_alike_ranks_a_large_value_costs_as_much(kind: Collective) -> None:
    """By the fastest way; but for what shards of two dims exchange, which may be nothing."""
    streams = Streams(relaxation(state(mlp(64, 64), cluster(*[(2, "1GB")] * 3, network="1GB/s")).facts))
    ways = candidates(kind, streams.cluster)
    wire, packing = zip(*(told_and_played(streams, kind, how, [1 << 26], (4, 4, 4)) for how in ways), strict=True)
    for pairs in (packing,) if kind == "all_to_all" else (wire, packing):
        assert max(least / seconds for least, seconds in pairs) == pytest.approx(1.0, abs=0.01)


def test_where_the_wire_takes_long_it_counts() -> None:
    """Weights pinned to shards of two alike devices, and a batch of as many rows: whatever is exchanged instead of the
    weights, it takes several times what computing does."""
    model, where = mlp(batch=1024, width=1024), cluster((50, "16GB"), (50, "16GB"), network=SLOW)
    problem = state(model, where, SHARDED)
    bound_s, computing = as_run_bound_s(problem.facts), weighted_bound(problem.facts)
    assert bound_s is not None and bound_s > 5 * computing[0].seconds(computing[1])
    assert bound_s > 0.3 * min(played_s(problem, found) for found in met(problem))


def test_what_the_passes_fold_may_be_folded_and_little_else() -> None:
    """Of GPT-2's additions the biases of its four linear layers, and neither residuals nor positions; and the zeros
    that the loss's gradient is written among."""
    model = gpt2(2)
    plan = plan_graph(model, on(FAST), effort="quick")
    program = run_passes(lower(model.graph, plan), standard_passes()).program
    fused = [i for i in (*program.forward, *program.backward) if isinstance(i, Call) and "addmm" in i.op]
    names = {program.held[str(i.outputs[0])].value.node for i in fused}
    zeros = {n.name for n in model.graph.nodes if n.op == "aten.zeros_like.default"}
    found = {n.name for n in model.graph.nodes if may_be_folded(model.graph, n)}
    calls = [i for i in program.backward if isinstance(i, Call)]
    run = {program.held[name].value.node for i in calls for name in i.outputs if name is not None}
    assert len(names) == 8 and len(zeros - run) == 1 and names | (zeros - run) == found


@pytest.mark.parametrize("leave_out", [False, True])
def test_a_plan_has_it(leave_out: bool) -> None:
    """Of the devices that it is for, found beside the search or after it."""
    model, where = gpt2(2), on(FAST)
    plan = plan_graph(model, where, leave_out=leave_out)
    assert plan.world_size == 3
    expected = as_run_bound_s(state(model, where).facts)
    p = plan.predicted
    assert p.overlapped_bound_s is not None and p.overlapped_s is not None
    assert p.overlapped_bound_s == pytest.approx(expected, rel=1e-12)
    assert p.gap_as_run == 1 - p.overlapped_bound_s / p.overlapped_s


def test_where_nothing_is_known_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several batches a step, of one device, and of a program that was not played."""
    model = mlp(64, 32)
    alone = plan_graph(model, cluster((1, "1GB"))).predicted
    batches = plan_graph(model, on(FAST), batches=2).predicted
    monkeypatch.setitem(LIMITS, "normal", replace(LIMITS["normal"], played=1))  # type: ignore[index]
    large = plan_graph(model, on(FAST)).predicted
    for p in (alone, batches, large):
        assert p.overlapped_bound_s is None and p.gap_as_run is None


def vit() -> Problem:
    """A program whose costs many points have alike: GLOP's steps led in a circle from where the relaxation's end."""
    where = planning_cases.cluster("mix-16")
    pins = Pins(placements={"model.vit.embeddings.position_embeddings": "R"})
    return state(choices(planning_cases.captured("vit", where.world_size)), where, pins)


def test_steps_that_lead_in_a_circle_end(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = vit().facts
    bound_s = as_run_bound_s(facts)
    assert bound_s is not None and 0.4 < bound_s < 0.45
    monkeypatch.setattr(protos, "GOING_ROUND", 0)
    assert as_run_bound_s(facts) is None
