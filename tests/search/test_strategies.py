"""Strategies at fixed sizes where memory is short: what the ledger finds, and what is too dear."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hap.cluster import ClusterSpec
from hap.cost_models.memory import MemoryUse, usable_bytes
from hap.errors import InfeasibleError
from hap.fabric import Array
from hap.search import plan_graph, recompute, strategies
from hap.search.found import Found
from hap.search.limits import LIMITS
from hap.search.milp import Choice
from hap.search.pins import Pins
from hap.search.problem import Problem
from hap.search.strategies import Chooser
from tests.search.models import mlp

WIDTH, LAYERS = 512, 4
STATE = LAYERS * WIDTH * WIDTH * 16  # parameters, gradients and AdamW's state, in bytes
MODEL = mlp(batch=512, width=WIDTH, layers=LAYERS)


def devices(megabytes: float, count: int = 4) -> ClusterSpec:
    gpu = f"{{name: d, tflops: {{float32: 10}}, memory: {megabytes}MB, memory_bandwidth: 2TB/s, count: {count}}}"
    link = "{bandwidth: 1GB/s, latency: 10us}"
    return ClusterSpec.from_yaml(f"name: tight\nhosts:\n  - {{name: h, devices: [{gpu}], link: {link}}}\n")


def chooser(megabytes: float) -> Chooser:
    return Chooser(Problem.state(MODEL, devices(megabytes), "adamw", Pins()), LIMITS["normal"])


def at_equal_sizes(asked: Chooser, *, best: Found | None = None, limited: bool = True) -> Found | None:
    n = asked.problem.world_size
    sizes = asked.problem.round({}, (1 / n,) * n, (1 / n,) * n)
    return asked.strategies(sizes, False, (), best=best, limited=limited)


TIGHT_MB = 2.6 * STATE / 4 / 1e6


def test_the_cheapest_that_fits_costs_more_than_the_cheapest() -> None:
    asked = chooser(TIGHT_MB)
    free, fitting = at_equal_sizes(asked, limited=False), at_equal_sizes(asked)
    assert free is not None and fitting is not None
    assert not free.fits and fitting.fits and fitting.cost[1] > free.cost[1]
    ample = at_equal_sizes(chooser(100 * TIGHT_MB))
    assert ample is not None and ample.fits and ample.strategies == free.strategies


def test_what_is_dear_or_behind_the_best_is_not_taken_instead_of_what_does_not_fit() -> None:
    asked = chooser(TIGHT_MB)
    free, fitting = at_equal_sizes(asked, limited=False), at_equal_sizes(asked)
    assert free is not None and fitting is not None
    ratio = fitting.choice.objective_s / free.choice.objective_s
    for dear, fits in ((ratio * 1.05, True), (ratio * 0.95, False)):
        again = chooser(TIGHT_MB)
        again.dear = dear
        found = at_equal_sizes(again)
        assert found is not None and found.fits is fits
    again.dear = np.inf
    for part, fits in ((1.0, True), (0.9, False)):
        quicker = replace(fitting.evaluation, step_s=part * fitting.cost[1])
        best = replace(fitting, evaluation=quicker)
        found = at_equal_sizes(again, best=best)
        assert found is not None and found.fits is fits


def test_memory_that_the_program_does_not_see_is_kept_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees four fifths of what there is. The first choices do not fit; between what is too much and what is little
    it goes on until the best is found that fits."""
    asked, capacities = chooser(TIGHT_MB), list[float]()
    seen = asked._choose

    def blind(*arguments: object) -> Choice | None:
        capacity, usable = arguments[2], usable_bytes(asked.problem.cluster.devices[0].memory_bytes)
        assert isinstance(capacity, np.ndarray)
        if np.isfinite(capacity).all():
            capacities.append(float(capacity.min()) / usable)
        return seen(*arguments[:2], capacity * 1.25, *arguments[3:])  # type: ignore[arg-type]

    monkeypatch.setattr(asked, "_choose", blind)
    found, honest = at_equal_sizes(asked), at_equal_sizes(chooser(TIGHT_MB))
    assert found is not None and honest is not None
    assert capacities[0] == 1.0 > capacities[1] and len(capacities) <= 4
    assert found.fits and found.cost[1] <= honest.cost[1] * 1.1


def test_less_memory_is_less_than_what_a_choice_takes() -> None:
    """The ledger finds a fifth of the memory more than the program sees. Of what is cheapest there are many that take
    alike, 83 hundredths as the program sees it: with less memory, but so much, it makes another of these."""
    asked, first = chooser(TIGHT_MB), at_equal_sizes(chooser(TIGHT_MB), limited=False)
    assert first is not None and not first.fits
    usable, capacities = first.evaluation.usable_bytes[0], list[float]()

    def ask(capacity: Array, below_s: float) -> Choice | None:
        capacities.append(float(capacity.min()) / usable)
        for taken, objective_s in ((0.83, 1.0), (0.79, 1.05)):
            if taken <= capacities[-1] and objective_s < below_s:
                picks, fullness = (len(capacities),), taken / capacities[-1]
                return replace(first.choice, picks=picks, objective_s=objective_s, fullness=fullness)
        return None

    def judged(choice: Choice) -> Found:
        held = int(usable * (choice.fullness * capacities[-1] + 0.2))
        memory = MemoryUse(({"parameters": held},) * asked.problem.world_size)
        evaluation = replace(first.evaluation, memory=memory, step_s=choice.objective_s)
        return replace(first, choice=choice, evaluation=evaluation)

    found = asked._fitting(first, ask, judged, np.inf)
    assert found.fits and found.choice.objective_s == 1.05


@pytest.mark.parametrize("limit", [pytest.param("FEW_NODES", marks=pytest.mark.long), "FEW_VARIABLES"])
def test_a_plan_is_found_whatever_it_costs(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Where nothing is so cheap, first with calls made again, then without any limit."""
    plain = plan_graph(MODEL, devices(TIGHT_MB))
    monkeypatch.setattr(strategies, limit, 0)
    monkeypatch.setattr(strategies, "DEAR", 1.0)
    asked = list[float]()
    anew = recompute._anew

    def watched(search: recompute.Search, dear: float) -> recompute.Search:
        asked.append(dear)
        return anew(search, dear)

    monkeypatch.setattr(recompute, "_anew", watched)
    plan = plan_graph(MODEL, devices(TIGHT_MB))
    assert asked and plan.predicted.as_run_s <= 1.1 * plain.predicted.as_run_s
    with pytest.raises(InfeasibleError):
        plan_graph(MODEL, devices(0.9 * STATE / 4 / 1e6))
