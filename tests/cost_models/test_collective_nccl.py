"""Conversions as NCCL would perform them: its own calls by its own model, messages by rounds, and what the search
relies on."""

from collections.abc import Sequence

import numpy as np
import pytest

from hap.cluster import ClusterSpec
from hap.cost_models.collective import candidates, collective_coefficients, collective_seconds, formula_coefficients
from hap.cost_models.collective_form import CALL_S
from hap.cost_models.collective_nccl import priced_by, speech
from hap.cost_models.fold import fold
from hap.cost_models.nccl import fastest
from hap.placement import PARTIAL, REPLICATE, Placement, Shard
from hap.plan import Collective
from hap.routes import SEGMENT_BYTES
from tests.cost_models.build import assert_concave

ROWS, COLUMNS = Shard(0, 1, 16, 1, "g"), Shard(1, 1, 16, 1, "g")
SIDES: dict[Collective, tuple[Placement, Placement]] = {
    "all_reduce": (PARTIAL, REPLICATE),
    "all_gather": (ROWS, REPLICATE),
    "reduce_scatter": (PARTIAL, ROWS),
}
US = 1e-6


def cluster(*hosts: str, network: str = "25GB/s", latency: str = "1us", backend: str = "nccl") -> ClusterSpec:
    """``"A100-40GB 4 nvlink"``: that many on one host. Memory so fast that copies cost nothing."""
    body = ""
    for i, host in enumerate(hosts):
        gpu, count, link = host.split(" ", 2)
        device = f"{{gpu: {gpu}, count: {count}, memory_bandwidth: 1000000TB/s, launch: 0s}}"
        body += f"  - {{name: h{i}, devices: [{device}], link: {link}, "
        body += f"network: {{bandwidth: {network}, latency: {latency}}}}}\n"
    return ClusterSpec.from_yaml(f"backend: {backend}\nhosts:\n{body}")


DGX = cluster("A100-40GB 8 nvlink")
PAIR = cluster("A100-40GB 4 nvlink", "V100-16GB 4 nvlink")


def seconds(kind: Collective, way: str, nbytes: int, on: ClusterSpec, sizes: Sequence[int] = (2,) * 8) -> float:
    source, target = SIDES[kind]
    return collective_seconds(kind, way, nbytes, source, target, {"g": tuple(sizes)}, on)


# ------------------------------------------------------------------------------------------------ who is asked


def test_the_cluster_says_what_nccl_asks() -> None:
    """The oldest of the GPUs, the slowest link inside a host, LL128 for none but equals on NVLink."""
    found = speech(DGX)
    assert found is not None
    assert (found.comm.ranks, found.comm.hosts, found.comm.inside, found.comm.generation) == (8, 1, "nvlink", "ampere")
    assert found.comm.bus_bytes_per_s == pytest.approx(240e9) and found.comm.ll128
    mixed = speech(
        cluster("A100-40GB 4 nvlink", "V100-16GB 4 nvlink", "T4 2 pcie3", network="10Gbit/s", latency="50us")
    )
    assert mixed is not None
    assert (mixed.comm.generation, mixed.comm.inside, mixed.comm.ll128) == ("volta", "pcie", False)
    assert (mixed.comm.hosts, mixed.comm.most_on_a_host, mixed.comm.network_latency_s) == (3, 4, 50e-6)
    assert mixed.comm.bus_bytes_per_s == pytest.approx(1.25e9)


@pytest.mark.parametrize(
    "unknown",
    [
        cluster("MI300X 4 xgmi"),
        cluster("A100-40GB 4 nvlink", "MI300X 4 xgmi"),
        cluster("A100-40GB 4 {bandwidth: 240GB/s, latency: 3us}"),
        cluster("A100-40GB 8 nvlink", backend="gloo"),
    ],
)
def test_where_nccl_or_a_link_is_unknown_the_plain_form_stays(unknown: ClusterSpec) -> None:
    assert speech(unknown) is None
    n = unknown.world_size
    found = seconds("all_reduce", "ring", 240_000_000, unknown)
    wire = 2 * (n - 1) / n * 240e6 * unknown.fabric.ring_s_per_byte
    assert found > CALL_S[unknown.backend] + wire
    assert found == pytest.approx(wire, rel=0.06)


def test_a_plan_says_which_form_it_was_made_with() -> None:
    assert priced_by(PAIR) == (
        "collectives take what NCCL's own model expects: volta, nvlink inside hosts, its least of rings and trees",
    )
    (words,) = priced_by(cluster("MI300X 4 xgmi"))
    assert words.startswith("collectives take latency and bandwidth alone")
    assert priced_by(cluster("A100-40GB 8 nvlink", backend="gloo")) == ()


def test_gpus_of_one_host_each_need_no_link_inside() -> None:
    alone = cluster("A100-40GB 1 {bandwidth: 240GB/s, latency: 3us}", "A100-40GB 1 nvlink")
    found = speech(alone)
    assert found is not None and found.comm.inside is None


# ------------------------------------------------------------------------------------------------ NCCL's own calls


@pytest.mark.parametrize(
    ("nbytes", "us"),
    [
        (877, 15.0 + 1.75 * 877e-3 / 87.7),  # LL: 6.6 + 14 * 0.6
        (22_080_000, 40.6 + 175.0),  # LL128: 14 + 14 * 1.9; 220.8 GB/s
        (2_400_000_000, 56.0 + 17500.0),  # Simple: 8.4 + 14 * 3.4; 240 GB/s
    ],
)
def test_an_all_reduce_takes_the_protocol_that_is_fastest(nbytes: int, us: float) -> None:
    assert seconds("all_reduce", "ring", nbytes, DGX) == pytest.approx(us * US)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_padding_pays_for_the_largest_shard(kind: Collective) -> None:
    """Simple: 8.4 + 7 * 3.4 = 32.2 us; 7 steps of a quarter (4 of 16), not an eighth, of 2.4 GB at 240 GB/s."""
    assert seconds(kind, "padded", 2_400_000_000, DGX) == pytest.approx((32.2 + 8750) * US)
    uneven = (4, 2, 2, 2, 2, 2, 1, 1)
    assert seconds(kind, "padded", 2_400_000_000, DGX, uneven) == pytest.approx((32.2 + 17500) * US)


def test_a_small_gather_has_the_latency_of_ll() -> None:
    """6.6 + 7 * 0.6 = 10.8 us."""
    assert seconds("all_gather", "padded", 8, DGX) == pytest.approx(10.8 * US, rel=1e-3)


def test_broadcasts_are_calls_of_their_own() -> None:
    """8 calls by LL: 8 * 6.6 + 7 * 0.6 = 57 us; by Simple 8 * 8.4 + 7 * 3.4 = 91 us and every byte past each rank once,
    whoever owns it."""
    assert seconds("all_gather", "broadcast", 8, DGX) == pytest.approx(57.0 * US, rel=1e-3)
    for sizes in ((2,) * 8, (16, 0, 0, 0, 0, 0, 0, 0)):
        assert seconds("all_gather", "broadcast", 2_400_000_000, DGX, sizes) == pytest.approx((91.0 + 10000) * US)


def test_the_slowest_host_sets_the_pace() -> None:
    """Volta beside Ampere: no LL128; over two hosts 14 steps, 2 of which cross at 14 us, the others 3.4; 1.9 times
    that: 1.9 * (8.4 + 12 * 3.4 + 2 * 14) = 146.68 us. All edges but the network's are faster: 25 GB/s."""
    found = speech(PAIR)
    assert found is not None
    assert fastest("all_reduce", 25e9, found.comm).protocol == "Simple"
    assert seconds("all_reduce", "ring", 25_000_000_000, PAIR) == pytest.approx((146.68 + 1.75e6) * US)


# ------------------------------------------------------------------------------------------------ messages


def test_messages_of_a_call_wait_side_by_side() -> None:
    """One call by Simple, 8.4 us, and its longest hop: 3.4 on one host, 14 to the other, where the three messages after
    the first are handed over at 3 us each."""
    assert seconds("all_gather", "all_to_all", 0, DGX) == pytest.approx((8.4 + 3.4) * US)
    assert seconds("all_gather", "all_to_all", 0, PAIR) == pytest.approx((8.4 + 14 + 3 * 3) * US)
    slow = cluster("A100-40GB 4 nvlink", "V100-16GB 4 nvlink", latency="25us")  # 20 us above LL's hop
    assert seconds("all_gather", "all_to_all", 0, slow) == pytest.approx((8.4 + 34 + 3 * 3) * US)
    assert collective_seconds("all_to_all", "direct", 0, ROWS, COLUMNS, {"g": (2,) * 8}, slow) == pytest.approx(
        51.4 * US
    )


def test_every_round_is_a_call() -> None:
    """Up and down are two; 100 segments in turns of 8 owners are 12.5 rounds more. What the stream of messages takes
    beside that is the plain form's: one latency each way, the segment that is up before any goes down, the ports."""
    way, nbytes = "owners[0,1,2,3,4,5,6,7]", 100 * SEGMENT_BYTES
    round_s = (8.4 + 3.4) * US
    wire = nbytes * 2 * 7 / 8 / 240e9 + SEGMENT_BYTES / 240e9
    assert seconds("all_reduce", way, nbytes, DGX) == pytest.approx(2 * round_s + wire + 12.5 * round_s)


def test_a_relay_calls_for_every_segment_of_the_largest_shard() -> None:
    """Depth 2; 64 segments in all, 4 of 16 atoms are 16 of them. An even shard has 8, which wait 14 us each."""
    nbytes, sizes = 64 * SEGMENT_BYTES, (4, 2, 2, 2, 2, 2, 1, 1)
    form, small = (
        collective_coefficients("all_gather", "relay[0,1]", n, *SIDES["all_gather"], PAIR) for n in (nbytes, 8)
    )
    assert form.stages[-1].seconds(np.array(sizes) / 16, np.zeros(8)) == pytest.approx(16 * 8.4 * US)
    again = SEGMENT_BYTES / 25e9  # the last segment once more
    assert form.constant_s - small.constant_s == pytest.approx(8 * 14 * US + again, rel=1e-4)


# ------------------------------------------------------------------------------------------------ what search needs

GRID = [1, 4 << 10, 50_000, 256 << 10, 1 << 20, 3_000_000, 16 << 20, 100_000_000, 1 << 30, 1 << 34]
MANY = cluster(*["A100-40GB 8 nvlink"] * 5, network="20GB/s", latency="10us")  # LL128 wins up to a gigabyte


@pytest.mark.parametrize("on", [DGX, PAIR, MANY], ids=["host", "pair", "five hosts"])
@pytest.mark.parametrize("kind", list(SIDES))
def test_constants_are_concave_and_stages_proportional(kind: Collective, on: ClusterSpec) -> None:
    """So that a straight line between two sizes is never above the seconds, whatever the shares."""
    for way in candidates(kind, on):
        forms = [collective_coefficients(kind, way, nbytes, *SIDES[kind], on) for nbytes in GRID]
        assert_concave(GRID, [form.constant_s for form in forms], way)
        for form, nbytes in zip(forms, GRID, strict=True):
            for stage, other in zip(form.stages, forms[-1].stages, strict=True):
                for table in ("constant", "by_source", "by_target"):
                    scaled = getattr(other, table) * (nbytes / GRID[-1])
                    assert np.allclose(getattr(stage, table), scaled, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("kind", "share"), [("all_gather", 0.5), ("reduce_scatter", 0.5), ("all_reduce", 1.0)])
def test_no_way_beats_the_wire(kind: Collective, share: float) -> None:
    """Into a host comes the half of the value that its ranks lack, of sums as many bytes as there are."""
    for way in candidates(kind, PAIR):
        assert seconds(kind, way, 10**9, PAIR) >= share * 10**9 / 25e9


def test_folded_ranks_cost_what_ranks_do() -> None:
    large = cluster(*["A100-40GB 8 nvlink"] * 6, *["V100-16GB 8 nvlink"] * 4, latency="20us")
    folded = fold(large)
    assert folded is not None
    for kind, (source, target) in SIDES.items():
        for way in candidates(kind, folded):
            for nbytes in (1 << 10, 1 << 20, 1 << 30):
                whole = formula_coefficients(kind, way, nbytes, source, target, large)
                classes = formula_coefficients(kind, way, nbytes, source, target, folded)
                even = np.full(80, 1 / 80), np.full(2, 1 / 80)
                expected = whole.seconds(even[0], even[0])
                assert classes.seconds(even[1], even[1]) == pytest.approx(expected, rel=1e-9), (kind, way)
