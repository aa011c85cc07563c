"""A recommendation model after DLRM (Naumov et al. 2019): embedding tables, two MLPs, pairwise interactions."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from benchmarks.zoo_models.case import Case, Size, ZooModel


class Dlrm(nn.Module):
    """``dense (B, D)`` and ``sparse (B, T)``, one index per table -> a logit (B,)."""

    pairs: torch.Tensor

    def __init__(self, tables: list[int], width: int, dense: int, bottom: list[int], top: list[int]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for rows in tables)
        self.bottom = _mlp([dense, *bottom, width])
        features = len(tables) + 1
        self.register_buffer("pairs", torch.triu_indices(features, features, 1), persistent=False)
        self.top = _mlp([width + features * (features - 1) // 2, *top])
        self.last = nn.Linear(top[-1], 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        found = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        products = found @ found.transpose(1, 2)
        return self.last(self.top(torch.cat((x, products[:, self.pairs[0], self.pairs[1]]), 1))).squeeze(1)


def _mlp(widths: list[int]) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*itertools.chain.from_iterable((nn.Linear(a, b), nn.ReLU()) for a, b in pairs))


def dlrm(size: Size) -> Case:
    """26 tables of 1.6 GB in all, batch 4096; clicks by binary cross entropy."""
    if size == "real":
        tables, width, dense, bottom, top, batch = [120_000] * 26, 128, 13, [512, 256], [1024, 1024, 512, 256], 4096
    else:
        tables, width, dense, bottom, top, batch = [11, 12, 13], 6, 5, [9], [14, 7], 7
    model = Dlrm(tables, width, dense, bottom, top)
    inputs = (torch.randn(batch, dense), torch.randint(0, min(tables), (batch, len(tables))))
    clicks = (torch.rand(batch) < 0.5).to(torch.get_default_dtype())
    return Case(model, inputs, nn.functional.binary_cross_entropy_with_logits, clicks)


MODELS = (ZooModel("dlrm", "DLRM", dlrm),)
