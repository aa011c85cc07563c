"""Which views of a graph must copy, by hand; the calls themselves run on real tensors as the judge."""

import pytest
import torch

from hap.conversion import find_needs
from hap.cost_models.memory import Walk, memory_use
from hap.cost_models.strides import find_strides
from hap.graph import Graph, Node, Value
from hap.placement import Shard, take_shard
from hap.plan import Strategy
from tests.cost_models.build import P, R, V, loose, node, source


def fused() -> tuple[Node, ...]:
    """(4, 6) float32 in three pieces (4, 2), flat: 96 bytes of which 32 stay."""
    return (
        source("x", (4, 6)),
        node("y", "aten.relu.default", [V("x")], (4, 6)),
        node("s", "aten.split_with_sizes.default", [V("y"), (2, 2, 2), 1], (4, 2), (4, 2), (4, 2)),
        node("flat", "aten.view.default", [V("s", 1), (8,)], (8,)),
        node("heads", "aten.view.default", [V("s"), (4, 2, 1)], (4, 2, 1)),
    )


def test_a_piece_of_a_row_is_flat_only_as_a_copy() -> None:
    found = find_strides(loose(*fused()))
    assert found.copying == {"flat"}
    assert found.scattered == {V("s"), V("s", 1), V("s", 2), V("heads")}
    pieces = torch.zeros(4, 6).split_with_sizes([2, 2, 2], 1)
    assert not pieces[1].is_contiguous() and pieces[1].reshape(8)._base is None


def test_an_elementwise_call_keeps_the_order_of_its_argument_in_memory() -> None:
    """(2, 3) transposed and doubled lies as before: transposed back it is flat without a copy. A matmul's does not."""
    found = find_strides(
        loose(
            source("x", (2, 3)),
            node("t", "aten.t.default", [V("x")], (3, 2)),
            node("d", "aten.mul.Tensor", [V("t"), 2.0], (3, 2)),
            node("back", "aten.t.default", [V("d")], (2, 3)),
            node("flat", "aten.view.default", [V("back"), (6,)], (6,)),
            node("across", "aten.view.default", [V("d"), (6,)], (6,)),
            node("m", "aten.mm.default", [V("t"), V("x")], (3, 3)),
            node("own", "aten.view.default", [V("m"), (9,)], (9,)),
        )
    )
    assert found.copying == {"across"}
    assert found.scattered == {V("t"), V("d")}


def test_attention_writes_the_heads_of_a_position_side_by_side() -> None:
    """q, k, v (1, 2, 3, 4): its result as (1, 3, 8) is a view, its logsumexp contiguous."""
    found = find_strides(
        loose(
            source("q", (1, 2, 3, 4)),
            node("o", "hap.attention.default", [V("q"), V("q"), V("q"), None, False, 0.5], (1, 2, 3, 4), (1, 2, 3)),
            node("t", "aten.transpose.int", [V("o"), 1, 2], (1, 3, 2, 4)),
            node("joined", "aten.view.default", [V("t"), (1, 3, 8)], (1, 3, 8)),
        )
    )
    assert found.copying == frozenset() and found.scattered == {V("o")}


def test_a_pair_that_is_not_together_is_a_complex_number_only_as_a_copy() -> None:
    """PyTorch refuses to view it; the call copies. (4, 2) as it is and (2, 4) transposed."""
    of = "aten.view_as_complex.default"
    found = find_strides(
        loose(
            source("pairs", (4, 2)),
            source("x", (2, 4)),
            node("t", "aten.t.default", [V("x")], (4, 2)),
            node("viewed", of, [V("pairs")], (4,), dtype=torch.complex64),
            node("copied", of, [V("t")], (4,), dtype=torch.complex64),
        )
    )
    assert found.copying == {"copied"} and found.scattered == {V("t")}


def test_the_base_goes_when_its_only_view_has_copied() -> None:
    """y 96 with its flat copy 32, then that with three of it side by side, 96: 128 both times. Were the copy a view,
    y would be there beside the three: 192."""
    x, y, s, flat, _ = fused()
    three = node("three", "aten.cat.default", [(V("flat"), V("flat"), V("flat"))], (24,))
    loss = node("loss", "aten.sum.default", [V("three")], ())
    graph = Graph("fused", (x, y, s, flat, three, loss), Value("loss"), {})
    strategies = {n.name: Strategy((R,) * len(n.inputs), (R,) * len(n.outputs)) for n in graph.nodes}
    assert memory_use(graph, strategies, {}, (), 1, "sgd").by_kind[0]["activations"] == 96 + 32


@pytest.mark.parametrize("op", ["aten.t.default", "aten.view.default"])
def test_a_rank_s_rows_of_a_scattered_value_are_a_copy(op: str) -> None:
    """y (4, 8) is 128 bytes; of its rows as (8, 4), transposed or viewed, each of two ranks takes four, 64 bytes: a
    range of its memory, or a tensor of their own. They are read for z, another 64."""
    size = [(8, 4)] if op == "aten.view.default" else []
    x, y = source("x", (4, 8)), node("y", "aten.relu.default", [V("x")], (4, 8))
    rows = node("rows", op, [V("y"), *size], (8, 4))
    z = node("z", "aten.relu.default", [V("rows")], (8, 4))
    loss = node("loss", "aten.sum.default", [V("z")], ())
    graph = Graph("sliced", (x, y, rows, z, loss), Value("loss"), {})
    dealt = Shard(0, 1, 8, 1, "rows")
    strategies = {"x": Strategy((), (R,)), "y": Strategy((R,), (R,)), "rows": Strategy((R,), (R,))}
    strategies |= {"z": Strategy((dealt,), (dealt,)), "loss": Strategy((dealt,), (P,))}
    whole = torch.zeros(4, 8)
    piece = take_shard(whole.t() if op == "aten.t.default" else whole.view(8, 4), dealt, (4, 4), 0)
    is_copy = piece.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    assert is_copy == (op == "aten.t.default")
    walk = Walk(graph, strategies, find_needs(graph, strategies))
    held = walk.held({"rows": (4, 4)}, 2, "sgd")["activations"]
    assert held.max() == 128 + 64 and held[walk.moments["z"], 0] == (64 if is_copy else 128) + 64
