"""Real ranks for tests: processes forked from one warm server, joined by Gloo, each running one function.

``run_ranks(n, function, *args)`` returns ``[function(rank, *args) for each rank]``, every one computed in its own
process with a default Gloo process group. ``function`` must be importable (a module's top level) and its arguments and
result picklable. An exception on any rank is re-raised here as RankError with the rank and its traceback; ranks that
then wait for it in a collective are ended. ``run_alike`` is the same for a function that captures the same steps in the
same order on every rank, where it is not capturing that is tested: rank 0 captures them for all (``captures``).
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

WARM = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "numpy",
    "pytest",
    "hypothesis.strategies",
    "transformers.models.gpt2.modeling_gpt2",
    "hap.api",
    "tests._support.captures",
    "tests._support.gpt2",
    "tests._support.ranks",
    "tests._support.warm",
)
DEADLINE_S = 100.0
COLLECTIVE_S = 60.0


class RankError(Exception):
    """A rank raised, died or did not finish in time."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """See the module docstring."""
    return _run(world_size, function, args, alike=False)


def run_alike(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """See the module docstring."""
    return _run(world_size, function, args, alike=True)


def _run(world_size: int, function: Callable[..., Any], args: tuple[Any, ...], alike: bool) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(WARM))
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(theirs, rank, world_size, folder, function, args, alike), daemon=True
            )
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            results = _collect(ends)
        except RankError:
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                process.join()
        return results


def _collect(ends: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(results) < len(ends):
        pending = {end: rank for rank, end in enumerate(ends) if rank not in results}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(pending.values())} did not finish within {DEADLINE_S} s")
        for end in ready:
            assert isinstance(end, Connection)
            rank = pending[end]
            try:
                ok, result = end.recv()
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not ok:
                raise RankError(f"rank {rank} raised\n{result}")
            results[rank] = result
    return [results[rank] for rank in range(len(ends))]


def _rank(
    end: Connection,
    rank: int,
    world_size: int,
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    alike: bool,
) -> None:
    """What a child runs. A file store, so that no port has to be free."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
        if alike:
            from tests._support.captures import share_captures

            share_captures(rank, folder)
        end.send((True, function(rank, *args)))
    except BaseException:
        end.send((False, traceback.format_exc()))
    finally:
        end.close()
        if dist.is_initialized():
            dist.destroy_process_group()
