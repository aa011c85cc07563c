"""What ``benchmarks/accuracy.py`` predicts and measures: models, clusters, and the plans of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.zoo_models.case import class_loss, tokens
from benchmarks.zoo_models.hap_paper import ImageModel, Shape, TextModel, top_two_gate
from hap.build import BuiltModel
from hap.cluster import ClusterSpec
from hap.placement import Shard
from hap.plan import Strategy
from hap.rules.choices import Choices
from hap.search.pins import Pins

CLUSTERS: Mapping[str, tuple[tuple[float, ...], tuple[int, ...]]] = {  # TFLOP/s, network Mbit/s, by rank
    "equal": ((1, 1, 1, 1), (1000, 1000, 1000, 1000)),
    "compute-unequal": ((3, 3, 1, 1), (1000, 1000, 1000, 1000)),
    "link-unequal": ((1, 1, 1, 1), (1000, 1000, 200, 200)),
    "both": ((3, 3, 1, 1), (1000, 1000, 200, 200)),
}
PLANS = ("planner", "data parallel", "sharded parameters", "equal shares")
WHOLE = Pins(placements={"*": "R"})


def pins(plan: str) -> Pins:
    """What each plan fixes; all but the planner's own also keep to the batch (``keep_to_batch``)."""
    match plan:
        case "planner":
            return Pins()
        case "data parallel":
            return WHOLE
        case "equal shares":
            return Pins(placements=WHOLE.placements, ratios=(1.0,) * 4)
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


@_seeded
def gpt() -> BuiltModel:
    """A causal transformer over tokens: 2 layers, 128 wide."""
    model = TextModel(Shape(2, 128, 8, 512, 64, 1, 16), 512)
    return BuiltModel(model, tokens(512, 16, 64), tokens(512, 16, 64), class_loss)


@_seeded
def vit() -> BuiltModel:
    """A vision transformer: 2 layers, 96 wide, 65 tokens."""
    model = ImageModel(Shape(2, 96, 6, 384, 65, 1, 24), 4, 10)
    return BuiltModel(model, torch.randn(24, 3, 32, 32), tokens(10, 24), class_loss)


@_seeded
def moe() -> BuiltModel:
    """A transformer whose second layer is a mixture of 4 experts."""
    model = TextModel(Shape(2, 64, 4, 256, 48, 4, 16), 256, top_two_gate, 2.0)
    return BuiltModel(model, tokens(256, 16, 48), tokens(256, 16, 48), class_loss)


@_seeded
def mlp() -> BuiltModel:
    """Wide and shallow: many parameters for little compute."""
    model = nn.Sequential(nn.Linear(256, 640), nn.ReLU(), nn.Linear(640, 640), nn.ReLU(), nn.Linear(640, 64))
    return BuiltModel(model, torch.randn(192, 256), tokens(64, 192), class_loss)


MODELS = (Model("gpt", gpt), Model("vit", vit), Model("moe", moe), Model("mlp", mlp))


def find(name: str) -> BuiltModel:
    return next(m for m in MODELS if m.name == name).build()
