"""One step of a model on lockstep ranks, in the terms of ``benchmarks.zoo_models.reference``."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.zoo_models.case import Case
from benchmarks.zoo_models.reference import Outcome, kept, one_device, worst_error
from hap.capture import capture, source_values
from hap.codegen.lowering import lower
from hap.cost_models.work import op_class
from hap.graph import Graph
from hap.order import NONE, Postponed
from hap.placement import GroupSizes, Shard
from hap.plan import Strategy
from hap.rules.choices import Choices, choices
from hap.runtime.lockstep import run_lockstep
from tests._support.plans import (
    greedy_strategies,
    make_plan,
    random_postponed,
    random_sizes,
    random_strategies,
    sizes_for,
)

TOLERANCE = 1e-10
SEED = 5


def captured(case: Case) -> Graph:
    return capture(case.model, case.inputs, loss_fn=case.loss_fn, example_targets=case.targets)


def possible(case: Case) -> Choices:
    """Of its graph, which is captured once while one case is asked about."""
    if not _last or _last[0][0] is not case:
        _last[:] = [(case, choices(captured(case)))]
    return _last[0][1]


_last: list[tuple[Case, Choices]] = []


def run(
    case: Case,
    found: Choices,
    strategies: Mapping[str, Strategy],
    sizes: GroupSizes,
    postponed: Postponed = NONE,
) -> Outcome:
    """One step under these decisions."""
    world_size = len(next(iter(sizes.values())))
    plan = make_plan(found, strategies, sizes, postponed=postponed, world_size=world_size)
    values = source_values(found.graph, case.model, case.inputs, case.targets, seed=SEED)
    result = run_lockstep(lower(found.graph, plan), values)
    return Outcome(result.loss, result.gradients, kept(case.model) | dict(result.updates))


def batch_strategies(found: Choices) -> dict[str, Strategy]:
    """Data parallel: every input that can follow the batch does, and nothing moves that need not."""
    inputs = found.graph.sources("input")
    wishes = {n.target: (0, n.meta.shape[0]) for n in inputs if len(found.strategies[n.name]) > 1}
    return greedy_strategies(found, wishes)


def data_parallel_error(case: Case, sizes: tuple[int, ...]) -> float:
    """The worst relative error against one device with the batch dealt as ``sizes``."""
    found = possible(case)
    dealt, strategies = sizes_for(found, sizes, {sum(sizes): sizes}), batch_strategies(found)
    heavy = [n for n in found.graph.nodes if not n.is_source and op_class(n.op) in ("matmul", "conv", "attention")]
    assert all(_is_dealt(strategies[n.name]) for n in heavy), "a product runs whole on every rank: nothing is compared"
    return worst_error(run(case, found, strategies, dealt), one_device(case, SEED))[0]


def _is_dealt(strategy: Strategy) -> bool:
    return any(isinstance(p, Shard) for p in (*strategy.inputs, *strategy.outputs))


def random_error(case: Case, seed: int) -> tuple[float, str]:
    """The same with any strategies and any sizes, zeros included, on three ranks, some calls postponed."""
    found, source = possible(case), random.Random(seed)
    strategies, sizes = random_strategies(found, source), random_sizes(found, 3, source)
    late = random_postponed(found.graph, source)
    return worst_error(run(case, found, strategies, sizes, late), one_device(case, SEED))


def case_of(model: nn.Module, inputs: Any, loss_fn: Any, targets: Any) -> Case:
    """In float64."""
    return Case(model.double(), inputs, loss_fn, targets)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(classes: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed))
