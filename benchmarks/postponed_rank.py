"""What a rank runs in ``benchmarks/postponed.py``: plans for one model, a step of each in turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.mesh_rank import Contestant, cut

WARM = 3  # steps of each, of which losses are kept


class Result(NamedTuple):
    """One plan on one rank: ``losses`` of first steps."""

    steps_s: tuple[float, ...]
    losses: tuple[float, ...]


def turns(rank: int, model: str, batch: int, plans: Mapping[str, str], count: int) -> dict[str, Result]:
    """So many steps of every plan, by name; who begins changes from turn to turn."""
    torch.set_num_threads(1)
    found = {name: Contestant(cut(model, batch), plan) for name, plan in plans.items()}
    losses = {name: tuple(one.step() for _ in range(WARM)) for name, one in found.items()}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    gc.disable()
    for turn in range(count):
        for name in sorted(plans, reverse=bool(turn % 2)):
            dist.barrier()
            start = time.perf_counter()
            found[name].step()
            seconds[name].append(time.perf_counter() - start)
        gc.collect()
    return {name: Result(tuple(seconds[name]), losses[name]) for name in plans}
