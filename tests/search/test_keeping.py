"""Of parameters that are gathered twice, as many stay gathered as there is room for."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from hap.capture import capture
from hap.conversion import find_needs, kept_parameters
from hap.placement import Shard
from hap.rules.choices import Choices, choices
from hap.search import Pins
from hap.search.found import Found
from hap.search.keeping import or_keeping
from hap.search.limits import LIMITS
from hap.search.planner import Search
from hap.search.problem import Problem
from hap.search.recompute import after_steps, blocks_of
from hap.search.refine import at_sizes
from tests.search.models import cluster, mlp

LAYERS = 6


def search(memory: str) -> Search:
    """Layers of 1024 x 1024 parameters, 4 MB each, of a large batch, on four equal devices of so much memory."""
    devices = cluster(*[(10, memory)] * 4, network="1GB/s")
    return Search(Problem.state(model(), devices, "adamw", Pins()), LIMITS["quick"])


def model() -> Choices:
    return mlp(batch=8192, width=1024, layers=LAYERS)


def gathered_twice(searched: Search) -> Found:
    """Every parameter dealt out and every call on pieces of the batch."""
    problem = searched.problem
    inputs = problem.choices.strategies["i_args_0"]
    batch = next(s.outputs[0].group for s in inputs if isinstance(s.outputs[0], Shard))
    forced: dict[int, tuple[int, ...]] = {}
    for node in problem.choices.graph.nodes:
        options = problem.facts.candidates[node.name]
        wanted = [
            i
            for i, s in enumerate(options)
            if any(
                isinstance(p, Shard) and (node.op == "parameter" or p.group == batch) for p in (*s.inputs, *s.outputs)
            )
        ]
        if wanted:
            forced[problem.classes.of[node.name]] = tuple(wanted)
    even = (0.25,) * 4
    found = searched.chooser.strategies(problem.round({}, even, even), True, (), forced=forced)
    assert found is not None and found.regather
    return found


@pytest.mark.parametrize("memory", ["124MB", "128MB", "132MB", "136MB", "140MB", "1GB"])
def test_no_other_copies_that_fit_save_more(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the five parameters that both passes read, by every subset, for the same strategies."""
    monkeypatch.setattr("hap.search.keeping.LEAN", ())
    searched = search(memory)
    problem, twice = searched.problem, gathered_twice(searched)
    found, _ = or_keeping(searched, twice, None)
    gathered = {c.need.value.node for c in found.evaluation.conversions if c.need.phase == "forward"}
    names = sorted(n for n in gathered if n.startswith("p_") and n.endswith("weight") and n != "p_0_weight")
    assert len(names) == LAYERS - 1 and found.kept <= set(names)
    seconds = []
    for many in range(LAYERS):
        for kept in itertools.combinations(names, many):
            needs = find_needs(problem.choices.graph, found.strategies, regather=True, kept=kept)
            judged = problem.facts.evaluator.evaluate(found.strategies, found.sizes, needs)
            seconds += [judged.step_s] if judged.fits else []
    assert found.fits and found.cost[1] == pytest.approx(min(seconds), rel=1e-9)
    assert len(found.kept) == {"124MB": 2, "128MB": 3, "132MB": 4}.get(memory, LAYERS - 1)


@pytest.mark.parametrize(("memory", "shorter"), [("124MB", False), ("1GB", True)])
def test_strategies_that_leave_memory_free_are_asked_for(
    memory: str, shorter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ample memory nothing need be gathered, which the strategies that were forced here do not know."""
    searched = search(memory)
    leaner, _ = or_keeping(searched, gathered_twice(searched), None)
    monkeypatch.setattr("hap.search.keeping.LEAN", ())
    same, _ = or_keeping(searched, gathered_twice(searched), None)
    assert leaner.fits and (leaner.cost[1] < 0.99 * same.cost[1] if shorter else leaner.cost == same.cost)


def test_what_a_plan_converts_says_what_is_kept() -> None:
    searched = search("132MB")
    found, _ = or_keeping(searched, gathered_twice(searched), None)
    graph = searched.problem.choices.graph
    made = [(c.need.value, c.need.target, c.need.phase) for c in found.evaluation.conversions]
    assert 0 < len(found.kept) < LAYERS - 1 and found.kept <= kept_parameters(graph, made)
    again = find_needs(graph, found.strategies, regather=True, kept=kept_parameters(graph, made))
    assert [(n.value, n.target, n.phase) for n in again] == made


def test_at_other_sizes_the_same_is_kept_and_repeated() -> None:
    searched = search("132MB")
    problem = searched.problem
    found, _ = or_keeping(searched, gathered_twice(searched), None)
    assert found.kept and at_sizes(problem, found, found.sizes).evaluation == found.evaluation
    once = searched.chooser.strategies(found.sizes, False, ())
    assert once is not None and not once.kept and not once.recomputed
    repeating = problem.repeating(after_steps(blocks_of(problem), 1))
    assert repeating.recomputed and repeating.judge(once.strategies, once.sizes, False) != once.evaluation
    assert at_sizes(repeating, once, once.sizes).evaluation == once.evaluation


class WithNoColumns(nn.Module):
    """Two layers, and between them a parameter of eight rows without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.none, self.last = nn.Linear(64, 64), nn.Parameter(torch.empty(8, 0)), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        return self.last(y + (y[:, :8] @ self.none @ self.none.t()).sum())


def test_a_copy_of_no_bytes_is_always_kept() -> None:
    with torch.device("meta"):
        none, x = WithNoColumns(), torch.empty(256, 64)
    found = choices(capture(none, x, loss_fn=lambda out: out.square().mean()))
    devices = cluster(*[(10, "1GB")] * 4, network="1GB/s")
    pins = Pins(placements={"*": "S(0)", "args.0": "S(0)"})
    searched = Search(Problem.state(found, devices, "adamw", pins), LIMITS["quick"])
    twice = gathered_twice(searched)
    gathered = [c.need.value.node for c in twice.evaluation.conversions if c.nbytes == 0]
    assert gathered.count("p_none") == 2
    kept, _ = or_keeping(searched, twice, None)
    assert "p_none" in kept.kept
