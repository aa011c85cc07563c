"""Experts that are called one after another with the rows that go to them: one device's loss and gradients, by as few
products as there are layers of an expert."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional

from benchmarks.zoo_models.case import Case
from hap.capture import capture, interpret, source_values
from hap.codegen.lowering import lower
from hap.codegen.passes.runner import run_passes, standard_passes
from hap.runtime.lockstep import run_lockstep
from tests._support.plans import make_plan, random_sizes, random_strategies
from tests.capture.equality import assert_equals_eager, count
from tests.capture.mixtures import EXPERTS, ROWS, WIDTH, Mixture, T, Then, batch, by_where, mixture
from tests.zoo.lockstep import possible

# -- how mixtures are written ----------------------------------------------------------------------------------------


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


def over_as_many(m: Mixture, x: T, _: T) -> T:
    """Divided by the same numbers in every row, as many as there are rows, some of which are for no expert."""
    ids, y, over = m.router(x).argmax(-1), torch.zeros_like(x), torch.linspace(0.5, 2.0, ROWS, dtype=x.dtype)
    for e in (3, 0, 1):
        row = torch.where(ids == e)[0]
        y[row] += (torch.cat([m.experts[e](x[row]), x[row]], dim=-1) / over)[:, WIDTH // 2 : WIDTH // 2 + WIDTH]
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
    "over as many": (over_as_many, 2),
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
