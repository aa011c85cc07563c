"""Peak memory of the zoo's small models: the ledger of ``hap.cost_models.memory`` against all that real steps allocate.

One device, and three unequal ranks with parameters and batch sharded, on this machine's loopback. The second step is
measured, when the optimizer has its state; peak is that of forward and backward, per rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import hap
from benchmarks.accuracy_cases import keep_to_batch, pins
from benchmarks.accuracy_rank import PLAIN
from benchmarks.allocations import Allocations
from benchmarks.common import Report
from benchmarks.testbed import Testbed
from benchmarks.zoo_models import ZOO, Case, find
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.plan import Plan
from hap.rules.choices import choices
from hap.runtime.profile import make_optimizer
from hap.search.planner import plan_graph

QUICK = 4  # models
CLUSTERS = {1: (1.0,), 3: (3.0, 2.0, 1.0)}


@dataclass(frozen=True)
class Peak:
    model: str
    ranks: int
    rank: int
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def memory_cluster(ranks: int) -> ClusterSpec:
    devices = ", ".join(
        f"{{name: d{i}, tflops: {{float32: {speed}}}, memory: 1GB, memory_bandwidth: 10GB/s}}"
        for i, speed in enumerate(CLUSTERS[ranks])
    )
    return ClusterSpec.from_yaml(
        f"name: memory{ranks}\nbackend: gloo\nhosts:\n"
        f"  - {{name: h, devices: [{devices}], link: {{bandwidth: 1GB/s, latency: 50us}}}}\n"
    )


def plan_case(case: Case, cluster: ClusterSpec) -> Plan:
    graph = capture(case.model, case.inputs, loss_fn=case.loss_fn, example_targets=case.targets)
    found = choices(graph)
    if cluster.world_size == 1:
        return plan_graph(found, cluster, effort="quick")
    return plan_graph(keep_to_batch(found), cluster, pins=pins("sharded parameters"), effort="quick")


def peaks(rank: int, plans: Sequence[tuple[str, str]]) -> list[int]:
    """On a rank: (model, plan's JSON) -> peak bytes."""
    torch.set_num_threads(1)
    return [_peak(find(name).build("small"), Plan.from_json(text)) for name, text in plans]


def _peak(case: Case, plan: Plan) -> int:
    program = hap.compile(
        case.model,
        plan=plan,
        example_inputs=case.inputs,
        example_targets=case.targets,
        loss_fn=case.loss_fn,
        passes_off=PLAIN,
    )
    optimizer = make_optimizer("adamw", program.parameters())
    batch, targets = tree_map_only(  # of its own memory: a share may be a view of the whole batch
        torch.Tensor, torch.clone, program.shard_batch(case.inputs, case.targets)
    )

    def run() -> None:
        program(*_positional(batch), targets=targets, **_keywords(batch)).backward()

    run()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seen = Allocations()
    seen.keep(_held(program, optimizer, (batch, targets)))
    return seen.least_peak(run, program.zero_grad)


def _positional(batch: Any) -> tuple[Any, ...]:
    return () if isinstance(batch, dict) else tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def _keywords(batch: Any) -> dict[str, Any]:
    return batch if isinstance(batch, dict) else {}


def _held(program: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> list[torch.Tensor]:
    state = [t for held in optimizer.state.values() for t in held.values() if isinstance(t, torch.Tensor) and t.dim()]
    given = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    return [*program.parameters(), *program.buffers(), *state, *given]


def measure_memory(quick: bool) -> list[dict[str, Any]]:
    """``Peak``s as plain data."""
    names = [m.name for m in ZOO][: QUICK if quick else None]
    found: list[Peak] = []
    for ranks in CLUSTERS:
        cluster = memory_cluster(ranks)
        plans = [(name, plan_case(find(name).build("small"), cluster)) for name in names]
        with Testbed(cluster, enforced=False) as bed:
            seen = bed.run(peaks, [(name, plan.to_json()) for name, plan in plans], timeout=300.0)
        for i, (name, plan) in enumerate(plans):
            for rank in range(ranks):
                found.append(Peak(name, ranks, rank, plan.predicted.memory_bytes[rank], seen[rank][i]))
    return [asdict(peak) for peak in found]


def tell_memory(report: Report, data: Sequence[dict[str, Any]]) -> None:
    found = [Peak(**peak) for peak in data]
    errors = [abs(p.error) for p in found]
    report.figure("memory_worst_error", max(errors))
    report.text(f"Memory: median error {statistics.median(errors):.1%} over {len(found)} peaks.")
    report.table(
        "Peak memory, kB",
        ["model", "ranks", "rank", "predicted", "measured", "error"],
        [[p.model, p.ranks, p.rank, p.predicted // 1000, p.measured // 1000, f"{p.error:+.1%}"] for p in found],
    )
