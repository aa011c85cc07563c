"""Chosen calls are made again for the backward pass: the same numbers, and what they made is not kept meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hap.capture import interpret, source_values
from hap.codegen.lowering import lower
from hap.codegen.passes.recompute import recompute_calls
from hap.codegen.passes.runner import Outcome, run_passes, standard_passes
from hap.codegen.program import Call, Convert, Program, verify_program
from hap.codegen.source import to_python
from hap.cost_models.evaluate import evaluate
from hap.errors import PlanError
from hap.graph import Value
from hap.order import NONE, program_parts, repeats
from hap.plan import Plan, Recomputed, Strategy
from hap.rules.choices import choices, replicated
from hap.runtime.lockstep import run_lockstep
from tests._support import cases, gpt2
from tests._support.plans import (
    greedy_strategies,
    make_plan,
    random_postponed,
    random_sizes,
    random_strategies,
    replicated_plan,
    sizes_for,
)
from tests.codegen.test_lockstep import small
from tests.cost_models.build import IDEAL, relu_step
from tests.search.models import cluster

REST = ("hoist", "sink", "bucket", "prefetch", "overlap")
PLANS = {
    "data parallel": lambda: cases.data_parallel((5, 2, 1)),
    "zero": lambda: cases.zero((5, 2, 1)),
    "zero, gathered again": lambda: cases.zero((5, 2, 1), regather=True),
    "tensor parallel": lambda: cases.tensor_parallel((3, 2, 1)),
}


def chosen(calls: tuple[str, ...]) -> tuple[Recomputed, ...]:
    return (Recomputed(block="any", what="all", calls=calls),)


def repeating(plan: Plan, calls: tuple[str, ...]) -> Plan:
    return plan.model_copy(update={"recomputed": chosen(calls)})


@cache
def forward_calls() -> tuple[str, ...]:
    return tuple(n.name for n in gpt2.graph().nodes if n.phase == "forward" and not n.is_source)


@cache
def values() -> dict[Value, torch.Tensor]:
    graph = gpt2.graph()
    return interpret(graph, source_values(graph, gpt2.build(), (gpt2.batch(),), gpt2.batch(), tangent=1.3))


def repeated(plan: Plan, calls: tuple[str, ...]) -> Program:
    return recompute_calls(lower(gpt2.graph(), repeating(plan, calls)))


def ran(program: Program) -> list[str]:
    """The nodes whose calls the backward part makes, in order."""
    calls = [i for i in program.backward if isinstance(i, Call)]
    return [program.held[next(name for name in call.outputs if name)].value.node for call in calls]


def saved(program: Program) -> set[str]:
    return {program.held[name].value.node for name in program.saved}


# ------------------------------------------------------------------------------------------------ on paper


def relu_program(calls: tuple[str, ...]) -> Program:
    """loss = sum(b), b = relu(a), a = x @ w; the backward pass reads b and x."""
    graph = relu_step()
    return lower(graph, repeating(replicated_plan(graph), calls))


def test_a_call_is_made_again_just_before_it_is_read() -> None:
    """relu again, from a product that is saved in place of its result."""
    before = relu_program(("b",))
    after = recompute_calls(before)
    verify_program(after)
    assert (saved(before), saved(after)) == ({"b", "x"}, {"a", "x"})
    assert ran(before) == ["e", "g", "xt", "gw"] and ran(after) == ["e", "b", "g", "xt", "gw"]
    again = after.backward[1]
    assert isinstance(again, Call) and again.inputs == ("a",) and again.outputs == ("b_again",)
    assert after.held["b_again"] == before.held["b"]
    assert after.forward == before.forward


def test_what_a_repeated_call_reads_is_repeated_first() -> None:
    after = recompute_calls(relu_program(("a", "b")))
    assert saved(after) == {"x", "w"}
    assert ran(after) == ["e", "a", "b", "g", "xt", "gw"]


def test_what_the_backward_pass_does_not_read_is_not_made_again() -> None:
    """The product alone is chosen; only relu's result is read."""
    after = recompute_calls(relu_program(("a",)))
    assert replace(after, saved=()) == replace(relu_program(("a",)), saved=())
    assert saved(after) == {"b", "x"}


def test_nothing_chosen_changes_nothing() -> None:
    program = relu_program(())
    assert recompute_calls(program) is program


@pytest.mark.parametrize("name", ["x", "gw", "nobody"])
def test_only_calls_of_the_forward_pass_can_be_repeated(name: str) -> None:
    with pytest.raises(PlanError, match=f"repeats {name}, which is no call of the forward pass"):
        relu_program((name,))


# ------------------------------------------------------------------------------------------------ meaning


@settings(max_examples=40, deadline=None)
@given(
    source=st.randoms(use_true_random=False),
    world_size=st.integers(1, 4),
    regather=st.booleans(),
    part=st.floats(0.1, 1.0),
    off=st.sets(st.sampled_from(("renames", "dead_code", "fuse", *REST))),
)
def test_any_calls_of_any_program(source, world_size, regather, part, off) -> None:  # type: ignore[no-untyped-def]
    """Every value, the repeated ones too, is what one device has; collectives are those of the plan, each once."""
    found, whole = small()
    graph = found.graph
    strategies, sizes = random_strategies(found, source), random_sizes(found, world_size, source)
    calls = [n.name for n in graph.nodes if n.phase == "forward" and not n.is_source]
    again = chosen(tuple(name for name in calls if source.random() < part))
    plan = make_plan(found, strategies, sizes, regather=regather, recomputed=again)
    before = lower(graph, plan)
    program = recompute_calls(before)
    verify_program(program)
    told = Counter((str(program.held[c.input].value), str(c.target), c.phase) for c in program.conversions)
    assert told == Counter((c.value, c.target, c.phase) for c in plan.conversions)
    step = run_lockstep(run_passes(before, standard_passes(), off=sorted(off)).program, whole, check=True)
    for target, value in graph.gradients.items():
        torch.testing.assert_close(step.gradients[target], whole[value], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", PLANS)
def test_the_whole_forward_pass_of_gpt2(name: str) -> None:
    """Then only parameters, inputs and what collectives made are saved."""
    program = repeated(PLANS[name](), forward_calls())
    sources = {s.name for s in program.sources}
    converted = {c.output for c in program.conversions}
    assert all(n in sources or n in converted for n in program.saved)
    step = run_lockstep(run_passes(program, standard_passes(), off=["recompute"]).program, values(), check=True)
    torch.testing.assert_close(step.loss, values()[gpt2.graph().loss], rtol=1e-12, atol=0)


def test_parameters_that_are_gathered_again_serve_the_repeated_calls() -> None:
    """No gathered parameter that the backward pass gathers anew is kept from the forward pass."""
    program = repeated(cases.zero((5, 2, 1), regather=True), forward_calls())
    parameters = {s.name for s in program.sources_of("parameter")}
    anew = {c.input for c in program.backward if isinstance(c, Convert) and c.input in parameters}
    kept = {program.held[name].value.node for name in program.saved if name not in parameters}
    assert anew and not anew & kept


def test_a_parameter_is_gathered_again_for_repeated_calls_alone() -> None:
    """The first product's, which the backward pass reads nowhere else: gathered just before it, and not kept."""
    found = choices(relu_step())
    strategies = greedy_strategies(found, {"x": (0, 8), "w": (1, 4)})
    sizes = sizes_for(found, (5, 2, 1))
    plain = make_plan(found, strategies, sizes, regather=True)
    plan = make_plan(found, strategies, sizes, regather=True, recomputed=chosen(("a", "b")))
    assert [c.phase for c in plain.conversions if c.value == "w"] == ["forward"]
    assert [c.phase for c in plan.conversions if c.value == "w"] == ["forward", "backward"]
    before = lower(found.graph, plan)
    (gather,) = before.gathered_again
    after = recompute_calls(before)
    verify_program(after)
    at = after.backward.index(gather)
    again = after.backward[at + 1]
    assert isinstance(again, Call) and again.inputs[1] == gather.output and gather.input == "w"
    assert gather.output not in after.saved and "w" in after.saved
    kept = recompute_calls(lower(found.graph, repeating(plain, ("a", "b"))))
    assert "w__r" in kept.saved and not any(isinstance(i, Convert) and i.input == "w" for i in kept.backward)


# ------------------------------------------------------------------------------------------------ the cost models' view


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("step", [1, 3])
def test_the_cost_models_know_what_runs(name: str, step: int) -> None:
    """``order.repeats`` names the calls that the pass puts before each call, if all may be, or every third; with calls
    of the backward pass postponed, too."""
    plan, graph, calls = PLANS[name](), gpt2.graph(), forward_calls()[::step]
    for late in (NONE, random_postponed(graph, random.Random(step))):
        parts = program_parts(graph, late)
        again = repeats(graph, {n: Strategy.parse(s) for n, s in plan.strategies.items()}, calls, parts)
        told = [m.name for n in parts[2] for m in (*again.get(n.name, ()), n)]
        assert ran(repeated(plan.model_copy(update={"postponed": dict(late)}), calls)) == told
        assert len(told) > len(parts[2])


def test_the_clock_counts_what_is_repeated() -> None:
    """On an ideal device of one FLOP and one byte a nanosecond: the product reads 192 bytes and writes 128, which its
    256 operations take less than; ReLU reads and writes 128. What is repeated counts as compute, and the peak stays:
    ReLU's result is there with its gradient, whenever it was made."""
    graph = relu_step()
    strategies = {n.name: replicated(n) for n in graph.nodes}
    on = cluster((0.001, "1GB"), memory_bandwidth="1GB/s")
    plain, again = (evaluate(graph, strategies, {}, on, recomputed=calls, model=IDEAL) for calls in ((), ("a", "b")))
    launches = 2 * on.devices[0].launch_s
    assert again.step_s - plain.step_s == pytest.approx((192 + 128 + 128 + 128) * 1e-9 + launches, rel=1e-6)
    assert again.compute_s[0] - plain.compute_s[0] == pytest.approx(again.step_s - plain.step_s)
    assert again.memory_bytes == plain.memory_bytes


# ------------------------------------------------------------------------------------------------ the runner


def outcome(off: tuple[str, ...] = ()) -> Outcome:
    plan = repeating(cases.data_parallel((5, 2, 1)), forward_calls())
    return run_passes(lower(gpt2.graph(), plan), standard_passes(), off=off)


def test_the_pass_is_timed_shown_and_switched_off() -> None:
    made = outcome()
    assert "recompute" in made.seconds
    change = next(c for c in made.changes if c.name == "recompute")
    added = [line for line in change.diff.splitlines() if line.startswith("+    ")]
    assert any("_again" in line and "aten.native_layer_norm.default" in line for line in added)
    assert change.before.forward == change.after.forward
    plain = run_passes(lower(gpt2.graph(), cases.data_parallel((5, 2, 1))), standard_passes()).program
    assert outcome(off=("recompute",)).program.backward == plain.backward


def test_the_emitted_file_repeats_calls() -> None:
    program = repeated(cases.data_parallel((5, 2, 1)), forward_calls())
    text = to_python(program, cases.data_parallel((5, 2, 1)))
    compile(text, "emitted.py", "exec")
    backward = text.split("def backward")[1]
    assert "_again = " in backward and "aten.native_layer_norm.default" in backward
