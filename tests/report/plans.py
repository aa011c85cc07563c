"""Plans with explanations for tests of what is told about them: four unequal devices, and 1,024 of three kinds."""

from __future__ import annotations

from functools import cache

from hap.cluster import ClusterSpec
from hap.graph import Graph
from hap.plan import Plan
from hap.rules.choices import Choices
from hap.search import plan_graph
from hap.search.rounding import round_shares
from hap.whatif import explained
from tests._support.plans import greedy_strategies
from tests.search.models import mlp

FOUR = """
name: four
backend: gloo
hosts:
  - name: big
    devices: [{name: fast, count: 2, tflops: {float32: 2}, memory: 400MB, memory_bandwidth: 80GB/s, launch: 5us}]
    link: {bandwidth: 4GB/s, latency: 10us}
    network: {bandwidth: 1GB/s, latency: 50us}
    price_per_hour: 3.0
  - name: small
    devices:
      - {name: medium, tflops: {float32: 1}, memory: 200MB, memory_bandwidth: 40GB/s, launch: 5us}
      - {name: slow, tflops: {float32: 0.5}, memory: 100MB, memory_bandwidth: 20GB/s, launch: 5us}
    link: {bandwidth: 2GB/s, latency: 10us}
    network: {bandwidth: 500MB/s, latency: 50us}
    price_per_hour: 1.0
"""
KINDS = (("A100-40GB", 64, "nvlink", 5), ("V100-16GB", 32, "nvlink", 3), ("T4", 32, "pcie3", 1))


def cluster_of_four() -> ClusterSpec:
    return ClusterSpec.from_yaml(FOUR)


@cache
def four() -> tuple[Plan, Graph, Choices]:
    """Planned: an MLP with layers of 512, a batch of 256."""
    found = mlp(batch=256, width=512, layers=4)
    plan = plan_graph(found, cluster_of_four(), effort="quick")
    return explained(plan, found.graph, cluster_of_four(), helps=True), found.graph, found


def cluster_of_1024() -> ClusterSpec:
    hosts = "".join(
        f"\n  - name: {gpu.lower()}-{i}\n    devices: [{{gpu: {gpu}, count: 8}}]\n    link: {link}\n"
        "    network: {bandwidth: 25Gbit/s, latency: 20us}"
        for gpu, count, link, _ in KINDS
        for i in range(count)
    )
    return ClusterSpec.from_yaml(f"name: thousand\nbackend: nccl\nhosts:{hosts}\n")


@cache
def thousand() -> Plan:
    """Data parallel, made without a search: an MLP with layers of 2,048, a batch of 8,192 dealt by kind."""
    from hap.conversion import find_needs
    from hap.cost_models.evaluate import evaluate
    from hap.search.assemble import assemble_plan

    found, cluster = mlp(batch=8192, width=2048, layers=4), cluster_of_1024()
    strategies = greedy_strategies(found, {"args.0": (0, 8192), "targets.0": (0, 8192)})
    weights = [speed for _, count, _, speed in KINDS for _ in range(8 * count)]
    shares = tuple(w / sum(weights) for w in weights)
    sizes = {name: round_shares(shares, group.n) for name, group in found.groups.items()}
    needs = find_needs(found.graph, strategies)
    judged = evaluate(found.graph, strategies, sizes, cluster, needs=needs)
    plan = assemble_plan(
        found,
        cluster,
        strategies,
        sizes,
        judged,
        optimizer="adamw",
        model_name="mlp",
        lower_bound_s=0.0,
        solver={"regather": False},
    )
    return explained(plan, found.graph, cluster, helps=False)
