"""Group norm takes whatever strides its neighbours leave, as in PyTorch; its kernels alone do not."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.zoo.lockstep import TOLERANCE, case_of, data_parallel_error, drawn, random_error

BATCH, CHANNELS, SPACE = 8, 6, 5
TABLE = drawn(CHANNELS, 3, seed=2)


class Block(nn.Module):
    """A group norm between ``before`` and ``after``."""

    def __init__(self, before, after, **options):
        super().__init__()
        self.before, self.after = before, after
        self.linear = nn.Linear(SPACE, SPACE)
        self.norm = nn.GroupNorm(2, CHANNELS, **options)

    def forward(self, x):
        return self.after(self.norm(self.before(self.linear(x))))


PLACES = {
    "after a transpose": (lambda x: x.roll(1, 1).transpose(1, 2).flip(2).transpose(1, 2), lambda y: y),
    "after a slice": (lambda x: torch.cat([x, x], 2)[:, :, 2:7], lambda y: y),
    "before a transpose": (lambda x: x, lambda y: y.transpose(1, 2) @ TABLE),
    "before a sum": (lambda x: x, lambda y: y.sum(2)),
}


def case(place, **options):
    torch.manual_seed(0)
    model = Block(*PLACES[place], **options)
    target = drawn(*model.double()(drawn(BATCH, CHANNELS, SPACE)).shape, seed=1)
    return case_of(model, drawn(BATCH, CHANNELS, SPACE), functional.mse_loss, target)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{}, {"affine": False}], ids=str)
def test_loss_and_gradients_equal_one_device(place, options):
    found = case(place, **options)
    assert data_parallel_error(found, (5, 2, 1)) <= TOLERANCE
    for seed in range(3):
        error, where = random_error(found, seed)
        assert error <= TOLERANCE, where
