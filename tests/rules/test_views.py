"""The atoms that views carry, against brute force over the elements."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hap.placement import Shard, take_shard
from hap.rules.notation import Atom, Dim, scale_atom
from hap.rules.table import call_rows
from hap.rules.view import is_split_off
from tests.rules.graphs import call, meta


@st.composite
def two_shapes(draw):
    """Two groupings of the same factors."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))

    def grouped():
        cuts = sorted(draw(st.sets(st.integers(1, len(factors) - 1), max_size=3))) if len(factors) > 1 else []
        bounds = [0, *cuts, len(factors)]
        return tuple(math.prod(factors[a:b]) for a, b in itertools.pairwise(bounds))

    return grouped(), grouped()


def atoms(size):
    """Every atom of two or more parts that fills a dim of ``size``."""
    return [
        Atom(outer, n, size // outer // n)
        for outer in range(1, size + 1)
        for n in range(2, size + 1)
        if size % (outer * n) == 0
    ]


def owners(shape, dim, atom):
    """For each element, in flat order, which part it belongs to, found by dealing one part to each of n ranks."""
    parts = torch.empty(shape, dtype=torch.int64)
    index = torch.arange(shape[dim]) // atom.unit % atom.n
    view = [1] * len(shape)
    view[dim] = shape[dim]
    parts[...] = index.view(view)
    return parts.flatten()


@settings(deadline=None, max_examples=60)
@given(two_shapes())
def test_a_view_maps_an_atom_exactly_where_brute_force_finds_the_same_parts(shapes):
    source, target = shapes
    rows = call_rows(call("aten.view.default", meta(*source), target, out=meta(*target)))
    for dim, size in enumerate(source):
        for atom in atoms(size):
            mapped = set()
            for row in rows:
                into, onto = row.inputs[0], row.outputs[0]
                if isinstance(into, Dim) and isinstance(onto, Dim) and into.dim == dim:
                    found = scale_atom(onto, atom, target[onto.dim])
                    if found is not None:
                        mapped.add((onto.dim, found))
            parts = owners(source, dim, atom)
            expected = {
                (out, candidate)
                for out, width in enumerate(target)
                for candidate in atoms(width)
                if candidate.n == atom.n and torch.equal(owners(target, out, candidate), parts)
            }
            assert mapped == expected


def test_a_shard_of_a_view_is_the_view_of_the_shard():
    x = torch.arange(8 * 10 * 48).view(8, 10, 48)
    before, after = Shard(0, 1, 8, 1, "g"), Shard(0, 1, 8, 10, "g")
    piece = take_shard(x, before, (5, 2, 1), 1)
    assert torch.equal(take_shard(x.view(80, 48), after, (5, 2, 1), 1), piece.view(20, 48))


def test_heads_are_split_off_and_merged_dims_are_not():
    assert is_split_off((8, 10, 48), (8, 10, 6, 8), 2)
    assert is_split_off((8, 10, 48), (8, 10, 6, 8), 3)
    assert not is_split_off((8, 10, 48), (8, 10, 6, 8), 0)
    assert not is_split_off((8, 10, 48), (80, 48), 0)
    assert is_split_off((4, 8, 16), (4, 8, 4, 4), 2), "though the batch has the same size"
