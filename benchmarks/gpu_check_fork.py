"""``hap.compile`` forks a process that proves bounds beside the search: does that do any harm where the GPU is in use?
For ``benchmarks/gpu_check.py``.

A process that has a CUDA context and NCCL's threads is forked while its GPU works and other ranks wait for its plan.
What is forked calls neither; here it is looked at whether all goes on as if there were none.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import hap
from benchmarks import gpu_check_ranks as ranks
from benchmarks.gpu_check_cost import Item, Setting
from hap.capture import capture
from hap.search import beside
from hap.search.fewer import FEWEST_NODES

LAYERS = 6  # the least of the tiny model's whose graph is worth a second process
LIMIT_S = 180.0
CYCLES = 4_000_000_000  # of the GPU: about two seconds, in which the host comes to the fork

Found = dict[str, Any]


def check_fork(setting: Setting) -> Item:
    """One rank alone, and several."""
    if not beside.can_fork():
        return Item("fork", "left out", "no process is forked here: it takes Linux and a second core")
    figures, words, good = dict[str, float](), list[str](), True
    for count in sorted({1, setting.ranks}):
        found = ranks.start_ranks(count, bool(setting.gpus), compile_beside, limit_s=LIMIT_S)
        first = found[0]
        said, worst = _wrong(found), max(rank["difference"] for rank in found)
        good = good and not said
        words.append(
            f"{count} rank{'s' * (count > 1)}: {first['forked']} processes forked from one with {first['threads']} "
            f"threads, {said or 'all gone, the same plan without'}, {worst:.1e} from one device, compiled in "
            f"{first['apart_s']:.1f} s, without in {first['alone_s']:.1f} s"
        )
        figures |= {f"{key}_{count}": first[key] for key in ("nodes", "forked", "threads", "apart_s", "alone_s")}
        figures[f"difference_{count}"] = worst
    return Item("fork", "pass" if good else "FAIL", "; ".join(words), figures)


def _wrong(found: list[Found]) -> str:
    """In words."""
    first, *others = found
    said = []
    if first["nodes"] < FEWEST_NODES or first["forked"] != 2:
        said.append(f"{first['nodes']} nodes, and {first['forked']} forks")
    if any(rank["forked"] for rank in others):
        said.append("a rank that does not plan forked")
    if any(rank["left"] for rank in found):
        said.append(f"{sum(rank['left'] for rank in found)} left")
    if len({checksum for rank in found for checksum in rank["plans"]}) > 1:
        said.append("the plan is another one without")
    if not all(rank["difference"] <= ranks.EXACT for rank in found):
        said.append("wrong results")
    return ", ".join(said)


def compile_beside(device: torch.device) -> Found:
    """Compiled with a second process, trained, compiled without, and with again, all with the GPU at work."""
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    pids: list[int] = []
    with _watched(pids):
        if device.type == "cuda":
            torch.cuda._sleep(CYCLES)
        total += 1
        program, apart_s = _compiled(device)
        worst = ranks.difference(program, ranks.tiny(LAYERS).to(device))
        with mock.patch.object(beside, "can_fork", lambda: False):
            alone, alone_s = _compiled(device)
        again, _ = _compiled(device)
    worst = max(worst, *(ranks.difference(one, ranks.tiny(LAYERS).to(device)) for one in (alone, again)))
    assert total.item() == dist.get_world_size() + 1
    ids, targets = ranks.tiny_batch(0)
    graph = capture(ranks.tiny(LAYERS), (ids,), loss_fn=ranks.token_loss, example_targets=targets)
    return {
        "nodes": len(graph.nodes),
        "threads": len(os.listdir("/proc/self/task")),
        "forked": len(pids),
        "left": sum(map(_lives, pids)),
        "plans": [one.plan.checksum for one in (program, alone, again)],
        "difference": worst,
        "apart_s": apart_s,
        "alone_s": alone_s,
    }


def _compiled(device: torch.device) -> tuple[hap.HapProgram, float]:
    """With the seconds that it took."""
    ids, targets = ranks.tiny_batch(0)
    cluster = ranks.unequal_cluster(dist.get_world_size(), "nccl" if device.type == "cuda" else "gloo")
    given: dict[str, Any] = {"example_inputs": (ids,), "example_targets": targets, "loss_fn": ranks.token_loss}
    began = time.perf_counter()
    program = hap.compile(ranks.tiny(LAYERS), cluster, device=device, **given)
    return program, time.perf_counter() - began


@contextlib.contextmanager
def _watched(pids: list[int]) -> Iterator[None]:
    """The processes that are forked meanwhile."""
    fork = beside.Beside._fork

    def watched(self: beside.Beside) -> None:
        fork(self)
        assert self._process.pid is not None
        pids.append(self._process.pid)

    with mock.patch.object(beside.Beside, "_fork", watched):
        yield


def _lives(pid: int) -> bool:
    """Whether there is such a process, one that has ended and nobody waited for included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
