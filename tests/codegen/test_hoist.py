"""What follows from the batch alone and goes on the wire is made first; nothing else moves."""

from __future__ import annotations

from functools import cache

import torch

from hap.capture import interpret, source_values
from hap.codegen.lowering import lower
from hap.codegen.passes.hoist import hoist_batch_sums
from hap.codegen.passes.runner import run_passes, standard_passes
from hap.codegen.program import Call, Convert, Instruction, Program, Start, Wait, verify_program
from hap.runtime.lockstep import run_lockstep
from tests._support import cases, gpt2


@cache
def data_parallel() -> Program:
    """GPT-2's loss divides by the number of targets that are not to be ignored, summed over the ranks."""
    return lower(gpt2.graph(), cases.data_parallel((5, 2, 1)))


def products(part: tuple[Instruction, ...]) -> list[int]:
    return [at for at, i in enumerate(part) if isinstance(i, Call) and "mm" in i.op]


def test_what_the_number_of_targets_is_counted_from_comes_first() -> None:
    program = data_parallel()
    after = hoist_batch_sums(program)
    verify_program(after)
    assert after.backward == program.backward and set(after.forward) == set(program.forward)
    count = next(i for i in program.forward if isinstance(i, Convert) and i.kind == "all_reduce")
    made = next(at for at, i in enumerate(after.forward) if count.input in i.outputs)
    assert made < min(products(after.forward)) and max(products(program.forward)) < program.forward.index(count)
    parameters = {s.name for s in program.sources_of("parameter")}
    assert not any(parameters & set(i.inputs) for i in after.forward[: made + 1])


def test_nothing_else_moves() -> None:
    program = data_parallel()
    after = hoist_batch_sums(program)
    count = next(i for i in program.forward if isinstance(i, Convert) and i.kind == "all_reduce")
    made = next(at for at, i in enumerate(after.forward) if count.input in i.outputs)
    stayed = [i for i in program.forward if i not in after.forward[: made + 1]]
    assert list(after.forward[made + 1 :]) == stayed
    ops = [i.op.split(".")[1] for i in after.forward[: made + 1] if isinstance(i, Call)]
    assert "ne" in ops and "sum" in ops and "embedding" not in ops
    assert hoist_batch_sums(after).forward == after.forward


def test_the_sum_is_under_way_while_the_model_computes() -> None:
    forward = run_passes(data_parallel(), standard_passes()).program.forward
    start = next(at for at, i in enumerate(forward) if isinstance(i, Start))
    wait = next(at for at, i in enumerate(forward) if isinstance(i, Wait))
    assert start < min(products(forward)) and max(products(forward)) < wait


def test_the_step_is_the_same_to_the_last_bit() -> None:
    graph = gpt2.graph()
    values = interpret(graph, source_values(graph, gpt2.build(), (gpt2.batch(),), gpt2.batch(), tangent=1.3))
    program = data_parallel()
    found, expected = (run_lockstep(p, values, check=True) for p in (hoist_batch_sums(program), program))
    assert torch.equal(found.loss, expected.loss)
    assert all(torch.equal(found.gradients[t], g) for t, g in expected.gradients.items())
