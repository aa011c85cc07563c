"""The six models that HAP (Zhang et al., EuroSys 2024) was measured on, from their published shapes, in our own words.

768 wide, 12 heads, 3072 feed-forward, 8 layers; WikiText-2 tokens (vocabulary 33,278, 128 tokens) or CIFAR-10 images
(32 x 32, patches of 4). In the mixtures every second layer has experts, whose tokens are dispatched by products with
one-hot tensors (GShard, Lepikhin et al. 2020): every shape is static and the experts are a dim like any other. The
batch is 32 per device of a cluster of eight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.zoo_models.case import Case, Size, ZooModel, class_loss, tokens
from benchmarks.zoo_models.vision import VGG19, Vgg

Gate = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Shape:
    """The sizes of one transformer: ``length`` tokens, ``experts`` per mixture."""

    layers: int
    width: int
    heads: int
    hidden: int
    length: int
    experts: int
    batch: int


REAL_TEXT = Shape(8, 768, 12, 3072, 128, 16, 256)
REAL_IMAGE = Shape(8, 768, 12, 3072, 65, 16, 256)
SMALL_TEXT = Shape(2, 48, 6, 80, 10, 5, 7)
SMALL_IMAGE = Shape(2, 48, 6, 80, 5, 5, 7)


class Attention(nn.Module):
    """Self-attention with separate projections; x (B, S, D)."""

    def __init__(self, shape: Shape, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = shape.heads, causal
        self.q, self.k, self.v, self.out = (nn.Linear(shape.width, shape.width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(found.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A mixture of experts: ``gate(scores (B, S, E), capacity) -> dispatch, combine``, both (B, S, E, capacity)."""

    def __init__(self, shape: Shape, gate: Gate, factor: float) -> None:
        super().__init__()
        self.gate, self.capacity = gate, math.ceil(factor * shape.length / shape.experts)
        self.scores = nn.Linear(shape.width, shape.experts, bias=False)
        self.up = nn.Parameter(torch.randn(shape.experts, shape.width, shape.hidden) / math.sqrt(shape.width))
        self.down = nn.Parameter(torch.randn(shape.experts, shape.hidden, shape.width) / math.sqrt(shape.hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dispatch, combine = self.gate(self.scores(x).softmax(-1), self.capacity)
        inside = torch.einsum("bsd,bsec->becd", x, dispatch)
        inside = torch.einsum("becd,edh->bech", inside, self.up).relu()
        inside = torch.einsum("bech,ehd->becd", inside, self.down)
        return torch.einsum("becd,bsec->bsd", inside, combine)


def switch_gate(scores: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token to its best expert, at most ``capacity`` of a sequence each (Fedus et al. 2021)."""
    chosen = nn.functional.one_hot(scores.argmax(-1), scores.shape[-1])
    combine = _seated(chosen, torch.zeros_like(chosen[:, :1]), capacity, scores)
    return (combine > 0).to(scores.dtype), combine


def top_two_gate(scores: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token to its two best experts, weighted by their scores' shares; the second seats come after the first."""
    count = scores.shape[-1]
    first = nn.functional.one_hot(scores.argmax(-1), count)
    second = nn.functional.one_hot(scores.masked_fill(first == 1, -1.0).argmax(-1), count)
    total = (scores * (first + second)).sum(-1, keepdim=True)
    shares = scores / total
    seated = _seated(first, torch.zeros_like(first[:, :1]), capacity, shares)
    combine = seated + _seated(second, first.sum(1, keepdim=True), capacity, shares)
    return (combine > 0).to(scores.dtype), combine


def _seated(chosen: torch.Tensor, taken: torch.Tensor, capacity: int, weights: torch.Tensor) -> torch.Tensor:
    """(B, S, E, capacity): the weight of each token in the seat that it gets at its expert, in order of position."""
    seat = chosen.cumsum(1) - 1 + taken
    kept = (chosen == 1) & (seat < capacity)
    seats = seat.unsqueeze(-1) == torch.arange(capacity, device=seat.device)
    return torch.where(kept.unsqueeze(-1) & seats, weights.unsqueeze(-1), 0.0)


class Layer(nn.Module):
    """Attention and a feed-forward network, each after a layer norm."""

    def __init__(self, shape: Shape, causal: bool, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention, self.inner = Attention(shape, causal), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.inner(self.second(x))


def _layers(shape: Shape, causal: bool, gate: Gate | None, factor: float) -> nn.Sequential:
    layers = []
    for i in range(shape.layers):
        dense = nn.Sequential(nn.Linear(shape.width, shape.hidden), nn.ReLU(), nn.Linear(shape.hidden, shape.width))
        inner = Experts(shape, gate, factor) if gate is not None and i % 2 == 1 else dense
        layers.append(Layer(shape, causal, inner))
    return nn.Sequential(*layers)


class TextModel(nn.Module):
    """A causal encoder over token ids (B, S) -> logits (B, S, V)."""

    def __init__(self, shape: Shape, vocabulary: int, gate: Gate | None = None, factor: float = 1.25) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, shape.width)
        self.positions = nn.Parameter(torch.randn(shape.length, shape.width) * 0.02)
        self.layers = _layers(shape, True, gate, factor)
        self.head = nn.Linear(shape.width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(ids) + self.positions))


class ImageModel(nn.Module):
    """A vision transformer: patches and a class token -> logits (B, classes)."""

    def __init__(self, shape: Shape, patch: int, classes: int, gate: Gate | None = None, factor: float = 1.25) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.positions = nn.Parameter(torch.randn(shape.length, shape.width) * 0.02)
        self.layers = _layers(shape, False, gate, factor)
        self.head = nn.Linear(shape.width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        return self.head(self.layers(x)[:, 0])


def _text(gate: Gate | None, factor: float) -> Callable[[Size], Case]:
    def make(size: Size) -> Case:
        shape, vocabulary = (REAL_TEXT, 33280) if size == "real" else (SMALL_TEXT, 61)
        ids, labels = (tokens(vocabulary, shape.batch, shape.length) for _ in range(2))
        return Case(TextModel(shape, vocabulary, gate, factor), ids, class_loss, labels)

    return make


def _image(gate: Gate | None, factor: float) -> Callable[[Size], Case]:
    def make(size: Size) -> Case:
        shape, side = (REAL_IMAGE, 32) if size == "real" else (SMALL_IMAGE, 8)
        model = ImageModel(shape, 4, 10, gate, factor)
        return Case(model, torch.randn(shape.batch, 3, side, side), class_loss, tokens(10, shape.batch))

    return make


def _vgg(size: Size) -> Case:
    """Without batch norm, 7 x 7 pooling in front of 4096 wide layers: 139.6M parameters at 10 classes."""
    if size == "real":
        model, batch, side = Vgg(VGG19, 7, 4096, 10, norm=False), 256, 32
    else:
        model, batch, side = Vgg([(1, 6), (1, 8)], 3, 24, 10, norm=False), 7, 8
    return Case(model, torch.randn(batch, 3, side, side), class_loss, tokens(10, batch))


MODELS = (
    ZooModel("hap_vgg", "HAP: VGG-19", _vgg),
    ZooModel("hap_vit", "HAP: ViT", _image(None, 0.0)),
    ZooModel("hap_bert", "HAP: BERT", _text(None, 0.0)),
    ZooModel("hap_bert_moe", "HAP: BERT-MoE (top 2)", _text(top_two_gate, 2.5)),
    ZooModel("hap_bert_switch", "HAP: BERT-Switch", _text(switch_gate, 1.25)),
    ZooModel("hap_vit_moe", "HAP: ViT-MoE (top 2)", _image(top_two_gate, 2.5)),
)
