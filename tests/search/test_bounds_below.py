"""Bounds are below the plans of models and clusters that once were below them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.graph import CAST
from hap.placement import Shard, Sizes
from hap.rules.choices import Choices, choices
from hap.search import Pins, plan_graph
from hap.search.as_run_bound import may_be_folded
from hap.search.boxes import Boxes
from hap.search.cases import _Bounds, find_batch, find_boxed, find_main
from hap.search.crossing import Box
from hap.search.flows import RADIUS
from hap.search.gap import gap_terms
from hap.search.mesh import plan_mesh
from hap.search.problem import Problem
from hap.search.relaxation import relaxation
from hap.search.rounding import round_shares
from tests.search.test_bound_measured import PERCEPTRON, PLAIN, measured

UNLIKE = """
  - name: {0}
    devices:
      - {{name: quick, tflops: {{float32: 10, bfloat16: 400}}, memory: 64GB, memory_bandwidth: 100GB/s}}
      - {{name: wide, tflops: {{float32: 10}}, memory: 64GB, memory_bandwidth: 3000GB/s}}
    link: {{bandwidth: 1000GB/s, latency: 1us}}
    network: {{bandwidth: 400GB/s, latency: 1us}}"""
ALIKE = """
  - name: {0}
    devices: [{{name: d, count: 2, tflops: {{float32: 100, bfloat16: 100}}, memory: 64GB, memory_bandwidth: 1000GB/s,
               launch: 5us}}]
    link: {{bandwidth: 10000GB/s, latency: 0us}}
    network: {{bandwidth: 10000GB/s, latency: 0us}}"""
APART = """
name: apart
backend: nccl
hosts:
  - {name: a, devices: [{name: g, tflops: {float32: 1000}, memory: 16GB, memory_bandwidth: 1GB/s, launch: 1us}],
     network: {bandwidth: 1MB/s, latency: 1us}}
  - {name: b, devices: [{name: k, tflops: {float32: 1000}, memory: 16GB, memory_bandwidth: 100GB/s, launch: 1us}],
     network: {bandwidth: 1MB/s, latency: 1us}}
"""


def two(host: str) -> ClusterSpec:
    return ClusterSpec.from_yaml("name: two\nbackend: nccl\nhosts:" + "".join(map(host.format, "ab")))


class Words(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(words, width), nn.Linear(width, width, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(self.words(ids)).square().mean()
        return loss


class Layers(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Biased(nn.Module):
    """A product of a tensor of three dims: a view stands between it and its bias."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(1, 1)) for _ in range(count))
        self.biases = nn.ParameterList(nn.Parameter(torch.empty(1)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = torch.tanh(x @ weight + bias)
        return x.square().mean()


class Towers(nn.Module):
    """Alike for two steps, and unlike further on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        u = torch.relu(x.softmax(1).softmax(0) + self.a)
        v = torch.tanh(y.softmax(1).softmax(0) + self.b)
        p, q = torch.relu(torch.abs(x)), torch.tanh(torch.abs(y))
        return u.flatten().square().sum() + p.mean() + v.flatten()[None].sin().sum() + q.mean()


def captured(model: type[nn.Module], *sizes: int, of: object, **more: object) -> Choices:
    with torch.device("meta"):
        return choices(capture(model(*sizes), of, **more))  # type: ignore[arg-type]


def test_parameters_are_updated_where_a_host_has_each_quickest() -> None:
    """Of two devices of a host one makes Muon's products sooner, the other what is done element by element."""
    found = captured(Words, 200_000, 4096, of=torch.zeros(512, dtype=torch.int64, device="meta"))
    predicted = plan_mesh(found, two(UNLIKE), optimizer="muon").predicted
    assert predicted.lower_bound_s is not None and 0.5 < predicted.lower_bound_s / predicted.step_s < 1


def test_a_cast_that_a_sum_over_hosts_takes_along_counts_as_nothing() -> None:
    found = captured(Layers, 4, 1, of=torch.empty(2, 1, device="meta"), reduce_dtype=torch.bfloat16)
    for inside in plan_mesh(found, two(ALIKE), optimizer="sgd").inside:
        predicted = inside.predicted
        assert predicted.overlapped_s is not None and predicted.overlapped_bound_s is not None
        assert 0.5 * predicted.overlapped_s < predicted.overlapped_bound_s <= predicted.overlapped_s


def test_a_view_between_a_product_and_its_bias_counts_as_nothing() -> None:
    found = captured(Biased, 8, of=torch.empty(1, 1, 1, device="meta"))
    views = [n for n in found.graph.nodes if n.op == "aten.view.default" and may_be_folded(found.graph, n)]
    assert len(views) == 8
    assert not any(may_be_folded(found.graph, n) for n in found.graph.nodes if n.op == CAST)
    profile = measured(0).profile
    kind = profile.kinds[0].model_copy(update={"calls": {}, "node_s": 1e-5, "in_step": 1.0})
    ranks = tuple(rank.model_copy(update={"factor": 1.0, "kind": 0}) for rank in profile.ranks)
    devices = profile.model_copy(update={"kinds": (kind,), "ranks": ranks}).calibrate(PLAIN)
    predicted = plan_graph(found, devices).predicted
    assert predicted.overlapped_s is not None and predicted.overlapped_bound_s is not None
    assert 0.9 * predicted.overlapped_s < predicted.overlapped_bound_s <= predicted.overlapped_s


def test_no_value_s_exchange_is_priced_by_the_groups_of_another() -> None:
    """``y`` lies on the device where its next call is; ``x``, which counts as like it, does not."""
    on = ClusterSpec.from_yaml(APART)
    found = captured(Towers, 512, of=(torch.empty(512, 512, device="meta"), torch.empty(512, 512, device="meta")))
    problem = Problem.state(found, on, "sgd", Pins())
    facts = problem.facts

    def group(name: str, dim: int) -> str:
        places = (p for s in facts.candidates[name] for p in s.outputs)
        return next(p.group for p in places if isinstance(p, Shard) and p.dim == dim)

    sizes = {name: round_shares([1.0, 1.0], g.n) for name, g in problem.choices.groups.items()}
    for name, dim, rank in (("softmax_1", 0, 1), ("softmax_2", 1, 0), ("softmax_4", 1, 1)):
        sizes[group(name, dim)] = tuple(512 * (r == rank) for r in range(2))
    batch, shared = find_batch(facts), find_boxed(facts, facts.colours[RADIUS])
    assert batch is not None
    others = [(g, shared[g]) for g in find_main(facts, shared) if g != batch[0]]
    boxes = Boxes(facts, relaxation(facts), (batch, *others))
    point: tuple[Sizes, ...] = tuple(
        tuple(sizes[name][part.device.rank] for part in boxes.parts) for name, _ in boxes.groups
    )
    bound_s, _ = _Bounds(boxes).bound_s(Box(point, point), 0.0, float("inf"))
    step_s = plan_graph(found, on, optimizer="sgd", pins=Pins(sizes=sizes)).predicted.step_s
    assert 0 < bound_s <= step_s


@pytest.mark.parametrize("step_s", [0.0, 5e-2])
def test_what_surrounds_a_step_is_no_other_strategy_s(step_s: float) -> None:
    profile = measured(0).profile
    kinds = tuple(kind.model_copy(update={"step_s": step_s}) for kind in profile.kinds)
    on = profile.model_copy(update={"kinds": kinds}).calibrate(PLAIN)
    terms = gap_terms(Problem.state(PERCEPTRON, on, "adamw", Pins()).facts, plan_graph(PERCEPTRON, on))
    assert terms is not None and terms.choice_s > -1e-9
