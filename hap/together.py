"""Joining a job, and what its ranks do alike: an error on one is raised on all, and what has to be the same is
compared."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

import hap.errors
from hap.codegen.passes.runner import print_program
from hap.codegen.program import Program
from hap.errors import ClusterError, HapError, PlanError, ProgramError
from hap.runtime.collectives import Communicator

T = TypeVar("T")
OTHER = "the program for another batch, mode or call"


def join(backend: str | None, device: torch.device | str | None) -> Communicator:
    """This job's communicator, joining the default process group if torchrun started us and nobody has yet.

    ``backend``: the cluster's. ClusterError if that is NCCL, and this rank would run on its CPU unasked.
    """
    if dist.is_initialized():
        served = dist.get_backend_config()  # get_backend() is "undefined" where none was named
        here = _device(device, served)
        if backend == "nccl" and device is None and here.type != "cuda" and dist.get_world_size() > 1:
            raise ClusterError(
                f"the cluster's backend is nccl, and this job's process group is of {served}, which puts this rank on "
                "its CPU: make it with nccl, use backend: gloo, or say device="
            )
    else:
        chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        here = _device(device, chosen)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Communicator(None, here)
        if chosen == "nccl" and here.type != "cuda":
            raise ClusterError("the cluster's backend is nccl, and this rank has no GPU; use backend: gloo")
        dist.init_process_group(chosen, device_id=here if here.type == "cuda" else None)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    return Communicator(dist.group.WORLD if dist.get_world_size() > 1 else None, here)


def _device(device: torch.device | str | None, backend: str) -> torch.device:
    """What the user says, "cuda" being this rank's GPU; else that under NCCL, and otherwise the CPU. ``backend``: by
    name, or of each device."""
    if device is not None and torch.device(device) != torch.device("cuda"):
        return torch.device(device)
    if device is not None or ("nccl" in backend and torch.cuda.is_available()):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def agree_on_program(comm: Communicator, what: str, program: Program) -> None:
    """PlanError on every rank, unless they have the same one. Collective."""
    agree(comm, what, hashlib.sha256(print_program(program).encode()).hexdigest())


def agree(comm: Communicator, what: str, fingerprint: str | None) -> None:
    """PlanError on every rank, naming one whose fingerprint is not the first's. None agrees with all. Collective."""
    found = [(rank, mine) for rank, mine in enumerate(comm.gather_objects(fingerprint)) if mine is not None]
    for rank, mine in found:
        first, expected = found[0]
        if mine != expected:
            raise PlanError(
                f"{what} of rank {rank} differs from rank {first}'s ({mine[:12]}, not {expected[:12]}): "
                "every rank must build the same model with the same example inputs and plan"
            )


def together(comm: Communicator, work: Callable[[], T]) -> T:
    """``work()`` on every rank; if it fails on any, the first failure is raised on all. Collective."""
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as e:
        error = e
    told = None if error is None else (type(error).__name__, isinstance(error, HapError), str(error))
    failures = [(rank, *found) for rank, found in enumerate(comm.gather_objects(told)) if found is not None]
    if error is not None and failures[0][0] == comm.rank:
        raise error
    if failures:
        rank, name, ours, message = failures[0]
        if ours:
            raise getattr(hap.errors, name)(message)
        raise ProgramError(f"rank {rank} failed: {name}: {' '.join(message.split())}")
    return result  # type: ignore[return-value]
