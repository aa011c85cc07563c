"""Weights that are read twice, each reader served apart: shorter as run, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache

import pytest
import torch
from torch import nn

from hap.capture import capture, interpret, source_values
from hap.cluster import ClusterSpec
from hap.codegen.lowering import lower
from hap.graph import Graph, Node
from hap.placement import PARTIAL, REPLICATE, Shard
from hap.plan import Plan, Strategy
from hap.rules.choices import Choices, choices
from hap.runtime.lockstep import run_lockstep
from hap.search import apart
from hap.search.apart import _reads, _terms, or_apart
from hap.search.changed import changed
from hap.search.found import Found
from hap.search.judge import as_run_s
from hap.search.limits import LIMITS
from hap.search.pins import Pins
from hap.search.planner import Search, plan_graph
from hap.search.problem import Problem
from tests._support import gpt2
from tests._support.ranks import run_alike
from tests.search.models import cluster, plan_of
from tests.search.test_mixing import train

# sums of gradients take as long as the backward pass, and that of the embedding's is the last
SLOW: ClusterSpec = cluster((10, "16GB"), (10, "16GB"), (5, "16GB"), network="3GB/s")
DEALT_OUT = {"args.*": "S(0)"}
DATA_PARALLEL = Pins(placements={"*": "R", **DEALT_OUT})
IN_SHARDS = Pins(placements={"*": "R", "words.weight": "S(1)", **DEALT_OUT})


Ways = Callable[[Problem, Found, Node, float], Iterator[Mapping[str, Strategy]]]


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
        model, ids = Tied(16000, 512, 32, tied=tied), torch.empty((128, 64), dtype=torch.int64)
    return choices(capture(model, (ids, ids)))


@cache
def data_parallel(tied: bool = True, *, whole: bool = True) -> tuple[Search, Found, float]:
    """The search for a large model, and the plan that keeps all parameters whole, or all but the embedding's."""
    pins = DATA_PARALLEL if whole else IN_SHARDS
    pinned = Search(Problem.state(large(tied), SLOW, "adamw", pins), LIMITS["quick"])
    search = Search(Problem.state(large(tied), SLOW, "adamw", Pins()), LIMITS["normal"])
    best = pinned.run()
    return search, best, as_run_s(search.chooser, best)


def words(graph: Graph, target: str = "words.weight") -> Node:
    return next(n for n in graph.sources("parameter") if n.target == target)


def sum_of(graph: Graph) -> str:
    return graph.gradients["words.weight"].node


def test_terms_apart_are_shorter_than_the_sum() -> None:
    search, best, best_s = data_parallel()
    found, seconds = or_apart(search, best, best_s)
    assert seconds is not None and seconds < 0.95 * best_s and found.fits
    assert seconds == pytest.approx(as_run_s(search.chooser, found), rel=1e-12)
    name = sum_of(large().graph)
    assert best.strategies[name].outputs == (PARTIAL,) != found.strategies[name].outputs
    assert found.cost[1] > best.cost[1]  # with nothing overlapped, more is sent


def test_the_first_reader_of_shards_computes_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_terms", lambda *_: ())
    search, best, best_s = data_parallel(whole=False)
    found, seconds = or_apart(search, best, best_s)
    assert seconds is not None and seconds < 0.95 * best_s and found.fits
    (reader,) = (n.name for n in large().graph.nodes if n.op == "aten.embedding.default")
    assert best.strategies[reader].inputs[0] == REPLICATE
    assert found.strategies[reader].inputs[0] == found.strategies["p_words_weight"].outputs[0] != REPLICATE


def test_terms_in_shards_and_a_reader_that_computes_with_them_go_together() -> None:
    """The one without the other is longer."""
    search, best, best_s = data_parallel()
    graph, found_s = large().graph, or_apart(search, best, best_s)[1]
    (reader,) = (n.name for n in graph.nodes if n.op == "aten.embedding.default")
    ways = list(_terms(search.problem, best, words(graph), 0.0))
    steps = [(as_run_s(search.chooser, changed(search.problem, best, way)), way) for way in ways]
    assert min(s for s, _ in steps) == found_s
    assert {reader in way for s, way in steps if s < 1.01 * found_s} == {True}


def test_the_planner_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_graph(large(), SLOW, pins=Pins(placements=DEALT_OUT))
    assert plan.strategy(sum_of(large().graph)).outputs != (PARTIAL,)
    monkeypatch.setattr(apart, "_terms", lambda *_: ())
    monkeypatch.setattr(apart, "_reads", lambda *_: ())
    without = plan_graph(large(), SLOW, pins=Pins(placements=DEALT_OUT))
    assert plan.predicted.overlapped_s is not None and without.predicted.overlapped_s is not None
    assert plan.predicted.overlapped_s < 0.99 * without.predicted.overlapped_s


def test_a_weight_that_is_read_once_has_no_terms() -> None:
    search, best, best_s = data_parallel(tied=False)
    found, seconds = or_apart(search, best, best_s)
    assert found is best and seconds == best_s


@pytest.mark.parametrize(("ways", "whole"), [(_terms, True), (_reads, False)])
def test_what_is_sent_quickly_is_left_as_it_is(ways: Ways, whole: bool) -> None:
    search, best, best_s = data_parallel(whole=whole)
    assert list(ways(search.problem, best, words(large().graph), 0.0))
    assert not list(ways(search.problem, best, words(large().graph), 10 * best_s))


def test_of_a_weight_that_many_read_no_reader_is_served_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weight, were two readers too many."""
    search, best, _ = data_parallel(whole=False)
    node = words(search.problem.choices.graph)
    assert list(_reads(search.problem, best, node, 0.0))
    monkeypatch.setattr(apart, "MOST_READERS", 1)
    assert not list(_reads(search.problem, best, node, 0.0))


@pytest.mark.parametrize(("ways", "pins"), [(_terms, DATA_PARALLEL), (_reads, IN_SHARDS)])
def test_pinned_parameters_stay_where_they_are(ways: Ways, pins: Pins) -> None:
    _, best, _ = data_parallel(whole=pins is DATA_PARALLEL)
    problem, node = Problem.state(large(), SLOW, "adamw", pins), words(large().graph)
    assert {way[node.name].outputs[0] for way in ways(problem, best, node, 0.0)} == {
        best.strategies[node.name].outputs[0]
    }


# ---- what it means ----

TOY: ClusterSpec = cluster((0.01, "1GB"), (0.005, "1GB"), (0.002, "1GB"), network="1GB/s", memory_bandwidth="1GB/s")


def plans(found: Choices, target: str, ways: Ways, pins: Mapping[str, str], on: ClusterSpec = TOY) -> list[Plan]:
    """All ways to serve a parameter's readers apart, from a plan that keeps it whole."""
    whole = Pins(placements={"*": "R", **pins})
    best = Search(Problem.state(found, on, "adamw", whole), LIMITS["quick"]).run()
    problem, made = Problem.state(found, on, "adamw", Pins()), []
    for strategies in ways(problem, best, words(found.graph, target), 0.0):
        made.append(plan_of(found, on, changed(problem, best, strategies)))
    return made


@pytest.mark.parametrize(("ways", "least"), [(_terms, 3), (_reads, 1)])
def test_every_way_computes_what_one_device_computes(ways: Ways, least: int) -> None:
    torch.manual_seed(0)
    model = Tied(500, 24, 2).double()
    batch = (torch.randint(500, (7, 3)), torch.randint(500, (7, 3)))
    graph = capture(model, batch)
    values = interpret(graph, source_values(graph, model, batch, tangent=1.3))
    made = plans(choices(graph), "words.weight", ways, DEALT_OUT)
    assert len(made) >= least
    for plan in made:
        step = run_lockstep(lower(graph, plan), values, check=True)
        torch.testing.assert_close(step.loss, values[graph.loss], rtol=1e-12, atol=0)
        for target, value in graph.gradients.items():
            torch.testing.assert_close(step.gradients[target], values[value], rtol=1e-10, atol=1e-12)


def test_real_ranks_compute_what_one_device_computes() -> None:
    found = choices(gpt2.graph())
    tied = next(t for t in found.graph.gradients if t.endswith("wte.weight"))
    pins = {"args.*": "S(0)", "targets.*": "S(0)"}
    made = [plan for ways in (_terms, _reads) for plan in plans(found, tied, ways, pins)]
    first = next(n.name for n in found.graph.nodes if n.op == "aten.embedding.default" and "wte" in n.inputs[0].node)
    sharded = [isinstance(plan.strategy(first).inputs[0], Shard) for plan in made]
    assert any(sharded) and not all(sharded)
    for rank in run_alike(3, train, made):
        for errors in rank:
            assert len(errors) == 1 + 28 and max(errors) < 1e-10
