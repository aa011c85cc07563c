"""Variables and rows that are the same on every cluster: what is made of them is what is made of nothing."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.conversion import collective_kind
from hap.rules.choices import Choices, choices
from hap.search.bound import weighted_bound
from hap.search.doubled import Doubled, DoubledFlows
from hap.search.flows import Flows
from hap.search.masses import Masses
from hap.search.pins import Pins
from hap.search.prices import Facts
from hap.search.problem import Problem
from hap.search.relaxation import Relaxation, lower_bound, relaxation
from tests.search.models import gpt2, mlp
from tests.search.test_masses import hosts

CLUSTERS = (
    hosts((1, 2), (1, 2), (0.5, 2), network="1GB/s"),
    hosts((1, 2), (0.5, 2), network="1GB/s"),
    hosts((1, 4), (1, 4), (0.3, 4), (0.3, 4), network="100MB/s"),
)


class Gated(nn.Module):
    """Layers of which each multiplies by the same value."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.gate, self.layers = nn.Linear(width, width), nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        for layer in self.layers:
            x = layer(x).relu() * gate
        return x


@cache
def gated() -> Choices:
    with torch.device("meta"):
        model, x = Gated(64, 12), torch.empty(64, 64)
    return choices(capture(model, x, loss_fn=nn.functional.mse_loss, example_targets=x, name="gated"))


MODELS = {"mlp": mlp(64, 64, 3), "gpt2": gpt2(layers=2)}


def facts_of(name: str, on: ClusterSpec) -> Facts:
    return Problem.state(MODELS[name], on, "adamw", Pins()).facts


@pytest.mark.parametrize("name", MODELS)
def test_a_program_of_another_clusters_flows_is_the_program_of_its_own(name: str) -> None:
    first = Problem.state(MODELS[name], CLUSTERS[0], "adamw", Pins())
    relaxation(first.facts)
    for on in CLUSTERS[1:]:
        shared, alone = relaxation(first.on(on).facts), relaxation(facts_of(name, on))
        assert shared.flows is relaxation(first.facts).flows is not alone.flows
        assert shared.program() == alone.program()
        assert shared.seconds == alone.seconds


@pytest.mark.parametrize("name", MODELS)
def test_conversions_that_are_priced_together_cost_alike(name: str) -> None:
    """By what each says of itself."""
    program = Relaxation(facts := facts_of(name, CLUSTERS[0]), weighted_bound(facts)[1])
    flows = program.flows
    assert len(flows.prices[0]) < len(flows.conversions) / 2
    for paid, unit in zip(flows.conversions, flows.units, strict=True):
        seconds = program.conversion_s(paid.nbytes, paid.source, paid.target)
        assert program.cost[paid.variable] == pytest.approx(seconds * unit * 1e3, rel=1e-12, abs=1e-15)


def test_what_is_converted_is_as_much_as_the_reader_of_most_of_it_needs() -> None:
    """With any flows: what the first reader's flow and the variable that it shares with the others come to."""
    facts = Problem.state(gated(), CLUSTERS[0], "adamw", Pins()).facts
    flows, rng = Flows.of(facts), np.random.default_rng(0)
    times = {paid.variable: paid.each for paid in flows.conversions}
    terms: dict[int, dict[int, float]] = {}
    for row, variable, k in flows.entries:
        terms.setdefault(row, {})[variable] = k
    by_variable: dict[int, list[tuple[int, int]]] = {}
    for flow, (more, row) in flows.shared.items():
        by_variable.setdefault(more, []).append((flow, row))
    several = set[float]()
    for more, readers in by_variable.items():
        (first,) = {v for flow, row in readers for v in terms[row] if v not in (more, flow)}
        flow_of = {v: float(rng.uniform(0.0, 9.0)) for v in (first, *(flow for flow, _ in readers))}
        short = [(flow_of[flow] - terms[row][first] * flow_of[first]) / terms[row][more] for flow, row in readers]
        needed = [flow_of[flow] / terms[row][more] for flow, row in readers]
        converted = flow_of[first] / times[first] + max(0.0, *short) / times[more]
        assert converted == pytest.approx(max(flow_of[first] / times[first], *needed), rel=1e-12)
        several.update((times[first], *(terms[row][more] for _, row in readers)))
    assert len(several) > 1, "some read a value more often than once"


def test_what_is_free_has_no_variable() -> None:
    facts = facts_of("mlp", CLUSTERS[0])
    doubled = Doubled.of(facts)
    other = Facts(facts.graph, doubled.candidates, facts.cluster, "adamw", found=doubled.found)
    plain, free = Flows.of(facts), DoubledFlows.of(other, crowded=False)
    kinds = [{collective_kind(c.source, c.target) for c in flows.conversions} for flows in (plain, free)]
    assert kinds[0] - kinds[1] == {"slice"}


def test_flows_of_doubled_options_are_others() -> None:
    facts = facts_of("mlp", CLUSTERS[0])
    doubled = Doubled.of(facts)
    plain = Flows.of(facts)
    assert Flows.of(facts) is plain and Flows.of(facts, crowded=False) is not plain
    other = Facts(facts.graph, doubled.candidates, facts.cluster, "adamw", found=doubled.found)
    assert len(DoubledFlows.of(other, crowded=False).names) > len(plain.names)


@pytest.mark.parametrize("name", MODELS)
def test_a_bound_begun_at_anothers_basis_is_the_same(name: str) -> None:
    facts = [facts_of(name, on) for on in CLUSTERS]
    alone = [lower_bound(facts_of(name, on)).seconds for on in CLUSTERS]
    for number, one in enumerate(facts):
        assert lower_bound(one, facts[:number]).seconds == pytest.approx(alone[number], rel=1e-9)


@pytest.mark.parametrize("begun", [0, 1])
def test_masses_that_were_begun_sooner_prove_the_same(begun: int) -> None:
    """For the cluster that is asked about first, or for another one."""
    facts = [facts_of("mlp", on) for on in (CLUSTERS[2], CLUSTERS[0])]
    sooner, later = Masses(), Masses()
    sooner.begin(facts[begun])
    found = [sooner.bound_s(one, 0.0) for one in facts]
    assert found == pytest.approx([later.bound_s(one, 0.0) for one in facts], rel=1e-6) and max(found) > 0.0
