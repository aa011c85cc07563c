"""``x[mask] = value``: one device's loss and gradients, dealt out like any other call on the elements."""

import numpy as np
import pytest
import torch
from torch import nn

from hap.capture.respell import _fill_diagonal
from hap.placement import Shard
from tests.zoo.layers import BATCH, WIDTH, Model, case, worst
from tests.zoo.lockstep import TOLERANCE, batch_strategies, drawn, possible

LENGTH = 4
SHAPE = (BATCH, LENGTH, WIDTH)
EACH = drawn(*SHAPE, seed=2) > 0.3
PLACES = drawn(BATCH, LENGTH, seed=3) > 0.3  # of the sequence
VALUES = drawn(int(PLACES.sum()), WIDTH, seed=6)
COLUMNS = torch.tensor([True, False, False, True, True, False])
ONE_COLUMN = drawn(BATCH, LENGTH, 1, seed=4) > 0


def written(index, value, of=lambda y: y * 1):
    """A function that writes ``value(y)`` into ``of(y)`` and goes on with that."""

    def then(y):
        x = of(y)
        x[index] = value(y)
        return x

    return then


def attention(y):
    scores = y @ y.mT
    scores[torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).expand(BATCH, LENGTH, LENGTH)] = float("-inf")
    return scores.softmax(-1) @ y


def unlike(y):
    """Samples are compared with all others, and not with themselves."""
    rows = y.flatten(1)
    return (rows @ rows.t()).fill_diagonal_(float("-inf")).softmax(1) @ rows


def labelled(y):
    labels = y.argmax(-1)
    labels[PLACES] = -100.9  # cut off, as they are whole numbers
    return nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten()) + y


def large(y):
    numbers = y.argmax(-1) + 100_000_001  # float32 has no odd ones there
    numbers[PLACES] = 1.5
    return y * (numbers % 7).unsqueeze(-1)


AS_WHERE = {
    "whole numbers that are large": large,
    "a number": written(EACH, lambda y: 2.5),
    "a whole number": written(EACH, lambda y: 3),
    "infinity before a softmax": attention,
    "labels that count for nothing": labelled,
    "a diagonal": unlike,
    "the diagonal of columns": lambda y: y.flatten(1)[:, :3].clone().fill_diagonal_(2.0, wrap=False),
    "a tensor of no dims": written(EACH, lambda y: torch.tensor(0.5, dtype=y.dtype)),
    "a tensor of one element": written(EACH, lambda y: torch.full((1, 1, 1), 0.5, dtype=y.dtype)),
    "an element that needs a gradient": written(EACH, lambda y: y[0, 0, 0]),
    "a row at places of the sequence": written(PLACES, lambda y: y[0, 0]),
    "a row of one sample": written(PLACES, lambda y: y[:1, 0]),
    "a number at places of the sequence": written(PLACES, lambda y: -1.0),
    "columns": written((..., COLUMNS), lambda y: 0.0),
    "columns of a row of the sequence": written((slice(None), slice(None), COLUMNS), lambda y: y[0, 0, 0]),
    "places, and all columns": written((PLACES, slice(None)), lambda y: y[0, 0]),
    "places, and all that follows": written((PLACES, ...), lambda y: y[0, 0]),
    "a mask with a dim of one": written(ONE_COLUMN, lambda y: 0.0, of=lambda y: y[..., :1] * 1),
    "in a view": written(PLACES[:, 1:], lambda y: 1.0, of=lambda y: (y * 1)[:, 1:]),
    "samples": written(PLACES[:, 0], lambda y: y[0]),
    "nowhere": written(torch.zeros(SHAPE, dtype=torch.bool), lambda y: 1.0),
}


@pytest.mark.parametrize("name", AS_WHERE)
def test_a_masked_write_equals_one_device_and_is_dealt_out(name):
    found = case(Model(AS_WHERE[name]), SHAPE)
    made = possible(found)
    assert not [n for n in made.graph.nodes if "index_put" in n.op]
    dealt = batch_strategies(made)
    writes = [n.name for n in made.graph.nodes if n.op == "aten.where.self" and n.meta.shape[:1] == (BATCH,)]
    assert writes and all(isinstance(dealt[name].outputs[0], Shard) for name in writes)
    assert worst(found, plans=1) <= TOLERANCE


AS_IT_IS = {
    "as many values as places": written(COLUMNS, lambda y: torch.arange(3.0, dtype=y.dtype), of=lambda y: y[0, 0] * 1),
    "a value for each of the places": written(PLACES, lambda y: VALUES),
    "a list of booleans": written(COLUMNS.tolist(), lambda y: 1.0, of=lambda y: y[0, 0] * 1),
    "booleans of numpy": written(np.array(COLUMNS.tolist()), lambda y: 1.0, of=lambda y: y[0, 0] * 1),
    "a mask beside a number": written((PLACES, 0), lambda y: 1.0),
    "a mask beside a range": written((PLACES, slice(0, 2)), lambda y: 1.0),
    "two masks": written((PLACES[:, 0], PLACES[0]), lambda y: 1.0, of=lambda y: (y * 1)[:, :, 0]),
    "whole numbers": written(torch.tensor([0, 2]), lambda y: 1.0),
    "a range": written((slice(None), slice(1, 3)), lambda y: 1.0),
    "no index": written((), lambda y: 1.0),
}


@pytest.mark.parametrize("shape", [(3, 3), (3, 5), (5, 3), (2, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_a_diagonal_is_that_of_torch(shape, dtype):
    x = (9 * drawn(*shape)).to(dtype)
    assert torch.equal(_fill_diagonal(x.clone(), 2.5), x.clone().fill_diagonal_(2.5))


def test_diagonals_one_below_the_other_and_in_no_square_are_left_to_torch():
    assert _fill_diagonal(torch.zeros(5, 2), 1.0, wrap=True) is None
    assert _fill_diagonal(torch.zeros(2, 3, 2), 1.0) is None and _fill_diagonal(torch.zeros(3), 1.0) is None


@pytest.mark.parametrize("name", AS_IT_IS)
def test_other_writes_equal_one_device(name):
    assert worst(case(Model(AS_IT_IS[name]), SHAPE), plans=1) <= TOLERANCE
