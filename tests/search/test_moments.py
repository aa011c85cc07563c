"""What the programs see of memory, at their few moments, is what the ledger finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hap.cluster import ClusterSpec
from hap.cost_models.pieces import local_bytes
from hap.order import program_parts
from hap.rules.choices import Choices, replicated
from hap.search.found import Found
from hap.search.limits import LIMITS
from hap.search.pins import Pins
from hap.search.planner import Search
from hap.search.prices import Facts
from hap.search.problem import Problem
from hap.search.recompute import after_steps, blocks_of, steps_of
from tests.search.models import gpt2, mixer, mlp
from tests.search.test_masses import hosts

MODELS = {
    "mlp": lambda: mlp(batch=4096, width=128, layers=4),
    "mixer": lambda: mixer(64, 64, 128),
    "gpt2": lambda: gpt2(layers=2),
}


def state(found: Choices, cluster: ClusterSpec) -> Problem:
    return Problem.state(found, cluster, "adamw", Pins())


@pytest.mark.parametrize(("model", "again"), [*((model, False) for model in MODELS), ("mixer", True), ("gpt2", True)])
def test_on_one_device_they_see_the_peak(model: str, again: bool) -> None:
    """To a hundredth, and never more; where calls are made again, to a fifth. Activations make up most of it, and some
    are there for a few calls only."""
    found = MODELS[model]()
    problem = state(found, hosts((1, 1), network="1GB/s"))
    if again:
        blocks = blocks_of(problem)
        problem = problem.repeating(after_steps(blocks, len(steps_of(blocks))))
    whole = {n.name: replicated(n) for n in found.graph.nodes}
    held = [kept for name, strategy in whole.items() for kept in problem.facts.held(name, strategy)]
    seen = sum(nbytes * moments[:, 0] for _, nbytes, moments in held)
    (peak,) = problem.judge(whole, {}, False).memory_bytes
    parameters = sum(n.meta.nbytes for n in found.graph.sources("parameter"))
    assert peak > (4 if again else 6) * parameters and bool(problem.recomputed) is again
    assert (0.8 if again else 0.99) * peak < max(seen) <= peak * (1 + 1e-9)  # type: ignore[arg-type]


def test_one_is_of_the_forward_part_and_the_others_of_the_backward_part() -> None:
    """Transposed weights are forward nodes that run in the backward part, some at its very end."""
    problem = state(gpt2(layers=2), hosts((1, 1), network="1GB/s"))
    graph, facts = problem.choices.graph, problem.facts
    _, forward, backward = program_parts(graph)
    late = [n for n in backward if n.phase == "forward"]
    assert len(late) > 10
    last = facts.position[forward[-1].name]
    assert facts.moments[0] <= last <= facts.moments[1] and last < min(facts.position[n.name] for n in late)
    assert (np.diff(facts.moments) >= 0).all() and facts.moments[-1] == len(graph.nodes) - 1
    assert problem.on(hosts((1, 1), (1, 1), network="1GB/s")).facts.moments is facts.moments


def seen_bytes(problem: Problem, found: Found) -> np.ndarray:
    """By every rank (N,), with what is converted."""
    facts, n = problem.facts, problem.world_size
    total = np.zeros((len(facts.moments), n))
    for name, strategy in found.strategies.items():
        for placement, nbytes, moments in facts.held(name, strategy):
            total += moments * local_bytes(nbytes, placement, found.sizes, n)
    for cost in found.evaluation.conversions:
        if cost.need.value not in facts.homes:
            total += facts.copy_alive(cost.need.value, "") * local_bytes(cost.nbytes, cost.need.target, found.sizes, n)
    return total.max(axis=0)


def test_on_unequal_devices_they_see_nearly_the_peak_of_each() -> None:
    """Copies count between the first and the last reader of a value, if not of the copy, too."""
    problem = state(gpt2(layers=2), hosts((1, 1), (0.5, 1), (0.25, 1), network="10GB/s"))
    search = Search(problem, LIMITS["normal"])
    search.run()
    assert len(search.met) > 1
    for found in search.met:
        ratio = seen_bytes(problem, found) / np.array(found.evaluation.memory_bytes)
        assert ((ratio > 0.9) & (ratio < 1.1)).all(), ratio


def test_what_nobody_needs_makes_nothing_and_keeps_nothing() -> None:
    """A call that the program leaves out, last in the graph, reads what the forward part makes."""
    graph = mlp(batch=512, width=64).graph
    relu = next(n for n in graph.nodes if "relu" in n.op and n.phase == "forward")
    more = replace(graph, nodes=(*graph.nodes, replace(relu, name="nobody")))
    one, other = (
        Facts(g, {n.name: (replicated(n),) for n in g.nodes}, hosts((1, 1), network="1GB/s"), "adamw")
        for g in (graph, more)
    )
    assert other.allocations("nobody") == [] and relu.inputs[0] in one.reads
    assert all(other.reads[value] == spans for value, spans in one.reads.items())
    assert all(other.reads_by_part[value] == spans for value, spans in one.reads_by_part.items())
    assert other.moments.tolist() == one.moments.tolist()
