"""``y[row] += expert(x[row])`` by ids of which several are of one row: these must be known to be distinct, as PyTorch
adds only one of two that are alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hap.capture import capture
from hap.errors import CaptureError
from tests.capture.equality import assert_equals_eager
from tests.capture.mixtures import EXPERTS, Mixture, T, Then, batch, mixture


def by(find: Callable[[T], T], *, index_add: bool = False) -> Then:
    """``find`` makes ids (rows, any number) of the router's scores (rows, experts)."""

    def then(m: Mixture, x: T, _: T) -> T:
        scores, y = m.router(x).softmax(-1), torch.zeros_like(x)
        ids = find(scores)
        for e, expert in enumerate(m.experts):
            row, _nth = torch.where(ids == e)
            if index_add:
                y.index_add_(0, row, expert(x[row]))
            else:
                y[row] += expert(x[row])
        return y * scores.sum(-1, keepdim=True)

    return then


DISTINCT: dict[str, Callable[[T], T]] = {
    "topk": lambda s: s.topk(2, dim=-1)[1],
    "topk by name": lambda s: torch.topk(s, k=3, dim=1, sorted=False).indices,
    "sort": lambda s: s.sort(-1, True)[1][:, :2],
    "argsort": lambda s: s.argsort(descending=True)[..., 1:3],
    "other dtypes": lambda s: s.topk(2)[1].int().contiguous().long().detach().clone(),
    "rows in two dims": lambda s: s.view(3, 4, -1).topk(2)[1].view(-1, 2),
    "rows in two dims, flattened": lambda s: s.view(3, 4, -1).topk(2)[1].flatten(0, 1),
    "turned": lambda s: s.t().topk(2, 0)[1].t(),
    "turned, as an attribute": lambda s: s.T.topk(2, 0)[1].T,
    "a dim between": lambda s: s.unsqueeze(1).topk(2)[1].squeeze(1),
    "a chunk": lambda s: s.argsort().chunk(2, -1)[1],
    "a split": lambda s: s.argsort().split([1, 3], dim=-1)[1],
    "some are for none": lambda s: s.topk(2)[1].masked_fill(s[:, :2] < 0.2, -1),
    "some are for none, by name": lambda s: s.topk(2)[1].type(torch.int32).masked_fill(s[:, :2] < 0.2, value=-1),
    "some are for none, by where": lambda s: torch.where(s[:, :2] > 0.2, s.topk(2)[1], EXPERTS),
    "some are for none, by where the other way": lambda s: torch.where(s[:, :2] < 0.2, EXPERTS, s.topk(2)[1]),
    "counted from one": lambda s: 1 + s.topk(2)[1] - 1,
    "shifted after some were for none": lambda s: s.topk(2)[1].masked_fill(s[:, :2] < 0.2, 7) - 2,
    "one": lambda s: s.argmax(-1, keepdim=True),
    "one of any": lambda s: (s.argmax(-1)[:, None] * 3) % EXPERTS,
}
MAYBE_ALIKE: dict[str, Callable[[T], T]] = {
    "remainders": lambda s: s.topk(3)[1] % 2,
    "the best twice": lambda s: torch.stack([s.argmax(-1), s.flip(0).argmax(-1)], -1),
    "of several rows": lambda s: s.topk(2, 0)[1].reshape(-1, 2).repeat(3, 1),
    "taken apart otherwise": lambda s: s.topk(3)[1].view(-1, 2)[: len(s)],
    "some are for one": lambda s: torch.where(s[:, :3] > 0.2, s.topk(3)[1], 1),
    "some are for one, once shifted": lambda s: s.topk(3)[1].masked_fill(s[:, :3] < 0.2, 3) - 2,
    "one list for all": lambda s: s.topk(2)[1][:, [0, 0]],
    "of the same dtype": lambda s: (s[:, :2] * 3).type_as(s.topk(2)[1]),
}


@pytest.mark.parametrize("name", DISTINCT)
def test_distinct_ids_may_be_added_for(name: str) -> None:
    assert_equals_eager(mixture(by(DISTINCT[name])), batch())


@pytest.mark.parametrize("name", MAYBE_ALIKE)
def test_ids_that_may_be_alike_are_refused_in_words(name: str) -> None:
    with pytest.raises(CaptureError, match=r"ids that may name it twice for one row.* use index_add_") as caught:
        capture(mixture(by(MAYBE_ALIKE[name])), batch())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", MAYBE_ALIKE)
def test_index_add_adds_all_of_them(name: str) -> None:
    assert_equals_eager(mixture(by(MAYBE_ALIKE[name], index_add=True)), batch())


def test_ids_are_distinct_while_nobody_changes_them() -> None:
    def find(s: T) -> T:
        ids = s.topk(2)[1]
        ids.remainder_(2)
        return ids

    with pytest.raises(CaptureError, match="use index_add_"):
        capture(mixture(by(find)), batch())


def test_drawn_ids_are_distinct_without_replacement() -> None:
    capture(mixture(by(lambda s: torch.multinomial(s, 2))), batch())
    with pytest.raises(CaptureError, match="use index_add_"):
        capture(mixture(by(lambda s: torch.multinomial(s, 2, replacement=True))), batch())
