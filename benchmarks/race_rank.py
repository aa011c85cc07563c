"""What a rank runs in ``benchmarks/race.py``: every contestant of one model on one cluster, interleaved.

All are given the same global batch, the same AdamW and the same pace: the CPU time that a rank's own computing takes is
stretched to its device's (``benchmarks.testbed.pace``), and what waits for the wire is not. Where a contestant's
collectives are torch's own, the pace is told of them by a communication hook (DDP), by overriding the one method that
sends (ZeRO-1), or by wrapping the calls (FSDP2). Ranks that a contestant leaves out wait for it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import hap
from benchmarks.allocations import Allocations
from benchmarks.race_fsdp import RATE, Fsdp, held
from benchmarks.race_models import build
from benchmarks.testbed.pace import Deadline, deadline, own_slowdown
from hap.build import BuiltModel
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.cost_models.profile import Profile
from hap.plan import Plan
from hap.rules.choices import choices
from hap.runtime.collectives import Communicator
from hap.runtime.profile import measure
from hap.starting import left_out

BUCKET_MB = 1  # DDP's default of 25 would hold all or half of these small models' gradients, and send them at the end
WARM = 3  # steps; DDP rearranges its buckets after the first
RECORDED = 5  # steps of a round whose sections are recorded, unstretched
RECORDINGS = 3  # rounds: the contestants take turns
BLOCK = 2  # steps of one contestant in a round, after one that is not counted


class Result(NamedTuple):
    """One contestant on one rank. ``compute_s``: what its compute takes on its device, a step. ``held_bytes``:
    parameters, gradients and optimizer state; ``peak_bytes`` with activations, of forward and backward. ``losses``: of
    the first steps, this rank's part of the global batch's."""

    steps_s: tuple[float, ...]
    compute_s: float
    missed: float
    held_bytes: int
    peak_bytes: int
    losses: tuple[float, ...]


def calibrate(
    rank: int, cluster: str, models: Sequence[str], optimizer: str = "adamw", reduce_dtype: str | None = None
) -> str:
    """The profile's JSON of the cluster (given as YAML), measured on the bed with the models' calls."""
    torch.set_num_threads(1)
    graphs = []
    for name in models:
        built = build(name)
        graph = capture(
            built.model,
            built.example_inputs,
            loss_fn=built.loss_fn,
            example_targets=built.example_targets,
            reduce_dtype=reduce_dtype,
            name=name,
        )
        graphs.append((graph, choices(graph).strategies))
    spec, comm = ClusterSpec.from_yaml(cluster), Communicator(dist.group.WORLD)
    said = ("testbed, deadline mode: compute is CPU time x slow-down",)
    found = measure(spec, comm, graphs, optimizers=(optimizer,), slowdown=own_slowdown(), conditions=said)
    return found.model_dump_json()


Enter = Callable[[str, str, Sequence[int], Sequence[int], str, str, str], "Contestant"]


class Contestant(Protocol):
    """``step`` returns this rank's contribution to the global loss."""

    pace: Deadline | None

    def step(self) -> float: ...

    def tensors(self) -> list[torch.Tensor]: ...


class Idle:
    """A rank that a contestant leaves out."""

    pace: Deadline | None = None

    def step(self) -> float:
        return 0.0

    def tensors(self) -> list[torch.Tensor]:
        return []


@contextmanager
def _job_of(group: dist.ProcessGroup | None) -> Iterator[None]:
    """``hap.compile`` takes the ranks of ``group`` for its job (None: this rank alone), in which nobody waits for the
    ranks that are left out."""
    alone = partial(dist.new_group, use_local_synchronization=True)
    found = Communicator(group, torch.device("cpu"))
    with mock.patch("hap.api.join", lambda *_: found), mock.patch.object(dist, "new_group", alone):
        yield


class Hap:
    """``hap.compile`` with a plan made before, from the profile that its cluster was planned with. ``job``: the context
    of the plan's ranks, if these are not all."""

    def __init__(
        self,
        built: BuiltModel,
        plan: str,
        cluster: str,
        profile: str,
        passes_off: Sequence[str],
        job: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        with job():
            self.program = hap.compile(
                built.model,
                Profile.model_validate_json(profile).calibrate(ClusterSpec.from_yaml(cluster)),
                plan=Plan.from_json(plan),
                example_inputs=built.example_inputs,
                example_targets=built.example_targets,
                loss_fn=built.loss_fn,
                passes_off=passes_off,
            )
        self.job, self.warm = job, WARM
        self.optimizer = torch.optim.AdamW(self.program.parameters(), lr=RATE)
        self.batch, self.targets = self.program.shard_batch(built.example_inputs, built.example_targets)

    @property
    def pace(self) -> Deadline | None:
        return None

    @pace.setter
    def pace(self, pace: Deadline | None) -> None:
        self.program.set_pace(pace)

    def step(self) -> float:
        with self.job():
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.program(self.batch, targets=self.targets)
            loss.backward()
            self.optimizer.step()
        self.warm -= 1
        if not self.warm:
            self.job = nullcontext  # all groups are made
        return float(loss.detach()) / self.program.plan.world_size

    def tensors(self) -> list[torch.Tensor]:
        return held(self.program, self.optimizer)


class Ddp:
    """DistributedDataParallel; rank r has ``sizes[r]`` samples and its loss the weight of those. ``group``: of fewer
    ranks than all."""

    def __init__(self, built: BuiltModel, sizes: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
        rank, total = dist.get_rank(), sum(sizes)
        start = sum(sizes[:rank])
        self.pace: Deadline | None = None
        self.share = sizes[rank] / total
        self.batch = built.example_inputs[start : start + sizes[rank]]
        self.targets = built.example_targets[start : start + sizes[rank]]
        assert built.loss_fn is not None
        self.loss_fn = built.loss_fn
        self.group = group
        self.module = DistributedDataParallel(built.model, process_group=group, bucket_cap_mb=BUCKET_MB)
        self.module.register_comm_hook(None, lambda _, bucket: self._send(bucket))
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.module.parameters(), lr=RATE)

    def _send(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The weighted sum of gradients (DDP's own hook divides by the number of ranks, which the weight replaces)."""
        if self.pace is not None:
            self.pace.settle()
        work = dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)
        assert work is not None
        if self.pace is not None:
            self.pace.resume()
        return work.get_future().then(lambda future: future.value()[0])

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.share * self.loss_fn(self.module(self.batch), self.targets)
        loss.backward()
        if self.pace is not None:
            # the end of backward waits for the last bucket, which is no compute, and copies the buckets out, which is
            self.pace.resume_after_unseen_wait()
        self.optimizer.step()
        return float(loss.detach())

    def tensors(self) -> list[torch.Tensor]:
        return held(self.module, self.optimizer)


class Alone:
    """The whole batch on one rank, which has nobody to talk to."""

    def __init__(self, built: BuiltModel) -> None:
        self.pace: Deadline | None = None
        self.batch, self.targets, self.module = built.example_inputs, built.example_targets, built.model
        assert built.loss_fn is not None
        self.loss_fn = built.loss_fn
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=RATE)

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_fn(self.module(self.batch), self.targets)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def tensors(self) -> list[torch.Tensor]:
        return held(self.module, self.optimizer)


class Zero(Ddp):
    """The same with ZeroRedundancyOptimizer: each rank updates some parameters and sends them to all."""

    def _optimizer(self) -> torch.optim.Optimizer:
        contestant = self

        class Paced(ZeroRedundancyOptimizer):
            def _sync_params(self) -> None:
                if contestant.pace is not None:
                    contestant.pace.settle()
                super()._sync_params()  # type: ignore[misc]  # torch's stub of the class leaves it out
                if contestant.pace is not None:
                    contestant.pace.resume()

        return Paced(self.module.parameters(), torch.optim.AdamW, lr=RATE)

    def tensors(self) -> list[torch.Tensor]:
        assert isinstance(self.optimizer, ZeroRedundancyOptimizer)
        return held(self.module, self.optimizer.optim)


def enter(
    name: str, model: str, sizes: Sequence[int], equal: Sequence[int], plan: str, cluster: str, profile: str
) -> Contestant:
    """A fresh contestant. Collective."""
    built = build(model)
    match name:
        case "HAP":
            return _hap(built, plan, cluster, profile, ())
        case "HAP, no passes":
            return _hap(built, plan, cluster, profile, ("bucket", "prefetch", "overlap"))
        case "DDP":
            return Ddp(built, equal)
        case "DDP, by speed":
            return Ddp(built, sizes)
        case "DDP, fast hosts":
            members = fast_hosts(ClusterSpec.from_yaml(cluster))
            each, more = divmod(len(built.example_inputs), len(members))
            dealt = {r: each + (i < more) for i, r in enumerate(members)}
            group = dist.new_group(list(members))
            if dist.get_rank() not in members:
                return Idle()
            return Ddp(built, [dealt.get(r, 0) for r in range(len(sizes))], group)
        case "one device":
            return Alone(built) if dist.get_rank() == fast_hosts(ClusterSpec.from_yaml(cluster))[0] else Idle()
        case "ZeRO-1":
            return Zero(built, sizes)
        case "FSDP2":
            return Fsdp(built, sizes)
    raise ValueError(name)


def _hap(built: BuiltModel, plan: str, cluster: str, profile: str, passes_off: Sequence[str]) -> Contestant:
    gone = left_out(Plan.from_json(plan))
    if not gone:
        return Hap(built, plan, cluster, profile, passes_off)
    members = [r for r in range(dist.get_world_size()) if r not in gone]
    group = dist.new_group(members) if len(members) > 1 else None
    if dist.get_rank() in gone:
        return Idle()
    return Hap(built, plan, cluster, profile, passes_off, partial(_job_of, group))


def fast_hosts(cluster: ClusterSpec) -> tuple[int, ...]:
    """The ranks of the fastest devices behind the fastest networks: whom one keeps who keeps the best alone."""
    speeds = [d.tflops["float32"] for d in cluster.devices]
    rates = [min(d.outward[:2]) if d.outward else 0.0 for d in cluster.devices]
    return tuple(r for r in range(len(speeds)) if speeds[r] == max(speeds) and rates[r] == max(rates))


def race(
    rank: int,
    names: Sequence[str],
    model: str,
    sizes: Sequence[int],
    equal: Sequence[int],
    plan: str,
    cluster: str,
    profile: str,
    rounds: int,
    enter: Enter = enter,
) -> dict[str, Result]:
    """Every contestant named, by name, made by ``enter``; they take turns, a block of steps each."""
    torch.set_num_threads(1)
    found, paces, losses = dict[str, Contestant](), dict[str, Deadline](), dict[str, tuple[float, ...]]()
    for name in names:
        found[name] = enter(name, model, sizes, equal, plan, cluster, profile)
        losses[name] = tuple(found[name].step() for _ in range(WARM))
        paces[name] = deadline()
    for _ in range(RECORDINGS):
        for name in names:
            dist.barrier()  # who is left out of one does not begin with the next
            _record(found[name], paces[name])
    for pace in paces.values():
        pace.hold()
    peaks = {name: _peak_bytes(found[name]) for name in names}
    gc.disable()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            found[name].pace = paces[name]
            dist.barrier()
            for counted in range(BLOCK + 1):
                start = time.perf_counter()
                with paces[name].step():
                    found[name].step()
                if counted:
                    seconds[name].append(time.perf_counter() - start)
        gc.collect()
    return {
        name: Result(
            tuple(seconds[name]),
            sum(paces[name].nominal_s or ()) * paces[name].slowdown,
            0.0 if isinstance(found[name], Idle) else paces[name].missed / max(1, paces[name].sections),
            sum(t.numel() * t.itemsize for t in found[name].tensors()),
            peaks[name],
            losses[name],
        )
        for name in names
    }


def _peak_bytes(contestant: Contestant) -> int:
    """Of a step: what is held and what is allocated beside it. DDP's buckets, made once in C++, are not seen."""
    contestant.pace = None
    seen = Allocations()
    seen.keep(contestant.tensors())
    return seen.least_peak(contestant.step)


def _record(contestant: Contestant, pace: Deadline) -> None:
    """A round of its steps. The first is not counted: others have used the caches."""
    contestant.pace = None
    contestant.step()
    contestant.pace = pace
    for _ in range(RECORDED):
        with pace.step():
            contestant.step()
    contestant.pace = None
