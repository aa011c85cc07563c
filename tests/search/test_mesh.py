"""Plans of two axes: who gets how much of the batch, what the sums over hosts cost, what no plan can beat."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.codegen.passes.runner import Pass
from hap.codegen.program import Program
from hap.cost_models.compute import DEFAULT_MODEL
from hap.cost_models.evaluate import evaluate, update_seconds
from hap.cost_models.profile import CalibratedCluster
from hap.cost_models.work import node_work
from hap.errors import HapError, InfeasibleError, PlanError
from hap.graph import Graph
from hap.hosts_sum import HOSTS_SUM
from hap.mesh import graph_of, program_of, sums_in_order
from hap.mesh_plan import BATCH, MeshPlan, parse_plan
from hap.placement import Shard
from hap.plan import Plan
from hap.report.mesh import summarize_mesh
from hap.rules.choices import Choices, choices, replicated
from hap.rules.host_graph import summed
from hap.search import plan_graph
from hap.search.judge import default_passes
from hap.search.mesh import host_cluster, plan_mesh
from hap.search.mesh_bound import arithmetic_s, least_s
from tests.search.models import gpt2, mlp

Host = Sequence[float]  # TFLOP/s of each device


def cluster(
    *hosts: Host,
    memory: Sequence[str] | str = "16GB",
    network: Sequence[str] | str = "10GB/s",
    latency: Sequence[str] | str = "1us",
    memory_bandwidth: Sequence[str] | str = "2000GB/s",
    launch: str = "5us",
    links: str = "",
) -> ClusterSpec:
    """Where there may be several, one for all hosts or one for each."""

    def of(given: Sequence[str] | str, host: int) -> str:
        return given if isinstance(given, str) else given[host]

    body = ""
    for number, tflops in enumerate(hosts):
        body += f"  - name: host{number}\n    devices:\n"
        for rate in tflops:
            body += f"      - {{name: gpu, tflops: {{float32: {rate:f}}}, memory: {of(memory, number)}, "
            body += f"memory_bandwidth: {of(memory_bandwidth, number)}, launch: {launch}}}\n"
        rates = of(network, number)
        rates = rates if rates.startswith("up") else f"bandwidth: {rates}"
        body += "    link: {bandwidth: 100GB/s, latency: 1us}\n" if len(tflops) > 1 else ""
        body += f"    network: {{{rates}, latency: {of(latency, number)}}}\n"
    return ClusterSpec.from_yaml(f"name: test\nbackend: nccl\nhosts:\n{body}{links}")


def quick(possible: Choices, on: ClusterSpec) -> MeshPlan:
    return plan_mesh(possible, on, effort="quick")


SMALL = mlp(batch=256, width=64)
BUSY = mlp(batch=4096, width=256)  # the arithmetic counts
UNEQUAL = cluster((2, 1), (1,), (1, 1, 1))


@cache
def unequal() -> MeshPlan:
    return quick(BUSY, UNEQUAL)


# ------------------------------------------------------------------------------------------------ who gets what


def test_hosts_get_parts_in_proportion_to_their_devices() -> None:
    plan = unequal()
    parts = [h.batch for h in plan.hosts]
    assert sum(parts) == 4096 and plan.batch.sizes == tuple(parts)
    assert parts == pytest.approx([4096 * 3 / 7, 4096 / 7, 4096 * 3 / 7], rel=0.1)
    assert [(h.name, h.ranks, h.inside) for h in plan.hosts] == [("host0", 2, 0), ("host1", 1, 1), ("host2", 3, 2)]
    assert len(plan.inside) == 3 and [p.world_size for p in plan.inside] == [2, 1, 3]


def test_equal_hosts_with_equal_parts_share_a_plan() -> None:
    plan = quick(BUSY, cluster((2,), (1,), (2,), (1,)))
    first, second, third, fourth = plan.hosts
    assert first.batch == third.batch > second.batch == fourth.batch
    assert [h.inside for h in plan.hosts] == [0, 1, 0, 1] and len(plan.inside) == 2


def test_equal_hosts_with_unequal_parts_have_plans_of_their_own() -> None:
    plan = quick(mlp(batch=255, width=64), cluster((1,), (1,)))
    assert sorted(h.batch for h in plan.hosts) == [127, 128]
    assert [h.inside for h in plan.hosts] == [0, 1]


def test_hosts_that_differ_in_their_memory_alone_share_no_plan() -> None:
    plan = quick(BUSY, cluster((1,), (1,), memory=("16GB", "15GB")))
    assert [h.batch for h in plan.hosts] == [2048, 2048] and [h.inside for h in plan.hosts] == [0, 1]


@pytest.mark.parametrize("hosts", [((2, 1), (1,), (1, 1, 1)), ((1,), (1,))])
def test_every_host_s_program_is_made_of_the_plan(hosts: Sequence[Host]) -> None:
    """What ``hap.compile`` does with the file: nothing in it is refused."""
    plan = parse_plan(quick(SMALL, cluster(*hosts)).to_json())
    assert isinstance(plan, MeshPlan)
    orders = set()
    for number, host in enumerate(plan.hosts):
        program = program_of(SMALL.graph, plan, number).program
        assert program.world_size == host.ranks and not program.loss_may_be_late
        orders.add(sums_in_order(program)[0])
    assert len(orders) == 1 and len(orders.pop()) == 5  # the loss, two weights and two biases


def test_a_program_s_bundles_go_the_ways_that_are_fastest_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ClusterSpec | None] = []

    def passes(program: Program, on: ClusterSpec | None) -> tuple[Pass, ...]:
        asked.append(on)
        return default_passes(program, on)

    monkeypatch.setattr("hap.mesh.default_passes", passes)
    program_of(BUSY.graph, unequal(), 2, cluster=UNEQUAL)
    program_of(BUSY.graph, unequal(), 2)
    assert [on and on.fingerprint for on in asked] == [host_cluster(UNEQUAL, 2).fingerprint, None]


@cache
def dropping() -> Choices:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 4))
        x, target = torch.empty(8, 16), torch.empty(8, 4)
    return choices(capture(model, x, loss_fn=nn.functional.mse_loss, example_targets=target, name="dropping"))


def test_equal_hosts_share_a_plan_of_what_says_where_their_parts_begin() -> None:
    plan = quick(dropping(), cluster((1,), (1,)))
    for number in range(2):
        program_of(dropping().graph, plan, number)


def test_plans_are_the_same_to_the_byte() -> None:
    again = plan_mesh(mlp.__wrapped__(batch=4096, width=256), UNEQUAL, effort="quick")
    assert again.to_json() == unequal().to_json()


# ------------------------------------------------------------------------------------------------ memory


def most_held(plan: MeshPlan, host: int) -> int:
    return max(plan.inside_of(host).predicted.memory_bytes)


DEEP = mlp(batch=1024, width=64, layers=4)


def test_what_does_not_fit_goes_to_other_hosts() -> None:
    free = quick(DEEP, cluster((3,), (1,)))
    assert free.hosts[0].batch == pytest.approx(768, rel=0.05) and most_held(free, 0) > 1_000_000
    tight = quick(DEEP, cluster((3,), (1,), memory=("1MB", "1GB")))
    assert tight.hosts[0].batch < tight.hosts[1].batch and sum(tight.batch.sizes) == 1024
    assert most_held(tight, 0) <= 0.9 * 1_000_000 < most_held(tight, 1)
    assert tight.predicted.step_s > free.predicted.step_s


def test_all_that_fits_is_too_little() -> None:
    """One sample needs the parameters, and they fit; the batch does not."""
    with pytest.raises(InfeasibleError) as said:
        quick(DEEP, cluster((1,), (1,), memory="700kB"))
    words = str(said.value)
    assert words == "of a batch of 1024 there fit at most 511 on 'host0', 511 on 'host1'"


def test_a_host_that_cannot_hold_the_parameters_is_named() -> None:
    with pytest.raises(InfeasibleError, match=r"^host 'host1' with one sample of the batch: .*device holds") as said:
        quick(DEEP, cluster((1,), (1,), memory=("1GB", "50kB")))
    assert "\n" not in str(said.value)


def test_what_fits_in_halves_is_dealt_out_in_halves() -> None:
    assert quick(DEEP, cluster((1,), (1,), memory="1.43MB")).batch.sizes == (512, 512)
    plan = quick(DEEP, cluster((1.3,), (1,), memory="1.43MB"))
    assert sum(plan.batch.sizes) == 1024


# ------------------------------------------------------------------------------------------------ refusals


def refusal(possible: Choices, on: ClusterSpec) -> str:
    with pytest.raises(HapError) as said:
        quick(possible, on)
    assert isinstance(said.value, PlanError) and "\n" not in str(said.value)
    return str(said.value)


def test_one_host_is_refused() -> None:
    words = "cluster 'test' has one host: there is no second axis, between hosts"
    assert refusal(SMALL, cluster((1, 1))) == words


def test_a_measured_cluster_is_refused() -> None:
    plain = cluster((1,), (1,))
    given = {name: getattr(plain, name) for name in ClusterSpec.model_fields}
    measured = CalibratedCluster.model_construct(**given)
    assert refusal(SMALL, measured) == "a mesh of two axes is planned by descriptions; give no profile"


def test_a_batch_smaller_than_the_number_of_hosts_is_refused() -> None:
    words = "of a batch of 2 host 'host2' would get nothing: leave it out, or give a larger batch"
    assert refusal(mlp(batch=2, width=16), cluster((1,), (1,), (1,))) == words


def test_a_batch_of_as_many_samples_as_hosts_is_dealt_out() -> None:
    assert quick(mlp(batch=3, width=16), cluster((1,), (1,), (1,))).batch.sizes == (1, 1, 1)


def test_a_model_without_a_batch_is_refused() -> None:
    assert "nothing to deal out to hosts" in refusal(mlp(batch=1, width=16), cluster((1,), (1,)))


def test_a_plan_that_was_found_is_kept_though_a_host_turns_out_slower() -> None:
    """By arithmetic 3 samples to 1; so much slower is the second one's memory that it should then get none."""
    on = cluster((5,), (1,), launch="1us", network="100GB/s", memory_bandwidth=("2000GB/s", "0.5GB/s"))
    assert quick(mlp(batch=4, width=256), on).batch.sizes == (3, 1)


# ------------------------------------------------------------------------------------------------ what it costs


def sums_by_hand(graph: Graph, plan: Plan, hosts: int, rate: float, latency_s: float, launch_s: float) -> float:
    """The formula of ``hap.hosts_sum``, from the plan's own strategies."""
    seconds = 0.0
    for node in graph.nodes:
        if node.op == HOSTS_SUM:
            dealt = isinstance(plan.strategy(node.name).inputs[0], Shard)
            copies = 1 if dealt else plan.world_size
            moved = (1 + copies) * node.meta.nbytes * (hosts - 1) / hosts
            seconds += launch_s + 2 * latency_s + moved / rate
    return seconds


def all_sums(possible: Choices, plan: MeshPlan, rate: float, latency_s: float, launch_s: float = 5e-6) -> list[float]:
    hosts = range(len(plan.hosts))
    graphs = [graph_of(possible.graph, plan, h) for h in hosts]
    return [sums_by_hand(graphs[h], plan.inside_of(h), len(plan.hosts), rate, latency_s, launch_s) for h in hosts]


@pytest.mark.parametrize("network", ["10GB/s", "0.1GB/s"])
def test_the_step_is_the_slowest_host_s(network: str) -> None:
    on = cluster((2, 1), (1,), (1, 1, 1), network=network)
    plan = quick(BUSY, on)
    inside = [plan.inside_of(h).predicted for h in range(3)]
    assert plan.predicted.step_s == max(p.step_s for p in inside)
    as_run_s = max(p.as_run_s for p in inside)
    assert as_run_s <= plan.predicted.overlapped_s == plan.predicted.as_run_s < 1.01 * as_run_s  # they wait a little
    rate = {"10GB/s": 1e10, "0.1GB/s": 1e8}[network]
    assert plan.predicted.sums_s == pytest.approx(max(all_sums(BUSY, plan, rate, 1e-6)))
    assert 0 < plan.predicted.sums_s < plan.predicted.step_s


@pytest.mark.parametrize(
    ("network", "latency", "links", "rate", "latency_s"),
    [
        ("1GB/s", "1us", "", 1e9, 1e-6),
        (("1GB/s", "1GB/s", "0.01GB/s"), "1us", "", 1e7, 1e-6),
        (("1GB/s", "up: 1GB/s, down: 0.02GB/s", "1GB/s"), "1us", "", 2e7, 1e-6),
        (("1GB/s", "up: 0.03GB/s, down: 1GB/s", "1GB/s"), "1us", "", 3e7, 1e-6),
        ("1GB/s", ("1us", "1us", "5ms"), "", 1e9, 5e-3),
        ("1GB/s", "1us", "links: [{from: host0, to: host2, bandwidth: 0.02GB/s}]", 4e7, 1e-6),  # to one of two others
        ("1GB/s", "1us", "links: [{from: host0, to: host2, bandwidth: 0.6GB/s}]", 1e9, 1e-6),
        ("1GB/s", "1us", "links: [{from: host0, to: host2, latency: 3ms}]", 1e9, 3e-3),
        ("1GB/s", "1us", "links: [{from: host2, to: host1, bandwidth: 0.01GB/s, latency: 2ms}]", 2e7, 2e-3),
    ],
    ids=["equal", "a slow host", "slow in", "slow out", "a far host", "a slow link", "a quick link", "far", "both"],
)
def test_the_slowest_way_limits_the_sums(
    network: Sequence[str] | str, latency: Sequence[str] | str, links: str, rate: float, latency_s: float
) -> None:
    """All hosts wait for the slowest. Of what a host sends one half goes to each of two others."""
    plan = quick(SMALL, cluster((1, 1), (1, 1), (1, 1), network=network, latency=latency, links=links))
    found = all_sums(SMALL, plan, rate, latency_s)
    assert plan.predicted.sums_s == pytest.approx(max(found))


def test_sums_dealt_out_inside_are_cheaper_and_are_found() -> None:
    """With a slow way out, and a quick link inside, gradients are scattered to the devices before they are summed."""
    plan = quick(SMALL, cluster((1, 1, 1), (1, 1, 1), network="0.01GB/s"))
    graph = graph_of(SMALL.graph, plan, 0)
    inside = plan.inside_of(0)
    large = [n for n in summed(graph) if n.meta.numel > 1]
    assert len(large) == 4 and all(isinstance(inside.strategy(n.name).inputs[0], Shard) for n in large)


def test_a_host_s_step_is_what_evaluate_says_of_its_graph() -> None:
    plan = unequal()
    for number, host in enumerate(UNEQUAL.hosts):
        inside, graph = plan.inside_of(number), graph_of(BUSY.graph, plan, number)
        part = ClusterSpec(name=f"test/{host.name}", hosts=(host,))
        found = evaluate(graph, {n: inside.strategy(n) for n in inside.strategies}, inside.sizes, part)
        assert inside.predicted.step_s == pytest.approx(found.step_s)
        assert part.fingerprint == inside.provenance.cluster_fingerprint  # networks are alike here
        bound = inside.predicted.lower_bound_s
        assert bound is None or bound <= inside.predicted.step_s * (1 + 1e-9)


# ------------------------------------------------------------------------------------------------ what none can beat


def random_cluster(seed: int) -> ClusterSpec:
    source = random.Random(seed)
    hosts = [
        [source.choice([0.05, 0.2, 1, 5]) for _ in range(source.randint(1, 3))] for _ in range(source.randint(2, 3))
    ]
    bandwidth = source.choice(["1TB/s", "100TB/s"])
    return cluster(*hosts, network="100GB/s", memory_bandwidth=bandwidth, launch=source.choice(["1ns", "5us"]))


@pytest.mark.parametrize("seed", range(6))
def test_no_step_is_shorter_than_the_arithmetic_or_the_bound(seed: int) -> None:
    on, possible = random_cluster(seed), (SMALL, BUSY)[seed % 2]
    least = arithmetic_s(possible.graph, on)
    assert 0 < least <= plan_graph(possible, on, effort="quick").predicted.step_s
    try:
        plan = quick(possible, on)
    except PlanError as e:
        assert "would get nothing" in str(e)
        return
    assert plan.predicted.arithmetic_s == least
    assert least < plan.predicted.lower_bound_s == least_s(possible.graph, on, "adamw") <= plan.predicted.step_s
    assert least <= plan.predicted.step_s and least <= plan.predicted.as_run_s


def test_the_arithmetic_is_near_where_there_is_nothing_else() -> None:
    """Slow devices with quick memory, links and launches."""
    on = cluster((0.0002, 0.0001), (0.0001,), memory_bandwidth="100TB/s", launch="1ns", network="10TB/s", latency="0s")
    plan = quick(BUSY, on)
    assert plan.predicted.arithmetic_s <= plan.predicted.step_s <= 1.02 * plan.predicted.arithmetic_s
    assert plan.predicted.gap < 0.01


def test_where_sums_over_hosts_are_most_of_a_step_the_bound_has_them() -> None:
    """Two hosts: of all parameters' gradients as much goes out as comes in, once."""
    on = cluster((1,), (1,), network="20MB/s", latency="0s")
    graph, plan = BUSY.graph, quick(BUSY, on)
    nbytes = sum(n.meta.nbytes for n in graph.sources("parameter"))
    assert nbytes / 20e6 < plan.predicted.lower_bound_s <= plan.predicted.step_s
    assert plan.predicted.sums_s == pytest.approx(nbytes / 20e6, rel=0.01) and plan.predicted.gap < 0.02


def test_every_host_updates_all_parameters() -> None:
    on = cluster((1, 1), (1,), launch="0s", memory_bandwidth="1GB/s")
    sgd, adam = (least_s(BUSY.graph, on, optimizer) for optimizer in ("sgd", "adamw"))
    whole = {n.name: replicated(n) for n in BUSY.graph.nodes}
    more = [update_seconds(BUSY.graph, whole, {}, on, optimizer)[0] for optimizer in ("sgd", "adamw")]
    assert adam - sgd == pytest.approx(2 / 3 * (more[1] - more[0]))  # each device counts for a third, each host's once


def test_the_arithmetic_of_two_kinds_of_devices_by_hand() -> None:
    """Devices that are so many times as fast at everything do as many times as much of it."""
    graph, on = SMALL.graph, cluster((3,), (1,))
    flops: dict[str, float] = {}
    for node in graph.nodes:
        work = node_work(graph, node)
        if work.op_class == "matmul":
            flops[work.op_class] = flops.get(work.op_class, 0.0) + work.flops
    seconds = sum(f / (4e12 * DEFAULT_MODEL.compute_efficiency[kind]) for kind, f in flops.items())  # type: ignore[index]
    assert arithmetic_s(graph, on) == pytest.approx(seconds)


def test_no_step_as_run_is_shorter_than_the_arithmetic() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*[nn.Linear(1, 1) for _ in range(8)]), torch.empty(4096, 1)
    thin = choices(capture(model, x, loss_fn=torch.sum, name="thin"))
    on = cluster((0.000001,), (0.000001,), memory_bandwidth="100TB/s", launch="0s", network="100GB/s", latency="1ns")
    assert arithmetic_s(thin.graph, on) <= plan_graph(thin, on, effort="quick").predicted.as_run_s


def test_gpt2_on_unequal_hosts() -> None:
    found = gpt2(1)
    plan = quick(found, cluster((5, 5), (2,), network="1GB/s"))
    big, small = plan.hosts
    assert big.batch > small.batch and big.batch + small.batch == 16
    shards = [text for text in plan.between.values() if "S(" in text]
    assert len(shards) > 50 and all(f"@{BATCH})" in text for text in shards)
    parameters = {n.name for n in found.graph.sources("parameter")}
    assert {plan.between[name] for name in parameters} == {"-> R"}


def test_an_interrupted_search_is_the_last_one_and_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the search of one host: the plans that there are stand, and no round follows."""
    asked: list[int] = []

    def interrupted(possible: Choices, on: ClusterSpec, **given: Any) -> Plan:
        asked.append(on.world_size)
        plan = plan_graph(possible, on, **given)
        made = plan.provenance.model_copy(update={"solver": {**plan.provenance.solver, "stopped": True}})
        return plan.model_copy(update={"provenance": made})

    on = cluster((2, 1), (0.2,), (1, 1, 1), network="1GB/s")
    free = quick(BUSY, on)
    monkeypatch.setattr("hap.search.mesh.plan_graph", interrupted)
    plan = plan_mesh(BUSY, on, effort="quick", leave_out=True)
    assert len(asked) == 3 and plan.provenance.solver == {"stopped": True} and free.provenance.solver == {}
    assert "the search was interrupted" in summarize_mesh(plan) and "interrupted" not in summarize_mesh(free)
