"""Frozen parameters that the forward pass changes, and ``x.data = value``: one device's state afterwards, or a refusal
in words."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from hap.capture import capture
from hap.errors import CaptureError
from tests.zoo.layers import BATCH, WIDTH, case, worst
from tests.zoo.lockstep import TOLERANCE, drawn

CODES = 5


def assigned(theirs, own):
    theirs.data = theirs.data * 0.9 + own.data * 0.1  # as MoCo's own code has it


def through_data(theirs, own):
    theirs.data.mul_(0.9).add_(own.data, alpha=0.1)


def in_place(theirs, own):
    theirs.lerp_(own, 0.1)


class Follower(nn.Module):
    """An encoder, and one that follows it; ``late``: after it was used."""

    def __init__(self, follow, *, late=False):
        super().__init__()
        self.own, self.theirs = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.follow, self.late = follow, late

    def forward(self, x):
        if not self.late:
            self.catch_up()
        found = self.own(x) * self.theirs(x.sin())
        if self.late:
            self.catch_up()
        return found

    @torch.no_grad()
    def catch_up(self):
        for own, theirs in zip(self.own.parameters(), self.theirs.parameters(), strict=True):
            self.follow(theirs, own)


class Codebook(nn.Module):
    """Vector quantisation whose codes are moving averages of what they stand for."""

    def __init__(self):
        super().__init__()
        self.linear, self.codes = nn.Linear(WIDTH, WIDTH), nn.Embedding(CODES, WIDTH)
        self.codes.weight.requires_grad_(False)
        self.register_buffer("count", torch.ones(CODES))
        self.register_buffer("total", self.codes.weight.clone())

    def forward(self, x):
        y = self.linear(x)
        nearest = torch.cdist(y.detach(), self.codes.weight).argmin(1)
        found = self.codes(nearest)
        with torch.no_grad():
            chosen = functional.one_hot(nearest, CODES).to(y.dtype)
            self.count.data = self.count * 0.9 + chosen.sum(0) * 0.1
            self.total.data = self.total * 0.9 + chosen.T @ y * 0.1
            self.codes.weight.data.copy_(self.total / self.count[:, None])
        return y + (found - y).detach() + functional.mse_loss(y, found)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("follow", [assigned, through_data, in_place])
def test_an_encoder_follows_another(follow, late) -> None:
    assert worst(case(Follower(follow, late=late))) < TOLERANCE


def test_a_codebook_of_moving_averages() -> None:
    found = case(Codebook())
    assert worst(found) < TOLERANCE
    graph = capture(found.model, found.inputs, loss_fn=found.loss_fn, example_targets=found.targets)
    assert set(graph.updates) == {"count", "total", "codes.weight"}
    assert [n.target for n in graph.sources("parameter")] == ["linear.weight", "linear.bias"]


def test_a_counter_is_its_own_memory() -> None:
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps.data += 1
            return self.linear(x) * self.steps

    assert worst(case(Counting())) < TOLERANCE


def trained(self, x):
    self.linear.weight.data = self.linear.weight.data.clamp(-1, 1)
    return self.linear(x)


def in_between(self, x):
    y = self.linear(x)
    y.data = y.data.round()
    return y


def of_the_input(self, x):
    x.data = x.data * 2
    return self.linear(x)


def shared(self, x):
    self.frozen.weight.data = self.linear.weight.data
    return self.frozen(x) + self.linear(x)


def a_view(self, x):
    self.seen.data = x[0]
    return self.linear(x) + self.seen


def smaller(self, x):
    self.seen.data = self.linear(x).detach().mean(0, keepdim=True)
    return self.linear(x) + self.seen


def replaced(self, x):
    self.frozen.weight = nn.Parameter(self.frozen.weight * 0.9, requires_grad=False)
    return self.frozen(x) + self.linear(x)


def warmer(self, x):
    self.temperature *= 0.99
    return self.linear(x) / self.temperature


def warmer_in_a_dict(self, x):
    self.state["tau"] *= 0.99
    return self.linear(x) / self.state["tau"]


def warmer_in_an_object(self, x):
    self.state["schedules"][0].tau *= 0.99
    return self.linear(x) / self.state["schedules"][0].tau


class Within(nn.Module):
    """So many modules in each other, the last with a number that it changes."""

    def __init__(self, levels):
        super().__init__()
        self.tau = 1.0
        self.inner = Within(levels - 1) if levels > 1 else None

    def forward(self, x):
        if self.inner is not None:
            return self.inner(x)
        self.tau *= 0.99
        return x / self.tau


def with_numbers(forward):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.register_buffer("seen", torch.zeros(WIDTH))
            self.temperature, self.calls = 1.0, 0
            self.state = {"tau": 1.0, "schedules": [SimpleNamespace(tau=1.0)]}

    Model.forward = forward
    return Model().double()


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (trained, "changes parameter linear.weight in place: change a clone of it, or freeze it"),
        (in_between, ".data of a tensor that is no parameter or buffer"),
        (of_the_input, ".data of a tensor that is no parameter or buffer"),
        (shared, "both would change together from then on: assign a clone"),
        (a_view, "both would change together from then on: assign a clone"),
        (smaller, ".data of shape (1, 6)"),
        (replaced, "replaces parameter frozen.weight"),
        (warmer, "changes the number 'temperature', and the step with it"),
        (warmer_in_a_dict, "changes the number 'state.tau', and the step with it"),
        (warmer_in_an_object, "changes the number 'state.schedules.0.tau', and the step with it"),
    ],
)
def test_what_would_be_lost_is_refused(forward, said) -> None:
    with pytest.raises(CaptureError, match=re.escape(said)):
        capture(with_numbers(forward), drawn(BATCH, WIDTH), loss_fn=lambda y: y.sum())


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_so_is_a_number_of_a_module_inside_of_others(levels) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Within(levels))
    said = re.escape(f"changes the number '{'.'.join(['1', *['inner'] * (levels - 1), 'tau'])}'")
    with pytest.raises(CaptureError, match=said):
        capture(model, drawn(BATCH, WIDTH), loss_fn=lambda y: y.sum())


def test_so_is_one_of_a_module_in_a_list() -> None:
    class Listing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.others = nn.Linear(WIDTH, WIDTH), [Within(1)]

        def forward(self, x):
            return self.others[0](self.linear(x))

    with pytest.raises(CaptureError, match=r"changes the number 'others\.0\.tau'"):
        capture(Listing(), drawn(BATCH, WIDTH), loss_fn=lambda y: y.sum())


class Warmer:
    """A loss that is no module, with a number of its own."""

    def __init__(self):
        self.tau = 1.0

    def __call__(self, y):
        self.tau *= 0.99
        return y.sum() * self.tau


def test_a_number_of_the_loss_that_changes_is_refused() -> None:
    with pytest.raises(CaptureError, match="changes the number 'tau', and the step with it"):
        capture(nn.Linear(WIDTH, WIDTH).double(), drawn(BATCH, WIDTH), loss_fn=Warmer())


class Centred(nn.Module):
    """A loss with a state of its own."""

    def __init__(self, assigned):
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH, dtype=torch.float64))
        self.assigned = assigned

    def forward(self, y):
        loss = (y - self.center).square().mean()
        if self.assigned:
            self.center = self.center * 0.9 + y.detach().mean(0) * 0.1
        else:
            self.center.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return loss


@pytest.mark.parametrize("assigned", [False, True])
def test_what_a_loss_function_keeps_is_refused(assigned) -> None:
    with pytest.raises(CaptureError, match=r"a tensor that is kept from step to step changes .* a part of the model"):
        capture(nn.Linear(WIDTH, WIDTH).double(), drawn(BATCH, WIDTH), loss_fn=Centred(assigned))


def test_a_number_that_nothing_reads_may_change() -> None:
    """A count of calls, and a cache that remembers for what size it was made."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls, self.size = nn.Linear(WIDTH, WIDTH), 0, 0
            self.state = {"calls": 0}

        def forward(self, x):
            self.calls += 1
            self.state["calls"] += 1
            if self.size < len(x):
                self.size = len(x)
            return self.linear(x) * self.size

    assert worst(case(Counting()), plans=1) < TOLERANCE
