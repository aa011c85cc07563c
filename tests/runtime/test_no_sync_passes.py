"""What meets in one backward pass under ``no_sync()``: several losses of one program, terms of others, an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import hap
from hap.errors import ProgramError
from hap.plan import Plan
from hap.rules.choices import choices
from hap.runtime.program import HapProgram
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

    hook = shares[0].register_hook(fail)
    with pytest.raises(MemoryError):
        (loss(0, True) + loss(1, True)).backward()
    hook.remove()
    program.zero_grad()
    for one in (loss, of_model(model)):
        one(2, True).backward()
        one(3, False).backward()
    return said, worst_gradient(program, model)


def fail(gradient: torch.Tensor) -> None:
    raise MemoryError


def test_what_a_broken_pass_left_is_told_of_or_dropped() -> None:
    for (step, further), error in run_alike(2, break_off, plans()["data"]):
        assert "optimizer.step() after backward passes under no_sync() alone" in step
        assert "a backward pass under no_sync() did not come to its end: zero_grad(), and start anew" in further
        assert error < TOLERANCE
