"""Sums over hosts, all ranks in one process: every element is added once, by one owner, in the order of the hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

from hap.codegen.layout import Layout
from hap.errors import ProgramError
from hap.runtime.ragged import Exchange, Ground, Region, Site, Splits, cut, meet, positions

Hosts = tuple[int, ...]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0] or [1]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> Layout | None:
    """Whole, or any dim cut in any atoms into any shares; zeros are common."""
    if not shape or draw(st.booleans()):
        return None
    dim = draw(st.integers(0, len(shape) - 1))
    outer = draw(st.sampled_from(divisors(shape[dim])))
    unit = draw(st.sampled_from(divisors(shape[dim] // outer)))
    atoms = shape[dim] // outer // unit
    ends = sorted(draw(st.lists(st.integers(0, atoms), min_size=ranks - 1, max_size=ranks - 1)))
    return Layout(dim, outer, unit, tuple(b - a for a, b in zip([0, *ends], [*ends, atoms], strict=True)))


@st.composite
def bundles(draw: st.DrawFn) -> tuple[Hosts, list[Site]]:
    hosts = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    shapes = draw(st.lists(st.lists(st.integers(0, 12), max_size=3).map(tuple), min_size=1, max_size=3))
    return hosts, [Site(shape, tuple(draw(layouts(shape, ranks)) for ranks in hosts)) for shape in shapes]


# What the three hosts have in common is nothing: shards of a dim 5:2:0, of another whose atoms recur, a whole tensor.
UNLIKE = Site((14, 12), (Layout(0, 1, 2, (5, 2, 0)), Layout(1, 3, 2, (1, 1)), None))
RECURRING = Site((24, 5), (Layout(0, 2, 1, (5, 0, 7)), Layout(0, 3, 2, (3, 1)), Layout(1, 1, 1, (5,))))
SCALAR = Site((), (None, None, None))
NOTHING = Site((0, 4), (Layout(0, 1, 1, (0, 0, 0)), Layout(1, 2, 1, (2, 0)), None))
HOSTS = (3, 2, 1)


def places(hosts: Hosts) -> list[tuple[int, int]]:
    return [(host, rank) for host, ranks in enumerate(hosts) for rank in range(ranks)]


def take(site: Site, whole: torch.Tensor, host: int, rank: int) -> torch.Tensor:
    layout = site.layouts[host]
    return whole.clone() if layout is None else layout.take(whole, rank)


def deliver(sent: Sequence[torch.Tensor], splits: Sequence[Splits]) -> list[torch.Tensor]:
    """What ``all_to_all_single`` would, and as strict about the lengths at both ends."""
    for rank, (flat, lengths) in enumerate(zip(sent, splits, strict=True)):
        assert flat.dim() == 1 and len(flat) == sum(lengths.outgoing) and lengths.outgoing[rank] == 0
        assert lengths.incoming == tuple(other.outgoing[rank] for other in splits)
    messages = [flat.split(lengths.outgoing) for flat, lengths in zip(sent, splits, strict=True)]
    return [torch.cat([row[rank] for row in messages]) for rank in range(len(sent))]


def exchange(
    hosts: Hosts, sites: list[Site], pieces: list[list[torch.Tensor]], dtype: torch.dtype | None = None
) -> list[list[torch.Tensor]]:
    """The steps of every rank, in turns: pieces by rank and site -> sums alike, in ``dtype`` if that is given."""
    ranks = [Exchange(sites, hosts, rank) for rank in range(sum(hosts))]
    if len(hosts) == 1:
        return [one.sum(mine, never, dtype) for one, mine in zip(ranks, pieces, strict=True)]
    results = [[torch.empty_like(p, dtype=dtype, memory_format=torch.contiguous_format) for p in m] for m in pieces]
    sent = [one.pack(mine) for one, mine in zip(ranks, pieces, strict=True)]
    received = deliver(sent, [one.splits[0] for one in ranks])
    sent = [one.add(*job) for one, *job in zip(ranks, results, pieces, received, strict=True)]  # type: ignore[arg-type]
    for one, mine, arrived in zip(ranks, results, deliver(sent, [one.splits[1] for one in ranks]), strict=True):
        one.unpack(mine, arrived)
    return results


def never(sent: torch.Tensor, splits: Splits) -> torch.Tensor:
    raise AssertionError("nothing is to be sent")


@given(bundles(), st.sampled_from([torch.int64, torch.float32, torch.bfloat16, torch.float64]), st.integers(0, 99))
@example((HOSTS, [UNLIKE, SCALAR, NOTHING, RECURRING]), torch.float32, 0)
def test_every_rank_holds_its_part_of_the_sum_to_the_last_bit(
    bundle: tuple[Hosts, list[Site]], dtype: torch.dtype, seed: int
) -> None:
    hosts, sites = bundle
    generator = torch.Generator().manual_seed(seed)
    wholes = [[(9 * torch.randn(site.shape, generator=generator)).to(dtype) for _ in hosts] for site in sites]
    pieces = [
        [take(site, whole[host], host, rank) for site, whole in zip(sites, wholes, strict=True)]
        for host, rank in places(hosts)
    ]
    before = [[piece.clone() for piece in mine] for mine in pieces]
    sums = exchange(hosts, sites, pieces)
    for site, whole, number in zip(sites, wholes, range(len(sites)), strict=True):
        total = whole[0].clone()
        for contribution in whole[1:]:
            total += contribution
        for world_rank, (host, rank) in enumerate(places(hosts)):
            result, mine = sums[world_rank][number], take(site, total, host, rank)
            assert result.dtype == dtype and result.shape == mine.shape and result.is_contiguous()
            assert torch.equal(result, mine)
            assert torch.equal(pieces[world_rank][number], before[world_rank][number])


@given(bundles(), st.integers(0, 99))
@example((HOSTS, [UNLIKE, SCALAR, NOTHING, RECURRING]), 0)
def test_a_sum_of_another_dtype_is_rounded_once_and_alike_on_every_rank(
    bundle: tuple[Hosts, list[Site]], seed: int
) -> None:
    hosts, sites = bundle
    generator = torch.Generator().manual_seed(seed)
    wholes = [[(9 * torch.randn(site.shape, generator=generator)).bfloat16() for _ in hosts] for site in sites]
    pieces = [
        [take(site, whole[host], host, rank) for site, whole in zip(sites, wholes, strict=True)]
        for host, rank in places(hosts)
    ]
    sums = exchange(hosts, sites, pieces, torch.float32)
    for number, (site, whole) in enumerate(zip(sites, wholes, strict=True)):
        total = sum((part.float() for part in whole[1:]), whole[0].float()).bfloat16().float()
        for world_rank, place in enumerate(places(hosts)):
            assert sums[world_rank][number].dtype == torch.float32
            assert torch.equal(sums[world_rank][number], take(site, total, *place))


def elements(shape: tuple[int, ...], region: Region) -> list[int]:
    """The region's places in the flat tensor, ascending."""
    indices = [torch.tensor([i for run in runs for i in run], dtype=torch.int64) for runs in region]
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    return sorted(numbers[torch.meshgrid(*indices, indexing="ij")].flatten().tolist())


@given(bundles())
@example((HOSTS, [UNLIKE, RECURRING, SCALAR]))
def test_every_element_has_one_owner_to_whom_each_host_gives_it_once(bundle: tuple[Hosts, list[Site]]) -> None:
    hosts, sites = bundle
    everybody = range(sum(hosts))
    for site in sites:
        shape, ground = site.shape or (1,), Ground(site, hosts)
        numbers = torch.arange(math.prod(shape)).reshape(site.shape)
        held = [sorted(take(site, numbers, *place).flatten().tolist()) for place in places(hosts)]
        owned = [elements(shape, region) for region in ground.owned]
        assert sorted(chain(*owned)) == list(range(math.prod(shape)))
        for owner in everybody:
            for host in range(len(hosts)):
                gifts = []
                for source in everybody:
                    if places(hosts)[source][0] == host:
                        gifts.append(elements(shape, ground.given(source, owner)))
                        assert set(gifts[-1]) <= set(held[source])
                assert sorted(chain(*gifts)) == owned[owner]
        for target in everybody:
            sums = [elements(shape, ground.returned(owner, target)) for owner in everybody]
            assert all(set(found) <= set(mine) for found, mine in zip(sums, owned, strict=True))
            assert sorted(chain(*sums)) == held[target]


def sent_by_host(site: Site, hosts: Hosts) -> list[int]:
    """Elements that leave for other hosts, in both rounds."""
    totals = [0] * len(hosts)
    for rank, (host, _) in enumerate(places(hosts)):
        for outgoing, _ in Exchange([site], hosts, rank).splits:
            away = [n for n, (target, _) in zip(outgoing, places(hosts), strict=True) if target != host]
            totals[host] += sum(away)
    return totals


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, 1, 0), (1, 0, 1)])
def test_a_host_sends_of_n_elements_two_thirds_twice_where_three_hold_shards(dims: tuple[int, ...]) -> None:
    shape, shares = (12, 6), {(0, 3): (7, 5, 0), (0, 2): (1, 11), (0, 1): (12,), (1, 3): (1, 0, 5), (1, 2): (3, 3)}
    shares[1, 1] = (6,)
    site = Site(shape, tuple(Layout(dim, 1, 1, shares[dim, n]) for dim, n in zip(dims, HOSTS, strict=True)))
    assert sent_by_host(site, HOSTS) == [2 * 72 * 2 // 3] * 3


def test_slabs_that_are_not_even_differ_by_one_row() -> None:
    # 14 rows: slabs of 5, 5 and 4. Host 2 holds all on its one rank. A host sends 168 - slab, then its slab twice.
    assert sent_by_host(UNLIKE, HOSTS) == [168 + 5 * 12, 168 + 5 * 12, 168 + 4 * 12]


def test_a_host_that_holds_all_on_two_ranks_sends_a_half_of_its_share_from_each() -> None:
    # 8 elements, owned 2, 2 and 4. Round 1: ranks 0 and 1 speak for 2 each of rank 2's. Round 2: sums to both others.
    first, second = zip(*(Exchange([Site((8,), (None, None))], (2, 1), rank).splits for rank in range(3)), strict=True)
    assert [lengths.outgoing for lengths in first] == [(0, 0, 2), (0, 0, 2), (2, 2, 0)]
    assert [lengths.outgoing for lengths in second] == [(0, 2, 2), (2, 0, 2), (4, 4, 0)]


def test_a_scalar_is_added_by_the_first_rank() -> None:
    splits = [Exchange([SCALAR], HOSTS, rank).splits for rank in range(6)]
    # Of host 0 the owner speaks, of host 1 its first rank, and all others wait for the sum.
    assert [sum(first.outgoing) for first, _ in splits] == [0, 0, 0, 1, 0, 1]
    assert splits[0][1].outgoing == (0, 1, 1, 1, 1, 1)


def test_alike_layouts_on_alike_hosts_talk_in_pairs() -> None:
    site = Site((6, 4), (Layout(1, 2, 1, (1, 1)),) * 2)
    first, second = Exchange([site], (2, 2), 1).splits
    assert first == second == Splits((0, 0, 0, 6), (0, 0, 0, 6))


def test_pieces_that_are_not_contiguous_are_summed_and_results_are_contiguous() -> None:
    site = Site((4, 3), (None, None))
    pieces = [[torch.arange(12.0).reshape(3, 4).t()], [torch.ones(4, 1).expand(4, 3)]]
    for (result,) in exchange((1, 1), [site], pieces):
        assert torch.equal(result, pieces[0][0] + 1) and result.is_contiguous()


def test_one_host_alone_gets_a_copy_of_its_own_and_nothing_is_sent() -> None:
    alone = Exchange([Site((3, 4), (Layout(1, 1, 1, (3, 1)),))], (2,), 0)
    piece = torch.arange(9.0).reshape(3, 3).t()
    (result,) = alone.sum([piece], never)
    assert torch.equal(result, piece) and result.is_contiguous()
    result.zero_()
    assert piece.sum() == 36


def test_a_sum_is_no_part_of_a_graph_of_autograd() -> None:
    alone = Exchange([Site((3,), (None,))], (1,), 0)
    assert not alone.sum([torch.ones(3, requires_grad=True)], never)[0].requires_grad


def test_dtypes_do_not_mix() -> None:
    pair = Exchange([SCALAR, SCALAR], HOSTS, 0)
    with pytest.raises(ProgramError, match="several dtypes cannot go together"):
        pair.sum([torch.zeros(()), torch.zeros((), dtype=torch.float64)], never)


def test_a_piece_of_another_shape_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ProgramError, match=r"rank 1 of host 1 holds \(14, 12\), the layout says \(14, 6\)"):
        Exchange([UNLIKE], HOSTS, 4).sum([torch.zeros(14, 12)], never)


@pytest.mark.parametrize(
    ("site", "said"),
    [
        (Site((6,), (None,)), "1 layouts for 2 hosts"),
        (Site((6,), (Layout(0, 1, 1, (2, 2, 2)), None)), "host 0 has 2 ranks, its layout 3"),
        (Site((6,), (None, Layout(0, 2, 1, (2,)))), r"host 1's Layout\(.* does not fit the shape \(6,\)"),
        (Site((6,), (None, Layout(1, 1, 1, (6,)))), r"host 1's Layout\(.* does not fit the shape \(6,\)"),
        (Site((), (None, Layout(-1, 1, 1, (1,)))), r"host 1's Layout\(.* does not fit the shape \(\)"),
    ],
)
def test_a_layout_that_does_not_fit_is_named(site: Site, said: str) -> None:
    with pytest.raises(ProgramError, match=said):
        site.verify((2, 1))


def test_sets_of_indices_by_hand() -> None:
    assert cut(range(3, 10), 3) == [range(3, 6), range(6, 8), range(8, 10)]
    assert cut(range(2), 4) == [range(1), range(1, 1), range(1, 2), range(2, 2)]
    recurring = (range(0, 2), range(4, 6), range(8, 10))
    assert meet((recurring,), ((range(1, 9),),)) == ((range(1, 2), range(4, 6), range(8, 9)),)
    # Of 0 1 4 5 8 9 those at 1 to 4 are one range, those at 0, 2 and 5 are three.
    assert positions((range(1, 2), range(4, 6), range(8, 9)), recurring) == (range(1, 5),)
    assert positions((range(0, 1), range(4, 5), range(9, 10)), recurring) == (range(0, 1), range(2, 3), range(5, 6))
