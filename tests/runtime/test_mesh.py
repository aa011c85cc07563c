"""A mesh of two axes on real ranks: unequal hosts, each with a plan of its own, against one device in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hap
from benchmarks.zoo_models import find
from benchmarks.zoo_models.reference import Outcome, kept, one_device, worst_error
from hap.capture import capture
from hap.capture.inputs import step_inputs
from hap.capture.narrow import narrowed
from hap.errors import PlanError, ProgramError
from hap.mesh import carry_mesh, graph_of
from hap.mesh_plan import MeshPlan, parse_plan
from hap.runtime.mesh import MeshProgram
from tests._support import gpt2
from tests._support.mesh import make_mesh
from tests._support.ranks import run_alike, run_ranks

TOLERANCE, SEED = 1e-10, 7
CLUSTER = """
name: lab
backend: gloo
hosts:
  - name: big
    devices: [{name: cpu, count: 2, tflops: {float32: 0.04, float64: 0.02}, memory: 4GB, memory_bandwidth: 10GB/s}]
    link: {bandwidth: 5GB/s, latency: 20us}
    network: {bandwidth: 1Gbit/s, latency: 100us}
  - name: small
    devices: [{name: cpu, tflops: {float32: 0.02, float64: 0.01}, memory: 4GB, memory_bandwidth: 10GB/s}]
    network: {bandwidth: 1Gbit/s, latency: 100us}
"""


def lm(model: nn.Module, plan: MeshPlan) -> MeshProgram:
    given = {"example_inputs": (gpt2.batch(),), "example_targets": gpt2.batch(), "loss_fn": gpt2.lm_loss}
    return hap.compile(model, plan=plan, **given)  # type: ignore[arg-type, return-value]


def zoo_step(rank: int, name: str, text: str) -> tuple[Any, Any, Any]:
    case = find(name).build("small")
    plan = parse_plan(text)
    given = {"example_inputs": case.inputs, "example_targets": case.targets, "loss_fn": case.loss_fn}
    program = hap.compile(case.model, plan=plan, **given)  # type: ignore[arg-type]
    program.random_seed = SEED
    dealt = program.shard_batch(case.inputs, case.targets)
    batch, targets = (dealt, None) if case.targets is None else dealt
    loss = program(**batch, targets=targets) if isinstance(batch, dict) else program(batch, targets=targets)
    loss.backward()
    stored = program.state_dict()
    buffers = {n: stored[n] for n in kept(case.model)}
    found = loss.detach().numpy(), program.full_gradients(), buffers
    return found[0], *({k: v.numpy() for k, v in part.items()} for part in found[1:])


@pytest.mark.parametrize(
    ("name", "ranks", "batches", "seed"),
    [
        ("gpt2", (2, 1), (5, 2), None),
        pytest.param("gpt2", (1, 2), (3, 4), 1, marks=pytest.mark.long),
        ("hap_bert_moe", (2, 2), (3, 5), 2),
        ("resnet50", (3, 1), (6, 2), 3),
        pytest.param("lstm", (1, 1, 2), (2, 2, 3), 4, marks=pytest.mark.long),
        pytest.param("ddpm", (2, 1), (4, 3), 5, marks=pytest.mark.long),
    ],
)
def test_loss_gradients_and_buffers_are_one_devices(name, ranks, batches, seed):
    case = find(name).build("small")
    graph = capture(case.model, case.inputs, loss_fn=case.loss_fn, example_targets=case.targets, name=name)
    size = next(n.meta.shape[0] for n in graph.sources("input") if n.meta.shape)
    batches = (*batches[:-1], size - sum(batches[:-1]))
    plan = make_mesh(graph, ranks, batches, seed)
    expected = one_device(case, SEED)
    run = run_ranks if name == "gpt2" else run_alike  # of one model each rank captures what it runs
    for loss, gradients, buffers in run(sum(ranks), zoo_step, name, plan.to_json()):
        parts = ({k: torch.from_numpy(v) for k, v in part.items()} for part in (gradients, buffers))
        error, where = worst_error(Outcome(torch.as_tensor(loss), *parts), expected)
        assert error <= TOLERANCE, where


def train(rank: int, text: str, steps: int) -> list[float]:
    """Losses of a run that is clipped, and of one step after its state went through the model."""
    plan = parse_plan(text)
    assert isinstance(plan, MeshPlan)
    program = lm(gpt2.build(seed=rank), plan)  # rank 0's values count
    assert program.mesh_plan == plan
    losses = descend(program, program.shard_batch, steps)
    model = gpt2.build(seed=rank + 10)
    model.load_state_dict(program.state_dict())
    again = lm(model, plan)
    again.load_state_dict(program.state_dict())
    return losses + descend(again, again.shard_batch, 1)


def descend(program: Any, deal: Any, steps: int) -> list[float]:
    optimizer, losses = torch.optim.SGD(program.parameters(), lr=0.5), []
    for step in range(steps):
        inputs, targets = deal((gpt2.batch(step),), gpt2.batch(step))
        logits_or_loss = program(*inputs, targets=targets) if targets is not None else program(*inputs)
        logits_or_loss.backward()
        clip = getattr(program, "clip_grad_norm_", None)
        norm = clip(0.5) if clip else torch.nn.utils.clip_grad_norm_(program.parameters(), 0.5)
        losses += [float(logits_or_loss.detach()), float(norm)]
        optimizer.step()
        optimizer.zero_grad()
    return losses


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return gpt2.lm_loss(self.model(ids), targets)


def test_training_with_clipping_is_one_devices_and_state_goes_out_and_in():
    plan = make_mesh(gpt2.graph(), (2, 1), (5, 3))
    alone = WithLoss(gpt2.build(seed=0))
    expected = descend(alone, lambda batch, targets: (batch, targets), 3)
    expected += descend(copy.deepcopy(alone), lambda batch, targets: (batch, targets), 1)
    for losses in run_alike(3, train, plan.to_json(), 3):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-9, atol=1e-10)


def deal(rank: int, text: str) -> tuple[list[list[int]], list[int]]:
    """Rows that a sampler gives this rank; what ``shard_batch`` gives it of the numbers of the rows."""
    program = lm(gpt2.build(), parse_plan(text))  # type: ignore[arg-type]
    data = TensorDataset(torch.arange(20))
    sampler = program.batch_sampler(len(data), shuffle=False, drop_last=False)
    rows = [batch[0].tolist() for batch in DataLoader(data, batch_sampler=sampler)]
    numbers = torch.arange(8).reshape(8, 1).expand(8, gpt2.LENGTH).contiguous()
    inputs, _ = program.shard_batch((numbers,), numbers)
    return rows, inputs[0][:, 0].tolist()


def test_samplers_and_batches_deal_each_row_once_in_the_hosts_parts():
    plan = make_mesh(gpt2.graph(), (2, 1), (5, 3))
    found = run_alike(3, deal, plan.to_json())
    for number, size in enumerate((8, 8, 4)):
        rows = [rank_rows[number] for rank_rows, _ in found]
        assert sorted(row for mine in rows for row in mine) == list(range(8 * number, 8 * number + size))
        assert len(rows[2]) == (3 if size == 8 else 1)
    assert [number for _, numbers in found for number in numbers] == list(range(8))


def refusals(rank: int, text: str) -> list[str]:
    plan = parse_plan(text)
    assert isinstance(plan, MeshPlan)
    program = lm(gpt2.build(), plan)
    said = []
    for what in (
        lambda: program.shard_batch((gpt2.batch(size=1),), gpt2.batch(size=1)),
        lambda: program.batch_sampler(17, drop_last=False),
        lambda: hap.compile(
            gpt2.build(),
            hap.ClusterSpec.from_yaml(CLUSTER),
            plan=plan,
            example_inputs=(gpt2.batch(),),
            example_targets=gpt2.batch(),
            loss_fn=gpt2.lm_loss,
        ),
        lambda: hap.compile(
            gpt2.build(),
            plan=plan,
            example_inputs=(gpt2.batch(size=6),),
            example_targets=gpt2.batch(size=6),
            loss_fn=gpt2.lm_loss,
        ),
    ):
        with pytest.raises((PlanError, ProgramError)) as caught:
            what()
        said.append(str(caught.value))
    return said


def test_what_such_a_program_cannot_is_refused_in_one_line_on_every_rank():
    plan = make_mesh(gpt2.graph(), (2, 1), (5, 3))
    for said in run_alike(3, refusals, plan.to_json()):
        assert "no input has a batch of two or more" in said[0] and said[1] == said[0]
        assert "is for cluster 'test'" in said[2]
        assert "is not for this" in said[3]
        assert all("\n" not in line for line in said)


class Penalised(nn.Module):
    """Gradients that are more than sums over the samples: of a weight that is normalised, and of one with a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(37, 53))
        self.norm, self.last = nn.LayerNorm(53), nn.Linear(53, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.last(torch.tanh(self.norm(self.first(x))))
        return (out - y).square().mean() + 0.1 * self.last.weight.square().sum()


def penalised(step: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(step)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Penalised(), (torch.randn(8, 37, generator=source), torch.randn(8, 11, generator=source))


def descend_alike(rank: int, plans: list[str]) -> list[tuple[dict[str, bytes], float]]:
    """Under each plan what the parameters come to in three clipped steps, and how far their first gradients are from
    one device's."""
    found = []
    for text in plans:
        model, batch = penalised(0)
        program = hap.compile(model, plan=parse_plan(text), example_inputs=batch)
        optimizer, worst = torch.optim.AdamW(program.parameters(), lr=0.01), 0.0
        for step in range(3):
            program(*program.shard_batch(penalised(step)[1])).backward()
            if step == 0:
                model(*batch).backward()
                whole = program.full_gradients()
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    worst = max(worst, float((whole[name] - parameter.grad).norm() / parameter.grad.norm()))
            program.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append(({name: value.numpy().tobytes() for name, value in program.state_dict().items()}, worst))
    return found


@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
def test_hosts_hold_the_same_parameters_to_the_last_bit(dtype: torch.dtype | None) -> None:
    """In float32, clipped, whatever each host cuts."""
    model, batch = penalised(0)
    graph = narrowed(capture(model, batch), dtype)
    plans = [make_mesh(graph, (2, 1), (5, 3), seed).to_json() for seed in (None, 1, 3, 5, 6, 12)]
    for (first, worst), *others in zip(*run_alike(3, descend_alike, plans), strict=True):
        assert worst < (1e-5 if dtype is None else 2**-7)
        for other, _ in others:
            assert [name for name in first if first[name] != other[name]] == []


def test_a_gradient_of_which_more_is_made_than_a_sum_is_host_0_s() -> None:
    model, batch = penalised(0)
    graph = capture(model, batch)
    graphs = [graph_of(graph, make_mesh(graph, (2, 1), (5, 3)), host) for host in range(2)]
    for host, found in enumerate(graphs):
        own = [n for n in found.nodes if n.name.endswith("_of_host_0")]
        targets = {t for t, v in found.gradients.items() if v.node.endswith("_of_host_0_over_hosts")}
        assert targets == {"last.weight", "first.parametrizations.weight.original1"}
        assert len(own) == len(targets) and {n.args[1] for n in own} == {1.0 - host}


class Tasks(nn.Module):
    """With a batch norm and a loss of its own for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.2))
        self.heads = nn.ModuleDict({"class": nn.Linear(12, 3), "value": nn.Linear(12, 1)})

    def forward(self, x: torch.Tensor, y: torch.Tensor, task: str = "class") -> dict[str, torch.Tensor]:
        out = self.heads[task](self.trunk(x))
        loss = nn.functional.cross_entropy(out, y) if task == "class" else (out.squeeze(1) - y).square().mean()
        return {"loss": loss, "out": out, "best": out.argmax(1), "mean": out.mean(0), "is_large": out > 0.1}


def tasks() -> nn.Module:
    torch.manual_seed(0)
    return Tasks().double()


def of_task(step: int, task: str, size: int) -> dict[str, Any]:
    source = torch.Generator().manual_seed(step)
    x = torch.randn(size, 6, dtype=torch.float64, generator=source)
    y = torch.randint(0, 3, (size,), generator=source) if task == "class" else x.sum(1)
    return {"x": x, "y": y, "task": task}


OUTPUTS = ("out", "best", "mean", "is_large")
MOVES = (("class", 8), ("class", 5), ("value", 8), ("value", 3), ("class", 8), ("class", 2))


class Told:
    times = 0

    def settle(self) -> None:
        self.times += 1

    def resume(self) -> None:
        pass


def vary(rank: int, text: str | None) -> list[Any]:
    """Losses, in training and in evaluation, what the model returns then, and the state at the end. ``text`` None: of
    one device."""
    cluster = hap.ClusterSpec.from_yaml(CLUSTER.split("  - name: big")[0] + ALONE)
    given: dict[str, Any] = {"cluster": cluster, "effort": "quick"} if text is None else {"plan": parse_plan(text)}
    program = hap.compile(tasks(), example_inputs=of_task(0, "class", 8), outputs=OUTPUTS, **given)
    program.random_seed = SEED
    optimizer, losses = torch.optim.SGD(program.parameters(), lr=0.1, momentum=0.9), list[float]()
    for step, (task, size) in enumerate(MOVES):
        batch, pace = program.shard_batch(of_task(step, task, size)), Told()
        program.set_pace(pace)
        loss = program(**batch)
        assert text is None or pace.times > 1  # once while ranks agree on which step it is
        losses.append(float(loss.detach()))
        loss.backward()
        losses.append(float(program.clip_grad_norm_(1.0)))
        optimizer.step()
        optimizer.zero_grad()
        program.eval()
        with torch.inference_mode():
            losses.append(float(program(**program.shard_batch(of_task(99, task, size)))))
        losses += [float(v) for name in OUTPUTS for v in program.outputs[name].flatten()]
        program.train()
    return [losses, {name: value.numpy() for name, value in program.state_dict().items()}]


ALONE = """  - name: alone
    devices: [{name: cpu, tflops: {float32: 0.04, float64: 0.02}, memory: 4GB, memory_bandwidth: 10GB/s}]
"""


@pytest.mark.parametrize(
    ("ranks", "batches", "seed"),
    [
        ((2, 1), (5, 3), None),
        *(pytest.param(*p, marks=pytest.mark.long) for p in (((1, 2), (2, 6), 5), ((2, 2), (4, 4), 6))),
    ],
)
def test_other_batches_evaluation_and_other_calls_are_one_devices(ranks, batches, seed):
    """The losses of two tasks in turns, of smaller batches, and of evaluation between them."""
    graph = capture(tasks(), of_task(0, "class", 8), outputs=OUTPUTS)
    [(expected, state)] = run_alike(1, vary, None)
    for losses, found in run_alike(sum(ranks), vary, make_mesh(graph, ranks, batches, seed).to_json()):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=TOLERANCE, atol=TOLERANCE)
        assert found.keys() == state.keys()
        for name, value in found.items():
            torch.testing.assert_close(torch.from_numpy(value), torch.from_numpy(state[name]), rtol=1e-9, atol=1e-10)


def test_every_host_has_a_part_of_another_batch():
    graphs = {n: capture(tasks(), of_task(0, "class", n)) for n in (8, 4, 3, 2)}
    plan = make_mesh(graphs[8], (1, 1, 1), (6, 1, 1))
    for n, parts in ((8, (6, 1, 1)), (4, (2, 1, 1)), (3, (1, 1, 1))):
        for host, part in enumerate(parts):
            carried = carry_mesh(plan, graphs[8], graphs[n], step_inputs(of_task(0, "class", n)), host, ())
            assert carried.dealt.feeds["kwargs.x"].local_shape(host) == (part, 6)
    with pytest.raises(PlanError, match="a batch of 2 for 3 hosts: each has to have a part of it; plan on one axis"):
        carry_mesh(plan, graphs[8], graphs[2], step_inputs(of_task(0, "class", 2)), 0, ())


def searched(rank: int) -> tuple[float, float]:
    cluster = hap.ClusterSpec.from_yaml(CLUSTER)
    given = {"example_inputs": (gpt2.batch(),), "example_targets": gpt2.batch(), "loss_fn": gpt2.lm_loss}
    plan = hap.plan_mesh(gpt2.build(), cluster, **given)  # type: ignore[arg-type]
    program = hap.compile(gpt2.build(), cluster, plan=plan, **given)  # type: ignore[arg-type]
    assert isinstance(program, MeshProgram)
    inputs, targets = program.shard_batch((gpt2.batch(),), gpt2.batch())
    loss = program(*inputs, targets=targets)
    loss.backward()
    alone = gpt2.build()
    expected = gpt2.lm_loss(alone(gpt2.batch()), gpt2.batch())
    expected.backward()
    whole = program.full_gradients()
    errors = [(whole[name] - p.grad).abs().max() / p.grad.abs().max() for name, p in alone.named_parameters()]
    dist.barrier()
    return abs(float(loss.detach() - expected)), float(max(errors))


@pytest.mark.long
def test_a_searched_plan_runs_as_any_other():
    for loss_error, gradient_error in run_alike(3, searched):
        assert loss_error <= TOLERANCE and gradient_error <= TOLERANCE
