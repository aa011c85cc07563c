"""Why this exists: plain DistributedDataParallel with unequal batches trains on another loss than one device does."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hap.codegen.lowering import lower
from hap.graph import Graph
from hap.plan import Plan
from hap.runtime.collectives import Communicator
from hap.runtime.program import HapProgram
from tests._support import cases, gpt2
from tests._support.ranks import run_ranks

SIZES = (5, 2, 1)


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def mean_gradient(ids: torch.Tensor) -> torch.Tensor:
    """Of the mean loss over these sequences alone, on one device."""
    model = gpt2.build()
    gpt2.lm_loss(model(ids), ids).backward()
    return flat({n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def three_ways(rank: int, graph: Graph, plan: Plan) -> tuple[float, float, float]:
    """Relative gradient errors against one device: (DDP, DDP against the mean of local means, HAP)."""
    ids = gpt2.batch()
    mine = ids.split(SIZES)[rank]

    model = DistributedDataParallel(gpt2.build())
    gpt2.lm_loss(model(mine), mine).backward()
    ddp = flat({n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None})

    program = HapProgram(lower(graph, plan), plan, Communicator(dist.group.WORLD), gpt2.build(), (ids,), ids)
    program(mine, targets=mine).backward()
    ours = flat(program.full_gradients())

    truth = mean_gradient(ids)
    average = torch.stack([mean_gradient(part) for part in ids.split(SIZES)]).mean(0)
    return tuple(float((g - t).norm() / t.norm()) for g, t in ((ddp, truth), (ddp, average), (ours, truth)))  # type: ignore[return-value]


def test_ddp_averages_the_local_means_and_hap_does_not() -> None:
    """Rank 2's one sequence weighs a third in DDP's gradient and an eighth in the truth: no rounding error."""
    for ddp, as_average, ours in run_ranks(3, three_ways, gpt2.graph(), cases.data_parallel(SIZES)):
        assert as_average < 1e-10, "DDP gives every rank's mean the weight 1/3"
        assert ddp > 0.1, "which is tens of percent away from the gradient of the global batch"
        assert ours < 1e-10
