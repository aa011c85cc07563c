"""On a measured cluster, whose calls and collectives may bend anywhere, the bound is below everything, too."""

from __future__ import annotations

import random
from functools import cache

import pytest

from hap.cost_models.collective import candidates
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
from hap.plan import Collective
from hap.search import plan_graph
from hap.search.prices import Facts
from hap.search.relaxation import lower_bound
from tests._support.plans import random_sizes, random_strategies
from tests.cost_models.build import cluster
from tests.search.models import mlp

KINDS: tuple[Collective, ...] = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice")
CLASSES = ("matmul", "elementwise", "reduction", "index", "conv", "attention")
PLAIN = cluster([1000, 1000, 200], tflops=[2, 2, 1], backend="gloo")


@cache
def measured(seed: int) -> CalibratedCluster:
    """Three ranks of two kinds, with numbers drawn over two decades: factors that rise and fall with the size, curves
    of some calls that bend both ways."""
    rng = random.Random(seed)
    model = mlp(batch=64, width=256)
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
    found, on = mlp(batch=64, width=256), measured(seed)
    bound = lower_bound(Facts(found.graph, found.strategies, on, "adamw"))
    assert 0 < bound.compute_s <= bound.seconds
    rng = random.Random(100 + seed)
    steps = []
    for _ in range(40):
        strategies, sizes = random_strategies(found, rng), random_sizes(found, 3, rng)
        steps.append(evaluate(found.graph, strategies, sizes, on).step_s)
    assert bound.seconds <= min(steps)


@pytest.mark.parametrize("seed", range(4))
def test_near_the_plan_that_is_found(seed: int) -> None:
    p = plan_graph(mlp(batch=64, width=256), measured(seed), effort="quick").predicted
    assert p.lower_bound_s is not None and 0.4 * p.step_s < p.lower_bound_s <= p.step_s
