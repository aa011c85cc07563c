"""Losses that close over the model, and hooks of its parameters: one device's gradients, or a refusal in words."""

import random
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.zoo_models.reference import Outcome, kept, worst_error
from hap.capture import capture
from hap.errors import CaptureError
from tests._support.plans import random_sizes, random_strategies, sizes_for
from tests.zoo.layers import BATCH, WIDTH
from tests.zoo.lockstep import TOLERANCE, batch_strategies, case_of, drawn, possible, run


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x):
        return self.frozen(self.outer(self.inner(x).tanh()))


def net():
    torch.manual_seed(0)
    return Net().double()


def worst(model, loss_fn):
    """The batch dealt unevenly, then any strategies, against the model itself, which nobody copied."""
    x, t = drawn(BATCH, WIDTH), drawn(BATCH, WIDTH, seed=1)
    case = case_of(model, x, loss_fn, t)
    made, source = possible(case), random.Random(0)
    plans = [(batch_strategies(made), sizes_for(made, (5, 2, 1), {BATCH: (5, 2, 1)}))]
    plans += [(random_strategies(made, source), random_sizes(made, 3, source)) for _ in range(3)]
    found = [run(case, made, *plan) for plan in plans]
    loss = loss_fn(model(x), t)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return max(worst_error(outcome, Outcome(loss.detach(), gradients, kept(model)))[0] for outcome in found)


def weight_decay(model):
    return lambda y, t: functional.mse_loss(y, t) + 0.1 * sum(p.square().sum() for p in model.parameters())


def norm_of_one(model):
    return lambda y, t: functional.mse_loss(y, t) + model.inner.weight.norm()


def all_of_them(model):
    return lambda y, t: functional.mse_loss(y, t) + torch.cat([p.flatten() for p in model.parameters()]).abs().mean()


def layers_again(model):
    return lambda y, t: functional.mse_loss(model.outer(model.inner(y)), t * model.scale)


def norms_again(model):
    return lambda y, t: functional.mse_loss(model.norm(y), t)


@pytest.mark.parametrize("of", [weight_decay, norm_of_one, all_of_them, layers_again, norms_again])
def test_a_loss_may_close_over_the_model(of) -> None:
    model = net()
    assert worst(model, of(model)) < TOLERANCE


class Leaving(nn.Module):
    """Terms of the loss are left in attributes of a layer, as mixtures of experts do it."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.inner.term, self.terms = 0.0, []

    def forward(self, x):
        y = self.inner(x)
        self.inner.term = y.square().mean()
        self.terms = [y.mean(), y.std()]
        return self.outer(y)


def test_what_the_forward_leaves_in_attributes_is_there_for_the_loss() -> None:
    """In the captured model afterwards there is what was there before."""
    model, x = Leaving().double(), drawn(BATCH, WIDTH)

    def loss_fn(y, t):
        return functional.mse_loss(y, t) + model.inner.term + sum(model.terms)

    capture(model, x, loss_fn=loss_fn, example_targets=x)
    assert (model.inner.term, model.terms) == (0.0, [])
    assert worst(model, loss_fn) < TOLERANCE


class Seeing(nn.Module):
    """A buffer that the forward pass replaces."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.ones(WIDTH))

    def forward(self, x):
        y = self.linear(x) / self.seen
        self.seen = self.seen * 0.9 + y.detach().square().mean(0)
        return y


def test_a_loss_may_change_what_the_forward_pass_replaced() -> None:
    model = Seeing().double()

    def loss_fn(y, t):
        with torch.no_grad():
            model.seen.add_(t.mean(0))
        return functional.mse_loss(y * model.seen, t)

    assert worst(model, loss_fn) < TOLERANCE


class Keeping(nn.Module):
    """A weight that is reached in another way than as an attribute of its module."""

    def __init__(self, keep):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept = keep(self.second)

    def forward(self, x):
        kept = self.kept["weight"] if isinstance(self.kept, dict) else self.kept[0]
        weight = kept() if callable(kept) else kept
        return functional.linear(x, weight) + self.first(x)


@pytest.mark.parametrize(
    "keep",
    [
        lambda layer: [layer.weight],
        lambda layer: {"weight": layer.weight},
        lambda layer: (lambda: layer.weight,),
    ],
)
def test_a_weight_may_be_kept_in_a_list_or_a_function(keep) -> None:
    model = Keeping(keep).double()
    assert worst(model, functional.mse_loss) < TOLERANCE
    assert model.second.weight.grad is not None and model.second.bias.grad is None


MASK = torch.tensor([1.0, 0, 1, 1, 0, 1, 0, 1], dtype=torch.float64)[:, None]


@pytest.mark.parametrize(
    "hook",
    [
        lambda p: lambda g: g.clamp(-1e-3, 1e-3),
        lambda p: lambda g: g * MASK,
        lambda p: lambda g: g + 0.1 * p,
        lambda p: lambda g: g / g.norm(),
        lambda p: lambda g: None,
    ],
)
def test_hooks_of_parameters_are_part_of_the_step(hook) -> None:
    model = net()
    model.inner.weight.register_hook(hook(model.inner.weight))
    model.inner.weight.register_hook(lambda g: g * 2)
    assert worst(model, functional.mse_loss) < TOLERANCE


def taken_before(model):
    weight = model.inner.weight.data
    return lambda y, t: functional.mse_loss(y, t) + weight.norm()


def of_another(model):
    head = nn.Linear(WIDTH, WIDTH).double()
    return lambda y, t: functional.mse_loss(head(y), t)


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (taken_before, "inner.weight is read outside of the model's forward where the program cannot follow"),
        (of_another, "that needs gradients is no parameter of the model, and would get none"),
    ],
)
def test_what_would_have_no_gradient_is_refused(of, said) -> None:
    model, x = net(), drawn(BATCH, WIDTH)
    with pytest.raises(CaptureError, match=re.escape(said)):
        capture(model, x, loss_fn=of(model), example_targets=x)


def test_a_hook_that_runs_when_the_gradient_is_there_is_refused() -> None:
    model, x = net(), drawn(BATCH, WIDTH)
    model.inner.bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(CaptureError, match=r"inner\.bias has a hook .* register it on the program's parameter"):
        capture(model, x, loss_fn=functional.mse_loss, example_targets=x)


def test_what_another_layer_holds_may_be_a_constant_if_it_is_frozen() -> None:
    head, x = nn.Linear(WIDTH, WIDTH).double().requires_grad_(False), drawn(BATCH, WIDTH)
    assert worst(net(), lambda y, t: functional.mse_loss(head(y), t)) < TOLERANCE
    assert len(capture(net(), x, loss_fn=lambda y: head(y).sum()).constants) == 2
