"""The linear program of shares: many groups on many unlike ranks."""

from __future__ import annotations

import tracemalloc

import numpy as np
import torch
from torch import nn

from hap.capture import capture
from hap.placement import Shard
from hap.rules.choices import choices
from hap.search.pins import Pins
from hap.search.problem import Problem
from hap.search.ratios import best_shares
from tests._support.plans import greedy_strategies
from tests.search.models import cluster

HOSTS, LAYERS = 32, 40


def test_many_groups_and_kinds_take_little_memory() -> None:
    """Of a stage each class of ranks has a row about its own share of every group. A table of every class's row and
    every class's shares is as many times larger as there are classes, and takes over 100 MB here."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512 + 8 * i, 520 + 8 * i, bias=False) for i in range(LAYERS)))
        x = torch.empty(1024, 512)
    found = choices(capture(model, x, loss_fn=lambda y: y.square().mean(), name="layers"))
    spec = cluster(*((1 + i / 8, "16GB") for i in range(HOSTS)), network="1GB/s")
    problem = Problem.state(found, spec, "adamw", Pins())
    sources = [*found.graph.sources("parameter"), *found.graph.sources("input")]
    wishes = {n.target: (0, n.meta.shape[0]) for n in sources}
    strategies = greedy_strategies(found, wishes)
    sizes = problem.round({}, *[(1.0 / problem.whole_s).tolist()] * 2)
    evaluation, prepared = problem.judge(strategies, sizes, False), problem.prepared(strategies, False)
    used = {p.group for s in strategies.values() for p in s.outputs if isinstance(p, Shard)}
    bundles = [b for b in problem.bundles if used.intersection(b)]
    assert len(bundles) == LAYERS + 1
    tracemalloc.start()
    try:
        shares = best_shares(
            problem.facts, strategies, sizes, evaluation, bundles=bundles, fixed={}, stages=prepared.stages
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert shares is not None and used == set(shares)
    assert all(np.isclose(sum(of_group), 1.0) for of_group in shares.values())
    assert peak < 50e6
