"""From the whole step to one host's: what is dealt out, summed and made local, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hap.capture import capture
from hap.errors import PlanError
from hap.graph import Graph, Value
from hap.hosts_sum import HOSTS_SUM
from hap.placement import PARTIAL, REPLICATE, LocalStart, Shard
from hap.plan import Strategy
from hap.rules.choices import Choices, choices
from hap.rules.host_graph import batch_group, deal_batch, host_graph, summed
from hap.rules.localize import localize
from tests.rules.graphs import GraphBuilder, linear, meta
from tests.zoo.hosts import hosts_error
from tests.zoo.lockstep import TOLERANCE, case_of, drawn, labels

R, P = REPLICATE, PARTIAL


def parts(graph: Graph, sizes: tuple[int, ...], ranks: int = 1) -> list[Graph]:
    """The graphs of all hosts, dealt out as ``deal_batch`` says."""
    found = choices(graph)
    strategies, name = deal_batch(found), batch_group(found).name
    return [host_graph(graph, strategies, {name: sizes}, host, ranks) for host in range(len(sizes))]


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


# ------------------------------------------------------------------------------------------------ dealing out


def squares() -> Graph:
    """x (8, 4) @ w (4, 6) as y (48,), squared and summed by half; the gradient of w is x^T (4, 8) @ y (8, 6)."""
    b = GraphBuilder()
    x, w = b.source("input", "x", 8, 4), b.source("parameter", "w", 4, 6)
    tangent = b.source("tangent", "tangent")
    product = b.call("product", "aten.mm.default", x, w, out=meta(8, 6))
    y = b.call("y", "aten.view.default", product, (48,), out=meta(48))
    dy = b.call("dy", "aten.mul.Tensor", y, tangent, out=meta(48))
    back = b.call("back", "aten.view.default", dy, (8, 6), out=meta(8, 6))
    xt = b.call("xt", "aten.t.default", x, out=meta(4, 8))
    dw = b.call("dw", "aten.mm.default", xt, back, out=meta(4, 6))
    return b.finish(y, {"w": dw})


def test_parameters_are_whole_and_the_batch_is_dealt_out() -> None:
    found = choices(squares())
    group = batch_group(found).name
    rows, columns = Shard(0, 1, 8, 1, group), Shard(1, 1, 8, 1, group)
    sixes = Shard(0, 1, 8, 6, group)
    assert deal_batch(found) == {
        "x": Strategy((), (rows,)),
        "w": Strategy((), (R,)),
        "tangent": Strategy((), (R,)),
        "product": Strategy((rows, R), (rows,)),
        "y": Strategy((rows,), (sixes,)),
        "dy": Strategy((sixes, R), (sixes,)),
        "back": Strategy((sixes,), (rows,)),
        "xt": Strategy((rows,), (columns,)),
        "dw": Strategy((columns, rows), (P,)),
        "loss": Strategy((sixes,), (P,)),
    }


def reduced_gradient(op: str) -> Graph:
    """x^T (4, 8) @ y (8, 6) is (4, 6), then summed to (6,) or passed through ``op``; that is the gradient of w."""
    b = GraphBuilder()
    x, y = b.source("input", "x", 8, 4), b.source("input", "y", 8, 6)
    b.source("parameter", "w", *((6,) if op == "aten.sum.dim_IntList" else (4, 6)))
    xt = b.call("xt", "aten.t.default", x, out=meta(4, 8))
    product = b.call("product", "aten.mm.default", xt, y, out=meta(4, 6))
    if op == "aten.sum.dim_IntList":
        gradient = b.call("gradient", op, product, (0,), out=meta(6))
    else:
        gradient = b.call("gradient", op, product, out=meta(4, 6))
    return b.finish(y, {"w": gradient})


def test_a_sum_waits_until_there_is_less_to_sum() -> None:
    graph = parts(reduced_gradient("aten.sum.dim_IntList"), (5, 3))[0]
    assert [(n.args[0], n.meta.shape) for n in summed(graph)] == [(Value("gradient"), (6,)), (Value("loss"), ())]


def test_what_is_not_linear_is_summed_before_and_then_host_0_s_counts() -> None:
    for host, graph in enumerate(parts(reduced_gradient("aten.relu.default"), (5, 3))):
        assert [n.args[0] for n in summed(graph)] == [Value("product"), Value("loss"), Value("gradient_of_host_0")]
        assert graph.by_name["gradient"].args == (Value("product_over_hosts"),)
        assert graph.by_name["gradient_of_host_0"].args == (Value("gradient"), 1.0 - host)
        assert graph.gradients == {"w": Value("gradient_of_host_0_over_hosts")}


def test_what_two_calls_need_whole_is_summed_once() -> None:
    b = GraphBuilder()
    x, y = b.source("input", "x", 8, 4), b.source("input", "y", 8, 6)
    xt = b.call("xt", "aten.t.default", x, out=meta(4, 8))
    product = b.call("product", "aten.mm.default", xt, y, out=meta(4, 6))
    first = b.call("first", "aten.relu.default", product, out=meta(4, 6))
    second = b.call("second", "aten.exp.default", product, out=meta(4, 6))
    both = b.call("both", "aten.mul.Tensor", first, second, out=meta(4, 6))
    graph = parts(b.finish(both), (5, 3))[1]
    assert [n.args[0] for n in summed(graph)] == [Value("product")]  # of it alone: the loss is then whole everywhere
    assert graph.by_name["first"].args == graph.by_name["second"].args == (Value("product_over_hosts"),)


class Flipped(nn.Module):
    """Every sample is multiplied by the one at the other end of the batch."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.wide = nn.Linear(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x).sum(1) * x.flip(0).sum(1)


def test_what_mixes_samples_and_is_small_is_whole_in_every_host() -> None:
    graph = capture(Flipped().double(), drawn(8, 4), loss_fn=torch.sum)
    for part in parts(graph, (5, 2, 1)):
        assert {n.meta.shape for n in part.nodes if n.op == "aten.flip.default"} == {(8, 4)}


def test_what_follows_from_the_batch_is_dealt_out_again() -> None:
    graph = capture(Flipped().double(), drawn(8, 4), loss_fn=torch.sum)
    for rows, part in zip((5, 2, 1), parts(graph, (5, 2, 1)), strict=True):
        (product,) = (n for n in part.nodes if n.op == "aten.mm.default" and n.phase == "forward")
        assert product.meta.shape == (rows, 4)


class Mixed(nn.Module):
    """What is made of the batch, and larger, is mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).flip(0).square() @ torch.ones(64, dtype=x.dtype)


class Nest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mixed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_what_mixes_samples_and_is_large_is_refused_in_a_line() -> None:
    found = choices(capture(Nest().double(), drawn(8, 4), loss_fn=torch.sum))
    with pytest.raises(PlanError) as refusal:
        deal_batch(found)
    assert str(refusal.value) == (
        "aten.flip.default in module 'body' mixes the samples of a batch, so hosts cannot each run a part of it; "
        "plan on one axis"
    )


def test_without_a_batch_there_is_nothing_to_deal_out() -> None:
    found = choices(capture(nn.Linear(4, 2), torch.zeros(1, 4), loss_fn=torch.sum, name="lonely"))
    for ask in (batch_group, deal_batch):
        with pytest.raises(PlanError, match=r"^lonely: no input has a batch of two or more, so there is nothing to"):
            ask(found)


# ------------------------------------------------------------------------------------------------ one host's graph


@pytest.mark.parametrize("host", range(3))
def test_one_host_by_hand(host: int) -> None:
    rows = (5, 2, 1)[host]
    graph = parts(squares(), (5, 2, 1), ranks=4)[host]
    shapes = {n.name: n.meta.shape for n in graph.nodes}
    assert shapes == {
        "x": (rows, 4),
        "w": (4, 6),
        "tangent": (),
        "product": (rows, 6),
        "y": (6 * rows,),
        "dy": (6 * rows,),
        "back": (rows, 6),
        "xt": (4, rows),
        "dw": (4, 6),
        "dw_over_hosts": (4, 6),
        "loss": (),
        "loss_over_hosts": (),
    }
    assert graph.by_name["y"].args == (Value("product"), (6 * rows,))
    assert graph.by_name["back"].args == (Value("dy"), (rows, 6))
    assert [n.args for n in summed(graph)] == [(Value("dw"), 0, 3, 4), (Value("loss"), 1, 3, 4)]  # site, hosts, ranks
    assert graph.loss == Value("loss_over_hosts") and graph.gradients == {"w": Value("dw_over_hosts")}


def shifted_rows() -> Graph:
    """x (8, 10, 4) as rows (80, 4), each with its own row of a buffer (80, 4) added."""
    b = GraphBuilder()
    x, c = b.source("input", "x", 8, 10, 4), b.source("buffer", "c", 80, 4)
    rows = b.call("rows", "aten.view.default", x, (80, 4), out=meta(80, 4))
    return b.finish(b.call("y", "aten.add.Tensor", rows, c, out=meta(80, 4)))


def test_what_is_whole_is_cut_where_a_part_is_read_in_atoms() -> None:
    bounds = []
    for part in parts(shifted_rows(), (5, 2, 1)):
        cut = part.by_name["c_here"]
        assert cut.op == "aten.slice.Tensor" and part.by_name["y"].args == (Value("rows"), Value("c_here"))
        value, dim, start, end = cut.args
        assert (value, dim) == (Value("c"), 0) and cut.meta.shape == (end - start, 4)
        assert part.by_name["rows"].args[1] == (end - start, 4)
        bounds.append((start, end))
    assert bounds == [(0, 50), (50, 70), (70, 80)]


def test_a_host_without_a_sample_has_empty_parts() -> None:
    graph = parts(squares(), (8, 0))[1]
    assert graph.by_name["product"].meta.shape == (0, 6) and graph.by_name["dw_over_hosts"].meta.shape == (4, 6)


def test_sites_are_numbered_in_program_order() -> None:
    graph = parts(linear(), (5, 3))[0]
    swapped = [
        replace(n, args=(n.args[0], 1 - n.args[1], *n.args[2:])) if n.op == HOSTS_SUM else n for n in graph.nodes
    ]
    with pytest.raises(AssertionError, match="program order"):
        summed(replace(graph, nodes=tuple(swapped)))


def test_nothing_else_is_added_or_lost() -> None:
    for part in parts(squares(), (5, 3)):
        assert [op for op in ops(part) if op != HOSTS_SUM] == ops(squares())


def test_a_host_s_piece_of_a_dropout_is_told_where_it_begins_and_a_rank_s_piece_of_that_where_that_begins() -> None:
    graph = capture(
        nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3)), torch.zeros(8, 4), loss_fn=lambda y: y.square().sum()
    )
    for start, part in zip((0, 5, 7), parts(graph, (5, 2, 1)), strict=True):
        nodes = [n for n in part.nodes if n.op == "hap.dropout.default"]
        assert [n.phase for n in nodes] == ["forward", "backward"]
        for node in nodes:
            assert node.args[4] == (0, 1, 8, 1, start)
            columns = Shard(1, 1, 6, 1, "inside")
            args, _ = localize(node, Strategy((columns, R), (columns,)), part)
            assert args[4] == (0, 1, 8, 1, start, 1, 1, 6, 1, LocalStart("inside", 1))
            if node.meta.shape[0] > 1:
                again = Shard(0, 1, node.meta.shape[0], 1, "inside")
                args, _ = localize(node, Strategy((again, R), (again,)), part)
                assert args[4] == (0, 1, 8, 1, start, 0, 1, node.meta.shape[0], 1, LocalStart("inside", 1))


# ------------------------------------------------------------------------------------------------ refusals


def refused(graph: Graph, changes: dict[str, Strategy]) -> str:
    found = choices(graph)
    strategies = {**deal_batch(found), **changes}
    with pytest.raises(PlanError) as refusal:
        host_graph(graph, strategies, {batch_group(found).name: (5, 3)}, 0, 1)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def rows_of(found: Choices, dim: int = 0) -> Shard:
    return Shard(dim, 1, 8, 1, batch_group(found).name)


def square_of_sum() -> Graph:
    """The square of a sum of products, (8, 8), either of whose dims may be the batch's."""
    b = GraphBuilder()
    x = b.source("input", "x", 8, 8)
    xt = b.call("xt", "aten.t.default", x, out=meta(8, 8))
    product = b.call("product", "aten.mm.default", xt, x, out=meta(8, 8))
    return b.finish(b.call("square", "aten.pow.Tensor_Scalar", product, 2, out=meta(8, 8), module="head"))


def test_what_hosts_have_parts_of_is_made_whole_by_a_sum_with_zeros() -> None:
    graph = square_of_sum()
    found = choices(graph)
    strategies = {**deal_batch(found), "xt": Strategy((R,), (R,))}
    for host, (start, stop) in enumerate(((0, 5), (5, 8))):
        part = host_graph(graph, strategies, {batch_group(found).name: (5, 3)}, host, 1)
        spread, whole = part.by_name["x_among_zeros"], part.by_name["x_over_hosts"]
        assert spread.op == "aten.slice_backward.default" and spread.args == (Value("x"), (8, 8), 0, start, stop, 1)
        assert whole.op == HOSTS_SUM and whole.inputs == (Value("x_among_zeros"),) and whole.meta.shape == (8, 8)
        assert part.by_name["xt"].inputs == (Value("x_over_hosts"),)


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("all_to_all", lambda rows, columns: {"xt": Strategy((columns,), (rows,))}),
        (
            "reduce_scatter",
            lambda rows, columns: {"square": Strategy((rows,), (rows,)), "loss": Strategy((rows,), (P,))},
        ),
    ],
)
def test_what_cannot_be_made_of_sums_and_slices_is_refused(what: str, changes: Any) -> None:
    graph = square_of_sum()
    found = choices(graph)
    words = refused(graph, changes(rows_of(found), rows_of(found, 1)))
    assert f"would need {what} between hosts, from " in words
    assert words.endswith("; only sums and slices are made there: plan on one axis")


@pytest.mark.parametrize(
    ("node", "strategy", "words"),
    [
        ("y", lambda rows, columns: Strategy((rows, R), (P,)), r"y \(aten\.mm\.default\): no sharding rule allows"),
        (
            "dy",
            lambda rows, columns: Strategy((R,), (columns,)),
            r"dy \(aten\.expand\.default\): no sharding rule allows",
        ),
        ("x", lambda rows, columns: Strategy((), (columns,)), r"args\.x \(input\) cannot be stored as S\(1:"),
        ("x", lambda rows, columns: Strategy((), (P,)), r"args\.x \(input\) cannot be stored as P"),
        ("w", lambda rows, columns: Strategy((), (P,)), r"w \(parameter\) cannot be stored as P"),
    ],
)
def test_a_strategy_that_is_no_row_is_refused(node: str, strategy: Any, words: str) -> None:
    found = choices(linear())
    changed = {**deal_batch(found), node: strategy(rows_of(found), rows_of(found, 1))}
    with pytest.raises(PlanError, match=words):
        host_graph(found.graph, changed, {batch_group(found).name: (5, 3)}, 0, 1)


@pytest.mark.parametrize(
    ("node", "strategy"),
    [
        ("xt", Strategy((), (R,))),
        ("xt", Strategy((R, R), (R,))),
        ("xt", Strategy((R,), ())),
        ("w", Strategy((R,), (R,))),
        ("dy", Strategy((P,), (P,))),
        ("y", Strategy((R, R), (None,))),
    ],
    ids=["no argument", "two arguments", "no output", "a source's argument", "R to P", "no placement"],
)
def test_a_strategy_of_another_form_is_refused(node: str, strategy: Strategy) -> None:
    """As ``lower`` refuses a plan of one axis: such a file passes ``verify_mesh_plan``."""
    found = choices(linear())
    with pytest.raises(PlanError):
        host_graph(found.graph, {**deal_batch(found), node: strategy}, {batch_group(found).name: (5, 3)}, 0, 1)


# ------------------------------------------------------------------------------------------------ what it means


class Everything(nn.Module):
    """A norm over the batch, dropout, attention over a dealt batch with a buffer cut by rows, and a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.query, self.last = nn.Linear(8, 4), nn.Linear(8, 5)
        self.register_buffer("shift", drawn(9, 8, seed=3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.first(x)).relu()) + self.shift
        return self.last(hidden) + self.query(hidden).softmax(1).sum(1, keepdim=True)


class Beside(nn.Module):
    """Every sample is multiplied by another's second input."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.wide(x) * y.flip(0)


CASES = {
    "everything": lambda: case_of(Everything(), drawn(9, 6), functional.mse_loss, drawn(9, 5, seed=1)),
    "mixed in the second input": lambda: case_of(
        Beside(), (drawn(9, 4), drawn(9, 4, seed=1)), lambda y: y.square().mean(), None
    ),
    "ignored targets": lambda: case_of(nn.Linear(6, 5), drawn(9, 6), nn.CrossEntropyLoss(ignore_index=2), labels(5, 9)),
    "a product of sums": lambda: case_of(
        nn.Linear(4, 4), drawn(9, 4), lambda y: (y.T @ y).relu().sum() + (y.T @ y).exp().mean(), None
    ),
}


@pytest.mark.parametrize("ratios", [(1,), (1, 1), (3, 1, 2), (1, 5), (1,) * 9], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_hosts_together_are_one_device(name: str, ratios: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    error, where = hosts_error(CASES[name](), ratios)
    assert error <= TOLERANCE, where


class Twice(nn.Module):
    """One buffer is read by rows, and by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(8, 8))
        self.register_buffer("both", drawn(8, 8, seed=1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x @ self.weight) * self.both).sum() + ((y @ self.weight).t() * self.both).sum()


def test_what_is_cut_in_two_ways_has_two_parts() -> None:
    case = case_of(Twice(), (drawn(8, 8, seed=2), drawn(8, 8, seed=3)), lambda loss: loss, None)
    error, where = hosts_error(case, (3, 1, 2))
    assert error <= TOLERANCE, where
