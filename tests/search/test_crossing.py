"""What an all-to-all between two groups takes at least where nothing is known of either but who has most."""

import numpy as np
import pytest

from hap.search.crossing import Port, seconds_apart

RATES = {
    "two alike": [3.0, 3.0],
    "one quick": [12.5, 3.1],
    "two slow": [12.5, 3.1, 3.1],
    "three kinds": [12.5, 3.1, 3.1, 1.25],
    "two quick": [10.0, 10.0, *[1.0] * 6],
    "one slow": [10.0, 9.0, 1.0],
    "eight": [1.0] * 8,
    "many": [1.0] * 100,
}


def drawn(rng: np.random.Generator, hosts: int) -> np.ndarray:
    """(1000, H): shares of hosts, some without any."""
    found = rng.dirichlet(np.full(hosts, rng.choice([0.1, 0.3, 1, 3, 10, 100])), 1000)
    found = np.where(rng.random(found.shape) < rng.choice([0, 0, 0.3, 0.6]), 1e-12, found)
    return found / found.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("name", RATES)
def test_no_two_groups_take_less(name: str) -> None:
    rate, rng, nearest = np.array(RATES[name]), np.random.default_rng(5), np.inf
    apart_s, beside_s = seconds_apart([Port((i,), 1, r, r) for i, r in enumerate(rate.tolist())])
    assert beside_s == pytest.approx(1 / (len(rate) * rate.sum()))
    for _ in range(300):
        x, y = drawn(rng, len(rate)), drawn(rng, len(rate))
        alike = rng.choice([0, 0, 0.01, 0.1, 0.5, 1.0])
        y = alike * y + (1 - alike) * x
        less = (x.max(axis=1) <= y.max(axis=1))[:, None]
        x, y = np.where(less, x, y), np.where(less, y, x)
        seconds = (np.maximum(x * (1 - y), (1 - x) * y) / rate).max(axis=1)
        seconds = np.maximum(seconds, (1 - (x * y).sum(axis=1)) / rate.sum())
        most = x.max(axis=1)
        beside = most - np.take_along_axis(x, y.argmax(axis=1)[:, None], axis=1)[:, 0]
        some = most < 1 - 1e-6
        ratios = (seconds - beside_s * beside)[some] / (1 - most)[some]
        nearest = min(nearest, float(ratios.min(initial=np.inf)))
    assert 0.7 * nearest < apart_s <= nearest * (1 + 1e-9)


def test_ports_that_are_alike_are_one_entry() -> None:
    apart = seconds_apart([Port((0,), 1, 4.0, 4.0), Port((1,), 3, 2.0, 2.0)])
    assert apart == pytest.approx(seconds_apart([Port((i,), 1, r, r) for i, r in enumerate([4.0, 2.0, 2.0, 2.0])]))


@pytest.mark.parametrize("hosts", [2, 8, 128])
def test_of_hosts_alike_all_ways_together_count(hosts: int) -> None:
    apart_s, _ = seconds_apart([Port((0,), hosts, 2.0, 2.0)])
    assert apart_s == pytest.approx(1 / (2.0 * hosts), rel=0.02)
    assert apart_s >= 1 / (2.0 * hosts)
