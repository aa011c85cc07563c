"""What only the loss needs is cut off the forward part, from the loss's own collective on; nothing else is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from hap.codegen.fx import to_forward_module, to_loss_module
from hap.codegen.late import HANDLE, late_loss
from hap.codegen.lowering import lower
from hap.codegen.passes.runner import run_passes, standard_passes
from hap.codegen.program import Call, Convert, Program, Start, Together, Wait
from tests._support import cases, gpt2
from tests._support.plans import replicated_plan


@cache
def data_parallel() -> Program:
    """GPT-2's loss is the ranks' sums over the number of targets, which the backward part divides by, too."""
    return lower(gpt2.graph(), cases.data_parallel((5, 2, 1)))


def test_the_losss_sum_is_begun_and_its_arrival_is_left_for_later() -> None:
    program = run_passes(data_parallel(), standard_passes()).program
    late = late_loss(program)
    assert late is not None and program.loss_may_be_late
    arrival, *calls = late.last
    assert isinstance(arrival, Wait) and all(isinstance(call, Call) for call in calls)
    start = next(i for i in late.first if isinstance(i, Start) and i.handle == arrival.handle)
    assert start.work.kind == "all_reduce" and late.crossing[0] == arrival.handle
    assert program.loss in late.last[-1].outputs
    made = {name for i in late.first for name in i.outputs}
    assert {*program.saved, *program.updates.values()} <= made | {s.name for s in program.forward_sources}


def test_both_parts_together_are_the_forward_part() -> None:
    program = data_parallel()
    late = late_loss(program)
    assert late is not None
    joined = list(late.first)
    start = joined.index(next(i for i in joined if isinstance(i, Start)))
    work = joined[start].work  # type: ignore[union-attr]
    assert joined[start] == Start(HANDLE, work) and late.last[0] == Wait(HANDLE, work, work.module)
    joined[start : start + 1] = work.members
    assert (*joined, *late.last[1:]) == program.forward
    assert work.members[0].kind == "all_reduce" and len(work.members) == 1


def test_a_loss_that_something_else_needs_is_not_late() -> None:
    program = data_parallel()
    assert late_loss(replace(program, saved=(*program.saved, program.loss))) is None


def test_a_loss_that_no_rank_waits_for_is_not_late() -> None:
    assert late_loss(lower(gpt2.graph(), replicated_plan(gpt2.graph()))) is None


def test_the_losss_sum_shares_no_bundle_with_what_the_backward_part_needs() -> None:
    program = run_passes(data_parallel(), standard_passes(), off=("overlap",)).program
    late = late_loss(program)
    assert late is not None and not program.loss_may_be_late
    for instruction in program.forward:
        if isinstance(instruction, Together):
            kept = [name in program.saved for name in instruction.outputs]
            assert all(kept) or not any(kept)
    sent = [i for i in late.first if isinstance(i, (Convert, Together)) and i.kind == "all_reduce"]
    assert len(sent) == 1, "the number of targets"


def test_the_emitted_modules_hand_over_what_crosses() -> None:
    program = run_passes(data_parallel(), standard_passes()).program
    late = late_loss(program)
    assert late is not None
    first, last = to_forward_module(program, 0, late=late), to_loss_module(program, late, 0)
    names = [node.name for node in last.graph.nodes if node.op == "placeholder"]
    assert names == ["comm", *late.crossing]
    assert "comm.wait" in last.code and first.code.count("comm.wait") == 1 and first.code.count("comm.start") == 2
