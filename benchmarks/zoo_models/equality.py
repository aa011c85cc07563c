"""A small model on real Gloo ranks under uneven plans, compared with PyTorch in one process."""

from __future__ import annotations

import io
import os
import random
import time
from dataclasses import dataclass

import torch

import hap
from benchmarks.testbed.errors import RankError
from benchmarks.testbed.ranks import Seat, free_port, run_function
from benchmarks.zoo_models import find
from benchmarks.zoo_models.case import Case
from benchmarks.zoo_models.reference import Outcome, kept, one_device, worst_error
from hap.capture import capture
from hap.cost_models.work import op_class
from hap.errors import HapError
from hap.graph import Graph, Node
from hap.placement import Shard
from hap.plan import Plan
from hap.rules.choices import Choices, choices
from tests._support.plans import greedy_strategies, make_plan, random_sizes, random_strategies, sizes_for

TOLERANCE = 1e-10
SEED = 5
RATIOS = (4, 2, 1)
LEAST_SHARED = 0.9  # of the heavy calls under the data plan: with less of it, equality would say nothing
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Equality:
    """``errors``: plan -> (relative error, the tensor that has it). ``failure``: why there is no answer, or "".

    ``shared``: ``sharded_share`` of the data plan.
    """

    name: str
    errors: dict[str, tuple[float, str]]
    seconds: float
    shared: float = 0.0
    failure: str = ""

    @property
    def worst(self) -> float:
        return max((error for error, _ in self.errors.values()), default=0.0)

    @property
    def equal(self) -> bool:
        return not self.failure and self.worst <= TOLERANCE


def check(name: str) -> Equality:
    """Every plan of ``plans`` on three ranks."""
    began, errors, shared = time.monotonic(), {}, 0.0
    case = find(name).build("small")
    try:
        graph = capture(case.model, case.inputs, loss_fn=case.loss_fn, example_targets=case.targets, name=name)
        made = plans(graph)
        shared = sharded_share(graph, made["data"])
        if shared < LEAST_SHARED:
            raise RuntimeError(f"only {shared:.0%} of the heavy calls are dealt under the data plan")
        expected = one_device(case, SEED)
        for label, plan in made.items():
            found = run_function(_seats(), _step, (name, plan.to_json()), DEADLINE_S)[0]
            errors[label] = worst_error(_unpacked(found), expected)
    except (HapError, RankError, RuntimeError) as e:
        said = [line for line in str(e).splitlines() if "Error:" in line] or str(e).splitlines()
        why = f"{type(e).__name__}: {said[-1]}"
        return Equality(name, errors, time.monotonic() - began, shared, why)
    return Equality(name, errors, time.monotonic() - began, shared)


def plans(graph: Graph) -> dict[str, Plan]:
    """Three ways to deal a step 4 : 2 : 1, none of them searched: the search would keep so small a model whole.

    ``data``: the batch, parameters whole; ``sharded``: the batch and every parameter's first dim; ``any``: strategies
    and sizes drawn at random, shares of zero included.
    """
    found, world_size = choices(graph), len(RATIOS)
    batch = {n.target: (0, n.meta.shape[0]) for n in graph.sources("input") if len(found.strategies[n.name]) > 1}
    first = {n.target: (0, n.meta.shape[0]) for n in graph.sources("parameter") if _first_dim(found, n)}
    source, dealt = random.Random(SEED), sizes_for(found, RATIOS)
    drawn, sizes = random_strategies(found, source), random_sizes(found, world_size, source)
    return {
        "data": make_plan(found, greedy_strategies(found, batch), dealt, world_size=world_size),
        "sharded": make_plan(found, greedy_strategies(found, first | batch), dealt, world_size=world_size),
        "any": make_plan(found, drawn, sizes, world_size=world_size),
    }


def _first_dim(found: Choices, node: Node) -> bool:
    """Whether a parameter can be cut along its first dim into single rows."""
    stored = [s.outputs[0] for s in found.strategies[node.name]]
    return any(isinstance(p, Shard) and p.dim == 0 and p.n == node.meta.shape[0] for p in stored)


def sharded_share(graph: Graph, plan: Plan) -> float:
    """Of the matrix products, convolutions and attentions, the share that runs on pieces, not whole everywhere."""
    calls = [n for n in graph.nodes if not n.is_source and op_class(n.op) in ("matmul", "conv", "attention")]
    heavy = [plan.strategy(n.name) for n in calls]
    dealt = [s for s in heavy if any(isinstance(p, Shard) for p in (*s.inputs, *s.outputs))]
    return len(dealt) / len(heavy)


def _seats() -> list[Seat]:
    port, world_size = free_port(), len(RATIOS)
    return [
        Seat(
            rank=rank,
            core=_core(rank),
            namespace=None,
            environment={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            bed_id="",
            controller=None,
            quota=False,
        )
        for rank in range(world_size)
    ]


def _core(rank: int) -> int:
    cores = sorted(os.sched_getaffinity(0))
    return cores[rank % len(cores)]


def _step(rank: int, name: str, plan: str) -> bytes:
    """What a rank runs: the public door, one step, everything gathered."""
    case: Case = find(name).build("small")
    program = hap.compile(
        case.model,
        plan=Plan.from_json(plan),
        example_inputs=case.inputs,
        example_targets=case.targets,
        loss_fn=case.loss_fn,
    )
    program.random_seed = SEED
    dealt = program.shard_batch(case.inputs, case.targets)
    batch, targets = (dealt, None) if case.targets is None else dealt
    loss = _call(program, batch, targets)
    loss.backward()
    stored = program.state_dict()
    buffers = {n: stored[n] for n in kept(case.model)}
    outcome = Outcome(loss.detach(), program.full_gradients(), buffers)  # collective
    return _packed(outcome) if rank == 0 else b""


def _packed(outcome: Outcome) -> bytes:
    """As bytes: tensors in a pipe are shared memory of a process that is about to end."""
    file = io.BytesIO()
    torch.save((outcome.loss, dict(outcome.gradients), dict(outcome.buffers)), file)
    return file.getvalue()


def _unpacked(packed: bytes) -> Outcome:
    return Outcome(*torch.load(io.BytesIO(packed)))


def _call(program: torch.nn.Module, batch: object, targets: object) -> torch.Tensor:
    if isinstance(batch, dict):
        return program(**batch, targets=targets)
    return program(*(batch if isinstance(batch, tuple) else (batch,)), targets=targets)
