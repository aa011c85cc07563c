"""NCCL's tuner by hand: eight A100 with NVLink at 240 GB/s, and two hosts of them on a 25 GB/s network."""

import pytest

from hap.cost_models.nccl import Communicator, fastest, seconds

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
