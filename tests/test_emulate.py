"""Emulated devices: the arithmetic of slowdowns and of the throttle, on a clock that the test moves by hand."""

import pytest

from hap.cluster import ClusterSpec, Link
from hap.errors import ClusterError
from hap.runtime import emulate
from hap.runtime.emulate import Core, HostRate, Throttle, emulated_cluster, slowdowns

CLUSTER = """
name: demo
backend: gloo
hosts:
  - name: big
    devices: [{name: fast, count: 2, tflops: {float32: 0.02}, memory: 2GB, memory_bandwidth: 8GB/s}]
    link: {bandwidth: 2GB/s, latency: 50us}
    network: {bandwidth: 4Gbit/s, latency: 100us}
  - name: small
    devices: [{name: slow, tflops: {float32: 0.005}, memory: 1GB, memory_bandwidth: 2GB/s}]
    network: {bandwidth: 4Gbit/s, latency: 100us}
"""


class Clock:
    """Wall and thread CPU time; sleeping overshoots by ``late_s``."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.wall, self.cpu, self.late_s, self.slept = 0.0, 0.0, late_s, 0.0

    def compute(self, seconds: float) -> None:
        self.wall += seconds
        self.cpu += seconds

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.cpu

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.wall += seconds + self.late_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(emulate, "time", clock)
    return clock


def test_a_cores_factor_is_its_standard_over_the_least_that_the_work_takes_now(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.2 s of work by the standard; now 0.5, 0.4 and 0.8 s after one to warm up: half the speed."""
    took = iter((0.1, 0.5, 0.4, 0.8))
    monkeypatch.setattr(Core, "_work", lambda self: clock.compute(next(took)))
    assert Core(0.2).factor() == pytest.approx(0.5)


def test_slowdowns_keep_the_ratios_and_fill_half_of_the_cores() -> None:
    # speeds 4 : 4 : 1; 0.5 * 2 cores = 1 = (1 + 1 + 1/4) / k, so k = 2.25 and the slow one is four times that.
    found = slowdowns(ClusterSpec.from_yaml(CLUSTER), cores=2)
    assert found == pytest.approx((2.25, 2.25, 9.0))
    assert sum(1 / s for s in found) == pytest.approx(1.0)


def test_nothing_is_faster_than_the_host() -> None:
    assert slowdowns(ClusterSpec.from_yaml(CLUSTER), cores=64) == pytest.approx((1.0, 1.0, 4.0))


def test_a_device_without_a_float32_rate_is_refused() -> None:
    cluster = ClusterSpec.from_yaml(CLUSTER.replace("float32: 0.005", "float64: 0.005"))
    with pytest.raises(ClusterError, match="small/slow#0: emulation needs its float32"):
        slowdowns(cluster)


def test_the_played_cluster_has_this_machines_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "usable_cores", lambda: 2.0)
    spec = ClusterSpec.from_yaml(CLUSTER)
    played = emulated_cluster(spec, HostRate(90e9, 18e9, 4e-6), Link(1e9, 3e-4))
    assert [d.name for d in played.devices] == [d.name for d in spec.devices]
    assert [d.memory_bytes for d in played.devices] == [d.memory_bytes for d in spec.devices]
    assert [d.tflops["float32"] for d in played.devices] == pytest.approx([0.04, 0.04, 0.01])
    assert [d.memory_bandwidth_bytes_per_s for d in played.devices] == pytest.approx([8e9, 8e9, 2e9])
    assert [d.launch_s for d in played.devices] == pytest.approx([9e-6, 9e-6, 36e-6])
    assert played.link(0, 1) == played.link(0, 2) == Link(1e9, 3e-4)
    assert ClusterSpec.from_yaml(played.to_yaml()).fingerprint == played.fingerprint


def test_compute_is_stretched(clock: Clock) -> None:
    throttle = Throttle(4.0)
    clock.compute(0.1)
    throttle.settle()
    assert clock.wall == pytest.approx(0.4)
    assert throttle.compute_s == pytest.approx(0.4)


def test_communication_is_not_stretched(clock: Clock) -> None:
    throttle = Throttle(4.0)
    throttle.settle()
    clock.compute(0.2)  # inside the collective
    throttle.resume()
    throttle.settle()
    assert clock.slept == 0.0


def test_waiting_for_a_core_counts_as_slowness(clock: Clock) -> None:
    throttle = Throttle(4.0)
    clock.compute(0.1)
    clock.wall += 0.25  # descheduled
    throttle.settle()
    assert clock.wall == pytest.approx(0.4)


def test_oversleeping_is_taken_off_the_next_sleep(clock: Clock) -> None:
    clock.late_s = 0.0005
    throttle = Throttle(2.0)
    for _ in range(100):
        clock.compute(0.01)
        throttle.settle()
    assert clock.wall == pytest.approx(100 * 0.02, abs=0.002)


def test_a_long_stall_is_not_caught_up(clock: Clock) -> None:
    throttle = Throttle(2.0)
    clock.wall += 5.0
    throttle.settle()
    start = clock.wall
    for _ in range(3):
        clock.compute(0.01)
        throttle.settle()
    assert clock.wall - start == pytest.approx(3 * 0.02 - 0.001)
