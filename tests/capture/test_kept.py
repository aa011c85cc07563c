"""What a model, its hooks and its loss function keep in Python: steps that would not be alike are refused, what is made
once and stays is captured, and nothing of a trace is left behind."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import re

import numpy as np
import pytest
import torch
from torch import nn

from hap.capture import capture, interpret, source_values
from hap.errors import CaptureError

X = torch.linspace(-1.0, 2.0, 24, dtype=torch.float64).view(6, 4)
CALLS = 0


def assert_equals_model(model) -> None:
    """A deep copy's hook would write to the model."""
    graph = capture(model, X)
    values = interpret(graph, source_values(graph, model, X, None))
    loss = model(X)
    loss.backward()
    assert torch.allclose(values[graph.loss], loss.detach(), rtol=1e-12)
    for name, parameter in model.named_parameters():
        assert torch.allclose(values[graph.gradients[name]], parameter.grad, rtol=1e-12)


class Players(nn.Module):
    """Two, of which ``forward`` says who plays."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.own, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.step, self.turn, self.tau, self.state = 0, True, None, {}
        self.seen, self.array, self.count = collections.deque(maxlen=9), np.ones(2), itertools.count(1)
        self.order, self.mode = ["own", "other"], "other"


def by_count(self, x):
    self.step += 1
    return self.own(x) if self.step % 2 else self.other(x)


def by_turns(self, x):
    self.turn = not self.turn
    return self.own(x) if self.turn else self.other(x)


def by_word(self, x):
    self.mode = "own" if self.mode == "other" else "other"
    return getattr(self, self.mode)(x)


def by_order(self, x):
    self.order.reverse()
    return getattr(self, self.order[0])(x)


def made_late(self, x):
    self.late = getattr(self, "late", 1.0) * 0.9
    return self.own(x) * self.late


def none_at_first(self, x):
    self.tau = 1.0 if self.tau is None else self.tau * 0.9
    return self.own(x) * self.tau


def late_in_a_dict(self, x):
    self.state["tau"] = self.state.get("tau", 1.0) * 0.9
    return self.own(x) * self.state["tau"]


def in_a_deque(self, x):
    self.seen.append(1)
    return self.own(x) / len(self.seen)


def in_an_array(self, x):
    self.array *= 0.5
    return self.own(x) * float(self.array[0])


def by_iterator(self, x):
    return self.own(x) / next(self.count)


def of_the_class(self, x):
    type(self).calls += 1
    return self.own(x) / type(self).calls


def in_a_global(self, x):
    global CALLS
    CALLS += 1
    return self.own(x) / CALLS


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (by_count, "the number 'step'"),
        (by_turns, "the number 'turn'"),
        (by_word, "what it keeps as 'mode'"),
        (by_order, "what it keeps as 'order.0'"),
        (made_late, "the number 'late'"),
        (none_at_first, "the number 'tau'"),
        (late_in_a_dict, "the number 'state.tau'"),
        (in_a_deque, "the number 'seen.1'"),
        (in_an_array, "the number 'array.0'"),
        (by_iterator, "what it keeps as 'count'"),
        (of_the_class, "the number 'calls'"),
        (in_a_global, "CALLS'"),
    ],
)
def test_steps_that_differ_by_what_a_model_keeps_are_refused(forward, said) -> None:
    model = type("Model", (Players,), {"forward": forward})().double()
    with pytest.raises(CaptureError, match=re.escape(said) + ", and the step with it"):
        capture(model, X, loss_fn=lambda y: y.square().mean())
    assert type(model).calls == CALLS == 0


class Falling:
    def __init__(self):
        self.k = 1.0

    def loss(self, y):
        self.k *= 0.9
        return y.mean() * self.k


def closed_over():
    k = 1.0

    def loss(y):
        nonlocal k
        k *= 0.9
        return y.mean() * k

    return loss


def in_a_closed_list():
    box = [1.0]

    def loss(y):
        box[0] *= 0.9
        return y.mean() * box[0]

    return loss


def by_default():
    def loss(y, box=[1.0]):  # noqa: B006
        box[0] *= 0.9
        return y.mean() * box[0]

    return loss


def of_its_own():
    def loss(y):
        loss.k = getattr(loss, "k", 1.0) * 0.9
        return y.mean() * loss.k

    return loss


@pytest.mark.parametrize("made", [lambda: Falling().loss, closed_over, in_a_closed_list, by_default, of_its_own])
def test_so_are_those_that_differ_by_what_the_loss_function_holds(made) -> None:
    with pytest.raises(CaptureError, match=r"changes the number '(k|box\.0)', and the step with it"):
        capture(nn.Linear(4, 4).double(), X, loss_fn=made())


class Gated(nn.Module):
    """A layer that is a function, of a number that the forward pass changes."""

    def __init__(self):
        super().__init__()
        self.linear, self.gate = nn.Linear(4, 4), 1.0
        self.layers = [self.linear, lambda x: x * self.gate]

    def forward(self, x):
        self.gate *= 0.5
        return self.layers[1](self.layers[0](x)).mean()


def test_functions_of_a_model_read_what_its_copy_has() -> None:
    with pytest.raises(CaptureError, match="changes the number 'gate', and the step with it"):
        capture(Gated().double(), X)


def a_count(self):
    self.made = getattr(self, "made", 0) + 1  # which nothing reads
    return torch.ones(6, 1, dtype=torch.float64)


def where_none_was(self):
    if self.table is None:
        self.table = torch.arange(6.0, dtype=torch.float64).cos()
    return self.table[:, None]


def a_buffer(self):
    if self.later is None:
        self.later = torch.arange(6.0, dtype=torch.float64).cos()
    return self.later[:, None]


def a_pair(self):
    if self.table is None or self.length < 6:
        angles = torch.arange(6.0, dtype=torch.float64)
        self.table, self.length = (angles.cos(), angles.sin()), 6
    return (self.table[0] + self.table[1])[:, None]


def by_length(self):
    if 6 not in self.tables:
        self.tables[6] = torch.arange(6.0, dtype=torch.float64).cos()
    return self.tables[6][:, None]


class Caching(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.linear, self.of = nn.Linear(4, 4), of
        self.table, self.tables, self.length = None, {}, 0
        self.register_buffer("later", None, persistent=False)

    def forward(self, x):
        return (self.linear(x) * self.of(self)).square().mean()


@pytest.mark.parametrize("of", [a_count, where_none_was, a_buffer, a_pair, by_length])
def test_what_is_made_once_of_constants_and_stays_is_captured(of) -> None:
    model = Caching(of).double()
    before = dict(vars(model))
    capture(model, X)
    assert vars(model) == before and model.tables == {} and model.later is None
    assert_equals_model(model)


@functools.lru_cache
def angles(n):
    return torch.arange(n, dtype=torch.float64).cos()


def turned(n):
    return angles(n)[:, None]


def test_a_cache_that_is_named_by_a_function_that_is_named_is_found() -> None:
    model = Caching(lambda self: turned(6)).double()
    capture(model, X)
    assert type(angles(6)) is torch.Tensor
    angles.cache_clear()
    assert_equals_model(model)


@pytest.mark.parametrize("size", [8, None])
def test_so_is_what_a_function_under_lru_cache_keeps(size) -> None:
    @functools.lru_cache(size)
    def table(n):
        return torch.arange(n, dtype=torch.float64).cos()

    model = Caching(lambda self: table(6)[:, None]).double()
    capture(model, X)
    assert type(table(6)) is torch.Tensor
    table.cache_clear()
    assert_equals_model(model)


class Numbering(nn.Module):
    """Keeps what it made of the first batch's size, as the loss of open_clip does."""

    def __init__(self):
        super().__init__()
        self.numbers = {}

    def forward(self, y):
        if not self.numbers:
            self.numbers[y.device] = torch.arange(len(y), device=y.device) % y.shape[1]
        return nn.functional.cross_entropy(y, self.numbers[y.device])


NUMBERING = Numbering()


def test_so_is_what_a_module_keeps_that_a_function_names_as_a_global() -> None:
    graph = capture(nn.Linear(4, 4).double(), X, loss_fn=lambda y: NUMBERING(y))
    assert [n.op for n in graph.nodes].count("constant") == 1 and not NUMBERING.numbers


def a_sum(self):
    self.table = torch.ones(1, dtype=torch.float64) if self.table is None else self.table + 1
    return self.table


def test_a_tensor_that_is_another_one_in_each_step_is_refused() -> None:
    with pytest.raises(CaptureError, match="changes what it keeps as 'table', and the step with it"):
        capture(Caching(a_sum).double(), X)


class Makers(collections.OrderedDict):
    """Hands out an object where it holds a class, as the activations of Hugging Face's transformers do."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


MAKERS = Makers(gelu=nn.GELU, tanh=nn.Tanh)


def activated(x, name):
    return MAKERS[name](x)


def test_a_dict_that_makes_what_it_hands_out_is_left_as_it_was() -> None:
    model = Players().double()
    model.forward = lambda x: activated(model.own(x), "gelu").sum()
    graph = capture(model, X)
    assert [n.op for n in graph.nodes].count("aten.gelu.default") == 1
    assert list(dict.items(MAKERS)) == [("gelu", nn.GELU), ("tanh", nn.Tanh)]


class Hooked(nn.Module):
    """A hook that keeps what a layer returned, which the model reads."""

    def __init__(self, kept):
        super().__init__()
        self.inner, self.outer, self.stat, self.kept = nn.Linear(4, 4), nn.Linear(4, 2), None, kept

        def hook(module, given, found):
            value = found.detach().square().mean()
            if isinstance(kept, dict):
                kept["stat"] = value
            else:
                self.stat = value

        self.inner.register_forward_hook(hook)

    def forward(self, x):
        y = self.outer(self.inner(x).relu())
        return (y * (1 + (self.stat if self.kept is None else self.kept["stat"]))).mean()


@pytest.mark.parametrize("kept", [None, {}])
@pytest.mark.parametrize("warm", [False, True])
def test_what_hooks_keep_is_the_steps_own(kept, warm) -> None:
    model = Hooked(copy.copy(kept)).double()
    if warm:
        model(X)
    capture(model, X)
    left = model.stat if kept is None else model.kept.get("stat")
    assert type(left) is (torch.Tensor if warm else type(None))
    assert_equals_model(model)


class Initialised(nn.Module):
    """Whose first call writes to a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.ready = nn.Linear(4, 4), False
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x)
        if not self.ready:
            self.shift.copy_(-y.detach().mean(0))
            self.ready = True
        return (y + self.shift).square().mean()


def test_what_the_first_call_alone_writes_is_refused_unless_it_was_done() -> None:
    model = Initialised().double()
    with pytest.raises(CaptureError, match=r"changes the number 'ready', .*: run the model once before"):
        capture(model, X)
    model(X)
    assert_equals_model(model)


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.teacher = nn.Linear(4, 4).double(), None

    def forward(self, x):
        if self.teacher is None:
            self.teacher = copy.deepcopy(self.net)
        return (self.net(x) - self.teacher(x).detach() + x).square().mean()


class Biased(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.ModuleDict({"bias": nn.Linear(4, 4).double()})
        self.net.bias.register_buffer("slopes", torch.ones(4, dtype=torch.float64))
        self.net.bias.register_buffer("table", None, persistent=False)

    def forward(self, x):
        if self.net.bias.table is None:
            self.net.bias.table = self.net.bias.slopes * torch.arange(4)
        return (self.net.bias(x) + self.net.bias.table).square().mean()


@pytest.mark.parametrize("model, name", [(Teacher, r"teacher\.weight"), (Biased, r"net\.bias\.table")])
def test_a_tensor_that_the_first_call_makes_of_state_and_keeps_is_refused_by_name(model, name):
    with pytest.raises(CaptureError, match=rf"changes in the root module \({name}.*run the model once before"):
        capture(model(), X)
