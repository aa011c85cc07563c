"""A rank that comes to its end gives Gloo's threads Python's lock once more."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, time
import torch.distributed as dist
from hap.runtime.collectives import Communicator

time.sleep = lambda seconds: print("pauses", seconds)
if "gloo" in sys.argv:
    dist.init_process_group("gloo")
    Communicator(dist.group.WORLD), Communicator(dist.group.WORLD)
else:
    Communicator()
print("done")
"""
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(("group", "said"), [("gloo", ["done", "pauses 0.1"]), ("none", ["done"])])
def test_it_pauses_once_after_everything_else_where_there_was_a_group(group: str, said: list[str]) -> None:
    command = [sys.executable, "-c", SCRIPT, group]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ALONE}, timeout=100)
    assert (done.returncode, done.stdout.splitlines()) == (0, said), done.stderr
