"""Literals that become local, and strategies that are refused because no row allows them."""

import pytest

from hap.errors import PlanError
from hap.placement import LocalSize
from hap.plan import Strategy
from hap.rules.choices import choices
from hap.rules.localize import localize, localize_call
from tests.rules.graphs import call, fused_projection, linear, meta

MAX = 2**63 - 1


def literals(a_call, strategy):
    """The localised arguments but for the tensors."""
    args, kwargs = localize_call(a_call, Strategy.parse(strategy))
    assert kwargs == ()
    return args[len(a_call.inputs) :]


def g(scale):
    return LocalSize("g", scale)


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ("R -> R", (8, 10, 6, 8)),
        ("P -> P", (8, 10, 6, 8)),
        ("S(0:1x8x10@g) -> S(0:1x8x1@g)", (g(1), 10, 6, 8)),
        ("S(0:8x10x1@g) -> S(1:1x10x1@g)", (8, g(1), 6, 8)),
        ("S(1:1x6x8@g) -> S(2:1x6x1@g)", (8, 10, g(1), 8)),
        ("S(1:6x8x1@g) -> S(3:1x8x1@g)", (8, 10, 6, g(1))),
    ],
)
def test_a_view_takes_the_local_shape_of_its_output(strategy, size):
    view = call("aten.view.default", meta(80, 48), (8, 10, 6, 8), out=meta(8, 10, 6, 8))
    assert literals(view, strategy) == (size,)


def test_a_split_of_a_fused_dim_cuts_local_parts():
    split = call("aten.split_with_sizes.default", meta(8, 144), (48, 48, 48), 1, out=(meta(8, 48),) * 3)
    part = "S(1:1x6x8@g)"
    assert literals(split, f"S(1:3x6x8@g) -> {part}, {part}, {part}") == ((g(8), g(8), g(8)), 1)
    assert literals(split, "P -> P, P, P") == ((48, 48, 48), 1)


def test_a_split_into_unequal_parts_cuts_on_their_common_block():
    """96 = 64 + 32: blocks of 32, each of 4 atoms of 8."""
    split = call("aten.split_with_sizes.default", meta(96), (64, 32), 0, out=(meta(64), meta(32)))
    assert literals(split, "S(0:3x4x8@g) -> S(0:2x4x8@g), S(0:1x4x8@g)") == ((g(16), g(8)), 0)
    with pytest.raises(PlanError):
        literals(split, "S(0:1x12x8@g) -> S(0:1x8x8@g), S(0:1x4x8@g)")


def test_a_slice_of_a_fused_dim_moves_its_bounds():
    middle = call("aten.slice.Tensor", meta(96, 5), 0, 32, 64, out=meta(32, 5))
    assert literals(middle, "S(0:3x4x8@g) -> S(0:1x4x8@g)") == (0, g(8), g(16))
    assert literals(middle, "S(1:1x5x1@g) -> S(1:1x5x1@g)") == (0, 32, 64)
    last = call("aten.slice.Tensor", meta(96, 5), 0, 64, MAX, out=meta(32, 5))
    assert literals(last, "S(0:3x4x8@g) -> S(0:1x4x8@g)") == (0, g(16), MAX)
    negative = call("aten.slice.Tensor", meta(96, 5), 0, -32, MAX, out=meta(32, 5))
    assert literals(negative, "S(0:3x4x8@g) -> S(0:1x4x8@g)") == (0, g(-8), MAX)


def test_a_slice_that_does_not_fall_on_whole_blocks_is_refused():
    """start 4, end 36: of the size of a block of 32, but across two of them."""
    across = call("aten.slice.Tensor", meta(96), 0, 4, 36, out=meta(32))
    with pytest.raises(PlanError):
        literals(across, "S(0:3x4x8@g) -> S(0:1x4x8@g)")


def test_the_gradient_of_a_slice_has_a_local_size_and_local_bounds():
    back = call("aten.slice_backward.default", meta(32, 5), (96, 5), 0, 32, 64, 1, out=meta(96, 5))
    assert literals(back, "S(0:1x4x8@g) -> S(0:3x4x8@g)") == ((g(24), 5), 0, g(8), g(16), 1)
    assert literals(back, "S(1:1x5x1@g) -> S(1:1x5x1@g)") == ((96, g(1)), 0, 32, 64, 1)


def test_a_broadcast_dim_may_be_born_sharded():
    expand = call("aten.expand.default", meta(1, 5), (8, 5), out=meta(8, 5))
    assert literals(expand, "R -> S(0:1x8x1@g)") == ((g(1), 5),)
    assert literals(expand, "S(1:1x5x1@g) -> S(1:1x5x1@g)") == ((8, g(1)),)


def test_a_joined_dim_is_sharded_in_every_part():
    joined = call("aten.cat.default", (meta(4, 48), meta(4, 96)), 1, out=meta(4, 144))
    args, _ = localize_call(joined, Strategy.parse("S(1:1x6x8@g), S(1:2x6x8@g) -> S(1:3x6x8@g)"))
    assert args[1:] == (1,)
    with pytest.raises(PlanError):
        localize_call(joined, Strategy.parse("S(1:1x6x8@g), S(1:1x12x8@g) -> S(1:1x18x8@g)"))


def test_every_strategy_of_the_choices_is_a_row():
    for graph in (linear(), fused_projection()):
        for name, strategies in choices(graph).strategies.items():
            for strategy in strategies:
                localize(graph.by_name[name], strategy, graph)


@pytest.mark.parametrize(
    ("node", "strategy"),
    [
        ("y", "S(0:1x8x1@g0), R -> R"),  # rows of x give rows of y
        ("y", "S(1:1x4x1@g1), S(0:1x4x1@g1) -> R"),  # a contraction gives a partial sum
        ("y", "S(1:1x4x1@g1), S(0:1x4x1@g2) -> P"),  # two groups
        ("y", "S(1:1x4x1@g1), S(0:2x2x1@g1) -> P"),  # two ways to cut
        ("y", "P, P -> P"),  # not bilinear
        ("y", "R -> R"),  # an argument is missing
        ("x", "-> S(1:1x4x1@g1)"),  # an input is dealt by its batch
        ("x", "-> S(0:2x4x1@g1)"),
        ("w", "-> S(0:1x5x1@g1)"),  # 5 of 4
        ("w", "-> P"),
        ("tangent", "-> P"),
    ],
)
def test_a_strategy_that_is_no_row_is_refused(node, strategy):
    graph = linear()
    with pytest.raises(PlanError):
        localize(graph.by_name[node], Strategy.parse(strategy), graph)
