"""A* finds what exhaustive search finds and what the MILP finds, under every clock, with and without tight memory."""

import numpy as np
import pytest

from benchmarks.planning_astar import CLOCKS, SOLVER_S, TOLERANCE, compare, random_case, same
from hap.search import astar, milp, plan_graph
from hap.search.astar import Astar, synthesise
from hap.search.classes import find_classes
from hap.search.milp import make_skeleton
from hap.search.payers import NodePayer
from hap.search.prices import Facts
from hap.search.rounding import round_shares
from hap.search.tables import Prices, Tables
from hap.search.theory import background_theory, bill_prices, unmerged
from tests.search.models import cluster, gpt2, mlp

FASTER_AND_SLOWER = cluster((20, "16GB"), (5, "16GB"), network="2GB/s")


def priced(choices, spec, *, merged, capacity=1e12):
    """Prices of every node by itself, or of classes of equal ones, at shares in proportion to 4 : 1."""
    candidates = {name: tuple(s) for name, s in choices.strategies.items()}
    classes = find_classes(choices.graph, candidates) if merged else unmerged(choices.graph, candidates)
    sizes = {name: round_shares((4, 1), g.n) for name, g in choices.groups.items()}
    tables = Tables(Facts(choices.graph, candidates, spec, "adamw"), make_skeleton(classes), {})
    return Prices(tables, sizes, np.full(spec.world_size, capacity))


@pytest.mark.parametrize("seed", range(40))
def test_equals_exhaustive_search_and_the_milp(seed):
    found = compare(random_case(seed, 1500))
    assert all(same(found.astar[c], found.every[c], 1e-9) for c in CLOCKS), found
    assert all(same(found.astar[c], found.milp[c], TOLERANCE, SOLVER_S) for c in found.milp), found


def test_says_so_when_nothing_fits():
    prices = priced(mlp(64, 256), FASTER_AND_SLOWER, merged=False, capacity=1e3)
    assert astar.choose(prices) is None


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("barriers", [False, True])
def test_takes_the_milps_place(merged, barriers):
    prices = priced(mlp(256, 512), FASTER_AND_SLOWER, merged=merged)
    other = milp.choose(prices.tables.skeleton, prices, barriers=barriers)
    found = astar.choose(prices, barriers=barriers)
    assert found is not None and other is not None
    assert found.status == "optimal"
    assert found.objective_s == pytest.approx(other.objective_s, rel=1e-5)


def test_memory_that_binds_is_obeyed_and_costs_time():
    free = priced(mlp(64, 512), FASTER_AND_SLOWER, merged=False)
    bill, itemised = bill_prices(free)
    loose = synthesise(background_theory(bill, itemised.coefficients()))
    held = itemised.coefficients().held_bytes
    numbers = {
        (p.node_class, p.option): i for i, p in enumerate(bill.payers) if isinstance(p, NodePayer)
    }  # of the options only
    used = sum(held[:, :, numbers[a, i]] for a, i in enumerate(loose.picks)).max()
    tight = priced(mlp(64, 512), FASTER_AND_SLOWER, merged=False, capacity=0.95 * used)
    found, other = astar.choose(tight, barriers=True), milp.choose(tight.tables.skeleton, tight, barriers=True)
    assert found.objective_s > loose.seconds
    assert found.objective_s == pytest.approx(other.objective_s, rel=1e-5)
    assert 1.0 >= found.fullness == pytest.approx(other.fullness) and found.fullness > 0.8
    at_once = astar.choose(tight, barriers=True, nodes=1)  # before any state is looked at: by the beam, not by the dive
    assert at_once is not None and at_once.objective_s == found.objective_s
    for below_s, none in ((found.objective_s * 1.01, False), (found.objective_s * 0.99, True)):
        chosen = (
            astar.choose(tight, barriers=True, below_s=below_s),
            milp.choose(tight.tables.skeleton, tight, barriers=True, below_s=below_s),
        )
        assert [one is None for one in chosen] == [none, none]


def test_no_beam_is_made_where_a_dive_ends_and_the_best_is_proved(monkeypatch):
    """Memory binds, though the cheapest fits."""
    free = priced(mlp(64, 512), FASTER_AND_SLOWER, merged=False)
    loose = milp.choose(free.tables.skeleton, free, barriers=True)
    held = loose.fullness * free.capacity_bytes[0]
    monkeypatch.setattr(Astar, "_beam", lambda *_: pytest.fail("a beam"))
    tight = priced(mlp(64, 512), FASTER_AND_SLOWER, merged=False, capacity=1.02 * held)
    bill, itemised = bill_prices(tight)
    assert background_theory(bill, itemised.coefficients()).capacity_bytes
    assert astar.choose(tight, barriers=True).objective_s == pytest.approx(loose.objective_s, rel=1e-5)


def test_the_same_program_every_time():
    first, second = (astar.choose(priced(mlp(128, 256), FASTER_AND_SLOWER, merged=False)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("merged", [False, True])
def test_the_potentials_lead_straight_through_a_transformer(merged):
    prices = priced(gpt2(1, batch=8, length=32, width=64), FASTER_AND_SLOWER, merged=merged)
    bill, itemised = bill_prices(prices)
    found = synthesise(background_theory(bill, itemised.coefficients()), gap=1e-6)
    other = milp.choose(prices.tables.skeleton, prices, barriers=True)
    assert found.seconds == pytest.approx(other.objective_s, rel=1e-5)
    assert found.expanded < 2 * len(bill.classes.nodes)


def test_plans_alike_whichever_of_the_two_chooses_the_strategies():
    choices, spec = mlp(256, 1024), FASTER_AND_SLOWER
    synthesised, solved = plan_graph(choices, spec, method="astar"), plan_graph(choices, spec)
    assert synthesised.provenance.solver["method"] == "astar" and "method" not in solved.provenance.solver
    assert synthesised.predicted.as_run_s == pytest.approx(solved.predicted.as_run_s, rel=1e-3)
