"""Ctrl-C and a spent budget return the best plan so far; a line on a terminal tells how far a search is."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest

from hap.errors import PlanError
from hap.plan import Plan
from hap.report.summary import summarize
from hap.search import Pins, astar, fewer, plan_graph, planner
from hap.search.fewer import Tried
from hap.search.limits import HASTY, LIMITS
from hap.search.planner import Search
from hap.search.problem import Problem
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


def looks() -> Callable[[], float]:
    """A clock that goes on by a second whenever it is looked at, and by nothing else."""
    numbers = count()
    return lambda: float(next(numbers))


def plan_within(monkeypatch: pytest.MonkeyPatch, budget_s: float | None) -> Plan:
    """Searched under that clock: the first look is the beginning."""
    monkeypatch.setattr(planner, "Progress", partial(Progress, io.StringIO(), clock=looks()))
    return plan_graph(MODEL, CLUSTER, budget_s=budget_s)


def test_a_budget_stops_the_search_and_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at twice for every round and once before every program: the first program begins at 3, the second would
    begin at 6."""
    plan = plan_within(monkeypatch, 5.0)
    solver = plan.provenance.solver
    assert (solver["stopped"], solver["budget_s"], solver["milps"]) == (True, 5.0, 1)
    assert plan.predicted.gap is not None
    assert "the search was stopped by its budget of 5 s, so another run may find another plan" in summarize(plan)


def test_a_budget_is_looked_at_while_states_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first program, which would be ready before the budget is looked at for a second one."""
    monkeypatch.setattr(planner, "Progress", partial(Progress, io.StringIO(), clock=looks()))
    plan = plan_graph(MODEL, CLUSTER, method="astar", budget_s=8.0)
    assert plan.provenance.solver["milps"] > 0
    monkeypatch.setattr(planner, "Progress", partial(Progress, io.StringIO(), clock=looks()))
    monkeypatch.setattr(astar, "LOOK", 1)
    with pytest.raises(PlanError, match=r"^no plan was found within the budget of 8s; give more, or no budget$"):
        plan_graph(MODEL, CLUSTER, method="astar", budget_s=8.0)


def test_a_plan_that_was_ready_in_time_is_the_plan_without_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_within(monkeypatch, 1e6).to_json() == plan_within(monkeypatch, None).to_json()


def test_an_interrupt_is_told_without_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, 1)
    assert "the search was interrupted, so another run may find another plan" in summarize(
        plan_graph(MODEL, CLUSTER, budget_s=1e6)
    )


def test_a_budget_too_small_for_any_plan_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^no plan was found within the budget of 1ns; give more, or no budget$"):
        plan_graph(MODEL, CLUSTER, budget_s=1e-9)


@pytest.mark.parametrize(("budget_s", "said"), [(0.0, "0"), (-1.0, "-1"), (float("inf"), "inf"), (float("nan"), "nan")])
def test_a_budget_that_is_none_is_refused(budget_s: float, said: str) -> None:
    with pytest.raises(PlanError, match=f"^the budget must be a number of seconds above 0, not {said}$"):
        plan_graph(MODEL, CLUSTER, budget_s=budget_s)


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


def test_a_glance_at_fewer_devices_looks_at_the_budget_too() -> None:
    """Of the search that it is for: at the beginning, and before every program."""
    problem, looked = Problem.state(MODEL, CLUSTER, "adamw", Pins()), [0]

    def look() -> None:
        looked[0] += 1
        if looked[0] > 1:
            raise KeyboardInterrupt

    search = Search(problem, LIMITS["normal"], progress=Progress(asked=look))
    with pytest.raises(KeyboardInterrupt):
        search.alone_s(problem, HASTY, as_run=True)
    assert looked[0] == 2 and search.chooser.milps == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_process_is_ended_where_the_next_one_could_not_be_made(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Stub] = []

    class Stub:
        closed = False

        def __init__(self, *_: object, **__: object) -> None:
            if made:
                raise error
            made.append(self)

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(fewer, "Beside", Stub)
    monkeypatch.setattr(fewer, "FEWEST_NODES", 0)
    monkeypatch.setattr(fewer, "MANY", 1)
    tried = Tried([Search(Problem.state(MODEL, CLUSTER, "adamw", Pins()), LIMITS["normal"])])
    with pytest.raises(error):
        tried.nest()
    tried.close()
    assert [one.closed for one in made] == [True]
