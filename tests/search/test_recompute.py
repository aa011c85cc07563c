"""Nothing is repeated where all fits, as little as will do where it does not, and more where that is faster."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from hap.conversion import find_needs
from hap.cost_models.evaluate import evaluate
from hap.errors import InfeasibleError
from hap.graph import Graph
from hap.plan import Plan, Strategy
from hap.report.explain import explain
from hap.report.summary import summarize
from hap.rules.choices import Choices, choices, replicated
from hap.search import Pins, plan_graph, planner, recompute
from hap.search.blocks import find_blocks
from hap.search.found import Found
from hap.search.judge import as_run_s
from hap.search.limits import HASTY, LIMITS, Limits
from hap.search.planner import Search
from hap.search.problem import Problem
from hap.search.recompute import after_steps, or_repeating, steps_of, thinned
from tests.search.models import cluster
from tests.search.test_blocks import LAYERS, tower
from tests.search.test_keeping import model as keeping


@cache
def found() -> Choices:
    return choices(tower())


def on_one(memory: int) -> Plan:
    """Planned for one device of so many usable bytes."""
    return plan_graph(found(), cluster((10, f"{memory * 10 // 9 + 1}B")), effort="quick")


@cache
def needed() -> int:
    """Bytes of a step that repeats nothing."""
    (nbytes,) = on_one(10**9).predicted.memory_bytes
    return nbytes


def taken(plan: Plan) -> int:
    """How many steps the plan has taken."""
    blocks = find_blocks(tower())
    return next(n for n in range(1 + len(steps_of(blocks))) if after_steps(blocks, n) == plan.recomputed)


def judged(plan: Plan, steps: int, graph: Graph) -> int:
    """Bytes of the plan's step on its one device, had it taken so many steps."""
    strategies = {name: Strategy.parse(text) for name, text in plan.strategies.items()}
    calls = [name for r in after_steps(find_blocks(graph), steps) for name in r.calls]
    needs = find_needs(graph, strategies)
    (nbytes,) = evaluate(
        graph, strategies, plan.sizes, cluster((10, "1GB")), needs=needs, recomputed=calls
    ).memory_bytes
    return nbytes


# ------------------------------------------------------------------------------------------------ steps


def test_first_what_is_cheap_of_every_block_then_all_of_each() -> None:
    blocks = find_blocks(tower())
    steps = steps_of(blocks)
    assert steps == tuple((i, what) for what in ("cheap", "all") for i in range(LAYERS))
    assert [r.what for r in after_steps(blocks, LAYERS + 1)] == ["all", "cheap", "cheap", "cheap"]
    assert after_steps(blocks, 0) == ()


# ------------------------------------------------------------------------------------------------ fitting


def test_a_plan_that_fits_repeats_nothing() -> None:
    plan = on_one(needed())
    assert plan.recomputed == () and "recomputed" not in plan.to_json()


@pytest.mark.parametrize("part", [0.99, 0.8, 0.7])
def test_what_was_refused_is_planned_with_as_little_as_will_do(part: float) -> None:
    room = int(part * needed())
    plan = on_one(room)
    steps = taken(plan)
    assert plan.predicted.memory_bytes[0] <= room
    assert steps > 0 and judged(plan, steps, tower()) == plan.predicted.memory_bytes[0]
    assert judged(plan, steps - 1, tower()) > room
    assert plan.provenance.solver["kept_memory_bytes"] == [needed()]


def test_less_memory_takes_more_steps_and_more_seconds() -> None:
    plans = [on_one(int(part * needed())) for part in (1.0, 0.9, 0.8, 0.7)]
    assert [taken(p) for p in plans] == sorted(taken(p) for p in plans)
    seconds = [p.predicted.as_run_s for p in plans]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


def test_the_integer_program_sees_nearly_what_the_ledger_finds() -> None:
    """At its few moments; never more, so that nothing is given up that would fit."""
    everything = after_steps(find_blocks(tower()), 2 * LAYERS)
    whole = {n.name: replicated(n) for n in tower().nodes}
    plain = Problem.state(found(), cluster((10, "1GB")), "adamw", Pins())
    for problem in (plain, plain.repeating(everything)):
        held = [problem.facts.held(name, strategy) for name, strategy in whole.items()]
        seen = sum(nbytes * moments[:, 0] for kept in held for _, nbytes, moments in kept).max()  # type: ignore[union-attr]
        (peak,) = problem.judge(whole, {}, False).memory_bytes
        assert 0.85 * peak < seen <= peak
    assert peak < 0.7 * needed()


def test_what_does_not_fit_even_so_is_refused_in_one_line() -> None:
    with pytest.raises(InfeasibleError, match=r"; activations are computed again in the backward pass already$"):
        on_one(int(0.6 * needed()))


def test_the_plan_is_the_same_every_time_and_read_back() -> None:
    plan = on_one(int(0.8 * needed()))
    again = on_one(int(0.8 * needed()))
    assert plan.to_json() == again.to_json()
    assert Plan.from_json(plan.to_json()) == plan


def test_ctrl_c_returns_what_was_found_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps taken, as nobody has asked yet how few would do."""
    room = int(0.8 * needed())

    def interrupted(problem: Problem, best: Found, limits: Limits) -> Found:
        raise KeyboardInterrupt

    monkeypatch.setattr("hap.search.planner.polish", interrupted)
    plan = on_one(room)
    assert plan.provenance.solver["stopped"] is True
    assert taken(plan) == 2 * LAYERS and plan.predicted.memory_bytes[0] <= room


def everything_repeated() -> Search:
    """On one device with room for most of a step that repeats nothing."""
    on = cluster((10, f"{int(0.9 * needed()) * 10 // 9 + 1}B"))
    problem = Problem.state(found(), on, "adamw", Pins())
    return Search(problem.repeating(after_steps(find_blocks(tower()), 2 * LAYERS)), LIMITS["normal"])


def test_the_same_choice_takes_its_own_time_with_and_without_repeating() -> None:
    """Where nothing fits, searches that repeat calls and such that do not share what they have met."""
    search = everything_repeated()
    first = search.glance()
    assert first is not None and first.recomputed
    kept = search.problem.facts.evaluator.evaluate(first.strategies, first.sizes, regather=first.regather)
    same = replace(first, evaluation=kept, recomputed=())
    with_s, without_s = (as_run_s(search.chooser, f) for f in (first, same))
    assert without_s < 0.95 * with_s
    assert as_run_s(everything_repeated().chooser, same) == without_s


@pytest.mark.parametrize("as_run", [True, False])
def test_what_fewer_devices_take_is_asked_with_as_little_repeated_as_it_needs(as_run: bool) -> None:
    """As the plan is that it is compared with."""
    search = everything_repeated()
    first = search.glance()
    assert first is not None
    best = thinned(search.problem, first)
    alone_s = search.alone_s(search.problem, HASTY, as_run=as_run)
    assert best.cost[1] < 0.98 * first.cost[1]
    assert alone_s == (as_run_s(search.chooser, best) if as_run else best.cost[1])


# ------------------------------------------------------------------------------------------------ faster


def test_a_fast_device_with_little_memory_repeats_rather_than_idles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times as fast, it has room for 0.56 of what a whole batch keeps. Without repeating it could not take the
    five sixths that its speed asks for, and the best plan is at least a fifth slower."""
    keeping: list[tuple[Found, float | None]] = []

    def watched(search: Search, best: Found, seconds: float | None) -> tuple[Found, float | None]:
        keeping.append((best, seconds))
        return or_repeating(search, best, seconds)

    monkeypatch.setattr("hap.search.planner.or_repeating", watched)
    many = choices(tower(65536, 64, 2))
    whole = 455_000_000  # bytes of its step on one device
    on = cluster((10, f"{int(0.62 * whole)}B"), (2, "100GB"), network="100GB/s", latency="1us")
    plan = plan_graph(many, on, effort="quick")
    ((best, seconds),) = keeping
    assert best.fits and not best.recomputed and seconds is not None and plan.recomputed
    batch = next(g for g in plan.groups.values() if g.label == "batch")
    assert batch.sizes[0] > 0.75 * batch.n
    assert plan.predicted.as_run_s < 0.8 * seconds


# ------------------------------------------------------------------------------------------------ in words


def test_it_is_said_in_words() -> None:
    plan = on_one(int(0.8 * needed()))
    kinds = [r.what for r in plan.recomputed]
    assert kinds.count("cheap") > 1
    said = f"what is cheap of {kinds.count('cheap')} blocks"
    for text in (summarize(plan), explain(plan)):
        assert "omputed again in the backward pass instead of being kept: " in text and said in text
        assert "otherwise " in text
    assert "again in the backward" not in summarize(on_one(needed()))


def test_where_parameters_are_gathered_twice_it_is_asked_whether_repeating_makes_room_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what fits of both is taken."""
    monkeypatch.setattr(planner, "SMALL", 0)
    devices = cluster((10, "181MB"), (20, "181MB"), (20, "181MB"), network="1GB/s")
    search = Search(Problem.state(keeping(), devices, "adamw", Pins()), LIMITS["quick"])
    best = search.glance()
    assert best is not None and best.fits and best.regather
    again = recompute._repeating(search)
    assert again is not None
    first = recompute._first(again, best)
    assert {met.regather for met in again.met} == {True, False}
    assert first is not None and first.cost == min(met.cost for met in again.met if met.fits)
