"""A layer or a function between a linear layer and a loss: how far it is from one device, however all is cut."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.zoo_models.reference import one_device, worst_error
from tests._support.plans import sizes_for
from tests.zoo.lockstep import batch_strategies, case_of, drawn, possible, random_error, run

BATCH, WIDTH = 8, 6


class Model(nn.Module):
    """A function, or a layer, of what a linear layer makes; ``then(layer, x)`` says how it is called."""

    def __init__(self, then, layer=None):
        super().__init__()
        self.linear, self.layer, self.then = nn.Linear(WIDTH, WIDTH), layer, then

    def forward(self, x):
        y = self.linear(x)
        return self.then(y) if self.layer is None else self.then(self.layer, y)


def on_one(layer, y):
    return layer(y)


class NormOfChannels(nn.Module):
    """A layer norm over channels, which then lie last in memory, and a layer after it."""

    def __init__(self, channels, after):
        super().__init__()
        self.norm, self.after = nn.LayerNorm(channels), after

    def forward(self, x):
        return self.after(self.norm(x.movedim(1, -1)).movedim(-1, 1))


def case(model, shape=(BATCH, WIDTH)):
    model = model.double()
    with torch.no_grad():
        made = model.train()(drawn(*shape))
    return case_of(model, drawn(*shape), lambda y, t: (y - t).square().sum() / 7, drawn(*made.shape, seed=1))


def worst(found, plans=3):
    """The batch dealt unevenly, then any strategies."""
    made = possible(found)
    dealt = run(found, made, batch_strategies(made), sizes_for(made, (5, 2, 1), {BATCH: (5, 2, 1)}))
    return max(worst_error(dealt, one_device(found, 5))[0], *(random_error(found, seed)[0] for seed in range(plans)))
