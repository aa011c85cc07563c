"""What a rank runs in ``benchmarks/mesh.py`` and ``benchmarks/owners.py``: plans for one model, in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import hap
from benchmarks.race_models import build
from benchmarks.testbed.pace import Deadline, deadline
from hap.build import BuiltModel
from hap.cluster import Link
from hap.mesh_plan import parse_plan
from hap.runtime.emulate import measure_loopback

RATE = 1e-3
WARM, RECORDED, BLOCK = 3, 5, 3  # steps: before anything is recorded; recorded unstretched; of one turn


class Result(NamedTuple):
    """One plan on one rank. ``compute_s``: what its compute takes on its device, a step; ``losses`` of first steps."""

    steps_s: tuple[float, ...]
    compute_s: float
    losses: tuple[float, ...]


def cut(name: str, batch: int) -> BuiltModel:
    """The race's model with the first ``batch`` samples of its batch; the same weights in every process."""
    built = build(name)
    inputs, targets = built.example_inputs[:batch], built.example_targets[:batch]
    return BuiltModel(built.model, inputs, targets, built.loss_fn)


def link_inside(rank: int, hosts: Sequence[Sequence[int]]) -> Link:
    """Between ranks of one host, while those of all ``hosts`` exchange at once; hosts have equally many."""
    torch.set_num_threads(1)
    groups = [dist.new_group(list(ranks)) for ranks in hosts]
    own = next(i for i, ranks in enumerate(hosts) if rank in ranks)
    return measure_loopback(len(hosts[own]), repeats=30, group=groups[own])


class Contestant:
    """``batches``: of a step, all alike, whose gradients are summed once."""

    def __init__(self, built: BuiltModel, plan: str, batches: int = 1) -> None:
        self.batches = batches
        given: dict[str, Any] = {"example_inputs": built.example_inputs, "example_targets": built.example_targets}
        self.program = hap.compile(built.model, plan=parse_plan(plan), loss_fn=built.loss_fn, **given)
        self.optimizers = optimizers_of(built, self.program, self.program.plan.provenance.optimizer)
        self.batch, self.targets = self.program.shard_batch(built.example_inputs, built.example_targets)

    def step(self) -> float:
        self.program.zero_grad(set_to_none=True)
        with self.program.no_sync():
            for _ in range(self.batches - 1):
                (self.program(self.batch, targets=self.targets) / self.batches).backward()
        loss = self.program(self.batch, targets=self.targets)
        (loss / self.batches).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss.detach())


def optimizers_of(built: BuiltModel, program: hap.HapProgram, name: str) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon for the matrices that no embedding looks up and AdamW for the rest."""
    if name != "muon":
        return [torch.optim.AdamW(program.parameters(), lr=RATE)]
    tables = {f"{n}.weight" for n, module in built.model.named_modules() if isinstance(module, torch.nn.Embedding)}
    named = dict(program.named_parameters())
    matrices = [n for n, p in named.items() if p.dim() == 2 and n not in tables]
    rest = [p for n, p in named.items() if n not in matrices]
    return [torch.optim.Muon([named[n] for n in matrices], lr=RATE), torch.optim.AdamW(rest, lr=RATE)]


def race(
    rank: int, model: str, batch: int, plans: Mapping[str, str], rounds: int, batches: int = 1
) -> dict[str, Result]:
    """Every plan, by name, for steps of so many batches; they take turns, a block of steps each of which the first is
    not counted."""
    torch.set_num_threads(1)
    found, paces, losses = dict[str, Contestant](), dict[str, Deadline](), dict[str, tuple[float, ...]]()
    for name, plan in plans.items():
        found[name] = Contestant(cut(model, batch), plan, batches)
        losses[name] = tuple(found[name].step() for _ in range(WARM))
        paces[name] = deadline()
        found[name].program.set_pace(paces[name])
        for _ in range(RECORDED):
            with paces[name].step():
                found[name].step()
        paces[name].hold()
    gc.disable()
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(rounds):
        for name in plans:
            dist.barrier()
            for counted in range(BLOCK + 1):
                start = time.perf_counter()
                with paces[name].step():
                    found[name].step()
                if counted:
                    seconds[name].append(time.perf_counter() - start)
        gc.collect()
    return {
        name: Result(tuple(seconds[name]), sum(paces[name].nominal_s or ()) * paces[name].slowdown, losses[name])
        for name in plans
    }
