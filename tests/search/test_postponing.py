"""Which calls of the backward pass wait: shorter as run, within memory, and the search's clock is the program's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.codegen.lowering import lower
from hap.codegen.passes.runner import print_program
from hap.codegen.program import Convert
from hap.cost_models.evaluate import evaluate
from hap.order import program_parts
from hap.plan import Plan, Recomputed
from hap.report.diff import diff
from hap.report.explain import explain
from hap.report.summary import summarize
from hap.rules.choices import Choices, choices
from hap.search import planner, postponing
from hap.search.changed import changed
from hap.search.found import Found
from hap.search.judge import played
from hap.search.limits import LIMITS
from hap.search.mixing import or_mixed
from hap.search.pins import Pins
from hap.search.planner import Search, plan_graph
from hap.search.problem import Problem
from hap.search.refine import at_sizes
from hap.search.tempo import played_s, unplaced
from tests.search.models import cluster

WIDTH, WORDS, BATCH = 512, 4096, 16384
PINS = Pins(placements={"*": "R", "args.*": "S(0)"})  # data parallel: all gradients are sums


class Tied(nn.Module):
    """Layers between two uses of one wide weight: its gradient's first term is made first and sent last. What lies
    before them makes the end of the backward pass as full as its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(WORDS))
        self.wide = nn.Parameter(torch.empty(WORDS, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x * self.scale).tanh() @ self.wide
        for layer in self.layers:
            x = layer(x).relu()
        return (x @ self.wide.T).square().mean()


@cache
def tied() -> Choices:
    with torch.device("meta"):
        model, x = Tied(), torch.empty(BATCH, WORDS)
    return choices(capture(model, x, name="tied"))


def devices(network: str = "3GB/s", memory: str = "16GB") -> ClusterSpec:
    return cluster((10, memory), (10, memory), (5, memory), network=network)


@cache
def planned(network: str = "3GB/s", memory: str = "16GB", *, off: bool = False) -> Plan:
    parts, postponing.PARTS = postponing.PARTS, () if off else postponing.PARTS
    try:
        return plan_graph(tied(), devices(network, memory), pins=PINS)
    finally:
        postponing.PARTS = parts


def products(plan: Plan) -> list[str]:
    """Of the backward pass, in the order in which they run."""
    graph = tied().graph
    return [n.name for n in program_parts(graph, plan.postponed)[2] if n.op == "aten.mm.default"]


def test_a_term_that_is_sent_last_waits_until_the_wire_has_work() -> None:
    plan, without = planned("0.7GB/s"), planned("0.7GB/s", off=True)
    graph = tied().graph
    late = [name for names in plan.postponed.values() for name in names]
    assert late and not without.postponed
    (term,) = [n for n in late if graph.by_name[n].meta.shape in ((WORDS, WIDTH), (WIDTH, WORDS))]
    assert products(plan).index(term) > 2, "the layers' gradients are on their way by then"
    assert plan.predicted.overlapped_s is not None and without.predicted.overlapped_s is not None
    assert plan.predicted.overlapped_s < 0.98 * without.predicted.overlapped_s
    assert plan.predicted.step_s == without.predicted.step_s, "with nothing overlapped the order is the graph's"


def test_what_takes_longer_than_its_exchange_comes_last() -> None:
    """On a quicker network no gradient is sent for as long as it takes to make it."""
    layers = [n for n in planned().postponed[""] if tied().graph.by_name[n].meta.shape == (WIDTH, WIDTH)]
    assert len(layers) > 10 and products(planned())[-len(layers) :] == layers


def test_what_is_told_is_what_the_program_takes() -> None:
    plan, graph = planned(), tied().graph
    assert played(graph, plan, lower(graph, plan), devices()).step_s == pytest.approx(plan.predicted.overlapped_s)
    without = plan.model_copy(update={"postponed": {}})
    longer = played(graph, without, lower(graph, without), devices()).step_s
    assert longer == pytest.approx(planned(off=True).predicted.overlapped_s)


def test_the_ledger_knows_what_lives_longer() -> None:
    plan, graph = planned(), tied().graph
    strategies = {n.name: plan.strategy(n.name) for n in graph.nodes}
    here, without = (
        evaluate(graph, strategies, plan.sizes, devices(), postponed=late) for late in (plan.postponed, {})
    )
    assert plan.predicted.memory_bytes == here.memory_bytes
    assert planned(off=True).predicted.memory_bytes == without.memory_bytes
    assert here.memory_bytes != without.memory_bytes
    assert here.step_s == without.step_s


def test_what_does_not_fit_is_not_postponed() -> None:
    """With as much memory as the plan without it needs, and a little."""
    held, least = (max(planned(off=off).predicted.memory_bytes) for off in (False, True))
    assert held > least
    memory = f"{(held + least) / 2 / 0.9 / 1e6:.6f}MB"
    plan = planned(memory=memory)
    assert not plan.postponed and max(plan.predicted.memory_bytes) < held


@pytest.mark.parametrize("network", ["1000GB/s", "10MB/s"])
def test_where_nothing_is_gained_nothing_is_postponed(network: str) -> None:
    assert not planned(network).postponed


def test_a_quick_search_asks_too() -> None:
    quick = plan_graph(tied(), devices(), pins=PINS, effort="quick")
    assert quick.postponed and quick.postponed == planned().postponed


def test_the_same_plan_every_time() -> None:
    planned.cache_clear()
    first = planned().to_json()
    planned.cache_clear()
    assert planned().to_json() == first


def test_steps_that_repeat_calls_are_asked_about_too() -> None:
    """What a postponed call reads is made again later, and the ledger knows when."""
    search = Search(Problem.state(tied(), devices(), "adamw", PINS), LIMITS["normal"])
    calls = tuple(n.name for n in tied().graph.nodes if n.op == "aten.relu.default")
    again = (Recomputed(block="", what="cheap", calls=calls),)
    best = changed(search.problem, replace(search.run(), recomputed=again), {})
    without_s = played_s(search.problem, best)
    found, found_s = postponing.or_postponed(search, best, without_s)
    assert found.postponed and found.recomputed == again and found_s is not None and found_s < 0.98 * without_s
    late = evaluate(tied().graph, found.strategies, found.sizes, devices(), recomputed=calls, postponed=found.postponed)
    assert found.evaluation.memory_bytes == late.memory_bytes != best.evaluation.memory_bytes
    assert found.evaluation.step_s == best.evaluation.step_s


class Wide(nn.Module):
    """A wide weight at the end, whose gradient autograd makes after what the layers before it wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.wide = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.wide(x).square().mean()


def test_what_the_wire_has_nothing_to_do_without_goes_ahead_of_the_chain() -> None:
    with torch.device("meta"):
        model, x = Wide(), torch.empty(BATCH, WIDTH)
    graph = (found := choices(capture(model, x, name="wide"))).graph
    plan = plan_graph(found, devices("0.7GB/s"), pins=PINS)
    before, after = (
        [n for n in program_parts(graph, late)[2] if n.op == "aten.mm.default"] for late in ({}, plan.postponed)
    )
    assert [n.meta.shape for n in before[:2]] == [(BATCH, WIDTH), (WORDS, WIDTH)]
    assert after[:2] == before[1::-1], "the weight's gradient first"
    assert plan.predicted.overlapped_s is not None
    plain = plan.model_copy(update={"postponed": {}})
    assert plan.predicted.overlapped_s < 0.98 * played(graph, plain, lower(graph, plain), devices("0.7GB/s")).step_s


def test_it_is_told_wherever_a_plan_is() -> None:
    plan, without = planned("0.7GB/s"), planned("0.7GB/s", off=True)
    count = sum(len(names) for names in plan.postponed.values())
    words = f"{count} calls of the backward pass run out of turn, so that the wire has work"
    assert words in summarize(plan) and words in explain(plan)
    assert words[4:] not in summarize(without)
    assert f"postponed in the backward pass: 0 calls; now {count} calls" in str(diff(without, plan))


def test_which_parameters_are_whole_is_asked_again_of_the_new_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def recorded(search: Search, best: Found, overlapped_s: float | None) -> tuple[Found, float | None]:
        asked.append(bool(best.postponed))
        return or_mixed(search, best, overlapped_s)

    monkeypatch.setattr(planner, "or_mixed", recorded)
    plan = plan_graph(tied(), devices(), pins=PINS)
    assert plan.postponed and asked == [False, True]
    asked.clear()
    assert not plan_graph(tied(), devices("1000GB/s"), pins=PINS).postponed and asked == [False]


def test_the_order_is_not_asked_again_of_what_it_was_asked_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is mixed where all parameters are pinned: the plan is that of one question."""
    asked: list[bool] = []

    def recorded(search: Search, best: Found, overlapped_s: float | None) -> tuple[Found, float | None]:
        asked.append(bool(best.postponed))
        return postponing.or_postponed(search, best, overlapped_s)

    monkeypatch.setattr(planner, "or_postponed", recorded)
    plan = plan_graph(tied(), devices(), pins=PINS)
    assert asked == [False] and plan.postponed
    assert plan.predicted == planned().predicted and plan.postponed == planned().postponed


def test_what_was_played_is_not_drafted_again() -> None:
    """What is kept of it is what a draft at any sizes comes to."""
    search = Search(Problem.state(tied(), devices(), "adamw", Pins()), LIMITS["normal"])
    best = search.run()
    group = next(name for name in best.groups if len(set(best.sizes[name])) > 1)
    sizes = {name: best.sizes[name][::-1] if name == group else best.sizes[name] for name in best.groups}
    fresh = unplaced(search.problem, best, sizes)
    assert unplaced(search.problem, best, best.sizes) is fresh
    search.problem.unplaced.clear()
    again = unplaced(search.problem, best, {name: best.sizes[name] for name in best.groups})
    assert again is not fresh and print_program(again) == print_program(fresh)
    assert any(isinstance(i, Convert) for i in again.backward)  # none in a bundle yet
    played_s(search.problem, replace(best, strategies=dict(best.strategies)))
    assert len(search.problem.unplaced) == 1, "of the same strategies once"


def test_what_is_changed_later_knows_the_order() -> None:
    """``changed`` keeps what is postponed, and counts its memory; so does the same at other sizes."""
    search = Search(Problem.state(tied(), devices(), "adamw", PINS), LIMITS["normal"])
    best = search.run()
    late = replace(best, postponed=planned().postponed)
    for found in (changed(search.problem, late, {}), at_sizes(search.problem, late, late.sizes)):
        assert found.postponed == planned().postponed
        assert max(found.evaluation.memory_bytes) > max(best.evaluation.memory_bytes)


def test_what_sends_nothing_may_overrun_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory: each parameter is gathered again before its layer's calls, which wait for it, and its gradient,
    longer than that wait, would else be made at the end."""
    layers = [layer for _ in range(16) for layer in (nn.Linear(512, 512), nn.ReLU())]
    with torch.device("meta"):
        found = choices(capture(nn.Sequential(*layers), torch.empty(768, 512), loss_fn=lambda y: y.square().mean()))
    on = ClusterSpec.from_yaml(
        "name: little\nbackend: gloo\nhosts:\n  - name: h\n    devices: [{name: d, count: 3, tflops: {float32: 0.05}, "
        "memory: 36MB, memory_bandwidth: 10GB/s}]\n    link: {bandwidth: 1GB/s, latency: 50us}\n"
    )
    free = plan_graph(found, on).predicted.overlapped_s
    inner = postponing._Backward.postponed
    monkeypatch.setattr(postponing._Backward, "postponed", lambda of, part, ahead, over: inner(of, part, ahead=ahead))
    without = plan_graph(found, on).predicted.overlapped_s
    assert free is not None and without is not None and free < 0.98 * without
