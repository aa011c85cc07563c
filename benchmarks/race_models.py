"""The models of ``benchmarks/race.py``, shaped like what people train and sized for four ranks on two cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from benchmarks.zoo_models.case import class_loss, tokens
from benchmarks.zoo_models.hap_paper import ImageModel, Shape, TextModel, top_two_gate
from hap.build import BuiltModel


class Encoder(nn.Module):
    """BERT's shape: post-norm layers over all tokens, two token types, a head over the vocabulary."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.norm(self.words(ids) + self.positions)))


def gpt2() -> BuiltModel:
    """Two causal layers, 192 wide."""
    model = TextModel(Shape(2, 192, 6, 768, 64, 1, 16), 1024)
    return BuiltModel(model, tokens(1024, 16, 64), tokens(1024, 16, 64), class_loss)


def bert() -> BuiltModel:
    """Two layers over whole sequences, 160 wide."""
    return BuiltModel(Encoder(1024, 160, 8, 2, 64), tokens(1024, 16, 64), tokens(1024, 16, 64), class_loss)


def vit() -> BuiltModel:
    """Two layers over 65 patches, 160 wide: little to communicate for its compute."""
    model = ImageModel(Shape(2, 160, 8, 640, 65, 1, 16), 4, 10)
    return BuiltModel(model, torch.randn(16, 3, 32, 32), tokens(10, 16), class_loss)


def vgg() -> BuiltModel:
    """Convolutions that hold little and compute much, then wide layers that hold much and compute little."""
    blocks: list[nn.Module] = []
    before = 3
    for channels in (16, 32, 64):
        blocks += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        before = channels
    model = nn.Sequential(
        *blocks, nn.Flatten(), nn.Linear(1024, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10)
    )
    return BuiltModel(model, torch.randn(24, 3, 32, 32), tokens(10, 24), class_loss)


def moe() -> BuiltModel:
    """Two layers, the second a mixture of 8 experts, two for each token."""
    model = TextModel(Shape(2, 96, 6, 384, 48, 8, 16), 512, top_two_gate, 2.0)
    return BuiltModel(model, tokens(512, 16, 48), tokens(512, 16, 48), class_loss)


class Tied(nn.Module):
    """An autoencoder whose last layer's weight is the first one's, transposed."""

    def __init__(self, outer: int, inner: int, layers: int) -> None:
        super().__init__()
        self.ends = nn.Parameter(torch.randn(outer, inner) / outer**0.5)
        self.layers = nn.ModuleList(nn.Linear(inner, inner) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.ends
        for layer in self.layers:
            x = layer(x).relu()
        return x @ self.ends.T


def tied() -> BuiltModel:
    """Six inner layers 256 wide, 2048 values in and out."""
    x = torch.randn(4096, 2048)
    return BuiltModel(Tied(2048, 256, 6), x, x, nn.functional.mse_loss)


MODELS: Mapping[str, Callable[[], BuiltModel]] = {"GPT-2": gpt2, "BERT": bert, "ViT": vit, "VGG": vgg, "MoE": moe}
OTHERS: Mapping[str, Callable[[], BuiltModel]] = {"tied": tied}  # which the race leaves out


def build(name: str) -> BuiltModel:
    """The same weights and batch in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {**MODELS, **OTHERS}[name]()
