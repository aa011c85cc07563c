"""Terms of a tied weight's gradient that are sent apart: shorter as run, and the same numbers."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import hap
from hap.capture import capture, interpret, source_values
from hap.cluster import ClusterSpec
from hap.codegen.lowering import lower
from hap.graph import Graph
from hap.placement import PARTIAL, Placement
from hap.plan import Plan
from hap.rules.choices import Choices, choices
from hap.runtime.lockstep import run_lockstep
from hap.search import apart
from hap.search.apart import _ways, or_apart
from hap.search.assemble import assemble_plan
from hap.search.changed import changed
from hap.search.found import Found
from hap.search.judge import as_run_s
from hap.search.limits import LIMITS
from hap.search.pins import Pins
from hap.search.planner import Search, plan_graph
from hap.search.problem import Problem
from tests._support import gpt2
from tests._support.ranks import run_ranks
from tests.runtime.test_features_models import apart as errors_of
from tests.search.models import cluster

# sums of gradients take as long as the backward pass, and that of the embedding's is the last
SLOW: ClusterSpec = cluster((10, "16GB"), (10, "16GB"), (5, "16GB"), network="3GB/s")
DEALT_OUT = {"args.*": "S(0)"}
DATA_PARALLEL = Pins(placements={"*": "R", **DEALT_OUT})


class Tied(nn.Module):
    """A language model whose embedding is its last layer, too."""

    def __init__(self, words: int, hidden: int, layers: int, *, tied: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(words, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@cache
def large(tied: bool = True) -> Choices:
    with torch.device("meta"):
        model, ids = Tied(32000, 512, 8, tied=tied), torch.empty((128, 64), dtype=torch.int64)
    return choices(capture(model, (ids, ids)))


@cache
def data_parallel(tied: bool = True) -> tuple[Search, Found, float]:
    """The search for a large model, and the plan that keeps all parameters whole."""
    pinned = Search(Problem.state(large(tied), SLOW, "adamw", DATA_PARALLEL), LIMITS["quick"])
    search = Search(Problem.state(large(tied), SLOW, "adamw", Pins()), LIMITS["normal"])
    best = pinned.run()
    return search, best, as_run_s(search.chooser, best)


def sum_of(graph: Graph, target: str = "words.weight") -> str:
    return graph.gradients[target].node


def test_apart_is_shorter_than_the_sum() -> None:
    search, best, best_s = data_parallel()
    found, seconds = or_apart(search, best, best_s)
    assert seconds is not None and seconds < 0.95 * best_s and found.fits
    assert seconds == pytest.approx(as_run_s(search.chooser, found), rel=1e-12)
    name = sum_of(large().graph)
    assert best.strategies[name].outputs == (PARTIAL,) != found.strategies[name].outputs
    assert found.cost[1] > best.cost[1]  # with nothing overlapped, more is sent


def test_the_planner_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_graph(large(), SLOW, pins=Pins(placements=DEALT_OUT))
    assert plan.strategy(sum_of(large().graph)).outputs != (PARTIAL,)
    monkeypatch.setattr(apart, "_ways", lambda *_: ())
    without = plan_graph(large(), SLOW, pins=Pins(placements=DEALT_OUT))
    assert plan.predicted.overlapped_s is not None and without.predicted.overlapped_s is not None
    assert plan.predicted.overlapped_s < 0.99 * without.predicted.overlapped_s


def test_a_weight_that_is_read_once_has_no_terms() -> None:
    search, best, best_s = data_parallel(tied=False)
    found, seconds = or_apart(search, best, best_s)
    assert found is best and seconds == best_s


def test_what_is_sent_quickly_is_left_as_it_is() -> None:
    search, best, best_s = data_parallel()
    node = next(n for n in large().graph.sources("parameter") if n.target == "words.weight")
    assert list(_ways(search.problem, best, node, 0.0))
    assert not list(_ways(search.problem, best, node, 10 * best_s))


def test_pinned_parameters_stay_where_they_are() -> None:
    _, best, _ = data_parallel()
    problem = Problem.state(large(), SLOW, "adamw", DATA_PARALLEL)
    node = next(n for n in large().graph.sources("parameter") if n.target == "words.weight")
    homes = {way[node.name].outputs[0] for way in _ways(problem, best, node, 0.0)}
    assert homes == {best.strategies[node.name].outputs[0]}


# ---- what it means ----

TOY: ClusterSpec = cluster((0.01, "1GB"), (0.005, "1GB"), (0.002, "1GB"), network="1GB/s", memory_bandwidth="1GB/s")


def plans(found: Choices, target: str, pins: Pins) -> list[tuple[Placement | None, Plan]]:
    """All ways to send the terms of a parameter's gradient apart, from the plan that these pins lead to, each with
    where the terms are added."""
    best = Search(Problem.state(found, TOY, "adamw", pins), LIMITS["quick"]).run()
    problem = Problem.state(found, TOY, "adamw", Pins())
    node = next(n for n in found.graph.sources("parameter") if n.target == target)
    made = []
    for strategies in _ways(problem, best, node, 0.0):
        other = changed(problem, best, strategies)
        plan = assemble_plan(
            found,
            TOY,
            other.strategies,
            other.sizes,
            other.evaluation,
            optimizer="adamw",
            model_name=found.graph.name,
            lower_bound_s=None,
            solver={},
        )
        made.append((other.strategies[sum_of(found.graph, target)].outputs[0], plan))
    return made


def test_every_way_computes_what_one_device_computes() -> None:
    torch.manual_seed(0)
    model = Tied(500, 24, 2).double()
    batch = (torch.randint(500, (7, 3)), torch.randint(500, (7, 3)))
    graph = capture(model, batch)
    values = interpret(graph, source_values(graph, model, batch, tangent=1.3))
    made = plans(choices(graph), "words.weight", DATA_PARALLEL)
    assert len({to for to, _ in made}) >= 2 and len(made) >= 3
    for _, plan in made:
        step = run_lockstep(lower(graph, plan), values, check=True)
        torch.testing.assert_close(step.loss, values[graph.loss], rtol=1e-12, atol=0)
        for target, value in graph.gradients.items():
            torch.testing.assert_close(step.gradients[target], values[value], rtol=1e-10, atol=1e-12)


def train(rank: int, given: list[Plan]) -> list[list[float]]:
    """Errors of the loss and of all gradients of GPT-2 by each plan, as it is run by default."""
    model, ids = gpt2.build(), gpt2.batch(1)
    expected = gpt2.lm_loss(model(ids), ids)
    expected.backward()
    found = []
    for plan in given:
        example = {"example_inputs": (gpt2.batch(),), "example_targets": gpt2.batch(), "loss_fn": gpt2.lm_loss}
        program = hap.compile(gpt2.build(), plan=plan, **example)
        mine, targets = program.shard_batch((ids,), ids)
        loss = program(*mine, targets=targets)
        loss.backward()
        gradients = program.full_gradients()
        errors = [errors_of(gradients[n], p.grad) for n, p in model.named_parameters() if n in gradients]
        found.append([errors_of(loss.detach(), expected.detach()), *errors])
    return found


def test_real_ranks_compute_what_one_device_computes() -> None:
    found = choices(gpt2.graph())
    tied = next(t for t in found.graph.gradients if t.endswith("wte.weight"))
    made = plans(found, tied, Pins(placements={"*": "R", "args.*": "S(0)", "targets.*": "S(0)"}))
    assert len(made) >= 2
    for rank in run_ranks(3, train, [plan for _, plan in made]):
        for errors in rank:
            assert len(errors) == 1 + 28 and max(errors) < 1e-10
