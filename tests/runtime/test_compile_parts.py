"""``program.compile()``: what lies between collectives runs by ``torch.compile``, and is what one device computes."""

from __future__ import annotations

import pytest
import torch

import hap
from hap.plan import Plan
from tests._support import cases, gpt2
from tests._support.plans import replicated_plan
from tests._support.ranks import run_ranks
from tests.runtime.test_features_batches import apart
from tests.runtime.test_no_sync import compiled, language

TOLERANCE = 1e-9
STEPS = (8, 2), (8, 1), (5, 1), (8, 1)  # samples of a batch; batches of a step


def train(rank: int, plan: Plan, backend: str, steps: int = len(STEPS)) -> list[float]:
    """Errors of losses and gradients of the first so many of ``STEPS``, and of an evaluation. Of a step's batches
    gradients are exchanged once."""
    program, model = compiled(plan, language), gpt2.build()
    program.compile(backend=backend)
    errors = []
    for number, (size, batches) in enumerate(STEPS[:steps]):
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
    with torch.no_grad():
        program.eval()
        errors.append(apart(program(*share, targets=targets), gpt2.lm_loss(model.eval()(x), y)))
    return errors


@pytest.mark.parametrize(
    ("plan", "steps"),
    [("zero", 1), *(pytest.param(plan, len(STEPS), marks=pytest.mark.long) for plan in ("data", "zero"))],
)
def test_parts_between_collectives(plan: str, steps: int) -> None:
    made = cases.data_parallel((5, 3)) if plan == "data" else cases.zero((5, 3), regather=True)
    for errors in run_ranks(2, train, made, "aot_eager", steps):
        assert len(errors) > 20 and max(errors) < TOLERANCE


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_one_rank_is_compiled_without_a_break(backend: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    assert max(train(0, replicated_plan(gpt2.graph()), backend)) < TOLERANCE
    assert not counters["graph_break"]
    torch._dynamo.reset()


def test_what_is_compiled_may_be_printed() -> None:
    program: hap.HapProgram = compiled(replicated_plan(gpt2.graph()), language)
    program.compile()
    assert "class Forward" in program.print_readable()
