"""Collectives of unequal and zero shares on real Gloo ranks: exact, contiguous, for every decomposition and dtype."""

from __future__ import annotations

import itertools
import random
import weakref

import pytest
import torch
import torch.distributed as dist

from hap.codegen.layout import Layout
from hap.codegen.program import DECOMPOSITIONS
from hap.errors import ProgramError
from hap.plan import Collective
from hap.routes import Way
from hap.runtime import collectives, p2p
from hap.runtime.collectives import Communicator, Pending
from hap.runtime.exchange import as_bytes
from hap.runtime.schedule import scatter_messages
from tests._support.ranks import RankError, run_ranks

DTYPES = (torch.int64, torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.complex64)
CASES = {2: 30, 3: 30, 4: 25, 5: 10, 6: 8}  # by world size


def random_sizes(source: random.Random, n: int, world_size: int) -> tuple[int, ...]:
    """``n`` atoms dealt to the ranks anyhow; zeros are common."""
    owners = [source.randrange(world_size) for _ in range(n)]
    return tuple(owners.count(r) for r in range(world_size))


def random_case(source: random.Random, world_size: int) -> tuple[list[int], list[Layout]]:
    """A shape, and for each dim one layout that fits it, plus a second layout of dim 0 with another atom."""
    shape, layouts = [], []
    for dim in range(source.randint(1, 3)):
        outer, n, unit = source.randint(1, 3), source.randint(1, 6), source.randint(1, 3)
        shape.append(outer * n * unit)
        layouts.append(Layout(dim, outer, unit, random_sizes(source, n, world_size)))
    extent = shape[0]
    n = source.choice([d for d in range(1, extent + 1) if extent % d == 0])
    rest = extent // n
    outer = source.choice([d for d in range(1, rest + 1) if rest % d == 0])
    layouts.append(Layout(0, outer, rest // outer, random_sizes(source, n, world_size)))
    return shape, layouts


def whole_tensor(source: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Small integers of any dtype, so that sums are exact even in bfloat16."""
    generator = torch.Generator().manual_seed(source.randrange(2**31))
    return torch.randint(0, 2 if dtype == torch.bool else 5, shape, generator=generator).to(dtype)


def any_way(source: random.Random, name: str, world_size: int) -> str:
    """The decomposition as it stands, or told about some ranks."""
    if name not in ("ring", "relay", "owners", "two_level") or source.random() < 0.2:
        return name
    ranks = source.sample(range(world_size), world_size)
    if name == "ring":
        return str(Way(name, (tuple(ranks),)))
    cut = source.randint(1, world_size - 1)
    if name == "two_level":
        return str(Way(name, (tuple(ranks[:cut]), tuple(ranks[cut:]))))
    return str(Way(name, (tuple(ranks[:cut]),)))


def ways(source: random.Random, kind: Collective, world_size: int) -> list[str]:
    """Every decomposition; the backend's own ring takes no ranks."""
    return [
        name if (kind, name) == ("all_reduce", "ring") else any_way(source, name, world_size)
        for name in DECOMPOSITIONS[kind]
    ]


def every_collective(rank: int, seed: int) -> int:
    """Random cases, the same on every rank; returns how many results were compared."""
    world_size, compared = dist.get_world_size(), 0
    source = random.Random(seed)
    comm = Communicator(dist.group.WORLD)

    def same(result: torch.Tensor, expected: torch.Tensor) -> None:
        nonlocal compared
        assert result.dtype == expected.dtype and result.is_contiguous()
        assert torch.equal(result, expected), (result, expected)
        compared += 1

    for _ in range(CASES[world_size]):
        shape, layouts = random_case(source, world_size)
        dtype = source.choice(DTYPES)
        whole = whole_tensor(source, shape, dtype)
        first = source.choice(layouts)
        piece = first.take(whole, rank)
        for how in ways(source, "all_gather", world_size):
            same(comm.all_gather(piece, **first._asdict(), decomposition=how), whole)
        same(comm.slice(whole, **first._asdict()), piece)
        for second in layouts:
            for how in DECOMPOSITIONS["all_to_all"]:
                result = comm.all_to_all(piece, source=first, target=second, decomposition=how)
                same(result, second.take(whole, rank))
        if dtype != torch.bool:
            parts = [whole_tensor(source, shape, dtype) for _ in range(world_size)]
            total = torch.stack(parts).sum(0, dtype=dtype)
            for how in ways(source, "all_reduce", world_size):
                same(comm.all_reduce(parts[rank], decomposition=how), total)
            for how in ways(source, "reduce_scatter", world_size):
                same(comm.reduce_scatter(parts[rank], **first._asdict(), decomposition=how), first.take(total, rank))
    return compared


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6])
def test_every_collective_is_exact_for_random_sizes_dims_atoms_and_dtypes(world_size: int) -> None:
    compared = run_ranks(world_size, every_collective, 7 * world_size)
    assert compared[0] > 15 * CASES[world_size] and len(set(compared)) == 1


def several_at_once(rank: int, seed: int) -> int:
    """Bundles of values, some left under way while others go by; all against the values' own collectives."""
    world_size, source, compared = dist.get_world_size(), random.Random(seed), 0
    comm = Communicator(dist.group.WORLD)
    for _ in range(8):
        dtype = source.choice((torch.int64, torch.float32))
        cases = [random_case(source, world_size) for _ in range(source.randint(1, 4))]
        wholes = [whole_tensor(source, shape, dtype) for shape, _ in cases]
        firsts, lasts = [c[1][0] for c in cases], [c[1][-1] for c in cases]
        pieces = [f.take(w, rank) for f, w in zip(firsts, wholes, strict=True)]
        summed = [world_size * w for w in wholes]
        mine = [f.take(s, rank) for f, s in zip(firsts, summed, strict=True)]
        moved = [s.take(w, rank) for s, w in zip(lasts, wholes, strict=True)]
        single = [(f,) for f in firsts]
        jobs: list[tuple[Collective, list[torch.Tensor], list[tuple[Layout, ...]], list[torch.Tensor]]] = [
            ("all_gather", pieces, single, wholes),
            ("all_reduce", wholes, [()] * len(wholes), summed),
            ("reduce_scatter", wholes, single, mine),
            ("all_to_all", pieces, list(zip(firsts, lasts, strict=True)), moved),
        ]
        source.shuffle(jobs)
        left: list[tuple[Pending, list[torch.Tensor]]] = []
        for kind, values, layouts, expected in jobs:
            how = source.choice(ways(source, kind, world_size))
            if source.random() < 0.6:
                left.append((comm.start(kind, values, layouts, how), expected))
            else:
                compared += all_equal(comm.together(kind, values, layouts, how), expected)
        source.shuffle(left)
        for pending, expected in left:
            compared += all_equal(comm.wait(pending), expected)
    return compared


def all_equal(results: list[torch.Tensor], expected: list[torch.Tensor]) -> int:
    for result, value in zip(results, expected, strict=True):
        assert result.dtype == value.dtype and result.is_contiguous() and torch.equal(result, value), (result, value)
    return len(results)


@pytest.mark.parametrize("world_size", [2, 4])
def test_several_values_go_together_and_calls_may_be_under_way(world_size: int) -> None:
    compared = run_ranks(world_size, several_at_once, 5 + world_size)
    assert compared[0] >= 32 and len(set(compared)) == 1


SENT: list[tuple[Collective, str]] = [
    *(("all_gather", how) for how in DECOMPOSITIONS["all_gather"]),
    *(("reduce_scatter", how) for how in DECOMPOSITIONS["reduce_scatter"]),
    *(("all_to_all", how) for how in DECOMPOSITIONS["all_to_all"]),
    ("all_reduce", "ring"),
]


def what_was_packed_is_held(rank: int, may_be_read_later: bool) -> list[bool]:
    """Of each collective on two values: whether its buffer outlives ``move``, after which a GPU may still read it."""
    collectives.may_be_read_later = lambda _: may_be_read_later
    comm, found = Communicator(dist.group.WORLD), []
    rows, columns = Layout(0, 1, 1, (3, 1)), Layout(1, 1, 1, (2, 2))
    whole = torch.arange(16.0).reshape(4, 4)
    for kind, how in SENT:
        value = rows.take(whole, rank) if kind in ("all_gather", "all_to_all") else whole
        layouts = {"all_reduce": (), "all_to_all": (rows, columns)}.get(kind, (rows,))
        transfer = comm._prepare(kind, [value, value], [layouts, layouts], how)
        sent = transfer.pack([value, value])
        packed, pending = weakref.ref(sent), Pending(transfer, sent, dist.group.WORLD)
        del sent
        pending.move()
        found.append(packed() is not None)
        pending.unpack()
    return found


def test_what_is_sent_is_held_until_it_is_unpacked() -> None:
    for held in run_ranks(2, what_was_packed_is_held, True):
        assert dict(zip(SENT, held, strict=True)) == dict.fromkeys(SENT, True)


def test_on_cpus_partial_sums_are_dropped_once_they_are_summed() -> None:
    """Not before ``unpack``, which of gradients is at the end of the backward pass. Of others that do not come where
    they were sent from Gloo's threads may hold what was sent a little longer."""
    sums = {call for call in SENT if call[0] == "reduce_scatter"}
    others = {call for call in SENT if call[0] == "all_to_all" or call == ("all_gather", "padded")}
    for held in run_ranks(2, what_was_packed_is_held, False):
        dropped = {call for call, is_held in zip(SENT, held, strict=True) if not is_held}
        assert sums <= dropped <= sums | others


def two_alike_are_under_way(rank: int) -> None:
    comm, columns = Communicator(dist.group.WORLD), Layout(1, 1, 1, (2, 2))
    for (kind, how), sizes in itertools.product(SENT, ((3, 1), (2, 2))):
        rows = Layout(0, 1, 1, sizes)
        own = kind in ("all_gather", "all_to_all")
        layouts = {"all_reduce": (), "all_to_all": (rows, columns)}.get(kind, (rows,))
        wholes = [torch.arange(16.0).reshape(4, 4) + 100 * i for i in range(2)]
        values = [[rows.take(whole, rank)] if own else [whole.clone()] for whole in wholes]
        given = [value[0].clone() for value in values]
        pending = [comm.start(kind, value, [layouts], how) for value in values]
        found = [comm.wait(each)[0] for each in reversed(pending)]
        for whole, result in zip(reversed(wholes), found, strict=True):
            whole = columns.take(whole, rank) if kind == "all_to_all" else whole if own else 2 * whole
            expected = rows.take(whole, rank) if kind == "reduce_scatter" else whole
            assert torch.equal(result, expected), (kind, how)
            result.fill_(-1)
        assert all(torch.equal(value[0], as_it_was) for value, as_it_was in zip(values, given, strict=True)), (
            kind,
            how,
        )


def test_calls_of_the_same_values_shapes_do_not_mix() -> None:
    """What is known of one call serves all that are like it, also at once; and none writes to what it was given."""
    run_ranks(2, two_alike_are_under_way)


def parts_are_summed(rank: int, way: str) -> None:
    lengths, group = (5, 0, 4), dist.group.WORLD
    assert group is not None
    messages = scatter_messages(Way.parse(way), lengths, 8)
    mine = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    for by_rounds in (False, True):
        buffer = torch.arange(9.0, dtype=torch.float64) * (rank + 1)
        p2p.perform(messages, buffer, group, by_rounds=by_rounds)
        assert torch.equal(buffer[mine], torch.arange(9.0, dtype=torch.float64)[mine] * 6)


@pytest.mark.parametrize("way", ["pairs", "ring[2,0,1]", "relay[1]", "two_level[0,1|2]"])
def test_parts_are_summed_as_they_come_and_by_rounds(way: str) -> None:
    """With an owner of nothing."""
    run_ranks(3, parts_are_summed, way)


def test_what_is_known_of_a_call_is_of_its_shapes_and_dtypes() -> None:
    comm, layout = Communicator(), Layout(0, 1, 1, (3,))
    known = comm._prepare("all_gather", [torch.ones(3, 2)], [(layout,)], "padded")
    assert comm._prepare("all_gather", [torch.zeros(3, 2)], [(layout,)], "padded") is known
    for value in (torch.ones(3, 4), torch.ones(3, 2, dtype=torch.float64)):
        assert comm._prepare("all_gather", [value], [(layout,)], "padded") is not known


def test_a_world_of_one_needs_no_process_group() -> None:
    comm = Communicator()
    value = torch.arange(12).reshape(3, 4).t()
    layout = Layout(0, 1, 2, (2,))
    for result in (
        comm.all_gather(value, **layout._asdict()),
        comm.all_reduce(value),
        comm.reduce_scatter(value, **layout._asdict()),
        comm.all_to_all(value, source=layout, target=Layout(1, 1, 1, (3,))),
        comm.slice(value, **layout._asdict()),
    ):
        assert torch.equal(result, value) and result.is_contiguous()


def nobody_holds_anything_but_rank_one(rank: int) -> list[list[int]]:
    comm = Communicator(dist.group.WORLD)
    layout = Layout(dim=0, outer=1, unit=1, sizes=(0, 3, 0))
    piece = layout.take(torch.arange(3), rank)
    return [comm.all_gather(piece, **layout._asdict(), decomposition=d).tolist() for d in DECOMPOSITIONS["all_gather"]]


def test_one_element_of_a_column_travels_as_bytes() -> None:
    column = torch.arange(18.0, dtype=torch.float64).as_strided((1,), (9,), 9)
    assert as_bytes(column).view(torch.float64).tolist() == [9.0]
    assert as_bytes(torch.arange(6).reshape(2, 3)[:0, 1]).shape == (0,)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,)])
def test_bytes_are_the_tensors_own_so_that_a_broadcast_arrives(shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 7, dtype=torch.int64)
    as_bytes(tensor).zero_()
    assert not tensor.any()


def test_one_rank_may_hold_everything() -> None:
    assert run_ranks(3, nobody_holds_anything_but_rank_one) == [[[0, 1, 2]] * len(DECOMPOSITIONS["all_gather"])] * 3


def test_a_piece_of_the_wrong_extent_is_refused_before_anything_is_sent() -> None:
    comm = Communicator()
    with pytest.raises(ProgramError, match=r"rank 0 holds \(3,\), the layout says \(4,\)"):
        comm.all_gather(torch.zeros(3), dim=0, outer=1, unit=2, sizes=(2,))


def test_an_unknown_decomposition_names_the_known_ones() -> None:
    with pytest.raises(ProgramError, match="all_to_all, padded, broadcast"):
        Communicator().all_gather(torch.zeros(2), dim=0, outer=1, unit=2, sizes=(1,), decomposition="magic")


def sums_of_sixteen_bits(rank: int, dtype: torch.dtype) -> list[float]:
    parts = torch.full((3,), 2.0 / torch.finfo(dtype).eps if rank == 0 else 1.0, dtype=dtype)
    layout = Layout(dim=0, outer=1, unit=1, sizes=(2, 1, 0))
    found: list[float] = Communicator(dist.group.WORLD).reduce_scatter(parts, **layout._asdict()).tolist()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    """Of 256, 1 and 1: added one after the other in bfloat16 they are 256."""
    total = 2.0 / torch.finfo(dtype).eps + 2
    assert run_ranks(3, sums_of_sixteen_bits, dtype) == [[total, total], [total], []]


def one_rank_disagrees(rank: int) -> None:
    Communicator(dist.group.WORLD, check=True).all_reduce(torch.zeros(2 if rank else 3))


def test_check_mode_names_the_rank_that_differs() -> None:
    with pytest.raises(RankError, match=r"ProgramError: all_reduce: rank 1 has .*\(2,\).* rank 0 has .*\(3,\)"):
        run_ranks(2, one_rank_disagrees)
