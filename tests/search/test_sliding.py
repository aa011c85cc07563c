"""Where on their way values are converted: the same collectives and numbers, and the shortest step as run."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.planning_pins import Encoder, drawn_cluster, drawn_model
from hap.capture import capture, interpret, source_values
from hap.codegen.lowering import lower
from hap.graph import Graph, Value
from hap.placement import REPLICATE, Partial
from hap.plan import Strategy
from hap.rules.choices import choices
from hap.runtime.lockstep import run_lockstep
from hap.search import plan_graph, planner
from hap.search.changed import changed
from hap.search.found import Found
from hap.search.judge import as_run_s
from hap.search.limits import LIMITS
from hap.search.pins import Pins
from hap.search.planner import Search
from hap.search.problem import Problem
from hap.search.sliding import SAME, or_slid, slid
from tests.search.models import cluster, plan_of

WHOLE = Pins(placements={"*": "R", "args.*": "S(0)"})
SHARDED = Pins(placements={"*.weight": "S(0)", "args.*": "S(0)"})
FREELY = Pins()


@cache
def captured() -> tuple[Encoder, torch.Tensor, Graph]:
    """A language model with its embedding as its last weight, whose gradients come through views and quotients."""
    torch.manual_seed(0)
    model = Encoder(16, 2, 24, tied=True).double()
    batch = torch.randint(0, 24, (6, 4))
    return model, batch, capture(model, (batch,))


def searched(pins: Pins) -> tuple[Search, Found]:
    devices = cluster((0.01, "1GB"), (0.005, "1GB"), (0.002, "1GB"), network="1GB/s", memory_bandwidth="1GB/s")
    search = Search(Problem.state(choices(captured()[2]), devices, "adamw", pins), LIMITS["normal"])
    return search, search.run()


def slid_both_ways(search: Search, best: Found) -> tuple[Found, Found]:
    """Sooner, and later."""
    problem = search.problem
    ways = (slid(problem, best.strategies, later=later) for later in (False, True))
    sooner, later = (changed(problem, best, strategies) for strategies in ways)
    return sooner, later


def sent(found: Found, graph: Graph) -> Counter[tuple[str, int]]:
    return Counter((c.need.collective, graph.meta(c.need.value).nbytes) for c in found.evaluation.conversions)


@pytest.mark.parametrize("pins", [WHOLE, SHARDED, FREELY], ids=["whole", "in shards", "freely"])
def test_the_same_is_sent_and_computed_elsewhere(pins: Pins) -> None:
    model, batch, graph = captured()
    search, best = searched(pins)
    values = interpret(graph, source_values(graph, model, (batch,), tangent=1.3))
    sooner, later = slid_both_ways(search, best)
    assert sooner.strategies != later.strategies
    for found in (sooner, later):
        assert sent(found, graph) == sent(best, graph)
        assert found.evaluation.step_s == pytest.approx(best.evaluation.step_s, rel=1e-6)
        step = run_lockstep(lower(graph, plan_of(search.problem.choices, search.problem.cluster, found)), values)
        torch.testing.assert_close(step.loss, values[graph.loss], rtol=1e-12, atol=0)
        for target, value in graph.gradients.items():
            torch.testing.assert_close(step.gradients[target], values[value], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("pins", [WHOLE, SHARDED, FREELY], ids=["whole", "in shards", "freely"])
def test_from_wherever_they_are_all_are_as_soon_as_can_be(pins: Pins) -> None:
    search, best = searched(pins)
    sooner, later = slid_both_ways(search, best)
    problem = search.problem
    assert not slid(problem, sooner.strategies, later=False) and not slid(problem, later.strategies, later=True)
    assert {**later.strategies, **slid(problem, later.strategies, later=False)} == sooner.strategies
    for start in (best, sooner, later):
        found, seconds = or_slid(search, start, as_run_s(search.chooser, start))
        assert seconds is not None and seconds == pytest.approx(as_run_s(search.chooser, found), rel=1e-12)
        assert seconds <= min(as_run_s(search.chooser, f) for f in (best, sooner, later)) * (1 + SAME)


def test_a_sum_is_taken_before_the_view_of_it_or_behind_it() -> None:
    graph = captured()[2]
    sooner, later = slid_both_ways(*searched(WHOLE))
    views = [n.name for n in graph.nodes if n.op.startswith("aten.view") and n.phase == "backward"]

    def ways(found: Found) -> Counter[bool]:
        return Counter(isinstance(found.strategies[name].inputs[0], Partial) for name in views)

    assert ways(sooner)[True] == 0 < ways(later)[True]


class Sum(nn.Module):
    """Of a product's sum and its view both are read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x.t() @ (x @ self.weight)
        return F.gelu(made).sum() + F.tanh(made.view(64)).square().sum()


def test_what_others_read_as_it_was_made_stays() -> None:
    """A partial sum that is wanted whole by two calls is converted once, for both."""
    graph = capture(Sum(), (torch.randn(6, 8, dtype=torch.float64),))
    found, devices = choices(graph), cluster((10, "16GB"), (5, "16GB"))
    search = Search(Problem.state(found, devices, "adamw", WHOLE), LIMITS["normal"])
    best = search.run()
    product = next(n for n in graph.nodes if n.op == "aten.mm.default" and len(graph.users[Value(n.name)]) > 1)
    strategies: dict[str, Strategy] = dict(best.strategies)
    readers = {user.name for user, _ in graph.users[Value(product.name)]}
    for name in (product.name, *readers):
        wanted = Partial if name == product.name else type(REPLICATE)
        strategies[name] = next(s for s in found.strategies[name] if isinstance(s.outputs[0], wanted))
    assert not readers & slid(search.problem, strategies, later=True).keys()


class Row(nn.Module):
    """Of a product one row is read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.tanh((x.t() @ (x @ self.weight))[0]).square().sum()


def test_of_a_row_no_more_and_no_less_is_sent() -> None:
    graph = capture(Row(), (torch.randn(6, 8, dtype=torch.float64),))
    found, devices = choices(graph), cluster((10, "16GB"), (5, "16GB"))
    search = Search(Problem.state(found, devices, "adamw", WHOLE), LIMITS["normal"])
    best = search.run()
    row = next(n for n in graph.nodes if n.op.startswith("aten.select"))
    product = row.inputs[0].node
    for way in (Partial, type(REPLICATE)):
        strategies = dict(best.strategies)
        strategies[product] = next(s for s in found.strategies[product] if isinstance(s.outputs[0], Partial))
        strategies[row.name] = next(s for s in found.strategies[row.name] if isinstance(s.outputs[0], way))
        for later in (False, True):
            assert row.name not in slid(search.problem, strategies, later=later)


def test_nothing_is_asked_where_nothing_was_played() -> None:
    search, best = searched(WHOLE)
    assert or_slid(search, best, None) == (best, None)


def test_a_plan_is_shorter_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case of ``benchmarks/planning_pins.py``."""
    draw = random.Random(20)
    (_, found), on = drawn_model(draw), drawn_cluster(draw)
    asked_s = plan_graph(found, on).predicted.as_run_s
    monkeypatch.setattr(planner, "or_slid", lambda _, best, overlapped_s: (best, overlapped_s))
    assert asked_s < 0.99 * plan_graph(found, on).predicted.as_run_s
