"""A small model on real Gloo ranks under uneven plans, compared with PyTorch in one process."""

from __future__ import annotations

import io
import os
import time
from dataclasses import dataclass

import torch

import hap
from benchmarks.testbed.ranks import Seat, free_port, run_function
from benchmarks.zoo_models import find
from benchmarks.zoo_models.case import Case
from benchmarks.zoo_models.reference import Outcome, one_device, worst_error
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.errors import HapError
from hap.graph import Graph
from hap.plan import Plan
from hap.rules.choices import Choices, choices
from hap.search.pins import Pins
from hap.search.planner import plan_graph

TOLERANCE = 1e-10
SEED = 5
RATIOS = (4.0, 2.0, 1.0)
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Equality:
    """``errors``: plan -> (relative error, the tensor that has it). ``failure``: why there is no answer, or ""."""

    name: str
    errors: dict[str, tuple[float, str]]
    seconds: float
    failure: str = ""

    @property
    def worst(self) -> float:
        return max((error for error, _ in self.errors.values()), default=0.0)

    @property
    def equal(self) -> bool:
        return not self.failure and self.worst <= TOLERANCE


def check(name: str) -> Equality:
    """Every plan of ``plans`` on three ranks."""
    began, errors = time.monotonic(), {}
    case = find(name).build("small")
    try:
        graph = capture(case.model, case.inputs, loss_fn=case.loss_fn, example_targets=case.targets, name=name)
        made = plans(graph)
        expected = one_device(case, SEED)
        for label, plan in made.items():
            found = run_function(_seats(), _step, (name, plan.to_json()), DEADLINE_S)[0]
            errors[label] = worst_error(_unpacked(found), expected)
    except (HapError, RuntimeError) as e:
        return Equality(name, errors, time.monotonic() - began, f"{type(e).__name__}: {str(e).splitlines()[-1]}")
    return Equality(name, errors, time.monotonic() - began)


def plans(graph: Graph) -> dict[str, Plan]:
    """Data parallel (the batch dealt 4 : 2 : 1, parameters whole); sharded (batch and every parameter's first dim)."""
    found = choices(graph)
    batched = {node.target: "S(0)" for node in graph.sources("input") if _follows_batch(found, node.name)}
    whole = Pins(placements={"*": "R", **batched}, ratios=RATIOS)
    sharded = Pins(placements={"*": "S(0)", **batched}, ratios=RATIOS)
    cluster = _cluster()
    return {
        "data": plan_graph(found, cluster, pins=whole, effort="quick"),
        "sharded": plan_graph(found, cluster, pins=sharded, effort="quick"),
    }


def _follows_batch(found: Choices, node: str) -> bool:
    return len(found.strategies[node]) > 1


def _cluster() -> ClusterSpec:
    device = {"memory": "4GB", "memory_bandwidth": "8GB/s"}
    hosts = [
        {
            "name": f"h{i}",
            "devices": [{"name": "cpu", "tflops": {"float32": speed, "float64": speed}, **device}],
            "network": {"up": "1Gbit/s", "down": "1Gbit/s", "latency": "50us"},
        }
        for i, speed in enumerate(RATIOS)
    ]
    return ClusterSpec.model_validate({"name": "three", "backend": "gloo", "hosts": hosts})


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
    program.dropout_seed = SEED
    batch, targets = program.shard_batch(case.inputs, case.targets)
    loss = _call(program, batch, targets)
    loss.backward()
    stored = program.state_dict()
    buffers = {n: stored[n] for n, _ in case.model.named_buffers() if n in stored}
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
