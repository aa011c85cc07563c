"""The flow-form program finds what exhaustive search finds, and its objective is the recomputed cost."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from hap.conversion import find_needs
from hap.graph import Graph, Node, TensorMeta, Value, verify_graph
from hap.placement import PARTIAL, REPLICATE, Placement, Shard
from hap.plan import Strategy
from hap.search.classes import find_classes, read_again
from hap.search.milp import Skeleton, choose, make_skeleton
from hap.search.payers import NodePayer
from hap.search.tables import Coefficients, Held

RANKS = 2
PLACEMENTS: tuple[Placement, ...] = (REPLICATE, Shard(0, 1, 4, 1, "rows"), Shard(1, 1, 4, 1, "columns"))
META = TensorMeta((4, 4), torch.float32)


@dataclass(frozen=True)
class MadeUpPrices:
    """Costs drawn once per (node, option) and (value, source, target)."""

    seconds: Mapping[tuple[str, int], np.ndarray]
    nbytes: Mapping[tuple[str, int], np.ndarray]
    conversion_s: Mapping[tuple[Value, Placement, Placement], float]
    capacity_bytes: np.ndarray
    regather: bool


@dataclass(frozen=True)
class OfSkeleton:
    """The interface of ``hap.search.tables.Prices``, by the plainest of loops."""

    made_up: MadeUpPrices
    skeleton: Skeleton

    def coefficients(self) -> Coefficients:
        width, prices = len(self.skeleton.names), self.made_up
        together, compute, held = np.zeros(width), np.zeros((RANKS, width)), np.zeros((1, RANKS, width))
        for payer in self.skeleton.payers:
            for v in payer.variables:
                if isinstance(payer, NodePayer):
                    for name in self.skeleton.classes.nodes[payer.node_class].members:
                        compute[:, v] += prices.seconds[name, payer.option]
                        held[0, :, v] += prices.nbytes[name, payer.option]
                else:
                    keys = zip(payer.values, payer.sources, payer.targets, strict=True)
                    together[v] += sum(prices.conversion_s[key] for key in keys)
        return Coefficients(together, compute, Held(held), prices.capacity_bytes)


def random_graph(rng: random.Random) -> tuple[Graph, dict[str, tuple[Strategy, ...]]]:
    """A parameter, an input, a few binary operators, a loss and the parameter's gradient."""
    nodes = [Node("w", "parameter", outputs=(META,), target="w"), Node("x", "input", outputs=(META,), target="args.0")]
    strategies = {
        "w": tuple(Strategy((), (p,)) for p in PLACEMENTS),
        "x": tuple(Strategy((), (p,)) for p in PLACEMENTS[:2]),
    }
    for i in range(rng.randint(2, 4)):
        phase = "forward" if i < 2 else "backward"
        args = tuple(Value(rng.choice(nodes).name) for _ in range(2))
        nodes.append(Node(f"n{i}", "made.up", args, outputs=(META,), phase=phase))
        options = [Strategy((REPLICATE, REPLICATE), (REPLICATE,))]
        for _ in range(rng.randint(1, 2)):
            wants = tuple(rng.choice(PLACEMENTS) for _ in range(2))
            options.append(Strategy(wants, (rng.choice((*PLACEMENTS, PARTIAL)),)))
        strategies[f"n{i}"] = tuple(dict.fromkeys(options))
    nodes.append(Node("loss", "made.sum", (Value("n0"),), outputs=(TensorMeta((), torch.float32),)))
    strategies["loss"] = (
        Strategy((REPLICATE,), (REPLICATE,)),
        Strategy((PLACEMENTS[1],), (PARTIAL,)),
        Strategy((PARTIAL,), (PARTIAL,)),
    )
    graph = Graph("random", tuple(nodes), Value("loss"), {"w": Value(nodes[-2].name)})
    verify_graph(graph)
    return graph, strategies


def random_prices(rng: random.Random, graph: Graph, strategies: Mapping[str, tuple[Strategy, ...]]) -> MadeUpPrices:
    keys = [(name, i) for name, options in strategies.items() for i in range(len(options))]
    pairs = [(a, b) for a in (*PLACEMENTS, PARTIAL) for b in PLACEMENTS if a != b]
    return MadeUpPrices(
        seconds={key: np.array([rng.random(), rng.random()]) * 1e-3 for key in keys},
        nbytes={key: np.array([rng.random(), rng.random()]) * 1e9 for key in keys},
        conversion_s={(Value(n.name), a, b): rng.random() * 1e-3 for n in graph.nodes for a, b in pairs},
        capacity_bytes=np.full(RANKS, rng.choice([100e9, 3.5e9])),
        regather=rng.random() < 0.5,
    )


def cost(
    graph: Graph,
    prices: MadeUpPrices,
    strategies: Mapping[str, tuple[Strategy, ...]],
    picks: Mapping[str, int],
    again: Mapping[str, Sequence[Node]],
) -> float:
    """Step seconds of one choice, straight from ``find_needs``; infinite if it does not fit or makes a partial."""
    chosen = {name: strategies[name][i] for name, i in picks.items()}
    if any((sum(prices.nbytes[key] for key in picks.items()) > prices.capacity_bytes).tolist()):
        return float("inf")
    total = max(sum(prices.seconds[key] for key in picks.items()).tolist())
    try:
        needs = find_needs(graph, chosen, regather=prices.regather, again=again)
        for need in needs:
            need.collective  # noqa: B018  (raises where the target is a partial)
    except AssertionError:
        return float("inf")
    return total + sum(prices.conversion_s[n.value, n.source, n.target] for n in needs)


@pytest.mark.parametrize("seed", range(40))
def test_finds_the_optimum_of_exhaustive_search(seed: int) -> None:
    rng = random.Random(seed)
    graph, strategies = random_graph(rng)
    prices = random_prices(rng, graph, strategies)
    names = list(strategies)
    every = [dict(zip(names, p, strict=True)) for p in itertools.product(*(range(len(strategies[n])) for n in names))]
    best = min(cost(graph, prices, strategies, picks, {}) for picks in every)
    classes = find_classes(graph, strategies)
    skeleton = make_skeleton(classes, regathered=frozenset(["w"]) if prices.regather else frozenset())
    if best == float("inf"):
        assert choose(skeleton, OfSkeleton(prices, skeleton)) is None
        return
    choice = choose(skeleton, OfSkeleton(prices, skeleton))
    assert choice is not None
    picks = {name: choice.picks[c] for name, c in classes.of.items()}
    assert choice.objective_s == pytest.approx(best, rel=1e-6)
    assert cost(graph, prices, strategies, picks, {}) == pytest.approx(best, rel=1e-6)
    assert choice.bound_s <= best * (1 + 1e-6)


def test_a_parameter_is_paid_for_again_where_repeated_calls_read_it() -> None:
    """All calls of the forward phase are made again before the last one: whatever is chosen, that costs as much more as
    the conversions of it do."""
    dearer = 0
    for seed in range(200):
        rng = random.Random(seed)
        graph, strategies = random_graph(rng)
        prices = replace(random_prices(rng, graph, strategies), regather=True, capacity_bytes=np.full(RANKS, 100e9))
        repeated = [n for n in graph.nodes if n.op == "made.up" and n.phase == "forward"]
        again = {n.name: repeated for n in graph.nodes[-2:-1] if n.phase == "backward"}
        classes, names = find_classes(graph, strategies), [n.name for n in repeated if again]
        forced = {a: (rng.randrange(c.options),) for a, c in enumerate(classes.nodes)}
        picks = {name: forced[c][0] for name, c in classes.of.items()}
        once, twice = (cost(graph, prices, strategies, picks, calls) for calls in ({}, again))
        asked = (make_skeleton(c, regathered=frozenset({"w"})) for c in (classes, read_again(classes, {"w"}, names)))
        plain, other = (choose(skeleton, OfSkeleton(prices, skeleton), forced=forced) for skeleton in asked)
        assert (plain is None) == (other is None) == (twice == float("inf"))
        if plain is not None and other is not None:
            assert other.objective_s - plain.objective_s == pytest.approx(twice - once, rel=1e-6, abs=1e-12)
            dearer += twice > once
    assert dearer >= 5
