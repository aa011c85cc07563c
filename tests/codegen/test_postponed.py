"""Calls of the backward pass that a plan postpones: the same calls and numbers, in another order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hap.codegen.lowering import lower
from hap.codegen.passes.recompute import recompute_calls
from hap.codegen.passes.runner import run_passes, standard_passes
from hap.codegen.program import Program, verify_program
from hap.errors import PlanError
from hap.graph import Value
from hap.order import Postponed, program_parts, repeats
from hap.plan import Plan, Recomputed
from hap.runtime.lockstep import run_lockstep
from tests._support import cases, gpt2
from tests._support.plans import make_plan, random_postponed, random_sizes, random_strategies, replicated_plan
from tests.codegen.test_recompute import forward_calls, ran, values
from tests.cost_models.build import relu_step
from tests.rules.test_host_graph import parts, squares

PASSES = ("renames", "dead_code", "fuse", "hoist", "sink", "bucket", "prefetch", "overlap")


def relu_program(postponed: Postponed) -> Program:
    """loss = sum(relu(x @ w)); the backward pass makes e of the tangent, g, and of x and g the gradient gw."""
    graph = relu_step()
    return lower(graph, replicated_plan(graph).model_copy(update={"postponed": dict(postponed)}))


def test_a_call_runs_just_before_another_or_at_the_end() -> None:
    """A weight's gradient, which nothing reads, some calls later; then at the end."""
    graph, plan = gpt2.graph(), cases.data_parallel((5, 2, 1))
    before = ran(lower(graph, plan))
    late = next(n for n in before if graph.by_name[n].op == "aten.mm.default" and not readers(n))
    until = before[before.index(late) + 20]
    after = ran(lower(graph, plan.model_copy(update={"postponed": {until: (late,)}})))
    assert after.index(late) == after.index(until) - 1 and sorted(after) == sorted(before)
    after = ran(lower(graph, plan.model_copy(update={"postponed": {"": (late,)}})))
    assert before.index(late) + 40 < after.index(late) > len(after) - 4 and sorted(after) == sorted(before)


def test_what_is_read_earlier_runs_earlier() -> None:
    """Whatever the plan says: in its place is the gradient's last call, which reads all."""
    plain, graph = relu_program({}), relu_step()
    calls = [n for n in ran(plain) if graph.by_name[n].phase == "backward"]
    assert ran(relu_program({"": tuple(calls[:-1])})) == ran(plain)


def readers(name: str) -> list[str]:
    return [user.op for user, _ in gpt2.graph().users.get(Value(name), ())]


@settings(max_examples=15, deadline=None)
@given(
    source=st.randoms(use_true_random=False),
    world_size=st.integers(1, 4),
    regather=st.booleans(),
    part=st.floats(0.05, 1.0),
    repeated=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    off=st.sets(st.sampled_from(PASSES)),
)
def test_any_calls_of_any_program(source, world_size, regather, part, repeated, off) -> None:  # type: ignore[no-untyped-def]
    """Every value is what one device has; the calls and conversions are those of the plan that postpones nothing. Calls
    of the forward pass that are made again are those that the ledger has, whatever the order."""
    found = cases.gpt2_choices()
    strategies, sizes = random_strategies(found, source), random_sizes(found, world_size, source)
    late = random_postponed(found.graph, source, part)
    calls = tuple(name for name in forward_calls() if source.random() < repeated)
    again = [Recomputed(block="", what="all", calls=calls)] if calls else []
    plain = make_plan(found, strategies, sizes, regather=regather, recomputed=again, world_size=world_size)
    plan = Plan.from_json(plain.model_copy(update={"postponed": late}).to_json())
    before, after = lower(found.graph, plain), lower(found.graph, plan)
    parts = program_parts(found.graph, late)
    order = [n.name for n in parts[2]]
    assert ran(after) == order and sorted(ran(before)) == sorted(order)
    made, same = (sorted((c.input, c.kind, str(c.target)) for c in p.conversions) for p in (before, after))
    assert made == same
    more = repeats(found.graph, strategies, calls, parts)
    told = sorted(m.name for n in parts[2] for m in (*more.get(n.name, ()), n))
    assert [sorted(ran(recompute_calls(program))) for program in (before, after)] == [told, told]
    rewritten = run_passes(after, standard_passes(), off=sorted(off)).program
    verify_program(rewritten)
    step = run_lockstep(rewritten, values(), check=True)
    torch.testing.assert_close(step.loss, values()[found.graph.loss], rtol=1e-10, atol=0)
    for target, value in found.graph.gradients.items():
        torch.testing.assert_close(step.gradients[target], values()[value], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("postponed", "words"),
    [
        ({"": ("b",)}, "postpones b, or calls until it: none of the backward pass"),
        ({"b": ("gw",)}, "postpones b, or calls until it: none of the backward pass"),
        ({"": ("x",)}, "postpones x, or calls until it"),
    ],
)
def test_only_calls_of_the_backward_pass_are_postponed(postponed: Postponed, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        relu_program(postponed)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"postponed": {"": ("nobody",)}}, "'nobody' is postponed, or waited for, and has no strategy"),
        ({"postponed": {"nobody": ("gw",)}}, "'nobody' is postponed, or waited for, and has no strategy"),
        ({"postponed": {"": ("gw",), "g": ("gw",)}}, "a call is postponed twice"),
        ({"postponed": {"gw": ("g",), "": ("gw",)}}, "or until one that is postponed"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(changes: dict[str, object], words: str) -> None:
    plan = replicated_plan(relu_step()).model_copy(update=changes)
    with pytest.raises(PlanError, match=words):
        Plan.from_json(plan.to_json())


def test_a_plan_that_postpones_nothing_says_nothing_of_it() -> None:
    plan = replicated_plan(relu_step())
    assert "postponed" not in plan.to_json() and Plan.from_json(plan.to_json()).postponed == {}


def test_nothing_is_postponed_inside_a_host() -> None:
    """The sums of two hosts, whose plans differ, would meet in another order."""
    graph = parts(squares(), (5, 3))[0]
    plan = replicated_plan(graph).model_copy(update={"postponed": {"": ("dw",)}})
    with pytest.raises(PlanError, match="postpones calls inside a host"):
        lower(graph, plan)
