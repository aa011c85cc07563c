"""Branch and bound over decisions finds what exhaustive search finds, and says honestly what it left open."""

import itertools

import numpy as np
import pytest
from ortools.math_opt import model_pb2, parameters_pb2, solution_pb2

from hap.placement import GroupSizes
from hap.search import branches, warm
from hap.search.branches import RELAXED, Branches, Part, Rises
from hap.search.milp import _device_rows, _is_too_much, _objective_ms, _priced, _stakes, choose
from hap.search.pins import Pins
from hap.search.problem import Problem
from hap.search.protos import DUAL, HIGHS, OFF, KeptSolver, Solution, branching, fill_matrix, seeded, solve_once
from hap.search.rounding import round_shares
from hap.search.tables import Prices
from hap.search.warm import WarmProgram
from tests.search.models import cluster, mlp

OPTIONS, DECISIONS, ROWS = 3, 7, 3


class Shop:
    """Seven decisions between three options each, which cost more where they hold less, and three rows of memory."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        width = OPTIONS * DECISIONS
        self.held = (rng.integers(5, 60, width) * rng.uniform(0.7, 1.3, (ROWS, width))).round(1)
        self.cost = 200.0 / self.held.mean(axis=0) + rng.integers(0, 4, width)
        self.decisions = [np.arange(OPTIONS * d, OPTIONS * (d + 1)) for d in range(DECISIONS)]
        leanest = np.sum([self.held[:, d].min(axis=1) for d in self.decisions], axis=0)
        self.limits = leanest + rng.uniform(0.0, 1.0) * (self.held.sum(axis=1) / OPTIONS - leanest)
        self.stakes = (self.held / self.limits[:, None]).max(axis=0)

    def program(self) -> model_pb2.ModelProto:
        proto, width = model_pb2.ModelProto(), OPTIONS * DECISIONS
        proto.variables.ids.extend(range(width))
        proto.variables.lower_bounds.extend([0.0] * width)
        proto.variables.upper_bounds.extend([1.0] * width)
        proto.variables.integers.extend([True] * width)
        proto.objective.linear_coefficients.ids.extend(range(width))
        proto.objective.linear_coefficients.values.extend(self.cost.tolist())
        proto.linear_constraints.ids.extend(range(DECISIONS + ROWS))
        proto.linear_constraints.lower_bounds.extend([1.0] * DECISIONS + [-np.inf] * ROWS)
        proto.linear_constraints.upper_bounds.extend([1.0] * DECISIONS + self.limits.tolist())
        fill_matrix(
            proto, [(d, int(v), 1.0) for d, own in enumerate(self.decisions) for v in own], self.held, DECISIONS
        )
        return proto

    def least(self) -> float:
        """Of all 2,187 ways to decide; infinite if none fits."""
        ways = np.array(list(itertools.product(*self.decisions)))
        fits = (self.held[:, ways].sum(axis=2) <= self.limits[:, None]).all(axis=0)
        return float(self.cost[ways].sum(axis=1)[fits].min(initial=np.inf))

    def rooted(self, solver: KeptSolver | None = None) -> tuple[KeptSolver, Part | None]:
        proto = self.program()
        proto.variables.integers[:] = [False] * len(proto.variables.ids)
        solver = solver or KeptSolver(proto)
        relaxed = solver.solve(RELAXED, reduced=True)
        return solver, None if relaxed is None else Part(np.ones(len(self.cost)), relaxed.objective, relaxed)

    def mixes(self) -> bool:
        """Whether the relaxation does."""
        _, root = self.rooted()
        return root is not None and bool((np.abs(root.known.values - root.known.values.round()) > 0.01).any())


def test_the_optimum_of_exhaustive_search() -> None:
    """Where the relaxation mixes options, too, as it mostly does; and where nothing fits, that is known."""
    mixed = empty = 0
    for seed in range(80):
        shop = Shop(seed)
        least, asked = shop.least(), WarmProgram(shop.program(), shop.decisions, shop.stakes)
        found = asked.solve(shop.cost)
        assert (found is None) == (least == np.inf) == asked.is_empty
        _, root = shop.rooted()
        empty += found is None and root is not None
        if found is not None:
            assert root is not None
            mixed += found.objective > root.bound * 1.001
            assert found.objective == pytest.approx(least, rel=1e-9)
            assert least * (1 - 2e-6) <= found.bound <= found.objective
            assert (shop.held @ found.values <= shop.limits + 1e-6).all() and found.status == "optimal"
            assert shop.cost @ found.values == pytest.approx(least, rel=1e-9)
    assert mixed >= 40 and empty >= 1, (mixed, empty)


def test_points_that_cost_as_much_as_is_said_are_none() -> None:
    """That none costs less is proved, mostly by fewer relaxations than the optimum takes."""
    asked, fewer = 0, 0
    for seed in range(40):
        shop = Shop(seed)
        least, program = shop.least(), WarmProgram(shop.program(), shop.decisions, shop.stakes)
        if least == np.inf:
            continue
        found = program.solve(shop.cost, below=least * 1.05)
        assert found is not None and found.objective == pytest.approx(least, rel=1e-9) and not program.is_empty
        assert program.solve(shop.cost, below=least * 0.999) is None and program.is_empty
        solved = []
        for below in (np.inf, least * 0.8):
            solver, root = shop.rooted()
            assert root is not None
            tree = Branches(solver, shop.decisions, shop.stakes, 1000, below)
            tree.search(root)
            solved.append(tree.solved)
        assert tree.best is None and least * 0.8 <= tree.bound
        asked += 1
        fewer += solved[1] < solved[0]
    assert asked >= 30 and fewer >= asked / 2


@pytest.mark.parametrize("most", [0, 2, 6, 12])
def test_stopped_early_the_bound_is_below_the_optimum(most: int) -> None:
    """And the best, if there is one, is a point; with no relaxation solved the bound is the root's."""
    rose = 0
    for seed in range(40):
        shop = Shop(seed)
        (solver, root), least = shop.rooted(), shop.least()
        if root is None:
            continue
        tree = Branches(solver, shop.decisions, shop.stakes, most)
        tree.search(root)
        assert tree.solved <= most + 1
        assert root.bound - 1e-6 <= tree.bound <= least * (1 + 1e-9)
        rose += tree.bound > root.bound * 1.001
        assert most or tree.bound == root.bound
        if tree.best is not None:
            assert (shop.held @ tree.best.values <= shop.limits + 1e-6).all()
            assert tree.best.objective >= least * (1 - 1e-9)
    assert (rose > 0) == (most > 0)


def test_what_is_left_open_goes_to_the_other_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "LARGE", 0)
    for seed in range(30):
        shop = Shop(seed)
        monkeypatch.setattr(warm, "WORK", 4 * len(shop.cost) ** 2)
        least, asked = shop.least(), WarmProgram(shop.program(), shop.decisions, shop.stakes)
        found = asked.solve(shop.cost)
        if found is not None:
            assert found.objective == pytest.approx(least, rel=1e-5)
            assert found.bound <= least * (1 + 1e-9)
        else:  # nothing fits, or what the relaxation has whole admits none: then the caller asks for everything
            assert least == np.inf or not asked.is_empty


def test_of_a_large_program_what_is_near_enough_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other solver is asked if there is a point."""
    monkeypatch.setattr(warm, "WORK", 0)
    monkeypatch.setattr(warm, "LARGE", 1)
    monkeypatch.setattr(warm, "NEAR", 0.02)
    monkeypatch.setattr(warm, "solve_once", None)
    near = 0
    for seed in range(60):
        shop = Shop(seed)
        least, asked = shop.least(), WarmProgram(shop.program(), shop.decisions, shop.stakes)
        if least == np.inf:
            continue
        found = asked.solve(shop.cost)
        assert found is not None
        assert (shop.held @ found.values <= shop.limits + 1e-6).all()
        assert found.bound <= least * (1 + 1e-9) and least * (1 - 1e-9) <= found.objective
        assert found.status in ("optimal", "feasible")
        near += found.status == "feasible" and found.objective - found.bound <= 0.2 * found.objective
    assert near >= 5


def test_where_no_point_is_met_in_time_one_is_looked_for_by_what_takes_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """One dive, from where the search is then: it fits, and it is what the search goes on to better."""
    monkeypatch.setattr(branches, "DIVE", 1)
    met = 0
    for seed in range(60):
        shop = Shop(seed)
        (solver, root), least = shop.rooted(), shop.least()
        if root is None:
            continue
        tree = Branches(solver, shop.decisions, shop.stakes, 2, near=1e-9)
        tree.search(root)
        if tree.best is not None:
            met += tree.solved > 2
            assert (shop.held @ tree.best.values <= shop.limits + 1e-6).all()
            assert tree.best.objective >= least * (1 - 1e-9) and tree.bound <= least * (1 + 1e-9)
    assert met >= 30


def test_many_steps_count_as_many_relaxations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "STEPS", 1)
    monkeypatch.setattr(branches, "DIVE", np.inf)
    for near, ends in ((0.0, False), (1e-9, True)):
        shop = Shop(1)
        solver, root = shop.rooted()
        assert root is not None
        tree = Branches(solver, shop.decisions, shop.stakes, 12, near=near)
        tree.search(root)
        assert (tree.solved < 12 and tree.best is None) == ends


@pytest.mark.parametrize(("below", "asked"), [(1e9, 0), (np.inf, 1)])
def test_of_a_large_program_the_other_solver_is_asked_at_any_price_only(
    below: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "WORK", 0)
    monkeypatch.setattr(warm, "MOST", 0)
    calls = []
    monkeypatch.setattr(warm, "solve_once", lambda *arguments: calls.append(arguments))
    shop = next(shop for shop in map(Shop, range(60)) if shop.least() < np.inf and shop.mixes())
    program = WarmProgram(shop.program(), shop.decisions, shop.stakes)
    assert program.solve(shop.cost, below=below) is None
    assert not program.is_empty and program.is_given_up == (below < np.inf) and len(calls) == asked


@pytest.mark.parametrize("near", [0.0, 1e-9])
def test_halves_that_are_put_off_are_gone_on_with_where_they_may_be_better(
    near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all of them: the optimum is the same, and what is left put off is proved to be no better."""
    monkeypatch.setattr(branches, "PATIENCE", 1)
    monkeypatch.setattr(branches, "BEGUN", seeded(lp_algorithm=DUAL, presolve=OFF, iteration_limit=1))
    monkeypatch.setattr(branches, "STEPS", 10**6)  # which would count as relaxations
    resumed, closed = list[Part](), 0
    resume = Branches._resumed
    monkeypatch.setattr(Branches, "_resumed", lambda tree, part: resumed.append(part) or resume(tree, part))
    for seed in range(60):
        shop = Shop(seed)
        (solver, root), least = shop.rooted(), shop.least()
        if root is None:
            continue
        tree = Branches(solver, shop.decisions, shop.stakes, 10_000, near=near)
        tree.search(root)
        assert (tree.best is None) == (least == np.inf)
        if tree.best is not None:
            assert tree.best.objective == pytest.approx(least, rel=1e-5 if near else 1e-9)
            assert (shop.held @ tree.best.values <= shop.limits + 1e-6).all()
            assert tree.bound <= least * (1 + 1e-9)
        closed += sum(part.relaxed is None for _, _, part in tree._open)
    assert len(resumed) >= 100 and all(part.relaxed is None for part in resumed)
    assert closed or not near, "what is near enough leaves halves that were put off"


class Failing(KeptSolver):
    """A simplex method that fails from the third solution on."""

    left = 3

    def solve(
        self,
        parameters: parameters_pb2.SolveParametersProto,
        *,
        reduced: bool = False,
        start: solution_pb2.BasisProto | None = None,
    ) -> Solution | None:
        self.left -= 1
        found = super().solve(parameters, reduced=reduced, start=start)
        if self.left > 0:
            return found
        self.ended = "numerical_error"
        return None


def test_where_the_simplex_method_fails_nothing_is_claimed() -> None:
    """A part that could not be solved counts with the bound of what it is a part of."""
    claimed = 0
    for seed in range(20):
        shop = Shop(seed)
        proto = shop.program()
        proto.variables.integers[:] = [False] * len(proto.variables.ids)
        solver, root = shop.rooted(Failing(proto))
        if root is not None:
            tree = Branches(solver, shop.decisions, shop.stakes, 1000)
            tree.search(root)
            claimed += tree.best is None
            assert tree.bound <= shop.least() and tree.bound < np.inf
    assert claimed >= 10


def test_rises_are_per_one_from_whole_and_by_stake_where_none_is_known() -> None:
    rises = Rises(3)
    whole, stakes = np.array([[0.5, 0.25, 0.75], [0.5, 0.75, 0.25]]), np.array([2.0, 4.0, 1.0])
    assert rises.expected(whole, stakes).tolist() == [[1.0, 1.0, 0.75], [1.0, 3.0, 0.25]]  # from whole times stake
    rises.add(0, 0, 3.0, 0.5, 2.0)  # 6 for each 1, at a stake of 2: 3 for each of stake
    rises.add(0, 0, 1.0, 0.5, 9.0)  # 2 for each 1; on average 4, which is 2 for each of the stake that it had first
    assert rises.expected(whole, stakes).tolist() == [[2.0, 2.0, 1.5], [2.0, 6.0, 0.5]]


def sized(problem: Problem) -> GroupSizes:
    return {name: round_shares([3, 2], g.n) for name, g in problem.choices.groups.items()}


@pytest.mark.parametrize("barriers", [True, False])
def test_layers_that_hardly_fit_as_the_other_solver_alone_would_choose(barriers: bool) -> None:
    """Three layers on two devices, with less and less memory until nothing fits."""
    problem = Problem.state(mlp(64, 64, 3), cluster((3, "1GB"), (2, "1GB"), network="1GB/s"), "adamw", Pins())
    tables, seen = problem.tables(False), list[float]()
    for room in range(190, 70, -15):
        prices = Prices(tables, sized(problem), np.full(2, room * 1e3))
        found = choose(tables.skeleton, prices, barriers=barriers, warm=True)
        alone = by_highs(problem, prices, barriers)
        assert (found is None) == (alone is None)
        if found is not None and alone is not None:
            assert found.objective_s * 1e3 == pytest.approx(alone, rel=2e-6)
            assert found.bound_s <= found.objective_s and found.gap <= 1e-6
            seen.append(found.objective_s)
        else:
            seen.append(np.inf)
    assert seen == sorted(seen) and len(set(seen)) >= 3 and seen[-1] == np.inf


def test_what_holds_too_much_at_its_least_has_no_point() -> None:
    """From some memory on it is seen without a solver that nothing fits, as the solver says; with one option of every
    class alone left, what it holds decides."""
    problem = Problem.state(mlp(64, 64, 3), cluster((3, "1GB"), (2, "1GB"), network="1GB/s"), "adamw", Pins())
    tables, seen = problem.tables(False), list[bool]()
    skeleton, everything = tables.skeleton, np.ones(len(tables.skeleton.names) + 1)
    for room in range(190, 10, -15):
        prices = Prices(tables, sized(problem), np.full(2, room * 1e3))
        seen.append(_is_too_much(skeleton, prices.coefficients(), everything))
        assert not seen[-1] or by_highs(problem, prices, True) is None
    assert seen == sorted(seen) and set(seen) == {False, True}
    one, firsts = everything.copy(), np.zeros(len(skeleton.names))
    for first, *others in skeleton.x:
        one[others], firsts[first] = 0.0, 1.0
    held = prices.coefficients().held.at(firsts).max()
    for part, is_too_much in ((0.99, True), (1.01, False)):
        found = Prices(tables, sized(problem), np.full(2, part * held)).coefficients()
        assert _is_too_much(skeleton, found, one) == is_too_much


def by_highs(problem: Problem, prices: Prices, barriers: bool) -> float | None:
    """Of the whole program, in milliseconds."""
    found = prices.coefficients()
    proto = _priced(prices.tables.skeleton, *_device_rows(found, barriers, True), _objective_ms(found, barriers))
    solved = solve_once(proto, HIGHS, branching(1e-9, 100_000))
    return None if solved is None else solved.objective


def test_stakes_are_parts_of_a_rows_limit() -> None:
    """The first variable takes 3 of 4 and 1 of 8; the second 2 of 4 and 6 of 8. Of a row that is at most 0 the most
    that any takes counts; what a row gives is no stake."""
    assert _stakes(np.array([[3.0, 2.0], [1.0, 6.0]]), np.array([4.0, 8.0])).tolist() == [0.75, 0.75]
    assert _stakes(np.array([[1.0, 2.0, -1.0]]), np.zeros(1)).tolist() == [0.5, 1.0, 0.0]
