"""The models whose calls are measured when the user names none: a transformer and a small convolutional network.

Their operator calls, forward and backward, at two sizes each, give the fits by operator and class from which any other
model is predicted. A profile made with the user's own model is more exact: it knows that model's calls themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hap.capture import capture
from hap.graph import Graph


class _Transformer(nn.Module):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm, self.heads = nn.LayerNorm(width), width // 32
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(ids))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return self.head(x + self.down(nn.functional.gelu(self.up(x))))


def _convolutional(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, 64),
    )


def reference_graphs() -> Iterator[Graph]:
    """Captured on fake tensors; nothing is allocated."""
    loss = nn.functional.cross_entropy
    with torch.device("meta"):
        for width, batch, length in ((64, 4, 32), (192, 8, 64)):
            ids = torch.zeros(batch, length, dtype=torch.int64)
            yield capture(
                _Transformer(width, 4 * width),
                ids,
                loss_fn=lambda logits, labels: loss(logits.flatten(0, 1), labels.flatten()),
                example_targets=ids,
                name=f"transformer {width}",
            )
        for channels, batch in ((8, 4), (16, 8)):
            labels = torch.zeros(batch, dtype=torch.int64)
            images = torch.zeros(batch, 3, 32, 32)
            yield capture(
                _convolutional(channels), images, loss_fn=loss, example_targets=labels, name=f"convolutional {channels}"
            )
