"""Where parameters are gathered: as they are or as views, the shorter as run, and the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import nn

from hap.capture import capture, interpret, source_values
from hap.codegen.lowering import lower
from hap.placement import REPLICATE, Replicate, Shard
from hap.plan import Strategy
from hap.rules.choices import Choices, choices
from hap.runtime.lockstep import run_lockstep
from hap.search import gathers
from hap.search.changed import changed
from hap.search.found import Found
from hap.search.gathers import all_gathered, or_gathered
from hap.search.judge import as_run_s
from hap.search.limits import LIMITS
from hap.search.pins import Pins
from hap.search.planner import Search
from hap.search.problem import Problem
from tests.search.models import cluster, plan_of

IN_SHARDS = Pins(placements={"*stack*": "S(0)", "args.*": "S(0)"})


class Stacks(nn.Module):
    """Every weight is read through a view, of which the backward pass reads a transposition. ``head`` is read as it is,
    too."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.stacks = nn.ParameterList(nn.Parameter(torch.randn(width, 1, width) / width) for _ in range(layers))
        self.head = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stack in self.stacks:
            x = torch.tanh(x @ stack.view(stack.shape[0], stack.shape[2]))
        return (x @ self.head.t() @ self.head).square().mean()


@cache
def stacks(width: int = 2048, layers: int = 6, batch: int = 2048) -> Choices:
    with torch.device("meta"):
        return choices(capture(Stacks(width, layers), (torch.empty(batch, width),)))


def search_of(found: Choices, network: str) -> tuple[Search, Found, float]:
    """The best plan with all stacks in shards."""
    devices = cluster((10, "16GB"), (10, "16GB"), (5, "16GB"), network=network)
    search = Search(Problem.state(found, devices, "adamw", IN_SHARDS), LIMITS["quick"])
    best = search.run()
    return search, best, as_run_s(search.chooser, best)


def views(found: Choices) -> list[str]:
    """Of stacks, those that read them."""
    parameters = {n.name for n in found.graph.sources("parameter") if "stack" in n.target}
    return [n.name for n in found.graph.nodes if not n.is_source and n.inputs[0].node in parameters]


def cuts_rows(strategy: Strategy) -> bool:
    return isinstance(placed := strategy.outputs[0], Shard) and placed.dim == 0


def gathered(search: Search, best: Found, *, sooner: bool) -> Found:
    strategies: dict[str, Strategy] = {}
    for kind in gathers._kinds(search.problem, best):
        for node in kind:
            strategies.update(gathers._moved(search.problem, best.strategies, node, sooner=sooner))
    return changed(search.problem, best, strategies)


def test_both_take_the_same_with_nothing_overlapped_and_another_step_as_run() -> None:
    search, best, _ = search_of(stacks(), "8GB/s")
    sooner, later = (gathered(search, best, sooner=way) for way in (True, False))
    reads = views(stacks())
    assert len(reads) == 6
    assert all(sooner.strategies[name].inputs == (REPLICATE,) for name in reads)
    assert all(isinstance(later.strategies[name].outputs[0], Shard) for name in reads)
    assert sooner.evaluation.step_s == pytest.approx(later.evaluation.step_s, rel=1e-9)
    sooner_s, later_s = (as_run_s(search.chooser, found) for found in (sooner, later))
    assert sooner_s < 0.97 * later_s
    for start, start_s in ((sooner, sooner_s), (later, later_s)):
        found, seconds = all_gathered(search, start, start_s)
        assert seconds == sooner_s and found.strategies == sooner.strategies
        found, mixed_s = or_gathered(search, start, start_s)
        assert mixed_s is not None and mixed_s <= seconds and mixed_s == as_run_s(search.chooser, found)


def test_the_plan_stays_where_nothing_is_shorter_and_where_nothing_was_played() -> None:
    search, best, best_s = search_of(stacks(), "8GB/s")
    found, seconds = or_gathered(search, best, best_s)
    assert or_gathered(search, found, seconds) == (found, seconds)
    assert or_gathered(search, best, None) == (best, None)


def test_what_is_read_otherwise_is_left_as_it_is() -> None:
    """A parameter that a product reads as it is, or whose view some call reads in shards."""
    search, best, _ = search_of(stacks(), "8GB/s")
    names = {n.name for kind in gathers._kinds(search.problem, best) for n in kind}
    head = next(n.name for n in stacks().graph.sources("parameter") if n.target.endswith("head"))
    assert len(names) == 6 and head not in names
    view = views(stacks())[0]
    reader = next(n for n in stacks().graph.nodes if any(v.node == view for v in n.inputs))
    place = [v.node for v in reader.inputs].index(view)
    options = search.problem.facts.candidates[reader.name]
    cut = next(s for s in options if isinstance(s.inputs[place], Shard))
    other: Mapping[str, Strategy] = {**best.strategies, reader.name: cut}
    first = stacks().graph.by_name[view].inputs[0].node
    assert gathers._is_read_whole(search.problem, best.strategies, stacks().graph.by_name[first])
    assert not gathers._is_read_whole(search.problem, other, stacks().graph.by_name[first])


@pytest.mark.parametrize("sooner", [True, False])
def test_either_way_computes_what_one_device_computes(sooner: bool) -> None:
    torch.manual_seed(0)
    model, batch = Stacks(12, 3).double(), (torch.randn(7, 12, dtype=torch.float64),)
    graph = capture(model, batch)
    values = interpret(graph, source_values(graph, model, batch, tangent=1.3))
    devices = cluster((0.01, "1GB"), (0.005, "1GB"), (0.002, "1GB"), network="1GB/s", memory_bandwidth="1GB/s")
    found = choices(graph)
    whole = Problem.state(found, devices, "adamw", Pins(placements={"*": "R", "args.*": "S(0)"}))
    search = Search(Problem.state(found, devices, "adamw", Pins()), LIMITS["quick"])
    best = Search(whole, LIMITS["quick"]).run()
    cut = {n.name: s for n in graph.sources("parameter") for s in found.strategies[n.name] if cuts_rows(s)}
    start = changed(search.problem, best, cut)
    assert [len(kind) for kind in gathers._kinds(search.problem, start)] in ([3], [1, 2], [2, 1], [1, 1, 1])
    made = gathered(search, start, sooner=sooner)
    alone = views(found)[0]  # of which nothing else is read
    assert isinstance(made.strategies[alone].outputs[0], Replicate if sooner else Shard)
    conversions = {c.need.value.node for c in made.evaluation.conversions if c.need.target == REPLICATE}
    assert (alone in conversions) is not sooner
    step = run_lockstep(lower(graph, plan_of(found, devices, made)), values, check=True)
    torch.testing.assert_close(step.loss, values[graph.loss], rtol=1e-12, atol=0)
    for target, value in graph.gradients.items():
        torch.testing.assert_close(step.gradients[target], values[value], rtol=1e-10, atol=1e-12)
