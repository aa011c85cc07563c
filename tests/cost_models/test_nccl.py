"""NCCL's tuner by hand: eight A100 with NVLink at 240 GB/s, and two hosts of them on a 25 GB/s network."""

import pytest

from hap.cost_models.nccl import Communicator, fastest, generation_of, seconds

ONE = Communicator(8, 1, "nvlink", 240e9, "ampere")
TWO = Communicator(16, 2, "nvlink", 25e9, "ampere")


def test_a_ring_all_reduce_has_fourteen_steps_and_moves_seven_quarters() -> None:
    """Simple: 8.4 + 14 * 3.4 = 56.0 us; 1.75 * 240 MB / 240 GB/s = 1750 us."""
    assert seconds("all_reduce", "ring", "Simple", 240e6, ONE) == pytest.approx(1806e-6)


def test_an_all_gather_is_half_of_it() -> None:
    """8.4 + 7 * 3.4 = 32.2 us; 0.875 * 240 MB / 240 GB/s = 875 us. A reduce-scatter alike."""
    assert seconds("all_gather", "ring", "Simple", 240e6, ONE) == pytest.approx(907.2e-6)
    assert seconds("reduce_scatter", "ring", "Simple", 240e6, ONE) == pytest.approx(907.2e-6)


def test_ll_has_little_latency_and_at_most_its_cap() -> None:
    """6.6 + 14 * 0.6 = 15.0 us; half of 240 GB/s is more than Ampere's 87.7: 1.75 * 877 kB / 87.7 GB/s = 17.5 us."""
    assert seconds("all_reduce", "ring", "LL", 877e3, ONE) == pytest.approx(32.5e-6)


def test_ll128_carries_120_bytes_in_128() -> None:
    """14 + 14 * 1.9 = 40.6 us; 0.92 * 240 = 220.8 GB/s: 1.75 * 22.08 MB / 220.8 GB/s = 175 us."""
    assert seconds("all_reduce", "ring", "LL128", 22.08e6, ONE) == pytest.approx(215.6e-6)


def test_a_tree_goes_up_and_down() -> None:
    """LL on one host: 6.8 + 2 * 7 * 0.6 = 15.2 us; 220.8 / 3.8 = 58.1 GB/s, below the cap: 2 * 581 kB = 20 us."""
    assert seconds("all_reduce", "tree", "LL", 220.8e9 / 3.8 * 1e-5, ONE) == pytest.approx(35.2e-6)
    # Simple on two hosts: 8.4 + 2 * (7 * 4.0 + 1 * 14.0) = 92.4 us; 2 * 23 MB / (0.92 * 25 GB/s) = 2000 us
    assert seconds("all_reduce", "tree", "Simple", 23e6, TWO) == pytest.approx(2092.4e-6)


def test_between_hosts_two_steps_cross_the_network_and_simple_waits_longer() -> None:
    """LL128: 14 + (30 - 2) * 1.9 + 2 * 4.0 = 75.2 us; 30/16 * 23 MB / 23 GB/s = 1875 us.
    Simple: 1.4 * (8.4 + 28 * 3.4 + 2 * 14) = 184.24 us; 30/16 * 25 MB / 25 GB/s = 1875 us."""
    assert seconds("all_reduce", "ring", "LL128", 23e6, TWO) == pytest.approx(1950.2e-6)
    assert seconds("all_reduce", "ring", "Simple", 25e6, TWO) == pytest.approx((184.24 + 1875) * 1e-6)


@pytest.mark.parametrize(
    ("nbytes", "algorithm", "protocol"), [(1e3, "ring", "LL"), (20e6, "ring", "LL128"), (1e9, "ring", "Simple")]
)
def test_larger_messages_take_protocols_of_more_latency(nbytes: float, algorithm: str, protocol: str) -> None:
    found = fastest("all_reduce", nbytes, ONE)
    assert (found.algorithm, found.protocol) == (algorithm, protocol)


def test_over_many_hosts_a_tree_wins_while_messages_are_small() -> None:
    """64 hosts: a ring has 2 * 63 steps on the network, a tree 2 * 6."""
    many = Communicator(512, 64, "nvlink", 25e9, "hopper")
    assert fastest("all_reduce", 1e5, many).algorithm == "tree"
    assert fastest("all_gather", 1e5, many).algorithm == "ring"


def test_one_rank_waits_for_nobody() -> None:
    assert fastest("all_reduce", 1e9, Communicator(1, 1, "pcie", 1e9, "volta")).seconds == 0.0


def test_a_rank_alone_on_its_host_waits_for_every_hop() -> None:
    """6.6 + 3 * 5.0, the tree's hop. Of 25 us stated count the 20 that LL's hop has not: 6.6 + 3 * 25, and by Simple
    8.4 + 3 * (14 + 20)."""
    alone, far = (Communicator(4, 4, None, 1e9, "ampere", network_latency_s=s) for s in (3e-6, 25e-6))
    assert seconds("all_gather", "ring", "LL", 0, alone) == pytest.approx(21.6e-6)
    assert seconds("all_gather", "ring", "LL", 0, far) == pytest.approx(81.6e-6)
    assert seconds("all_gather", "ring", "Simple", 0, far) == pytest.approx(110.4e-6)


def test_steps_inside_hosts_are_handed_to_the_network_too() -> None:
    """Not 0.6 but 1 us for each of 14 steps, and one between hosts: 6.6 + 14 + 2.7."""
    assert seconds("all_gather", "ring", "LL", 0, TWO) == pytest.approx(23.3e-6)


def test_the_largest_host_has_the_longest_chain() -> None:
    """Of 8 and 2: 6.8 + 2 * (7 * 0.6 + 5.0). Five hosts are two levels of a tree: 6.8 + 2 * (0.6 + 2 * 5.0)."""
    uneven = Communicator(10, 2, "nvlink", 25e9, "ampere", most_on_a_host=8)
    assert seconds("all_reduce", "tree", "LL", 0, uneven) == pytest.approx(25.2e-6)
    five = Communicator(10, 5, "nvlink", 25e9, "ampere")
    assert seconds("all_reduce", "tree", "LL", 0, five) == pytest.approx(28.0e-6)


def test_ll_between_hosts_has_the_cap_of_the_slower_processor() -> None:
    """15 / 16 of 22.5 MB at 22.5 GB/s, not half of 100."""
    fast = Communicator(16, 2, "nvlink", 100e9, "hopper")
    assert seconds("all_gather", "ring", "LL", 22.5e6, fast) == pytest.approx(23.3e-6 + 937.5e-6)


def test_unlike_gpus_do_without_ll128() -> None:
    mixed = Communicator(8, 1, "nvlink", 240e9, "ampere", ll128=False)
    assert {fastest("all_reduce", 10.0**k, mixed).protocol for k in range(1, 11)} == {"LL", "Simple"}


@pytest.mark.parametrize(
    ("capability", "column"),
    [(60, "volta"), (75, "volta"), (80, "ampere"), (89, "ampere"), (90, "hopper"), (103, "blackwell")],
)
def test_generations_are_those_of_the_tables(capability: int, column: str) -> None:
    assert generation_of(capability) == column
