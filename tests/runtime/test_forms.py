"""Calls that differ in what is no tensor: each form is a step of its own over the same parameters, on ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hap
from hap.capture import capture
from hap.errors import HapError, ProgramError
from hap.plan import Plan
from hap.rules.choices import choices
from hap.runtime.forms import MOST
from hap.runtime.variants import MANY
from tests._support.plans import greedy_strategies, make_plan, sizes_for
from tests._support.ranks import run_alike, run_ranks

BATCH, NOISE, WIDTH, TOLERANCE = 8, 5, 6, 1e-10
Batch = dict[str, Any]


class Adversaries(nn.Module):
    """Two players, who move in turns: what one is trained for the other must not."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(NOISE, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, 1))

    def forward(self, z: torch.Tensor, turn: str, real: torch.Tensor | None = None) -> torch.Tensor:
        made = self.maker(z)
        if turn == "maker":
            return F.softplus(-self.judge(made)).mean()
        assert real is not None
        return F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(made.detach())).mean()


class Book(nn.Module):
    """Codes that move only when they are told to; a mask that may be missing; a number that may be another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.codes = nn.Parameter(torch.randn(4, WIDTH), requires_grad=False)

    def forward(
        self, x: torch.Tensor, learn: bool, weight: float = 1.0, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = self.linear(x)
        if mask is not None:
            y = y * mask
        near = (y[:, None] - self.codes).square().sum(2).softmax(1)
        if learn:
            with torch.no_grad():
                self.codes.mul_(0.9).add_(0.1 * near.t() @ y)
        return weight * (near @ self.codes - y).square().mean()


def built(model: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model().double()


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plan(model: type[nn.Module], example: Batch) -> Plan:
    """The batch and trained parameters are dealt out."""
    found = choices(capture(built(model), example))
    rows = {n.target: (0, n.meta.shape[0]) for n in found.graph.sources("parameter") if n.meta.shape[0] > 1}
    wishes = {n.target: (0, BATCH) for n in found.graph.sources("input")} | rows
    return make_plan(found, greedy_strategies(found, wishes), sizes_for(found, (5, 2, 1)))


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n] - e).abs().max() / e.abs().max().clamp(min=1e-3)) for n, e in expected.items())


FIRST = {"z": numbers(0, BATCH, NOISE), "turn": "judge", "real": numbers(1, BATCH, WIDTH)}


def play(rank: int, made: Plan, whole: bool) -> float:
    """The worst error of norms and of the state after every move. ``whole``: batches are handed over with the flag in
    them; else only tensors are, and a share that was dealt once is used for both."""
    model, worst = built(Adversaries), 0.0
    program = hap.compile(built(Adversaries), plan=made, example_inputs=FIRST)
    players = [
        {who: torch.optim.SGD(m.get_submodule(who).parameters(), lr=0.1, momentum=0.9) for who in ("maker", "judge")}
        for m in (program, model)
    ]
    for step, size in enumerate((8, 8, 3, 8)):
        z, real = numbers(10 + step, size, NOISE), numbers(20 + step, size, WIDTH)
        dealt = program.shard_batch({"z": z, "real": real})
        for who in ("judge", "maker"):
            given = dealt if who == "judge" else {"z": dealt["z"]}
            if whole:
                given = program.shard_batch({"z": z, "turn": who} | ({"real": real} if who == "judge" else {}))
            ours = program(**{**given, "turn": who})
            theirs = model(z, who, real)
            for loss, optimizers in ((ours, players[0]), (theirs, players[1])):
                optimizers[who].zero_grad()
                loss.backward()
            norms = (  # the other player's gradients are old
                program.clip_grad_norm_(0.1, parameters=program.get_submodule(who).parameters()),
                nn.utils.clip_grad_norm_(model.get_submodule(who).parameters(), 0.1),
            )
            for optimizers in players:
                optimizers[who].step()
            worst = max(worst, abs(float(ours) - float(theirs)), abs(float(norms[0]) - float(norms[1])))
            worst = max(worst, apart(program.state_dict(), model.state_dict()))
    return worst


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.long)])
def test_adversaries_in_turns_are_trained_as_on_one_device(whole: bool) -> None:
    errors = run_ranks(3, play, plan(Adversaries, FIRST), whole)
    assert max(errors) < TOLERANCE, errors


X = {"x": numbers(2, BATCH, WIDTH), "learn": True, "weight": 1.0, "mask": None}


def vary(rank: int, made: Plan) -> float:
    model, worst = built(Book), 0.0
    program = hap.compile(built(Book), plan=made, example_inputs=X)
    ours, theirs = (torch.optim.SGD([m.get_parameter("linear.weight")], lr=0.1) for m in (program, model))
    mask = numbers(3, BATCH, 1)
    for step, flags in enumerate(
        (
            {},
            {"learn": False},
            {"weight": 0.5},
            {"mask": mask},
            {"mask": mask, "learn": False},
            {"mask": None},
            {"learn": True, "weight": 1.0},
            {"weight": 2},
        )
    ):
        x = numbers(30 + step, BATCH, WIDTH)
        for training in (True, False):
            program.train(training), model.train(training)
            said = {"learn": True, "weight": 1.0, "mask": None} | flags
            given = program.shard_batch({"x": x, **flags})
            with torch.set_grad_enabled(training):
                found, expected = program(**given), model(x, **said)
            if training:
                for loss, optimizer in ((found, ours), (expected, theirs)):
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            worst = max(worst, abs(float(found) - float(expected)), apart(program.state_dict(), model.state_dict()))
    return worst


def test_flags_numbers_and_none_may_change_from_call_to_call() -> None:
    errors = run_alike(3, vary, plan(Book, X))
    assert max(errors) < TOLERANCE, errors


def leave_out(rank: int, made: Plan) -> float:
    """A mask that some calls have, and a rank with one row of five samples and of three."""
    model, worst, rows = built(Book), 0.0, dict[int, int]()
    program = hap.compile(built(Book), plan=made, example_inputs=X)
    mask = numbers(3, 5, 1)
    for step, given in enumerate(({"mask": mask}, {}, {"learn": False}, {"mask": mask}, {}, {"weight": 0.5})):
        for size in (5,) if "mask" in given else (5, 3):
            x = numbers(60 + step, size, WIDTH)
            flags = {name: value for name, value in given.items() if name != "mask"}
            dealt = program.shard_batch({"x": x} | ({"mask": mask} if "mask" in given else {}))
            rows[size] = len(dealt["x"])
            found, expected = program(**dealt, **flags), model(x, **{"learn": True} | given)
            worst = max(worst, abs(float(found) - float(expected)))
    assert rank != 1 or rows[5] == rows[3]
    return max(worst, apart(program.state_dict(), model.state_dict()))


def test_what_only_some_calls_have_may_be_left_out_again() -> None:
    errors = run_alike(3, leave_out, plan(Book, X))
    assert max(errors) < TOLERANCE, errors


class Tasks(nn.Module):
    """One trunk, a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.LayerNorm(12))
        self.heads = nn.ModuleDict({"class": nn.Linear(12, 3), "value": nn.Linear(12, 1)})
        self.scale = torch.linspace(1, 2, 12, dtype=torch.float64)  # no buffer: a constant of the step

    def forward(self, x: torch.Tensor, y: torch.Tensor, task: str, aside: bool = False) -> torch.Tensor:
        trunk = self.trunk(x) * self.scale
        out = self.heads[task](trunk)
        loss = F.cross_entropy(out, y) if task == "class" else (out.squeeze(1) - y).square().mean()
        return loss + 0.1 * trunk.square().mean() if aside else loss


def task(step: int, name: str, size: int) -> Batch:
    classes = torch.randint(0, 3, (size,), generator=torch.Generator().manual_seed(step))
    y = classes if name == "class" else numbers(60 + step, size)
    return {"x": numbers(40 + step, size, WIDTH), "y": y, "task": name}


def add_up(rank: int, made: Plan) -> float:
    """A step has batches of both tasks, whose gradients are added up: what each rank has, and then over the ranks."""
    model, worst = built(Tasks), 0.0
    program = hap.compile(built(Tasks), plan=made, example_inputs=task(0, "class", BATCH) | {"aside": False})
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (program, model))
    batches = [("class", 8, {}), ("value", 8, {}), ("value", 3, {"aside": True}), ("class", 2, {"aside": True})]
    for step in range(3):
        for number, (name, size, flags) in enumerate(batches[: len(batches) - step]):
            batch = task(7 * step + number, name, size) | flags
            is_last = number == len(batches) - step - 1
            with contextlib.nullcontext() if is_last else program.no_sync():
                program(**program.shard_batch(batch)).backward()
            model(**batch).backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        worst = max(worst, apart(program.full_gradients(), expected))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    return max(worst, apart(program.state_dict(), model.state_dict()))


def test_gradients_of_several_tasks_are_added_up() -> None:
    errors = run_alike(3, add_up, plan(Tasks, task(0, "class", BATCH) | {"aside": False}))
    assert max(errors) < TOLERANCE, errors


def infer(rank: int, made: Plan) -> float:
    """What is met first in inference mode is trained with afterwards."""
    model, worst = built(Tasks), 0.0
    program = hap.compile(built(Tasks), plan=made, example_inputs=task(0, "class", BATCH) | {"aside": False})
    for step, (name, size) in enumerate((("class", 8), ("class", 5), ("value", 8), ("value", 3))):
        batch = task(step, name, size)
        for training in (False, True):
            program.train(training)
            with torch.inference_mode():
                found = program(**program.shard_batch(batch))
            worst = max(worst, abs(float(found) - float(model(**batch))))
        for one, given in ((program, program.shard_batch(batch)), (model, batch)):
            one.zero_grad()
            one(**given).backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        worst = max(worst, apart(program.full_gradients(), expected))
    return worst


def test_inference_mode_is_one_of_no_gradients() -> None:
    errors = run_alike(3, infer, plan(Tasks, task(0, "class", BATCH) | {"aside": False}))
    assert max(errors) < TOLERANCE, errors


def refused(rank: int, made: Plan) -> str:
    program = hap.compile(built(Book), plan=made, example_inputs=X | {"learn": False})
    with pytest.raises(HapError) as found:
        program(**program.shard_batch({"x": X["x"]}), learn=True)
    program(**program.shard_batch({"x": X["x"]}), learn=False).backward()
    return str(found.value)


def test_what_lies_in_shards_is_not_changed_by_another_call() -> None:
    for said in run_alike(3, refused, plan(Book, X | {"learn": False})):
        assert said.startswith("this call changes codes in its forward pass, and ranks hold shares of it"), said


def alone(model: nn.Module, example: Batch) -> hap.HapProgram:
    return hap.compile(model, hap.ClusterSpec.from_yaml(ONE), example_inputs=example, effort="quick")


ONE = """
name: one
backend: gloo
hosts: [{name: here, devices: [{name: cpu, tflops: {float32: 0.02}, memory: 2GB, memory_bandwidth: 8GB/s}]}]
"""


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, scale: float = 3.0, parts: tuple[float, ...] = (1.0, 2.0)) -> torch.Tensor:
        return (self.linear(x) * scale * sum(parts)).square().mean()


def test_what_is_left_out_is_as_it_was_compiled_for_other_shapes_too() -> None:
    """Not as the model's own default would have it."""
    model, x = built(Scaled), numbers(4, BATCH, WIDTH)
    program = alone(model, {"x": x, "scale": 0.5, "parts": (1.0, 4.0)})
    for size in (BATCH, 3):
        given = program.shard_batch({"x": x[:size]})
        torch.testing.assert_close(program(**given), model(x[:size], 0.5, (1.0, 4.0)))
        torch.testing.assert_close(program(**given, scale=2.0), model(x[:size], 2.0, (1.0, 4.0)))
        torch.testing.assert_close(program(**given, parts=(1.0,)), model(x[:size], 0.5, (1.0,)))


def test_what_changes_at_every_step_is_refused_in_the_end() -> None:
    """A program each would be compiled for ever."""
    model, x = built(Scaled), numbers(4, BATCH, WIDTH)
    program = alone(model, {"x": x, "scale": 0.0})
    for n in range(MOST):
        with contextlib.nullcontext() if n == 0 else pytest.warns(UserWarning, match=rf"^kwargs\.scale is {n / 4}, "):
            torch.testing.assert_close(program(x=x, scale=n / 4), model(x, n / 4))
    said = rf"{MOST} kinds of calls have been compiled for, and this is another one \(kwargs\.scale is 9\.5\)"
    with pytest.raises(ProgramError, match=said):
        program(x=x, scale=9.5)
    torch.testing.assert_close(program(x=x, scale=0.25), model(x, 0.25))


def test_many_shapes_of_batches_are_warned_of_once() -> None:
    model, x = built(Scaled), numbers(4, MANY + 2, WIDTH)
    program = alone(model, {"x": x, "scale": 1.0})
    with pytest.warns(UserWarning, match=rf"^{MANY} shapes of batches .* pad batches to a few lengths$") as found:
        for size in range(2, MANY + 2):
            torch.testing.assert_close(program(**program.shard_batch({"x": x[:size]})), model(x[:size], 1.0))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scales": 0.5}, r"kwargs\.scales; the program takes kwargs\.scale, kwargs\.x, .* what only some .* as None"),
        ({"scale": "much"}, "cannot capture Scaled: TypeError"),
        ({"scale": torch.ones(())}, "hand it to shard_batch first, whole"),
    ],
)
def test_what_is_no_argument_or_no_step_is_refused(given: Batch, said: str) -> None:
    model, x = built(Scaled), numbers(4, BATCH, WIDTH)
    program = alone(model, {"x": x, "scale": 1.0})
    for _ in range(2):
        with pytest.raises(HapError, match=said):
            program(x=x, **given)
    torch.testing.assert_close(program(x=x), model(x, 1.0))


def test_a_number_may_become_a_tensor() -> None:
    model, x = built(Scaled), numbers(4, BATCH, WIDTH)
    program = alone(model, {"x": x, "scale": 1.0})
    for n in (0.5, 0.25):
        scale = torch.tensor(n, dtype=torch.float64)
        torch.testing.assert_close(program(**program.shard_batch({"x": x, "scale": scale})), model(x, n))
    torch.testing.assert_close(program(x=x), model(x, 1.0))
