"""Several batches a step, of the zoo's small models on drawn plans of one and of two axes: gradients, exchanged once,
and buffers are those of one process in float64."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import hap
from benchmarks.zoo_models import find
from benchmarks.zoo_models.reference import Outcome, SameDraws, kept, worst_error
from hap.capture import capture
from hap.capture.inputs import step_inputs
from hap.mesh_plan import parse_plan
from hap.rules.choices import choices
from tests._support.mesh import make_mesh
from tests._support.plans import make_plan, random_sizes, random_strategies
from tests._support.ranks import run_ranks

TOLERANCE, BATCHES = 1e-10, 3


def moved(given: Any, by: int) -> Any:
    """Another batch of the same samples, in another order."""
    if isinstance(given, torch.Tensor):
        return given.roll(by, 0) if given.dim() else given
    if isinstance(given, dict):
        return {name: moved(value, by) for name, value in given.items()}
    return type(given)(moved(value, by) for value in given) if isinstance(given, tuple | list) else given


def step(rank: int, name: str, text: str) -> tuple[float, str]:
    """The worst error of this rank, and where it is."""
    case = find(name).build("small")
    given = {"example_inputs": case.inputs, "example_targets": case.targets, "loss_fn": case.loss_fn}
    program = hap.compile(case.model, plan=parse_plan(text), **given)  # type: ignore[arg-type]
    alone = find(name).build("small").model
    found, expected = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for place in range(BATCHES):
        inputs, targets = moved(case.inputs, place), moved(case.targets, place)
        with SameDraws(program.random_seed):
            call = step_inputs(inputs, targets)
            loss = case.loss_fn(alone(*call.args, **call.kwargs), *call.targets)
        loss.backward()
        expected = expected + loss.detach()
        share, own = (program.shard_batch(inputs), None) if targets is None else program.shard_batch(inputs, targets)
        with program.no_sync() if place < BATCHES - 1 else nullcontext():
            loss = program(**share, targets=own) if isinstance(share, dict) else program(share, targets=own)
            loss.backward()
        found = found + loss.detach()
    stored = program.state_dict()
    gradients = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    ours = Outcome(found, program.full_gradients(), {n: stored[n] for n in kept(alone)})
    return worst_error(ours, Outcome(expected, gradients, kept(alone)))


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "vit", "resnet50", "hap_bert_moe", "t5", "lstm"])
@pytest.mark.parametrize("ranks", [(3,), (2, 1), (1, 2)], ids=["one axis", "2 + 1", "1 + 2"])
def test_gradients_of_several_batches_are_one_processs(name: str, ranks: tuple[int, ...]) -> None:
    case = find(name).build("small")
    graph = capture(case.model, case.inputs, loss_fn=case.loss_fn, example_targets=case.targets, name=name)
    seed = sum(map(ord, name)) + len(ranks)
    if len(ranks) == 1:
        possible, source = choices(graph), random.Random(seed)
        chosen, sizes = random_strategies(possible, source), random_sizes(possible, ranks[0], source)
        text = make_plan(possible, chosen, sizes, world_size=ranks[0]).to_json()
    else:
        size = next(n.meta.shape[0] for n in graph.sources("input") if n.meta.shape)
        first = max(1, size * ranks[0] // 3)
        text = make_mesh(graph, ranks, (first, size - first), seed).to_json()
    for error, where in run_ranks(3, step, name, text):
        assert error <= TOLERANCE, where
