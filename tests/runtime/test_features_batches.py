"""Batches that are not like the first, gradients over several of them, and evaluation in between: as one process."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hap
from benchmarks.zoo_models.reference import SameDraws
from hap.capture import capture
from hap.carry import carry_over
from hap.codegen.lowering import lower
from hap.errors import CaptureError, ProgramError
from hap.graph import Graph
from hap.plan import Plan
from hap.rules.choices import choices
from hap.runtime.data import ShareSampler
from hap.runtime.program import HapProgram
from hap.search.planner import plan_graph
from tests._support import cases, gpt2
from tests._support.plans import (
    greedy_strategies,
    make_plan,
    random_sizes,
    random_strategies,
    replicated_plan,
    sizes_for,
)
from tests._support.ranks import run_ranks

BATCH, TOLERANCE = 8, 1e-10


class Net(nn.Module):
    """Batch norm, dropout, and a branch on the mode that no operator shows."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.norm, self.drop = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.3)
        self.outward = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.outward(self.drop(torch.relu(self.norm(self.inward(x)))))
        return out * 1.5 if self.training else out


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(step: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, dtype=torch.float64, generator=generator), torch.randint(
        0, 5, (size,), generator=generator
    )


def graph_of(model: nn.Module) -> Graph:
    x, y = batch(0)
    return capture(model, x, loss_fn=nn.functional.cross_entropy, example_targets=y)


def net_plans() -> dict[str, Plan]:
    found = choices(graph_of(net()))
    inputs = {"args.0": (0, BATCH), "targets.0": (0, BATCH)}
    rows = {n.target: (0, n.meta.shape[0]) for n in found.graph.sources("parameter")}
    source = random.Random(3)
    return {
        "data": make_plan(found, greedy_strategies(found, inputs), sizes_for(found, (5, 2, 1))),
        "zero": make_plan(found, greedy_strategies(found, inputs | rows), sizes_for(found, (5, 0, 3)), regather=True),
        "any": make_plan(found, random_strategies(found, source), random_sizes(found, 3, source)),
    }


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest element."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def worst_gradient(program: HapProgram, model: nn.Module) -> float:
    """Beside what a bias in front of a batch norm gets, which is zero but for rounding."""
    whole = program.full_gradients()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert whole.keys() == expected.keys()
    return max(
        apart(whole[n], g) if g.abs().max() > 1e-14 else float(whole[n].abs().max() > 1e-14)
        for n, g in expected.items()
    )


# ---- gradients over several batches, a last batch that is smaller or that no rank can deal evenly ----


def accumulate(rank: int, plans: dict[str, Plan], whole_model: bool) -> dict[str, list[float]]:
    """Per plan the errors of: two micro-steps' mean, batches of 3 and of 7, an uneven pair, a full one after them."""
    return {name: accumulate_one(plan, whole_model) for name, plan in plans.items()}


def accumulate_one(plan: Plan, language: bool) -> list[float]:
    build, loss_fn = (gpt2.build, gpt2.lm_loss) if language else (net, nn.functional.cross_entropy)
    data: Any = (lambda step, size=BATCH: (gpt2.batch(step, size),) * 2) if language else batch
    x, y = data(0)
    program = hap.compile(build(), plan=plan, example_inputs=(x,), example_targets=y, loss_fn=loss_fn)
    model, found = build(), []
    for micro_steps in ((8, 8), (8, 3), (8,)) if language else ((8, 8), (3,), (7,), (8, 3), (8,)):
        program.zero_grad()
        model.zero_grad()
        for step, size in enumerate(micro_steps):
            x, y = data(10 + step, size)
            seed = program.random_seed
            share, targets = program.shard_batch((x,), y)
            loss = program(*share, targets=targets) / len(micro_steps)
            loss.backward()
            with SameDraws(seed):
                expected = loss_fn(model(x), y) / len(micro_steps)
            expected.backward()
            found.append(apart(loss.detach(), expected.detach()))
        found.append(worst_gradient(program, model))
    state = program.state_dict()
    return [*found, *(apart(state[n].double(), b.double()) for n, b in model.named_buffers())]


@pytest.mark.parametrize(
    "language",
    [pytest.param(False, id="batch norm and dropout"), pytest.param(True, id="gpt2", marks=pytest.mark.long)],
)
def test_micro_steps_and_smaller_batches_are_those_of_one_process(language: bool) -> None:
    plans = {"zero": cases.zero((5, 0, 3)), "tensor": cases.tensor_parallel((3, 2, 1))} if language else net_plans()
    for rank in run_ranks(3, accumulate, plans, language):
        assert rank.keys() == plans.keys()
        for name, errors in rank.items():
            assert len(errors) == (5 + 3 if language else 7 + 5 + 3) and max(errors) < TOLERANCE, (name, errors)


def train_an_epoch(rank: int, plan: Plan) -> tuple[list[int], float]:
    """(rows that this rank saw in each batch, error of the parameters) after 19 samples in batches of 8, 8 and 3."""
    x, y = batch(1, 19)
    data = TensorDataset(x, y)
    program = hap.compile(
        net(), plan=plan, example_inputs=x[:8], example_targets=y[:8], loss_fn=nn.functional.cross_entropy
    )
    sampler = program.batch_sampler(len(data), seed=4, drop_last=False)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=program.collate)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    model = net()
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    program.random_seed, rows = 0, []
    whole = list(ShareSampler(19, 8, None, 0, shuffle=True, seed=4, last=(3, None, None)))
    for seed, (share, indices) in enumerate(zip(loader, whole, strict=True)):
        rows.append(len(share[0]))
        program(share[0], targets=share[1]).backward()
        with SameDraws(seed):
            nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
        for one in (optimizer, theirs):
            one.step()
            one.zero_grad()
    state = program.state_dict()
    return rows, max(apart(state[n], p.detach()) for n, p in model.named_parameters() if n != "inward.bias")


def test_an_epoch_with_a_smaller_last_batch_trains_every_sample() -> None:
    plans = net_plans()
    found = run_ranks(3, train_an_epoch, plans["zero"])
    assert [rows for rows, _ in found] == [[5, 5, 2], [0, 0, 0], [3, 3, 1]], "rank 1 cannot tell them apart: it is told"
    assert max(error for _, error in found) < 1e-9


def collate_first(rank: int, plan: Plan) -> list[tuple[int, float]]:
    """(rows that this rank saw, error of the loss) of batches that are collated in a mode that has met none of their
    size, or not all sizes that the other mode has: a rank without a share must not compile for them alone."""
    loss_fn, dealt = nn.functional.cross_entropy, {8: (5, 0, 3), 5: (3, 0, 2)}
    found = []
    for is_first, then, sizes in ((False, True, (8, 5)), (True, False, (5, 8))):
        x, y = batch(0)
        program, model = hap.compile(net(), plan=plan, example_inputs=x, example_targets=y, loss_fn=loss_fn), net()
        program.train(is_first)
        program.shard_batch(*batch(0, 5))
        program.train(then), model.train(then)
        for size in sizes:
            x, y = batch(size, size)
            mine = range(sum(dealt[size][:rank]), sum(dealt[size][: rank + 1]))
            sent = pickle.loads(pickle.dumps(program.collate))  # to workers that are no forks
            assert [t.dtype for t in sent([])] == [x.dtype, y.dtype]
            share, targets = (sent if size == 5 else program.collate)([(x[i], y[i]) for i in mine])
            seed = program.random_seed
            with torch.no_grad(), SameDraws(seed):
                found.append((len(share), apart(program(share, targets=targets), loss_fn(model(x), y))))
    return found


def test_a_rank_without_a_share_collates_alone_in_a_mode_that_has_met_no_batch() -> None:
    found = run_ranks(3, collate_first, net_plans()["zero"])
    assert [[rows for rows, _ in rank] for rank in found] == [[5, 3, 3, 5], [0, 0, 0, 0], [3, 2, 2, 3]]
    assert max(error for rank in found for _, error in rank) < TOLERANCE


def test_a_loader_may_spawn_its_workers_but_no_program_is_pickled() -> None:
    (x, y), plan = batch(0), replicated_plan(graph_of(net()))
    program = hap.compile(net(), plan=plan, example_inputs=(x,), example_targets=y, loss_fn=nn.functional.cross_entropy)
    sampler, data = program.batch_sampler(BATCH, shuffle=False), TensorDataset(x, y)
    options = {"batch_sampler": sampler, "collate_fn": program.collate}
    (share,) = DataLoader(data, **options, num_workers=1, multiprocessing_context="spawn")
    torch.testing.assert_close(share, [x, y])
    with pytest.raises(ProgramError, match=r"cannot be pickled: save_checkpoint\(\) or state_dict\(\)"):
        pickle.dumps(program)
    copy.deepcopy(program)(share[0], targets=share[1]).backward()


class Pair(NamedTuple):
    x: torch.Tensor
    again: torch.Tensor


class OfPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5, dtype=torch.float64)

    def forward(self, x: torch.Tensor, again: torch.Tensor) -> torch.Tensor:
        return self.linear(x + again)


def test_a_batch_that_is_a_namedtuple_stays_one() -> None:
    (x, y), model = batch(0), OfPair()

    def loss_fn(out: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out, one) + nn.functional.cross_entropy(out, other)

    example, targets = Pair(x, 2 * x), Pair(y, y.flip(0))
    plan = replicated_plan(capture(model, example, loss_fn=loss_fn, example_targets=targets))
    program = hap.compile(model, plan=plan, example_inputs=example, example_targets=targets, loss_fn=loss_fn)
    share, dealt = program.shard_batch(example, targets)
    assert isinstance(share, Pair) and isinstance(dealt, Pair)
    torch.testing.assert_close(program(*share, targets=dealt), loss_fn(model(*example), *targets))


# ---- evaluation ----


def evaluate_in_between(rank: int, plans: dict[str, Plan]) -> dict[str, list[float]]:
    return {name: evaluate_one(plan) for name, plan in plans.items()}


def evaluate_one(plan: Plan) -> list[float]:
    """Errors of: training, evaluation at two sizes, training again, evaluation again."""
    loss_fn = nn.functional.cross_entropy
    x, y = batch(0)
    model = net()
    program = hap.compile(net(), plan=plan, example_inputs=(x,), example_targets=y, loss_fn=loss_fn)
    found = []
    for turn, (training, size) in enumerate(((True, 8), (False, 8), (False, 5), (True, 8), (False, 8), (True, 3))):
        program.train(training), model.train(training)
        program.zero_grad(), model.zero_grad()
        x, y = batch(turn, size)
        share, targets = program.shard_batch((x,), y)
        seed = program.random_seed
        with torch.set_grad_enabled(training), SameDraws(seed):
            expected = loss_fn(model(x), y)
        with torch.set_grad_enabled(training):
            loss = program(*share, targets=targets)
        found.append(apart(loss.detach(), expected.detach()))
        assert program.random_seed == seed + training, "evaluation draws nothing"
        if training:
            loss.backward(), expected.backward()
            found.append(worst_gradient(program, model))
        state = program.state_dict()
        found += [apart(state[n].double(), b.double()) for n, b in model.named_buffers()]
    return found


def test_evaluation_and_training_by_turns_are_those_of_one_process() -> None:
    plans = {name: plan for name, plan in net_plans().items() if name != "data"}
    for rank in run_ranks(3, evaluate_in_between, plans):
        for name, errors in rank.items():
            assert len(errors) == 6 + 3 + 18 and max(errors) < TOLERANCE, (name, errors)


# ---- what is carried over, and what is refused ----


def test_a_plan_carried_over_to_its_own_graph_is_the_same_but_for_its_words() -> None:
    graph = gpt2.graph()
    for plan in (cases.zero((5, 2, 1), regather=True), cases.tensor_parallel((3, 2, 1)), cases.anything(1)):
        again = carry_over(plan, graph, graph)
        assert again.strategies == plan.strategies and again.sizes == plan.sizes
        assert again.conversions == plan.conversions


def test_parameters_stay_and_the_batch_is_dealt_in_proportion() -> None:
    old = gpt2.graph()
    new = capture(gpt2.build(), (gpt2.batch(0, 4),), loss_fn=gpt2.lm_loss, example_targets=gpt2.batch(0, 4))
    plan = cases.zero((5, 2, 1))
    again = carry_over(plan, old, new)
    for node in new.sources("parameter"):
        here, before = again.strategy(node.name).outputs[0], plan.strategy(node.name).outputs[0]
        assert (here.dim, here.outer, here.n, here.unit) == (before.dim, before.outer, before.n, before.unit)
        assert again.sizes[here.group] == plan.sizes[before.group]
    batches = again.strategy("i_args_0").outputs[0]
    assert again.sizes[batches.group] == (3, 1, 0)  # of 2.5, 1 and 0.5


class Weighted(nn.Module):
    """A weight for each sample, or one for all in a call of another form."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, w: torch.Tensor, each: bool) -> torch.Tensor:
        y = self.linear(x).square()
        return (y.mean(1) * w).sum() if each else y.mean() * w


def test_an_input_of_a_batch_that_has_no_dims_in_another_call_is_whole_there() -> None:
    old = capture(Weighted(), {"x": torch.zeros(8, 4), "w": torch.ones(8), "each": True})
    shares = {g.name: (5, 3) for g in choices(old).groups.values() if g.n == 8}
    pins = hap.Pins(placements={"*": "R", "kwargs.*": "S(0)"}, sizes=shares)
    two = hap.ClusterSpec.from_yaml(
        "name: two\nbackend: gloo\nhosts: [{name: a, devices: [{name: d, count: 2, tflops: {float32: 0.001}, "
        "memory: 1GB, memory_bandwidth: 1GB/s}], link: {bandwidth: 1GB/s, latency: 1us}}]"
    )
    plan = plan_graph(choices(old), two, pins=pins, effort="quick")
    new = capture(Weighted(), {"x": torch.zeros(8, 4), "w": torch.tensor(2.0), "each": False})
    again = carry_over(plan, old, new)
    placed = {n.target: str(again.strategy(n.name).outputs[0]) for n in new.sources("input")}
    assert placed["kwargs.w"] == "R" and placed["kwargs.x"].startswith("S(0:")
    lower(new, again)


def test_a_new_shape_must_be_whole_and_of_the_kind_that_was_compiled() -> None:
    x, y = batch(0)
    program = hap.compile(
        net(),
        plan=replicated_plan(graph_of(net())),
        example_inputs=(x,),
        example_targets=y,
        loss_fn=nn.functional.cross_entropy,
    )
    with pytest.raises(ProgramError, match=r"input targets.0 is missing: a batch of a new shape must be given whole"):
        program.shard_batch((x[:4],))
    with pytest.raises(ProgramError, match=r"takes torch.float64 of 2 dims, got torch.float32 of 2"):
        program.shard_batch((x[:4].float(),), y[:4])
    with pytest.raises(CaptureError, match=r"batch norm over one value a channel|more than 1 value per channel"):
        program.shard_batch((x[:1],), y[:1])
    assert program.shard_batch((x,), y)[0][0].shape == x.shape, "what failed leaves no trace"
