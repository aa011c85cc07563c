"""Whatever a training loop does to a program, in any order, it stays what one device has."""

from __future__ import annotations

import pytest

from tests._support import life


@pytest.mark.parametrize("seed", [0, 1, 4, 5, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3, 6, 7))])
def test_any_life_is_one_devices(seed: int) -> None:
    life.run(seed, two_axes=False)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_any_life_on_two_axes_is_one_devices(seed: int) -> None:
    life.run(seed, two_axes=True)
