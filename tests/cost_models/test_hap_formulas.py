"""HAP's clock: its operations per call, its elements per collective, and shares that are by speed or even."""

import pytest
import torch

from hap.conversion import find_needs
from hap.cost_models.hap_formulas import Clock, Machine, best_ratios, operations, paper_machine
from hap.graph import Graph, Node, TensorMeta, Value
from hap.placement import PARTIAL, REPLICATE, Shard
from hap.plan import Strategy

ROWS, COLUMNS = Shard(0, 1, 8, 1, "rows"), Shard(1, 1, 6, 1, "columns")
MACHINE = Machine((3.0, 1.0), all_gather=10.0, all_reduce=5.0, reduce_scatter=20.0, all_to_all=40.0)


def tensor(*shape):
    return TensorMeta(shape, torch.float32)


def linear():
    """x (8, 4) @ w (4, 6), its sum, and the gradient of w, x^T (4, 8) @ y (8, 6)."""
    nodes = (
        Node("x", "input", outputs=(tensor(8, 4),), target="args.0"),
        Node("w", "parameter", outputs=(tensor(4, 6),), target="w"),
        Node("y", "aten.mm.default", (Value("x"), Value("w")), outputs=(tensor(8, 6),)),
        Node("loss", "aten.sum.default", (Value("y"),), outputs=(tensor(),)),
        Node("xt", "aten.t.default", (Value("x"),), outputs=(tensor(4, 8),), phase="backward"),
        Node("dw", "aten.mm.default", (Value("xt"), Value("y")), outputs=(tensor(4, 6),), phase="backward"),
    )
    return Graph("linear", nodes, Value("loss"), {"w": Value("dw")})


def data_parallel():
    across = Shard(1, 1, 8, 1, "rows")
    return {
        "x": Strategy((), (ROWS,)),
        "w": Strategy((), (REPLICATE,)),
        "y": Strategy((ROWS, REPLICATE), (ROWS,)),
        "loss": Strategy((ROWS,), (PARTIAL,)),
        "xt": Strategy((ROWS,), (across,)),
        "dw": Strategy((across, ROWS), (PARTIAL,)),
    }


def test_a_product_counts_three_per_multiplication_and_a_sum_one_per_element():
    graph = linear()
    assert [operations(graph, n) for n in graph.nodes] == [0, 0, 3 * 8 * 4 * 6, 48, 0, 3 * 4 * 8 * 6]


def test_convolutions_count_no_kernel_and_attention_no_projection():
    x, w = Node("x", "input", outputs=(tensor(2, 3, 5, 5),)), Node("w", "parameter", outputs=(tensor(7, 3, 3, 3),))
    q = Node("q", "input", outputs=(tensor(2, 4, 10, 8),))
    conv = Node("conv", "aten.convolution.default", (Value("x"), Value("w")), outputs=(tensor(2, 7, 5, 5),))
    attention = Node("a", "hap.attention.default", (Value("q"),) * 3, outputs=(tensor(2, 4, 10, 8),))
    inside = Node("mm", "aten.mm.default", (Value("x"), Value("w")), outputs=(), module="layers.0.attention.q")
    graph = Graph("g", (x, w, q, conv, attention, inside), Value("conv"), {})
    assert operations(graph, conv) == 3 * 7 * 150
    assert operations(graph, attention) == 6 * 10 * 2 * 32 * 10 + 5 * 10 * 10 * 2
    assert operations(graph, inside) == 0


def test_data_parallel_by_speed_is_the_sum_of_the_slowest_calls_and_one_all_reduce_of_elements():
    clock = Clock(linear(), MACHINE)
    by_speed = {"rows": MACHINE.proportional}
    assert MACHINE.proportional == (0.75, 0.25)
    calls = (576 + 48 + 576) / 4  # all devices together do 4 operations a second
    assert clock.seconds(data_parallel(), by_speed) == pytest.approx(calls + 24 / 5 + 1 / 5)
    even = (576 + 48 + 576) * 0.5 / 1.0
    assert clock.seconds(data_parallel(), {"rows": MACHINE.even}) == pytest.approx(even + 24 / 5 + 1 / 5)


@pytest.mark.parametrize(
    ("source", "target", "seconds"),
    [
        (ROWS, REPLICATE, 2 * 0.75 * 48 / 10),
        (PARTIAL, ROWS, 2 * 0.75 * 48 / 20),
        (ROWS, COLUMNS, 2 * 0.75 * 48 / 40),
        (COLUMNS, ROWS, 2 * 0.5 * 48 / 40),
        (PARTIAL, REPLICATE, 48 / 5),
        (REPLICATE, ROWS, 0.0),
    ],
)
def test_collectives_are_padded_to_the_largest_shard(source, target, seconds):
    ratios = {"rows": MACHINE.proportional, "columns": MACHINE.even}
    assert Clock(linear(), MACHINE).conversion_s(48, source, target, ratios) == pytest.approx(seconds)


def test_shares_are_by_speed_where_work_decides_and_even_where_padding_does():
    clock = Clock(linear(), MACHINE)
    assert best_ratios(clock, data_parallel(), [("rows",)]) == {"rows": MACHINE.proportional}
    gathered = {**data_parallel(), "loss": Strategy((REPLICATE,), (REPLICATE,))}
    assert [n.collective for n in find_needs(linear(), gathered)].count("all_gather") == 1
    narrow = Clock(linear(), Machine((3.0, 1.0), 0.01, 5.0, 20.0, 40.0))
    assert best_ratios(narrow, gathered, [("rows",)]) == {"rows": MACHINE.even}


def test_no_share_beats_the_better_end():
    clock = Clock(linear(), Machine((3.0, 1.0), 0.2, 5.0, 20.0, 40.0))
    gathered = {**data_parallel(), "loss": Strategy((REPLICATE,), (REPLICATE,))}
    best = clock.seconds(gathered, best_ratios(clock, gathered, [("rows",)]))
    for k in range(1, 100):
        assert best <= clock.seconds(gathered, {"rows": (k / 100, 1 - k / 100)}) * (1 + 1e-12)


def test_the_papers_cluster():
    machine = paper_machine(4)
    assert machine.world_size == 32
    assert machine.proportional[0] / machine.proportional[-1] == pytest.approx(1.795, abs=1e-3)
