"""Identical layers are one class, and a class decides for real nodes."""

from hap.placement import REPLICATE, Shard
from hap.search.classes import find_bundles, find_classes, rename_groups
from tests.search.models import gpt2


def test_inner_layers_are_solved_once() -> None:
    """Layers beyond the reach of the refinement add parameters of their own at most, never their operators."""
    few, many = (find_classes(c.graph, c.strategies) for c in (gpt2(6), gpt2(8)))
    assert sum(len(c.members) for c in many.nodes) == len(gpt2(8).graph.nodes)
    assert len(many.nodes) - len(few.nodes) <= 4
    assert max(len(c.members) for c in many.nodes) >= 8


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
