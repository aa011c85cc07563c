"""What lies on one host is worked on there alone: the bound that says so is above the other, and below every plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest

from hap.cluster import ClusterSpec
from hap.rules.choices import Choices
from hap.search import Pins, masses, plan_graph
from hap.search.cases import find_main
from hap.search.doubled import Doubled
from hap.search.limits import LIMITS
from hap.search.masses import Masses
from hap.search.prices import Facts
from hap.search.problem import Problem
from hap.search.relaxation import lower_bound
from hap.search.rounding import round_shares
from hap.search.strategies import Chooser
from hap.search.subsets import without
from tests.search.models import gpt2, mixer, mlp

GPU = "{{name: gpu, tflops: {{float32: {tflops}}}, memory: 80GB, memory_bandwidth: 2000GB/s, count: {count}}}"
LINKS = "link: {{bandwidth: 100GB/s, latency: 1us}}, network: {{bandwidth: {network}, latency: 1us}}"
HOST = f"  - {{{{name: h{{i}}, devices: [{GPU}], {LINKS}}}}}\n"


def hosts(*kinds: tuple[float, int], network: str | Sequence[str]) -> ClusterSpec:
    """(TFLOP/s of a device, devices) of every host."""
    networks = [network] * len(kinds) if isinstance(network, str) else network
    each = enumerate(zip(kinds, networks, strict=True))
    lines = [HOST.format(i=i, tflops=t, count=n, network=own) for i, ((t, n), own) in each]
    return ClusterSpec.from_yaml("name: hosts\nbackend: nccl\nhosts:\n" + "".join(lines))


def both_s(found: Choices, devices: ClusterSpec) -> tuple[float, float]:
    facts = Facts(found.graph, found.strategies, devices, "adamw")
    known = lower_bound(facts).seconds
    return known, Masses().bound_s(facts, known)


@cache
def of_both_s(name: str, on: str) -> tuple[float, float]:
    return both_s(MODELS[name], CLUSTERS[on])


CLUSTERS = {
    "8 x 1": hosts(*[(1, 1)] * 8, network="2GB/s"),
    "8 x 2": hosts(*[(10, 2)] * 8, network="10GB/s"),
    "2 x 2, 4 x 1": hosts((10, 2), (10, 2), *[(4, 1)] * 4, network="10GB/s"),
}
MODELS = {"mixer": mixer(64, 256, 256), "mlp": mlp(batch=1024, width=512, layers=3), "gpt2": gpt2(layers=1)}


@pytest.mark.parametrize(
    ("name", "devices", "more"), [("gpt2", "8 x 1", 0.15), ("gpt2", "8 x 2", 0.14), ("mixer", "8 x 2", 0.03)]
)
def test_where_exchanges_were_free_they_are_paid_for(name: str, devices: str, more: float) -> None:
    """In the relaxation each group that an all-to-all goes between lies on one host, and works as fast as if on all."""
    known, raised = of_both_s(name, devices)
    assert raised > (1 + more) * known


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("on", CLUSTERS)
def test_below_the_best_strategies_at_any_sizes(name: str, on: str) -> None:
    """The integer program's choice, nothing overlapped, at sizes drawn for every group: on one host, some, or all."""
    found, devices, rng = MODELS[name], CLUSTERS[on], random.Random(7)
    known, raised = of_both_s(name, on)
    assert raised >= known > 0
    problem = Problem.state(found, devices, "adamw", Pins())
    chooser = Chooser(problem, LIMITS["quick"])
    host_of = [d.host for d in devices.devices]
    for _ in range(6):
        sizes, alike = {}, rng.random() < 0.5
        some = rng.sample(sorted(set(host_of)), rng.choice([1, 2, 3, 6]))
        for group, g in found.groups.items():
            some = some if alike else rng.sample(sorted(set(host_of)), rng.choice([1, 1, 2, 3]))
            shares = [rng.choice([1.0, 1.0, 0.4]) if host in some else 0.0 for host in host_of]
            sizes[group] = round_shares(shares, g.n)
        chosen = chooser.strategies(sizes, False, ())
        assert chosen is not None and raised <= chosen.cost[1]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("on", CLUSTERS)
def test_below_the_plan_that_is_found(name: str, on: str) -> None:
    _, raised = of_both_s(name, on)
    assert raised <= plan_graph(MODELS[name], CLUSTERS[on], effort="quick").predicted.step_s


def test_where_one_host_has_most_of_the_power_nothing_is_asked() -> None:
    known, same = both_s(MODELS["mixer"], hosts((100, 1), (10, 1), network="1GB/s"))
    assert same == known


@pytest.mark.parametrize("name", ["mixer", "mlp", pytest.param("gpt2", marks=pytest.mark.long)])
def test_the_same_from_wherever_it_begins(name: str) -> None:
    """The optimum where nothing may be spread is a beginning, not a choice; and so is another cluster's optimum."""
    found, both = MODELS[name], Masses()
    for on in ("8 x 2", "2 x 2, 4 x 1"):
        facts = Facts(found.graph, found.strategies, CLUSTERS[on], "adamw")
        known, rate = lower_bound(facts).seconds, masses._rate(facts)
        assert rate is not None
        from_nothing = masses._Program(facts, *rate).seconds
        assert from_nothing is not None
        assert both.bound_s(facts, 0.0) == pytest.approx(from_nothing, rel=1e-5)
        assert both.bound_s(facts, known) == pytest.approx(max(known, from_nothing), rel=1e-5)


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_nested_cluster_is_bounded_as_if_it_were_asked_about_alone(asked_first: bool) -> None:
    """By which groups much can be dealt out depends on the devices: of one, a tenth of the work on slow devices alone.
    What was asked of the other cluster before changes nothing; all have the same rows."""
    hosts = "\n".join(
        f"  - {{name: h{i}, devices: [{{gpu: {gpu}}}], network: {{bandwidth: 10Gbit/s, latency: 5us}}}}"
        for i, gpu in enumerate(["T4"] * 3 + ["A100-40GB"] * 3)
    )
    every = ClusterSpec.from_yaml(f"name: unlike\nbackend: nccl\nhosts:\n{hosts}\n")
    found = mixer(16, 256, 64)

    def program(facts: Facts) -> masses._Program:
        made = masses._Program.of(facts)
        assert made is not None
        return made

    nested = Problem.state(found, every, "adamw", Pins())
    part = nested.on(without(every, (0, 1, 2)))
    alone = Problem.state(found, part.cluster, "adamw", Pins())
    main = {frozenset(find_main(p.facts, Doubled.of(p.facts).shared)) for p in (nested, part)}
    assert len(main) == 2
    both = [nested, part] if asked_first else [part, nested]
    programs = {problem: program(problem.facts) for problem in both}
    assert programs[nested].shape == programs[part].shape
    for ours, lone in ((part, alone), (nested, Problem.state(found, every, "adamw", Pins()))):
        assert programs[ours].entries == program(lone.facts).entries
