"""Real beds: namespaces, rates, teardown. Needs root; skipped with the reason where the machine cannot."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.testbed import RankError, Testbed, cgroup, network
from benchmarks.testbed.__main__ import main
from benchmarks.testbed.layout import GOODPUT
from benchmarks.testbed.record import records
from hap.cluster import ClusterSpec

REASON = network.missing()
pytestmark = [pytest.mark.testbed, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

ROOT = Path(__file__).parents[2]
CLUSTER = """
name: pair
backend: gloo
hosts:
  - name: fast
    devices: [{name: fast, tflops: {float32: 0.02}, memory: 1GB, memory_bandwidth: 10GB/s}]
    network: {bandwidth: 400Mbit/s, latency: 250us}
  - name: slow
    devices: [{name: slow, tflops: {float32: 0.01}, memory: 1GB, memory_bandwidth: 5GB/s}]
    network: {up: 100Mbit/s, down: 200Mbit/s, latency: 250us}
"""
FOUR_MB = 4 << 20


@pytest.fixture(scope="module")
def cluster() -> ClusterSpec:
    return ClusterSpec.from_yaml(CLUSTER)


@pytest.fixture(scope="module")
def bed(cluster: ClusterSpec) -> Iterator[Testbed]:
    with Testbed(cluster) as bed:
        yield bed


@pytest.fixture
def cluster_file(tmp_path: Path) -> str:
    path = tmp_path / "pair.yaml"
    path.write_text(CLUSTER)
    return str(path)


def transfer(rank: int, nbytes: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """(begin, end) of sends up (slow to fast) and down (fast to slow), on this machine's one clock."""
    times: dict[str, list[tuple[float, float]]] = {"up": [], "down": []}
    payload = torch.zeros(nbytes, dtype=torch.uint8)
    for _ in range(repeats):
        for direction, source in (("up", 1), ("down", 0)):
            dist.barrier()
            begin = time.perf_counter()
            if rank == source:
                dist.send(payload, 1 - rank)
            else:
                dist.recv(payload, 1 - rank)
            times[direction].append((begin, time.perf_counter()))
    return times


def goodput(results: list[dict[str, list[tuple[float, float]]]], direction: str, nbytes: int = FOUR_MB) -> float:
    """Median bytes/s from the sender's begin to the receiver's end."""
    source = 1 if direction == "up" else 0
    pairs = zip(results[source][direction], results[1 - source][direction], strict=True)
    return nbytes / statistics.median(received[1] - sent[0] for sent, received in pairs)


def fails_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one is out of luck")
    dist.barrier()


def dies_on_one(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def sum_of_ranks(rank: int) -> float:
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return total.item()


def never(rank: int) -> None:
    time.sleep(1000)


def cgroups_of(rank: int) -> str:
    return Path("/proc/self/cgroup").read_text()


def group_of_a_thread(rank: int) -> str:
    """Of one that is born after the quota began to hold this rank."""
    found: list[str] = []

    def look() -> None:
        time.sleep(0.5)
        found.append(Path(f"/proc/self/task/{threading.get_native_id()}/cgroup").read_text())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def own_groups() -> tuple[str, ...]:
    controller = cgroup.find()
    return () if controller is None else cgroup.existing(controller)


def traces(bed_id: str) -> tuple[object, ...]:
    """Whatever is left of a bed."""
    names = tuple(n for n in network.existing() if bed_id in n)
    return (names, tuple(g for g in own_groups() if g == bed_id), tuple(r for r in records() if r.bed_id == bed_id))


def running(argv: list[str]) -> list[int]:
    """Pids whose command line holds all of ``argv``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if words[: len(argv)] == argv:
                found.append(int(entry.name))
    return found


def wait_for(condition: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.05)


def test_rates_hold_within_ten_percent_in_each_direction(bed: Testbed) -> None:
    for attempt in range(3):  # a busy machine only ever makes a transfer slower
        results = bed.run(transfer, FOUR_MB, 3)
        up, down = goodput(results, "up"), goodput(results, "down")
        if (up > 0.9 * 12.5e6 * GOODPUT and down > 0.9 * 25e6 * GOODPUT) or attempt == 2:
            break
    assert up == pytest.approx(12.5e6 * GOODPUT, rel=0.1)
    assert down == pytest.approx(25e6 * GOODPUT, rel=0.1)


def test_ranks_form_one_group_and_return_by_rank(bed: Testbed) -> None:
    assert bed.run(sum_of_ranks) == [3.0, 3.0]


def test_a_rank_that_raises_is_reported_at_once_with_its_traceback(bed: Testbed) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank one is out of luck") as caught:
        bed.run(fails_on_one, timeout=100)
    assert caught.value.rank == 1
    assert time.monotonic() - begin < 10


def test_a_rank_that_dies_is_named_rather_than_those_that_lost_it(bed: Testbed) -> None:
    with pytest.raises(RankError, match=r"rank 1 died without a word \(exit code 3\)") as caught:
        bed.run(dies_on_one, timeout=100)
    assert caught.value.rank == 1


def test_a_rank_that_hangs_runs_into_the_time_limit_and_is_ended(bed: Testbed) -> None:
    with pytest.raises(RankError, match="did not finish"):
        bed.run(never, timeout=1)
    assert [p for h in bed.layout.hosts for p in network.processes(h.namespace)] == []


def test_a_command_runs_as_every_rank(bed: Testbed) -> None:
    assert bed.run(["sh", "-c", "echo $RANK of $WORLD_SIZE at $MASTER_ADDR"]) == [
        "0 of 2 at 10.77.0.1\n",
        "1 of 2 at 10.77.0.1\n",
    ]


def test_a_command_that_fails_stops_the_others_and_shows_its_last_words(bed: Testbed) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1 exited with code 4\nno luck"):
        bed.run(["sh", "-c", "if [ $RANK = 1 ]; then echo no luck; exit 4; fi; sleep 1000"])
    assert time.monotonic() - begin < 10


def test_a_rate_can_change_under_a_running_bed(bed: Testbed) -> None:
    bed.set_rate("slow", "down", 5e6)
    try:
        results = bed.run(transfer, FOUR_MB // 4, 1)
    finally:
        bed.set_rate("slow", "down", 25e6)
    assert goodput(results, "down", FOUR_MB // 4) == pytest.approx(5e6 * GOODPUT, rel=0.1)


def test_counters_of_a_quiet_bed_show_no_drops(bed: Testbed) -> None:
    before = bed.counters()
    bed.run(sum_of_ranks)
    assert (bed.counters() - before).drops == 0


@pytest.mark.skipif(cgroup.find() is None, reason="no cpu cgroup that this process can write")
def test_quota_mode_puts_each_rank_in_a_group_of_its_own_and_leaves_nothing(cluster: ClusterSpec) -> None:
    with Testbed(cluster, "quota") as bed:
        bed_id = bed.layout.bed_id
        for rank, text in enumerate(bed.run(cgroups_of)):
            assert f"hapbed-{bed_id}/r{rank}" in text
        holder = "r1" if bed.controller is not None and bed.controller.version == 2 else "all"
        assert f"hapbed-{bed_id}/{holder}" in bed.run(group_of_a_thread)[1]
    assert traces(bed_id) == ((), (), ())


def test_leaving_by_an_exception_leaves_nothing(cluster: ClusterSpec) -> None:
    with pytest.raises(RankError), Testbed(cluster) as bed:
        bed.run(fails_on_one)
    assert traces(bed.layout.bed_id) == ((), (), ())
    bed.down()  # twice is fine


def test_up_stands_until_down_and_down_twice_is_fine(cluster_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--cluster", cluster_file]) == 0
    bed_id = capsys.readouterr().out.split()[1]
    assert len(traces(bed_id)[0]) == 3  # type: ignore[arg-type]
    assert main(["run", "--cluster", cluster_file, "--", "sh", "-c", "echo I am $RANK on $HAP_TESTBED"]) == 0
    assert f"[rank 1] I am 1 on {bed_id}" in capsys.readouterr().out
    for _ in range(2):
        assert main(["down", bed_id]) == 0
        assert traces(bed_id) == ((), (), ())


def heed_interrupts() -> None:
    """A job that a shell put into the background ignores Ctrl-C, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    "ending", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM, signal.SIGKILL]
)
def test_a_runner_that_is_ended_leaves_nothing_after_down(cluster_file: str, ending: signal.Signals) -> None:
    sleep = ["sleep", f"98{ending.value}.{os.getpid()}"]
    argv = [sys.executable, "-m", "benchmarks.testbed", "run", "--cluster", cluster_file, "--", *sleep]
    runner = subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=heed_interrupts
    )
    try:
        wait_for(lambda: len(running(sleep)) == 2)
        (bed_id,) = (r.bed_id for r in records() if r.owner is not None and r.owner.pid == runner.pid)
        runner.send_signal(ending)
        runner.wait(30)
    finally:
        runner.kill()
        runner.wait()
    wait_for(lambda: running(sleep) == [])
    if ending == signal.SIGKILL:
        assert traces(bed_id)[0] != ()
        assert main(["down", bed_id]) == 0
    assert traces(bed_id) == ((), (), ())


PROGRAM = """
import sys
from benchmarks.testbed import Testbed
from hap.cluster import ClusterSpec
from tests.testbed.test_bed import never
with Testbed(ClusterSpec.load(sys.argv[1]), sys.argv[2]) as bed:
    bed.run(never)
"""


@pytest.mark.parametrize(
    ("mode", "ending"),
    [
        pytest.param("deadline", signal.SIGKILL, marks=pytest.mark.long),
        ("quota", signal.SIGINT),
        pytest.param("quota", signal.SIGKILL, marks=pytest.mark.long),
    ],
    ids=lambda given: str(getattr(given, "name", given)),
)
def test_a_program_that_is_ended_takes_its_ranks_along(cluster_file: str, mode: str, ending: signal.Signals) -> None:
    """Ranks that are functions, as in ``hap profile --testbed``: forked by a server, whose end is theirs."""
    if mode == "quota" and cgroup.find() is None:
        pytest.skip("no cpu cgroup that this process can write")
    runner = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, cluster_file, mode],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=heed_interrupts,
    )
    try:
        wait_for(lambda: [r for r in records() if r.owner is not None and r.owner.pid == runner.pid])
        (bed_id,) = (r.bed_id for r in records() if r.owner is not None and r.owner.pid == runner.pid)

        def ranks() -> list[int]:
            return [p for n in network.existing() if bed_id in n for p in network.processes(n)]

        wait_for(lambda: len(ranks()) == 2)
        runner.send_signal(ending)
        runner.wait(30)
    finally:
        runner.kill()
        runner.wait()
    wait_for(lambda: ranks() == [])
    if ending == signal.SIGKILL:
        assert traces(bed_id)[0] != ()
        for _ in range(2):
            assert main(["down", bed_id]) == 0
    assert traces(bed_id) == ((), (), ())
