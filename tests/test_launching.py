"""``hap run``: the ranks that it starts, and what ends them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

CLUSTER = (
    "name: two\nbackend: gloo\nhosts: [{name: a, devices: [{name: d, count: 2, tflops: {float32: 1}, memory: 1GB, "
    "memory_bandwidth: 1GB/s}], link: {bandwidth: 1GB/s, latency: 1us}}]\n"
)
SLEEPER = """
import os, pathlib, time
pathlib.Path(os.environ["RANK"] + ".part").write_text(str(os.getpid()))
os.rename(os.environ["RANK"] + ".part", os.environ["RANK"] + ".pid")
time.sleep(60)
"""


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _waited(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc who runs")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_hap_run_ends_its_ranks(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Sent to the one process, as a scheduler does. Ranks are in sessions of their own."""
    (tmp_path / "c.yaml").write_text(CLUSTER)
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    command = [sys.executable, "-m", "hap", "run", "-c", "c.yaml", "sleeper.py"]
    heeded = partial(signal.signal, number, signal.SIG_DFL)  # in a shell's background jobs SIGINT is ignored
    run = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stderr=subprocess.DEVNULL, preexec_fn=heeded)
    ranks: list[int] = []
    try:
        files = [tmp_path / "0.pid", tmp_path / "1.pid"]
        assert _waited(lambda: all(f.exists() for f in files), 60)
        ranks = [int(f.read_text()) for f in files]
        run.send_signal(number)
        assert run.wait(timeout=40) == code
        assert _waited(lambda: not any(map(_runs, ranks)), 3)
    finally:
        for pid in ranks:
            if _runs(pid):
                os.kill(pid, signal.SIGKILL)
        run.kill()
        run.wait()
