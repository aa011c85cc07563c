"""Losses of derivatives: gradient penalties and residuals of differential equations equal one device however all is
cut."""

import pytest
import torch
from torch import nn
from torch.func import hessian, jacrev, jvp, vmap

from hap.placement import Shard
from tests.capture.equality import assert_equals_eager
from tests.zoo.layers import BATCH, worst
from tests.zoo.lockstep import TOLERANCE, batch_strategies, case_of, drawn, possible

DIMS = 2


class Field(nn.Module):
    """A function of places, and what is made of it."""

    def __init__(self, loss):
        super().__init__()
        self.net, self.loss = nn.Sequential(nn.Linear(DIMS, 6), nn.Tanh(), nn.Linear(6, 1)), loss

    def forward(self, x):
        return self.loss(self.net, x)


def slope(of, x):
    return torch.autograd.grad(of.sum(), x, create_graph=True)[0]


def diffusion(net, x):
    """The residual of u_t = u_xx."""
    x = x.detach().requires_grad_(True)
    by_t, by_x = slope(net(x), x).unbind(1)
    return by_t - slope(by_x, x)[:, 1]


def penalty(net, x):
    """Of a critic whose slope is to be one between what is real and what is made."""
    between = (x * 0.3 + x.flip(1) * 0.7).detach().requires_grad_()
    return net(x).squeeze(1) + 10 * (slope(net(between), between).norm(dim=1) - 1).square()


def each_coordinate(net, x):
    t, rest = x[:, :1].clone().requires_grad_(), x[:, 1:]
    return slope(net(torch.cat([t, rest], 1)), t)


LOSSES = {
    "a differential equation": diffusion,
    "a gradient penalty": penalty,
    "by one coordinate": each_coordinate,
    "jacobians": lambda net, x: vmap(jacrev(net))(x),
    "hessians": lambda net, x: vmap(hessian(lambda z: net(z).sum()))(x),
    "along a direction": lambda net, x: jvp(net, (x,), (torch.ones_like(x),))[1],
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_derivatives_equal_one_device_and_are_dealt_out(name):
    model = Field(LOSSES[name]).double()
    targets = drawn(*model(drawn(BATCH, DIMS)).shape, seed=1)
    found = case_of(model, drawn(BATCH, DIMS), lambda y, t: (y - t).square().sum() / 7, targets)
    made = possible(found)
    dealt = batch_strategies(made)
    products = [n for n in made.graph.nodes if n.op in ("aten.mm.default", "aten.bmm.default")]
    assert len(products) > 3
    assert all(any(isinstance(p, Shard) for p in (*dealt[n.name].inputs, *dealt[n.name].outputs)) for n in products)
    assert worst(found, plans=2) <= TOLERANCE


def test_an_input_that_the_forward_pass_differentiates_by_has_no_gradient_of_its_own():
    """It would be one of each rank's part of the batch."""

    def told(net, x):
        x.requires_grad_(True)
        return slope(net(x), x).square().mean()

    x = drawn(BATCH, DIMS)
    graph = assert_equals_eager(Field(told).double(), x)
    assert set(graph.gradients) == {"net.0.weight", "net.0.bias", "net.2.weight"}  # the last bias has no slope
    assert x.grad is not None  # PyTorch's
