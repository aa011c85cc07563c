"""Which parameters are whole and which in shards, one by one: shorter as run, and the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import hap
from hap.capture import capture, interpret, source_values
from hap.cluster import ClusterSpec
from hap.codegen.lowering import lower
from hap.graph import Graph
from hap.placement import Shard
from hap.plan import Plan
from hap.rules.choices import Choices, choices
from hap.runtime.lockstep import run_lockstep
from hap.search import mixing, planner, postponing
from hap.search.found import Found, used_groups
from hap.search.judge import as_run_s, finest
from hap.search.limits import LIMITS
from hap.search.mixing import _Mixture, or_mixed
from hap.search.onward import onward
from hap.search.pins import Pins
from hap.search.planner import Search, plan_graph
from hap.search.problem import Problem
from hap.search.recompute import after_steps, blocks_of, steps_of
from tests._support import gpt2
from tests._support.ranks import run_alike
from tests.runtime.test_features_models import apart
from tests.search.models import cluster, mlp, plan_of

DEEP = mlp(batch=4096, width=1024, layers=16)
SLOW = cluster((10, "16GB"), (10, "16GB"), (5, "16GB"), network="3GB/s")  # all sums take as long as all calls
WHOLE, SHARDED = Pins(placements={"*": "R", "args.*": "S(0)"}), Pins(placements={"*": "S(0)", "args.*": "S(0)"})


def weights(found: Found | Plan, graph: Graph) -> list[bool]:
    """Of every matrix whether it lies in shards."""
    strategies = found.strategies if isinstance(found, Found) else {n.name: found.strategy(n.name) for n in graph.nodes}
    matrices = [n for n in graph.sources("parameter") if len(n.meta.shape) > 1]
    return [isinstance(strategies[n.name].outputs[0], Shard) for n in matrices]


@cache
def planned(found_by: str) -> tuple[Search, Found, float]:
    """The search's best before parameters are turned, freely or with all of them as pinned."""
    pins = {"all whole": WHOLE, "all in shards": SHARDED}.get(found_by, Pins())
    search = Search(Problem.state(DEEP, SLOW, "adamw", pins), LIMITS["normal"])
    return search, *onward(search.chooser, *finest(search.chooser, search.run(), search.met))


def test_some_of_each_is_shorter_than_all_whole_or_all_in_shards() -> None:
    search, best, best_s = planned("freely")
    found, seconds = or_mixed(search, best, best_s)
    assert seconds is not None and found.fits
    assert seconds == pytest.approx(as_run_s(search.chooser, found), rel=1e-12)
    for other in ("freely", "all whole", "all in shards"):
        assert seconds < 0.97 * planned(other)[2]
    sharded = weights(found, DEEP.graph)
    assert 0.2 < sum(sharded) / len(sharded) < 0.8


def test_the_planner_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = plan_graph(DEEP, SLOW)
    monkeypatch.setattr(postponing, "PARTS", ())
    plan = plan_graph(DEEP, SLOW)
    search, best, best_s = planned("freely")
    found, seconds = or_mixed(search, best, best_s)
    assert plan.predicted.overlapped_s == seconds and weights(plan, DEEP.graph) == weights(found, DEEP.graph)
    assert shorter.predicted.as_run_s < plan.predicted.as_run_s
    for move in ("or_mixed", "or_runner_up"):
        monkeypatch.setattr(planner, move, lambda search, best, seconds: (best, seconds))
    without = plan_graph(DEEP, SLOW)
    assert len(set(weights(without, DEEP.graph)[5:-5])) == 1  # one decision for all layers that are alike


def test_it_is_not_asked_where_next_to_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there are parameters that could be turned."""
    other = cluster((10, "16GB"), (10, "16GB"), (5, "16GB"), network="100GB/s")
    search = Search(Problem.state(DEEP, other, "adamw", Pins()), LIMITS["normal"])
    best = search.run()
    assert _Mixture.of(search.problem, best).kinds
    monkeypatch.setattr(mixing, "_Mixture", None)
    assert or_mixed(search, best, as_run_s(search.chooser, best))[0] is best


def test_small_kinds_go_together_only_where_the_wire_is_busy_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    search, best, best_s = planned("freely")
    assert _Mixture.of(search.problem, best).small  # biases
    asked: list[set[int]] = []
    inner = _Mixture.turned
    monkeypatch.setattr(_Mixture, "turned", lambda of, parts: asked.append(set(parts)) or inner(of, parts))
    for busy_s, expected in ((0.5 * best_s, False), (0.95 * best_s, True)):
        asked.clear()
        monkeypatch.setattr(mixing, "played_wire_s", lambda *_, busy_s=busy_s: busy_s)
        or_mixed(search, best, best_s)
        assert asked and any(mixing.TOGETHER in parts for parts in asked) is expected


def test_what_reads_a_piece_of_a_parameter_is_left() -> None:
    """Tensor parallel: a call that is dealt out by a weight's rows does not read it whole."""
    pins = Pins(placements={"0.weight": "S(0)", "2.weight": "S(1)", "args.*": "R", "targets.*": "R"})
    search = Search(Problem.state(mlp(64, 256), SLOW, "adamw", pins), LIMITS["normal"])
    best = search.run()
    assert weights(best, search.problem.choices.graph) == [True, True]
    assert _Mixture.of(search.problem, best).kinds == ()


def test_pinned_parameters_are_left() -> None:
    search, best, _ = planned("all whole")
    assert _Mixture.of(search.problem, best).kinds == ()


def test_ranks_that_are_left_out_keep_nothing() -> None:
    _, best, _ = planned("all whole")
    mixture = _Mixture.of(planned("freely")[0].problem, replace(best, left_out=(2,)))
    found = next(mixture.turned({0: 1.0})).found
    new = set(used_groups(found.strategies.values())) - set(used_groups(best.strategies.values()))
    assert new and all(found.sizes[group][2] == 0 < found.sizes[group][0] for group in new)


# ---- what it means ----


class Deep(nn.Module):
    """Layers that are alike, of which one weight is used twice and one is transposed, with biases and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.mixed = nn.Parameter(torch.randn(3, 12, 12))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(self.norm(x)))
        x = torch.tanh(x @ self.layers[0].weight) @ self.mixed[1]
        return nn.functional.mse_loss(x, y)


@cache
def captured() -> tuple[Deep, tuple[torch.Tensor, torch.Tensor], Graph]:
    torch.manual_seed(0)
    model = Deep().double()
    batch = (torch.randn(11, 12, dtype=torch.float64), torch.rand(11, 12, dtype=torch.float64))
    return model, batch, capture(model, batch)


TOY: ClusterSpec = cluster((0.01, "1GB"), (0.005, "1GB"), (0.002, "1GB"), network="1GB/s", memory_bandwidth="1MB/s")


def mixed_plan(
    found: Choices, devices: ClusterSpec, pins: Pins, part: float, *, repeated: bool = False
) -> tuple[Plan, list[bool], list[bool]]:
    """So much of every kind turned of the plan that has all parameters as pinned, and repeats what blocks offer or
    nothing; its matrices before and after."""
    best = Search(Problem.state(found, devices, "adamw", pins), LIMITS["quick"]).run()
    problem = Problem.state(found, devices, "adamw", Pins())  # where they may lie otherwise
    if repeated:
        blocks = blocks_of(problem)
        best = replace(best, recomputed=after_steps(blocks, len(steps_of(blocks))))
        assert best.repeated
    mixture = _Mixture.of(problem, best)
    assert mixture.kinds
    mixed = next(mixture.turned(dict.fromkeys(range(len(mixture.kinds)), part))).found
    plan = plan_of(found, devices, mixed)
    return plan, weights(best, found.graph), weights(mixed, found.graph)


@pytest.mark.parametrize("part", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("pins", [WHOLE, SHARDED], ids=["from whole", "from shards"])
def test_every_mixture_computes_what_one_device_computes(pins: Pins, part: float) -> None:
    model, batch, graph = captured()
    plan, before, after = mixed_plan(choices(graph), TOY, pins, part)
    assert part < 1 or sum(b != a for b, a in zip(before, after, strict=True)) >= 3
    values = interpret(graph, source_values(graph, model, batch, tangent=1.3))
    step = run_lockstep(lower(graph, plan), values, check=True)
    torch.testing.assert_close(step.loss, values[graph.loss], rtol=1e-12, atol=0)
    for target, value in graph.gradients.items():
        torch.testing.assert_close(step.gradients[target], values[value], rtol=1e-10, atol=1e-12)


def train(rank: int, plans: list[Plan]) -> list[list[float]]:
    """Errors of the loss and of all gradients of GPT-2 by each plan, as it is run by default."""
    model, ids = gpt2.build(), gpt2.batch(1)
    expected = gpt2.lm_loss(model(ids), ids)
    expected.backward()
    found = []
    for plan in plans:
        given = {"example_inputs": (gpt2.batch(),), "example_targets": gpt2.batch(), "loss_fn": gpt2.lm_loss}
        program = hap.compile(gpt2.build(), plan=plan, **given)
        mine, targets = program.shard_batch((ids,), ids)
        loss = program(*mine, targets=targets)
        loss.backward()
        gradients = program.full_gradients()
        errors = [apart(gradients[n], p.grad) for n, p in model.named_parameters() if n in gradients]
        found.append([apart(loss.detach(), expected.detach()), *errors])
    return found


SOME = ((WHOLE, 0.5, False), (WHOLE, 1.0, True), (SHARDED, 1.0, False))
OTHERS = ((WHOLE, 1.0, False), (SHARDED, 0.5, False), (SHARDED, 1.0, True))


@pytest.mark.parametrize("mixtures", [SOME, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["some", "others"])
def test_real_ranks_compute_what_one_device_computes(mixtures: Sequence[tuple[Pins, float, bool]]) -> None:
    """Of each: pins, the part of every kind that is turned, and whether calls are made again."""
    found, three = choices(gpt2.graph()), cluster(*((t, "1GB") for t in (1e-3, 5e-4, 2e-4)), memory_bandwidth="1GB/s")
    mixed = [mixed_plan(found, three, pins, part, repeated=repeated) for pins, part, repeated in mixtures]
    assert all(before != after for _, before, after in mixed)
    assert [bool(plan.recomputed) for plan, _, _ in mixed] == [repeated for *_, repeated in mixtures]
    for rank in run_alike(3, train, [plan for plan, _, _ in mixed]):
        for errors in rank:
            assert len(errors) == 1 + 28 and max(errors) < 1e-10
