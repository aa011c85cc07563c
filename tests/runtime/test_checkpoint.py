"""A run that is saved and gone on with, by other ranks under another plan, is the run that was never stopped."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hap
from hap.capture import capture
from hap.codegen.layout import Layout
from hap.errors import ProgramError
from hap.mesh_plan import parse_plan
from hap.placement import Shard
from hap.rules.choices import Choices, choices
from hap.runtime.checkpoint import Piece
from tests._support.mesh import make_mesh
from tests._support.plans import (
    greedy_strategies,
    make_plan,
    random_sizes,
    random_strategies,
    replicated_plan,
    sizes_for,
)
from tests._support.ranks import run_alike

BATCH, TOLERANCE, BEFORE, AFTER = 6, 1e-10, 3, 2


class Model(nn.Module):
    """A tied table, attention with its fused projection, dropout, a norm over the batch with running statistics, a
    parameter that is frozen and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 12)
        self.layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.1, batch_first=True)
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(12), requires_grad=False)
        self.unread = nn.Parameter(torch.ones(5))
        self.register_buffer("gain", torch.tensor(0.5), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layer(self.table(ids)).flatten(0, 1)).unflatten(0, ids.shape)
        return nn.functional.cross_entropy(self.head(x * self.scale * self.gain).flatten(0, 1), ids.flatten())


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().double()


def ids(step: int = 0) -> torch.Tensor:
    return torch.randint(0, 11, (BATCH, 4), generator=torch.Generator().manual_seed(step))


@cache
def found() -> Choices:
    return choices(capture(model(), ids()))


def any_plan(seed: int, ranks: int) -> hap.Plan:
    source = random.Random(seed)
    strategies = random_strategies(found(), source)
    return make_plan(found(), strategies, random_sizes(found(), ranks, source), world_size=ranks)


def any_mesh(ranks: Sequence[int], batches: Sequence[int], seed: int) -> Any:
    return make_mesh(found().graph, ranks, batches, seed)


State = dict[str, numpy.ndarray[Any, Any]]


def arrays(program: hap.HapProgram) -> State:
    return {name: tensor.numpy() for name, tensor in program.state_dict().items()}


class Run:
    """A program with an optimizer of two groups and a schedule."""

    def __init__(self, text: str, kind: str, seed: int = 0) -> None:
        self.program = hap.compile(model(seed), plan=parse_plan(text), example_inputs=ids())  # type: ignore[arg-type]
        matrices = [p for n, p in self.program.named_parameters() if "weight" in n]
        others = [p for n, p in self.program.named_parameters() if "weight" not in n]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
        self.optimizer = OPTIMIZERS[kind](groups)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = self.program(self.program.shard_batch(ids(step)))
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, directory: str) -> None:
        self.program.save_checkpoint(directory, self.optimizer, extra={"schedule": self.schedule.state_dict()})

    def load(self, directory: str) -> None:
        extra = self.program.load_checkpoint(directory, self.optimizer)
        self.schedule.load_state_dict(extra["schedule"])

    def state(self) -> State:
        """As arrays: tensors in a pipe are memory of a process that is about to end."""
        return arrays(self.program)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "fused": lambda groups: torch.optim.Adam(groups, lr=0.01, fused=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
}


def train_and_save(rank: int, text: str, kind: str, directory: str) -> tuple[list[float], State]:
    """Saved after ``BEFORE`` steps; losses of the steps after that, and the state after those."""
    run = Run(text, kind)
    run.train(range(BEFORE))
    run.save(directory)
    return run.train(range(BEFORE, BEFORE + AFTER)), run.state()


def load_and_train(rank: int, text: str, kind: str, directory: str) -> tuple[list[float], State]:
    run = Run(text, kind, seed=9)
    run.load(directory)
    return run.train(range(BEFORE, BEFORE + AFTER)), run.state()


def assert_same(results: list[Any], expected: Any) -> None:
    losses, state = expected
    for found_losses, found_state in results:
        assert found_losses == pytest.approx(losses, rel=TOLERANCE)
        assert found_state.keys() == state.keys()
        for name, whole in state.items():
            numpy.testing.assert_allclose(found_state[name], whole, TOLERANCE, TOLERANCE, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("adamw", (1, 3), (2, 2)),
        pytest.param("fused", (3, 2), (4, 3), marks=pytest.mark.long),
        pytest.param("momentum", (5, 3), (6, 4), marks=pytest.mark.long),
        ("sgd", (7, 2), (8, 1)),
    ],
)
def test_another_plan_on_other_ranks_goes_on(kind, first, second, tmp_path):
    (seed, ranks), (other_seed, other_ranks) = first, second
    expected = run_alike(ranks, train_and_save, any_plan(seed, ranks).to_json(), kind, str(tmp_path))[0]
    results = run_alike(other_ranks, load_and_train, any_plan(other_seed, other_ranks).to_json(), kind, str(tmp_path))
    assert_same(results, expected)


@pytest.mark.parametrize("mesh_first", [True, pytest.param(False, marks=pytest.mark.long)])
def test_between_one_axis_and_two(mesh_first, tmp_path):
    mesh, plan = any_mesh((2, 1), (4, 2), 1).to_json(), any_plan(2, 2).to_json()
    (first, ranks), (second, other_ranks) = ((mesh, 3), (plan, 2))[:: 1 if mesh_first else -1]
    expected = run_alike(ranks, train_and_save, first, "adamw", str(tmp_path))[0]
    assert_same(run_alike(other_ranks, load_and_train, second, "adamw", str(tmp_path)), expected)


def test_one_process_without_a_group_goes_on(tmp_path, recwarn):
    text = replicated_plan(found().graph).to_json()
    expected = run_alike(3, train_and_save, any_plan(1, 3).to_json(), "adamw", str(tmp_path / "a"))[0]
    assert not dist.is_initialized()
    assert_same([load_and_train(0, text, "adamw", str(tmp_path / "a"))], expected)
    Run(text, "sgd").save(str(tmp_path / "b"))
    assert not [w for w in recwarn if "distributed is disabled" in str(w.message)]


def elements(directory: Path) -> int:
    """Of all chunks of all tensors."""
    stored = torch.distributed.checkpoint.FileSystemReader(directory).read_metadata().state_dict_metadata
    chunks = [c for m in stored.values() if isinstance(m, TensorStorageMetadata) for c in m.chunks]
    return sum(math.prod(c.sizes) for c in chunks)


def kept_elements(plain: nn.Module) -> int:
    """Of what a state dict holds, tied parameters once, and of the three tensors that AdamW keeps of what it trains."""
    trained = [p for n, p in plain.named_parameters() if p.requires_grad and n != "unread"]
    held = {id(t): t.numel() for t in plain.state_dict(keep_vars=True).values()}
    return sum(held.values()) + 3 * sum(p.numel() for p in trained)


def saved_files(rank: int, text: str, directory: str) -> int:
    run = Run(text, "adamw")
    run.train(range(1))
    run.save(directory)
    return sum(p.numel() for p in run.program.parameters())


def test_every_element_is_written_once_and_plain_pytorch_reads_it(tmp_path):
    texts = any_plan(1, 3).to_json()
    held = run_alike(3, saved_files, texts, str(tmp_path / "a"))
    whole = sum(p.numel() for p in model().parameters())
    assert max(held) < whole < sum(held), "some are cut and some are whole"
    assert elements(tmp_path / "a") == kept_elements(model())

    dcp_to_torch_save(tmp_path / "a", tmp_path / "whole.pt")
    plain = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert plain["optimizer"]["table.weight"]["exp_avg"].shape == (11, 12)
    again = model(5)
    missing = again.load_state_dict(plain["model"], strict=False)
    assert missing.missing_keys == ["head.weight"] and not missing.unexpected_keys  # tied: under its first name
    one = Run(replicated_plan(found().graph).to_json(), "adamw", seed=7)
    one.load(str(tmp_path / "a"))
    for name, whole in one.program.state_dict().items():
        assert whole.equal(again.state_dict()[name])


def average(rank: int, text: str, directory: str) -> tuple[State, float, float]:
    """The averages, the loss by them and by the parameters, in evaluation."""
    run = Run(text, "momentum")
    averaged = AveragedModel(run.program, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for step in range(BEFORE):
        run.train(range(step, step + 1))
        averaged.update_parameters(run.program)
    found: hap.HapProgram = averaged.module  # type: ignore[assignment]
    assert found.plan is run.program.plan and found is not run.program
    found.save_checkpoint(directory)
    run.program.eval(), found.eval()
    share = run.program.shard_batch(ids(9))
    with torch.no_grad():
        by_average, by_parameters = averaged(share).item(), run.program(share).item()
    run.program.load_checkpoint(directory)
    assert run.program(share).item() == by_average
    return arrays(found), by_average, by_parameters


@pytest.mark.long
def test_averages_of_shares_are_shares_of_averages(tmp_path):
    (first, *others) = run_alike(3, average, any_plan(1, 3).to_json(), str(tmp_path))
    alone = average(0, replicated_plan(found().graph).to_json(), str(tmp_path / "alone"))
    state, by_average, by_parameters = alone
    assert by_average != pytest.approx(by_parameters, rel=1e-3)
    for whole, *losses in (first, *others):
        assert losses == pytest.approx([by_average, by_parameters], rel=TOLERANCE)
        for name, tensor in state.items():
            numpy.testing.assert_allclose(whole[name], tensor, TOLERANCE, TOLERANCE, err_msg=name)


# ---- pieces ----


@st.composite
def layouts(draw) -> tuple[tuple[int, ...], Layout]:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    sizes = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any)))
    layout = Layout(dim, draw(st.integers(1, 3)), draw(st.integers(1, 3)), sizes)
    extent = Shard(dim, layout.outer, sum(sizes), layout.unit, "g").extent
    return tuple(extent if d == dim else s for d, s in enumerate(shape)), layout


@given(layouts())
def test_chunks_of_all_ranks_are_the_whole(drawn_layout):
    shape, layout = drawn_layout
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    again = torch.full(shape, -1.0)
    for rank in range(len(layout.sizes)):
        piece = Piece(layout.take(whole, rank), shape, layout, rank)
        for chunk in piece.chunks():
            place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            assert (again[place] == -1).all(), "nothing twice"
            again[place] = piece.block(chunk.offsets)
    assert again.equal(whole)


# ---- refusals ----


def alone(kind: str = "adamw") -> Run:
    return Run(replicated_plan(found().graph).to_json(), kind)


def test_a_directory_takes_one_checkpoint(tmp_path):
    alone().save(str(tmp_path))
    with pytest.raises(ProgramError, match="holds a checkpoint already"):
        alone().save(str(tmp_path))


def test_what_is_no_checkpoint_of_ours_is_refused(tmp_path):
    with pytest.raises(ProgramError, match="holds no checkpoint"):
        alone().load(str(tmp_path))
    torch.distributed.checkpoint.save({"a": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ProgramError, match="that save_checkpoint did not write"):
        alone().load(str(tmp_path))


class Other(nn.Module):
    def __init__(self, rows: int = 6, name: str = "linear") -> None:
        super().__init__()
        self.add_module(name, nn.Linear(4, rows))
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.name)(x).square().mean()


def other(rows: int = 6, name: str = "linear") -> hap.HapProgram:
    plain, x = Other(rows, name), torch.zeros(3, 4)
    return hap.compile(plain, plan=replicated_plan(capture(plain, x)), example_inputs=x)


def test_another_model_is_refused_and_nothing_is_overwritten(tmp_path):
    other().save_checkpoint(tmp_path)
    for program, message in ((other(5), r"holds \(6, 4\), the model has \(5, 4\)"), (other(name="x"), "missing")):
        before = copy.deepcopy(program.state_dict())
        with pytest.raises(ProgramError, match=message):
            program.load_checkpoint(tmp_path)
        assert all(tensor.equal(before[name]) for name, tensor in program.state_dict().items())


def test_other_groups_are_refused(tmp_path):
    first, second = other(), other()
    first.save_checkpoint(tmp_path / "a", torch.optim.Adam(first.parameters()))
    groups = [{"params": [p]} for p in second.parameters()]
    with pytest.raises(ProgramError, match=r"the optimizer has a group of 1 parameters .linear.bias"):
        second.load_checkpoint(tmp_path / "a", torch.optim.Adam(groups))
    first.save_checkpoint(tmp_path / "b")
    with pytest.raises(ProgramError, match="that the checkpoint has not"):
        second.load_checkpoint(tmp_path / "b", torch.optim.Adam(second.parameters()))
    second.load_checkpoint(tmp_path / "a")  # the model alone


def test_a_parameter_of_another_module_is_refused(tmp_path):
    stranger = nn.Linear(2, 2)
    with pytest.raises(ProgramError, match=r"of shape \(2, 2\) that is not the program's"):
        other().save_checkpoint(tmp_path, torch.optim.SGD(stranger.parameters()))


def test_what_an_optimizer_keeps_of_no_parameter_is_refused(tmp_path):
    program = other()
    optimizer = torch.optim.SGD(program.parameters())
    optimizer.state["steps"] = 3
    with pytest.raises(
        ProgramError, match="the optimizer's state has 'steps', which is no parameter: save it as extra"
    ):
        program.save_checkpoint(tmp_path, optimizer)


class Watching(torch.optim.SGD):
    """Steps element by element, and keeps a mean of every column."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["column_mean"] = p.grad.mean(0)


def watched(rank: int, text: str, directory: str) -> str:
    run = Run(text, "sgd")
    optimizer = Watching(run.program.parameters())
    run.program(run.program.shard_batch(ids())).backward()
    optimizer.step()
    try:
        run.program.save_checkpoint(directory, optimizer)
    except ProgramError as e:
        return str(e)
    return ""


def test_an_optimizer_that_keeps_other_shapes_of_a_shard_is_refused(tmp_path):
    cuts = {n.target: (0, n.meta.shape[0]) for n in found().graph.sources("parameter")}
    plan = make_plan(found(), greedy_strategies(found(), cuts), sizes_for(found(), (2, 1)), world_size=2)
    for said in run_alike(2, watched, plan.to_json(), str(tmp_path)):
        assert "the optimizer keeps 'column_mean' of" in said and "can be saved of a parameter in shards" in said


def test_two_optimizers_and_a_model_alone(tmp_path):
    first = other()
    first(torch.ones(3, 4)).backward()
    both = [torch.optim.Adam([p], lr=0.1 * (i + 1)) for i, p in enumerate(first.parameters())]
    for optimizer in both:
        optimizer.step()
    first.save_checkpoint(tmp_path, *both, extra={"epoch": 3, "best": torch.tensor(0.5)})
    second = other()
    again = [torch.optim.Adam([p]) for p in second.parameters()]
    extra = second.load_checkpoint(tmp_path, *reversed(again))
    assert extra["epoch"] == 3 and extra["best"].item() == 0.5
    assert [o.param_groups[0]["lr"] for o in again] == [0.1, 0.2]
    for mine, theirs in zip(again, both, strict=True):
        (state,), (expected,) = mine.state.values(), theirs.state.values()
        assert state.keys() == expected.keys() and all(torch.equal(state[k], expected[k]) for k in expected)


def test_schedules_may_be_saved_and_code_may_not(tmp_path):
    program = other()
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    program.save_checkpoint(tmp_path / "a", optimizer, extra=[schedule.state_dict(), torch.get_rng_state()])
    found, _ = program.load_checkpoint(tmp_path / "a", optimizer)
    assert found == schedule.state_dict()
    with pytest.raises(ProgramError, match=r"hold pathlib\S*: only plain containers"):
        program.save_checkpoint(tmp_path / "b", extra={"data": Path("here")})
    assert not (tmp_path / "b").exists()


def test_parameters_on_meta_are_loaded(tmp_path):
    program = other()
    program.save_checkpoint(tmp_path)
    with torch.device("meta"):
        plain = Other()
    x = torch.zeros(3, 4)
    empty = hap.compile(plain, plan=replicated_plan(capture(plain, x)), example_inputs=x)
    with pytest.raises(ProgramError, match="nothing can be saved"):
        empty.save_checkpoint(tmp_path / "b")
    empty.load_checkpoint(tmp_path)
    assert empty(torch.ones(3, 4)).item() == program(torch.ones(3, 4)).item()


class Angles(Other):
    """With a buffer that is in no state dict, as rotary embeddings have one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(1.0, 5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.angles)


def test_a_buffer_on_meta_that_no_checkpoint_holds_must_be_given_a_value_after_loading(tmp_path):
    model, x = Angles(), torch.ones(3, 4)
    program = hap.compile(model, plan=replicated_plan(capture(model, x)), example_inputs=x)
    program.save_checkpoint(tmp_path / "a")
    with torch.device("meta"):
        plain = Angles()
    empty = hap.compile(plain, plan=replicated_plan(capture(plain, x)), example_inputs=x)
    with pytest.raises(ProgramError, match="nothing can be saved"):
        empty.save_checkpoint(tmp_path / "b")
    empty.load_checkpoint(tmp_path / "a")
    with pytest.raises(ProgramError, match=r"angles has no value .*load_state_dict first"):
        empty(x)
    empty.save_checkpoint(tmp_path / "b")  # which has all that a checkpoint holds
    empty.load_state_dict({"angles": model.angles}, strict=False)
    assert empty(x).item() == program(x).item()
