"""Trees and schedules: everybody is reached once, and playing the messages on lists gives the collective's result."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hap.codegen.program import DECOMPOSITIONS, is_decomposition
from hap.routes import SEGMENT_BYTES, Edge, Way, depth, segment_owners, tree, verify_tree
from hap.runtime.schedule import Message, gather_messages, reduce_messages, scatter_messages

ELEMENT = SEGMENT_BYTES // 3  # bytes of one element, so that a few make several segments


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Way, list[int]]:
    """A way, and how many elements each rank holds."""
    world_size = draw(st.integers(1, 7))
    ranks = draw(st.permutations(range(world_size)))
    cut = draw(st.integers(1, world_size))
    groups = {
        "pairs": (),
        "ring": (tuple(ranks),),
        "relay": (tuple(ranks[:cut]),),
        "owners": (tuple(ranks[:cut]),),
        "two_level": tuple(g for g in (tuple(ranks[:cut]), tuple(ranks[cut:])) if g),
    }
    name = draw(st.sampled_from(sorted(groups)))
    bare = draw(st.booleans())
    return Way(name, () if bare else groups[name]), draw(
        st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size)
    )


def play(messages: tuple[Message, ...], buffers: list[list[int]]) -> None:
    """Round by round; what a round sends is what its sender had before the round."""
    for now in sorted({m.round for m in messages}):
        before = [list(b) for b in buffers]
        for m in messages:
            if m.round == now:
                for i in range(m.start, m.stop):
                    buffers[m.dst][i] = before[m.src][i] + (buffers[m.dst][i] if m.adds else 0)


@given(worlds())
def test_every_tree_reaches_everybody_once(world: tuple[Way, list[int]]) -> None:
    way, lengths = world
    way.check(len(lengths))
    for root in range(len(lengths)):
        verify_tree(tree(way, root, len(lengths)), root, len(lengths))
    assert Way.parse(str(way)) == way


@given(worlds())
def test_the_messages_make_the_collectives(world: tuple[Way, list[int]]) -> None:
    way, lengths = world
    n, total = len(lengths), sum(lengths)
    owner = [r for r, length in enumerate(lengths) for _ in range(length)]

    gathered = [[i + 1 if owner[i] == r else 0 for i in range(total)] for r in range(n)]
    play(gather_messages(way, lengths, ELEMENT), gathered)
    assert gathered == [[i + 1 for i in range(total)]] * n

    partial = [[(r + 1) * 10**i for i in range(total)] for r in range(n)]
    summed = [n * (n + 1) // 2 * 10**i for i in range(total)]
    scattered = [list(b) for b in partial]
    play(scatter_messages(way, lengths, ELEMENT), scattered)
    assert all(scattered[owner[i]][i] == summed[i] for i in range(total))

    play(reduce_messages(way, total, n, ELEMENT), partial)
    assert partial == [summed] * n


@given(worlds())
def test_a_sender_has_what_it_sends(world: tuple[Way, list[int]]) -> None:
    """A message depends only on earlier rounds of its own segment, which is what ``hap.runtime.p2p`` waits for."""
    way, lengths = world
    for m in (sent := reduce_messages(way, sum(lengths), len(lengths), ELEMENT)):
        brings = [e for e in sent if e.dst == m.src and e.start < m.stop and m.start < e.stop]
        assert all(e.segment == m.segment for e in brings)
        assert not any(e.round == m.round for e in brings)


def test_a_relay_spares_the_slow_uplinks() -> None:
    """Ranks 2 and 3 send what they own once, each to one of the fast ranks in turns."""
    assert tree(Way.parse("relay[0,1]"), 2, 4) == (Edge(2, 0, 1), Edge(0, 1, 2), Edge(0, 3, 2))
    assert tree(Way.parse("relay[0,1]"), 3, 4) == (Edge(3, 1, 1), Edge(1, 0, 2), Edge(1, 2, 2))
    assert tree(Way.parse("relay[0,1]"), 0, 4) == (Edge(0, 1, 1), Edge(0, 2, 1), Edge(0, 3, 1))


def test_between_hosts_every_byte_goes_once() -> None:
    way = Way.parse("two_level[0,1|2,3]")
    assert tree(way, 1, 4) == (Edge(1, 0, 1), Edge(1, 3, 1), Edge(3, 2, 2))
    assert depth(way, 4) == 2


def test_owners_take_turns() -> None:
    assert segment_owners(Way.parse("owners[0,1,0]"), 4) == (0, 1, 0)
    messages = reduce_messages(Way.parse("owners[0,1]"), 8, 4, SEGMENT_BYTES)
    assert [m.dst for m in messages if m.adds and m.src == 3] == [0, 1] * 4


@pytest.mark.parametrize(
    ("kind", "text", "fine"),
    [
        ("all_gather", "ring[0,2,1]", True),
        ("all_gather", "ring[0,1]", False),  # rank 2 is missing
        ("all_gather", "relay[3]", False),  # no rank 3
        ("all_gather", "pairs[0]", False),  # takes no ranks
        ("all_gather", "owners[0]", False),  # a way of all_reduce
        ("all_reduce", "ring[0,1,2]", False),  # the backend's own takes none
        ("all_reduce", "owners[0,0,1]", True),
        ("all_reduce", "owners[0|1]", False),
        ("reduce_scatter", "two_level[0,1|2]", True),
        ("reduce_scatter", "two_level[0|2]", False),
        ("all_to_all", "pairs", True),
        ("slice", "local", True),
        ("slice", "loc al", False),
    ],
)
def test_what_three_ranks_can_perform(kind: str, text: str, fine: bool) -> None:
    assert is_decomposition(kind, text, 3) is fine  # type: ignore[arg-type]


def test_every_bare_name_can_be_performed() -> None:
    assert all(is_decomposition(kind, name, 4) for kind, names in DECOMPOSITIONS.items() for name in names)
