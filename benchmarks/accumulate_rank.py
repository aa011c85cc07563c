"""Who runs in ``benchmarks/accumulate.py``: contestants of the race whose steps have several batches each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

import hap
from benchmarks.race_models import build
from benchmarks.race_rank import Contestant, Ddp, Hap

OURS, FOR_ONE, EACH = "HAP", "HAP, planned for one batch", "HAP, summed each time"
ACCO, DDP = "HAP, ACCO", "DDP, by speed"
BATCHES = 4  # of a step


def _accumulate(batch: Callable[[], torch.Tensor], apart: Callable[[], AbstractContextManager[None]]) -> float:
    """One step's backward passes, all but the last of them ``apart``; the losses' mean."""
    total = 0.0
    for place in range(BATCHES):
        with apart() if place < BATCHES - 1 else nullcontext():
            loss = batch() / BATCHES
            loss.backward()
        total += float(loss.detach())
    return total


class HapBatches(Hap):
    """``apart``: by ``no_sync()``."""

    apart = True

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        no_sync = self.program.no_sync if self.apart else nullcontext
        loss = _accumulate(lambda: self.program(self.batch, targets=self.targets), no_sync)
        self.optimizer.step()
        return loss / dist.get_world_size()


class HapEach(HapBatches):
    apart = False


class HapAcco(Hap):
    """Exchanges and updates in another thread, which is not stretched to the device's speed."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.acco = hap.Acco(self.program, self.optimizer, batches=BATCHES)

    def step(self) -> float:
        losses = [float(self.acco.step(self.batch, targets=self.targets)) for _ in range(BATCHES)]
        return sum(losses) / BATCHES / dist.get_world_size()


class DdpBatches(Ddp):
    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = _accumulate(
            lambda: self.share * self.loss_fn(self.module(self.batch), self.targets), self.module.no_sync
        )
        if self.pace is not None:
            self.pace.resume_after_unseen_wait()
        self.optimizer.step()
        return loss


def enter(
    name: str, model: str, sizes: Sequence[int], equal: Sequence[int], plan: str, cluster: str, profile: str
) -> Contestant:
    """A fresh contestant; ``plan``: the JSON of a list of two, for steps of several batches and of one. Collective."""
    built, (of_several, of_one) = build(model), json.loads(plan)
    match name:
        case "HAP":
            return HapBatches(built, of_several, cluster, profile, ())
        case "HAP, planned for one batch":
            return HapBatches(built, of_one, cluster, profile, ())
        case "HAP, summed each time":
            return HapEach(built, of_one, cluster, profile, ())
        case "HAP, ACCO":
            return HapAcco(built, of_several, cluster, profile, ())
        case "DDP, by speed":
            return DdpBatches(built, sizes)
    raise ValueError(name)
