"""Candidates, groups and strategies of hand-sized graphs, counted by hand."""

import pytest
import torch
from torch import nn

from hap.capture import capture
from hap.errors import MissingRuleError
from hap.graph import Value
from hap.placement import REPLICATE, Shard
from hap.rules.choices import Group, batch_of, choices
from tests.rules.graphs import GraphBuilder, fused_projection, linear, meta


def shards(strategies):
    """The atoms by which a source may be stored."""
    return {(s.dim, s.outer, s.n, s.unit) for (s,) in (x.outputs for x in strategies) if isinstance(s, Shard)}


def test_the_first_strategy_of_every_node_is_all_replicated():
    for strategies in choices(linear()).strategies.values():
        assert all(p == REPLICATE for p in (*strategies[0].inputs, *strategies[0].outputs))


def test_the_groups_of_a_linear_layer_are_batch_contraction_and_columns():
    found = choices(linear())
    assert [(g.name, g.n, g.label) for g in found.groups.values()] == [
        ("g0", 8, "batch"),
        ("g1", 4, "w dim 0"),
        ("g2", 6, "w dim 1"),
    ]


def test_the_strategies_of_a_linear_layer():
    found = {name: [str(s) for s in strategies] for name, strategies in choices(linear()).strategies.items()}
    batch, inner, columns = "S({}:1x8x1@g0)", "S({}:1x4x1@g1)", "S({}:1x6x1@g2)"
    assert found["x"] == ["-> R", f"-> {batch.format(0)}"]
    assert found["w"] == ["-> R", f"-> {inner.format(0)}", f"-> {columns.format(1)}"]
    assert found["tangent"] == ["-> R"]
    assert found["y"] == [
        "R, R -> R",
        f"{batch.format(0)}, R -> {batch.format(0)}",
        f"{inner.format(1)}, {inner.format(0)} -> P",
        f"R, {columns.format(1)} -> {columns.format(1)}",
    ]
    assert found["dy"] == ["R -> R", f"R -> {batch.format(0)}", f"R -> {columns.format(1)}"]
    assert found["dw"] == [
        "R, R -> R",
        f"{inner.format(0)}, R -> {inner.format(0)}",
        f"{batch.format(1)}, {batch.format(0)} -> P",
        f"R, {columns.format(1)} -> {columns.format(1)}",
    ]
    assert found["loss"] == ["R -> R", "P -> P", f"{batch.format(0)} -> P", f"{columns.format(1)} -> P"]


def test_a_partial_argument_that_nothing_produces_is_no_strategy():
    found = choices(linear()).strategies
    assert all("P" not in str(s).split(" -> ")[0] for s in found["y"]), "x and w are never partial"


@pytest.mark.parametrize(
    ("shapes", "batch"),
    [
        ([], None),
        ([(), ()], None),
        ([(), (9, 4), (9,)], 9),
        ([(3,), (9, 4), (9,)], 9),  # weights of classes
        ([(8, 4), (99, 99), (8,)], 8),  # a mask of positions
        ([(8, 64), (64, 4), (64,)], 8),  # positions, with fewer elements
        ([(4, 9), (28, 9), (4,)], 4),  # more samples without labels
        ([(3,), (3,), (9, 4), (9,)], 3),
    ],
)
def test_the_batch_is_what_the_first_input_has_or_more_and_larger_ones(shapes, batch):
    assert batch_of(shapes) == batch


def test_weights_that_come_first_are_whole():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, weights, x, y):
            return nn.functional.cross_entropy(self.head(x), y, weight=weights)

    given = torch.ones(3), torch.zeros(9, 4), torch.zeros(9, dtype=torch.int64)
    found = choices(capture(Weighted(), given))
    stored = [[s.outputs[0] for s in found.strategies[n.name]] for n in found.graph.sources("input")]
    assert [len(placements) for placements in stored] == [1, 2, 2]
    (group,) = {p.group for placements in stored for p in placements if isinstance(p, Shard)}
    assert found.groups[group] == Group(group, 9, "batch")


def test_a_fused_projection_is_sharded_by_heads_down_to_its_weight():
    found = choices(fused_projection())
    assert (1, 3, 6, 8) in shards(found.strategies["w"])
    assert shards(found.strategies["w"]) == {(0, 1, 48, 1), (1, 1, 144, 1), (1, 3, 6, 8), (1, 18, 8, 1)}
    labels = {g.n: g.label for g in found.groups.values()}
    assert labels[6] == "split of attn"
    assert shards(found.strategies["x"]) == {(0, 1, 8, 1)}


def test_the_batch_is_folded_into_rows():
    product = [str(s) for s in choices(fused_projection()).strategies["product"]]
    assert product[1] == "S(0:1x8x10@g0), R -> S(0:1x8x10@g0)"


def test_inputs_that_share_their_first_size_share_the_batch_and_others_are_whole():
    b = GraphBuilder()
    x, y, table = b.source("input", "x", 8, 4), b.source("input", "y", 8, 4), b.source("input", "table", 4)
    first = b.call("first", "aten.tanh.default", x, out=meta(8, 4))
    second = b.call("second", "aten.add.Tensor", y, table, out=meta(8, 4))
    total = b.call("total", "aten.cat.default", (first, second), 1, out=meta(8, 8))
    found = choices(b.finish(total))
    assert shards(found.strategies["x"]) == shards(found.strategies["y"]) == {(0, 1, 8, 1)}
    assert found.strategies["x"] == found.strategies["y"]
    assert shards(found.strategies["table"]) == set()


def test_a_parameter_takes_over_the_candidates_of_its_gradient():
    """Nothing but the gradient is cut by heads: grad = cat of two halves, each made of 3 heads of 4."""
    b = GraphBuilder()
    x, w = b.source("input", "x", 8, 24), b.source("parameter", "w", 24)
    y = b.call("y", "aten.mul.Tensor", x, w, out=meta(8, 24))
    heads = b.call("heads", "aten.view.default", x, (8, 6, 4), out=meta(8, 6, 4))
    summed = b.call("summed", "aten.sum.dim_IntList", heads, (0,), out=meta(6, 4))
    dw = b.call("dw", "aten.view.default", summed, (24,), out=meta(24))
    found = choices(b.finish(y, {"w": dw}))
    assert shards(found.strategies["w"]) == {(0, 1, 24, 1), (0, 1, 6, 4), (0, 6, 4, 1)}


def test_a_dim_of_one_is_no_candidate():
    b = GraphBuilder()
    x = b.source("input", "x", 1, 4)
    y = b.call("y", "aten.tanh.default", x, out=meta(1, 4))
    found = choices(b.finish(y))
    assert [str(s) for s in found.strategies["y"]] == ["R -> R", "S(1:1x4x1@g0) -> S(1:1x4x1@g0)"]


def test_attention_is_sharded_by_batch_and_heads_only():
    b = GraphBuilder()
    q, k, v = (b.source("input", name, 4, 6, 10, 8) for name in "qkv")
    out = (meta(4, 6, 10, 8), meta(4, 6, 10))
    y = b.call("y", "hap.attention.default", q, k, v, None, True, 0.5, out=out, module="h.0")
    found = choices(b.finish(y))
    assert [(s.outputs[0].dim, s.outputs[0].n) for s in found.strategies["y"][1:]] == [(0, 4), (1, 6)]
    assert found.groups[found.strategies["y"][2].outputs[0].group].label == "heads of h.0"


def test_choices_are_the_same_every_time():
    first, second = choices(fused_projection()), choices(fused_projection())
    assert list(first.groups.items()) == list(second.groups.items())
    assert list(first.strategies.items()) == list(second.strategies.items())


@pytest.mark.parametrize(
    ("op", "remedy"),
    [
        (
            "aten.special_bessel_j0.default",
            r"has no sharding rule; .* or let HAP find one: hap.discover_rule\(\"aten.special_bessel_j0.default\"\)$",
        ),
        ("aten.rand_like.default", "none can be discovered: it draws random numbers; .* or do without it$"),
        ("aten.movedim.int", "none can be discovered: it returns a view of its arguments, .* or do without it$"),
    ],
)
def test_an_operator_without_a_rule_is_refused_with_its_module_and_what_would_help(op, remedy):
    b = GraphBuilder()
    x = b.source("input", "x", 8, 4)
    y = b.call("y", op, x, out=meta(8, 4), module="net.3")
    with pytest.raises(MissingRuleError, match=rf"{op} \(y\), called in module 'net\.3', .*{remedy}"):
        choices(b.finish(y))


def test_every_group_has_one_length_and_every_shard_fills_its_dim():
    graph = fused_projection()
    found = choices(graph)
    for node in graph.nodes:
        for strategy in found.strategies[node.name]:
            values = (*node.inputs, *(Value(node.name, i) for i in range(len(node.outputs))))
            for value, placement in zip(values, (*strategy.inputs, *strategy.outputs), strict=True):
                if isinstance(placement, Shard):
                    assert found.groups[placement.group].n == placement.n
                    assert graph.meta(value).shape[placement.dim] == placement.extent
