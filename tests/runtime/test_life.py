"""Whatever a training loop does to a program, in any order, it stays what one device has."""

from __future__ import annotations

import pytest

from tests._support import life


@pytest.mark.parametrize("seed", range(6))
def test_any_life_is_one_devices(seed: int) -> None:
    life.run(seed, two_axes=False)


@pytest.mark.parametrize("seed", range(3))
def test_any_life_on_two_axes_is_one_devices(seed: int) -> None:
    life.run(seed, two_axes=True)
