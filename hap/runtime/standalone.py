"""What an emitted program file runs when it is started by itself: one step on random numbers, under ``torchrun``.

The file's tables say what there is; parameters are drawn alike on every rank (small, normal). Integers are 0 or 1 in
inputs, and 0 in buffers, which may look up a table of one row.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hap.codegen.layout import Layout
from hap.errors import ProgramError
from hap.runtime.collectives import Communicator

Row = tuple[tuple[int, ...], torch.dtype, Layout | None]  # of a file's tables: global shape, dtype, layout


def main(file: Mapping[str, Any]) -> None:
    """Run ``forward`` and ``backward`` of the file whose globals are given, and print the loss on rank 0."""
    joined = dist.is_initialized()
    comm = connect()
    try:
        loss, gradients = run_step(file, comm)
        if comm.rank == 0:
            print(f"loss {loss.item():.6f}, {len(gradients)} gradients, {comm.world_size} ranks")
    finally:
        if comm.group is not None and not joined:
            dist.destroy_process_group()


def connect() -> Communicator:
    """The communicator of this job: NCCL where every local rank has a GPU, else Gloo; none for a single process."""
    if dist.is_initialized():
        return Communicator(dist.group.WORLD)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Communicator()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return Communicator(dist.group.WORLD, device)


def run_step(file: Mapping[str, Any], comm: Communicator) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, this rank's gradients) of one step of an emitted file on random numbers. Collective."""
    generator = torch.Generator().manual_seed(0)
    state = {name: _draw(row, generator, comm) for name, row in (file["PARAMETERS"] | file["BUFFERS"]).items()}
    for name, (_, dtype, _) in file["BUFFERS"].items():
        if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
            state[name].zero_()
    inputs = {name: _draw(row, generator, comm) for name, row in file["INPUTS"].items()}
    for name, (values, layout) in file.get("CONSTANTS", {}).items():
        state[name] = _share(values, layout, comm)
    with torch.no_grad():
        loss, _, saved = file["forward"](state, inputs, comm)
        return loss, file["backward"](saved, torch.ones_like(loss), comm)


def _draw(row: Row, generator: torch.Generator, comm: Communicator) -> torch.Tensor:
    shape, dtype, layout = row
    if dtype.is_floating_point:
        whole = (0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    else:
        whole = torch.randint(0, 2, shape, generator=generator).to(dtype)
    return _share(whole, layout, comm)


def _share(whole: torch.Tensor, layout: Layout | None, comm: Communicator) -> torch.Tensor:
    if layout is not None and len(layout.sizes) != comm.world_size:
        raise ProgramError(f"this program is for {len(layout.sizes)} ranks, the job has {comm.world_size}")
    return (whole if layout is None else layout.take(whole, comm.rank)).to(comm.device)
