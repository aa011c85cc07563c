"""ACCO on real ranks does what one process does by the paper's equations."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import hap
from benchmarks.zoo_models.reference import SameDraws
from hap.errors import ProgramError
from hap.mesh_plan import MeshPlan
from hap.plan import Plan
from tests._support import cases, gpt2
from tests._support.mesh import make_mesh
from tests._support.plans import replicated_plan
from tests._support.ranks import run_alike
from tests.runtime.test_features_batches import apart, batch, net_plans
from tests.runtime.test_no_sync import Data, compiled, language, net_meshes, parts

TOLERANCE, MAX_NORM, UPDATES = 1e-9, 0.5, 4


class Reference:
    """Section 3 of the paper, on one device: x is ``model``."""

    def __init__(self, data: Data, batches: int) -> None:
        build, self.loss_fn = parts(data)
        self.model, self.half = build(), batches // 2
        self.batches = batches
        self.computing = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.first: list[torch.Tensor] | None = None
        self.next = copy.deepcopy(self.model)
        self.count = 0

    def step(self, x: torch.Tensor, y: torch.Tensor, seed: int) -> torch.Tensor:
        with SameDraws(seed):
            loss = self.loss_fn(self.computing(x), y)
        (loss / self.batches).backward()
        self.count += 1
        if self.count % self.half == 0:
            self.swap()
        return loss.detach()

    def swap(self) -> None:
        """What was made beside this half is computed at now, and what this half's gradients make comes after it."""
        found = [p.grad for p in self.computing.parameters()]
        buffers = {n: b.clone() for n, b in self.computing.named_buffers()}
        self.computing = copy.deepcopy(self.next)
        self.computing.load_state_dict(buffers, strict=False)
        self.computing.zero_grad()
        if self.first is None:
            self.first = [g.clone() for g in found]
            guess, state = copy.deepcopy(self.model), copy.deepcopy(self.optimizer.state_dict())
            optimizer = torch.optim.AdamW(guess.parameters(), lr=1e-3)
            optimizer.load_state_dict(state)
            self.update(guess, optimizer, [2 * g for g in found])
            self.next = guess
        else:
            self.update(self.model, self.optimizer, [a + b for a, b in zip(self.first, found, strict=True)])
            self.scheduler.step()
            self.first, self.next = None, copy.deepcopy(self.model)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def train(rank: int, plans: Mapping[str, Plan | MeshPlan], data: Data, batches: int) -> dict[str, list[float]]:
    return {name: train_one(compiled(plan, data), data, batches) for name, plan in plans.items()}


def train_one(program: hap.HapProgram, data: Data, batches: int) -> list[float]:
    """Errors of the losses, and after the last update of the parameters and buffers."""
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    acco = hap.Acco(program, optimizer, batches=batches, max_norm=MAX_NORM, scheduler=scheduler)
    theirs, found = Reference(data, batches), []
    for number in range(UPDATES * batches):
        x, y = data(number, 8 if number % 3 else 5)
        seed = program.random_seed
        share, targets = program.shard_batch((x,), y)
        found.append(apart(acco.step(*share, targets=targets), theirs.step(x, y, seed)))
    acco.finish()
    assert scheduler.last_epoch == UPDATES == theirs.scheduler.last_epoch
    state = program.state_dict()
    expected = dict(theirs.model.named_parameters()) | dict(theirs.computing.named_buffers())
    return [*found, *(apart(state[n].double(), v.detach().double()) for n, v in expected.items() if n != "inward.bias")]


@pytest.mark.parametrize(
    ("data", "batches"), [(batch, 2), *(pytest.param(language, n, marks=pytest.mark.long) for n in (2, 4))]
)
def test_it_trains_by_the_papers_equations(data: Data, batches: int) -> None:
    """With a schedule, clipping, batches of two shapes, dropout and batch norm; on one axis and on two."""
    plans: dict[str, Plan | MeshPlan] = {**net_plans(), **net_meshes()}
    if data is language:
        plans = {"data": cases.data_parallel((5, 2, 1)), "zero": cases.zero((5, 0, 3), regather=True)}
        plans["mesh"] = make_mesh(gpt2.graph(), (2, 1), (5, 3))
    for rank in run_alike(3, train, plans, data, batches):
        for name, errors in rank.items():
            assert len(errors) > UPDATES * batches and max(errors) < TOLERANCE, (name, errors)


def go_on(rank: int, plan: Plan) -> list[float]:
    """What ``finish`` leaves is the last whole step's; from there it begins anew, as another one would."""
    program = compiled(plan, language)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1, momentum=0.9)
    acco, found = hap.Acco(program, optimizer), []
    for batches in (2, 3, 4):  # of three, one is of a step that is not complete
        before = program.state_dict()
        for number in range(batches):
            x, y = language(number)
            share, targets = program.shard_batch((x,), y)
            acco.step(*share, targets=targets)
        acco.finish()
        after = program.state_dict()
        found.append(max(apart(after[n], before[n]) for n in before))
        with torch.no_grad():
            again = program(*share, targets=targets)
            model = gpt2.build()
            model.load_state_dict(after)
            found.append(apart(again, gpt2.lm_loss(model(x), y)))
    return found


def test_it_can_be_finished_and_gone_on_with() -> None:
    for moved, first, _, second, _, third in run_alike(2, go_on, cases.data_parallel((5, 3))):
        assert moved > 1e-3 and max(first, second, third) < TOLERANCE


class Counting(torch.optim.Optimizer):
    """Keeps numbers of its steps in its groups, as schedule-free optimizers and Prodigy do; a mean of the gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"steps": 0, "norm": torch.zeros(()), "seen": [], "rate": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            group["last"] = group["rate"] / group["steps"]
            group["seen"].append(group["steps"])
            for p in group["params"]:
                group["norm"] += p.grad.square().sum()
                p -= group["last"] * p.grad


def test_an_estimate_leaves_what_an_optimizer_keeps_in_its_groups() -> None:
    program = compiled(replicated_plan(gpt2.graph()), language)
    optimizer = Counting(program.parameters())
    (group,) = optimizer.param_groups
    before = dict(group)
    acco = hap.Acco(program, optimizer)
    acco.step(*language(0)[:1], targets=language(0)[1])
    acco.finish()
    assert group == before and "last" not in group and group["seen"] == [] and group["norm"] == 0, "an estimate alone"
    for number in range(2 * UPDATES):
        x, y = language(number)
        acco.step(x, targets=y)
    acco.finish()
    assert group["steps"] == UPDATES and group["seen"] == [1, 2, 3, 4] and group["last"] == 0.1 / UPDATES
    assert group["norm"] is before["norm"] and group["norm"] > 0, "a tensor is the one that others may hold"


def test_what_it_cannot_do() -> None:
    program = compiled(replicated_plan(gpt2.graph()), language)
    optimizer: Any = torch.optim.SGD(program.parameters(), lr=0.1)
    with pytest.raises(ProgramError, match=r"an even number of them, not 3"):
        hap.Acco(program, optimizer, batches=3)
    acco = hap.Acco(program, optimizer)
    other = compiled(replicated_plan(gpt2.graph()), language)
    for one in (program, other):
        one.compile()
    with pytest.raises(ProgramError, match=r"leave out compile\(\)"):
        acco.step(*language(0))
    with pytest.raises(ProgramError, match=r"leave out compile\(\)"):
        hap.Acco(other, torch.optim.SGD(other.parameters(), lr=0.1))
    program = compiled(replicated_plan(gpt2.graph()), language)
    with pytest.raises(ProgramError, match=r"an optimizer of all of the program's trainable parameters"):
        hap.Acco(program, torch.optim.SGD(list(program.parameters())[:2], lr=0.1))
