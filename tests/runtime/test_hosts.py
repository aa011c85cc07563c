"""Hosts of unequal numbers of ranks on real Gloo: programs of their own, sums over all of them, now and for later."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from hap.codegen.layout import Layout
from hap.errors import ProgramError
from hap.runtime import hosts as module
from hap.runtime.hosts import HostCommunicator
from hap.runtime.ragged import Site, Splits, all_to_all
from tests._support.ranks import RankError, run_ranks

Hosts = tuple[int, ...]
# A shape, and how it lies in a host of one rank, of two and of three.
SITES: tuple[tuple[tuple[int, ...], tuple[Layout | None, Layout | None, Layout | None]], ...] = (
    ((14, 12), (None, Layout(1, 3, 2, (1, 1)), Layout(0, 1, 2, (5, 2, 0)))),
    ((7,), (None, None, None)),
    ((4, 6, 3), (Layout(0, 1, 1, (4,)), Layout(1, 1, 3, (0, 2)), None)),
    ((), (None, None, None)),
    ((0, 5), (None, Layout(1, 1, 1, (2, 3)), Layout(0, 1, 1, (0, 0, 0)))),
    ((24, 2), (None, Layout(0, 3, 2, (3, 1)), Layout(0, 2, 1, (5, 0, 7)))),
)
LATER = (5, 0, 1, 3, 2, 4)  # not in the order of their numbers


def sites_of(hosts: Hosts) -> list[Site]:
    return [Site(shape, tuple(ways[ranks - 1] for ranks in hosts)) for shape, ways in SITES]


def contributions(site: Site, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """One whole tensor for each host, the same on every rank: small integers, or (float64) any numbers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.float64:
        return [torch.randn(site.shape, generator=generator, dtype=dtype) for _ in site.layouts]
    return [torch.randint(-9, 9, site.shape, generator=generator).to(dtype) for _ in site.layouts]


class Case:
    """What this rank holds of a site, and what it should get."""

    def __init__(self, comm: HostCommunicator, number: int, dtype: torch.dtype, seed: int) -> None:
        site = comm.sites[number]
        wholes = contributions(site, dtype, seed + number)
        mine = self._mine(comm, site, wholes[comm.host])
        self.piece = mine.mT.contiguous().mT if mine.dim() > 1 else mine  # as gradients often come
        self.before = self.piece.clone()
        self.expected = self._mine(comm, site, torch.stack(wholes).sum(0))

    @staticmethod
    def _mine(comm: HostCommunicator, site: Site, whole: torch.Tensor) -> torch.Tensor:
        layout = site.layouts[comm.host]
        return whole.clone() if layout is None else layout.take(whole, comm.rank)

    def holds(self, result: torch.Tensor) -> int:
        assert result.dtype == self.expected.dtype and result.is_contiguous() and result.shape == self.expected.shape
        assert torch.equal(self.piece, self.before)
        assert result.numel() == 0 or result.data_ptr() != self.piece.data_ptr()
        if result.dtype == torch.float64:
            assert result.numel() == 0 or float((result - self.expected).abs().max()) < 1e-12
        else:
            assert torch.equal(result, self.expected)
        return 1


class Rounds:
    """Counts what goes over the wire, in the place of ``all_to_all``."""

    def __init__(self) -> None:
        self.made = 0
        self.broken = False

    def __call__(self, sent: torch.Tensor, splits: Splits, group: dist.ProcessGroup) -> torch.Tensor:
        if self.broken:
            raise RuntimeError("the cable is out")
        self.made += 1
        return all_to_all(sent, splits, group)


class Pace:
    def __init__(self) -> None:
        self.said: list[str] = []

    def settle(self) -> None:
        self.said.append("settle")

    def resume(self) -> None:
        self.said.append("resume")


def sums_of_all_kinds(rank: int, hosts: Hosts) -> int:
    """Returns how many sums were compared."""
    rounds = module.all_to_all = Rounds()  # in this process alone
    comm = HostCommunicator(dist.group.WORLD, hosts, sites_of(hosts), later=LATER, bundle_bytes=640)
    assert (comm.everyone.rank, comm.everyone.world_size) == (rank, sum(hosts))
    assert sum(hosts[: comm.host]) + comm.rank == rank and comm.world_size == hosts[comm.host]
    assert (comm.group is None) == (comm.world_size == 1)
    compared = 0
    for seed, dtype in enumerate((torch.float64, torch.int64, torch.bfloat16)):
        for number in range(len(SITES)):
            case = Case(comm, number, dtype, 100 * seed)
            compared += case.holds(comm.hosts_sum(case.piece, number))
    assert rounds.made == 2 * compared
    for step in range(3):
        rounds.made = 0
        cases = [Case(comm, number, torch.float64, 1000 + 10 * step) for number in LATER]
        assert comm.everyone.gather_objects(step) == [step] * sum(hosts)
        if rank != 0:  # the others give theirs only when rank 0 has given all: it waits for none of them
            dist.barrier()
        started = [comm.hosts_sum_later(case.piece, number) for case, number in zip(cases, LATER, strict=True)]
        if rank == 0:
            dist.barrier()
        assert float(comm.all_reduce(torch.ones(()))) == comm.world_size  # meanwhile, of the host alone
        comm.finish()
        compared += sum(case.holds(result) for case, result in zip(cases, started, strict=True))
        # Bytes of whole tensors: 384 and 1344; 56, 8 and 576, which are 640; the last site has none.
        assert rounds.made == 2 * 3
    return compared + mixed_dtypes(comm, rounds) + other_steps(comm, rounds)


def mixed_dtypes(comm: HostCommunicator, rounds: Rounds) -> int:
    """A bundle ends where the dtype changes."""
    rounds.made = 0
    dtypes = [torch.int64, torch.bfloat16, torch.bfloat16, torch.int64, torch.int64, torch.int64]
    cases = [Case(comm, number, dtype, 77) for number, dtype in zip(LATER, dtypes, strict=True)]
    results = [comm.hosts_sum_later(case.piece, number) for case, number in zip(cases, LATER, strict=True)]
    comm.finish()
    assert rounds.made == 2 * 3
    return sum(case.holds(result) for case, result in zip(cases, results, strict=True))


def other_steps(comm: HostCommunicator, rounds: Rounds) -> int:
    """Calls that are wrong on every rank alike say so, and leave the next step as it should be; a failure stays."""
    cases = [Case(comm, number, torch.int64, 5) for number in LATER]
    with pytest.raises(ProgramError, match="site 0 was given, site 5 is next"):
        comm.hosts_sum_later(cases[1].piece, 0)
    with pytest.raises(ProgramError, match="0 of 6 were given, site 5 is next"):
        comm.finish()
    with pytest.raises(ProgramError, match=r"rank \d of host \d holds \(1, 2, 3\)"):
        comm.hosts_sum_later(torch.zeros(1, 2, 3), 5)
    comm.hosts_sum_later(cases[0].piece.bool(), 5)
    with pytest.raises(ProgramError, match="1 of 6 were given, site 0 is next"):
        comm.finish()
    comm.observers.pace = pace = Pace()
    comm.hosts_sum(cases[0].piece, 5)
    assert pace.said == ["settle", "resume"] * 2  # in between it adds
    results = [comm.hosts_sum_later(case.piece, number) for case, number in zip(cases, LATER, strict=True)]
    comm.finish()
    assert pace.said[4:] == ["settle", "resume"] * 6  # three bundles, and the wait for each
    compared = sum(case.holds(result) for case, result in zip(cases, results, strict=True))
    rounds.broken, rounds.made = True, 0
    for _ in range(2):  # when one exchange has failed the ranks may be anywhere in it: there is no other
        for case, number in zip(cases, LATER, strict=True):
            comm.hosts_sum_later(case.piece, number)
        with pytest.raises(ProgramError, match="site 5 was given, none is next"):
            comm.hosts_sum_later(cases[0].piece, 5)
        with pytest.raises(RuntimeError, match="the cable is out"):
            comm.finish()
        for lane, _ in comm._sum_lanes:  # another bundle may just have begun
            lane.submit(lambda: None).wait()
        rounds.broken = False
    assert rounds.made == 0
    return compared


@pytest.mark.parametrize("hosts", [(3, 2, 1), (2, 1), (1, 1)])
def test_sums_over_hosts_are_those_of_the_whole_tensors(hosts: Hosts) -> None:
    assert run_ranks(sum(hosts), sums_of_all_kinds, hosts) == [8 * len(SITES)] * sum(hosts)


def hosts_for_themselves(rank: int, hosts: Hosts) -> list[float]:
    """Each host makes calls that the others do not; first values come from the world's rank 0."""
    comm = HostCommunicator(dist.group.WORLD, hosts, [])
    layout = Layout(0, 1, 1, tuple(range(1, comm.world_size + 1)))
    mine = torch.full(layout.local_shape((layout.shard.extent,), comm.rank), float(rank))
    found = []
    if comm.host == 0:
        summed = [comm.start("all_reduce", [torch.tensor([float(rank)])], [()], "ring") for _ in range(3)]
        found = [float(comm.wait(pending)[0]) for pending in summed]
    gathered = [comm.start("all_gather", [mine], [(layout,)], "all_to_all") for _ in range(comm.host + 1)]
    found += [float(comm.wait(pending)[0].sum()) for pending in gathered]
    assert comm.from_rank_zero(f"from {rank}") == "from 0"
    assert comm.broadcast(torch.full((2, 3), float(rank))).eq(0).all()
    comm.finish()  # nothing was to come
    return found


def test_inside_of_a_host_no_other_is_needed() -> None:
    # Host 0: ranks 0 and 1, which hold one and two elements; host 1: ranks 2 and 3.
    first, second = [1.0, 1.0, 1.0, 2.0], [2.0 + 2 * 3.0] * 2
    assert run_ranks(4, hosts_for_themselves, (2, 2)) == [first, first, second, second]


def one_rank_differs(rank: int, what: str) -> bool:
    """In check mode sums are there at once; on the other host something is not as on the first."""
    module.all_to_all = rounds = Rounds()
    site = Site((4, 3), (None, None))
    comm = HostCommunicator(dist.group.WORLD, (1, 1), [site, site], later=(0, 1), check=True)
    results = [comm.hosts_sum_later(torch.full((4, 3), 1.0 + rank), number) for number in (0, 1)]
    assert all(result.eq(3).all() for result in results) and rounds.made == 4
    comm.finish()
    number = rank if what == "site" else 0
    piece = torch.zeros((4, 4) if (what, rank) == ("shape", 1) else (4, 3))
    comm.hosts_sum(piece.double() if (what, rank) == ("dtype", 1) else piece, number)
    return True


@pytest.mark.parametrize(
    ("what", "theirs", "ours"),
    [("site", r"\(1, ", r"\(0, "), ("dtype", "float64", "float32"), ("shape", r"\(4, 4\)", r"\(4, 3\)")],
)
def test_check_mode_names_the_rank_that_differs(what: str, theirs: str, ours: str) -> None:
    with pytest.raises(RankError, match=f"ProgramError: hosts_sum: rank 1 has .*{theirs}.* rank 0 has .*{ours}"):
        run_ranks(2, one_rank_differs, what)


def test_one_host_of_one_rank_needs_no_process_group() -> None:
    comm = HostCommunicator(None, (1,), sites_of((1,)), later=LATER)
    for _ in range(2):
        pieces = [torch.randn(comm.sites[number].shape) for number in LATER]
        results = [comm.hosts_sum_later(piece, number) for piece, number in zip(pieces, LATER, strict=True)]
        comm.finish()
        for piece, result in zip(pieces, results, strict=True):
            assert torch.equal(piece, result) and result is not piece
    assert torch.equal(comm.hosts_sum(pieces[0], LATER[0]), pieces[0])
    assert comm.from_rank_zero(7) == 7 and math.isclose(float(comm.broadcast(torch.tensor(2.5))), 2.5)


def test_hosts_of_another_number_of_ranks_are_refused() -> None:
    for hosts in ((2,), (1, 1), (), (1, 0)):
        with pytest.raises(ProgramError, match="the job has 1"):
            HostCommunicator(None, hosts, [])


def test_a_site_that_does_not_fit_its_hosts_is_refused() -> None:
    with pytest.raises(ProgramError, match="2 layouts for 1 hosts"):
        HostCommunicator(None, (1,), [Site((3,), (None, None))])


def test_steps_that_leave_sums_out_are_refused_where_nothing_is_sent_too() -> None:
    comm = HostCommunicator(None, (1,), sites_of((1,)), later=LATER)
    with pytest.raises(ProgramError, match="site 0 was given, site 5 is next"):
        comm.hosts_sum_later(torch.zeros(14, 12), 0)
    with pytest.raises(ProgramError, match="0 of 6 were given"):
        comm.finish()
