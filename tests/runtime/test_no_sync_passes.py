"""What meets in one backward pass under ``no_sync()``: several losses of one program, terms of others, an optimizer."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

import hap
from hap.errors import ProgramError
from hap.plan import Plan
from hap.rules.choices import choices
from hap.runtime import accumulate
from hap.runtime.accumulate import Unsummed
from hap.runtime.program import HapProgram
from hap.runtime.step import Step
from tests._support.plans import greedy_strategies, make_plan, sizes_for
from tests._support.ranks import run_alike
from tests.runtime.test_features_batches import BATCH, batch, graph_of, worst_gradient

TOLERANCE = 1e-10
Loss = Callable[[int, bool], torch.Tensor]  # of a batch; whether it is called inside


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 5)).double()


def plans() -> dict[str, Plan]:
    """For two ranks."""
    found = choices(graph_of(net()))
    inputs = {"args.0": (0, BATCH), "targets.0": (0, BATCH)}
    rows = {n.target: (0, n.meta.shape[0]) for n in found.graph.sources("parameter")}
    sizes = sizes_for(found, (5, 3))
    return {
        "data": make_plan(found, greedy_strategies(found, inputs), sizes),
        "zero": make_plan(found, greedy_strategies(found, inputs | rows), sizes),
    }


def compiled(plan: Plan) -> HapProgram:
    (x, y), loss_fn = batch(0), nn.functional.cross_entropy
    return hap.compile(net(), plan=plan, example_inputs=(x,), example_targets=y, loss_fn=loss_fn)


def of_program(program: HapProgram) -> Loss:
    def loss(place: int, inside: bool) -> torch.Tensor:
        x, y = batch(place, 8 if place < 4 else 3)
        share, targets = program.shard_batch((x,), y)
        with program.no_sync() if inside else nullcontext():
            return program(*share, targets=targets)

    return loss


def of_model(model: nn.Module) -> Loss:
    def loss(place: int, inside: bool) -> torch.Tensor:
        x, y = batch(place, 8 if place < 4 else 3)
        return nn.functional.cross_entropy(model(x), y)

    return loss


# What is added up for each backward pass: batches, and whether each is called inside.
PASSES: Mapping[str, list[list[tuple[int, bool]]]] = {
    "two inside": [[(0, True), (1, True)], [(2, False)]],
    "three inside, of two shapes": [[(0, True), (4, True), (1, True)], [(2, False)]],
    "twice two inside": [[(0, True), (1, True)], [(2, True), (4, True)], [(3, False)]],
    "one inside, one outside": [[(0, False), (1, True)], [(2, False)]],
    "one before, one inside, one outside": [[(3, True)], [(0, False), (1, True)], [(2, False)]],
    "one outside before, two inside": [[(3, False)], [(0, True), (1, True)], [(2, False)]],
}


def add_losses(rank: int, plans: Mapping[str, Plan]) -> dict[str, float]:
    found = {}
    for kind, plan in plans.items():
        program, model = compiled(plan), net()
        for name, passes in PASSES.items():
            for loss in (of_program(program), of_model(model)):
                for losses in passes:
                    sum(loss(place, inside) for place, inside in losses).backward()
            found[f"{kind}, {name}"] = worst_gradient(program, model)
            program.zero_grad(), model.zero_grad()
    return found


def test_losses_of_one_backward_pass_all_count() -> None:
    for errors in run_alike(2, add_losses, plans()):
        assert len(errors) == 2 * len(PASSES) and max(errors.values()) < TOLERANCE, errors


def add_terms(rank: int, plans: Mapping[str, Plan]) -> float:
    """A term that the program does not know of, made before the loss, so that its gradient comes after the zeros."""
    worst = 0.0
    for plan in plans.values():
        program, model = compiled(plan), net()
        for module, loss in ((program, of_program(program)), (model, of_model(model))):
            term = sum(p.square().sum() for p in module.parameters())
            (term + loss(0, True)).backward()
            loss(1, False).backward()
        worst = max(worst, worst_gradient(program, model))
    return worst


def test_a_term_that_was_made_before_the_loss_is_added() -> None:
    assert max(run_alike(2, add_terms, plans())) < TOLERANCE


def break_off(rank: int, plan: Plan) -> tuple[list[str], float]:
    """An optimizer that steps inside of the pass; a pass that ends before gradients arrive; what comes after both."""
    program, model, said = compiled(plan), net(), []
    loss, shares = of_program(program), list(program.parameters())

    def tell(call: Callable[[], object]) -> None:
        with pytest.raises(ProgramError) as e:
            call()
        said.append(str(e.value))

    hooks = [p.register_post_accumulate_grad_hook(lambda p: torch.optim.SGD([p]).step()) for p in shares]
    tell(lambda: loss(0, True).backward())
    for hook in hooks:
        hook.remove()
    tell(lambda: loss(1, False).backward())
    program.zero_grad()

    with pytest.raises(MemoryError):
        first, between = loss(0, True), Breaking.apply(torch.zeros((), requires_grad=True))
        (first + between + loss(1, True)).backward()
    program.zero_grad()

    loss(0, True).backward()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Step, "backward", fail)
        loss(1, False).backward()  # the one that is for both
    tell(lambda: loss(2, False).backward())
    tell(torch.optim.SGD(shares, lr=0.1).step)
    program.zero_grad()
    for one in (loss, of_model(model)):
        one(2, True).backward()
        one(3, False).backward()
    return said, worst_gradient(program, model)


class Breaking(torch.autograd.Function):
    """Between two losses, in whose backward pass nothing has arrived yet."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        raise MemoryError


def fail(*_: object) -> None:
    raise MemoryError


def test_what_a_broken_pass_left_is_told_of_or_dropped() -> None:
    for (step, *further), error in run_alike(2, break_off, plans()["data"]):
        assert "optimizer.step() after backward passes under no_sync() alone" in step
        assert len(further) == 3 and error < TOLERANCE
        for said in further:
            assert (
                said == "a backward pass of a step with no_sync() did not come to its end: zero_grad(), and start anew"
            )


def hook(rank: int, plan: Plan) -> tuple[list[str], float]:
    """On a gradient that waits: not in a pass that adds up, nor in the one that sums."""
    program, model = compiled(plan), net()
    loss, said = of_program(program), []
    for place, inside in ((0, True), (1, False)):
        handle = next(program.parameters()).register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        with pytest.raises(ProgramError) as e:
            loss(place, inside).backward()
        said.append(str(e.value))
        handle.remove()
        for one in (loss, of_model(model)):
            one(place, inside).backward()
    for one in (program, model):  # where nothing waits, it sees what the model's would
        next(one.parameters()).register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    for one in (loss, of_model(model)):
        one(2, False).backward()
    return said, worst_gradient(program, model)


def test_a_hook_on_a_gradient_that_waits_is_refused() -> None:
    for said, error in run_alike(2, hook, plans()["data"]):
        assert all("a hook on the gradient of 0.weight would see sums over several batches" in one for one in said)
        assert error < TOLERANCE


def test_optimizers_may_step_in_another_thread_while_programs_begin_to_wait() -> None:
    optimizer, waiting, done = torch.optim.SGD([nn.Parameter(torch.zeros(1))]), Unsummed({}), Event()
    others = [Unsummed({}) for _ in range(300)]  # it takes a while to look at all

    def step() -> int:
        for number in itertools.count():
            if done.is_set():
                return number
            optimizer.step()

    for other in others:
        other._wait()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    register = accumulate.register_optimizer_step_pre_hook(accumulate._before_step)
    try:
        with ThreadPoolExecutor(1) as thread:
            beside, end = thread.submit(step), time.monotonic() + 1.0
            while time.monotonic() < end and not beside.done():
                waiting._wait()
                waiting._drop()
            done.set()
            assert beside.result() > 0
    finally:
        sys.setswitchinterval(before)
        register.remove()
        for other in others:
            other._drop()
