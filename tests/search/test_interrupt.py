"""Ctrl-C returns the best plan so far; a line on a terminal tells how far a search is."""

from __future__ import annotations

import io

import pytest

from hap.search import plan_graph
from hap.search.progress import Progress
from hap.search.strategies import Chooser
from tests.search.models import cluster, mlp

MODEL = mlp(batch=64, width=64)
CLUSTER = cluster((10, "16GB"), (5, "16GB"))


def interrupt_after(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """Ctrl-C while the program after so many is being solved."""
    solve, asked = Chooser._choose, [0]

    def choose(self: Chooser, *args: object) -> object:
        asked[0] += 1
        if asked[0] > programs:
            raise KeyboardInterrupt
        return solve(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Chooser, "_choose", choose)


def test_the_best_plan_so_far_is_returned_with_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, 1)
    plan = plan_graph(MODEL, CLUSTER)
    assert plan.provenance.solver["stopped"] is True and plan.provenance.solver["milps"] == 1
    assert plan.predicted.lower_bound_s is not None and plan.predicted.gap is not None
    assert plan.predicted.lower_bound_s <= plan.predicted.step_s


def test_without_a_plan_it_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, 0)
    with pytest.raises(KeyboardInterrupt):
        plan_graph(MODEL, CLUSTER)


def test_a_search_that_was_not_stopped_does_not_say_so() -> None:
    assert "stopped" not in plan_graph(MODEL, CLUSTER).provenance.solver


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_search_tells_a_terminal_and_leaves_it_as_it_was() -> None:
    terminal = Terminal()
    progress = Progress(terminal, after_s=0.0)
    progress.say("start 1, round 1")
    progress.say("round 2")
    progress.done()
    first, second, blank, rest = terminal.getvalue().split("\r")[1:]
    assert first == "planning, 0 s: start 1, round 1"
    assert second == "planning, 0 s: round 2".ljust(len(first))
    assert blank == " " * len("planning, 0 s: round 2") and rest == ""


@pytest.mark.parametrize(("stream", "after_s"), [(io.StringIO(), 0.0), (Terminal(), 60.0)])
def test_no_line_for_a_file_or_a_short_search(stream: io.StringIO, after_s: float) -> None:
    progress = Progress(stream, after_s=after_s)
    progress.say("start 1")
    progress.done()
    assert stream.getvalue() == ""
