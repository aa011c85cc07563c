"""What collectives hold while they run, by hand: a whole value of 60 bytes, pieces of 30, 20 and 10."""

import numpy as np
import pytest

from hap.cost_models.staging import Pieces, reduce_landing, scatter_landing, staging_bytes
from hap.plan import Collective

UNEVEN, WHOLE = np.array([30.0, 20.0, 10.0]), np.full(3, 60.0)


def held(kind: Collective, how: str, *, cut: bool = False, across: bool = False) -> list[float]:
    source = WHOLE if kind in ("all_reduce", "reduce_scatter") else UNEVEN
    target = WHOLE if kind in ("all_reduce", "all_gather") else UNEVEN[::-1] if kind == "all_to_all" else UNEVEN
    return staging_bytes(kind, how, Pieces(source, target, WHOLE, cut, across, 3)).tolist()


@pytest.mark.parametrize(
    ("kind", "how", "expected"),
    [
        ("all_gather", "all_to_all", [60 + 30, 40 + 40, 20 + 50]),  # twice its piece sent, the others' received
        ("all_gather", "padded", [30 + 90] * 3),
        ("all_gather", "broadcast", [0, 0, 0]),
        ("reduce_scatter", "all_to_all_sum", [60 + 90, 60 + 60, 60 + 30]),
        ("reduce_scatter", "padded", [60 + 90 + 30] * 3),
        ("reduce_scatter", "pairs", [60 + 30, 60 + 20, 60 + 10]),  # two landed, before the result is cloned
        # every rank adds to its own piece and to that of the rank before it; then its own is cloned
        ("reduce_scatter", "ring", [60 + 40 - 30, 60 + 50 - 20, 60 + 30 - 10]),
        ("all_reduce", "ring", [0, 0, 0]),
        ("all_reduce", "owners", [40, 40, 40]),  # two partial sums of a third each
        ("all_reduce", "owners[0]", [120, 0, 0]),
        ("all_to_all", "pairs", [30, 20, 10]),  # what is sent; what arrives is the result
        ("slice", "local", [0, 0, 0]),
    ],
)
def test_pieces_in_order(kind: Collective, how: str, expected: list[float]) -> None:
    assert held(kind, how) == expected


def test_pieces_that_lie_across_the_memory() -> None:
    assert held("all_gather", "broadcast", across=True) == [60, 60, 60]
    assert held("all_to_all", "direct", across=True) == [30, 20, 30]
    assert held("all_to_all", "direct", cut=True, across=True) == [60 - 10, 20, 30]


def test_equal_pieces_need_no_padding() -> None:
    even = Pieces(WHOLE, np.full(3, 20.0), WHOLE, cut=False, across=False, ranks=3)
    assert staging_bytes("reduce_scatter", "padded", even).tolist() == [60 + 20] * 3


def test_landing_follows_the_trees() -> None:
    """Up a relay by rank 0: 1's and 2's sums come to 0, which adds the other's; 0's own come from both."""
    assert scatter_landing("relay[0]", 3).tolist() == [[2, 1, 1], [0, 1, 0], [0, 0, 1]]
    assert reduce_landing("two_level[0,1|2]", 3).sum() == pytest.approx(2)
