"""Leaving out devices of a cluster that was measured: what is known of the others, and plans for them."""

from __future__ import annotations

import random

import pytest
import torch

from hap import api
from hap.cluster import ClusterSpec
from hap.cost_models.collective import candidates
from hap.cost_models.profile import base_name
from hap.routes import ROUTED
from hap.search import Pins, plan_graph
from hap.search.problem import Problem
from hap.search.subsets import fewer_hosts, paces, slowest_kinds, without
from tests._support.plans import random_sizes, random_strategies
from tests.search.test_bound_measured import KINDS, PERCEPTRON, PLAIN, measured

NESTED = ((2,), (0,), (1,), (1, 2))


def paced(seed: int) -> list[float]:
    whole_s = Problem.state(PERCEPTRON, measured(seed), "adamw", Pins()).whole_s.tolist()
    return paces(measured(seed), whole_s)


@pytest.mark.parametrize("gone", NESTED)
def test_what_was_measured_of_the_others_stays(gone: tuple[int, ...]) -> None:
    whole, left = measured(0), [r for r in range(3) if r not in gone]
    part = without(whole, gone)
    assert part.fingerprint == without(PLAIN, gone).fingerprint
    work = (1e6, 1e5)
    calls = [d.call_seconds("", "aten.mm.default", "matmul", "float32", 1.0, work) for d in whole.devices]
    again = [d.call_seconds("", "aten.mm.default", "matmul", "float32", 1.0, work) for d in part.devices]
    assert again == [calls[r] for r in left]
    assert (part._waits(4096.0) == whole._waits(4096.0)[left][:, left]).all()
    for way in candidates("all_gather", PLAIN)[:1]:
        assert part.collective("all_gather", way).factors == whole.collective("all_gather", way).factors


def test_who_was_done_early_is_told_beside_those_that_are_left() -> None:
    profile = measured(0).profile
    early = [c.model_copy(update={"ahead": (0.5, 0.2, 0.0)}) for c in profile.collectives]
    fields = {name: getattr(profile, name) for name in type(profile).model_fields}
    told = type(profile)(**{**fields, "collectives": tuple(early)}).calibrate(PLAIN)
    for gone, ahead in (((2,), (0.3, 0.0)), ((1,), (0.5, 0.0)), ((0, 1), (0.0,))):
        for found in without(told, gone).profile.collectives:
            assert found.ahead == pytest.approx(ahead)


def test_a_part_has_no_ways_that_were_not_measured_of_the_whole() -> None:
    """Two hosts alike have nothing to relay; without a device of one their networks differ by rank."""
    two = [{"gpu": "A100-40GB"}, {"gpu": "T4"}]
    host = {"devices": two, "link": "pcie3", "network": {"bandwidth": "10Gbit/s", "latency": "20us"}}
    spec = ClusterSpec.model_validate({"name": "two", "hosts": [{"name": n, **host} for n in "ab"]})
    whole = {kind: {base_name(way) for way in candidates(kind, spec)} for kind in KINDS}
    own, part = measured(0).profile, without(spec, (3,))
    collectives = [c for c in own.collectives if c.decomposition in whole[c.kind]]
    fields = {name: getattr(own, name) for name in type(own).model_fields}
    told = {"cluster_fingerprint": part.fingerprint, "collectives": tuple(collectives)}
    found = {kind: {base_name(way) for way in candidates(kind, part)} for kind in KINDS}
    assert any(found[kind] - whole[kind] for kind in KINDS)
    for kind in KINDS[:-1]:
        known = {c.decomposition for c in collectives if c.kind == kind}
        routed = {base_name(way) for way in candidates(kind, type(own)(**{**fields, **told}).calibrate(part))}
        assert routed & set(ROUTED) <= known


@pytest.mark.parametrize("seed", range(4))
def test_devices_of_a_kind_that_differ_a_little_are_one_kind(seed: int) -> None:
    pace = paced(seed)
    assert pace[0] == pace[1] != pace[2]
    assert len(list(slowest_kinds(measured(seed).devices, pace))) == 1
    assert len(fewer_hosts(measured(seed).devices, pace)) == 2


@pytest.mark.parametrize("seed", range(4))
def test_hardly_a_plan_of_all_or_fewer_is_shorter(seed: int) -> None:
    """By a twentieth than the one that may leave out devices, of those clusters that it looks at, of all but one of
    which it sees less than a whole search; and its bound is below them all."""
    whole = measured(seed)
    clusters = [whole, *(without(whole, gone) for gone in fewer_hosts(whole.devices, paced(seed)))]
    plan, alone = plan_graph(PERCEPTRON, whole, leave_out=True), [plan_graph(PERCEPTRON, c) for c in clusters]
    assert plan.predicted.as_run_s == pytest.approx(min(p.predicted.as_run_s for p in alone), rel=0.05)
    assert plan.predicted.lower_bound_s <= min(p.predicted.step_s for p in alone) * (1 + 1e-9)
    advice = alone[0].provenance.solver.get("leave_out")
    if plan.world_size < 3:
        assert plan.provenance.solver["left_out"] == advice


@pytest.mark.parametrize("gone", NESTED[:3])
@pytest.mark.parametrize("seed", range(2))
def test_bounds_of_the_others_are_below_their_plans(seed: int, gone: tuple[int, ...]) -> None:
    problem, rng = Problem.state(PERCEPTRON, without(measured(seed), gone), "adamw", Pins()), random.Random(seed)
    bound_s = plan_graph(PERCEPTRON, problem.cluster).predicted.lower_bound_s
    assert bound_s is not None
    for _ in range(100):
        strategies = random_strategies(PERCEPTRON, rng)
        sizes = random_sizes(PERCEPTRON, problem.world_size, rng)
        found = problem.facts.evaluator.evaluate(strategies, sizes)
        assert bound_s <= found.step_s * (1 + 1e-9)


def test_the_plan_tells_of_the_profile_that_it_was_made_with() -> None:
    """And is played with it: on the devices that are left."""
    model, x = torch.nn.Linear(256, 256), torch.randn(64, 256)
    given = {"example_inputs": x, "example_targets": x, "loss_fn": torch.nn.functional.mse_loss}
    profile = measured(1).profile
    plan = api.plan(model, PLAIN, profile=profile, leave_out=True, **given)
    assert plan.world_size < 3
    assert plan.provenance.profile_fingerprint == profile.fingerprint
    scaled = [a for a in plan.provenance.assumptions if "scaled to their number" in a]
    assert len(scaled) == (plan.world_size > 1)
    timeline = api.simulate(model, plan, PLAIN, profile=profile, **given)
    assert timeline.step_s == pytest.approx(plan.predicted.as_run_s)
