"""What is made of rows of experts is computed later than it is called: as it was called, without gradients or with
them, under the autocast of the call, and before a function with a backward of its own looks at it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hap.capture import capture
from hap.errors import CaptureError
from tests.capture.equality import assert_equals_eager
from tests.capture.mixtures import EXPERTS, INNER, WIDTH, Expert, Mixture, Straight, T, Then, batch, mixture

Made = Callable[[Mixture, int, T], T]


def rows_of(x: T, row: T) -> T:
    return x[row]


def loop(made: Made, read: Callable[[T, T], T] = rows_of) -> Then:
    """``made`` is called with an expert's number and its rows, as ``read``, by default with gradients."""

    def then(m: Mixture, x: T, _: T) -> T:
        x = m.other(x)
        weight, ids = m.routed(x)
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            row, nth = torch.where(ids == e)
            y[row] += weight[row, nth, None] * made(m, e, read(x, row))
        return y

    return then


# -- gradients -------------------------------------------------------------------------------------------------------


def normed(m: Mixture, e: int, h: T) -> T:
    with torch.no_grad():
        most = h.abs().amax(-1, keepdim=True)
    return m.experts[e](h / (most + 1e-6))


def beside_what_is_frozen(m: Mixture, e: int, h: T) -> T:
    with torch.no_grad():
        frozen = m.other(h)
    return m.experts[e](h) + frozen


def of_the_same_parameters(m: Mixture, e: int, h: T) -> T:
    with torch.no_grad():
        frozen = m.experts[e].up(h)
    return m.experts[e].down(m.experts[e].up(h) + frozen)


def by_a_part_without(m: Mixture, e: int, h: T) -> T:
    with torch.no_grad():
        first = m.first[e]
    return (h @ first) @ m.second[e]


def some_without(m: Mixture, e: int, h: T) -> T:
    with torch.set_grad_enabled(e != 2):
        h = m.experts[e].up(h)
    return m.experts[e].down(h)


def with_them_again(m: Mixture, e: int, h: T) -> T:
    with torch.no_grad():
        half, _ = m.experts[e].up(h).chunk(2, -1)
        with torch.enable_grad():
            gate = m.experts[e].gate(h)
        half = half + 1
    return m.experts[e].down(torch.cat([half, half], -1) * gate)


def rows_without(x: T, row: T) -> T:
    with torch.no_grad():
        return x[row]


def added_without(m: Mixture, x: T, _: T) -> T:
    x = m.other(x)
    ids, y = m.routed(x)[1], x.clone()
    for e in range(EXPERTS):
        row, _nth = torch.where(ids == e)
        made = m.experts[e](x[row])
        with torch.no_grad():
            y[row] += made
    return y


def of_a_mask(m: Mixture, x: T, ids: T) -> T:
    """What a mask selects, as its sum is asked for."""
    x = m.other(x)
    rows = x[ids[:, 0] == 1]
    with torch.no_grad():
        most = rows.abs()
    return x * (rows / (most + 1)).mul(2).sum()


GRADIENTS: dict[str, Then] = {
    "a norm without": loop(normed),
    "a branch without": loop(beside_what_is_frozen),
    "the same parameters with and without": loop(of_the_same_parameters),
    "a part that was read without": loop(by_a_part_without),
    "one expert without": loop(some_without),
    "with them again": loop(with_them_again),
    "rows that were read without": loop(lambda m, e, h: m.experts[e](h), rows_without),
    "rows that are added without": added_without,
    "what a mask selects": of_a_mask,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_wanted_as_at_the_call(name: str) -> None:
    assert_equals_eager(mixture(GRADIENTS[name]), batch())


def changed_in_place(m: Mixture, e: int, h: T) -> T:
    h = m.experts[e](h)
    with torch.no_grad():
        h *= 2
    return h


def to_what_was_read_without(m: Mixture, x: T, _: T) -> T:
    ids, y = m.routed(x)[1], m.other(x).clone()
    for e in range(EXPERTS):
        row, _nth = torch.where(ids == e)
        with torch.no_grad():
            before = y[row]
        y[row] = before + m.experts[e](x[row])
    return y


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (loop(changed_in_place), "__imul__ without gradients of rows that have some"),
        (to_what_was_read_without, "a use of the rows that are sent to one expert"),
    ],
    ids=["changed in place", "added to what was read without"],
)
def test_gradients_that_no_graph_has_are_refused(then: Then, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(mixture(then), batch())


# -- functions with a backward of their own --------------------------------------------------------------------------


STRAIGHT = Straight.apply  # before anything is captured


def reentrant(x: T) -> T:
    return checkpoint(torch.sin, x, use_reentrant=True)


def by_need(x: T) -> T:
    return x.sin() if x.requires_grad else x.cos()


@pytest.mark.parametrize("is_view", [False, True], ids=["itself", "a view"])
@pytest.mark.parametrize("index_add", [False, True], ids=["+=", "index_add_"])
@pytest.mark.parametrize(
    "straight",
    [lambda x: Straight.apply(x), STRAIGHT, reentrant, by_need],
    ids=["apply", "an apply of before", "a checkpoint", "whether it needs gradients"],
)
def test_a_function_of_what_rows_are_added_to_gives_experts_gradients(
    straight: Callable[[T], T], index_add: bool, is_view: bool
) -> None:
    def then(m: Mixture, x: T, _: T) -> T:
        x = m.other(x)
        weight, ids = m.routed(x)
        y = torch.zeros_like(x)
        half = y[:, ::2]
        for e, expert in enumerate(m.experts):
            row, nth = torch.where(ids == e)
            if index_add:
                y.index_add_(0, row, weight[row, nth, None] * expert(x[row]))
            else:
                y[row] += weight[row, nth, None] * expert(x[row])
        return x + (straight(half).repeat(1, 2) if is_view else straight(y))

    graph = assert_equals_eager(mixture(then), batch())
    assert {"router.weight", "experts.0.up.weight"} <= graph.gradients.keys()


def test_a_function_of_rows_is_refused_whenever_its_apply_was_read() -> None:
    with pytest.raises(CaptureError, match="Straight, a function with a backward of its own"):
        capture(mixture(loop(lambda m, e, h: STRAIGHT(h))), batch())


# -- autocast --------------------------------------------------------------------------------------------------------


def low(made: Made) -> tuple[Mixture, tuple[T, T, T]]:
    """Under autocast, with rows in bfloat16 that are added to as many."""

    def then(m: Mixture, x: T, _: T) -> T:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            weight, ids = m.routed(x)
            y = torch.zeros(x.shape, dtype=torch.bfloat16)
            for e in range(EXPERTS):
                row, nth = torch.where(ids == e)
                rows = made(m, e, x[row])
                assert rows.dtype == torch.bfloat16
                y.index_add_(0, row, rows * weight[row, nth, None].to(rows.dtype))
        return y.float()

    torch.manual_seed(0)
    x, labels, ids = batch()
    return Mixture(then), (x.float(), labels, ids)


def in_place(m: Mixture, e: int, h: T) -> T:
    h = m.experts[e].up(h)
    h *= 2
    return m.experts[e].down(h.relu_())


LOW: dict[str, Made] = {
    "with a bias": lambda m, e, h: m.experts[e](h),
    "one matrix": lambda m, e, h: h @ m.first[e] @ m.second[e],
    "times a number": lambda m, e, h: m.experts[e](h) * m.each[e],
    "a layer norm": lambda m, e, h: m.experts[e].norm(m.experts[e](h)),
    "a norm of squares": lambda m, e, h: m.experts[e].rms(m.experts[e](h)),
    "in place": in_place,
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", LOW)
def test_under_autocast_dtypes_are_those_of_eager_pytorch(name: str) -> None:
    model, inputs = low(LOW[name])
    graph = assert_equals_eager(model, inputs, tolerance=1e-2)
    products = [node for node in graph.nodes if node.op == "hap.expert_mm.default"]
    assert products and all(node.meta.dtype == torch.bfloat16 for node in products)


def test_what_an_expert_makes_without_autocast_is_in_full() -> None:
    def made(m: Mixture, e: int, h: T) -> T:
        expert = m.experts[e]
        assert isinstance(expert, Expert)
        with torch.autocast("cpu", enabled=False):
            up = expert.up(h.float())
        assert up.dtype == torch.float32
        return expert.down(up.tanh())

    graph = assert_equals_eager(*low(made), tolerance=1e-2)
    products = [n for n in graph.nodes if n.op == "hap.expert_mm.default" and n.phase == "forward"]
    dtypes = {n.meta.shape[1]: n.meta.dtype for n in products}
    assert dtypes == {INNER: torch.float32, WIDTH: torch.bfloat16}
