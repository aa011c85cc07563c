"""What is added up stage by stage for many sizes is what the sequence yields, to the last bit."""

import numpy as np
import pytest

from hap.conversion import find_needs
from hap.cost_models.compute import DEFAULT_MODEL, Calls
from hap.cost_models.sequence import Local, Pricer, sequence
from hap.cost_models.stages import find_stages
from hap.order import repeats
from tests.cost_models.build import cluster, data_parallel, relu_step

ON = cluster([1000, 700, 300], tflops=[2e-9, 1e-9, 3e-10], memory_bandwidth="1kB/s", launch="1ms")


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("repeated", [(), ("a", "b")])
@pytest.mark.parametrize("batch", [(5, 2, 1), (8, 0, 0), (0, 7, 1)])
def test_as_the_sequence_has_it(sharded: bool, repeated: tuple[str, ...], batch: tuple[int, ...]) -> None:
    graph, strategies = relu_step(), data_parallel(sharded_parameter=sharded)
    sizes = {"batch": batch, **({"kept": (1, 2, 1)} if sharded else {})}
    needs, calls = find_needs(graph, strategies), Calls(graph)
    again = repeats(graph, strategies, repeated)
    costs = Pricer(graph, sizes, ON).price(needs)
    total, stage, ended = np.zeros(3), np.zeros(3), 0.0
    for item in sequence(graph, strategies, sizes, ON, costs, DEFAULT_MODEL, calls, again):
        if isinstance(item, Local):
            stage = stage + item.seconds
        else:
            ended, total, stage = ended + float(stage.max()), total + stage, np.zeros(3)
    found = find_stages(graph, strategies, needs, calls, again)
    compute_s, stages_s, last_s = found.seconds(sizes, ON, costs, DEFAULT_MODEL)
    assert compute_s.tolist() == (total + stage).tolist()
    assert (stages_s, last_s.tolist()) == (ended, stage.tolist())
    collectives = [i for i, need in enumerate(needs) if need.collective != "slice"]
    assert sorted(found.between) == collectives and found.count == len(collectives) + 1


def test_alike_calls_are_one() -> None:
    """The product and the ReLU that are made again for the backward pass are those of the forward pass."""
    graph, strategies = relu_step(), data_parallel()
    needs, calls = find_needs(graph, strategies), Calls(graph)
    once = find_stages(graph, strategies, needs, calls)
    twice = find_stages(graph, strategies, needs, calls, repeats(graph, strategies, ("a", "b")))
    assert len(twice.work) == len(once.work) + 2 and twice.calls == once.calls
