"""The background theory: triples of every row and conversion, three clocks, and a bound that never exceeds the rest."""

import heapq
import itertools
import random
from types import SimpleNamespace

import pytest
from ortools.math_opt.python import mathopt

from benchmarks.planning_astar import Case, random_case
from hap.search.astar import Astar, synthesise
from hap.search.potentials import best_potentials
from hap.search.theory import Theory, Triple, background_theory, bill_prices

SMALL = 700  # combinations


def theory_of(case: Case, clock="node") -> Theory:
    bill, prices = bill_prices(case.priced()[1])
    return background_theory(bill, prices.coefficients(), clock)


def first_case(operators: set[str]) -> Case:
    """The first random case that has exactly these operators beside its sources."""
    for seed in itertools.count():
        case = random_case(seed, SMALL)
        if {n.op.split(".")[1] for n in case.graph.nodes if not n.is_source} == operators:
            return case
    raise AssertionError


def test_every_strategy_of_every_node_and_every_conversion_is_a_triple():
    case = first_case({"mm", "sum"})  # x (B, D) @ w (D, H), summed
    theory = theory_of(case)
    triples = [str(t) for t in theory.triples()]
    computing = [t for t in theory.triples() if t.node >= 0]
    assert len(computing) == sum(len(s) for s in case.candidates.values())
    (product,) = (n.name for n in case.graph.nodes if n.op == "aten.mm.default")
    rows = next(str(s.outputs[0]) for s in case.candidates["x"][1:])  # the batch
    assert "{} x/0 {x @ R}" in triples
    assert f"{{}} x/1 {{x @ {rows}}}" in triples
    by_rows = [t for t in triples if t.startswith(f"{{x @ {rows}, w @ R}} {product}/")]
    assert [t.endswith(f"{{{product} @ {rows}}}") for t in by_rows] == [True]
    assert f"{{x @ R}} convert {{x @ {rows}}}" in triples
    assert f"{{x @ {rows}}} convert {{x @ R}}" in triples
    assert not any(t.endswith("@ P}") and "convert" in t for t in triples)


@pytest.mark.parametrize("seed", range(8))
def test_the_same_program_costs_most_where_everybody_waits_and_least_where_nobody_does(seed):
    case = random_case(seed, SMALL)
    best = [synthesise(theory_of(case, clock)) for clock in ("node", "stage", "step")]
    if best[0] is None:
        assert best == [None] * 3
    else:
        node, stage, step = (b.seconds for b in best)
        assert node * (1 + 1e-12) >= stage >= step * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_no_estimate_exceeds_what_a_program_takes_in_the_end(seed):
    rng, case = random.Random(seed), random_case(seed + 100, 20_000)
    for clock in ("node", "stage", "step"):
        theory = theory_of(case, clock)
        potentials = best_potentials(theory)
        if potentials is None:
            assert synthesise(theory) is None
            continue
        search = Astar(theory, potentials)
        assert search.estimate(search.start()) == pytest.approx(potentials.start_s)
        finished = 0
        while finished < 10:
            states = [search.start()]
            while states[-1].depth < search.size:
                children = list(search.expand(states[-1]))
                if not children:
                    break
                states.append(rng.choice(children))
            else:
                finished += 1
                seconds = max(states[-1].ready)
                assert all(search.estimate(s) <= seconds * (1 + 1e-9) for s in states)


@pytest.mark.parametrize("seed", range(4))
def test_potentials_of_nothing_do_where_the_solver_gives_up(seed, monkeypatch):
    """Less is proved, no more than a program takes, and the search finds what it finds with the best ones."""
    theory = theory_of(random_case(seed, SMALL))
    best, found = best_potentials(theory), synthesise(theory)
    reason = mathopt.TerminationReason.IMPRECISE
    gives_up = SimpleNamespace(termination=SimpleNamespace(reason=reason), has_primal_feasible_solution=lambda: False)
    monkeypatch.setattr(mathopt, "solve", lambda *arguments, **options: gives_up)
    nothing, again = best_potentials(theory), synthesise(theory)
    assert (found is None) == (again is None)
    if best is not None and found is not None:
        assert nothing.start_s <= best.start_s * (1 + 1e-9)
        assert again.proved and again.seconds == pytest.approx(found.seconds, rel=1e-9)


def any_order(theory: Theory) -> float:
    """Synthesis as in HAP's artifact: uniform-cost search over sets of properties, triples in any order. Every node is
    computed once, and a tensor is converted from the placement that it was produced in."""
    triples = list(theory.triples())
    homes = [(v, use) for v, t in enumerate(theory.tensors) for k, use in enumerate(t.uses) if is_result(theory, v, k)]
    queue, seen, count = [(0.0, 0, frozenset())], {}, itertools.count(1)
    while queue:
        cost, _, facts = heapq.heappop(queue)
        if seen.get(facts, float("inf")) < cost:
            continue
        if is_done(theory, facts, homes):
            return cost
        for triple in triples:
            if not is_available(triple, facts):
                continue
            made = (("made", p) for p in triple.gives) if triple.node >= 0 else ()
            picked = (("node", triple.node, triple.option), ("node", triple.node)) if triple.node >= 0 else ()
            after = facts | {("has", p) for p in triple.gives} | set(made) | set(picked)
            total = cost + triple.cost.together_s + max(triple.cost.alone_s)
            if after != facts and total < seen.get(after, float("inf")):
                seen[after] = total
                heapq.heappush(queue, (total, next(count), after))
    return float("inf")


def is_result(theory: Theory, v: int, k: int) -> bool:
    return theory.classes.values[v].slots[k].position < 0


def is_available(triple: Triple, facts: frozenset) -> bool:
    if triple.node >= 0:
        return ("node", triple.node) not in facts and all(("has", p) in facts for p in triple.needs)
    return ("made", triple.needs[0]) in facts


def is_done(theory: Theory, facts: frozenset, homes: list) -> bool:
    if not all(("node", a) in facts for a in range(len(theory.costs))):
        return False
    for v, use in homes:
        option = next((i for i in range(len(use.wants)) if ("node", use.reader, i) in facts), 0)
        if ("has", theory.property(v, use.wants[option])) not in facts:
            return False
    return True


def test_the_graphs_order_loses_nothing_against_triples_in_any_order():
    compared = 0
    for seed in itertools.count(300):
        case = random_case(seed, 120)
        theory = theory_of(case)
        if theory.capacity_bytes or len(case.graph.sources("input")) > 1:
            continue
        best = synthesise(theory)
        assert best is not None and best.proved
        assert best.seconds == pytest.approx(any_order(theory), rel=1e-9)
        compared += 1
        if compared == 4:
            break
