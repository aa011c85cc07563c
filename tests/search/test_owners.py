"""Whose update must see a whole matrix: an owner for each, by speed and by memory, and the search's choice."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.cost_models.optimizers import sees_whole, update_flops
from hap.errors import PlanError
from hap.placement import REPLICATE, Shard
from hap.rules.choices import Choices, choices
from hap.search import plan_graph
from hap.search.owners import is_owned, with_owners
from hap.search.pins import Pins
from hap.search.problem import Problem
from hap.search.subsets import without
from tests.search.models import gpt2, mlp

DEVICE = (
    "{{name: {name}, tflops: {{float32: {tflops}, bfloat16: {tflops}}}, memory: {memory}, memory_bandwidth: 1TB/s}}"
)
HOST = "  - {{name: {name}, devices: [{device}], network: {{bandwidth: 10GB/s, latency: 1us}}}}\n"


def devices(*kinds: tuple[float, str]) -> ClusterSpec:
    """(TFLOP/s, memory) of each, one in every host."""
    lines = [
        HOST.format(name=f"h{i}", device=DEVICE.format(name=f"d{i}", tflops=t, memory=m))
        for i, (t, m) in enumerate(kinds)
    ]
    return ClusterSpec.from_yaml("name: each\nbackend: nccl\nhosts:\n" + "".join(lines))


def owners(found: Choices, cluster: ClusterSpec) -> Counter[int]:
    """Rank -> how many matrices are its own."""
    extended, sizes = with_owners(found, cluster, "muon")
    matrices = [n for n in found.graph.sources("parameter") if sees_whole("muon", found.graph, n)]
    assert len(sizes) == len(matrices) > 0
    for node in matrices:
        (placement,) = [s.outputs[0] for s in extended.strategies[node.name] if is_owned(s)]
        assert (
            isinstance(placement, Shard) and max(sizes[placement.group]) == sum(sizes[placement.group]) == placement.n
        )
    return Counter(max(range(cluster.world_size), key=lambda r: own[r]) for own in sizes.values())


def test_fast_ranks_own_more() -> None:
    """Of 24 alike matrices, by twice, once and once the speed."""
    found = mlp(batch=64, width=512, layers=24)
    assert owners(found, devices((20, "80GB"), (10, "80GB"), (10, "80GB"))) == {0: 12, 1: 6, 2: 6}


def test_no_rank_is_filled_while_others_are_empty() -> None:
    """By speed all would be the first rank's, whose memory is a tenth of all: of its own it has at most twice that."""
    found = mlp(batch=64, width=512, layers=24)
    count = owners(found, devices((1000, "2GB"), (1, "9GB"), (1, "9GB")))
    assert 2 <= count[0] <= 4 and sum(count.values()) == 24


def test_nothing_else_has_owners() -> None:
    found, cluster = mlp(batch=64, width=512, layers=2), devices((10, "8GB"), (1, "8GB"))
    for optimizer in ("adamw", "adafactor"):
        assert with_owners(found, cluster, optimizer) == (found, {})
    assert with_owners(found, devices((10, "8GB")), "muon") == (found, {})
    extended, sizes = with_owners(found, cluster, "muon")
    assert with_owners(extended, cluster, "muon") == (extended, sizes), "again the same"


@pytest.mark.parametrize("leave_out", [False, True])
def test_a_slow_rank_makes_few_updates(leave_out: bool) -> None:
    """Where products take long, the slow device makes about its part of all speed of them, one in 21, or none, though
    it works on its share of the batch."""
    found, cluster = gpt2(layers=2, batch=64, width=512), devices((5, "8GB"), (50, "8GB"), (50, "8GB"))
    plan = plan_graph(found, cluster, optimizer="muon", leave_out=leave_out)
    assert any(group.label == "batch" and min(group.sizes) > 0 for group in plan.groups.values())
    lies = {n: plan.strategy(n.name).outputs[0] for n in found.graph.sources("parameter")}
    owned = {n: p for n, p in lies.items() if isinstance(p, Shard) and p.group.startswith("own")}
    assert plan.predicted.lower_bound_s is not None and plan.predicted.lower_bound_s <= plan.predicted.step_s
    flops = sum(update_flops("muon", found.graph, n) for n in owned)
    assert flops > 0.5 * sum(update_flops("muon", found.graph, n) for n in lies)
    of = dict.fromkeys(range(3), 0.0)
    for n, placement in owned.items():
        sizes = plan.groups[placement.group].sizes
        of[sizes.index(max(sizes))] += update_flops("muon", found.graph, n)
    assert of[0] < 0.06 * flops < min(of[1], of[2])
    for n, placement in lies.items():
        assert not sees_whole("muon", found.graph, n) or placement == REPLICATE or n in owned


def test_a_smaller_cluster_has_owners_of_its_own() -> None:
    """In a search that leaves devices out, too; all that they do not depend on is as it was."""
    cluster = devices((5, "8GB"), (50, "8GB"), (50, "8GB"))
    problem = Problem.state(gpt2(layers=2), cluster, "muon", Pins())
    smaller = problem.on(without(cluster, [0]))
    assert problem.fixed.keys() == smaller.fixed.keys() and problem.choices == smaller.choices
    slow, *fast = (sum(sizes[r] > 0 for sizes in problem.fixed.values()) for r in range(3))
    assert slow < min(fast)
    assert {sizes.index(max(sizes)) for sizes in smaller.fixed.values()} == {0, 1}


def test_a_pin_may_ask_for_the_owner_or_for_whole() -> None:
    found, cluster = mlp(batch=64, width=512, layers=2), devices((10, "8GB"), (1, "8GB"))
    name = next(n.target for n in found.graph.sources("parameter") if sees_whole("muon", found.graph, n))
    for text, is_whole in (("R", True), ("S(0)", False)):
        problem = Problem.state(found, cluster, "muon", Pins(placements={name: text}))
        (only,) = problem.facts.candidates[next(n.name for n in found.graph.nodes if n.target == name)]
        assert (only.outputs[0] == REPLICATE) == is_whole != is_owned(only)


class WithNoRows(nn.Module):
    """A layer, and a matrix of no rows, whose sum is none."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.layer = nn.Parameter(torch.empty(0, 8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.none.sum()


def test_a_matrix_of_no_rows_has_no_owner() -> None:
    with torch.device("meta"):
        model, x = WithNoRows(), torch.empty(4, 8)
    found, cluster = (
        choices(capture(model, x, loss_fn=lambda out: out.square().mean())),
        devices((10, "8GB"), (1, "8GB")),
    )
    extended, sizes = with_owners(found, cluster, "muon")
    assert sizes.keys() == {"own0"} and extended.groups["own0"].label == "layer.weight of one rank"
    plan = plan_graph(found, cluster, optimizer="muon")
    none = next(n for n in found.graph.sources("parameter") if n.target == "none")
    assert plan.strategy(none.name).outputs[0] == REPLICATE


def test_pins_know_nothing_of_owners() -> None:
    """They are found after the pins, so neither a group's name nor a pattern of labels nor ratios speak of them."""
    found, cluster = mlp(batch=64, width=512, layers=2), devices((10, "8GB"), (1, "8GB"))
    free = Problem.state(found, cluster, "muon", Pins()).fixed
    assert "own0" in free
    with pytest.raises(PlanError, match=r"^pin 'own0' matches no dimension group; there are g0 "):
        Problem.state(found, cluster, "muon", Pins(sizes={"own0": (0, 512)}))
    with pytest.raises(PlanError, match=r"^pin '[*] of one rank' matches no dimension group"):
        Problem.state(found, cluster, "muon", Pins(sizes={"* of one rank": (0, 512)}))
    (batch,) = (g.label for g in found.groups.values() if g.n == 64)
    pinned = Problem.state(found, cluster, "muon", Pins(sizes={batch: (60, 4)}, ratios=(1.0, 0.0))).fixed
    assert {name: sizes for name, sizes in pinned.items() if name in free} == free
    assert pinned.keys() == free.keys() | found.groups.keys()
    square = mlp(batch=512, width=512)
    every = Problem.state(square, cluster, "muon", Pins(sizes={"*": (500, 12)})).fixed
    assert all(every[name] == (500, 12) for name in square.groups) and "own0" in every
