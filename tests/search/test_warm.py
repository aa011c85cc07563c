"""The relaxation that is kept in a simplex solver finds what branching from nothing finds."""

import itertools
import random

import numpy as np
import pytest
from ortools.math_opt import model_pb2

from hap.fabric import Array
from hap.placement import GroupSizes
from hap.search.branches import RELAXED
from hap.search.milp import Choice, choose
from hap.search.pins import Pins
from hap.search.problem import Problem
from hap.search.protos import KeptSolver, Solution, fill_matrix
from hap.search.rounding import round_shares
from hap.search.tables import Prices
from hap.search.warm import WarmProgram
from tests.search.models import cluster, mlp


def sized(problem: Problem, rng: random.Random) -> GroupSizes:
    ratios = [rng.random() + 0.01 for _ in range(problem.world_size)]
    return {name: round_shares(ratios, g.n) for name, g in problem.choices.groups.items()}


@pytest.mark.parametrize("seed", range(4))
def test_the_same_objective_as_branching_from_nothing(seed: int) -> None:
    """Sizes change from one solution to the next; every other time the first parameter must stay whole."""
    rng = random.Random(seed)
    devices = cluster((1, "1GB"), (2, "1GB"), (4, "1GB"), network=rng.choice(["50MB/s", "1GB/s", "20GB/s"]))
    problem = Problem.state(mlp(16, 16, 3), devices, "adamw", Pins())
    tables, capacity = problem.tables(False), np.full(3, 1e9)
    first = problem.classes.of[problem.choices.graph.sources("parameter")[0].name]
    for number in range(6):
        prices = Prices(tables, sized(problem, rng), capacity)
        forced = {first: (0,)} if number % 2 else None
        kept = choose(tables.skeleton, prices, forced=forced, barriers=True, warm=True)
        anew = choose(tables.skeleton, prices, forced=forced, barriers=True)
        assert kept is not None and anew is not None
        assert kept.objective_s == pytest.approx(anew.objective_s, rel=1e-6)
        assert (kept.variables, kept.rows, kept.status) == (anew.variables, anew.rows, anew.status)
        assert forced is None or kept.picks[first] == 0


def test_memory_is_asked_about_where_the_cheapest_does_not_fit() -> None:
    problem = Problem.state(mlp(16, 64, 2), cluster((1, "1GB"), (1, "1GB")), "adamw", Pins())
    tables, sizes = problem.tables(False), {n: round_shares([1, 1], g.n) for n, g in problem.choices.groups.items()}
    roomy = choose(tables.skeleton, Prices(tables, sizes, np.full(2, 1e9)), barriers=True, warm=True)
    assert roomy is not None
    found = Prices(tables, sizes, np.full(2, 1e9)).coefficients()
    picked = np.zeros(len(tables.skeleton.names))
    for terms, pick in zip(tables.skeleton.x, roomy.picks, strict=True):
        picked[terms[pick]] = 1.0
    tight = Prices(tables, sizes, np.full(2, 0.6 * (found.held_bytes @ picked).max()))
    kept = choose(tables.skeleton, tight, barriers=True, warm=True)
    anew = choose(tables.skeleton, tight, barriers=True)
    assert kept is not None and anew is not None and kept.objective_s > roomy.objective_s
    assert (kept.picks, kept.rows, kept.status) == (anew.picks, anew.rows, anew.status)
    assert (kept.objective_s, kept.bound_s) == pytest.approx((anew.objective_s, anew.bound_s))


def program(cost: list[float], *, odd: bool) -> model_pb2.ModelProto:
    """Three decisions of which, if ``odd``, any two are at most one: half of each is the relaxed optimum."""
    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(3))
    proto.variables.lower_bounds.extend([0.0] * 3)
    proto.variables.upper_bounds.extend([1.0] * 3)
    proto.variables.integers.extend([True] * 3)
    proto.objective.linear_coefficients.ids.extend(range(3))
    proto.objective.linear_coefficients.values.extend(cost)
    rows = ((0, 1), (1, 2), (0, 2)) if odd else ((0, 1),)
    proto.linear_constraints.ids.extend(range(len(rows)))
    proto.linear_constraints.lower_bounds.extend([-np.inf] * len(rows))
    proto.linear_constraints.upper_bounds.extend([1.0] * len(rows))
    for row, columns in enumerate(rows):
        proto.linear_constraint_matrix.row_ids.extend([row] * 2)
        proto.linear_constraint_matrix.column_ids.extend(columns)
        proto.linear_constraint_matrix.coefficients.extend([1.0] * 2)
    return proto


def test_a_point_between_is_not_taken() -> None:
    """Half of each is worth 1.5, and as one of them is enough to be at most one of two, a whole one is worth 1."""
    point = WarmProgram(program([-1.0, -1.0, -1.0], odd=True)).solve(np.array([-1.0, -1.0, -1.0]))
    assert point is not None and sorted(point.values.tolist()) == pytest.approx([0, 0, 1])
    assert (point.objective, point.bound) == pytest.approx((-1.0, -1.0))


@pytest.mark.parametrize(("gap", "proved"), [(0.6, -1.5), (0.4, -1.0)])
def test_a_point_between_is_completed_where_that_costs_little(gap: float, proved: float) -> None:
    """Half of each is worth 1.5, one alone 1, half of 1 less: near enough, or else everything is branched on."""
    point = WarmProgram(program([-1.0, -1.0, -1.0], odd=True)).solve(np.array([-1.0, -1.0, -1.0]), gap=gap)
    assert point is not None and sorted(point.values.tolist()) == pytest.approx([0, 0, 1])
    assert (point.objective, point.bound) == pytest.approx((-1.0, proved))


def covering(cost: Array, held: Array, enough: Array) -> model_pb2.ModelProto:
    """Things that cost (V,) and hold (K, V): which to take so that all they hold is ``enough`` (K,)."""
    proto, (many, width) = model_pb2.ModelProto(), held.shape
    proto.variables.ids.extend(range(width))
    proto.variables.lower_bounds.extend([0.0] * width)
    proto.variables.upper_bounds.extend([1.0] * width)
    proto.variables.integers.extend([True] * width)
    proto.objective.linear_coefficients.ids.extend(range(width))
    proto.objective.linear_coefficients.values.extend(cost.tolist())
    proto.linear_constraints.ids.extend(range(many))
    proto.linear_constraints.lower_bounds.extend(enough.tolist())
    proto.linear_constraints.upper_bounds.extend([np.inf] * many)
    fill_matrix(proto, [], held, 0)
    return proto


def test_what_reduced_costs_rule_out_is_in_no_better_choice() -> None:
    """The cheapest of all 4096 ways to take of twelve things. Rounded, the relaxed optimum is often dearer, and
    sometimes takes too little, which is no answer."""
    ways, solved = np.array(list(itertools.product((0.0, 1.0), repeat=12))), 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        cost, held = rng.integers(1, 30, 12).astype(np.float64), rng.integers(0, 9, (3, 12)).astype(np.float64)
        enough = 0.43 * held.sum(axis=1)
        least = (ways @ cost)[(ways @ held.T >= enough).all(axis=1)].min()
        point = WarmProgram(covering(cost, held, enough)).solve(cost)
        if point is not None:
            solved += 1
            assert (point.objective, point.bound) == pytest.approx((least, least))
            assert (held @ point.values >= enough).all() and point.values @ cost == pytest.approx(least)
    assert solved >= 15


def test_asked_for_the_same_again_nothing_is_solved() -> None:
    cost, upper = np.array([-3.0, -2.0, -1.0]), np.ones(3)
    warm = WarmProgram(program([0.0, 0.0, 0.0], odd=True))
    first = warm.solve(cost, upper, gap=0.7)
    assert first is not None and warm.solve(cost.copy(), upper.copy(), gap=0.7) is first
    assert warm.solve(cost, upper) is not first and first.bound == pytest.approx(-3.0)
    exact = warm.solve(cost, upper)
    assert exact is not None and (exact.objective, exact.bound) == pytest.approx((-3.0, -3.0))


def test_upper_bounds_change_and_the_optimum_with_them() -> None:
    """Either of the first two, and the third; without the first, without the third; and all of it again."""
    cost = np.array([-3.0, -2.0, -1.0])
    warm = WarmProgram(program([0.0, 0.0, 0.0], odd=False))
    for upper, taken in (([1, 1, 1], [1, 0, 1]), ([0, 1, 1], [0, 1, 1]), ([1, 1, 0], [1, 0, 0]), (None, [1, 0, 1])):
        point = warm.solve(cost, None if upper is None else np.array(upper, dtype=np.float64))
        assert point is not None and point.values.tolist() == pytest.approx(taken)
        assert point.objective == pytest.approx(cost @ taken) == point.bound


def test_the_objective_changes_and_the_optimum_with_it() -> None:
    warm = WarmProgram(program([-1.0, -2.0, 1.0], odd=False))
    for cost, least, taken in (([-1.0, -2.0, 1.0], -2.0, [0, 1, 0]), ([-3.0, -2.0, -1.0], -4.0, [1, 0, 1])):
        point = warm.solve(np.array(cost))
        assert point is not None and point.objective == pytest.approx(least) == point.bound
        assert point.values.tolist() == pytest.approx(taken)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the simplex method, of one solution after another."""
    found: list[int] = []
    solve = KeptSolver.solve

    def watched(self: KeptSolver, *given: object, **options: object) -> Solution | None:
        solved = solve(self, *given, **options)  # type: ignore[arg-type]
        found.append(self.steps)
        return solved

    monkeypatch.setattr(KeptSolver, "solve", watched)
    return found


def test_what_was_asked_before_is_known(steps: list[int]) -> None:
    """Costs are the same, options are forced and freed again."""
    problem = Problem.state(mlp(16, 16, 3), cluster((1, "1GB"), (4, "1GB")), "adamw", Pins())
    tables, first = problem.tables(False), problem.classes.of[problem.choices.graph.sources("parameter")[0].name]
    prices, found = Prices(tables, problem.round({}, (0.2, 0.8), (0.2, 0.8)), np.full(2, 1e9)), list[Choice | None]()
    for forced in (None, {first: (0,)}, {first: (1,)}, None, {first: (0,)}):
        found.append(choose(tables.skeleton, prices, forced=forced, barriers=True, warm=True))
    assert None not in found and len(steps) == 3 and steps[2] > 0
    assert found[3:] == found[:2]


def test_it_begins_at_the_most_alike_objective_whatever_its_scale(steps: list[int]) -> None:
    """And a solver that is there already, of whose program only bounds change, is asked first."""
    rng = np.random.default_rng(1)
    one, other = (rng.integers(1, 30, 40).astype(np.float64) for _ in range(2))
    held = rng.integers(0, 9, (3, 40)).astype(np.float64)
    asked = covering(one, held, 0.4 * held.sum(axis=1))
    asked.variables.integers[:] = [False] * 40
    warm = WarmProgram(asked)
    for cost in (one, other, 3.0 * one):
        assert warm.solve(cost) is not None
    assert steps[0] > 0 and steps[1] > 0 and steps[2] == 0
    assert warm._nearest(2.0 * other, warm.upper) is warm._ended[1].basis
    solvers = warm._solvers[:]
    assert [s.cost.tolist() for s in solvers] == [one.tolist(), other.tolist(), (3.0 * one).tolist()]
    limited = warm.upper.copy()
    limited[np.flatnonzero(one == one.min())[:1]] = 0.0
    assert warm.solve(other, limited) is not None
    assert len(warm._solvers) == 3 and warm._solvers[-1] is solvers[1]


def test_a_program_has_no_more_solvers_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was asked longest ago is asked for something else; the optimum is the same."""
    monkeypatch.setattr("hap.search.warm.KEPT", 2)
    rng = np.random.default_rng(2)
    costs = [rng.integers(1, 30, 40).astype(np.float64) for _ in range(4)]
    held = rng.integers(0, 9, (3, 40)).astype(np.float64)
    asked = covering(costs[0], held, 0.4 * held.sum(axis=1))
    warm = WarmProgram(asked)
    for cost in costs:
        found, alone = warm.solve(cost), WarmProgram(asked).solve(cost)
        assert found is not None and alone is not None and found.objective == pytest.approx(alone.objective)
    assert [s.cost.tolist() for s in warm._solvers] == [c.tolist() for c in costs[2:]]


def test_above_what_no_point_may_cost_nothing_is_solved_to_the_end() -> None:
    """A limit below the relaxation's optimum leaves no point, and it is said that this is proved; with one above it the
    same point is found as without."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        cost, held = rng.integers(1, 30, 12).astype(np.float64), rng.integers(0, 9, (3, 12)).astype(np.float64)
        asked = covering(cost, held, 0.43 * held.sum(axis=1))
        relaxed = KeptSolver(WarmProgram(asked).relaxed).solve(RELAXED)
        free = WarmProgram(asked).solve(cost)
        assert relaxed is not None
        for part, is_empty in ((0.2, True), (0.999, True), (1.001, False), (10.0, False)):
            warm = WarmProgram(asked)
            point = warm.solve(cost, below=part * relaxed.objective)
            assert warm.is_empty == is_empty
            if is_empty:
                assert point is None
            elif free is not None:
                assert point is not None and point.values.tolist() == free.values.tolist()
