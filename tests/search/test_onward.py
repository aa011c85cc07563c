"""From the plan that was chosen one more round is made, as long as its step as run gets shorter."""

from __future__ import annotations

import pytest

from hap.search.found import Found, used_groups
from hap.search.judge import as_run_s
from hap.search.limits import LIMITS
from hap.search.onward import like_the_batch, onward
from hap.search.pins import Pins
from hap.search.problem import Problem
from hap.search.strategies import Chooser
from tests.search.models import cluster, mlp

WIDE = mlp(batch=1 << 16, width=64)  # gradients are nothing beside what they are made of
BATCH = next(name for name, group in WIDE.groups.items() if group.label == "batch")
ROWS = next(name for name in WIDE.groups if name != BATCH)
THREE_TO_ONE = cluster((0.03, "64GB"), (0.01, "64GB"), network="100GB/s")


def evenly(pins: Pins | None = None) -> tuple[Chooser, Found]:
    """What is chosen where every group is split in halves."""
    chooser = Chooser(Problem.state(WIDE, THREE_TO_ONE, "adamw", pins or Pins()), LIMITS["normal"])
    found = chooser.strategies({name: (group.n // 2,) * 2 for name, group in WIDE.groups.items()}, False, ())
    assert found is not None and set(used_groups(found.strategies.values())) == {BATCH}
    return chooser, found


def test_from_even_shares_to_those_by_speed() -> None:
    """Half of the batch takes the slower device 1/2 / 1, three quarters the faster one 3/4 / 3: half as long."""
    chooser, even = evenly()
    before_s = as_run_s(chooser, even)
    found, seconds = onward(chooser, even, before_s)
    assert found.sizes[BATCH] == pytest.approx((3 << 14, 1 << 14), rel=0.01)
    assert seconds == as_run_s(chooser, found) == pytest.approx(before_s / 2, rel=0.01)


def test_from_where_nothing_is_gained_nothing_changes() -> None:
    chooser, even = evenly()
    best = onward(chooser, even, as_run_s(chooser, even))
    again = onward(chooser, *best)
    assert again[0] is best[0] and again[1] == best[1]


def test_pinned_shares_stay() -> None:
    chooser, even = evenly(Pins(ratios=(1, 1)))
    found, _ = onward(chooser, even, as_run_s(chooser, even))
    assert found.sizes == even.sizes


def test_groups_that_no_strategy_uses_are_dealt_out_like_the_batch() -> None:
    chooser, even = evenly()
    found = chooser.strategies(even.sizes | {BATCH: (3 << 14, 1 << 14)}, False, ())
    assert found is not None and found.sizes[ROWS] == (32, 32)
    assert like_the_batch(chooser.problem, found) == {
        name: (3 << 14, 1 << 14) if name == BATCH else (48, 16) for name in WIDE.groups
    }
