"""Whole values and all ranks' pieces of them, flat: against what each rank takes, for any layout and any strides."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hap.codegen.layout import Layout
from hap.runtime.dealing import dealt, joined, joined_of, lengths, runs_of


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Layout]:
    """A whole value, of any order in memory and maybe a piece of a larger one, and a layout; ranks may have nothing."""
    sizes = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=12)))
    outer, unit = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    around = draw(st.lists(st.integers(0, 3), max_size=2))
    dim = draw(st.integers(0, len(around)))
    shape = (*around[:dim], outer * sum(sizes) * unit, *around[dim:])
    order = draw(st.permutations(range(len(shape))))
    room = [shape[d] + draw(st.integers(0, 1)) for d in order]
    made = torch.arange(torch.Size(room).numel()).view(room)
    for place, d in enumerate(order):
        made = made.narrow(place, room[place] - shape[d], shape[d])
    return made.permute([order.index(d) for d in range(len(shape))]), Layout(dim, outer, unit, sizes)


@given(cases())
def test_pieces_one_after_another_and_back(case: tuple[torch.Tensor, Layout]) -> None:
    whole, layout = case
    before = whole.clone()
    pieces = [layout.take(whole, rank) for rank in range(len(layout.sizes))]
    flat = dealt(whole, layout)
    assert torch.equal(flat, torch.cat([piece.reshape(-1) for piece in pieces]))
    assert torch.equal(flat, dealt(whole, layout, new=False))
    assert (
        [piece.numel() for piece in pieces]
        == list(lengths(layout, whole.shape))
        == list(lengths(layout, pieces[-1].shape))
    )
    again = joined(flat, layout, pieces[-1].shape)
    assert torch.equal(again, whole) and again.is_contiguous()
    again = joined_of(flat.split(lengths(layout, whole.shape)), layout, pieces[-1].shape)
    assert torch.equal(again, whole) and again.is_contiguous()
    flat.fill_(-1)
    assert torch.equal(whole, before)  # it is new


def test_ranks_of_one_size_are_a_run() -> None:
    assert runs_of((3, 3, 0, 1, 1, 1, 3)) == ((0, 0, 2, 3), (3, 6, 3, 1), (6, 9, 1, 3))
    assert runs_of((0, 0)) == ()
