"""The proof: real Gloo ranks with unequal shares train exactly as one process does.

A two-layer GPT-2 in float64. For each plan: the loss and every gradient of the first step within 1e-10 of one process,
and after five AdamW steps with clipping every parameter within 1e-9. Four ranks run torch's fused AdamW on their
shares, some of them empty, against its plain form on one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hap.codegen.lowering import lower
from hap.codegen.passes.runner import run_passes, standard_passes
from hap.codegen.program import Start
from hap.graph import Graph
from hap.plan import Plan
from hap.rules.choices import choices
from hap.runtime.collectives import Communicator
from hap.runtime.program import HapProgram
from hap.search.planner import plan_graph
from tests._support import cases, gpt2
from tests._support.lab import lab
from tests._support.ranks import run_ranks

STEPS = 5
MAX_NORM = 0.5


@cache
def planned() -> Plan:
    """What the planner chooses when nothing is pinned."""
    return plan_graph(choices(gpt2.graph()), lab(), effort="quick")


PLANS = {
    "the planner's own choice": planned,
    "data parallel 5/2/1": partial(cases.data_parallel, (5, 2, 1)),
    "tensor parallel, heads 3/2/1": partial(cases.tensor_parallel, (3, 2, 1)),
    "zero 5/2/1": partial(cases.zero, (5, 2, 1)),
    "zero 5/2/1, gathered again": partial(cases.zero, (5, 2, 1), regather=True),
    "zero 5/2/1, some gathered again": partial(cases.zero, (5, 2, 1), regather=True, every=3),
    "zero with nothing for rank 1": partial(cases.zero, (5, 0, 3)),
    "senseless": partial(cases.anything, 1),
    "four ranks, zero 4/2/1/1": partial(cases.zero, (4, 2, 1, 1)),
    "four ranks, tensor parallel, heads 3/2/0/1": partial(cases.tensor_parallel, (3, 2, 0, 1)),
}


@dataclass(frozen=True)
class Errors:
    """Largest relative differences from one process: of the first step's loss and gradients, of the norms and losses
    of all steps, of the parameters at the end. ``local`` counts the parameter elements of the rank."""

    loss: float
    gradient: float
    norm: float
    parameter: float
    curve: float
    local: int
    losses: tuple[float, ...]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)) if found.numel() else 0.0


def compiled(graph: Graph, plan: Plan, model: nn.Module) -> HapProgram:
    """Three ranks run it after all passes, with bundles small enough that there are several; four as it is lowered."""
    comm = Communicator(dist.group.WORLD)
    passes = standard_passes(limit_bytes=20_000) if comm.world_size == 3 else ()
    program = run_passes(lower(graph, plan), passes).program
    assert any(isinstance(i, Start) for i in program.backward) == (comm.world_size == 3)
    return HapProgram(program, plan, comm, model, (gpt2.batch(),), gpt2.batch())


def train_beside_one_process(rank: int, graph: Graph, plans: Mapping[str, Plan]) -> dict[str, Errors]:
    """Every plan in turn; each rank compares its own shares with its own run of plain PyTorch."""
    return {name: train_one(graph, plan) for name, plan in plans.items()}


def train_one(graph: Graph, plan: Plan) -> Errors:
    dtype = graph.meta(graph.loss).dtype
    model = gpt2.build(dtype)
    program = compiled(graph, plan, gpt2.build(dtype, seed=dist.get_rank()))  # rank 0's values must win
    fused = dist.get_world_size() == 4
    ours = torch.optim.AdamW(program.parameters(), lr=1e-3, weight_decay=0.1, fused=fused)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=False)
    loss_error = gradient_error = norm_error = curve_error = 0.0
    losses = []
    for step in range(STEPS):
        ids = gpt2.batch(step)
        share, target = program.shard_batch((ids,), ids)
        loss = program(*share, targets=target)
        loss.backward()
        expected = gpt2.lm_loss(model(ids), ids)
        expected.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        if step == 0:
            loss_error = relative(loss.detach(), expected.detach())
            whole = program.full_gradients()
            assert whole.keys() == gradients.keys() and len(whole) == 28
            gradient_error = max(relative(whole[name], g) for name, g in gradients.items())
        norm = program.clip_grad_norm_(MAX_NORM)
        expected_norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        assert expected_norm > MAX_NORM, "the test must clip"
        norm_error = max(norm_error, relative(norm, expected_norm))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        curve_error = max(curve_error, relative(loss.detach(), expected.detach()))
    state = program.state_dict()
    parameter_error = max(relative(state[name], p.detach()) for name, p in model.state_dict().items())
    local = sum(p.numel() for p in program.parameters())
    return Errors(loss_error, gradient_error, norm_error, parameter_error, curve_error, local, tuple(losses))


@pytest.fixture(scope="module")
def trained() -> dict[str, list[Errors]]:
    """Plan name -> what each rank found."""
    found: dict[str, list[Errors]] = {}
    made = {name: make() for name, make in PLANS.items()}
    for world_size in (3, 4):
        plans = {name: plan for name, plan in made.items() if plan.world_size == world_size}
        ranks = run_ranks(world_size, train_beside_one_process, gpt2.graph(), plans)
        found.update({name: [rank[name] for rank in ranks] for name in plans})
    return found


@pytest.mark.parametrize("name", PLANS)
def test_loss_gradients_and_parameters_are_those_of_one_process(name: str, trained: dict[str, list[Errors]]) -> None:
    for rank in trained[name]:
        assert rank.loss < 1e-10 and rank.gradient < 1e-10 and rank.norm < 1e-10, rank
        assert rank.parameter < 1e-9 and rank.curve < 1e-9, rank


def test_all_ranks_return_the_same_global_loss(trained: dict[str, list[Errors]]) -> None:
    for ranks in trained.values():
        assert len({r.losses for r in ranks}) == 1


def test_what_a_rank_holds_follows_its_share(trained: dict[str, list[Errors]]) -> None:
    whole = sum(n.meta.numel for n in gpt2.graph().sources("parameter"))
    assert whole == 2 * 28272 + (97 + 16 + 2) * 48  # layers; token and position embeddings; last norm
    assert [r.local for r in trained["data parallel 5/2/1"]] == [whole] * 3
    assert sum(r.local for r in trained["zero 5/2/1"]) == whole
    assert trained["zero with nothing for rank 1"][1].local == 0
    heads = [r.local for r in trained["tensor parallel, heads 3/2/1"]]
    assert heads[0] > heads[1] > heads[2]


def test_the_planner_deals_the_work_by_speed(trained: dict[str, list[Errors]]) -> None:
    batch = next(g for g in planned().groups.values() if g.label == "batch")
    assert batch.sizes == (5, 2, 1), "speeds are 5 : 2 : 1"


def test_the_float32_loss_curve_overlays() -> None:
    graph = gpt2.graph(torch.float32)
    plan = cases.retarget(cases.zero((5, 2, 1)), graph)
    (first, *_) = run_ranks(3, train_beside_one_process, graph, {"zero": plan})
    assert first["zero"].loss < 1e-6 and first["zero"].curve < 1e-5 and first["zero"].parameter < 1e-3
