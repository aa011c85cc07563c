"""Experts that are called one after another with the rows that go to them: one device's loss and gradients, as few
products as there are layers of an expert, and a refusal in words of what has no graph."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.zoo_models.case import Case
from hap.capture import capture, interpret, source_values
from hap.codegen.lowering import lower
from hap.codegen.passes.runner import run_passes, standard_passes
from hap.errors import CaptureError
from hap.runtime.lockstep import run_lockstep
from tests._support.plans import make_plan, random_sizes, random_strategies
from tests.capture.equality import assert_equals_eager, count
from tests.zoo.lockstep import possible

ROWS, WIDTH, INNER, EXPERTS, EACH = 12, 6, 8, 4, 2
T = torch.Tensor
Then = Callable[["Mixture", T, T], T]


class Expert(nn.Module):
    """Several spellings of what experts are."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.gate, self.fused = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, 2 * INNER)
        self.norm, self.rms = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, elementwise_affine=True)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: T) -> T:
        match self.kind:
            case "gated":
                return self.down(functional.silu(self.gate(x)) * self.up(x))
            case "in place":
                h = self.up(x).add_(0.1)
                h *= 2
                return self.down(functional.relu(h, inplace=True))
            case "cast in place":
                h = self.up(x).float()
                h *= self.up.weight[:, 0]
                return self.down(h.type_as(x))
            case "fused":
                a, b = self.fused(self.norm(x)).chunk(2, dim=-1)
                return self.down(functional.gelu(a) * b)
            case "normed":
                return self.scale * self.down(torch.tanh(self.up(self.rms(x))))
            case "by hand":
                x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
                parts = self.up(x).view(-1, 2, INNER // 2).softmax(-1)
                return torch.cat([self.down(parts.reshape(-1, INNER)), x[:, :1]], dim=-1)[:, : x.shape[-1]].to(x.dtype)
        return self.down(self.up(x).tanh())


class Mixture(nn.Module):
    def __init__(self, then: Then, kind: str = "plain") -> None:
        super().__init__()
        self.router, self.out, self.other = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert(kind) for _ in range(EXPERTS))
        self.first = nn.Parameter(torch.rand(EXPERTS, WIDTH, INNER) - 0.5)
        self.second = nn.Parameter(torch.rand(EXPERTS, INNER, WIDTH) - 0.5)
        self.each = nn.Parameter(torch.rand(EXPERTS) + 0.5)
        self.then = then

    def routed(self, x: T) -> tuple[T, T]:
        weight, ids = self.router(x).softmax(-1).topk(EACH, dim=-1)
        return weight, ids

    def forward(self, x: T, labels: T, ids: T) -> T:
        return functional.cross_entropy(self.out(self.then(self, x, ids)), labels)


def batch() -> tuple[T, T, T]:
    """``ids`` (rows, 2): no two in a row are alike, and some are of no expert."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=g)
    ids = torch.stack([torch.randperm(EXPERTS + 2, generator=g)[:EACH] for _ in range(ROWS)])
    return x, torch.randint(0, 3, (ROWS,), generator=g), ids


def mixture(then: Then, kind: str = "plain") -> Mixture:
    torch.manual_seed(0)
    return Mixture(then, kind).double()


# -- how mixtures are written ----------------------------------------------------------------------------------------


def by_where(m: Mixture, x: T, _: T) -> T:
    weight, ids = m.routed(x)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, nth = torch.where(ids == e)
        y[row] += weight[row, nth, None] * expert(x[row])
    return y


def by_one_hot(m: Mixture, x: T, _: T) -> T:
    weight, ids = m.routed(x)
    y, mask = torch.zeros(x.shape, dtype=x.dtype), functional.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for e, expert in enumerate(m.experts):
        nth, row = torch.where(mask[e])
        y.index_add_(0, row, expert(x[None, row].reshape(-1, WIDTH)) * weight[row, nth, None].to(x.dtype))
    return y


def by_last_of_one_hot(m: Mixture, x: T, _: T) -> T:
    weight, ids = m.routed(x)
    y, mask = x.clone(), functional.one_hot(ids, EXPERTS).transpose(0, 1).bool()
    for e, expert in enumerate(m.experts):
        nth, row = mask[..., e].nonzero(as_tuple=True)
        y[row] = y[row] + expert(x.index_select(0, row)) * weight[row, nth].unsqueeze(-1)
    return y


def through_a_view(m: Mixture, x: T, _: T) -> T:
    weight, ids = m.routed(x)
    y = torch.zeros(2, ROWS // 2, WIDTH, dtype=x.dtype)
    rows = y.view(-1, WIDTH)
    for e in (2, 0, 3, 1):
        place = (ids == e).nonzero(as_tuple=True)
        rows[place[0]] += m.experts[e](x[place[0]]) * weight[place].unsqueeze(1)
    return y.reshape(-1, WIDTH)


def of_three_dims(m: Mixture, x: T, _: T) -> T:
    x = x.view(3, 4, WIDTH)
    weight, ids = m.routed(x)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        sample, at, nth = torch.where(ids == e)
        y[sample, at] += expert(x[sample, at]) * weight[sample, at, nth][:, None]
    return y.view(-1, WIDTH)


def of_one_tensor(m: Mixture, x: T, _: T) -> T:
    weight, ids = m.routed(x)
    y = x * 0
    for e in range(EXPERTS):
        row, nth = torch.where(ids == e)
        made = functional.gelu(x[row] @ m.first[e]) @ m.second[e] * m.each[e]
        y[row] += made * weight[row, nth, None]
    return y


def some(m: Mixture, x: T, _: T) -> T:
    weight, ids = m.routed(x)
    y = torch.zeros_like(x)
    for e in (3, 0, 1):
        row, nth = torch.where(ids == e)
        y[row] += weight[row, nth, None] * m.experts[e](x[row])
    return y


def of_inputs(m: Mixture, x: T, ids: T) -> T:
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, _ = torch.where(ids == e)
        y.index_add_(0, row, expert(x[row]))
    return y


def every_place(m: Mixture, x: T, _: T) -> T:
    weight, ids = m.routed(x)
    y = torch.empty(*ids.shape, WIDTH, dtype=x.dtype)
    for e, expert in enumerate(m.experts):
        row, nth = torch.where(ids == e)
        y[row, nth] = expert(x[row])
    return (y * weight[..., None]).sum(1)


def the_best(m: Mixture, x: T, _: T) -> T:
    weight, ids = m.router(x).softmax(-1).max(-1)
    y = torch.empty_like(x)
    for e, expert in enumerate(m.experts):
        y[ids == e] = expert(x[ids == e]) * weight[ids == e].unsqueeze(-1)
    return y


def best_by_place(m: Mixture, x: T, _: T) -> T:
    ids = m.router(x).argmax(-1)
    y = x.clone()
    for e, expert in enumerate(m.experts):
        row = torch.where(ids == e)[0]
        y[row] += expert(x[row])
    return y


def best_of_lists(m: Mixture, x: T, _: T) -> T:
    weight, ids = m.router(x).softmax(-1).max(-1)
    rows = [torch.eq(ids, e).nonzero(as_tuple=True)[0] for e in range(EXPERTS)]
    made, y = [m.experts[e](x[rows[e], :]) for e in range(EXPERTS)], x.new_zeros(x.shape)
    for e in range(EXPERTS):
        y[rows[e], :] = made[e]
    return y * weight.view(-1, 1)


def domains(m: Mixture, x: T, ids: T) -> T:
    """A layer for each of some; what is of none stays."""
    y, domain = x.clone(), ids[:, 0]
    for e in range(3):
        y[domain == e] = m.experts[e](y[domain == e])
    return y


def several_layers(m: Mixture, x: T, _: T) -> T:
    return by_where(m, x + by_where(m, x, _), _)


TOGETHER: dict[str, tuple[Then, int]] = {  # and how many products with experts one layer of them has
    "where": (by_where, 2),
    "one hot": (by_one_hot, 2),
    "the last of one hot": (by_last_of_one_hot, 2),
    "through a view": (through_a_view, 2),
    "of three dims": (of_three_dims, 2),
    "of one tensor": (of_one_tensor, 2),
    "some": (some, 2),
    "of inputs": (of_inputs, 2),
    "every place": (every_place, 2),
    "the best": (the_best, 2),
    "the best by its place": (best_by_place, 2),
    "the best, by lists": (best_of_lists, 2),
    "domains": (domains, 2),
    "several layers": (several_layers, 4),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_experts_are_called_together(name: str) -> None:
    then, products = TOGETHER[name]
    found = count(assert_equals_eager(mixture(then), batch()))
    assert found["hap.expert_mm_weight.default"] == products
    assert not found.get("aten.bmm.default") and not found.get("aten.index.Tensor"), "nothing is gathered"


@pytest.mark.parametrize(
    ("kind", "products"),
    [("gated", 3), ("in place", 2), ("cast in place", 2), ("fused", 2), ("normed", 2), ("by hand", 2)],
)
def test_all_of_an_expert_is_of_each_row(kind: str, products: int) -> None:
    tolerance = 1e-7 if kind == "cast in place" else 1e-12
    graph = assert_equals_eager(mixture(by_where, kind), batch(), tolerance=tolerance)
    assert count(graph)["hap.expert_mm_weight.default"] == products


def test_what_is_dropped_of_rows_is_drawn_for_all_of_them_at_once() -> None:
    def then(m: Mixture, x: T, _: T) -> T:
        ids, y = m.routed(x)[1], torch.zeros_like(x)
        for e, expert in enumerate(m.experts):
            row, _nth = torch.where(ids == e)
            y[row] += functional.dropout(expert(x[row]), 0.5)
        return y

    assert count(capture(mixture(then), batch()))["hap.dropout.default"] == 2  # forward and backward


@pytest.mark.parametrize("name", ["where", "one hot", "of one tensor", "some", "the best"])
def test_they_are_one_device_s_by_any_plan(name: str) -> None:
    model, rng = mixture(TOGETHER[name][0], "gated"), random.Random(3)
    found = possible(Case(model, batch(), lambda loss: loss, ()))
    values = source_values(found.graph, model, batch(), ())
    expected = interpret(found.graph, values)
    for _ in range(4):
        plan = make_plan(found, random_strategies(found, rng), random_sizes(found, 3, rng), world_size=3)
        step = run_lockstep(run_passes(lower(found.graph, plan), standard_passes()).program, values)
        for parameter, value in found.graph.gradients.items():
            torch.testing.assert_close(step.gradients[parameter], expected[value], rtol=1e-9, atol=1e-12)


# -- what is computed one after another, or as what a mask selects ---------------------------------------------------


def unlike(m: Mixture, x: T, _: T) -> T:
    weight, ids = m.routed(x)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, _nth = torch.where(ids == e)
        y[row] += (expert(x[row]) if e else m.other(x[row])) * (e + 1)
    return y * weight.sum()


def changed_between(m: Mixture, x: T, _: T) -> T:
    ids, y, h = m.routed(x)[1], torch.zeros_like(x), x * 1
    for e, expert in enumerate(m.experts):
        row, _ = torch.where(ids == e)
        y[row] += expert(h[row])
        h += 1
        y.mul_(0.5)
    return y


def read_between(m: Mixture, x: T, _: T) -> T:
    ids, y, total = m.routed(x)[1], torch.zeros_like(x), torch.zeros((), dtype=x.dtype)
    for e, expert in enumerate(m.experts):
        row, _ = torch.where(ids == e)
        y[row] += expert(x[row])
        total = total + y.sum()
    return y * total


def twice_the_same(m: Mixture, x: T, ids: T) -> T:
    """The second one reads what the first one wrote."""
    y, first = x.clone(), ids[:, 0]
    for _ in range(2):
        for e, expert in enumerate(m.experts):
            y[first == e] = expert(y[first == e])
    return y


def by_turns(m: Mixture, x: T, ids: T) -> T:
    h, g, first = x.clone(), x.clone(), ids[:, 0]
    for e, expert in enumerate(m.experts):
        h[first == e] = expert(h[first == e])
        g[first == e] += h[first == e]
    return h * g


def what_was_written(m: Mixture, x: T, ids: T) -> T:
    h, first = m.other(x).clone(), ids[:, 0]
    h[first == 2] = h[first == 2] * 3
    return h + h[first == 2].sum() + h[first == 1].mean()


def a_number_beside(m: Mixture, x: T, ids: T) -> T:
    h, first = m.other(x).clone(), ids[:, 0]
    h[first == 0] = m.experts[0](x[first == 0])
    h[first == 2] = 0.5
    h[first == 1] *= 3
    return h


def read_before_a_change(m: Mixture, x: T, ids: T) -> T:
    h, first = m.other(x).clone(), ids[:, 0]
    rows = h[first == 1]
    h.mul_(2)
    h[first == 1] = rows * 3
    return h


def unwritten(m: Mixture, x: T, _: T) -> T:
    weight, ids = m.routed(x)
    for e, expert in enumerate(m.experts):
        expert(x[torch.where(ids == e)[0]])
    return x * weight.sum()


def means_of_labels(m: Mixture, x: T, ids: T) -> T:
    row, nth = torch.where(ids == 1)
    return x * m.router(x)[:, :EACH][row, nth].mean() * m.other(x)[ids[:, 0] == 2].square().sum()


def changed_by_another_name(m: Mixture, x: T, _: T) -> T:
    ids, y, h = m.routed(x)[1], torch.zeros_like(x), x * 2
    data = h.data
    for e, expert in enumerate(m.experts):
        row, _nth = torch.where(ids == e)
        y[row] += expert(h[row])
    data.add_(1)
    return y


def beside_what_changes(m: Mixture, x: T, _: T) -> T:
    ids, y, beside = m.routed(x)[1], torch.zeros_like(x), m.each.sum() * torch.ones(WIDTH, dtype=x.dtype)
    for e, expert in enumerate(m.experts):
        row, _nth = torch.where(ids == e)
        y[row] += expert(x[row]) + beside
        beside += e + 1
    return y


def beside_what_is_owed(m: Mixture, x: T, ids: T) -> T:
    """A vector that rows of other ids were added to, among the arguments of an expert."""
    y, vector, first = x.clone(), torch.zeros(EXPERTS, dtype=x.dtype), torch.arange(EXPERTS) + ids[0, 0] * 0
    for e in range(EXPERTS):
        vector[first == e] += m.each[first == e] * 2
    for e, expert in enumerate(m.experts):
        y[ids[:, 0] == e] += expert(x[ids[:, 0] == e]) * vector.sum()
    return y


def where_it_is_finite(m: Mixture, x: T, _: T) -> T:
    """Elsewhere functions or their derivatives are not."""
    signed = x * (1 + m.router(x)[:, :1].square())
    sign, y = (x > 0).long(), signed.clone()
    y[sign == 1] = torch.log(signed[sign == 1]) + signed[sign == 1].pow(-0.5) + 3 / signed[sign == 1]
    y[sign == 0] = (-signed[sign == 0]).sqrt() / signed[sign == 0]
    return y


def known(m: Mixture, x: T, _: T) -> T:
    ids, y = torch.arange(ROWS) % EXPERTS, torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row = torch.where(ids == e)[0]
        y[row] = expert(x[row]) * row.numel()
    return y


def without_gradients(m: Mixture, x: T, _: T) -> T:
    with torch.no_grad():
        y = by_where(m, x, _)
    return y + m.other(x)


@pytest.mark.parametrize(
    "then",
    [
        unlike,
        changed_between,
        read_between,
        twice_the_same,
        by_turns,
        what_was_written,
        a_number_beside,
        read_before_a_change,
        unwritten,
        means_of_labels,
        changed_by_another_name,
        beside_what_changes,
        beside_what_is_owed,
        where_it_is_finite,
        known,
        without_gradients,
    ],
    ids=lambda then: then.__name__,
)
def test_order_is_kept(then: Then) -> None:
    assert_equals_eager(mixture(then), batch())


def test_autocast_is_that_of_the_call() -> None:
    def then(m: Mixture, x: T, _: T) -> T:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = by_where(m, x, _)
        return y

    torch.manual_seed(0)
    x, labels, ids = batch()
    graph = capture(Mixture(then), (x.float(), labels, ids))
    products = [node for node in graph.nodes if node.op == "hap.expert_mm.default"]
    assert products and all(node.meta.dtype == torch.bfloat16 for node in products)
    sums = [node for node in graph.nodes if node.op == "aten.sum.dim_IntList" and node.meta.shape == (ROWS, WIDTH)]
    assert sums and all(node.meta.dtype == torch.float32 for node in sums), "added in the dtype of the sum"


# -- what is refused -------------------------------------------------------------------------------------------------


def each(made: Callable[[Mixture, T, int, T, T], None]) -> Then:
    """``made`` is called with y, an expert's number, and its rows' places."""

    def then(m: Mixture, x: T, _: T) -> T:
        ids, y = m.routed(x)[1], torch.zeros_like(x)
        for e in range(EXPERTS):
            made(m, y, e, x, torch.where(ids == e)[0])
        return y

    return then


def add(value: Callable[[Mixture, T, int, T, T], T]) -> Then:
    def made(m: Mixture, y: T, e: int, x: T, row: T) -> None:
        y[row] += value(m, y, e, x, row)

    return each(made)


def checked(m: Mixture, y: T, e: int, x: T, row: T) -> None:
    if row.numel() > 0:
        y[row] += m.experts[e](x[row])


def replaced(m: Mixture, y: T, e: int, x: T, row: T) -> None:
    y[row] = m.experts[e](x[row])


def changed_ids(m: Mixture, x: T, _: T) -> T:
    ids, y = m.routed(x)[1], torch.zeros_like(x)
    ids = ids.clone()
    for e, expert in enumerate(m.experts):
        row, _ = torch.where(ids == e)
        y[row] += expert(x[row])
    ids.zero_()
    return y


def changed_mask(m: Mixture, x: T, _: T) -> T:
    weight, ids = m.routed(x)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = ids == e
        mask &= weight > 0.3
        row, _ = torch.where(mask)
        y[row] += expert(x[row])
    return y


def shared(m: Mixture, y: T, e: int, x: T, row: T) -> T:
    h = m.experts[e].up(x[row])
    half, _ = h.chunk(2, -1)
    h.relu_()
    return half[:, :1]


def other_experts(m: Mixture, x: T, _: T) -> T:
    ids, y = m.routed(x)[1], torch.zeros_like(x)
    row, other = torch.where(ids == 0)[0], torch.where(ids == 1)[0]
    y[row] += m.experts[0](x[row]) + m.experts[1](x[other])
    return y


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: T) -> T:
        return x.round()

    @staticmethod
    def backward(ctx: object, g: T) -> T:
        return g


def held_while_it_changes(m: Mixture, x: T, _: T) -> T:
    ids, y, beside = m.routed(x)[1], torch.zeros_like(x), torch.ones(WIDTH, dtype=x.dtype)
    rows = [torch.where(ids == e)[0] for e in range(EXPERTS)]
    made = [m.experts[e](x[rows[e]]) * beside for e in range(EXPERTS)]
    beside += 1
    for e in range(EXPERTS):
        y[rows[e]] += made[e]
    return y


def to_another(m: Mixture, x: T, _: T) -> T:
    ids, y = m.routed(x)[1], torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        y.index_add_(0, torch.where(ids == e)[0], expert(x[torch.where(ids == (e + 1) % EXPERTS)[0]]))
    return y


def of_inputs_deviated(m: Mixture, x: T, ids: T) -> T:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        row, _ = torch.where(ids == e)
        y.index_add_(0, row, x[row] / x[row].std(-1, keepdim=True))
    return y


def set_to_another(m: Mixture, x: T, ids: T) -> T:
    y = x.clone()
    y[ids[:, 0] == 0] = m.other(x)[ids[:, 0] == 1]
    return y


REFUSED: dict[str, tuple[Then, str]] = {
    "a backward of its own": (
        add(lambda m, y, e, x, row: Straight.apply(x[row])),
        "Straight, a function with a backward of its own, of a tensor whose size depends on values",
    ),
    "held while it changes": (held_while_it_changes, "changed in place since"),
    "to another expert": (to_another, "added to another one's"),
    "set to another expert": (set_to_another, "written to another one's"),
    "a deviation where some are for none": (
        of_inputs_deviated,
        "where some rows may be for none of them",
    ),
    "a check": (each(checked), "a check whether there are any can be left out"),
    "its own sum": (add(lambda m, y, e, x, row: m.experts[e](x[row] + y[row])), "rows that are sent to one expert"),
    "rows replaced": (each(replaced), "rows that are sent to one expert"),
    "ids that changed": (changed_ids, "ids of experts that were changed in place since"),
    "a mask that changed": (changed_mask, "not by all of its dims in order"),
    "a norm of the batch": (
        add(lambda m, y, e, x, row: functional.batch_norm(x[row], None, None, training=True)),
        "batch_norm of the rows that are sent to one expert",
    ),
    "along the rows": (add(lambda m, y, e, x, row: x[row].softmax(0)), "a call along the rows"),
    "a sum of them": (add(lambda m, y, e, x, row: x[row] * x[row].sum()), "a call along the rows"),
    "how many": (add(lambda m, y, e, x, row: x[row] / x[row].shape[0]), "a call along the rows"),
    "as many beside": (add(lambda m, y, e, x, row: x[row] * x), "with another number of dims"),
    "memory that is shared": (add(shared), "the same function out of place"),
    "rows of several": (other_experts, "rows that are sent to several experts"),
    "a dim before": (add(lambda m, y, e, x, row: x[None, row]), "take it away with view"),
    "of another size": (add(lambda m, y, e, x, row: m.other(x[row])[:, :1].view(-1)), "with another number of dims"),
    "of other rows": (add(lambda m, y, e, x, row: x.t()[row].t()), "another size than the ids"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_graph_is_refused_in_words(name: str) -> None:
    then, words = REFUSED[name]
    with pytest.raises(CaptureError) as caught:
        capture(mixture(then), batch())
    said = str(caught.value)
    assert words in said.split(f" at {__file__}")[0] and "\n" not in said
