"""The path of calls that no two groups share a stage with: ranks wait for each other between them."""

import itertools
import random
from collections import defaultdict

import numpy as np
import pytest

from hap.cost_models.compute import node_seconds
from hap.cost_models.evaluate import evaluate
from hap.fabric import Array
from hap.placement import PARTIAL, REPLICATE, Shard
from hap.plan import Strategy
from hap.rules.choices import Choices
from hap.search.chain import find_chain, is_eligible
from hap.search.prices import Facts
from hap.search.rounding import round_shares
from tests.search.models import cluster, gpt2, mixer, mlp
from tests.search.test_bound import random_strategies
from tests.search.test_bound_measured import measured

DEVICES = cluster((1, "16GB"), (2, "16GB"), (4, "16GB"), memory_bandwidth="50GB/s")


def facts(found: Choices) -> Facts:
    return Facts(found.graph, found.strategies, DEVICES, "adamw")


def test_it_is_a_path_of_reads_with_the_matmuls_of_both_passes() -> None:
    """Three layers forward, then backward from the last to the first: of each but the first what its input's gradient
    takes, of the first what its weight's takes; the other weights' gradients are beside the path."""
    found = mlp(batch=64, width=64, layers=3)
    graph, chain = found.graph, find_chain(facts(found))
    path = [n for n in graph.nodes if n.name in chain]
    for before, after in itertools.pairwise(path):
        assert before.name in {value.node for value in after.inputs}
    matmuls = [n for n in path if n.op.startswith("aten.mm")]
    assert len(matmuls) == 6 and len([n for n in graph.nodes if n.op.startswith("aten.mm")]) == 8


def test_what_a_call_may_do() -> None:
    """A replicated value made of shards or of partial ones would let two groups into one stage."""
    node = mlp(batch=4, width=4).graph.nodes[-1]
    one, other = Shard(0, 1, 4, 1, "a"), Shard(1, 1, 4, 1, "b")
    fine = [((one, REPLICATE), one), ((one, one), PARTIAL), ((PARTIAL, REPLICATE), PARTIAL), ((REPLICATE,), REPLICATE)]
    wrong = [((one,), REPLICATE), ((PARTIAL,), REPLICATE), ((one, other), one), ((one,), other), ((PARTIAL,), one)]
    for kinds, expected in ((fine, True), (wrong, False)):
        for inputs, output in kinds:
            assert is_eligible(node, [Strategy(inputs=inputs, outputs=(output,))]) is expected


@pytest.mark.parametrize("seed", range(4))
def test_stages_take_as_long_as_the_groups_of_the_path_one_after_the_other(seed: int) -> None:
    """Any strategies that fit together, any sizes of every group."""
    rng = random.Random(seed)
    for found in (mlp(batch=8, width=8, layers=3), mixer(8, 6, 8), gpt2(layers=1, batch=4, length=8, width=16)):
        graph, chain = found.graph, find_chain(facts(found))
        for _ in range(12):
            strategies = random_strategies(found, rng)
            ratios = {name: [rng.random() ** 4 + 1e-6 for _ in range(3)] for name in found.groups}
            sizes = {name: round_shares(ratios[name], g.n) for name, g in found.groups.items()}
            busy: dict[str, Array] = defaultdict(lambda: np.zeros(3))
            for name in sorted(chain):
                s, node = strategies[name], graph.by_name[name]
                groups = {p.group for p in (*s.inputs, *s.outputs) if isinstance(p, Shard)}
                for group in groups:
                    busy[group] += [node_seconds(graph, node, s, sizes, d, d.rank) for d in DEVICES.devices]
            done = evaluate(graph, strategies, sizes, DEVICES)
            assert sum(float(t.max()) for t in busy.values()) <= done.stages_s * (1 + 1e-9)


def test_of_measured_devices_it_is_found_for_each_cluster_by_itself() -> None:
    """A described device stands for all that compute like it; a measured one only for itself, though facts of other
    clusters know what was found of the graph."""
    found = mlp(batch=64, width=256)
    described = Facts(found.graph, found.strategies, DEVICES, "adamw")
    assert find_chain(described.on(DEVICES)) is find_chain(described)
    first = Facts(found.graph, found.strategies, measured(0), "adamw")
    assert find_chain(first) is find_chain(first)
    assert find_chain(first.on(measured(1))) is not find_chain(first)
