"""What is done to a program, its optimizer and its parameters while ACCO's thread works, and before and after that."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hap
from hap.capture import capture
from hap.errors import ProgramError
from hap.plan import Plan
from hap.rules.choices import choices
from hap.runtime import elementwise
from hap.runtime.program import HapProgram
from hap.runtime.step import Step
from tests._support.plans import greedy_strategies, make_plan, replicated_plan, sizes_for
from tests._support.ranks import run_alike

BATCH = 8


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(BATCH, 6, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator)


def net(frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5))
    model[0].requires_grad_(not frozen)
    return model


def graph(**options: Any) -> Any:
    (x, y), loss_fn = batch(0), nn.functional.cross_entropy
    return capture(net(options.pop("frozen", False)), (x,), loss_fn=loss_fn, example_targets=y, **options)


def program_of(model: nn.Module, plan: Plan, **options: Any) -> HapProgram:
    (x, y), loss_fn = batch(0), nn.functional.cross_entropy
    return hap.compile(model, plan=plan, example_inputs=(x,), example_targets=y, loss_fn=loss_fn, **options)


def alone(frozen: bool = False) -> HapProgram:
    """On one rank."""
    return program_of(net(frozen), replicated_plan(graph(frozen=frozen)))


def sgd(program: HapProgram, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in program.parameters() if p.requires_grad], lr=lr)


def train(acco: hap.Acco, numbers: range) -> None:
    for number in numbers:
        x, y = batch(number)
        acco.step(x, targets=y)


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


# ---- values ----


@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_program_is_given_after_acco_was_made_counts(frozen: bool, tmp_path: Path) -> None:
    one = alone(frozen)
    with torch.no_grad():
        for p in one.parameters():
            p += 0.5
    train(acco := hap.Acco(one, optimizer := sgd(one)), range(4))
    acco.finish()
    one.save_checkpoint(tmp_path / "saved", optimizer)
    other = alone(frozen)
    later = hap.Acco(other, theirs := sgd(other))
    for before in (0, 4):  # nothing was computed; something was
        train(later, range(before))
        later.finish()
        other.load_checkpoint(tmp_path / "saved", theirs)
        later.finish()
        assert is_same(other.state_dict(), one.state_dict()), "nothing old is written over what was loaded"
    for one_acco in (acco, later):
        train(one_acco, range(4, 8))
        one_acco.finish()
    assert is_same(other.state_dict(), one.state_dict())


def test_while_batches_are_under_way_the_program_waits_for_finish(tmp_path: Path) -> None:
    program = alone()
    acco, state, (x, y) = hap.Acco(program, optimizer := sgd(program)), program.state_dict(), batch(0)
    calls: list[Callable[[], object]] = [
        lambda: program.load_state_dict(state),
        lambda: program.load_checkpoint(tmp_path),
        lambda: program.save_checkpoint(tmp_path / "none"),
        program.state_dict,
        lambda: program(x, targets=y),
        lambda: hap.Acco(program, optimizer),
    ]
    for batches in (1, 2, 3):
        train(acco, range(batches))
        for call in calls:
            with pytest.raises(ProgramError, match=r"batches of this program under way: acco.finish\(\) first"):
                call()
        copy.deepcopy(program).load_state_dict(state)  # is nobody's
        acco.finish()
        for call in (calls[0], calls[3], calls[4]):
            call()
    train(acco, range(2))
    with torch.no_grad():
        next(program.parameters()).zero_()
    with pytest.raises(ProgramError, match=r"the program was written to while hap.Acco had batches under way"):
        train(acco, range(2))
    acco.finish()
    assert not next(program.parameters()).any()
    train(acco, range(2))
    assert acco._running is not None
    acco._running.result()
    del acco  # and what it had under way
    gc.collect()
    program.load_state_dict(state)


# ---- options ----


class Gate:
    """Holds up an optimizer's steps, as a slow machine would, and knows by which rates they went."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.open, self.rates = threading.Event(), list[float]()
        optimizer.register_step_pre_hook(self.pass_by)

    def pass_by(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        assert self.open.wait(20)
        self.rates.append(float(optimizer.param_groups[0]["lr"]))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_options_count_as_they_are_when_a_half_is_complete(as_tensor: bool) -> None:
    program = alone()
    optimizer = torch.optim.AdamW(program.parameters(), lr=torch.tensor(1.0) if as_tensor else 1.0)
    gate, acco, (group,) = Gate(optimizer), hap.Acco(program, optimizer, batches=4), optimizer.param_groups
    for number in range(9):
        if as_tensor:
            group["lr"].fill_(number)
        else:
            group["lr"] = float(number)
        gate.open.set() if number % 2 else None
        x, y = batch(number)
        acco.step(x, targets=y)
        gate.open.clear()
        assert group["lr"] == number
        optimizer.zero_grad()
    gate.open.set()
    acco.finish()
    assert group["lr"] == 8 and gate.rates == [1, 3, 5, 7]
    assert all(kept["step"] == 2 for kept in optimizer.state.values()) and len(optimizer.state) == 6


class Halving(torch.optim.SGD):
    """Sets its own rate."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        self.param_groups[0]["lr"] /= 2
        self.steps = getattr(self, "steps", 0) + 1


def test_what_an_optimizer_writes_to_its_options_counts_where_the_user_wrote_nothing() -> None:
    program = alone()
    acco = hap.Acco(program, optimizer := Halving(program.parameters(), lr=0.8))
    (group,) = optimizer.param_groups
    train(acco, range(4))
    acco.finish()
    assert group["lr"] == 0.2 and optimizer.steps == 2
    train(acco, range(2))
    group["lr"] = 0.5
    acco.finish()
    assert group["lr"] == 0.5 and optimizer.steps == 3


def test_other_states_and_optimizers_that_would_step_by_themselves_are_refused() -> None:
    program = alone()
    acco = hap.Acco(program, optimizer := sgd(program))
    train(acco, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ProgramError, match=r"the optimizer was given another state beside ACCO's step"):
        acco.finish()
    acco.finish()
    train(acco, range(2))
    acco.finish()
    optimizer.inner = sgd(program)
    with pytest.raises(ProgramError, match=r"SGD keeps an optimizer or parameters of its own"):
        hap.Acco(program, optimizer)
    optimizer.inner = [program.get_parameter("0.weight")]
    with pytest.raises(ProgramError, match=r"SGD keeps an optimizer or parameters of its own"):
        hap.Acco(program, optimizer)
    replaced = sgd(program)
    replaced.step = lambda: None
    with pytest.raises(ProgramError, match=r"this one's was replaced"):
        hap.Acco(program, replaced)
    plateau: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(program))
    with pytest.raises(ProgramError, match=r"ReduceLROnPlateau needs a loss"):
        hap.Acco(program, plateau.optimizer, scheduler=plateau)


# ---- what is trained ----


def test_what_is_trained_stays_what_it_was() -> None:
    program = alone()
    weight, bias = program.get_parameter("0.weight"), program.get_parameter("3.bias")
    bias.requires_grad_(False)
    acco = hap.Acco(program, optimizer := sgd(program))
    train(acco, range(2))
    weight.requires_grad_(False)
    with pytest.raises(ProgramError, match=r"what is trained is not what it was .* make a new Acco"):
        train(acco, range(1))
    weight.requires_grad_(True)
    train(acco, range(2))
    bias.requires_grad_(True)
    optimizer.add_param_group({"params": [bias]})
    with pytest.raises(ProgramError, match=r"finish\(\), and make a new Acco"):
        train(acco, range(1))
    acco.finish()
    acco = hap.Acco(program, optimizer)
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        hook = register(lambda _: None)
        for call in (lambda: train(acco, range(1)), lambda: hap.Acco(program, optimizer)):
            with pytest.raises(ProgramError, match=r"0.weight has a hook on its gradient"):
                call()
        hook.remove()
    before = bias.detach().clone()
    train(acco, range(2))
    acco.finish()
    assert not torch.equal(before, bias)


# ---- what else runs meanwhile ----


class Slow(nn.Module):
    """Says when it is traced, and takes its time."""

    def __init__(self, traced: threading.Event) -> None:
        super().__init__()
        self.layer, self.traced = nn.Linear(6, 5), traced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.traced.set()
        threading.Event().wait(0.5)
        return self.layer(x)


def test_an_optimizer_does_not_step_while_a_model_is_traced() -> None:
    program, traced, seen = alone(), threading.Event(), list[bool]()
    acco, (x, y) = hap.Acco(program, optimizer := sgd(program)), batch(0)

    def look(*_: Any) -> None:
        traced.wait(0.5)
        seen.append(torch.compiler.is_compiling())

    optimizer.register_step_pre_hook(look)
    train(acco, range(1))
    capture(hidden(traced), (x,), loss_fn=nn.functional.cross_entropy, example_targets=y)
    acco.finish()
    assert traced.is_set() and seen == [False]


def hidden(traced: threading.Event) -> nn.Module:
    found = Slow.__new__(Slow)
    nn.Module.__init__(found)
    found.layer = nn.Linear(6, 5)
    type(found).traced = traced  # of the class, as models are copied
    return found


class Own(torch.optim.Optimizer):
    """Of nobody's that is known, so that it is tried out."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


def be_looked_at(rank: int, plan: Plan) -> tuple[str, list[bool]]:
    """The threads that try an optimizer out; what is said of parameters that ranks initialised for themselves."""
    asked, real = list[bool](), elementwise.is_elementwise

    def is_elementwise(optimizer: torch.optim.Optimizer) -> bool | None:
        asked.append(threading.current_thread() is threading.main_thread())
        return real(optimizer)

    program = program_of(net(), plan)
    torch.manual_seed(rank)
    with torch.no_grad():
        for p in program.parameters():
            p.normal_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elementwise, "is_elementwise", is_elementwise)
        acco = hap.Acco(program, Own(program.parameters()))
        share, targets = program.shard_batch((batch(0)[0],), batch(0)[1])
        with pytest.raises(ProgramError) as e:
            acco.step(*share, targets=targets)
        for _ in range(2):
            acco.step(*share, targets=targets)
        acco.finish()
    program.eval()
    with torch.no_grad():
        program(*share, targets=targets)  # has been looked at
    return str(e.value), asked


def test_programs_and_optimizers_are_looked_at_in_the_programs_own_thread() -> None:
    found = choices(graph())
    wishes = {"args.0": (0, BATCH), "targets.0": (0, BATCH), "3.weight": (0, 5)}
    plan = make_plan(found, greedy_strategies(found, wishes), sizes_for(found, (5, 3)))
    for said, asked in run_alike(2, be_looked_at, plan):
        assert "is whole on every rank, and was given other values on one rank than on another" in said
        assert asked == [True]


def test_a_model_that_was_written_to_is_told_of() -> None:
    model = net()
    program = program_of(model, replicated_plan(graph()))
    model.load_state_dict(net().state_dict())
    acco, (x, y) = hap.Acco(program, sgd(program)), batch(0)
    with pytest.warns(UserWarning, match=r"of the model was written to after it was compiled") as told:
        acco.step(x, targets=y)
    assert told[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        acco.step(x, targets=y)


def test_outputs_are_the_last_batchs() -> None:
    program = program_of(net(), replicated_plan(graph(outputs=("output",))), outputs=("output",))
    acco = hap.Acco(program, sgd(program))
    for number in range(3):
        x, y = batch(number)
        loss = acco.step(x, targets=y)
        assert torch.allclose(nn.functional.cross_entropy(program.outputs["output"], y), loss)


# ---- what does not come to its end ----


def fail(*_: object, **__: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("where", ["batch", "update"])
def test_after_what_did_not_come_to_its_end_finish_helps(where: str) -> None:
    program = alone()
    acco, before = hap.Acco(program, sgd(program)), program.state_dict()
    train(acco, range(1))
    with pytest.MonkeyPatch.context() as patch:
        if where == "batch":
            patch.setattr(Step, "backward", fail)
        else:
            patch.setattr(torch.optim.SGD, "step", fail)
        with pytest.raises(MemoryError):
            train(acco, range(3))
    with pytest.raises(ProgramError, match=r"did not come to its end: acco.finish\(\), and go on"):
        train(acco, range(1))
    acco.finish()
    other = alone()
    program.load_state_dict(before)
    both = acco, hap.Acco(other, sgd(other))
    for one in both:
        train(one, range(4))
        one.finish()
    assert is_same(program.state_dict(), other.state_dict()) and not is_same(program.state_dict(), before)
