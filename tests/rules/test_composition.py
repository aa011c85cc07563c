"""Any choice of strategies gives the gradients of one device: whole captured graphs on three simulated ranks.

Each node takes a random one of its strategies, each group random sizes with zeros; between a producer and a consumer
that disagree the value is put together and dealt again. This is what plans rely on, without search, codegen or runtime.
"""

import random
from typing import Any

import pytest
import torch

from hap.graph import Graph, Node, Value, map_values
from hap.ops import resolve
from hap.placement import PARTIAL, LocalSize, Partial, Shard, join_shards, take_shard
from hap.plan import Strategy
from hap.rules.choices import Choices
from hap.rules.localize import localize
from hap.rules.samples import in_float64
from tests.rules.test_captured import of

RANKS = 3


def source_tensor(node: Node, graph: Graph, generator: torch.Generator) -> torch.Tensor:
    if node.op == "constant":
        return graph.constants[node.target]
    if node.op == "tangent":
        return torch.ones(node.meta.shape, dtype=torch.float64)
    if node.meta.dtype.is_floating_point:
        return torch.randn(node.meta.shape, dtype=torch.float64, generator=generator) * 0.3
    return torch.randint(0, 2, node.meta.shape, dtype=node.meta.dtype, generator=generator)


def evaluate(op: str, arguments: Any, inputs: list[torch.Tensor], local: Any) -> tuple[torch.Tensor, ...]:
    remaining = iter(inputs)

    def concrete(tree: Any) -> Any:
        if isinstance(tree, LocalSize):
            return local(tree)
        return tuple(map(concrete, tree)) if isinstance(tree, tuple) else in_float64(tree)

    args, kwargs = (map_values(part, lambda _: next(remaining)) for part in arguments)
    result = resolve(op)(*map(concrete, args), **{k: concrete(v) for k, v in kwargs})
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def on_one_device(graph: Graph, sources: dict[str, torch.Tensor]) -> dict[Value, torch.Tensor]:
    values: dict[Value, torch.Tensor] = {}
    for node in graph.nodes:
        if node.is_source:
            values[Value(node.name)] = sources[node.name]
            continue
        results = evaluate(node.op, (node.args, node.kwargs), [values[v] for v in node.inputs], None)
        values.update({Value(node.name, i): r for i, r in enumerate(results)})
    return values


class Ranks:
    """The same graph with every value lying on the ranks as its producer's strategy says."""

    def __init__(self, found: Choices, strategies: dict[str, Strategy], sizes: dict[str, tuple[int, ...]]) -> None:
        self.graph, self.strategies, self.sizes = found.graph, strategies, sizes
        self.pieces: dict[Value, list[torch.Tensor]] = {}

    def deal(self, whole: torch.Tensor, placement: Any) -> list[torch.Tensor]:
        if isinstance(placement, Shard):
            return [take_shard(whole, placement, self.sizes[placement.group], rank) for rank in range(RANKS)]
        return [whole] * RANKS

    def together(self, value: Value) -> torch.Tensor:
        placement = self.strategies[value.node].outputs[value.index]
        if isinstance(placement, Shard):
            return join_shards(self.pieces[value], placement, self.sizes[placement.group])
        return sum(self.pieces[value]) if isinstance(placement, Partial) else self.pieces[value][0]

    def needed(self, value: Value, placement: Any) -> list[torch.Tensor]:
        if self.strategies[value.node].outputs[value.index] == placement:
            return self.pieces[value]
        return self.deal(self.together(value), placement)

    def run(self, sources: dict[str, torch.Tensor]) -> None:
        for node in self.graph.nodes:
            strategy = self.strategies[node.name]
            arguments = localize(node, strategy, self.graph)
            if node.is_source:
                self.pieces[Value(node.name)] = self.deal(sources[node.name], strategy.outputs[0])
                continue
            inputs = [self.needed(v, p) for v, p in zip(node.inputs, strategy.inputs, strict=True)]
            for rank in range(RANKS):
                dealt = [each[rank] for each in inputs]
                results = evaluate(node.op, arguments, dealt, lambda size, rank=rank: size.at(self.sizes, rank))
                for index, result in enumerate(results):
                    self.pieces.setdefault(Value(node.name, index), []).append(result)


def random_strategies(found: Choices, random_: random.Random) -> dict[str, Strategy]:
    """One each; a strategy with a partial argument only where the producer's choice is partial."""
    chosen: dict[str, Strategy] = {}
    for node in found.graph.nodes:
        possible = [
            s
            for s in found.strategies[node.name]
            if all(
                p != PARTIAL or chosen[v.node].outputs[v.index] == PARTIAL
                for v, p in zip(node.inputs, s.inputs, strict=True)
            )
        ]
        chosen[node.name] = random_.choice(possible[1:] or possible)
    return chosen


def random_sizes(n: int, random_: random.Random) -> tuple[int, ...]:
    cuts = sorted(random_.randint(0, n) for _ in range(RANKS - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["gpt2", "gpt2 eager", "bert", "llama", "mlp", "cnn"])
def test_any_choice_of_strategies_gives_the_loss_and_the_gradients_of_one_device(name, seed):
    found, random_ = of(name), random.Random(seed)
    graph = found.graph
    generator = torch.Generator().manual_seed(seed)
    sources = {n.name: source_tensor(n, graph, generator) for n in graph.nodes if n.is_source}
    expected = on_one_device(graph, sources)
    sizes = {group.name: random_sizes(group.n, random_) for group in found.groups.values()}
    ranks = Ranks(found, random_strategies(found, random_), sizes)
    ranks.run(sources)
    assert len(graph.gradients) > 3
    for value in graph.results:
        whole = ranks.together(value)
        scale = max(1e-3, expected[value].abs().max().item())
        assert (whole - expected[value]).abs().max().item() / scale < 1e-10, value
