"""Links with a curve: what a message waits for by its size, in every form, and never above a straight line."""

from collections.abc import Mapping

import numpy as np
import pytest

from hap.cluster import ClusterSpec
from hap.cost_models.collective import candidates, collective_coefficients, collective_seconds
from hap.cost_models.collective_delays import concave
from hap.cost_models.collective_form import CALL_S
from hap.cost_models.fold import fold
from hap.placement import PARTIAL, REPLICATE, Placement, Shard
from hap.plan import Collective
from hap.routes import SEGMENT_BYTES
from tests.cost_models.build import assert_concave

ROWS, COLUMNS = Shard(0, 1, 16, 1, "g"), Shard(1, 1, 16, 1, "g")
SIDES: dict[Collective, tuple[Placement, Placement]] = {
    "all_reduce": (PARTIAL, REPLICATE),
    "all_gather": (ROWS, REPLICATE),
    "reduce_scatter": (PARTIAL, ROWS),
    "all_to_all": (ROWS, COLUMNS),
}
CALL = CALL_S["gloo"]
CURVE = "curve: {100kB: 250MB/s, 1MB: 500MB/s}"  # 1 GB/s: 100 kB take 0.4 ms, not 0.1; 1 MB takes 2 ms, not 1


def cluster(curves: Mapping[int, str], hosts: int = 4, count: int = 1) -> ClusterSpec:
    """Hosts with 1 GB/s; ``curves`` by number. Memory so fast that copies cost nothing."""
    device = f"{{tflops: {{float32: 1}}, memory: 1GB, memory_bandwidth: 1000000TB/s, launch: 0s, count: {count}}}"
    link = "link: {bandwidth: 10GB/s, latency: 0s}, " if count > 1 else ""
    network = "network: {bandwidth: 1GB/s, latency: 0s, "
    body = "".join(
        f"  - {{name: h{i}, devices: [{device}], {link}{network}{curves.get(i, '')}}}}}\n" for i in range(hosts)
    )
    return ClusterSpec.from_yaml(f"backend: gloo\nhosts:\n{body}")


SLOW = cluster(dict.fromkeys(range(4), CURVE))


def seconds(kind: Collective, way: str, nbytes: int, on: ClusterSpec = SLOW) -> float:
    return collective_seconds(kind, way, nbytes, *SIDES[kind], {"g": (4, 4, 4, 4)}, on)


@pytest.mark.parametrize(
    ("nbytes", "ms"),
    [
        (400_000, 3 * 0.4),  # three steps of 100 kB
        (4_000_000, 3 * 2.0),  # of 1 MB
        (40_000_000, 3 * (10.0 + 1.0)),  # of 10 MB: beyond the curve the delay stays, 1 ms
        (2_200_000, 3 * (0.55 + 0.3 + 0.7 * 0.5)),  # of 550 kB, half-way: between delays of 0.3 and 1 ms
        (200_000, 3 * (0.05 + 0.15)),  # of 50 kB: half of the first
    ],
)
def test_a_ring_waits_in_every_step(nbytes: int, ms: float) -> None:
    assert seconds("all_gather", "padded", nbytes) == pytest.approx(CALL + ms * 1e-3)


def test_one_slow_host_slows_the_ring() -> None:
    one = cluster({2: CURVE})
    assert seconds("all_reduce", "ring", 4_000_000, one) == pytest.approx(CALL + 6 * 2e-3)


def test_messages_are_pieces() -> None:
    """An all-to-all of 1.6 MB sends 100 kB to each of three; pairs that gather 400 kB do so, too."""
    wire = 3 * 100_000 / 1e9
    assert seconds("all_gather", "pairs", 400_000) == pytest.approx(CALL + 0.3e-3 + wire)
    assert seconds("all_to_all", "pairs", 1_600_000) == pytest.approx(CALL + 3 * 0.3e-3 + wire)


def test_what_is_passed_on_goes_in_segments() -> None:
    """Of 131,072 bytes: 0.3 ms and 31,072 of 900,000 parts of the 0.7 ms more that 1 MB waits."""
    plain = cluster({})
    delay = 0.3e-3 + 31_072 / 900_000 * 0.7e-3
    assert SEGMENT_BYTES == 131_072
    found = seconds("all_gather", "ring", 40_000_000)
    assert found - seconds("all_gather", "ring", 40_000_000, plain) == pytest.approx(3 * delay)


def test_a_link_of_two_hosts_has_its_own() -> None:
    body = cluster({}).to_yaml() + f"links: [{{from: h1, to: h2, bandwidth: 1GB/s, {CURVE}}}]\n"
    one = ClusterSpec.from_yaml(body)
    assert seconds("all_gather", "padded", 4_000_000, one) == pytest.approx(CALL + 3 * 2e-3)
    back = ClusterSpec.from_yaml(body.replace("from: h1, to: h2", "from: h2, to: h1"))
    assert seconds("all_gather", "padded", 4_000_000, back) == pytest.approx(CALL + 3e-3)  # the ring goes the other way


def test_the_lowest_curve_that_bends_down() -> None:
    points = [(0.0, 0.0), (1.0, 1.0), (2.0, 1.5), (3.0, 3.0), (4.0, 3.5), (5.0, 2.0)]
    assert concave(points) == [(0.0, 0.0), (3.0, 3.0), (4.0, 3.5)]


BENT = "curve: {10kB: 50MB/s, 1MB: 600MB/s, 30MB: 700MB/s}"  # delays of 0.19, 0.67 and 12.9 ms bend up
GRID = [1, 4 << 10, 50_000, 256 << 10, 1 << 20, 3_000_000, 16 << 20, 100_000_000, 1 << 30, 1 << 34]


@pytest.mark.parametrize("kind", list(SIDES))
def test_constants_are_concave_and_stages_as_before(kind: Collective) -> None:
    on, plain = cluster({0: CURVE, 1: BENT, 3: BENT}), cluster({})
    for way in candidates(kind, on):
        forms = [collective_coefficients(kind, way, nbytes, *SIDES[kind], on) for nbytes in GRID]
        assert_concave(GRID, [form.constant_s for form in forms], way)
        for form, nbytes in zip(forms, GRID, strict=True):
            same = collective_coefficients(kind, way, nbytes, *SIDES[kind], plain)
            assert form.constant_s >= same.constant_s
            for stage, other in zip(form.stages, same.stages, strict=True):
                assert (stage.by_source == other.by_source).all() and (stage.by_target == other.by_target).all()


def test_folded_ranks_cost_what_ranks_do() -> None:
    large = cluster(dict.fromkeys(range(0, 10, 2), CURVE), hosts=10, count=8)
    folded = fold(large)
    assert folded is not None
    even = np.full(80, 1 / 80), np.full(folded.world_size, 1 / 80)
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        source, target = SIDES[kind]
        for way in candidates(kind, folded):
            for nbytes in (1 << 10, 1 << 20, 1 << 30):
                whole = collective_coefficients(kind, way, nbytes, source, target, large).seconds(even[0], even[0])
                classes = collective_coefficients(kind, way, nbytes, source, target, folded)
                assert classes.seconds(even[1], even[1]) == pytest.approx(whole, rel=1e-9)


def test_where_a_link_has_a_curve_it_says_how_nccl_does() -> None:
    text = "{name: %s, devices: [{gpu: V100-16GB}], network: {bandwidth: 1GB/s, latency: 0s, %s}}"
    nccl = ClusterSpec.from_yaml(f"hosts: [{text % ('a', '')}, {text % ('b', '')}]")
    measured = ClusterSpec.from_yaml(f"hosts: [{text % ('a', CURVE)}, {text % ('b', '')}]")
    assert nccl.nvidia is not None and measured.nvidia is None
