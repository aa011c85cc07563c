"""The language: placements, shards of whole numbers, plans that refuse what they were not made for."""

import json
import pickle
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hap.conversion import collective_kind, find_needs
from hap.errors import PlanError
from hap.graph import Graph, Node, TensorMeta, Value, verify_graph
from hap.placement import (
    PARTIAL,
    REPLICATE,
    LocalSize,
    Partial,
    Replicate,
    Shard,
    concrete_shape,
    join_shards,
    local_shape,
    parse_placement,
    take_shard,
    verify_sizes,
)
from hap.plan import GroupPlan, Plan, Prediction, Provenance, Strategy

F32 = torch.float32
HEADS = Shard(1, outer=3, n=6, unit=8, group="g1")


def test_a_fused_projection_is_cut_by_heads_and_never_inside_one():
    whole = torch.arange(2 * 144).reshape(2, 144)
    sizes = (3, 2, 1)
    piece = take_shard(whole, HEADS, sizes, 1)
    # heads 3 and 4 of each of q, k, v: columns 24..40 of each block of 48
    assert piece[0].tolist() == [*range(24, 40), *range(72, 88), *range(120, 136)]
    assert piece.is_contiguous()


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(lambda s: sum(s) > 0),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_joining_the_pieces_gives_the_whole(sizes, outer, unit, dim):
    shape = [2, 3, 2]
    shard = Shard(dim, outer, sum(sizes), unit, "g")
    shape[dim] = shard.extent
    whole = torch.randn(shape)
    pieces = [take_shard(whole, shard, tuple(sizes), r) for r in range(len(sizes))]
    for r, p in enumerate(pieces):
        assert tuple(p.shape) == concrete_shape(shape, shard, {"g": tuple(sizes)}, r)
    assert torch.equal(join_shards(pieces, shard, tuple(sizes)), whole)


def test_placements_print_and_parse_back():
    for p in (REPLICATE, PARTIAL, HEADS):
        assert parse_placement(str(p)) == p
    strategy = Strategy((HEADS, REPLICATE), (PARTIAL, None))
    assert str(strategy) == "S(1:3x6x8@g1), R -> P, -"
    for s in (strategy, Strategy((), (REPLICATE,)), Strategy((REPLICATE,), ())):
        assert Strategy.parse(str(s)) == s
    for bad in ("S(1)", "Q", "", "S(1:3x6x8@)"):
        with pytest.raises(ValueError):
            parse_placement(bad)


@pytest.mark.parametrize("placement", [REPLICATE, PARTIAL, HEADS])
def test_a_copy_of_a_placement_is_equal_to_it_and_tells_the_same(placement):
    """Of what has no numbers it is the same object: the search compares those by identity."""
    for copy in (pickle.loads(pickle.dumps(placement)), deepcopy(placement), parse_placement(str(placement))):
        assert copy == placement and hash(copy) == hash(placement) and repr(copy) == repr(placement)
        assert copy is placement or placement is HEADS
    assert "object at" not in repr(placement)
    assert Replicate() is REPLICATE and Partial() is PARTIAL


def test_local_shapes_stay_symbolic_until_a_rank_asks():
    assert local_shape((2, 144), HEADS) == (2, LocalSize("g1", 24))
    assert concrete_shape((2, 144), HEADS, {"g1": (3, 2, 1)}, 0) == (2, 72)


def test_sizes_must_sum_exactly():
    verify_sizes((5, 0, 3), 8, 3)
    for wrong in ((5, 2), (5, 2, 2), (9, -1, 0)):
        with pytest.raises(AssertionError):
            verify_sizes(wrong, 8, 3)


def linear_graph() -> Graph:
    """x[8,4] @ w[4,2] -> sum; gradient of w by x^T @ expand(tangent)."""
    x, w, loss = TensorMeta((8, 4), F32), TensorMeta((4, 2), F32), TensorMeta((), F32)
    y = TensorMeta((8, 2), F32)
    nodes = (
        Node("w", "parameter", outputs=(w,), target="w"),
        Node("x", "input", outputs=(x,), target="args.0"),
        Node("t", "tangent", outputs=(loss,), phase="backward"),
        Node("mm", "aten.mm.default", (Value("x"), Value("w")), outputs=(y,)),
        Node("sum_1", "aten.sum.default", (Value("mm"),), outputs=(loss,)),
        Node("expand", "aten.expand.default", (Value("t"), (8, 2)), outputs=(y,), phase="backward"),
        Node("xt", "aten.t.default", (Value("x"),), outputs=(TensorMeta((4, 8), F32),), phase="backward"),
        Node("mm_1", "aten.mm.default", (Value("xt"), Value("expand")), outputs=(w,), phase="backward"),
    )
    return Graph("linear", nodes, Value("sum_1"), {"w": Value("mm_1")})


def data_parallel() -> dict[str, Strategy]:
    batch, cols = Shard(0, 1, 8, 1, "g0"), Shard(1, 1, 8, 1, "g0")
    r = REPLICATE
    return {
        "w": Strategy((), (r,)),
        "x": Strategy((), (batch,)),
        "t": Strategy((), (r,)),
        "mm": Strategy((batch, r), (batch,)),
        "sum_1": Strategy((batch,), (PARTIAL,)),
        "expand": Strategy((r,), (batch,)),
        "xt": Strategy((batch,), (cols,)),
        "mm_1": Strategy((cols, batch), (PARTIAL,)),
    }


def test_data_parallel_needs_two_all_reduces():
    graph = linear_graph()
    verify_graph(graph)
    needs = find_needs(graph, data_parallel())
    assert [(str(n.value), n.collective) for n in needs] == [("sum_1", "all_reduce"), ("mm_1", "all_reduce")]


def test_a_sharded_parameter_is_gathered_once_or_once_a_phase():
    graph = linear_graph()
    rows = Shard(0, 1, 4, 1, "g1")
    sharded = data_parallel() | {"w": Strategy((), (rows,))}
    kinds = [(n.collective, n.phase) for n in find_needs(graph, sharded)]
    assert kinds == [("all_gather", "forward"), ("all_reduce", "forward"), ("reduce_scatter", "backward")]
    assert collective_kind(rows, HEADS) == "all_to_all"
    assert collective_kind(REPLICATE, rows) == "slice"


def small_plan() -> Plan:
    return Plan(
        provenance=Provenance(
            model="linear", model_fingerprint="m", parameters=8, cluster="c", cluster_fingerprint="f", world_size=3,
            backend="gloo", rules_fingerprint="r", hap_version="0", torch_version="2", optimizer="adamw",
        ),
        groups={"g0": GroupPlan(n=8, label="batch", sizes=(5, 2, 1))},
        strategies={k: str(s) for k, s in data_parallel().items()},
        conversions=(),
        predicted=Prediction(
            step_s=2.0, compute_s=(1.0, 1.0, 1.0), communication_s=1.0, memory_bytes=(1, 1, 1),
            memory_by_kind=({}, {}, {}), lower_bound_s=1.9,
        ),
        devices=("a", "b", "c"),
    )  # fmt: skip


def test_a_plan_survives_its_file_byte_for_byte(tmp_path):
    plan = small_plan()
    plan.save(tmp_path / "p.json")
    again = Plan.load(tmp_path / "p.json")
    assert again == plan and again.to_json() == plan.to_json()
    assert plan.predicted.gap == pytest.approx(0.05)


def _edit(**changes):
    body = json.loads(small_plan().to_json())
    body.update(changes)
    return json.dumps(body)


@pytest.mark.parametrize(
    "text, says",
    [
        (small_plan().to_json()[:200], "not a complete plan file"),
        ("[]", "not a plan file"),
        (_edit(schema_version=99), "schema version 99"),
        (_edit(surprise=1), "surprise"),
        (_edit(devices=["a", "b", "x"]), "checksum"),
        (small_plan().to_json().replace("5, 2", "4, 3"), "checksum"),
    ],
)
def test_a_damaged_or_edited_plan_is_refused_in_one_line(text, says):
    with pytest.raises(PlanError, match=says) as e:
        Plan.from_json(text, "x.plan.json")
    assert "\n" not in str(e.value) and str(e.value).startswith("x.plan.json")


def test_a_plan_whose_sizes_do_not_sum_is_refused_even_with_a_fresh_checksum():
    plan = small_plan().model_copy(update={"groups": {"g0": GroupPlan(n=8, label="batch", sizes=(5, 2, 2))}})
    with pytest.raises(PlanError, match="sum to 9"):
        Plan.from_json(plan.to_json())
