"""The parts of ``benchmarks/planning_sailor.py``: samples dealt out exactly, and collectives beside compute."""

import itertools
import random

import pytest

from benchmarks.planning_sailor import LAYERS, Layer, Worker, beside_seconds, deal, parameter_bytes


def worker(forward_s, backward_s, most=1):
    """A device that takes so long per sample and layer, whatever the microbatch."""
    return Worker({m: (Layer(m * forward_s, m * backward_s, 0.0),) * LAYERS for m in range(1, most + 1)}, most)


def test_nine_samples_on_two_fast_devices_and_one_slow():
    fast, slow = worker(0.25 / LAYERS, 0.75 / LAYERS), worker(1.0 / LAYERS, 3.0 / LAYERS)
    assert deal((fast, slow), (2, 1), 9) == ((4, 4), (1,))
    assert deal((fast, slow), (2, 1), 10) == ((4, 5), (1,))


def test_no_deal_is_done_sooner():
    rng = random.Random(1)
    for _ in range(20):
        kinds = tuple(worker(rng.uniform(0.1, 1), rng.uniform(0.1, 2), most=rng.randint(1, 2)) for _ in range(2))
        batch = rng.randint(1, 12)
        dealt = deal(kinds, (2, 1), batch)
        assert sum(map(sum, dealt)) == batch
        found = max(k.seconds(n) for k, g in zip(kinds, dealt, strict=True) for n in g)
        every = [g for g in itertools.product(range(batch + 1), repeat=3) if sum(g) == batch]
        best = min(max(kinds[0].seconds(a), kinds[0].seconds(b), kinds[1].seconds(c)) for a, b, c in every)
        assert found == pytest.approx(best)


def test_the_parameters_are_those_of_the_source():
    assert sum(parameter_bytes()) == pytest.approx(1.63e9, rel=0.01)


def test_collectives_hide_behind_compute_but_for_the_first_gather_and_the_last_reduction():
    device, single = worker(1.0, 2.0), [0] * LAYERS
    assert beside_seconds([(device, 1)], [5.0], [7.0], single) == pytest.approx(5 + 3 * LAYERS + 7)
    halves = [0] * (LAYERS // 2) + [1] * (LAYERS // 2)
    # the second gather arrives at 10, while the first half computes until 5 + 13; the first reduction, of the second
    # half, hides behind the first half's backward pass
    assert beside_seconds([(device, 1)], [5.0, 5.0], [7.0, 7.0], halves) == pytest.approx(5 + 3 * LAYERS + 7)


def test_a_reduction_waits_for_the_last_rank():
    fast, slow, single = worker(1.0, 1.0), worker(2.0, 2.0), [0] * LAYERS
    assert beside_seconds([(fast, 1), (slow, 1)], [0.0], [3.0], single) == pytest.approx(4 * LAYERS + 3)
    assert beside_seconds([(fast, 3), (slow, 1)], [0.0], [3.0], single) == pytest.approx(6 * LAYERS + 3)
