"""A batch in the groups of a convolution, which has a weight of its own for every sample: its groups are dealt out."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from hap.codegen.lowering import lower
from hap.codegen.source import to_python
from hap.rules.choices import choices
from tests._support.plans import make_plan, sizes_for
from tests.zoo.lockstep import (
    TOLERANCE,
    batch_strategies,
    captured,
    case_of,
    data_parallel_error,
    drawn,
    random_error,
)

BATCH, CHANNELS, SIDE = 8, 4, 6


class Modulated(nn.Module):
    """StyleGAN2's convolution."""

    def __init__(self, out, *, larger=False, biased=False):
        super().__init__()
        self.weight = nn.Parameter(drawn(out, CHANNELS, 3, 3))
        self.bias = nn.Parameter(drawn(out, seed=1)) if biased else None
        self.style = nn.Linear(CHANNELS, CHANNELS)
        self.larger = larger

    def forward(self, x, style):
        n, c, h, w = x.shape
        weight = self.weight * self.style(style)[:, None, :, None, None]
        bias = None if self.bias is None else self.bias.repeat(n)
        x = x.reshape(1, n * c, h, w)
        if self.larger:
            weight = weight.transpose(1, 2).reshape(n * c, -1, 3, 3)
            y = functional.conv_transpose2d(x, weight, bias, stride=2, padding=1, output_padding=1, groups=n)
        else:
            y = functional.conv2d(x, weight.reshape(-1, c, 3, 3), bias, padding=1, groups=n)
        return y.view(n, -1, *y.shape[2:])


class Maker(nn.Module):
    def __init__(self, biased):
        super().__init__()
        self.first, self.second = Modulated(CHANNELS, larger=True, biased=biased), Modulated(3, biased=biased)

    def forward(self, x):
        style = x.mean((2, 3))
        return self.second(self.first(x, style).tanh(), style)


def case(biased=False):
    torch.manual_seed(0)
    x = drawn(BATCH, CHANNELS, SIDE, SIDE)
    return case_of(Maker(biased), x, functional.mse_loss, drawn(BATCH, 3, 2 * SIDE, 2 * SIDE, seed=1))


@pytest.mark.parametrize("biased", [False, True])
def test_loss_and_gradients_equal_one_device(biased):
    found = case(biased)
    for sizes in ((5, 2, 1), (5, 0, 3)):
        assert data_parallel_error(found, sizes) <= TOLERANCE  # which sees to it that all convolutions are dealt out
    for seed in range(3):
        error, where = random_error(found, seed)
        assert error <= TOLERANCE, where


def test_the_emitted_file_has_the_groups_of_a_rank():
    found = choices(captured(case(biased=True)))
    plan = make_plan(found, batch_strategies(found), sizes_for(found, (5, 2, 1), {BATCH: (5, 2, 1)}), world_size=3)
    text = to_python(lower(found.graph, plan), plan)
    assert "from hap.convolution import convolution, convolution_backward" in text
    assert "repeat_2__s0, [1, 1], [1, 1], [1, 1], False, [0, 0], BATCH[rank]\n" in text
    assert "        [3 * BATCH[rank]],\n" in text
    compile(text, "emitted", "exec")


def test_other_convolutions_are_pytorchs_own():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 1)).double()
    graph = captured(case_of(model, drawn(8, 4, 5, 5), functional.mse_loss, drawn(8, 2, 3, 3, seed=1)))
    assert {n.op for n in graph.nodes if "convolution" in n.op} == {
        "aten.convolution.default",
        "aten.convolution_backward.default",
    }
