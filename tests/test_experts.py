"""``hap.experts`` against its definition."""

from __future__ import annotations

import pytest
import torch

import hap.experts as room
from hap.experts import expert_mm, expert_mm_weight

S, K, N, E = 11, 8, 16, 5


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype)


def ids(count: int = S) -> torch.Tensor:
    """Of five experts; number 3 has no row."""
    return torch.tensor([4, 0, 2, 2, 1, 0, 4, 4, 1, 0, 2])[:count]


def defined(x: torch.Tensor, weight: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return torch.einsum("sk,skn->sn", x, weight[at])


def defined_weight(x: torch.Tensor, grad: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    each = torch.einsum("sk,sn->skn", x, grad)
    return torch.zeros(E, *each.shape[1:], dtype=x.dtype).index_add(0, at, each)


@pytest.mark.parametrize("count", [S, 1, 0])
def test_every_row_meets_its_own_matrix(count: int) -> None:
    x, grad, weight = drawn(count, K), drawn(count, N), drawn(E, K, N)
    torch.testing.assert_close(expert_mm(x, weight, ids(count)), defined(x, weight, ids(count)))
    torch.testing.assert_close(expert_mm_weight(x, grad, ids(count), E), defined_weight(x, grad, ids(count)))


def test_a_transposed_weight_is_read_as_it_lies() -> None:
    x, weight = drawn(S, K), drawn(E, N, K).transpose(1, 2)
    torch.testing.assert_close(expert_mm(x, weight, ids()), defined(x, weight, ids()))


@pytest.mark.parametrize(("start", "count"), [(0, 2), (2, 3), (5, 0)])
def test_a_range_of_experts_adds_zeros_for_the_rows_of_others(start: int, count: int) -> None:
    x, grad, weight = drawn(S, K), drawn(S, N), drawn(E, K, N)
    place = (0, 1, E, 1, start)
    mine = (ids() >= start) & (ids() < start + count)
    expected = defined(x, weight, ids()).masked_fill(~mine.unsqueeze(1), 0.0)
    torch.testing.assert_close(expert_mm(x, weight[start : start + count], ids(), place), expected)
    expected = defined_weight(x, grad, ids())[start : start + count]
    torch.testing.assert_close(expert_mm_weight(x, grad, ids(), count, place), expected)


@pytest.mark.parametrize("place", [None, (0, 1, E, 1, 0)])
def test_ids_are_those_of_an_index(place: tuple[int, ...] | None) -> None:
    """From the end, too, and none that does not exist."""
    x, grad, weight, back = drawn(S, K), drawn(S, N), drawn(E, K, N), ids() - E
    torch.testing.assert_close(expert_mm(x, weight, back, place), defined(x, weight, ids()))
    torch.testing.assert_close(expert_mm_weight(x, grad, back, E, place), defined_weight(x, grad, ids()))
    for wrong in (E, -E - 1):
        at = ids().index_fill(0, torch.tensor([2]), wrong)
        for call in (lambda i: expert_mm(x, weight, i, place), lambda i: expert_mm_weight(x, grad, i, E, place)):
            with pytest.raises(IndexError):
                call(at)


def test_experts_that_are_dealt_out_in_strides() -> None:
    """Six experts as two parts of three: the rank with atoms 1 and 2 has experts 1, 2, 4, 5."""
    x, weight, at = drawn(S, K), drawn(6, K, N), torch.arange(S) % 6
    mine = [1, 2, 4, 5]
    expected = defined(x, weight, at).masked_fill(~torch.isin(at, torch.tensor(mine)).unsqueeze(1), 0.0)
    torch.testing.assert_close(expert_mm(x, weight[mine], at, (0, 2, 3, 1, 1)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorchs_grouped_product_gives_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """As on CUDA, here by PyTorch's kernel for the CPU; rows of another rank's experts are zero, not what lay there."""
    x, grad, weight = drawn(S, K, dtype=dtype), drawn(S, N, dtype=dtype), drawn(E, K, N, dtype=dtype)
    for place, part in ((None, slice(0, E)), ((0, 1, E, 1, 1), slice(1, 3))):
        held = weight[part]
        looped = expert_mm(x, held, ids(), place), expert_mm_weight(x, grad, ids(), len(held), place)
        with monkeypatch.context() as patch:
            patch.setattr(room, "_grouped_applies", lambda *factors: True)
            grouped = expert_mm(x, held, ids(), place), expert_mm_weight(x, grad, ids(), len(held), place)
        for ours, theirs in zip(looped, grouped, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_experts_without_rows_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some GPUs' kernels leave the memory of a product of nothing as it was (pytorch/pytorch#172439)."""
    own = torch.nn.functional.grouped_mm

    def leaving(rows: torch.Tensor, grads: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        nothing = torch.diff(offs, prepend=offs.new_zeros(1)) == 0
        return own(rows, grads, offs=offs).masked_fill(nothing.view(-1, 1, 1), torch.nan)

    x, grad, at = drawn(S, K, dtype=torch.float32), drawn(S, N, dtype=torch.float32), torch.arange(S) % 2 * (E - 1)
    monkeypatch.setattr(room, "_grouped_applies", lambda *factors: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", leaving)
    torch.testing.assert_close(expert_mm_weight(x, grad, at, E), defined_weight(x, grad, at))


def test_the_grouped_product_is_for_gpus() -> None:
    assert not room._grouped_applies(drawn(S, K, dtype=torch.bfloat16), drawn(E, K, 16, dtype=torch.bfloat16))
