"""What is read and written at places that follow from constants: one device's loss and gradients, with the batch dealt
out."""

import pytest
import torch

from hap.placement import Shard
from tests.zoo.layers import BATCH, WIDTH, Model, case, worst
from tests.zoo.lockstep import TOLERANCE, batch_strategies, possible

LENGTH = 4
SHAPE = (BATCH, LENGTH, WIDTH)


def triangle(y):
    """What factorisation machines and DLRM read of all products of features."""
    return (y @ y.mT)[:, torch.ones(LENGTH, LENGTH).triu(1) == 1]


def levels(y):
    """Parts whose sizes are kept in a tensor, as detection models keep those of their levels."""
    sizes = torch.as_tensor([(1, 2), (2, 1), (1, 2)]).prod(-1)
    parts = y.split(sizes.tolist(), dim=2)
    return torch.stack([part.cos().sum(2) * (1 + i) for i, part in enumerate(parts)], 1)


def columns(y):
    return y[..., torch.arange(WIDTH) % 2 == 0] * torch.tensor(3).item()


def rows(y):
    (places,) = torch.where(torch.tensor([True, False, True, True]))
    return y[:, places].repeat_interleave(torch.tensor([2, 1, 1]), dim=1)


def written(y):
    x = y.sin()
    x[:, torch.tensor([True, False, True, False])] = y[:, 1:3]
    return x


@pytest.mark.parametrize("then", [triangle, levels, columns, rows, written])
def test_places_of_constants_equal_one_device_and_are_dealt_out(then):
    found = case(Model(then), SHAPE)
    made = possible(found)
    dealt = batch_strategies(made)
    reading = (
        "aten.index.Tensor",
        "aten.index_put.default",
        "aten.index_select.default",
        "aten.split_with_sizes.default",
    )
    calls = [n for n in made.graph.nodes if n.op in reading and n.meta.shape[:1] == (BATCH,)]
    assert calls and all(isinstance(dealt[n.name].outputs[0], Shard) for n in calls)
    assert worst(found, plans=2) <= TOLERANCE
