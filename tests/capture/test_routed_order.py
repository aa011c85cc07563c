"""Rows of experts beside all else that a step does: what was written is there when it is read, a tensor is that of the
time of the call, and what has no graph is refused in words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from hap.capture import capture
from hap.errors import CaptureError
from tests.capture.equality import assert_equals_eager
from tests.capture.mixtures import EACH, EXPERTS, ROWS, WIDTH, Mixture, Straight, T, Then, batch, by_where, mixture

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


def numbers_that_are_no_mask(m: Mixture, x: T, ids: T) -> T:
    """Row 0 or row 1, by a part of a one-hot tensor."""
    hot = functional.one_hot(ids[:, 0], EXPERTS + 2).permute(1, 0)
    return x * m.other(x)[hot[1]].square().sum()


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
        numbers_that_are_no_mask,
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


def of_inputs(make: Callable[[T], T]) -> Then:
    """By ids of which nothing is known."""

    def then(m: Mixture, x: T, ids: T) -> T:
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            row, _ = torch.where(ids == e)
            y.index_add_(0, row, make(x[row]))
        return y

    return then


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
        of_inputs(lambda rows: rows / rows.std(-1, keepdim=True)),
        "where some rows may be for none of them",
    ),
    "a root by name where some are for none": (
        of_inputs(lambda rows: torch.sqrt(input=rows.abs())),
        "give it by its position",
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
