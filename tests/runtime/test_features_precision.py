"""``torch.autocast`` and ``GradScaler``: the casts of one process on every rank, and one decision about a step.

In 16 bits sums depend on their order, so equality is up to a tolerance: half a unit in the last place is 2^-9 for
bfloat16 and 2^-12 for float16, and a handful of roundings lie between an input and a gradient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hap
from hap.capture import capture
from hap.capture.autocast import Autocast
from hap.errors import ProgramError
from hap.graph import Graph
from hap.plan import Plan
from hap.rules.choices import choices
from tests._support.plans import greedy_strategies, make_plan, replicated_plan, sizes_for
from tests._support.ranks import run_ranks

TOLERANCE = {torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 5))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def graph_under(dtype: torch.dtype) -> Graph:
    x, y = batch(0)
    with torch.autocast("cpu", dtype):
        return capture(net(), x, loss_fn=nn.functional.cross_entropy, example_targets=y)


def zero_plan(dtype: torch.dtype) -> Plan:
    found = choices(graph_under(dtype))
    rows = {n.target: (0, n.meta.shape[0]) for n in found.graph.sources("parameter")}
    wishes = rows | {"args.0": (0, 8), "targets.0": (0, 8)}
    return make_plan(found, greedy_strategies(found, wishes), sizes_for(found, (5, 2, 1)))


def compiled(plan: Plan, dtype: torch.dtype) -> Any:
    x, y = batch(0)
    with torch.autocast("cpu", dtype):
        return hap.compile(
            net(), plan=plan, example_inputs=(x,), example_targets=y, loss_fn=nn.functional.cross_entropy
        )


def train_in(rank: int, dtype: torch.dtype, plan: Plan) -> dict[str, Any]:
    """Three steps with a scaler beside one process; in the second, one gradient overflows on rank 1 alone."""
    program, model = compiled(plan, dtype), net()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (program, model))
    scaler, reference = program.grad_scaler(init_scale=2.0**8), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    errors, scales, skipped = [], [], []
    for step in range(3):
        x, y = batch(step)
        share, targets = program.shard_batch((x,), y)
        with torch.autocast("cpu", dtype):
            loss = program(*share, targets=targets)
            expected = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        reference.scale(expected).backward()
        errors.append(abs(loss.item() - expected.item()) / expected.item())
        whole = program.full_gradients()
        errors += [float((whole[n] - p.grad).abs().max() / p.grad.abs().max()) for n, p in model.named_parameters()]
        if step == 1:
            next(model.parameters()).grad[0, 0] = torch.inf
            if rank == 1:
                next(program.parameters()).grad[0, 0] = torch.inf
        before = [p.detach().clone() for p in program.parameters()]
        for one, optimizer in ((scaler, ours), (reference, theirs)):
            one.step(optimizer)
            one.update()
            optimizer.zero_grad()
        skipped.append(all(torch.equal(a, b) for a, b in zip(before, program.parameters(), strict=True)))
        scales.append((scaler.get_scale(), reference.get_scale()))
    dtypes = {str(v.dtype) for v in program.state_dict().values()}
    return {"error": max(errors), "scales": scales, "skipped": skipped, "dtypes": dtypes}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_autocast_with_a_scaler_trains_as_in_one_process(dtype: torch.dtype) -> None:
    for rank in run_ranks(3, train_in, dtype, zero_plan(dtype)):
        assert 0 < rank["error"] < TOLERANCE[dtype], "not equal to the last bit: it did run in 16 bits"
        assert rank["skipped"] == [False, True, False], "an overflow on rank 1 skips the step on every rank"
        assert rank["scales"] == [(256.0, 256.0), (128.0, 128.0), (128.0, 128.0)]
        assert rank["dtypes"] == {"torch.float32"}


def test_the_casts_are_calls_of_the_graph() -> None:
    graph = graph_under(torch.bfloat16)
    dtypes = {n.op: n.meta.dtype for n in graph.nodes if not n.is_source}
    assert dtypes["aten.mm.default"] == torch.bfloat16 and graph.meta(graph.loss).dtype == torch.float32
    assert {graph.meta(v).dtype for v in graph.gradients.values()} == {torch.float32}


def test_under_cudas_autocast_norms_and_softmax_are_in_float32_too() -> None:
    """What CUDA's autocast keeps in float32 and the CPU's does not."""
    x, _ = batch(0)
    for device, dtype in (("cpu", torch.bfloat16), ("cuda", torch.float32)):
        with Autocast(device, torch.bfloat16).on_cpu():
            norm, softmax = net()[:2](x), torch.softmax(net()[0](x), -1)
            assert net()[0](x).dtype == torch.bfloat16
        assert (norm.dtype, softmax.dtype) == (dtype, dtype), device


def test_another_autocast_than_that_of_compile_is_refused_and_none_is_needed() -> None:
    plan, (x, y) = replicated_plan(graph_under(torch.bfloat16)), batch(1)
    program = compiled(plan, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        inside = program(x, targets=y)
    assert torch.equal(inside, program(x, targets=y))
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(ProgramError, match=r"float16 is active, and the program was compiled for torch.bfloat16"),
    ):
        program(x, targets=y)


def test_a_smaller_batch_has_the_same_casts() -> None:
    program = compiled(replicated_plan(graph_under(torch.bfloat16)), torch.bfloat16)
    x, y = (t[:3] for t in batch(1))
    share, targets = program.shard_batch((x,), y)
    with torch.autocast("cpu", torch.bfloat16):
        expected = nn.functional.cross_entropy(net()(x), y)
    assert program(*share, targets=targets).item() == pytest.approx(expected.item(), rel=2**-8)
    call = program._variants.first.signature.call((x,), y, {})
    assert "torch.bfloat16" in program._variants.choose(call, True).step.forward_module.code
