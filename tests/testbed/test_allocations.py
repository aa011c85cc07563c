"""What a step holds: storages counted while they live, views not, and the least of several steps."""

from __future__ import annotations

import torch

from benchmarks.allocations import Allocations


def test_a_storage_counts_while_it_lives_and_a_view_adds_nothing() -> None:
    given, seen = torch.zeros(100), Allocations()
    seen.keep((given, given[:50]))
    with seen:
        made = given + 1
        made.view(10, 10)
        del made
        assert (seen.now, seen.peak) == (400, 800)
    seen.restart()
    assert seen.peak == 400


def test_the_least_of_several_steps_is_what_a_step_holds_itself() -> None:
    """One step in which somebody else still holds 400 bytes does not count; what a step leaves behind does."""
    steps, held, left = iter((1, 0, 1)), [], []
    seen = Allocations()

    def step() -> None:
        held.extend(torch.zeros(100) for _ in range(next(steps)))
        torch.zeros(25)
        left.append(torch.zeros(10))

    assert seen.least_peak(step, held.clear, steps=3) == 40 + 100
