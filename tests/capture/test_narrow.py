"""``reduce_dtype``: gradients rounded once each, by casts of the graph, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from hap.capture import capture, interpret, source_values
from hap.capture.narrow import as_planned, narrowed
from hap.errors import HapError, PlanError
from hap.graph import CAST, Graph, Value
from tests._support import gpt2
from tests._support.plans import replicated_plan

LOW = (torch.bfloat16, torch.float16)


class Net(nn.Module):
    """Layers, a norm, and a weight of the batch's own shape, whose gradient others read, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 24), nn.LayerNorm(24), nn.Linear(24, 5)
        self.added = nn.Parameter(torch.randn(8, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x) + self.added)))


class Twice(nn.Module):
    """One weight, read by two layers, or by four."""

    def __init__(self, times: int = 2) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(6, 6, bias=False), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(dtype)


def on_one_device(model: nn.Module, graph: Graph, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the gradients."""
    values = interpret(graph, source_values(graph, model, (x,), x[..., :5].contiguous(), tangent=0.7))
    return values[graph.loss], {target: values[v] for target, v in graph.gradients.items()}


def step_of(model: nn.Module, x: torch.Tensor, reduce_dtype: torch.dtype | None = None) -> Graph:
    y = x[..., :5].contiguous()
    return capture(model, x, loss_fn=loss, example_targets=y, reduce_dtype=reduce_dtype)


def loss(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(found[..., :5], expected)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("own", [torch.float32, torch.float64])
def test_one_device_computes_the_same_loss_and_gradients_rounded_once(dtype: torch.dtype, own: torch.dtype) -> None:
    model, x = net(own), torch.randn(8, 6, dtype=own)
    plain, narrow = step_of(model, x), step_of(model, x, dtype)
    expected_loss, expected = on_one_device(model, plain, x)
    found_loss, found = on_one_device(model, narrow, x)
    assert torch.equal(found_loss, expected_loss) and found.keys() == expected.keys()
    for target, gradient in found.items():
        assert gradient.dtype == own
        assert torch.equal(gradient, expected[target].to(dtype).to(own)), target
    casts = Counter(n.meta.dtype for n in narrow.nodes if n.op == CAST)
    assert casts == {dtype: len(expected), own: len(expected)}


def test_of_a_weight_that_two_calls_read_each_term_is_rounded_and_then_their_sum() -> None:
    model, x = Twice(), torch.randn(8, 6)
    plain, narrow = step_of(model, x), step_of(model, x, torch.bfloat16)
    values = interpret(plain, source_values(plain, model, (x,), x[..., :5].contiguous(), tangent=0.7))
    (gradient,) = plain.gradients.values()
    a, b = (values[term] for term in plain.by_name[gradient.node].inputs)
    _, found = on_one_device(model, narrow, x)
    assert torch.equal(found["layer.weight"], (a.bfloat16() + b.bfloat16()).float())
    added = narrow.by_name[narrow.by_name[narrow.gradients["layer.weight"].node].inputs[0].node]
    assert added.op == "aten.add.Tensor" and added.meta.dtype == torch.bfloat16


def test_of_a_weight_that_many_calls_read_only_the_last_sum_is_narrow() -> None:
    """Of 512 ones, added one by one in bfloat16, 256 would be left, as 256 + 1 is 256 there."""
    model, x = Twice(4), torch.randn(8, 6)
    narrow = step_of(model, x, torch.bfloat16)
    sums = [n for n in narrow.nodes if n.op == "aten.add.Tensor" and n.meta.shape == (6, 6)]
    assert [n.meta.dtype for n in sums] == [torch.float32, torch.float32, torch.bfloat16]


def test_what_is_no_wider_is_left_as_it_is() -> None:
    model, x = net(torch.bfloat16), torch.randn(8, 6, dtype=torch.bfloat16)
    for dtype in LOW:
        plain, found = step_of(model, x), step_of(model, x, dtype)
        assert found.nodes == plain.nodes and found.gradients == plain.gradients and found.reduce_dtype == dtype


def test_under_autocast_what_was_widened_is_taken_as_it_was() -> None:
    model, x = nn.Linear(6, 5), torch.randn(8, 6)
    with torch.autocast("cpu", torch.bfloat16):
        plain, narrow = step_of(model, x), step_of(model, x, torch.bfloat16)
    assert Counter(n.op for n in narrow.nodes) == Counter(n.op for n in plain.nodes)


def test_the_option_is_a_dtype_or_its_name_and_the_same_graph_either_way() -> None:
    plain = gpt2.graph(torch.float32)
    found = {
        capture(
            gpt2.build(torch.float32),
            (gpt2.batch(),),
            loss_fn=gpt2.lm_loss,
            example_targets=gpt2.batch(),
            reduce_dtype=given,
        ).fingerprint
        for given in (torch.bfloat16, "bfloat16", "torch.bfloat16")
    }
    assert found == {narrowed(plain, torch.bfloat16).fingerprint} and plain.fingerprint not in found
    for given in (torch.float32, "float8_e4m3fn", "int8", 16):
        with pytest.raises(HapError, match=r"^reduce_dtype \w+: expected bfloat16 or float16$"):
            capture(nn.Linear(2, 2), torch.ones(2, 2), reduce_dtype=given)  # type: ignore[arg-type]


def test_a_plan_brings_its_own_and_another_is_refused() -> None:
    plain = gpt2.graph(torch.float32)
    narrow = narrowed(plain, torch.bfloat16)
    plan, with_it = (replicated_plan(graph).provenance for graph in (plain, narrow))
    assert as_planned(plain, plan) is plain and as_planned(narrow, with_it) is narrow
    assert as_planned(plain, with_it).fingerprint == narrow.fingerprint
    with pytest.raises(
        PlanError, match="the plan exchanges gradients in their own dtype, and reduce_dtype is bfloat16"
    ):
        as_planned(narrow, plan)
    with pytest.raises(PlanError, match="the plan exchanges gradients in bfloat16, and reduce_dtype is float16"):
        as_planned(narrowed(plain, torch.float16), with_it)


def test_the_casts_stand_where_the_gradients_are_made() -> None:
    """So that they may be sent beside the rest of the backward pass."""
    graph = narrowed(gpt2.graph(torch.float32), torch.bfloat16)
    place = {n.name: i for i, n in enumerate(graph.nodes)}
    for value in graph.gradients.values():
        wide = graph.by_name[value.node]
        narrow = graph.by_name[wide.inputs[0].node]
        assert wide.phase == narrow.phase == "backward" and Value(wide.name) not in graph.users
        makers = [graph.by_name[v.node].inputs[0] for v in narrow.inputs] if narrow.op != CAST else [narrow.inputs[0]]
        assert place[wide.name] - max(place[m.node] for m in makers) <= 6
