"""Whatever a training loop does to a program, in any order, it stays what one device has."""

from __future__ import annotations

import pytest

from tests._support import life


@pytest.mark.parametrize("seed", [0, 4, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3, 5, 6, 7))])
def test_any_life_is_one_devices(seed: int) -> None:
    life.run(seed, two_axes=False)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
def test_any_life_on_two_axes_is_one_devices(seed: int) -> None:
    life.run(seed, two_axes=True)
