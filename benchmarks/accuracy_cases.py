"""What ``benchmarks/accuracy.py`` predicts and measures: models, clusters, and the plans of each.

The models have no biases and no weights in their norms, as many of today's do not. A message of less than some 64 kB is
over before the scheduler's tick (4 ms on two cores that four ranks share), so what it takes is this machine's tick and
not the network that is played; plans as written send one message for each parameter, and a step of a model with biases
would consist of ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.zoo_models.case import class_loss, tokens
from hap.build import BuiltModel
from hap.cluster import ClusterSpec
from hap.placement import Shard
from hap.plan import Strategy
from hap.rules.choices import Choices
from hap.search.pins import Pins

CLUSTERS: Mapping[str, tuple[tuple[float, ...], tuple[int, ...]]] = {  # TFLOP/s, network Mbit/s, by rank
    "equal": ((1, 1, 1, 1), (500, 500, 500, 500)),
    "compute-unequal": ((3, 3, 1, 1), (500, 500, 500, 500)),
    "link-unequal": ((1, 1, 1, 1), (500, 500, 100, 100)),
    "both": ((3, 3, 1, 1), (500, 500, 100, 100)),
}
LOAD = 0.25  # of this machine's cores
WHOLE = Pins(placements={"*": "R"})


def plans_of(cluster_name: str) -> tuple[str, ...]:
    """The plans made for a cluster, no two of them the same one: where devices are equal, data parallel's shares are,
    too, and unequal ones are the other plan."""
    speeds, _ = CLUSTERS[cluster_name]
    return (
        "planner",
        "data parallel",
        "sharded parameters",
        "skewed shares" if len(set(speeds)) == 1 else "equal shares",
    )


def pins(plan: str) -> Pins:
    """What each plan fixes; all but the planner's own also keep to the batch (``keep_to_batch``)."""
    match plan:
        case "planner":
            return Pins()
        case "data parallel":
            return WHOLE
        case "equal shares":
            return Pins(placements=WHOLE.placements, ratios=(1.0,) * 4)
        case "skewed shares":
            return Pins(placements=WHOLE.placements, ratios=(3.0, 3.0, 1.0, 1.0))
        case "sharded parameters":
            return Pins(placements={"*": "S(0)"})
    raise ValueError(plan)


def keep_to_batch(found: Choices) -> Choices:
    """The choices without any but the batch's strategy for nodes that have one: no replicated compute."""
    rows = next(n for n in found.graph.sources("input"))
    batch = {p.group for s in found.strategies[rows.name] for p in s.outputs if isinstance(p, Shard)}

    def kept(strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        some = tuple(
            s for s in strategies if any(isinstance(p, Shard) and p.group in batch for p in (*s.inputs, *s.outputs))
        )
        return some or strategies

    return Choices(found.graph, found.groups, {name: kept(s) for name, s in found.strategies.items()})


@dataclass(frozen=True)
class Model:
    name: str
    build: Callable[[], BuiltModel]


def cluster(name: str) -> ClusterSpec:
    speeds, rates = CLUSTERS[name]
    hosts = "\n".join(
        f"  - name: h{r}\n"
        f"    devices: [{{name: c{speed}, tflops: {{float32: {speed}}}, "
        f"memory: 4GB, memory_bandwidth: {10 * speed}GB/s}}]\n"
        f"    network: {{bandwidth: {rate}Mbit/s, latency: 250us}}"
        for r, (speed, rate) in enumerate(zip(speeds, rates, strict=True))
    )
    return ClusterSpec.from_yaml(f"name: {name}\nbackend: gloo\nhosts:\n{hosts}\n")


def _seeded(build: Callable[[], Any]) -> Callable[[], Any]:
    def seeded() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build()

    return seeded


class Block(nn.Module):
    """A transformer's layer, or with ``experts`` one whose feed-forward is a mixture in which all see every token."""

    def __init__(self, width: int, heads: int, causal: bool, experts: int = 0) -> None:
        super().__init__()
        self.heads, self.causal, self.width = heads, causal, width
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        if experts:
            self.gate = nn.Linear(width, experts, bias=False)
            self.wide = nn.Parameter(0.05 * torch.randn(experts, width, 2 * width))
            self.narrow = nn.Parameter(0.05 * torch.randn(experts, 2 * width, width))
        else:
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = F.layer_norm(x, (self.width,))
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(normal).chunk(3, dim=-1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.feed(F.layer_norm(x, (self.width,)))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        if not self.experts:
            return self.down(F.gelu(self.up(x)))
        rows = x.flatten(0, 1)
        hidden = F.gelu(rows.unsqueeze(0).expand(self.experts, -1, -1) @ self.wide) @ self.narrow
        share = self.gate(rows).softmax(dim=-1).t().unsqueeze(-1)
        return (hidden * share).sum(dim=0).view_as(x)


class Text(nn.Module):
    """Tokens in, the next tokens' logits out."""

    def __init__(self, words: int, width: int, *blocks: Block) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(words, width), nn.Sequential(*blocks)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(ids)))


class Image(nn.Module):
    """Images of 32 x 32 in patches of 4 x 4, the classes' logits out."""

    def __init__(self, width: int, *blocks: Block) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Linear(48, width, bias=False), nn.Sequential(*blocks)
        self.head = nn.Linear(width, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cut = x.unflatten(2, (8, 4)).unflatten(4, (8, 4)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return self.head(self.blocks(self.patches(cut)).mean(dim=1))


@_seeded
def gpt() -> BuiltModel:
    """A causal transformer over tokens: 2 layers, 192 wide."""
    model = Text(512, 192, *(Block(192, 6, causal=True) for _ in range(2)))
    return BuiltModel(model, tokens(512, 16, 64), tokens(512, 16, 64), class_loss)


@_seeded
def vit() -> BuiltModel:
    """A vision transformer: 2 layers, 160 wide, 64 patches."""
    model = Image(160, *(Block(160, 5, causal=False) for _ in range(2)))
    return BuiltModel(model, torch.randn(24, 3, 32, 32), tokens(10, 24), class_loss)


@_seeded
def moe() -> BuiltModel:
    """A transformer whose second layer is a mixture of 4 experts."""
    model = Text(256, 128, Block(128, 4, causal=True), Block(128, 4, causal=True, experts=4))
    return BuiltModel(model, tokens(256, 16, 48), tokens(256, 16, 48), class_loss)


@_seeded
def mlp() -> BuiltModel:
    """Wide and shallow: many parameters for little compute."""
    layers = [nn.Linear(a, b, bias=False) for a, b in ((256, 640), (640, 640), (640, 64))]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    return BuiltModel(model, torch.randn(256, 256), tokens(64, 256), class_loss)


MODELS = (Model("gpt", gpt), Model("vit", vit), Model("moe", moe), Model("mlp", mlp))


def find(name: str) -> BuiltModel:
    return next(m for m in MODELS if m.name == name).build()
