"""On a measured cluster, whose calls and collectives may bend anywhere, the bound is below everything, too."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hap.capture import capture
from hap.cost_models.collective import best_decomposition, candidates
from hap.cost_models.evaluate import evaluate
from hap.cost_models.profile import (
    CalibratedCluster,
    CallCurve,
    CollectiveProfile,
    CopyFit,
    DeviceKind,
    Fit,
    LinkProfile,
    Profile,
    RankProfile,
    UpdateFit,
)
from hap.graph import Node
from hap.placement import Shard
from hap.plan import Collective
from hap.rules.choices import Choices, choices
from hap.search import Pins, plan_graph
from hap.search.cases import Cases
from hap.search.crossing import Box, Fractions, crossing_s, find_parts, find_ports
from hap.search.masses import Masses
from hap.search.prices import Facts
from hap.search.relaxation import lower_bound, relaxation
from hap.search.rounding import round_shares
from tests._support.plans import random_sizes, random_strategies
from tests.cost_models.build import cluster
from tests.search.models import mlp

KINDS: tuple[Collective, ...] = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice")
CLASSES = ("matmul", "elementwise", "reduction", "index", "conv", "attention")
PLAIN = cluster([1000, 1000, 200], tflops=[2, 2, 1], backend="gloo")
PERCEPTRON = mlp(batch=64, width=256)


@cache
def measured(seed: int) -> CalibratedCluster:
    """Three ranks of two kinds, with numbers drawn over two decades: factors that rise and fall with the size, curves
    of some calls that bend both ways."""
    rng = random.Random(seed)
    model = PERCEPTRON
    calls = [
        Facts(model.graph, model.strategies, PLAIN, "adamw").parts(n.name, s).call
        for n in model.graph.nodes
        if not n.is_source
        for s in model.strategies[n.name]
    ]

    def drawn(low: float, high: float) -> float:
        return low * (high / low) ** rng.random()

    def fit() -> Fit:
        factors = tuple(drawn(0.5, 2.0) for _ in range(3))
        return Fit(
            launch_s=drawn(1e-6, 1e-4),
            s_per_flop=drawn(1e-12, 1e-10),
            s_per_byte=drawn(1e-11, 1e-9),
            sizes=(1e-5, 1e-4, 1e-3),
            factors=factors,
            residual=0.0,
            worst=0.0,
            samples=9,
        )

    def curve() -> CallCurve:
        shares = (0.25, 0.5, 1.0)
        return CallCurve(shares=shares, seconds=tuple(drawn(1e-5, 1e-3) * s**0.7 for s in shares), spread=0.0)

    ways = {k: list(dict.fromkeys(c.partition("[")[0] for c in candidates(k, PLAIN))) for k in KINDS}
    kinds = tuple(
        DeviceKind(
            name=name,
            calls={call: curve() for call in dict.fromkeys(calls) if rng.random() < 0.5},
            fits={f"{c}/{dtype}": fit() for c in CLASSES for dtype in ("float32", "int64", "bool")},
            updates={"adamw": UpdateFit(parameter_s=1e-5, s_per_byte=1e-9, residual=0.0, samples=1)},
            copies={
                f"{k}/{w}": CopyFit(
                    launch_s=drawn(1e-6, 1e-4),
                    s_per_whole=drawn(1e-11, 1e-9),
                    s_per_local=drawn(1e-11, 1e-9),
                    residual=0.0,
                    samples=1,
                )
                for k in KINDS
                for w in ways[k]
            },
            step_s=1e-4,
            in_step=1.1,
            node_s=2e-6,
            resume_s=1e-5,
            empty_s=3e-6,
        )
        for name in ("fast", "slow")
    )
    ranks = tuple(RankProfile(device=f"d{r}", kind=r // 2, factor=drawn(1.0, 1.3), spread=0.0) for r in range(3))
    links = tuple(
        LinkProfile(
            source=s,
            target=t,
            latency_s=drawn(1e-5, 1e-4),
            bytes_per_s=drawn(1e7, 1e8),
            spread=0.0,
            delays=((4096, 1e-4), (65536, 5e-5)),
        )
        for s in range(3)
        for t in range(3)
        if s != t
    )
    sizes = (1e3, 1e5, 1e7)
    collectives = tuple(
        CollectiveProfile(
            kind=k,
            decomposition=w,
            sizes=sizes,
            factors=tuple(drawn(0.5, 2.0) for _ in sizes),
            seconds=(1.0, 1.0, 1.0),
            residual=0.0,
            spread=0.0,
            samples=1,
        )
        for k in KINDS
        if k != "slice"
        for w in ways[k]
    )
    profile = Profile(
        cluster=PLAIN.name,
        cluster_fingerprint=PLAIN.fingerprint,
        backend="gloo",
        torch_version="2",
        conditions=(),
        kinds=kinds,
        ranks=ranks,
        links=links,
        collectives=collectives,
        seconds_taken=1.0,
    )
    return profile.calibrate(PLAIN)


@pytest.mark.parametrize("seed", range(4))
def test_below_random_plans(seed: int) -> None:
    found, on = PERCEPTRON, measured(seed)
    bound = lower_bound(Facts(found.graph, found.strategies, on, "adamw"))
    assert 0 < bound.compute_s <= bound.seconds
    rng = random.Random(100 + seed)
    steps = []
    for _ in range(40):
        strategies, sizes = random_strategies(found, rng), random_sizes(found, 3, rng)
        steps.append(evaluate(found.graph, strategies, sizes, on).step_s)
    assert bound.seconds <= min(steps)


def timed(found: Choices, seconds: Callable[[Node], Sequence[float]]) -> CalibratedCluster:
    """As ``measured``, but for what each call took at a quarter, a half and all of its group."""
    profile = measured(0).profile
    facts, curves = Facts(found.graph, found.strategies, PLAIN, "adamw"), {}
    for node in found.graph.nodes:
        for strategy in () if node.is_source else found.strategies[node.name]:
            curve = CallCurve(shares=(0.25, 0.5, 1.0), seconds=tuple(seconds(node)), spread=0.0)
            curves[facts.parts(node.name, strategy).call] = curve
    kinds = tuple(kind.model_copy(update={"calls": curves}) for kind in profile.kinds)
    return profile.model_copy(update={"kinds": kinds}).calibrate(PLAIN)


@cache
def dropping(layers: int) -> Choices:
    """Layers of which each ends with a dropout: alike but for the dropouts' sites."""
    with torch.device("meta"):
        layers_of = ([nn.Linear(256, 256), nn.Dropout(0.1)] for _ in range(layers))
        model, x = nn.Sequential(*itertools.chain.from_iterable(layers_of)), torch.empty(64, 256)
    return choices(capture(model, x, loss_fn=nn.functional.mse_loss, example_targets=x, name="dropping"))


def test_a_call_that_took_long_stands_for_itself_alone() -> None:
    """One site's dropouts took a thousand times as long as all else; five of the forward pass are of one class."""
    found = dropping(8)
    facts = Facts(found.graph, found.strategies, measured(0), "adamw")
    slow = next(n for n in found.graph.nodes if n.op == "hap.dropout.default" and n.args[3] == 1)
    assert sum(colour == facts.colours[-1][slow.name] for colour in facts.colours[-1].values()) >= 4

    def seconds(node: Node) -> list[float]:
        most = 1e-2 if node.op == slow.op and node.args[3] == slow.args[3] else 1e-5
        return [most / 4, most / 2, most]

    on = timed(found, seconds)
    step_s = plan_graph(found, on, effort="quick").predicted.step_s
    facts = Facts(found.graph, found.strategies, on, "adamw")
    bound = lower_bound(facts)
    assert 0 < bound.compute_s <= bound.seconds <= Masses().bound_s(facts, bound.seconds) <= step_s
    fewer = Facts(found.graph, found.strategies, PLAIN, "adamw")
    assert len(relaxation(facts).count) > len(relaxation(fewer).count)  # described, they take as long


@cache
def bending(*parts: float) -> CalibratedCluster:
    """Products took these parts of a hundredth of a second."""
    return timed(PERCEPTRON, lambda node: [(1e-2 if node.op == "aten.mm.default" else 1e-5) * p for p in parts])


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (measured, (0,)),
        (measured, (3,)),
        (bending, (0.05, 0.9, 1.0)),
        (bending, (0.05, 0.1, 1.0)),
        (bending, (0.5, 0.5, 1)),
    ],
)
def test_what_cases_and_masses_prove_is_below_plans(make: Callable[..., CalibratedCluster], arguments: Any) -> None:
    """Whatever the curves between two shares; of the plan that is found as of those that are drawn."""
    found, on, rng = PERCEPTRON, make(*arguments), random.Random(1)
    facts = Facts(found.graph, found.strategies, on, "adamw")
    known_s = lower_bound(facts).seconds
    proved = [Masses().bound_s(facts, known_s)]
    for alone in (True, False):
        cases = Cases.of(facts, known_s, alone=alone)
        assert cases is not None
        proved.append(cases.raised_s(float("inf"), most=20))
    drawn = ((random_strategies(found, rng), random_sizes(found, 3, rng)) for _ in range(20))
    steps = [evaluate(found.graph, *plan, on).step_s for plan in drawn]
    p = plan_graph(found, on, effort="thorough").predicted
    assert p.lower_bound_s is not None
    assert known_s <= min(proved) and max(*proved, p.lower_bound_s) <= min(*steps, p.step_s)


@pytest.mark.parametrize("seed", range(4))
def test_what_cases_prove_of_one_point_is_below_plans_of_its_sizes(seed: int) -> None:
    """Every rank is a part of its own, as no two were measured alike."""
    on = bending(0.05, 0.9, 1.0) if seed == 3 else measured(seed)
    found, rng = PERCEPTRON, random.Random(seed)
    facts = Facts(found.graph, found.strategies, on, "adamw")
    cases = Cases.of(facts, 0.0, alone=False)
    assert cases is not None
    bounds = cases._bounds
    assert [part.device.rank for part in bounds.parts] == [0, 1, 2]
    for _ in range(4):
        sizes = random_sizes(found, 3, rng)
        at = tuple(sizes[name] for name, _ in bounds.boxes.groups)
        bound_s, _ = bounds.bound_s(Box(at, at), 0.0, float("inf"))
        assert 0 < bound_s <= plan_graph(found, on, pins=Pins(sizes=sizes), effort="quick").predicted.step_s
        for _ in range(10):
            assert bound_s <= evaluate(found.graph, random_strategies(found, rng), sizes, on).step_s


@pytest.mark.parametrize("seed", range(4))
def test_no_all_to_all_is_faster_than_ports(seed: int) -> None:
    """Of whatever size: beside its formula one of some kilobytes may be far faster than one of a gigabyte."""
    on, rng = measured(seed), random.Random(seed)
    facts = Facts(PERCEPTRON.graph, PERCEPTRON.strategies, on, "adamw")
    ports, one, other = find_ports(facts, find_parts(facts)), Shard(0, 1, 24, 1, "one"), Shard(1, 1, 24, 1, "other")
    for nbytes in (1_000, 30_000, 100_000, 10_000_000, 1 << 30):
        for _ in range(20):
            sizes = {g: round_shares([rng.random() ** 2 + 1e-3 for _ in range(3)], 24) for g in ("one", "other")}
            least_s = best_decomposition("all_to_all", nbytes, one, other, sizes, on)[1]
            known = (np.array(sizes[g]) / 24 for g in ("one", "other"))
            assert nbytes * crossing_s(ports, *(Fractions(at, at) for at in known), 3) <= least_s


@pytest.mark.parametrize("seed", range(4))
def test_near_the_plan_that_is_found(seed: int) -> None:
    p = plan_graph(PERCEPTRON, measured(seed), effort="quick").predicted
    assert p.lower_bound_s is not None and 0.4 * p.step_s < p.lower_bound_s <= p.step_s
