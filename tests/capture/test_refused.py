"""What a step cannot have is refused at the user's line, with what to write instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

from hap.capture import capture
from tests.capture.test_refusals import Block, refusal

IMAGES = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)


def ascends(module: Block, y: torch.Tensor) -> torch.Tensor:
    y.sum().backward()
    return y.sum()


def ascends_by_a_function(module: Block, y: torch.Tensor) -> torch.Tensor:
    torch.autograd.backward(y.sum())
    return y.sum()


def counts(module: Block, y: torch.Tensor) -> torch.Tensor:
    return y.sum() * torch.bincount(y.argmax(1), minlength=3).sum()


def counts_its_own(module: Block, y: torch.Tensor) -> torch.Tensor:
    return y.sum() * y.argmax(1).bincount(minlength=3).sum()


def packs(module: Block, y: torch.Tensor) -> torch.Tensor:
    return rnn.pack_padded_sequence(y, [2, 1], batch_first=True, enforce_sorted=False).data.sum()


def leaves_torch(module: Block, y: torch.Tensor) -> torch.Tensor:
    return y.sum() * float(y.detach().cpu().numpy().max())


def lists(module: Block, y: torch.Tensor) -> torch.Tensor:
    return y.sum() * max(y.argmax(1).tolist())


def nests(module: Block, y: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([y[0, :2], y[1]], layout=torch.jagged).values().sum()


PLACES, ONES = torch.tensor([[0, 1], [2, 0]]), torch.ones(2)
SPARSE = torch.sparse_coo_tensor(PLACES, ONES, (3, 3))


def adds_to_few_places(module: Block, y: torch.Tensor) -> torch.Tensor:
    return (y + torch.sparse_coo_tensor(PLACES, y[0, :2], y.shape)).sum()


def leaves_out_zeros(module: Block, y: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(y.relu().to_sparse(), y.t()).sum()


def multiplies_by_a_sparse_constant(module: Block, y: torch.Tensor) -> torch.Tensor:
    return (SPARSE @ y.t()).sum()


@pytest.mark.parametrize(
    ("then", "instead"),
    [
        (adds_to_few_places, "torch.zeros(size).index_put(places, values)"),
        (leaves_out_zeros, "make it with its zeros"),
        (multiplies_by_a_sparse_constant, ".index_add(0, rows, values[:, None] * x[columns])"),
        (ascends, "use torch.autograd.grad there"),
        (ascends_by_a_function, "use torch.autograd.grad there"),
        (counts, "use one_hot(y, K).sum(0), with weights torch.zeros(K).index_add(0, y, weights)"),
        (counts_its_own, "use one_hot(y, K).sum(0)"),
        (packs, "give the layer the padded one"),
        (leaves_torch, "values that leave PyTorch at"),
        (lists, "the program may not depend on the values in a tensor"),
        (nests, "pad them to one, and mask what lies behind their ends"),
    ],
)
def test_what_to_write_instead(then: Callable[[Block, torch.Tensor], torch.Tensor], instead: str) -> None:
    said = refusal(nn.Sequential(Block(then)))
    assert instead in said and f"at {__file__}:" in said and "in module '0'" in said
    assert not any(word in said for word in ("boolean index", "mirrored", "Error"))


def test_what_is_known_is_counted() -> None:
    capture(Block(lambda module, y: (y * torch.bincount(torch.tensor([0, 1, 2, 2]))).sum()), torch.randn(2, 3))


class Flat(nn.Module):
    """Channels last in memory alone: what eager PyTorch views there has another order in a step."""

    def __init__(self, flat: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.flat = nn.Linear(3, 5), flat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.flat(x.permute(0, 2, 3, 1))).square().sum()


def test_views_that_need_a_memory_format() -> None:
    for flat in (lambda x: x.view(-1, 3), lambda x: x.view_as(torch.zeros(32, 3))):
        Flat(flat)(IMAGES)
        said = refusal(Flat(flat), IMAGES)
        assert "inputs and parameters are contiguous, never channels_last; use reshape" in said and __file__ in said
    capture(Flat(lambda x: x.reshape(-1, 3)), IMAGES)
    wrong = refusal(Flat(lambda x: x.view(-1, 7)), IMAGES)
    assert "channels_last" not in wrong and "is invalid for input of size 96" in wrong
