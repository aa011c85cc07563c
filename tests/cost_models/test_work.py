"""What an operator does: FLOPs and bytes against formulas worked out by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hap.cost_models.work import node_work, op_class
from tests.cost_models.build import V, loose, node, source


def work_of(graph_nodes, name: str):  # type: ignore[no-untyped-def]
    graph = loose(*graph_nodes)
    return node_work(graph, graph.by_name[name])


def test_mm() -> None:
    w = work_of([source("a", (8, 4)), source("b", (4, 6)), node("c", "aten.mm.default", [V("a"), V("b")], (8, 6))], "c")
    assert (w.op_class, w.flops) == ("matmul", 2 * 8 * 4 * 6)
    assert w.read == (8 * 4 * 4, 4 * 6 * 4) and w.written == (8 * 6 * 4,)
    assert (w.bytes_read, w.bytes_written) == (224, 192)


def test_bmm_in_bfloat16() -> None:
    a, b = source("a", (3, 8, 4), dtype=torch.bfloat16), source("b", (3, 4, 6), dtype=torch.bfloat16)
    w = work_of([a, b, node("c", "aten.bmm.default", [V("a"), V("b")], (3, 8, 6), dtype=torch.bfloat16)], "c")
    assert w.flops == 3 * 2 * 8 * 4 * 6 and w.bytes_written == 3 * 8 * 6 * 2 and w.dtype == torch.bfloat16


def test_products_with_experts_move_rows_thrice() -> None:
    """12 rows of 6 by five matrices of 6 x 8: they are sorted by expert, and put back."""
    x, grad, ids = source("x", (12, 6)), source("g", (12, 8)), source("i", (12,), dtype=torch.int64)
    weight = source("w", (5, 6, 8))
    y = node("y", "hap.expert_mm.default", [V("x"), V("w"), V("i"), None], (12, 8))
    w = work_of([x, weight, ids, y], "y")
    assert (w.op_class, w.flops) == ("matmul", 2 * 12 * 6 * 8)
    assert w.read == (3 * 12 * 6 * 4, 5 * 6 * 8 * 4, 12 * 8) and w.written == (3 * 12 * 8 * 4,)
    dw = node("d", "hap.expert_mm_weight.default", [V("x"), V("g"), V("i"), 5, None], (5, 6, 8))
    w = work_of([x, grad, ids, dw], "d")
    assert (w.op_class, w.flops) == ("matmul", 2 * 12 * 6 * 8)
    assert w.read == (3 * 12 * 6 * 4, 3 * 12 * 8 * 4, 12 * 8) and w.written == (5 * 6 * 8 * 4,)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_forward_and_backward(causal: bool) -> None:
    b, h, s, d = 2, 3, 16, 8
    qkv = [source(n, (b, h, s, d)) for n in "qkv"]
    args = [V("q"), V("k"), V("v")]
    forward = node("f", "hap.attention.default", [*args, None, causal, 0.5], (b, h, s, d), (b, h, s))
    backward = node(
        "g",
        "hap.attention_backward.default",
        [V("f"), *args, None, V("f"), V("f", 1), causal, 0.5],
        *[(b, h, s, d)] * 3,
    )
    once = 4 * b * h * s * s * d * (0.5 if causal else 1)
    assert work_of([*qkv, forward], "f").flops == once
    assert work_of([*qkv, forward, backward], "g").flops == 2.5 * once
    assert work_of([*qkv, forward, backward], "g").op_class == "attention"


def test_attention_counts_values_of_another_width_and_the_mask_does_not_shift_them() -> None:
    q, k, v = source("q", (1, 2, 6, 4)), source("k", (1, 2, 10, 4)), source("v", (1, 2, 10, 3))
    mask = source("m", (1, 1, 6, 10))
    args = [V("q"), V("k"), V("v"), V("m"), False, 1.0]
    f = node("f", "hap.attention.default", args, (1, 2, 6, 3), (1, 2, 6))
    assert work_of([q, k, v, mask, f], "f").flops == 2 * 2 * 6 * 10 * (4 + 3)


def test_convolution_agrees_with_torchs_counter() -> None:
    x, w = torch.zeros(2, 4, 9, 9), torch.zeros(6, 2, 3, 3)
    with FlopCounterMode(display=False) as counter:
        y = torch.nn.functional.conv2d(x, w, stride=2, padding=1, groups=2)
    literals = [(2, 2), (1, 1), (1, 1), False, (0, 0), 2]
    nodes = [source("x", (2, 4, 9, 9)), source("w", (6, 2, 3, 3))]
    forward = node("y", "aten.convolution.default", [V("x"), V("w"), None, *literals], tuple(y.shape))
    args = [V("y"), V("x"), V("w"), None, *literals, (True, True, False)]
    backward = node("g", "aten.convolution_backward.default", args, (2, 4, 9, 9), (6, 2, 3, 3), None)
    no_input = node("g", "aten.convolution_backward.default", args, None, (6, 2, 3, 3), None)
    assert work_of([*nodes, forward], "y").flops == counter.get_total_flops()
    assert work_of([*nodes, forward, backward], "g").flops == 2 * counter.get_total_flops()
    assert work_of([*nodes, forward, no_input], "g").flops == counter.get_total_flops()


def test_elementwise_and_reduction_count_elements() -> None:
    x = source("x", (8, 4))
    assert work_of([x, node("y", "aten.add.Tensor", [V("x"), 1.0], (8, 4))], "y").flops == 32
    assert work_of([x, node("y", "aten.exp.default", [V("x")], (8, 4))], "y").flops == 320
    total = work_of([x, node("y", "aten.sum.dim_IntList", [V("x"), (0,)], (4,))], "y")
    assert (total.op_class, total.flops, total.bytes_read, total.bytes_written) == ("reduction", 32, 128, 16)


@pytest.mark.parametrize("op", ["view", "t", "permute", "expand", "slice", "_unsafe_view", "unsqueeze", "detach"])
def test_views_do_nothing(op: str) -> None:
    w = work_of([source("x", (8, 4)), node("y", f"aten.{op}.default", [V("x")], (8, 4))], "y")
    assert (w.op_class, w.flops, w.bytes_read, w.bytes_written) == ("view", 0, 0, 0)


def test_an_expanded_tensor_is_read_at_its_own_size() -> None:
    nodes = [
        source("x", (1, 4)),
        node("e", "aten.expand.default", [V("x"), (8, 4)], (8, 4)),
        node("v", "aten.view.default", [V("e"), (32,)], (32,)),
        node("y", "aten.neg.default", [V("v")], (32,)),
    ]
    assert work_of(nodes, "y").bytes_read == 16 and work_of(nodes, "y").bytes_written == 128


def test_a_lookup_reads_its_rows_and_not_the_table() -> None:
    nodes = [
        source("w", (1000, 4), "parameter"),
        source("i", (3,), dtype=torch.int64),
        node("y", "aten.embedding.default", [V("w"), V("i")], (3, 4)),
    ]
    w = work_of(nodes, "y")
    assert w.op_class == "index" and w.read == (0, 24) and w.fetched_bytes == 48 and w.bytes_written == 48


def test_classes() -> None:
    assert op_class("aten._softmax.default") == "reduction"
    assert op_class("aten.embedding_dense_backward.default") == "index"
    assert op_class("mylib.unknown.default") == "elementwise"
