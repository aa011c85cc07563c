"""Optimizers that look at whole parameters: never given shards, and equal to one device where parameters are whole."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import hap
from hap.capture import capture
from hap.codegen.layout import Layout
from hap.cost_models.optimizers import KINDS
from hap.errors import ProgramError
from hap.mesh_plan import parse_plan
from hap.placement import REPLICATE, Shard
from hap.rules.choices import Choices, choices
from hap.runtime.elementwise import ELEMENTWISE, is_elementwise, mark_shards
from hap.runtime.profile import make_optimizer
from tests._support.mesh import make_mesh
from tests._support.optimizers import Decaying, Factored, Grouped, Grower, Lars, Lion, Little, OwnSgd, Secret
from tests._support.plans import make_plan, random_sizes, random_strategies, replicated_plan
from tests._support.ranks import RankError, run_alike

STEPS, TOLERANCE = 3, 1e-9
CLUSTER = hap.ClusterSpec.from_yaml("""
name: three
hosts:
  - name: h
    devices: [{name: d, tflops: {float64: 1, float32: 2, bfloat16: 2}, memory: 8GB, memory_bandwidth: 9GB/s, count: 3}]
    link: {bandwidth: 10GB/s, latency: 1us}
""")
HOSTS = hap.ClusterSpec.from_yaml("""
name: two and one
hosts:
  - name: a
    devices: [{name: d, tflops: {float64: 1, float32: 2, bfloat16: 2}, memory: 8GB, memory_bandwidth: 9GB/s, count: 2}]
    link: {bandwidth: 10GB/s, latency: 1us}
    network: {bandwidth: 10GB/s, latency: 1us}
  - name: b
    devices: [{name: e, tflops: {float64: 1, float32: 2, bfloat16: 2}, memory: 8GB, memory_bandwidth: 9GB/s}]
    network: {bandwidth: 10GB/s, latency: 1us}
""")
UNEVEN = (4, 2, 1)


def test_profiles_time_every_update_that_plans_know() -> None:
    for name in KINDS:
        parameters = some()
        parameters[0].grad = torch.ones_like(parameters[0])
        make_optimizer(name, parameters).step()
        assert not parameters[0].equal(torch.ones(3, 2))


def some() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2))]


def test_of_torchs_own_each_is_what_trying_it_out_says(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {k for k in vars(torch.optim).values() if isinstance(k, type) and issubclass(k, torch.optim.Optimizer)}
    tried = kinds - {torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
    monkeypatch.setattr("hap.runtime.elementwise.ELEMENTWISE", frozenset())
    monkeypatch.setattr("hap.runtime.elementwise.PLANNED", {})
    assert {k for k in tried if is_elementwise(k(some()))} == ELEMENTWISE
    assert {k for k in tried if is_elementwise(k(some())) is False} == {torch.optim.Muon, torch.optim.Adafactor}
    assert is_elementwise(torch.optim.LBFGS(some())) is False


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (Lion(some()), True),
        (Lion(some(), lr=0.0), True),
        (torch.optim.AdamW(some(), amsgrad=True, fused=True), True),
        (Lars(some()), False),
        (Decaying(some()), True),
        (Decaying([{"params": some(), "weight_decay": 1e-2}, {"params": some()}]), False),
        (Decaying([{"params": some()}, {"params": some(), "weight_decay": 1e-2}]), False),
        (Factored(some()), False),
        (Factored(some(), least=128), False),
        (Factored(some(), least=4096), True),
        (Grouped(some()), True),
        (Grouped([{"params": some()}, {"params": some(), "lr": 0.0, "centred": True}]), False),
        (Grower(some()), False),
        (OwnSgd(some()), False),
        (Little(some()), None),
        (Secret(some(), key=0), None),
    ],
)
def test_others_are_tried_out(optimizer: torch.optim.Optimizer, expected: bool | None) -> None:
    before = torch.random.get_rng_state()
    assert is_elementwise(optimizer) is expected
    assert torch.random.get_rng_state().equal(before)


# ---- on ranks ----


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 12)
        self.layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True, bias=False)
        self.head = nn.Linear(12, 13)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layer(self.table(ids))).flatten(0, 1), ids.flatten())


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().double()


def ids(step: int = 0) -> torch.Tensor:
    return torch.randint(0, 13, (7, 4), generator=torch.Generator().manual_seed(step))


@cache
def found() -> Choices:
    return choices(capture(model(), ids()))


def sharded_plan(seed: int, ranks: int) -> str:
    source = random.Random(seed)
    strategies = random_strategies(found(), source)
    return make_plan(found(), strategies, random_sizes(found(), ranks, source), world_size=ranks).to_json()


def optimizers(kind: str, named: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices but the embedding's, AdamW for the rest; the others for all."""
    parameters = dict(named)
    if kind != "Muon":
        options = {"Adafactor": {"lr": 0.05}, "LBFGS": {"lr": 0.3, "max_iter": 4}}[kind]
        return [getattr(torch.optim, kind)(parameters.values(), **options)]
    matrices = [p for name, p in parameters.items() if p.dim() == 2 and "table" not in name]
    rest = [p for name, p in parameters.items() if p.dim() != 2 or "table" in name]
    return [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(rest, lr=0.02)]


def steps(program: hap.HapProgram, chosen: list[torch.optim.Optimizer], numbers: range) -> list[float]:
    losses = []
    for step in numbers:
        program.zero_grad()
        loss = program(program.shard_batch(ids(step)))
        loss.backward()
        for optimizer in chosen:
            optimizer.step()
        losses.append(loss.item())
    return losses


def train(rank: int, text: str, kind: str) -> tuple[list[float], dict[str, Any]]:
    program = hap.compile(model(), plan=parse_plan(text), example_inputs=ids())  # type: ignore[arg-type]
    chosen, losses = optimizers(kind, program.named_parameters()), list[float]()

    def closure() -> torch.Tensor:
        program.zero_grad()
        loss = program(program.shard_batch(ids(len(losses))))
        loss.backward()
        return loss

    if kind == "LBFGS":
        for _ in range(STEPS):
            losses.append(chosen[0].step(closure).item())
    else:
        losses = steps(program, chosen, range(STEPS))
    return losses, {name: tensor.numpy() for name, tensor in program.state_dict().items()}


def assert_trains_as_one_device(text: str, kind: str) -> None:
    losses, state = train(0, replicated_plan(found().graph).to_json(), kind)
    assert losses[0] > losses[-1]
    for found_losses, found_state in run_alike(3, train, text, kind):
        assert found_losses == pytest.approx(losses, rel=TOLERANCE)
        for name, whole in state.items():
            numpy.testing.assert_allclose(found_state[name], whole, TOLERANCE, TOLERANCE, err_msg=name)


@pytest.mark.parametrize(("kind", "optimizer"), [("Muon", "muon"), ("Adafactor", "adafactor"), ("LBFGS", "sgd")])
def test_a_plan_for_it_trains_as_one_device(kind: str, optimizer: str) -> None:
    pins = hap.Pins(placements={"args.0": "S(0)", **({"*": "R"} if kind == "LBFGS" else {})}, ratios=UNEVEN)
    plan = hap.plan(model(), CLUSTER, example_inputs=ids(), optimizer=optimizer, pins=pins, effort="quick")
    assert UNEVEN in [group.sizes for group in plan.groups.values()]
    assert_trains_as_one_device(plan.to_json(), kind)


def test_a_matrix_may_be_of_one_rank() -> None:
    """Each of a rank of its own choosing; some ranks own several, and what Muon is not for is in shards."""
    pins = {"args.0": "S(0)", "*": "S(0)", "head.bias": "R"}
    plan = hap.plan(model(), CLUSTER, example_inputs=ids(), optimizer="muon", pins=hap.Pins(placements=pins))
    owned = [group.sizes for name, group in plan.groups.items() if name.startswith("own")]
    assert len(owned) == 5 and {sizes.index(sum(sizes)) for sizes in owned} == {0, 1, 2}
    assert_trains_as_one_device(plan.to_json(), "Muon")
    with pytest.raises(RankError, match="Adafactor makes an update from whole parameters"):
        run_alike(3, train, plan.to_json(), "Adafactor")


def test_so_does_one_of_two_axes() -> None:
    mesh = hap.plan_mesh(model(), HOSTS, example_inputs=ids(), optimizer="muon", effort="quick")
    assert mesh.provenance.world_size == 3
    assert_trains_as_one_device(mesh.to_json(), "Muon")


def test_what_muon_need_not_see_may_be_in_shards() -> None:
    graph = found().graph
    pins = hap.Pins(placements={"table.weight": "S(0)", "layer.norm1.weight": "S(0)"})
    plan = hap.plan(model(), CLUSTER, example_inputs=ids(), optimizer="muon", pins=pins)
    lies = {n.target: plan.strategy(n.name).outputs[0] for n in graph.sources("parameter")}
    assert isinstance(lies["table.weight"], Shard) and isinstance(lies["layer.norm1.weight"], Shard)
    for placement in (lies["layer.linear1.weight"], lies["head.weight"]):
        assert placement == REPLICATE or max(plan.groups[placement.group].sizes) == placement.n  # type: ignore[union-attr]
    with pytest.raises(hap.HapError, match=r"head.weight is pinned to shards, but an update by muon is made from all"):
        hap.plan(
            model(), CLUSTER, example_inputs=ids(), optimizer="muon", pins=hap.Pins(placements={"head.weight": "S(1)"})
        )


REMEDIES = {"Muon": "optimizer='muon'", "Adafactor": "optimizer='adafactor'", "LBFGS": "pins="}


def refused(rank: int, text: str) -> dict[str, str]:
    """What the first step of each is refused with."""
    program, said = hap.compile(model(), plan=parse_plan(text), example_inputs=ids()), {}  # type: ignore[arg-type]

    def closure() -> torch.Tensor:
        loss = program(program.shard_batch(ids()))
        loss.backward()
        return loss

    for kind in REMEDIES:
        program.zero_grad()
        closure()
        with pytest.raises(ProgramError) as caught:
            for optimizer in optimizers(kind, program.named_parameters()):
                optimizer.step(closure if kind == "LBFGS" else None)  # type: ignore[arg-type]
        said[kind] = str(caught.value)
    return said


def test_shards_are_refused() -> None:
    for said in run_alike(2, refused, sharded_plan(3, 2)):
        for kind, remedy in REMEDIES.items():
            assert f"{kind} makes an update from whole parameters," in said[kind]
            assert f" in shards: plan with {remedy}" in said[kind]


def refused_with_clipping(rank: int, text: str) -> dict[str, str]:
    said = refused(rank, text)
    program = hap.compile(model(), plan=parse_plan(text), example_inputs=ids())  # type: ignore[arg-type]
    optimizer, scaler = torch.optim.SGD(program.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(program(program.shard_batch(ids()))).backward()
    for name, call in (("clip", lambda: clip_grad_norm_(program.parameters(), 1.0)), ("scale", scaler.step)):
        with pytest.raises(ProgramError) as caught:
            call(*([optimizer] if name == "scale" else []))
        said[name] = str(caught.value)
    return said


def test_what_one_host_has_in_shards_is_refused_on_all_ranks() -> None:
    """The first host has one rank, and all parameters whole: it must not go on while the others stop."""
    graph = found().graph
    rows = graph.sources("input")[0].meta.shape[0]
    first, *others = run_alike(3, refused_with_clipping, make_mesh(graph, (1, 2), (1, rows - 1)).to_json())
    assert all(said == first for said in others)
    assert "plan with optimizer='adafactor'" in first["Adafactor"] and "program.clip_grad_norm_" in first["clip"]
    assert first["LBFGS"].endswith("plan with one axis and pins=hap.Pins(placements={'*': 'R'})")


def warned(rank: int, text: str) -> str:
    program = hap.compile(model(), plan=parse_plan(text), example_inputs=ids())  # type: ignore[arg-type]
    optimizer = Secret(program.parameters(), key=0)
    with pytest.warns(UserWarning, match="Secret could not be tried out") as caught:
        optimizer.step()
        optimizer.step()
    assert len(caught) == 1, "once"
    added = torch.optim.Muon([p for p in program.parameters() if p.dim() == 2])
    try:
        added.step()
    except ProgramError as e:
        return str(e)
    return ""


def test_who_cannot_be_tried_out_is_warned_of() -> None:
    assert all("Muon makes an update" in said for said in run_alike(2, warned, sharded_plan(3, 2)))


def test_a_program_whose_parameters_are_whole_takes_any() -> None:
    program = hap.compile(model(), plan=replicated_plan(found().graph), example_inputs=ids())
    program(ids()).backward()
    Secret(program.parameters(), key=0).step()
    Lars(program.parameters()).step()


def begin(rank: int, text: str, directory: str) -> list[float]:
    """Three steps with Muon, saved after the first."""
    program = hap.compile(model(), plan=parse_plan(text), example_inputs=ids())  # type: ignore[arg-type]
    chosen = optimizers("Muon", program.named_parameters())
    first = steps(program, chosen, range(1))
    program.save_checkpoint(directory, *chosen)
    return first + steps(program, chosen, range(1, STEPS))


def go_on(rank: int, text: str, directory: str) -> list[float]:
    program = hap.compile(model(9), plan=parse_plan(text), example_inputs=ids())  # type: ignore[arg-type]
    chosen = optimizers("Muon", program.named_parameters())
    program.load_checkpoint(directory, *chosen)
    return steps(program, chosen, range(1, STEPS))


@pytest.mark.parametrize("owned_first", [True, pytest.param(False, marks=pytest.mark.long)])
def test_momentum_goes_on_from_the_owner_to_all_and_back(owned_first: bool, tmp_path: Path) -> None:
    pins = hap.Pins(placements={"args.0": "S(0)", "*": "S(0)", "head.bias": "R"})
    owned = hap.plan(model(), CLUSTER, example_inputs=ids(), optimizer="muon", pins=pins).to_json()
    plans = [(owned, 3), (replicated_plan(found().graph, 2).to_json(), 2)][:: 1 if owned_first else -1]
    (first, ranks), (second, others) = plans
    expected = run_alike(ranks, begin, first, str(tmp_path))[0]
    for losses in run_alike(others, go_on, second, str(tmp_path)):
        assert losses == pytest.approx(expected[1:], rel=TOLERANCE)


def test_torchs_own_clipping_by_a_norm_is_refused_for_shards_however_it_was_imported() -> None:
    cut, whole = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    mark_shards({"cut": cut, "whole": whole}, {"cut": Layout(0, 1, 1, (3, 2)), "whole": None}, 0)
    for parameter in (cut, whole):
        parameter.grad = torch.full_like(parameter, 10.0)
    for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_norm_):
        with pytest.raises(ProgramError, match=r"a rank's part of cut alone.* program\.clip_grad_norm_"):
            clip([whole, cut], 1.0)
    with pytest.raises(ProgramError, match="a rank's part of cut alone"):
        nn.utils.clip_grads_with_norm_(cut, 1.0, torch.tensor(10.0))
    assert cut.grad is not None and cut.grad.tolist() == [10.0] * 3
    nn.utils.clip_grad_value_([whole, cut], 2.0)
    assert cut.grad.tolist() == [2.0] * 3
    total = clip_grad_norm_(iter([whole]), 1.0)
    assert whole.grad is not None and whole.grad.norm().item() == pytest.approx(1.0, rel=1e-4)
    assert total.item() == pytest.approx(8**0.5)


def test_torchs_own_scaler_is_refused_for_shards() -> None:
    """Of parameters that are whole all ranks see the same."""
    cut, whole = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    mark_shards({"cut": cut, "whole": whole}, {"cut": Layout(0, 1, 1, (3, 2)), "whole": None}, 0)
    for parameters in ([cut, whole], [whole]):
        scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(parameters, lr=0.1)
        scaler.scale(sum((p.sum() for p in parameters), torch.zeros(()))).backward()
        if len(parameters) > 1:
            with pytest.raises(ProgramError, match=r"use program\.grad_scaler"):
                scaler.step(optimizer)
            whole.grad = None
        else:
            scaler.step(optimizer)
            assert whole.detach().tolist() == pytest.approx([0.9, 0.9])
