"""From plan to program: what each instruction is, where conversions stand, what crosses, which plans are refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from hap.capture import capture
from hap.codegen.lowering import lower
from hap.codegen.program import Call, Convert, Program, group_labels, last_uses
from hap.errors import PlanError
from hap.graph import Graph
from hap.placement import REPLICATE
from hap.plan import Plan, Strategy
from hap.rules.choices import Choices, choices
from tests._support import cases, gpt2
from tests._support.plans import greedy_strategies, make_plan, replicated_plan, sizes_for


class Linear(nn.Module):
    """x (6, 4) @ w (4, 3), squared and summed: the smallest step with a product."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(12.0).reshape(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w).pow(2).sum()


@pytest.fixture(scope="module")
def found() -> Choices:
    return choices(capture(Linear(), (torch.ones(6, 4),)))


def plan_of(found: Choices, wishes: dict[str, tuple[int, int]], sizes: tuple[int, ...], **options: Any) -> Plan:
    return make_plan(found, greedy_strategies(found, wishes), sizes_for(found, sizes), **options)


def lines(program: Program) -> list[str]:
    """One word per instruction: the operator, or the collective with what it makes."""
    return [
        f"{i.kind} {i.output}" if isinstance(i, Convert) else i.op.split(".")[1]
        for i in (*program.forward, *program.backward)
    ]


def test_data_parallel_sums_the_loss_and_the_gradient_and_nothing_else(found: Choices) -> None:
    program = lower(found.graph, plan_of(found, {"args.0": (0, 6)}, (3, 2, 1)))
    assert [(c.kind, c.output, c.phase) for c in program.conversions] == [
        ("all_reduce", f"{program.conversions[0].input}__r", "forward"),
        ("all_reduce", f"{program.conversions[1].input}__r", "backward"),
    ]
    assert program.loss == program.conversions[0].output
    assert program.gradients == {"w": program.conversions[1].output}
    assert program.sizes and set(program.sizes.values()) == {(3, 2, 1)}


def test_a_sharded_parameter_is_gathered_before_its_first_reader_and_its_gradient_goes_home(found: Choices) -> None:
    program = lower(found.graph, plan_of(found, {"args.0": (0, 6), "w": (0, 4)}, (3, 2, 1)))
    assert lines(program)[:2] == ["all_gather p_w__r", "mm"]
    assert program.conversions[-1].kind == "reduce_scatter"
    assert program.backward[-1] == program.conversions[-1]
    assert program.held[program.gradients["w"]].placement == program.held["p_w"].placement


def test_a_gradient_is_reduced_right_after_it_is_made() -> None:
    program = lower(gpt2.graph(), cases.zero((5, 2, 1)))
    made = {output: at for at, i in enumerate(program.backward) for output in i.outputs if output is not None}
    last = [program.backward[made[name]] for name in program.gradients.values()]
    homeward = [i for i in last if isinstance(i, Convert)]
    assert len(homeward) > 20
    assert all(made[c.output] - made[c.input] <= 3 for c in homeward), "at most a layer norm's other gradients between"


def test_regathering_drops_the_gathered_parameter_between_the_passes() -> None:
    kept = lower(gpt2.graph(), cases.zero((5, 2, 1)))
    again = lower(gpt2.graph(), cases.zero((5, 2, 1), regather=True))
    gathered = [name for name in kept.saved if name.startswith("p_") and name.endswith("__r")]
    assert gathered, "the plan keeps gathered parameters"
    assert not [name for name in again.saved if name.startswith("p_") and name.endswith("__r")]
    regathered = [c for c in again.conversions if c.output.endswith("__r_again")]
    assert regathered and all(c.phase == "backward" for c in regathered)


def test_what_only_the_backward_reads_is_computed_there_just_in_time() -> None:
    graph = gpt2.graph()
    program = lower(graph, cases.data_parallel((5, 2, 1)))
    moved = [
        i
        for i in program.backward
        if isinstance(i, Call) and i.outputs[0] is not None and graph.by_name[_node(program, i)].phase == "forward"
    ]
    assert moved, "GPT-2's backward transposes weights, which depends on no tangent"
    for call in moved:
        at = program.backward.index(call)
        readers = [k for k, i in enumerate(program.backward) if set(i.inputs) & set(call.outputs)]
        assert readers and readers[0] > at


def _node(program: Program, call: Call) -> str:
    name = next(n for n in call.outputs if n is not None)
    return program.held[name].value.node


def test_literals_become_local_sizes_and_every_rank_has_the_same_program() -> None:
    program = lower(gpt2.graph(), cases.tensor_parallel((3, 2, 1)))
    again = lower(gpt2.graph(), cases.tensor_parallel((3, 2, 1)))
    assert program == again
    local = [i for i in program.forward if isinstance(i, Call) and "LocalSize" in repr(i.args)]
    assert local and all(group in program.sizes for i in local for group in _groups(i))


def _groups(call: Call) -> list[str]:
    found: list[str] = []

    def walk(tree: Any) -> None:
        if isinstance(tree, (tuple, list)) and not hasattr(tree, "node"):
            for item in tree:
                walk(item)
        elif hasattr(tree, "scale"):
            found.append(tree.group)

    walk(call.args)
    return found


def test_names_die_after_their_last_reader() -> None:
    a, b = (
        Call(("b",), "aten.neg.default", (), (), ""),
        Call(("c", None, "d"), "aten.native_layer_norm.default", (), (), ""),
    )
    assert last_uses([a, b], keep=("d",)) == (("b",), ("c",))


def test_group_constants_are_short_unique_identifiers() -> None:
    labels = {
        "g0": "batch",
        "g1": "heads of model.h.0.attn",
        "g2": "model.h.1.mlp.weight dim 1",
        "g3": "batch",
        "g4": "7",
    }
    assert dict(group_labels(labels)) == {
        "g0": "BATCH",
        "g1": "HEADS_OF_H_0_ATTN",
        "g2": "H_1_MLP_WEIGHT_DIM_1",
        "g3": "BATCH_2",
        "g4": "GROUP_7",
    }


def changed(plan: Plan, **fields: Any) -> Plan:
    return plan.model_copy(update=fields)


def refused(graph: Graph, plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message) as e:
        lower(graph, plan)
    assert "\n" not in str(e.value)


def test_a_plan_for_another_graph_is_refused(found: Choices) -> None:
    refused(found.graph, cases.data_parallel((5, 2, 1)), "is not for this 'Linear': only the plan's has i_targets_0")


def test_a_strategy_that_is_no_rule_is_refused(found: Choices) -> None:
    strategies = greedy_strategies(found, {"args.0": (0, 6)})
    product = next(n.name for n in found.graph.nodes if n.op == "aten.mm.default")
    strategies[product] = Strategy(strategies[product].inputs, (REPLICATE,))  # a rank has its own rows only
    plan = make_plan(found, strategies, sizes_for(found, (3, 2, 1)))
    refused(found.graph, plan, f"{product} .*no sharding rule allows")


def test_missing_and_surplus_strategies_are_refused(found: Choices) -> None:
    plan = plan_of(found, {}, (3, 2, 1))
    some = dict(plan.strategies)
    del some["p_w"]
    refused(found.graph, changed(plan, strategies=some), "no strategy for p_w")
    refused(found.graph, changed(plan, strategies=plan.strategies | {"more": "-> R"}), "strategies for")


def test_conversions_that_do_not_follow_from_the_strategies_are_refused(found: Choices) -> None:
    plan = plan_of(found, {"args.0": (0, 6), "w": (0, 4)}, (3, 2, 1))
    first, *rest = plan.conversions
    refused(found.graph, changed(plan, conversions=tuple(rest)), "lacks the conversion of p_w")
    refused(found.graph, changed(plan, conversions=(first, first, *rest)), "do not need")
    odd = first.model_copy(update={"decomposition": "carrier_pigeon"})
    refused(found.graph, changed(plan, conversions=(odd, *rest)), "no decomposition 'carrier_pigeon'")
    other = first.model_copy(update={"collective": "all_reduce"})
    refused(found.graph, changed(plan, conversions=(other, *rest)), "not as its strategies say")


def test_a_partial_source_is_refused(found: Choices) -> None:
    plan = replicated_plan(found.graph, world_size=2)
    refused(found.graph, changed(plan, strategies=plan.strategies | {"p_w": "-> P"}), "cannot be a partial sum")


@pytest.mark.parametrize("seed", range(4))
def test_any_sound_plan_lowers_to_as_many_conversions_as_it_has(seed: int) -> None:
    plan = cases.anything(seed)
    program = lower(gpt2.graph(), plan)
    assert len(program.conversions) <= len(plan.conversions)
    planned = Counter((c.value, c.target) for c in plan.conversions)
    assert all(planned[str(program.held[c.input].value), str(c.target)] for c in program.conversions)
