"""``program.compile()``: what lies between collectives runs by ``torch.compile``, and is what one device computes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import hap
from hap.plan import Plan
from tests._support import cases, gpt2
from tests._support.plans import replicated_plan
from tests._support.ranks import run_alike
from tests.runtime.test_features_batches import apart
from tests.runtime.test_no_sync import compiled, language

TOLERANCE = 1e-9
STEPS = (8, 2), (8, 1), (5, 1), (8, 1)  # samples of a batch; batches of a step


def train(rank: int, plan: Plan, backend: str, steps: Sequence[tuple[int, int]], evaluates: bool = True) -> list[float]:
    """Errors of losses and gradients of these steps, and of an evaluation. Of a step's batches gradients are exchanged
    once."""
    program, model = compiled(plan, language), gpt2.build()
    program.compile(backend=backend)
    errors = []
    for number, (size, batches) in enumerate(steps):
        program.zero_grad(), model.zero_grad()
        for last in range(batches):
            x, y = language(number, size)
            share, targets = program.shard_batch((x,), y)
            expected = gpt2.lm_loss(model(x), y)
            expected.backward()
            if last + 1 < batches:
                with program.no_sync():
                    program(*share, targets=targets).backward()
                continue
            loss = program(*share, targets=targets)
            loss.backward()
        gradients = program.full_gradients()
        errors.append(apart(loss.detach(), expected.detach()))
        errors += [apart(gradients[n], p.grad) for n, p in model.named_parameters() if p.grad is not None]
    if evaluates:
        with torch.no_grad():
            program.eval()
            errors.append(apart(program(*share, targets=targets), gpt2.lm_loss(model.eval()(x), y)))
    return errors


@pytest.mark.parametrize(
    ("plan", "all_steps"),
    [("zero", False), *(pytest.param(plan, True, marks=pytest.mark.long) for plan in ("data", "zero"))],
)
def test_parts_between_collectives(plan: str, all_steps: bool) -> None:
    """``all_steps``: of several batches, of other sizes, and an evaluation; else one step of one batch."""
    made = cases.data_parallel((5, 3)) if plan == "data" else cases.zero((5, 3), regather=True)
    for errors in run_alike(2, train, made, "aot_eager", STEPS if all_steps else [(8, 1)], all_steps):
        assert len(errors) > 20 and max(errors) < TOLERANCE


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("backend", "steps"),
    [("aot_eager", STEPS[:1]), *(pytest.param(b, STEPS, marks=pytest.mark.long) for b in ("aot_eager", "inductor"))],
    ids=("aot_eager", "aot_eager, all steps", "inductor, all steps"),
)
def test_one_rank_is_compiled_without_a_break(backend: str, steps: Sequence[tuple[int, int]]) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    assert max(train(0, replicated_plan(gpt2.graph()), backend, steps)) < TOLERANCE
    assert not counters["graph_break"]
    torch._dynamo.reset()


def test_what_is_compiled_may_be_printed() -> None:
    program: hap.HapProgram = compiled(replicated_plan(gpt2.graph()), language)
    program.compile()
    assert "class Forward" in program.print_readable()
