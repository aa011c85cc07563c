"""Mutated plan files are refused in one line, or mean what one device means; never a traceback, never something else.

Good files: plans of the planner (data parallel, ZeRO, tensor parallel by pins) and random sound plans of a small model
with a norm, a softmax and a transpose, and plans of a two-layer GPT-2. Each is mutated (``tests/_support/mutate.py``),
most with a fresh checksum. What loads is lowered; what lowers is run in lockstep, every value compared with one
device's. CI draws 1,000; ``-m long`` the rest of 12,000.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest
import torch

from hap.capture import interpret, source_values
from hap.codegen.lowering import lower
from hap.codegen.passes.recompute import recompute_calls
from hap.errors import PlanError
from hap.graph import Graph, Value
from hap.plan import Plan, Recomputed
from hap.rules.choices import choices
from hap.runtime.lockstep import run_lockstep
from hap.search import plan_graph
from tests._support import cases, gpt2
from tests._support.mutate import mutate
from tests._support.plans import make_plan, random_sizes, random_strategies
from tests._support.residual import PINS, captured
from tests.search.models import cluster

Values = dict[Value, torch.Tensor]


@cache
def small() -> tuple[Graph, Values, tuple[str, ...]]:
    """The graph, all its values on one device, and good plan files."""
    model, batch, graph = captured()
    found, source = choices(graph), random.Random(0)
    devices = cluster((0.01, "1GB"), (0.005, "1GB"), (0.002, "1GB"))
    plans = [plan_graph(found, devices, pins=pins, effort="quick") for pins in PINS.values()]
    for regather in (False, True):
        drawn = random_strategies(found, source)
        plans.append(make_plan(found, drawn, random_sizes(found, 3, source), regather=regather))
    calls = tuple(n.name for n in graph.nodes if n.phase == "forward" and not n.is_source)
    plans.append(plans[0].model_copy(update={"recomputed": (Recomputed(block="model", what="all", calls=calls),)}))
    return graph, interpret(graph, source_values(graph, model, batch, tangent=1.3)), tuple(p.to_json() for p in plans)


@cache
def large() -> tuple[Graph, Values, tuple[str, ...]]:
    graph = gpt2.graph()
    values = interpret(graph, source_values(graph, gpt2.build(), (gpt2.batch(),), gpt2.batch(), tangent=1.3))
    plans = cases.data_parallel((5, 2, 1)), cases.zero((4, 2, 2)), cases.tensor_parallel((3, 2, 1)), cases.anything(1)
    return graph, values, tuple(p.to_json() for p in plans)


def fuzz(
    graph: Graph, values: Values, texts: tuple[str, ...], count: int, seed: int, *, run_every: int
) -> Counter[str]:
    """What became of ``count`` mutations; of those that lower, one in ``run_every`` is run."""
    source, became = random.Random(seed), Counter[str]()
    for _ in range(count):
        text = mutate(source.choice(texts), source)
        try:
            plan = Plan.from_json(text, "x.plan.json")
        except PlanError as e:
            assert str(e).startswith("x.plan.json: ") and "\n" not in str(e)
            became["refused as a file"] += 1
            continue
        assert Plan.from_json(plan.to_json()) == plan
        try:
            program = recompute_calls(lower(graph, plan))
        except PlanError as e:
            assert "\n" not in str(e)
            became["refused for the graph"] += 1
            continue
        became["sound"] += 1
        if became["sound"] % run_every == 0:
            run_lockstep(program, values, check=True)
            became["run"] += 1
    return became


def test_hundreds_of_mutations() -> None:
    became = fuzz(*small(), 380, seed=1, run_every=2) + fuzz(*large(), 20, seed=1, run_every=4)
    assert became["refused as a file"] > 80 and became["refused for the graph"] > 40 and became["run"] > 20


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 12))
def test_eleven_thousand_more(seed: int) -> None:
    became = fuzz(*small(), 1000, seed, run_every=1) + fuzz(*large(), 100, seed, run_every=2)
    assert became["run"] > 100
