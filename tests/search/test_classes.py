"""Identical layers are one class, and a class decides for real nodes."""

from hap.graph import Value
from hap.placement import REPLICATE, Shard
from hap.search.classes import JOINING, find_bundles, find_classes, find_reads, rename_groups
from tests.search.models import gpt2, unrolled


def test_inner_layers_are_solved_once() -> None:
    """Layers beyond the reach of the refinement add parameters of their own at most, never their operators."""
    few, many = (find_classes(c.graph, c.strategies) for c in (gpt2(6), gpt2(8)))
    assert sum(len(c.members) for c in many.nodes) == len(gpt2(8).graph.nodes)
    assert len(many.nodes) - len(few.nodes) <= 4
    assert max(len(c.members) for c in many.nodes) >= 8


def test_steps_in_time_are_solved_once() -> None:
    """Beyond the reach of the refinement, and where which of many pieces is read or made is all that differs."""
    few, many = (find_classes(c.graph, c.strategies) for c in (unrolled(16), unrolled(24)))
    assert len(many.nodes) == len(few.nodes) < len(unrolled(16).graph.nodes)
    assert len(many.values) == len(few.values)
    assert [len(c.members) for c in many.nodes] != [len(c.members) for c in few.nodes]


def test_few_pieces_keep_their_places() -> None:
    """Queries, keys and values are parts of one product."""
    found = gpt2(2)
    reads = find_reads(found.graph, found.strategies)
    splits = [n for n in found.graph.nodes if n.op.startswith("aten.split")]
    assert splits and all(reads[Value(n.name, i)][0].index == i for n in splits for i in range(len(n.outputs)))
    steps = unrolled(12)
    joined = [r for rs in find_reads(steps.graph, steps.strategies).values() for r in rs if r.reader is not None]
    cats = [r for r in joined if steps.graph.by_name[r.reader].op in JOINING]
    assert len(cats) >= 12 and {r.position for r in cats} == {0}


def test_tied_nodes_have_strategies_that_correspond() -> None:
    found = gpt2(6)
    for node_class in find_classes(found.graph, found.strategies).nodes:
        shapes = {
            rename_groups(p for s in found.strategies[name] for p in (*s.inputs, *s.outputs))
            for name in node_class.members
        }
        assert len(shapes) == 1


def test_every_value_is_in_one_class_and_reads_alike() -> None:
    found = gpt2(6)
    classes = find_classes(found.graph, found.strategies)
    seen = [value for v in classes.values for value in v.members]
    assert len(seen) == len(set(seen)) and set(seen) >= set(found.graph.users)
    for v in classes.values:
        assert all(len(needed) == len(v.slots) for needed in v.needed)


def test_groups_of_equal_layers_move_together() -> None:
    found = gpt2(6)
    bundles = find_bundles(find_classes(found.graph, found.strategies), found.strategies)
    heads = [b for b in bundles if found.groups[b[0]].label.startswith("heads of")]
    assert [len(b) for b in heads] == [6]
    assert all(len({found.groups[name].n for name in b}) == 1 for b in bundles)


def test_groups_are_numbered_in_order_of_appearance() -> None:
    one, other = Shard(0, 1, 4, 1, "g7"), Shard(1, 1, 4, 1, "g3")
    assert rename_groups([one, REPLICATE, other, one]) == (
        (0, 1, 4, 1, 0),
        REPLICATE,
        (1, 1, 4, 1, 1),
        (0, 1, 4, 1, 0),
    )
