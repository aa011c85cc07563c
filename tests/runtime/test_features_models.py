"""What users' models bring along: activation checkpointing, several outputs, ``torch.compile``, random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hap
from benchmarks.zoo_models.reference import SameDraws
from hap.capture import capture
from hap.dropout import keep_mask
from hap.errors import CaptureError, ProgramError
from hap.plan import Plan
from hap.rules.choices import choices
from tests._support.plans import greedy_strategies, make_plan, replicated_plan, sizes_for
from tests._support.ranks import run_alike, run_ranks

BATCH, TOLERANCE = 8, 1e-10


class Block(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.inward, self.drop, self.outward = nn.Linear(6, 12), nn.Dropout(0.4), nn.Linear(12, 6)
        self.checkpointed = checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outward(self.drop(torch.tanh(self.inward(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


class Heads(nn.Module):
    """Keyword inputs in, a mapping out: the loss, the logits, and a tuple of what lies between."""

    def __init__(self, checkpointed: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(checkpointed) for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, *, x: torch.Tensor, labels: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        between = [x]
        for block in self.blocks:
            between.append(block(between[-1]))
        logits = self.head(between[-1]) * scale
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits, "between": tuple(between)}


def heads(checkpointed: bool = True) -> Heads:
    torch.manual_seed(0)
    return Heads(checkpointed).double()


def batch(step: int, size: int = BATCH) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 6, dtype=torch.float64, generator=generator)
    return {"x": x, "labels": torch.randint(0, 5, (size,), generator=generator), "scale": 2.0}


def plans(outputs: tuple[str, ...]) -> dict[str, Plan]:
    found = choices(capture(heads(), batch(0), outputs=outputs))
    inputs = {"kwargs.x": (0, BATCH), "kwargs.labels": (0, BATCH)}
    rows = {n.target: (0, n.meta.shape[0]) for n in found.graph.sources("parameter")}
    return {
        "data": make_plan(found, greedy_strategies(found, inputs), sizes_for(found, (5, 2, 1))),
        "zero": make_plan(found, greedy_strategies(found, inputs | rows), sizes_for(found, (5, 0, 3))),
    }


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


OUTPUTS = ("logits", "between.1")


def train_with_outputs(rank: int, made: dict[str, Plan]) -> dict[str, list[float]]:
    """Errors of loss, outputs and gradients, of a whole batch and of a smaller one in evaluation."""
    found: dict[str, list[float]] = {}
    for name, plan in made.items():
        program, model = hap.compile(heads(), plan=plan, example_inputs=batch(0), outputs=OUTPUTS), heads(False)
        errors = found.setdefault(name, [])
        for training, size in ((True, 8), (False, 5)):
            program.train(training), model.train(training)
            whole = batch(1, size)
            with SameDraws(program.random_seed):
                expected = model(**whole)
            loss = program(**program.shard_batch(whole))
            assert program.outputs.keys() == set(OUTPUTS) and not program.outputs["logits"].requires_grad
            errors += [apart(loss.detach(), expected["loss"].detach())]
            errors += [apart(program.outputs["logits"], expected["logits"].detach())]
            errors += [apart(program.outputs["between.1"], expected["between"][1].detach())]
        model.zero_grad()
        program.train(), model.train()
        with SameDraws(program.random_seed):
            model(**batch(2))["loss"].backward()
        program(**program.shard_batch(batch(2))).backward()
        gradients = program.full_gradients()
        errors += [apart(gradients[n], p.grad) for n, p in model.named_parameters()]
    return found


def test_outputs_beside_the_loss_are_whole_on_every_rank_and_checkpointed_blocks_drop_out_once() -> None:
    made = plans(OUTPUTS)
    for rank in run_ranks(3, train_with_outputs, made):
        for name, errors in rank.items():
            assert len(errors) == 6 + 10 and max(errors) < TOLERANCE, (name, errors)


def test_an_output_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(CaptureError, match=r"no output 'hidden'; it returns: loss, logits, between"):
        capture(heads(), batch(0), outputs=("hidden",))
    with pytest.raises(CaptureError, match=r"no output 'between.7'; it returns: 0, 1, 2"):
        capture(heads(), batch(0), outputs=("between.7",))
    with pytest.raises(CaptureError, match=r"output 'between' of the model is a tuple, no tensor"):
        capture(heads(), batch(0), outputs=("between",))


@pytest.mark.parametrize("form", ["tensor", "tuple"])
def test_one_tensor_or_a_tuple_may_be_what_a_model_returns(form: str) -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(6, 4, batch_first=True) if form == "tuple" else nn.Linear(6, 4), torch.randn(3, 2, 6)
    path = "1.0" if form == "tuple" else "output"
    loss_fn = (lambda out: out[0].sum()) if form == "tuple" else torch.sum
    graph = capture(model, x, loss_fn=loss_fn, outputs=(path,))
    program = hap.compile(model, plan=replicated_plan(graph), example_inputs=(x,), loss_fn=loss_fn, outputs=(path,))
    program(x)
    expected = model(x)
    torch.testing.assert_close(program.outputs[path], expected[1][0] if form == "tuple" else expected)


class Rewarded(nn.Module):
    """A loss that its gradient is made of; beside it what the backward pass reads, and what a loss in parts does."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.weight = nn.Linear(6, 5), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made, extra = torch.sigmoid(self.inward(x)), self.weight.square().sum()
        loss = made.square().mean() + extra
        return loss.exp() if kind == "exp" else loss, made, extra


def write_before_backward(rank: int) -> list[str]:
    """What is said of a write to the loss and to outputs, and how far off the loss or a gradient is if nothing is."""
    x, said = batch(0)["x"], []
    for kind, path in (("exp", ""), ("sum", "1"), ("sum", "2")):
        torch.manual_seed(0)
        model, options = Rewarded().double(), {"example_inputs": {"x": x, "kind": kind}, "outputs": ("1", "2")}
        found = choices(capture(model, options["example_inputs"], outputs=("1", "2")))
        wishes = {} if path == "1" else {"kwargs.x": (0, BATCH)}  # whole on every rank, it is no copy
        plan = make_plan(found, greedy_strategies(found, wishes), sizes_for(found, (5, 3)))
        program = hap.compile(model, plan=plan, **options)
        loss, expected = program(**program.shard_batch(options["example_inputs"])), model(x, kind)[0]
        with torch.no_grad():
            (program.outputs[path] if path else loss).mul_(0.5)
        expected.backward()
        try:
            loss.backward()
        except ProgramError as e:
            said.append(str(e))
            continue
        gradients = program.full_gradients()
        pairs = [(loss.detach(), expected.detach()), *((gradients[n], p.grad) for n, p in model.named_parameters())]
        said.append("" if max(apart(*pair) for pair in pairs) < TOLERANCE else "wrong")
    return said


def test_what_is_written_before_backward_is_told_of_or_does_no_harm() -> None:
    for loss, made, extra in run_alike(2, write_before_backward):
        assert "(the loss, or an output) was written between the step's forward and its backward" in loss
        assert "(the loss, or an output) was written between the step's forward and its backward" in made
        assert extra == "", "the loss, which is still under way, goes by what it was"


# ---- activation checkpointing ----


def test_recomputation_is_dropped_so_a_plan_counts_all_activations() -> None:
    """The same graph, and so the same plan and memory figure, with and without: the planner has no recomputation."""
    assert capture(heads(True), batch(0)).fingerprint == capture(heads(False), batch(0)).fingerprint


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_hugging_faces_gradient_checkpointing_is_the_same_graph(use_reentrant: bool) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=6)
    model, ids = GPT2LMHeadModel(config), torch.zeros(2, 5, dtype=torch.int64)
    example = {"input_ids": ids, "labels": ids, "use_cache": False}
    plain = capture(model, example)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert capture(model.train(), example).fingerprint == plain.fingerprint


# ---- torch.compile over a program ----


def compile_it(rank: int, plan: Plan, backend: str, in_place: bool) -> float:
    program, model = hap.compile(heads(), plan=plan, example_inputs=batch(0)), heads(False)
    if in_place:
        program.compile(backend=backend)
    fast: Any = program if in_place else torch.compile(program, backend=backend)
    share = program.shard_batch(batch(1))
    errors = []
    for _ in range(2):
        program.zero_grad(), model.zero_grad()
        with SameDraws(program.random_seed):
            expected = model(**batch(1))["loss"]
        expected.backward()
        loss = fast(**share)
        loss.backward()
        gradients = program.full_gradients()
        errors += [apart(loss.detach(), expected.detach())]
        errors += [apart(gradients[n], p.grad) for n, p in model.named_parameters()]
    return max(errors)


@pytest.mark.parametrize(
    ("backend", "in_place"),
    [*(pytest.param(backend, False, marks=pytest.mark.long) for backend in ("eager", "inductor")), ("eager", True)],
)
def test_torch_compile_over_a_program_changes_nothing(backend: str, in_place: bool) -> None:
    found = choices(capture(heads(), batch(0)))
    inputs = {"kwargs.x": (0, BATCH), "kwargs.labels": (0, BATCH)}
    plan = make_plan(found, greedy_strategies(found, inputs), sizes_for(found, (5, 2, 1)))
    assert max(run_alike(3, compile_it, plan, backend, in_place)) < TOLERANCE


# ---- dropout ----


class Drops(nn.Module):
    """Of powers of two, each once, its loss says which were kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * self.weight, 0.5).sum()


def drop(rank: int, plan: Plan, x: torch.Tensor) -> tuple[float, list[list[bool]]]:
    """(the loss, which elements of this rank's rows were kept)."""
    program = hap.compile(Drops(), plan=plan, example_inputs=x, outputs=())
    program.random_seed = 9
    share = program.shard_batch(x)
    start = (0, 3, 6)[rank]
    kept = keep_mask(share.shape, torch.tensor(9), 0.5, 0, (0, 1, len(x), 1, start))
    return program(share).item(), kept.tolist()


def test_masks_are_bit_equal_to_one_device_and_differ_from_rank_to_rank() -> None:
    x = (2.0 ** torch.arange(BATCH * 6, dtype=torch.float64)).reshape(BATCH, 6)  # 48 bits: sums are exact
    found = choices(capture(Drops(), x))
    plan = make_plan(found, greedy_strategies(found, {"args.0": (0, BATCH)}), sizes_for(found, (3, 3, 2)))
    ranks = run_ranks(3, drop, plan, x)
    with SameDraws(9):
        expected = Drops()(x).item()
    assert [loss for loss, _ in ranks] == [expected] * 3
    whole = keep_mask(x.shape, torch.tensor(9), 0.5, 0)
    assert [row for _, rows in ranks for row in rows] == whole.tolist()
    assert ranks[0][1] != ranks[1][1], "a mask goes by the place in the batch"


class Noisy(nn.Module):
    """Noise and a place of each row in a table, both drawn in the step, and noise that has no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(5, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.randint(0, 5, (len(x),), device=x.device)
        noisy = self.linear(x + self.table(rows) * torch.rand_like(x)) + torch.randn(6, dtype=x.dtype, device=x.device)
        return torch.distributions.Normal(noisy, 1.0).rsample().square().mean()


def noisy() -> Noisy:
    torch.manual_seed(0)
    return Noisy().double()


def draw(rank: int, plan: Plan, x: torch.Tensor) -> float:
    """The worst error of two steps' losses and of their gradients' sum."""
    program, expected = hap.compile(noisy(), plan=plan, example_inputs=x), noisy()
    errors = []
    for _ in range(2):
        with SameDraws(program.random_seed):
            loss = expected(x)
        found = program(program.shard_batch(x))
        found.backward()
        loss.backward()
        errors.append(apart(found.detach(), loss.detach()))
    gradients = program.full_gradients()
    return max(errors + [apart(gradients[n], p.grad) for n, p in expected.named_parameters()])


def test_random_numbers_of_real_ranks_are_those_of_one_device() -> None:
    x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = choices(capture(noisy(), x))
    plan = make_plan(found, greedy_strategies(found, {"args.0": (0, BATCH)}), sizes_for(found, (5, 0, 3)))
    assert max(run_ranks(3, draw, plan, x)) < TOLERANCE
