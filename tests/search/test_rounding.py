"""Largest remainder by hand, and its promises for any shares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hap.search.rounding import improve, round_shares


@pytest.mark.parametrize(
    ("shares", "n", "sizes"),
    [
        ((5, 2, 1), 8, (5, 2, 1)),
        ((0.5, 0.3, 0.2), 8, (4, 2, 2)),  # ideals 4, 2.4, 1.6: the atom left goes to the last
        ((1, 1, 1, 1), 6, (2, 2, 1, 1)),  # ties to the lower rank
        ((0.6, 0.1, 0.1, 0.1, 0.1), 2, (2, 0, 0, 0, 0)),  # 0.2 of an atom is nothing
        ((1, 1, 1, 1), 1, (1, 0, 0, 0)),  # nobody has half an atom, yet somebody must take it
        ((0.94, 0.06), 10, (9, 1)),  # more than half an atom is an atom
        ((0.96, 0.04), 10, (10, 0)),
        ((2.9999999999 / 4, 1.0000000001 / 4), 4, (3, 1)),  # a solver's 3
    ],
)
def test_by_hand(shares: tuple[float, ...], n: int, sizes: tuple[int, ...]) -> None:
    assert round_shares(shares, n) == sizes


def test_limits_are_respected() -> None:
    assert round_shares((0.7, 0.2, 0.1), 10, at_most=(5, 10, 1)) == (5, 4, 1)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(lambda s: sum(s) > 1e-3), st.integers(1, 5000))
def test_sums_exactly_and_stays_near(shares: list[float], n: int) -> None:
    sizes = round_shares(shares, n)
    assert sum(sizes) == n
    for share, size in zip(shares, sizes, strict=True):
        ideal = share / sum(shares) * n
        assert size > ideal - 1 - 1e-6 and (ideal >= 0.5 - 1e-6 or size <= n)
        if ideal < 0.49 and n > len(shares):
            assert size == 0


def test_moves_atoms_while_it_helps() -> None:
    """Two ranks, the second three times as fast, 8 atoms: (2, 6) is best; a bundle moves as one."""

    def seconds(sizes):  # type: ignore[no-untyped-def]
        return 0.0, float(sum(max(sizes[g][0], sizes[g][1] / 3) for g in ("a", "b")))

    start = {"a": (4, 4), "b": (4, 4)}
    assert improve(start, [("a", "b")], seconds, evaluations=50) == {"a": (2, 6), "b": (2, 6)}
    assert improve(start, [("a", "b")], seconds, evaluations=1) == start
