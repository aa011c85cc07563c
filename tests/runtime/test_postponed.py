"""Real ranks that postpone calls of the backward pass: one device's numbers, bit for bit those of the plan without, and
what then lives longer is foretold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import nn

import hap
from benchmarks.accuracy_rank import PLAIN
from benchmarks.allocations import Allocations
from hap.capture import capture
from hap.conversion import find_needs
from hap.cost_models.memory import memory_use
from hap.graph import Graph
from hap.order import NONE, Postponed, program_parts, repeats
from hap.plan import Plan, Recomputed, Strategy
from tests._support import cases, gpt2
from tests._support.plans import random_postponed, replicated_plan
from tests._support.ranks import run_alike
from tests.runtime.test_features_models import apart
from tests.runtime.test_recompute import compiled, offered

PLANS = {
    "data": partial(cases.data_parallel, (5, 2, 1)),
    "zero": partial(cases.zero, (5, 0, 3), regather=True),
    "zero, all again": lambda: cases.zero((5, 0, 3), regather=True, recomputed=offered(gpt2.graph())),
    "tensor": partial(cases.tensor_parallel, (3, 2, 1)),
    "anything": partial(cases.anything, 4),
}


def gradients_of(plan: Plan, passes_off: Sequence[str] = ()) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of two batches, added up, of which but the last exchanges nothing that can wait."""
    program = compiled(plan, passes_off)
    for number in (1, 2):
        mine, targets = program.shard_batch((gpt2.batch(number),), gpt2.batch(number))
        if number == 1:
            with program.no_sync():
                program(*mine, targets=targets).backward()
        else:
            loss = program(*mine, targets=targets)
            loss.backward()
    return loss.detach(), program.full_gradients()


def train(rank: int, plans: dict[str, Plan]) -> dict[str, list[float]]:
    """Errors of the loss and of all gradients against one process."""
    model = gpt2.build()
    for number in (1, 2):
        expected = gpt2.lm_loss(model(gpt2.batch(number)), gpt2.batch(number))
        expected.backward()
    found = {}
    for name, plan in plans.items():
        loss, gradients = gradients_of(plan)
        errors = [apart(gradients[n], p.grad) for n, p in model.named_parameters() if n in gradients]
        found[name] = [apart(loss, expected.detach()), *errors]
    return found


def bits(rank: int, plain: Plan, late: Plan) -> bool:
    """Whether both give the same gradients to the last bit, where nothing is bundled."""
    before, after = (gradients_of(plan, passes_off=("bucket",))[1] for plan in (plain, late))
    return before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


def postponing(plan: Plan, seed: int) -> Plan:
    return plan.model_copy(update={"postponed": random_postponed(gpt2.graph(), random.Random(seed))})


@pytest.mark.parametrize(
    "names",
    [("zero", "zero, all again"), pytest.param(("data", "tensor", "anything"), marks=pytest.mark.long)],
    ids=["some", "others"],
)
def test_gpt2_equals_one_device(names: tuple[str, ...]) -> None:
    for rank in run_alike(3, train, {name: postponing(PLANS[name](), 0) for name in names}):
        for name, errors in rank.items():
            assert len(errors) == 1 + 28 and max(errors) < 1e-10, (name, max(errors))


def test_gradients_are_those_of_the_plan_without_to_the_last_bit() -> None:
    plan = PLANS["tensor"]()
    assert run_alike(3, bits, plan, postponing(plan, 1)) == [True] * 3


def tall() -> nn.Module:
    """Layers of which activations are most of what a step holds."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(48, 48), nn.Tanh())))


def rows() -> torch.Tensor:
    return torch.randn(512, 48, generator=torch.Generator().manual_seed(0))


def mean_square(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


@pytest.mark.parametrize("repeated", [False, True])
def test_the_ledger_knows_what_waits(repeated: bool) -> None:
    """All gradients of weights at the end of the backward pass: what they are made of is there until then, whether it
    was kept or made again."""
    graph = capture(tall(), (rows(),), loss_fn=mean_square, name="tall")
    calls = [n.name for n in graph.nodes if n.op == "aten.tanh.default"] if repeated else []
    recomputed = (Recomputed(block="", what="all", calls=tuple(calls)),) if calls else ()
    plan = replicated_plan(graph).model_copy(update={"recomputed": recomputed})
    strategies = {name: Strategy.parse(text) for name, text in plan.strategies.items()}
    needs = find_needs(graph, strategies)
    peaks = []
    for late in (NONE, all_late(graph)):
        again = repeats(graph, strategies, calls, program_parts(graph, late))
        foretold = memory_use(graph, strategies, {}, needs, 1, "sgd", again=again, postponed=late).peak_bytes[0]
        peaks.append(measured(plan.model_copy(update={"postponed": dict(late)})))
        assert foretold == pytest.approx(peaks[-1], rel=0.05)
    assert peaks[1] > 1.2 * peaks[0]


def all_late(graph: Graph) -> Postponed:
    """The products whose results have a weight's shape."""
    shapes = {n.meta.shape for n in graph.sources("parameter")}
    return {"": tuple(n.name for n in graph.nodes if n.op == "aten.mm.default" and n.meta.shape in shapes)}


def measured(plan: Plan) -> int:
    """Peak bytes of forward and backward, parameters and inputs included."""
    program = hap.compile(tall(), plan=plan, passes_off=PLAIN, example_inputs=(rows(),), loss_fn=mean_square)
    batch, seen = rows(), Allocations()
    seen.keep((*program.parameters(), *program.buffers(), batch))
    with seen:
        program(batch).backward()
    return seen.peak
