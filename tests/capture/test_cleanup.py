"""Each cleanup pass on a graph small enough to read: calls in, calls out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hap.capture import capture, interpret, source_values
from hap.capture.attention import canonical_attention, causal_masks
from hap.capture.cleanup import (
    Pass,
    cancel_transposes,
    clean,
    compose_views,
    drop_empty_pieces,
    drop_identities,
    drop_unused,
    merge_equal,
    rename_nodes,
    spell_constants,
    spell_views,
)
from hap.graph import Graph, Node, TensorMeta, Value, verify_graph

F32, I64 = torch.float32, torch.int64
LAST = 9223372036854775807  # what torch writes for "to the end"


def meta(*shape: int, dtype: torch.dtype = F32) -> TensorMeta:
    return TensorMeta(shape, dtype)


def v(name: str, index: int = 0) -> Value:
    return Value(name, index)


class Build:
    """A graph from a few lines: ``call("y", "aten.t.default", (v("x"),), meta(3, 2))``; the last call is kept alive."""

    def __init__(self, **inputs: TensorMeta) -> None:
        self.nodes = [Node(name, "input", outputs=(m,), target=f"args.{name}") for name, m in inputs.items()]

    def call(self, name: str, op: str, args: tuple[Any, ...], *outputs: TensorMeta, **kwargs: Any) -> Build:
        self.nodes.append(Node(name, op, args, tuple(kwargs.items()), outputs))
        return self

    def after(self, one_pass: Pass) -> tuple[Graph, dict[str, tuple[Any, ...]]]:
        """The graph after the pass, and op and args of each call by name. The last call is summed to be the loss."""
        loss = Node("loss", "aten.sum.default", (v(self.nodes[-1].name),), outputs=(meta(),))
        graph = one_pass(Graph("built", (*self.nodes, loss), v("loss"), {}))
        verify_graph(graph)
        return graph, {n.name: (n.op, *n.args) for n in graph.nodes if not n.is_source}


@pytest.mark.parametrize("op", ["aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"])
def test_views_have_one_name_and_real_sizes(op: str) -> None:
    _, calls = Build(x=meta(2, 6)).call("y", op, (v("x"), (-1, 3)), meta(4, 3)).after(spell_views)
    assert calls["y"] == ("aten.view.default", v("x"), (4, 3))


CONSTANTS = [
    ("aten.new_zeros.default", ((2, 3),), {}, meta(2, 3), 0),
    ("aten.new_zeros.default", ((2, 3),), {"dtype": I64}, meta(2, 3, dtype=I64), 0),
    ("aten.new_ones.default", ((4,),), {"dtype": torch.bool, "pin_memory": False}, meta(4, dtype=torch.bool), 1),
    ("aten.new_ones.default", ((),), {}, meta(), 1),
    ("aten.new_ones.default", ((0, 5),), {"dtype": torch.bfloat16}, meta(0, 5, dtype=torch.bfloat16), 1),
    ("aten.new_full.default", ((3,), -1.5), {"dtype": torch.float64}, meta(3, dtype=torch.float64), -1.5),
    ("aten.new_full.default", ((3,),), {"fill_value": 7}, meta(3), 7),
    ("aten.new_full.default", ((3,), 2.75), {"dtype": I64}, meta(3, dtype=I64), 2.75),
    ("aten.new_full.default", ((3,), 0), {"dtype": torch.bool}, meta(3, dtype=torch.bool), 0),
    ("aten.new_full.default", ((2,), -math.inf), {}, meta(2), -math.inf),
    ("aten.new_full.default", ((2,), True), {}, meta(2), True),
]


@pytest.mark.parametrize(("op", "rest", "options", "output", "value"), CONSTANTS)
def test_new_constants_are_full_of_the_same(
    op: str, rest: tuple[Any, ...], options: dict[str, Any], output: TensorMeta, value: float
) -> None:
    """And read nothing: their argument, which only says a dtype and a device, is free to lie as it likes."""
    build = Build(x=meta(2, 6)).call("y", op, (v("x"), *rest), output, **options)
    graph, calls = build.after(spell_constants)
    assert calls["y"] == ("aten.full.default", output.shape, value) and type(calls["y"][2]) is type(value)
    made = graph.by_name["y"]
    assert made.kwargs == (("dtype", output.dtype),) and made.outputs == (output,) and made.inputs == ()
    env = {v("x"): torch.ones(2, 6)}
    before, _ = build.after(lambda graph: graph)
    expected, found = (interpret(g, env)[v("y")] for g in (before, graph))
    assert found.dtype == expected.dtype == output.dtype and found.shape == expected.shape == output.shape
    assert torch.equal(found, expected)


def test_a_captured_step_has_no_new_constants_and_means_the_same() -> None:
    class Filled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            row = x.new_full((6,), 1.5) + x.new_ones((6,)) - x.new_zeros((3, 6), dtype=torch.float32)
            return (x * row[0]).sum()

    x = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(2, 6)
    model = Filled(6, 6).double()
    graph = capture(model, x)
    assert not [n for n in graph.nodes if ".new_" in n.op]
    assert [n.inputs for n in graph.nodes if n.op == "aten.full.default"] == [()] * 3
    values = interpret(graph, source_values(graph, model, x))
    torch.testing.assert_close(values[graph.loss], model(x).detach(), rtol=1e-15, atol=0)


def test_expand_has_real_sizes() -> None:
    _, calls = Build(x=meta(1, 6)).call("y", "aten.expand.default", (v("x"), (4, -1)), meta(4, 6)).after(spell_views)
    assert calls["y"] == ("aten.expand.default", v("x"), (4, 6))


@pytest.mark.parametrize(
    ("args", "size", "expected"),
    [
        ((1, 2, LAST), 4, (1, 2, 6, 1)),
        ((-1, -2), 2, (1, 4, 6, 1)),
        ((1, 0, 100, 2), 3, (1, 0, 6, 2)),
        ((0,), 6, (0, 0, 2, 1)),
    ],
)
def test_slices_have_bounds_inside_the_dim(args: tuple[int, ...], size: int, expected: tuple[int, ...]) -> None:
    shape = (size, 6) if args[0] == 0 else (2, size)
    _, calls = Build(x=meta(2, 6)).call("y", "aten.slice.Tensor", (v("x"), *args), meta(*shape)).after(spell_views)
    assert calls["y"] == ("aten.slice.Tensor", v("x"), *expected)


@pytest.mark.parametrize(
    ("op", "rest"),
    [
        ("aten.alias.default", ()),
        ("aten.clone.default", ()),
        ("aten.detach.default", ()),
        ("aten.lift_fresh_copy.default", ()),
        ("aten._to_copy.default", ()),
        ("aten.expand.default", ((2, 6),)),
        ("aten.view.default", ((2, 6),)),
        ("aten.slice.Tensor", (0, 0, 2, 1)),
        ("aten.mul.Tensor", (1,)),
        ("aten.div.Tensor", (1.0,)),
        ("aten.add.Tensor", (0,)),
        ("aten.sub.Tensor", (0.0,)),
    ],
)
def test_calls_that_change_nothing_go(op: str, rest: tuple[Any, ...]) -> None:
    _, calls = Build(x=meta(2, 6)).call("y", op, (v("x"), *rest), meta(2, 6)).after(drop_identities)
    assert calls == {"loss": ("aten.sum.default", v("x"))}


@pytest.mark.parametrize(
    ("op", "rest", "output"),
    [
        ("aten._to_copy.default", (), meta(2, 6, dtype=torch.bfloat16)),
        ("aten.mul.Tensor", (1.0,), meta(2, 6, dtype=torch.float64)),
        ("aten.mul.Tensor", (0,), meta(2, 6)),
        ("aten.add.Tensor", (1,), meta(2, 6)),
        ("aten.view.default", ((6, 2),), meta(6, 2)),
        ("aten.slice.Tensor", (0, 0, 1, 1), meta(1, 6)),
        ("aten.neg.default", (), meta(2, 6)),
    ],
)
def test_calls_that_change_something_stay(op: str, rest: tuple[Any, ...], output: TensorMeta) -> None:
    _, calls = Build(x=meta(2, 6)).call("y", op, (v("x"), *rest), output).after(drop_identities)
    assert calls["y"] == (op, v("x"), *rest)


def test_a_copy_into_a_like_tensor_is_its_source() -> None:
    build = Build(old=meta(2), new=meta(2), wide=meta(2, dtype=torch.float64))
    build.call("same", "aten.copy.default", (v("old"), v("new")), meta(2))
    build.call("cast", "aten.copy.default", (v("old"), v("wide")), meta(2))
    _, calls = build.call("y", "aten.add.Tensor", (v("same"), v("cast")), meta(2)).after(drop_identities)
    assert calls["y"] == ("aten.add.Tensor", v("new"), v("cast"))


def test_empty_pieces_of_a_concatenation_go() -> None:
    build = Build(nothing=meta(0), x=meta(2, 3), y=meta(2, 4))
    build.call("one", "aten.cat.default", ((v("nothing"), v("x")), -1), meta(2, 3))
    _, calls = build.call("two", "aten.cat.default", ((v("one"), v("nothing"), v("y")), 1), meta(2, 7)).after(
        drop_empty_pieces
    )
    assert calls == {"two": ("aten.cat.default", (v("x"), v("y")), 1), "loss": ("aten.sum.default", v("two"))}


def test_views_of_views_are_one_view() -> None:
    build = Build(x=meta(2, 6))
    build.call("a", "aten.view.default", (v("x"), (12,)), meta(12))
    build.call("b", "aten.view.default", (v("a"), (3, 4)), meta(3, 4))
    build.call("c", "aten.view.default", (v("b"), (2, 6)), meta(2, 6))
    _, calls = build.call("y", "aten.mm.default", (v("b"), v("c")), meta(3, 6)).after(compose_views)
    assert calls["b"] == ("aten.view.default", v("x"), (3, 4))
    assert calls["y"] == ("aten.mm.default", v("b"), v("x"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("aten.t.default",), ("aten.t.default",)),
        (("aten.transpose.int", 0, 1), ("aten.t.default",)),
        (("aten.transpose.int", -1, -2), ("aten.transpose.int", 0, 1)),
        (("aten.permute.default", (1, 0)), ("aten.transpose.int", 1, 0)),
    ],
)
def test_transposing_twice_is_nothing(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    build = Build(x=meta(2, 3)).call("a", first[0], (v("x"), *first[1:]), meta(3, 2))
    _, calls = build.call("b", second[0], (v("a"), *second[1:]), meta(2, 3)).after(cancel_transposes)
    assert calls["loss"] == ("aten.sum.default", v("x"))


def test_a_cycle_of_three_dims_is_not_its_own_inverse() -> None:
    build = Build(x=meta(2, 3, 4)).call("a", "aten.permute.default", (v("x"), (1, 2, 0)), meta(3, 4, 2))
    build.call("b", "aten.permute.default", (v("a"), (1, 2, 0)), meta(4, 2, 3))
    _, calls = build.call("c", "aten.permute.default", (v("a"), (2, 0, 1)), meta(2, 3, 4)).after(cancel_transposes)
    assert calls["b"] == ("aten.permute.default", v("a"), (1, 2, 0))
    assert calls["loss"] == ("aten.sum.default", v("x"))


def test_equal_calls_are_one_but_draws_and_look_alike_literals_are_not() -> None:
    build = Build(x=meta(2))
    for name, op, args in (
        ("a", "aten.cos.default", (v("x"),)),
        ("b", "aten.cos.default", (v("x"),)),
        ("c", "aten.bernoulli.p", (v("x"), 0.5)),
        ("d", "aten.bernoulli.p", (v("x"), 0.5)),
        ("e", "aten.mul.Tensor", (v("a"), 2)),
        ("f", "aten.mul.Tensor", (v("b"), 2.0)),
        ("g", "aten.mul.Tensor", (v("b"), 2)),
    ):
        build.call(name, op, args, meta(2))
    _, calls = build.call("y", "aten.stack.default", ((v("f"), v("g")),), meta(2, 2)).after(merge_equal)
    assert list(calls) == ["a", "c", "d", "e", "f", "y", "loss"]
    assert calls["y"] == ("aten.stack.default", (v("f"), v("e")))


def test_unused_calls_and_sources_go_but_the_interface_stays() -> None:
    build = Build(x=meta(2), unread=meta(2))
    build.nodes.append(Node("table", "buffer", outputs=(meta(2),), target="table"))
    build.call("dead", "aten.cos.default", (v("table"),), meta(2))
    graph, calls = build.call("y", "aten.sin.default", (v("x"),), meta(2)).after(drop_unused)
    assert list(calls) == ["y", "loss"]
    assert [n.name for n in graph.nodes if n.is_source] == ["x", "unread"]


def test_names_are_renumbered_and_sources_come_first() -> None:
    build = Build(x=meta(2)).call("q", "aten.sin.default", (v("x"),), meta(2))
    build.nodes.append(Node("w", "parameter", outputs=(meta(2),), target="head.weight"))
    graph, calls = build.call("z", "aten.sin.default", (v("q"),), meta(2)).after(rename_nodes)
    assert [n.name for n in graph.nodes] == ["p_head_weight", "i_args_x", "sin_1", "sin_2", "sum_1"]
    assert calls["sin_2"] == ("aten.sin.default", v("sin_1"))
    assert graph.loss == v("sum_1")


QKV = {
    "q": meta(2, 3, 5, 4),
    "k": meta(2, 3, 7, 4),
    "v": meta(2, 3, 7, 4),
    "g": meta(2, 3, 5, 4),
    "bias": meta(2, 3, 5, 7),
}
OUT, LSE, EMPTY = meta(2, 3, 5, 4), meta(2, 3, 5), meta(0)


def spellings() -> list[Any]:
    """(forward op, args, kwargs, outputs, backward op, args, kwargs, outputs, mask): the three kernels' own orders."""
    q, k, w, g, bias = (v(name) for name in QKV)
    o, lse = v("fwd"), v("fwd", 1)
    three, scale = (QKV["q"], QKV["k"], QKV["v"]), {"scale": 0.25}
    cpu = "aten._scaled_dot_product_flash_attention_for_cpu"
    flash = "aten._scaled_dot_product_flash_attention"
    efficient = "aten._scaled_dot_product_efficient_attention"
    extra = tuple(v("fwd", i) for i in range(2, 6))
    masked = {"attn_mask": bias, **scale}
    padded = meta(2, 3, 32)
    return [
        (cpu, (q, k, w, 0.0, True), masked, (OUT, LSE), (g, q, k, w, o, lse, 0.0, True), masked, three, bias),
        (flash, (q, k, w, 0.0, True), scale, (OUT, LSE, *[EMPTY] * 4),
         (g, q, k, w, o, lse, *extra, 0.0, True, *extra[:2]), scale, three, None),
        (efficient, (q, k, w, bias, True, 0.0, True), scale, (OUT, padded, EMPTY, EMPTY),
         (g, q, k, w, bias, o, lse, *extra[:2], 0.0, (True, True, True, False), True), scale, (*three, EMPTY), bias),
    ]  # fmt: skip


@pytest.mark.parametrize("spelling", spellings(), ids=["cpu", "flash", "efficient"])
def test_every_kernel_becomes_one_attention(spelling: Any) -> None:
    forward, args, kwargs, outputs, back_args, back_kwargs, back_outputs, mask = spelling
    build = Build(**QKV).call("fwd", f"{forward}.default", args, *outputs, **kwargs)
    build.call("bwd", f"{forward}_backward.default", back_args, *back_outputs, **back_kwargs)
    graph, calls = build.after(canonical_attention)
    q, k, w = v("q"), v("k"), v("v")
    assert calls["fwd"] == ("hap.attention.default", q, k, w, mask, True, 0.25)
    assert graph.by_name["fwd"].outputs == (OUT, LSE)  # without the efficient kernel's padding
    back = ("hap.attention_backward.default", v("g"), q, k, w, mask, v("fwd"), v("fwd", 1), True, 0.25)
    assert calls["bwd"] == back
    assert graph.by_name["bwd"].outputs == (QKV["q"], QKV["k"], QKV["v"])


def test_the_scale_is_resolved() -> None:
    op = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    _, calls = Build(**QKV).call("fwd", op, (v("q"), v("k"), v("v")), OUT, LSE).after(canonical_attention)
    assert calls["fwd"] == ("hap.attention.default", v("q"), v("k"), v("v"), None, False, 0.5)  # head size 4


def test_attention_with_dropout_keeps_its_kernel() -> None:
    op = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    _, calls = Build(**QKV).call("fwd", op, (v("q"), v("k"), v("v"), 0.1), OUT, LSE).after(canonical_attention)
    assert calls["fwd"] == (op, v("q"), v("k"), v("v"), 0.1)


def masked_attention(mask_value: float, comparison: str, keys: int = 5) -> Build:
    """Attention whose mask is built the way libraries do: arange, compare, expand to the batch, where."""
    build = Build(q=meta(2, 1, 5, 4), k=meta(2, 1, keys, 4))
    build.call("rows", "aten.arange.default", (5,), meta(5, dtype=I64))
    build.call("row", "aten.view.default", (v("rows"), (1, 1, 5, 1)), meta(1, 1, 5, 1, dtype=I64))
    build.call("column", "aten.arange.default", (keys,), meta(keys, dtype=I64))
    build.call("seen", comparison, (v("column"), v("row")), meta(1, 1, 5, keys, dtype=torch.bool))
    build.call("batch", "aten.expand.default", (v("seen"), (2, 1, 5, keys)), meta(2, 1, 5, keys, dtype=torch.bool))
    build.call("zero", "aten.scalar_tensor.default", (0.0,), meta())
    build.call("hide", "aten.scalar_tensor.default", (mask_value,), meta())
    build.call("mask", "aten.where.self", (v("batch"), v("zero"), v("hide")), meta(2, 1, 5, keys))
    args = (v("q"), v("k"), v("k"), v("mask"), False, 0.5)
    return build.call("fwd", "hap.attention.default", args, meta(2, 1, 5, 4), meta(2, 1, 5))


@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(F32).min])
def test_a_causal_mask_becomes_a_flag(hidden: float) -> None:
    _, calls = masked_attention(hidden, "aten.le.Tensor").after(causal_masks)
    assert calls["fwd"][-3:] == (None, True, 0.5)


def test_a_mask_that_hides_nothing_goes() -> None:
    _, calls = masked_attention(0.0, "aten.le.Tensor").after(causal_masks)
    assert calls["fwd"][-3:] == (None, False, 0.5)


def test_so_does_one_that_is_looked_up_in_a_batch_of_equal_rows() -> None:
    """As libraries find sequences packed in a row: positions of the whole batch, summed up and indexed."""
    build = masked_attention(-math.inf, "aten.le.Tensor")
    build.call("spread", "aten.expand.default", (v("rows"), (2, 5)), meta(2, 5, dtype=I64))
    build.call("breaks", "aten.ne.Scalar", (v("spread"), 9), meta(2, 5, dtype=torch.bool))
    build.call("packs", "aten.cumsum.default", (v("breaks"), 1), meta(2, 5, dtype=I64))
    build.call("samples", "aten.arange.default", (2,), meta(2, dtype=I64))
    build.call("sample", "aten.view.default", (v("samples"), (2, 1, 1, 1)), meta(2, 1, 1, 1, dtype=I64))
    build.call("found", "aten.index.Tensor", (v("packs"), (v("sample"), v("column"))), meta(2, 1, 1, 5, dtype=I64))
    build.call("some", "aten.gt.Scalar", (v("found"), 0), meta(2, 1, 1, 5, dtype=torch.bool))
    build.call("both", "aten.bitwise_and.Tensor", (v("batch"), v("some")), meta(2, 1, 5, 5, dtype=torch.bool))
    build.call("mask2", "aten.where.self", (v("both"), v("zero"), v("hide")), meta(2, 1, 5, 5))
    args = (v("q"), v("k"), v("k"), v("mask2"), False, 0.5)
    build.call("second", "hap.attention.default", args, meta(2, 1, 5, 4), meta(2, 1, 5))
    _, calls = build.after(causal_masks)
    assert calls["second"][-3:] == (None, True, 0.5)


def test_a_mask_of_one_row_for_all_queries_that_hides_nothing_goes() -> None:
    build = Build(q=meta(2, 1, 5, 4))
    build.call("columns", "aten.arange.default", (5,), meta(5, dtype=I64))
    build.call("seen", "aten.ge.Scalar", (v("columns"), 0), meta(5, dtype=torch.bool))
    build.call("batch", "aten.expand.default", (v("seen"), (2, 1, 5, 5)), meta(2, 1, 5, 5, dtype=torch.bool))
    build.call("zero", "aten.scalar_tensor.default", (0.0,), meta())
    build.call("hide", "aten.scalar_tensor.default", (-math.inf,), meta())
    build.call("mask", "aten.where.self", (v("batch"), v("zero"), v("hide")), meta(2, 1, 5, 5))
    args = (v("q"), v("q"), v("q"), v("mask"), False, 0.5)
    _, calls = build.call("fwd", "hap.attention.default", args, meta(2, 1, 5, 4), meta(2, 1, 5)).after(causal_masks)
    assert calls["fwd"][-3:] == (None, False, 0.5)


@pytest.mark.parametrize(("hidden", "comparison"), [(-math.inf, "aten.lt.Tensor"), (-1.0, "aten.le.Tensor")])
def test_any_other_mask_stays(hidden: float, comparison: str) -> None:
    _, calls = masked_attention(hidden, comparison).after(causal_masks)
    assert calls["fwd"][-3:] == (v("mask"), False, 0.5)


def test_a_mask_that_an_input_reaches_stays() -> None:
    build = Build(q=meta(2, 1, 5, 4), mask=meta(2, 1, 5, 5))
    args = (v("q"), v("q"), v("q"), v("mask"), False, 0.5)
    build.call("fwd", "hap.attention.default", args, meta(2, 1, 5, 4), meta(2, 1, 5))
    _, calls = build.after(causal_masks)
    assert calls["fwd"][-3:] == (v("mask"), False, 0.5)


def test_cleaning_twice_changes_nothing() -> None:
    once, _ = masked_attention(-math.inf, "aten.le.Tensor").after(clean)
    assert clean(once).fingerprint == once.fingerprint
    assert len(once.nodes) == 4  # q, k, attention, sum
