"""The same commands where namespaces cannot be made: they run on the loopback and say what is not enforced."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.testbed import RankError, Testbed, TestbedError, cgroup, network, record
from benchmarks.testbed.__main__ import main
from hap.cluster import ClusterSpec
from tests.testbed.test_bed import running

CLUSTER = """
backend: gloo
hosts:
  - name: a
    devices: [{name: d, tflops: {float32: 2}, memory: 1GB, memory_bandwidth: 10GB/s}]
    network: {bandwidth: 100Mbit/s, latency: 250us}
  - name: b
    devices: [{name: d, tflops: {float32: 1}, memory: 1GB, memory_bandwidth: 10GB/s}]
    network: {bandwidth: 100Mbit/s, latency: 250us}
"""


@pytest.fixture
def no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "missing", lambda: "needs root (it makes network namespaces): run it with sudo")


@pytest.fixture
def cluster_file(tmp_path: Path) -> str:
    path = tmp_path / "pair.yaml"
    path.write_text(CLUSTER)
    return str(path)


def total(rank: int) -> float:
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return value.item()


def policies(rank: int) -> list[int]:
    """Of this rank's threads of Gloo, those of a second group too once the runner has seen them."""
    dist.barrier(dist.new_group([0, 1]))
    found: list[int] = []
    for _ in range(50):
        tasks = [t for t in Path("/proc/self/task").glob("*") if "gloo" in (t / "comm").read_text()]
        found = [os.sched_getscheduler(int(t.name)) for t in tasks]
        if set(found) == {os.SCHED_BATCH}:
            break
        time.sleep(0.1)
    return found


def test_threads_of_gloo_take_no_core_from_a_rank() -> None:
    with Testbed(ClusterSpec.from_yaml(CLUSTER), enforced=False) as bed:
        for found in bed.run(policies):
            assert len(found) >= 2 and set(found) == {os.SCHED_BATCH}


def test_functions_run_as_ranks_on_the_loopback() -> None:
    with Testbed(ClusterSpec.from_yaml(CLUSTER), enforced=False) as bed:
        assert bed.run(total) == [1.0, 1.0]
        assert any("needs root" in sentence for sentence in bed.not_enforced)


@pytest.mark.parametrize("code", [0, 1])
def test_what_a_rank_that_has_ended_leaves_is_ended(code: int) -> None:
    sleep = ["sleep", f"47{code}.{os.getpid()}"]
    command = ["sh", "-c", f"{' '.join(sleep)} > /dev/null 2>&1 & exit {code}"]
    with Testbed(ClusterSpec.from_yaml(CLUSTER), enforced=False) as bed:
        if code:
            with pytest.raises(RankError, match="exited with code 1"):
                bed.run(command)
        else:
            assert bed.run(command) == ["", ""]
    assert running(sleep) == []


def test_a_machine_without_a_tool_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "unshare" else tool)
    assert (network.missing() or "").startswith("unshare not found: apt-get install")


def test_another_runner_s_trial_of_a_group_is_no_bed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "existing", lambda: ("hapbed-abc123-sw", "hapbed-abc123-0"))
    monkeypatch.setattr(record, "records", lambda: ())
    monkeypatch.setattr(cgroup, "find", lambda: cgroup.Controller(1, Path("/nowhere")))
    monkeypatch.setattr(cgroup, "existing", lambda controller: ("trial-4747", "def456"))
    assert record.unrecorded() == ("abc123", "def456")


def test_run_says_what_is_not_enforced(no_root: None, cluster_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--cluster", cluster_file, "--", "sh", "-c", "echo $RANK by $GLOO_SOCKET_IFNAME"]) == 0
    said = capsys.readouterr()
    assert "[rank 1] 1 by lo" in said.out
    assert "needs root" in said.err and "not enforced: links are this machine's loopback" in said.err


def test_up_needs_root_and_says_so_in_one_line(
    no_root: None, cluster_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--cluster", cluster_file]) == 2
    assert capsys.readouterr().err.startswith("error: needs root")


def test_a_bed_needs_root(no_root: None) -> None:
    with pytest.raises(TestbedError, match="needs root"), Testbed(ClusterSpec.from_yaml(CLUSTER)):
        pass


def test_run_without_a_command_is_refused(cluster_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--cluster", cluster_file]) == 2
    assert "no command" in capsys.readouterr().err
