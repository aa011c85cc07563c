"""What follows from constants is known, equals what PyTorch makes of it, and nothing else is taken for known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import hessian, vmap
from torch.nn import functional

from hap.capture import capture
from tests.capture.equality import assert_equals_eager, count
from tests.capture.test_refusals import refusal

ROWS, N = 4, 8
EVERY_OTHER = torch.tensor([True, False] * (N // 2))
Then = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """What the test makes of the outputs of a linear layer, and of its inputs."""

    def __init__(self, then: Then) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(N, N), then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.linear(x), x)


def small(then: Then) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Model(then).double(), torch.randn(ROWS, N, dtype=torch.float64)


def squared(y: torch.Tensor) -> torch.Tensor:
    return y.square().sum()


def branch(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return squared(y * 2 if torch.arange(5.0).mean() > 1 else y)


def ordered(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    t = torch.linspace(0, 1, 4, dtype=x.dtype)
    assert (t[1:] > t[:-1]).all()
    assert torch.equal(t, t.clone())
    assert 1.0 in t
    return squared(y * t[1])


def loop(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    t, doublings = torch.tensor(1.0), 0
    while t < 10:
        t, doublings = t * 2, doublings + 1
    return squared(y) * doublings * int(f"{torch.tensor(3)}")


def pieces(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    shapes = torch.as_tensor([[1, 3], [1, 5]])
    lists = [[h * w for h, w in shapes], shapes.prod(1).tolist(), list(map(int, shapes[:, 1].numpy()))]
    return sum((squared(part) * (i + 1) for some in lists for i, part in enumerate(y.split(some, 1))), y.new_zeros(()))


def slices(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    ends = torch.tensor([3, 5]).cumsum(0)
    return squared(y[:, : ends[0]]) + 2 * squared(y[:, ends[0] : ends[1]]) + squared(y[:, ends[0]])


def sizes(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    n = torch.tensor([N, 2])
    return squared(y.view(ROWS, n[1], -1).sum(1)) + squared(y + torch.ones(n[0]))


def triangle(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return squared((y.unsqueeze(1) * y.unsqueeze(2))[:, torch.ones(N, N).triu().bool()])


def masks(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    kept = torch.ones_like(x[0])
    kept[3:] = 0
    found = [
        y[:, kept.bool()],
        y[:, EVERY_OTHER],
        y[:, [True, False] * 4],
        y[:, np.arange(N) > 2],
        y[EVERY_OTHER[:ROWS]],
    ]
    return sum(map(squared, found), y.new_zeros(()))


def written(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y[:, EVERY_OTHER] = x[:, :4]
    y[1:, ~EVERY_OTHER] = 0.5
    return squared(y)


def places(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (even,) = torch.where(torch.arange(N) % 2 == 0)
    odd, once = torch.nonzero(torch.arange(N) % 2).squeeze(1), torch.unique(torch.tensor([1, 1, 3]))
    return squared(y[:, even]) + 2 * squared(y[:, odd]) + 3 * squared(y[:, once])


def selected(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return squared(y.masked_select(torch.ones(ROWS, N).triu().bool()).reshape(2, -1).sum(1)) + squared(
        torch.masked_select(y, EVERY_OTHER)
    )


def repeated(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    often = torch.tensor([1, 2, 1, 0, 1, 1, 1, 2])
    return squared(y.repeat_interleave(often, dim=1) * torch.repeat_interleave(torch.arange(N), often))


def classes(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    one_hot = functional.one_hot(torch.tensor([0, 2, 1]))
    return squared(y[:, :3] @ one_hot.to(y)) * one_hot.shape[1]


def strided(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Asks what a traced tensor holds, which looks like a plain tensor."""
    assert y.layout == x.layout == torch.strided
    return squared(y)


def changed(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """By views, by functions and into tensors of one's own."""
    t = torch.zeros(3)
    rest = t[1:]
    rest.fill_(2.0)
    t[0] = -3.0
    t.view(3, 1).t().mul_(2)
    functional.relu(t, inplace=True)
    torch.add(t, 1, out=t)
    return squared(y) * t.sum().item() * rest.detach().sum().item()


def differentiated(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Constants of a function that is differentiated, sample by sample, one of which outlives it."""
    kept = list[torch.Tensor]()

    def of(row: torch.Tensor) -> torch.Tensor:
        weights = torch.arange(float(N), dtype=row.dtype) * 2
        kept.append(weights)
        picked = row[weights > 3].pow(3).sum() if weights.mean() > 0 else row.sum()
        return picked * int(weights.sum().item())

    return squared(y * vmap(hessian(of))(x).sum(1)) * kept[0].sum().item()


def chances(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A layer that is left out with a chance of 0, or of 1."""
    y = y * 2 if torch.rand(1) > 0.0 and torch.rand(()) < 1 and torch.rand(1) >= 0 else y
    y = y * 3 if torch.rand(1) < 0 or torch.rand_like(y[0, :1]) >= 1.0 else y
    return squared(y)


KNOWN = (branch, ordered, loop, pieces, slices, sizes, triangle, masks, written, places, selected, repeated, classes)


@pytest.mark.parametrize("then", [*KNOWN, chances, strided, changed, differentiated])
def test_what_follows_from_constants_is_known(then: Then) -> None:
    assert_equals_eager(*small(then))


def test_nothing_is_drawn_to_know_it() -> None:
    model, x = small(lambda y, x: squared(functional.dropout(y * torch.rand(N) * functional.dropout(torch.ones(N)))))
    before = torch.get_rng_state()
    capture(model, x)
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_traced_is_traced_as_it_is_written() -> None:
    """A constant is made of what nobody could trace, and of nothing else."""
    graph = capture(*small(lambda y, x: squared(y * torch.arange(N).cumsum(0))))
    assert not graph.constants and count(graph)["aten.cumsum.default"] == 1
    graph = capture(*small(triangle))
    assert sorted(tuple(t.shape) for t in graph.constants.values()) == [(N * (N + 1) // 2,)] * 2


def by_input(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    t = torch.zeros(3)
    t[0] = x.sum()
    return y.sum() if t[0] > 0 else -y.sum()


def by_a_view(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    t = torch.zeros(3)
    t[1:].add_(x[0, 0])
    return y.sum() * t.sum().item()


def by_data(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    t = torch.zeros(3)
    rest = t[1:]
    t.data.copy_(x[0, :3])
    return y.sum() * rest.sum().item()


def by_data_kept(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    t = torch.zeros(3)
    data = t.data
    data.add_(x[0, 0])
    return y.sum() * t.sum().item()


def by_what_is_detached(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    t = torch.zeros(3)
    t.detach().copy_(x[0, :3])
    return y.sum() * t.sum().item()


def by_out(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    t = torch.zeros(ROWS, N, dtype=x.dtype)
    torch.add(x, 1, out=t)
    return y.sum() * t.sum().item()


def by_a_function_in_place(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    t = torch.zeros(ROWS, N, dtype=x.dtype)
    functional.relu(t.add_(x), inplace=True)
    return y.sum() * t.sum().item()


def by_a_cast(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.sum() * x.to(torch.float32).sum().item() * x.type_as(torch.zeros(2)).sum().item()


def by_filling(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.sum() * torch.zeros(2, dtype=x.dtype).new_full((2,), x.sum()).sum().item()


def by_a_draw(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.sum() if torch.rand(3).sum() > 1 else -y.sum()


def by_chance(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.sum() if torch.rand(1) > 0.5 else -y.sum()


def by_a_chance_that_is_changed(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.sum() if torch.rand(1).sub_(0.5) > 0 else -y.sum()


def by_a_draw_like(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.sum() * torch.randn_like(torch.ones(3)).sum().item()


def by_dropout(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.sum() * functional.dropout(torch.ones(N), 0.5).sum().item()


def by_memory_as_it_was(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.sum() * torch.empty(3).sum().item()


def by_a_slice(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.sum() * torch.arange(N)[: (x[0, 0] > 0).long()].sum()


def by_a_list(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.sum() * sum(x.round().long()[0].tolist())


def by_an_array(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.sum() * float(x.numpy().sum())


CHANGED = (by_input, by_a_view, by_data, by_data_kept, by_what_is_detached, by_out, by_a_function_in_place)
UNKNOWN = (by_a_cast, by_filling, by_a_draw, by_a_draw_like, by_dropout, by_memory_as_it_was, by_a_slice, by_a_list)
CHANCE = (by_chance, by_a_chance_that_is_changed)


@pytest.mark.parametrize("then", [*CHANGED, *UNKNOWN, *CHANCE])
def test_what_may_be_another_value_in_another_step_is_not(then: Then) -> None:
    assert "may not depend on the values in a tensor" in refusal(*small(then))


def test_an_array_of_an_input_is_refused() -> None:
    assert "numpy" in refusal(*small(by_an_array))


@pytest.mark.parametrize(
    "of", [lambda m: m.norm.running_mean, lambda m: m.norm.weight, lambda m: m.linear.weight.detach()[0]]
)
def test_nor_are_parameters_and_buffers_wherever_they_are_held(of: Callable[[nn.Module], torch.Tensor]) -> None:
    """Here by a function that is called, as by a list or a view that was made before."""
    model, x = small(lambda y, x: y.sum())
    model.norm = nn.BatchNorm1d(N).double()
    held = of(model)
    model.then = lambda y, x: y.sum() * (2 if held.sum() > 0 else 3)
    assert "may not depend on the values in a tensor" in refusal(model, x)


def test_what_is_written_into_an_array_of_it_is_refused() -> None:
    def then(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        t = torch.zeros(3)
        t.numpy()[0] = 1
        return y.sum() * t.sum()

    assert "read-only" in refusal(*small(then))


def test_what_a_known_mask_selects_goes_on_without_a_size_where_it_can() -> None:
    """Then it is dealt out with the batch; where its size is asked for, it has one."""
    mask = EVERY_OTHER[:ROWS]
    added, shaped = (
        capture(*small(then)) for then in (lambda y, x: squared(y[mask]), lambda y, x: squared(y[mask].view(-1)))
    )
    assert "aten.index.Tensor" not in count(added) and "aten.where.self" in count(added)
    assert count(shaped)["aten.index.Tensor"] == 1


def test_a_size_that_is_not_known_is_refused_in_the_words_of_the_first_try() -> None:
    said = refusal(*small(lambda y, x: y[x > 0].view(-1).sum()))
    assert "view of a tensor whose size depends on values, as a boolean index makes one" in said
