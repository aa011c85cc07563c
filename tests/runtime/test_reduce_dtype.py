"""Gradients exchanged in a narrower dtype: exactly those of one device where nothing is rounded, else as near as the
rounding of every rank's part and of their sums allows.

Let u be what rounding to nearest is off by at most, 2^-8 of a number for bfloat16. N ranks round their parts t once
each, and N - 1 sums are rounded: an element is off by at most ((1 + u)^N - 1) * sum |t|. The parts of any plan of a sum
over samples are no larger than the samples' own gradients, one by one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hap
from hap.capture import capture, interpret, source_values
from hap.capture.narrow import narrowed
from hap.cluster import ClusterSpec
from hap.codegen.accumulate import find_accumulation
from hap.codegen.lowering import lower
from hap.codegen.passes.fuse import fuse_calls
from hap.codegen.program import Call
from hap.errors import PlanError
from hap.graph import CAST, Graph, Value
from hap.hosts_sum import HOSTS_SUM
from hap.mesh import deferred_sums, graph_of, program_of, sums_in_order
from hap.mesh_plan import MeshPlan
from hap.plan import Plan
from hap.rules.choices import Choices, choices
from hap.rules.host_graph import summed
from hap.runtime.lockstep import run_lockstep
from tests._support import gpt2
from tests._support.mesh import make_mesh
from tests._support.narrow import exchanged, is_narrow, narrow_plan
from tests._support.plans import make_plan, random_sizes, random_strategies, sizes_for
from tests._support.ranks import run_alike, run_ranks

LOW = (torch.bfloat16, torch.float16)
TOKENS, WORDS, WIDTH = 6, 7, 4
CLIP = 1e-3
UNEVEN = {"data": (4, 0, 2), "zero": (3, 1, 2), "tensor": (3, 1, 0)}
Arrays = dict[str, Any]


class Whole(nn.Module):
    """Whole numbers all the way: an embedding that is the last layer, too, and a layer with a bias between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        x = x + torch.relu(self.layer(x))
        return ((x @ self.words.weight.t()) * wanted).sum()


def whole() -> tuple[Whole, tuple[torch.Tensor, torch.Tensor]]:
    """Nothing is negative, so no partial sum is larger than the whole one."""
    generator, model = torch.Generator().manual_seed(1), Whole()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(0, 2, parameter.shape, generator=generator))
    ids = torch.randint(0, WORDS, (TOKENS, 2), generator=generator)
    return model, (ids, torch.randint(0, 2, (TOKENS, 2, WORDS), generator=generator).float())


@cache
def steps(dtype: torch.dtype) -> tuple[Choices, dict[Value, torch.Tensor], dict[str, torch.Tensor]]:
    """The narrow step, its values on one device, and the gradients of the step in float32."""
    model, inputs = whole()
    plain = capture(model, inputs)
    values = interpret(plain, source_values(plain, model, inputs, tangent=1.0))
    expected = {target: values[v] for target, v in plain.gradients.items()}
    assert max(g.max() for g in expected.values()) <= 256 and min(g.min() for g in expected.values()) >= 0
    graph = narrowed(plain, dtype)
    return choices(graph), interpret(graph, source_values(graph, model, inputs, tangent=1.0)), expected


def plans(dtype: torch.dtype) -> dict[str, Plan]:
    """On three uneven ranks, one of them without a share."""
    found, _, _ = steps(dtype)
    batch = {"args.0": (0, TOKENS), "args.1": (0, TOKENS)}
    rows = {n.target: (0, n.meta.shape[0]) for n in found.graph.sources("parameter")}
    split = {"layer.weight": (0, WIDTH), "layer.bias": (0, WIDTH), "words.weight": (1, WIDTH)}
    wishes = {"data": batch, "zero": batch | rows, "tensor": split}
    made = {
        name: narrow_plan(found, wishes[name], sizes_for(found, shares), regather=name == "zero")
        for name, shares in UNEVEN.items()
    }
    return made | {f"any {seed}": anything(found, seed) for seed in range(4)}


def meshes(dtype: torch.dtype) -> dict[str, MeshPlan]:
    """Of two hosts."""
    graph = steps(dtype)[0].graph
    drawn = {f"hosts {seed}": make_mesh(graph, (1, 2), (2, 4), seed) for seed in range(4)}
    return {"hosts": make_mesh(graph, (2, 1), (4, 2)), **drawn}


def anything(found: Choices, seed: int) -> Plan:
    source = random.Random(seed)
    return make_plan(found, random_strategies(found, source), random_sizes(found, 3, source), regather=seed % 2 == 1)


# ---- exactness ----


@pytest.mark.parametrize("dtype", LOW)
def test_whole_numbers_come_out_as_they_do_in_float32_whatever_the_plan(dtype: torch.dtype) -> None:
    found, values, expected = steps(dtype)
    made = {**plans(dtype), **{f"any {seed}": anything(found, seed) for seed in range(60)}}
    for name, plan in made.items():
        step = run_lockstep(lower(found.graph, plan), values, check=True)
        for target, gradient in expected.items():
            assert step.gradients[target].dtype == torch.float32
            assert torch.equal(step.gradients[target], gradient), (name, target)


@pytest.mark.parametrize("kind", UNEVEN)
def test_what_ranks_exchange_of_gradients_is_narrow(kind: str) -> None:
    found, _, _ = steps(torch.bfloat16)
    program = lower(found.graph, plans(torch.bfloat16)[kind])
    assert is_narrow(found.graph, program) and (exchanged(program) or kind == "tensor")


def run_whole(rank: int, made: dict[str, Plan | MeshPlan], steps_taken: int, expected: Arrays) -> dict[str, list[str]]:
    """The parameters whose gradients of so many batches are not what is expected, under every plan."""
    found = {}
    for name, plan in made.items():
        model, inputs = whole()
        program = hap.compile(model, plan=plan, example_inputs=inputs)
        share = program.shard_batch(inputs)
        for _ in range(steps_taken - 1):
            with program.no_sync():
                program(*share).backward()
        program(*share).backward()
        gradients = program.full_gradients()
        found[name] = [t for t, wanted in expected.items() if not np.array_equal(gradients[t].numpy(), wanted)]
    return found


@pytest.mark.parametrize("batches", [pytest.param(1, marks=pytest.mark.long), 3])
def test_on_real_ranks_too_and_over_several_batches(batches: int) -> None:
    """No plan is told of ``reduce_dtype`` again: it brings its own. Of three batches the sums are no longer exact in
    bfloat16 but where they are small; in float16 they are."""
    dtype = torch.bfloat16 if batches == 1 else torch.float16
    _, _, expected = steps(dtype)
    wanted = {target: (batches * gradient).numpy() for target, gradient in expected.items()}
    made: dict[str, Plan | MeshPlan] = {**plans(dtype), **meshes(dtype)}
    for wrong in run_alike(3, run_whole, made, batches, wanted):
        assert wrong == {name: [] for name in made}


# ---- rounding ----


@cache
def languages() -> tuple[Graph, Graph]:
    plain = gpt2.graph(torch.float32)
    return plain, narrowed(plain, torch.bfloat16)


def language_plans() -> dict[str, Plan]:
    found = choices(languages()[1])
    batch = {"args.0": (0, gpt2.BATCH), "targets.0": (0, gpt2.BATCH)}
    rows = {n.target: (0, n.meta.shape[0]) for n in found.graph.sources("parameter")}
    sizes = sizes_for(found, (5, 0, 3)), sizes_for(found, (4, 1, 3))
    return {"data": narrow_plan(found, batch, sizes[1]), "zero": narrow_plan(found, batch | rows, sizes[0])}


def language_meshes() -> dict[str, MeshPlan]:
    graph = languages()[1]
    return {"hosts": make_mesh(graph, (2, 1), (5, 3)), "hosts drawn": make_mesh(graph, (1, 2), (3, 5), 1)}


def batch(number: int) -> tuple[tuple[torch.Tensor], torch.Tensor]:
    return (gpt2.batch(number),), gpt2.batch(number)


def run_language(rank: int, made: dict[str, Plan | MeshPlan], batches: int) -> dict[str, tuple[Arrays, float, Arrays]]:
    """Under every plan the gradients of so many batches, their norm, and what clipping leaves of them."""
    found = {}
    for name, plan in made.items():
        inputs, targets = batch(0)
        program = hap.compile(
            gpt2.build(torch.float32), plan=plan, example_inputs=inputs, loss_fn=gpt2.lm_loss, example_targets=targets
        )
        for number in range(batches):
            share, mine = program.shard_batch(*batch(number))
            if number < batches - 1:
                with program.no_sync():
                    program(*share, targets=mine).backward()
            else:
                program(*share, targets=mine).backward()
        gradients = as_arrays(program.full_gradients())
        found[name] = gradients, float(program.clip_grad_norm_(CLIP)), as_arrays(program.full_gradients())
    return found


def as_arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: tensor.numpy().copy() for name, tensor in tensors.items()}


def samples(batches: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of every parameter the gradient, in float64, and the sum of the absolute values of all samples' own."""
    model, total, sizes = gpt2.build(), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for number in range(batches):
        for row in gpt2.batch(number):
            model.zero_grad()
            (gpt2.lm_loss(model(row[None]), row[None]) / gpt2.BATCH).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                total[name] = total.get(name, torch.zeros(())) + parameter.grad
                sizes[name] = sizes.get(name, torch.zeros(())) + parameter.grad.abs()
    return {name: (total[name], sizes[name]) for name in total}


@pytest.mark.long
@pytest.mark.parametrize("batches", [1, 3])
def test_a_language_model_is_within_the_rounding_of_parts_and_sums(batches: int) -> None:
    """Of the tied weight each rank adds two terms, rounded each: their parts are larger than their sum's, by as much
    as the two readers' gradients differ, for which four times the bound is enough here."""
    expected, bound = samples(batches), (1 + 2**-8) ** 3 - 1
    made: dict[str, Plan | MeshPlan] = {**language_plans(), **language_meshes()}
    first, *others = run_alike(3, run_language, made, batches)
    for rank in (first, *others):
        for name, (gradients, norm, clipped) in rank.items():
            assert all(np.array_equal(first[name][0][t], gradient) for t, gradient in gradients.items()), "on all alike"
            worst = 0.0
            for target, (gradient, size) in expected.items():
                error = (torch.from_numpy(gradients[target]).double() - gradient).abs()
                allowed = bound * size * (4 if "wte" in target else 1) + 1e-6 * gradient.abs().max()
                assert (error <= allowed).all(), (name, target, float((error / allowed).max()))
                worst = max(worst, float(error.norm() / gradient.norm()))
            assert 2**-11 < worst < 2**-7, (name, worst)  # it is rounded, and no more than that
            assert norm == pytest.approx(
                sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()) ** 0.5
            )
            for target, gradient in gradients.items():  # by a factor in float32: not rounded again
                np.testing.assert_allclose(clipped[target], gradient * (CLIP / norm), rtol=1e-4)


def test_half_of_the_bytes_travel() -> None:
    plain, narrow = languages()
    batches = {"args.0": (0, gpt2.BATCH), "targets.0": (0, gpt2.BATCH)}
    sent = []
    for graph in (plain, narrow):
        found = choices(graph)
        program = lower(graph, narrow_plan(found, batches, sizes_for(found, (4, 1, 3))))
        sent.append(sum(nbytes for _, nbytes in exchanged(program)))
    parameters = sum(n.meta.nbytes for n in plain.sources("parameter"))
    assert sent[1] * 2 == parameters and sent[0] == parameters and is_narrow(narrow, program)


def test_sums_over_hosts_are_narrow_and_give_what_is_wide_when_the_step_ends() -> None:
    """The positions' gradient, too, whose rows would be fewer to sum before they are put in their places."""
    graph, plan = languages()[1], language_meshes()["hosts"]
    gradients = len(set(graph.gradients.values()))
    for host in range(2):
        sums = [n for n in summed(graph_of(graph, plan, host)) if n.meta.dtype == torch.bfloat16]
        assert len(sums) == gradients and len(summed(graph_of(graph, plan, host))) == gradients + 2
        program = program_of(graph, plan, host).program
        order, later = sums_in_order(program)
        assert len(order) == gradients + 2 and len(later) > gradients / 2
        calls = [i for i in program.backward if isinstance(i, Call) and i.op == HOSTS_SUM]
        assert len(calls) == gradients and deferred_sums(program) == order[2:]
        wide = [c for c in calls if dict(c.kwargs).get("dtype") == torch.float32]
        assert {c.args[1] for c in wide} >= set(later)
        assert all(program.held[str(c.outputs[0])].meta.dtype == torch.float32 for c in wide)


def test_a_sum_over_hosts_is_made_in_no_narrower_dtype_than_it_had() -> None:
    """Were the casts behind them the other way round, sums and casts would stay two calls."""
    graph, plan = languages()[1], language_meshes()["hosts"]
    program = lower(graph_of(graph, plan, 0), plan.inside_of(0))
    sums = {c.outputs[0] for c in program.backward if isinstance(c, Call) and c.op == HOSTS_SUM}
    casts = [c for c in program.backward if isinstance(c, Call) and c.op == CAST and c.inputs[0] in sums]
    turned = dict(program.held)
    for cast in casts:
        for name, dtype in ((cast.inputs[0], torch.float32), (str(cast.outputs[0]), torch.bfloat16)):
            turned[name] = turned[name]._replace(meta=replace(turned[name].meta, dtype=dtype))
    calls = [sum(isinstance(i, Call) for i in fuse_calls(p).backward) for p in (program, replace(program, held=turned))]
    assert calls[0] == calls[1] - len(casts) and len(casts) > 10


# ---- several batches ----


def test_batches_are_added_up_in_the_gradients_own_dtype_and_rounded_once() -> None:
    _, narrow = languages()
    program = lower(narrow, language_plans()["data"])
    found = find_accumulation(program)
    assert set(found.deferred) == set(program.gradients) and set(found.local.values()) == {torch.float32}
    single = [n for n in found.local if program.held[n].meta.dtype == torch.float32]
    assert len(single) == len(found.local) - 1, "all but the sum of the tied weight's terms"
    casts = [i for i in found.first.instructions if getattr(i, "op", "") == CAST]
    assert len(casts) == 2, "of these terms"


# ---- what else a program does ----


def expected_of(inputs: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of one process, in float32."""
    model, _ = whole()
    model(*inputs).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run_features(rank: int, made: dict[str, Plan]) -> dict[str, list[Any]]:
    """Of every plan: whether the gradients of a smaller batch are exact, and how far the loss of an evaluation is off;
    for a small and a large scale whether gradients are exact once unscaled, and whether parameters stay."""
    found = {}
    for name, plan in made.items():
        model, inputs = whole()
        program = hap.compile(model, plan=plan, example_inputs=inputs)
        small = inputs[0][:4], inputs[1][:4]
        program(*program.shard_batch(small)).backward()
        told: list[Any] = [same(program, expected_of(small))]
        program.eval()
        with torch.no_grad():
            told.append(float(program(*program.shard_batch(small)) - model(*small)))
        program.train()
        optimizer = torch.optim.SGD(program.parameters(), lr=1.0)
        for scale in (4.0, 2.0**20):
            program.load_state_dict(whole()[0].state_dict())
            before = [p.detach().clone() for p in program.parameters()]
            optimizer.zero_grad()
            scaler = program.grad_scaler(init_scale=scale)
            scaler.scale(program(*program.shard_batch(inputs))).backward()
            scaler.unscale_(optimizer)
            told.append(same(program, expected_of(inputs)))
            scaler.step(optimizer)
            told.append(all(torch.equal(a, b) for a, b in zip(before, program.parameters(), strict=True)))
        found[name] = told
    return found


def same(program: hap.HapProgram, expected: Mapping[str, torch.Tensor]) -> bool:
    gradients = program.full_gradients()
    return gradients.keys() == expected.keys() and all(torch.equal(gradients[t], g) for t, g in expected.items())


def test_other_batches_evaluation_and_scaled_losses() -> None:
    """Scaled by 2^20 float16 overflows on the way, which the scaler sees; float32 would not have."""
    made = {name: plan for name, plan in plans(torch.float16).items() if not name.startswith("any")}
    for number, rank in enumerate(run_alike(3, run_features, made)):
        for name, (small, evaluated, scaled, kept, overflown, skipped) in rank.items():
            assert (small, evaluated, scaled, overflown, skipped) == (True, 0.0, True, False, True), name
            assert kept == (name == "tensor" and number == 2), "but for the rank that holds nothing"


def run_acco(rank: int, made: dict[str, Plan]) -> dict[str, float]:
    """How far what is trained with each plan is from what the first one trains, beside how far that moves."""
    trained = []
    for plan in made.values():
        inputs, targets = batch(0)
        model = gpt2.build(torch.float32)
        program = hap.compile(model, plan=plan, example_inputs=inputs, loss_fn=gpt2.lm_loss, example_targets=targets)
        acco = hap.Acco(program, torch.optim.SGD(program.parameters(), lr=0.1), batches=2)
        for number in range(8):
            share, mine = program.shard_batch(*batch(number))
            acco.step(*share, targets=mine)
        acco.finish()
        trained.append(program.state_dict())
    start, first = gpt2.build(torch.float32).state_dict(), trained[0]
    moved = sum(float((first[n] - start[n]).norm() ** 2) for n in first) ** 0.5
    return {
        name: sum(float((state[n] - first[n]).norm() ** 2) for n in first) ** 0.5 / moved
        for name, state in zip(made, trained, strict=True)
    }


@pytest.mark.long
def test_acco_exchanges_what_is_rounded() -> None:
    plain, batches = choices(languages()[0]), {"args.0": (0, gpt2.BATCH), "targets.0": (0, gpt2.BATCH)}
    made = {"own": narrow_plan(plain, batches, sizes_for(plain, (4, 1, 3))), **language_plans()}
    for rank in run_alike(3, run_acco, made):
        assert rank["own"] == 0 and all(2**-12 < rank[name] < 2**-6 for name in ("data", "zero"))


CLUSTER = """
name: three
backend: gloo
hosts:
  - name: big
    devices: [{name: d, count: 2, tflops: {float32: 2}, memory: 1GB, memory_bandwidth: 100GB/s}]
    link: {bandwidth: 1GB/s, latency: 5us}
    network: {bandwidth: 100Mbit/s, latency: 10us}
  - name: small
    devices: [{name: d, tflops: {float32: 1}, memory: 1GB, memory_bandwidth: 100GB/s}]
    network: {bandwidth: 100Mbit/s, latency: 10us}
"""


def run_compile(rank: int) -> tuple[str | None, bool, list[str]]:
    """What is planned on the ranks and whether it is exact; the refusals of another dtype on one rank, or than the
    plan's."""
    model, inputs = whole()
    spec = ClusterSpec.from_yaml(CLUSTER)
    given: dict[str, Any] = {"example_inputs": inputs}
    program = hap.compile(model, spec, reduce_dtype="bfloat16", **given)
    program(*program.shard_batch(inputs)).backward()
    refusals = []
    for more in ({"reduce_dtype": LOW[rank == 1]}, {"reduce_dtype": "float16", "plan": program.plan}):
        with pytest.raises(PlanError) as refused:
            hap.compile(whole()[0], spec, **given, **more)
        refusals.append(str(refused.value))
    again = hap.compile(whole()[0], spec, plan=program.plan, reduce_dtype=torch.bfloat16, **given)
    assert again.plan == program.plan
    return program.plan.provenance.reduce_dtype, same(program, expected_of(inputs)), refusals


def test_ranks_plan_with_it_and_refuse_to_disagree() -> None:
    for dtype, exact, (other, mismatch) in run_ranks(3, run_compile):
        assert dtype == "bfloat16" and exact
        assert other.startswith("the model of rank 1 differs from rank 0's")
        assert mismatch == (
            "the plan exchanges gradients in bfloat16, and reduce_dtype is float16; plan again, or leave that out"
        )
