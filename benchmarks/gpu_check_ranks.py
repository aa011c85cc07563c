"""What every rank of ``benchmarks/gpu_check.py`` runs: collectives of unequal shares, and whole training steps.

Both are compared with what one device computes. ``start_ranks`` is the launcher: a process for each rank, joined
through a file, NCCL on GPUs and Gloo on a CPU. Where there are more ranks than GPUs several share one: NCCL refuses
two ranks of a host on one GPU, so each is told to be a host of its own and they talk through sockets. That is NCCL's
code for a cluster of hosts of one GPU, whole and slow. Ranks that take longer than they may say where they stand, and
are ended.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

import hap
from hap.attention import attention, attention_backward
from hap.cluster import ClusterSpec
from hap.codegen.layout import Layout
from hap.codegen.program import DECOMPOSITIONS
from hap.draws import rand, randint, randn
from hap.dropout import keep_mask
from hap.plan import Collective
from hap.run_record import read_folder
from hap.runtime.collectives import Communicator
from hap.runtime.transfer import Layouts

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)
CASES = 12
STEPS = 3
PASSES = 5  # forward and backward, of three steps, the last of which has three batches
EXACT = 1e-10  # float64: relative difference of losses, gradients and parameters
LIMIT_S = 150.0  # for ranks to be done, unless said otherwise
NEARLY = 0.9  # of it, when they say where they stand
POLL_S = 1.0


def start_ranks(
    world_size: int, on_gpus: bool, work: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S
) -> list[Any]:
    """``[work(device, *args) on each rank]``, each in its own process with a process group. The first failure of a
    rank is raised here, with its traceback; TimeoutError if they are not done in time: then they are killed."""
    method = "spawn" if on_gpus else "forkserver"  # which imports everything once, but knows of no GPU
    if not on_gpus:
        multiprocessing.get_context(method).set_forkserver_preload(["benchmarks.gpu_check_mesh", "torch._dynamo"])
    with tempfile.TemporaryDirectory() as folder:
        given = (world_size, on_gpus, folder, limit_s, work, args)
        context = multiprocessing.start_processes(_rank, given, nprocs=world_size, join=False, start_method=method)
        until = time.monotonic() + limit_s
        while not context.join(POLL_S):
            if time.monotonic() > until:
                running = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"of {world_size} ranks {running} were not done after {limit_s:.0f} s")
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(world_size)]


def _rank(
    rank: int, world_size: int, on_gpus: bool, folder: str, limit_s: float, work: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(NEARLY * limit_s)  # of all threads
    device = join(rank, world_size, on_gpus, folder)
    found = work(device, *args)
    faulthandler.cancel_dump_traceback_later()
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def join(rank: int, world_size: int, on_gpus: bool, folder: str) -> torch.device:
    """Join the process group of ``world_size`` ranks that meet in ``folder``; this rank's device."""
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
        if world_size > torch.cuda.device_count():
            os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        device_id=device if on_gpus else None,
    )
    return device


def compare_collectives(device: torch.device, seed: int) -> dict[str, int]:
    """Random cases, the same on every rank: every kind in every decomposition, alone, in bundles and left under way.
    How many results were compared, and how many of them are not the plain result to the last bit, by kind."""
    comm = Communicator(dist.group.WORLD, device)
    source, world_size = random.Random(seed), comm.world_size
    found: dict[str, int] = {"compared": 0}

    def same(kind: str, how: str, result: torch.Tensor, expected: torch.Tensor) -> None:
        found["compared"] += 1
        if not (result.is_contiguous() and result.dtype == expected.dtype and torch.equal(result.cpu(), expected)):
            found[f"{kind} by {how}"] = found.get(f"{kind} by {how}", 0) + 1

    for _ in range(CASES):
        shape, first, second = _random_case(source, world_size)
        dtype = source.choice(DTYPES)
        parts = [_whole(source, shape, dtype) for _ in range(world_size)]
        whole, total = parts[0], torch.stack(parts).sum(0, dtype=dtype)
        piece, mine = first.take(whole, comm.rank).to(device), parts[comm.rank].to(device)
        jobs: dict[Collective, tuple[torch.Tensor, Layouts, torch.Tensor]] = {
            "all_gather": (piece, (first,), whole),
            "all_reduce": (mine, (), total),
            "reduce_scatter": (mine, (first,), first.take(total, comm.rank)),
            "all_to_all": (piece, (first, second), second.take(whole, comm.rank)),
        }
        for kind, (value, layouts, expected) in jobs.items():
            for how in DECOMPOSITIONS[kind] if world_size > 1 else DECOMPOSITIONS[kind][:1]:
                same(kind, how, comm.together(kind, [value], [layouts], how)[0], expected)
                pending = comm.start(kind, [value, value], [layouts, layouts], how)
                for result in comm.wait(pending):
                    same(kind, f"{how}, left under way", result, expected)
    return found


def _random_case(source: random.Random, world_size: int) -> tuple[list[int], Layout, Layout]:
    """A shape of two dims, and a layout of each; shares are unequal and often zero."""
    layouts, shape = [], []
    for dim in range(2):
        outer, n, unit = source.randint(1, 3), source.randint(1, 40), source.randint(1, 5)
        owners = [source.randrange(world_size) for _ in range(n)]
        layouts.append(Layout(dim, outer, unit, tuple(owners.count(r) for r in range(world_size))))
        shape.append(outer * n * unit)
    return shape, layouts[0], layouts[1]


def _whole(source: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in every dtype and order."""
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(source.randrange(2**31))).to(dtype)


class Tiny(nn.Module):
    """Causal layers with norms, a residual and a head over the vocabulary: every kind of operator of a GPT-2."""

    def __init__(
        self, layers: int = 2, vocabulary: int = 61, width: int = 48, heads: int = 6, length: int = 16
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.heads = heads
        self.attention = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.positions
        for i in range(len(self.out)):
            q, k, v = (
                t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for t in self.attention[i](self.norms[2 * i](x)).chunk(3, -1)
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out[i](mixed.transpose(1, 2).flatten(-2))
            x = x + self.narrow[i](nn.functional.gelu(self.wide[i](self.norms[2 * i + 1](x))))
        return self.head(x)


def tiny(layers: int = 2) -> Tiny:
    """The same weights on every rank, in float64."""
    torch.manual_seed(0)
    return Tiny(layers).double()


def tiny_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, targets), both (12, 16)."""
    generator = torch.Generator().manual_seed(100 + step)
    ids, targets = (torch.randint(0, 61, (12, 16), generator=generator) for _ in range(2))
    return ids, targets


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_like_one_device(device: torch.device, plans: dict[str, dict[str, str]]) -> dict[str, float]:
    """For every plan (name -> pins) the largest relative difference from plain PyTorch on one device: losses and
    gradients of ``STEPS`` steps of AdamW with clipping, a checkpoint after the first, and the parameters after them.
    All of it is recorded."""
    comm = Communicator(dist.group.WORLD if dist.get_world_size() > 1 else None, device)
    found = {}
    for name, placements in plans.items():
        program = tiny_program(device, placements)
        with tempfile.TemporaryDirectory() as folder:
            with program.record(comm.from_rank_zero(folder)):
                found[name] = difference(program, tiny().to(device))
            comm.gather_objects(None)  # until all have written
            if comm.rank == 0:
                check_records(Path(folder), PASSES)
            comm.gather_objects(None)
    return found


def tiny_program(device: torch.device, placements: dict[str, str], batches: int = 1) -> hap.HapProgram:
    """The tiny model's, placed so, each rank with a share of its own; planned for so many batches a step."""
    ids, targets = tiny_batch(0)
    size = dist.get_world_size()
    return hap.compile(
        tiny(),
        unequal_cluster(size, "nccl" if device.type == "cuda" else "gloo"),
        example_inputs=(ids,),
        example_targets=targets,
        loss_fn=token_loss,
        pins=hap.Pins(placements=placements, ratios=tuple(float(size - rank) for rank in range(size))),
        effort="quick",
        device=device,
        gradient_accumulation_steps=batches,
    )


def check_records(folder: Path, passes: int) -> None:
    """That every pass was recorded, and that it took time: on GPUs, that the streams' events were read."""
    for record in read_folder(folder):
        times = [step.compute_s for step in record.steps if step.trains]
        assert len(times) == passes and min(times) > 0, f"rank {record.head.rank}: recorded passes took {times}"


def difference(program: Any, model: nn.Module) -> float:
    """The largest relative difference from ``model`` on one device, which has the program's first parameters: see
    ``train_like_one_device``."""
    device = program.device
    ours = torch.optim.AdamW(program.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-3)
    worst = 0.0
    for step in range(STEPS):
        ids, targets = tiny_batch(step)
        mine, my_targets = program.shard_batch((ids,), targets)
        if step > 1:  # steps of three batches: what ranks exchange for gradients, once
            with program.no_sync():
                for _ in range(2):
                    program(*mine, targets=my_targets).backward()
                    token_loss(model(ids.to(device)), targets.to(device)).backward()
        loss = program(*mine, targets=my_targets)
        loss.backward()
        reference = token_loss(model(ids.to(device)), targets.to(device))
        reference.backward()
        worst = max(worst, relative(loss, reference))
        gradients = program.full_gradients()
        worst = max(worst, *(relative(gradients[n], p.grad) for n, p in model.named_parameters() if p.grad is not None))
        norm = program.clip_grad_norm_(0.5)
        worst = max(worst, relative(norm, torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step == 0:
            ours = _resumed(program, ours)
    state = program.state_dict()
    return max(worst, *(relative(state[n], p) for n, p in model.state_dict().items()))


def _resumed(program: Any, optimizer: torch.optim.AdamW) -> torch.optim.AdamW:
    """Saved, forgotten and loaded again: the optimizer to go on with."""
    comm = Communicator(dist.group.WORLD if dist.get_world_size() > 1 else None, program.device)
    with tempfile.TemporaryDirectory() as folder:
        directory = comm.from_rank_zero(folder)
        program.save_checkpoint(directory, optimizer, extra={"step": 1})
        with torch.no_grad():
            for parameter in program.parameters():
                parameter.fill_(float("nan"))
        again = torch.optim.AdamW(program.parameters(), lr=1.0)
        extra = program.load_checkpoint(directory, again)
        assert extra == {"step": 1}, extra
        comm.gather_objects(None)  # until all have read it
    return again


def attention_error(device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative difference of attention and its gradients from the formulas in float64, over causal and not,
    with and without a mask, as many queries as keys and more, fewer and none, heads that kernels like and that not."""
    generator, worst = torch.Generator().manual_seed(3), 0.0
    for (queries, keys), head, causal, masked in itertools.product(
        ((64, 64), (33, 33), (40, 17), (17, 40), (0, 8)), (64, 24, 20), (True, False), (True, False)
    ):
        rows = (queries, keys, keys, queries)
        q, k, v, grad = (torch.randn(2, 3, n, head, generator=generator).to(device, dtype) for n in rows)
        mask = torch.randn(2, 1, queries, keys, generator=generator).to(device, dtype) if masked else None
        out, logsumexp = attention(q, k, v, mask, causal, 0.3)
        found = (out, *attention_backward(grad, q, k, v, mask, out, logsumexp, causal, 0.3))
        wide_q, wide_k, wide_v, wide_grad = (x.double().cpu() for x in (q, k, v, grad))
        far = None if mask is None else mask.double().cpu()
        expected_out, sums = attention(wide_q, wide_k, wide_v, far, causal, 0.3)
        gradients = attention_backward(wide_grad, wide_q, wide_k, wide_v, far, expected_out, sums, causal, 0.3)
        expected = (expected_out, *gradients)
        worst = max(worst, *(relative(a, b) for a, b in zip(found, expected, strict=True) if b.numel()))
    return worst


def random_numbers(device: torch.device) -> dict[str, float]:
    """The largest difference of random numbers on this device from the CPU's, whole and in a piece; 0 but for normal
    ones, which pass through a function of the device's."""
    worst = {}
    for name, draw in {"rand": rand, "randn": randn, "randint": _integers, "mask": _mask}.items():
        differences = []
        for size, place in (((64, 1000), None), ((20, 1000), (0, 1, 64, 1, 40))):
            found = draw(size, torch.tensor(7, device=device), 3, place, dtype=torch.float64)
            expected = draw(size, torch.tensor(7), 3, place, dtype=torch.float64)
            differences.append(float((found.cpu() - expected).abs().max()))
        worst[name] = max(differences)
    return worst


def _integers(size: Any, seed: torch.Tensor, site: int, place: Any, *, dtype: torch.dtype) -> torch.Tensor:
    return randint(size, -5, 10**6, seed, site, place, dtype=dtype)


def _mask(size: Any, seed: torch.Tensor, site: int, place: Any, *, dtype: torch.dtype) -> torch.Tensor:
    return keep_mask(size, seed, 0.3, site, place).to(dtype)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the largest entry; infinite where anything is not finite."""
    a, b = ours.detach().cpu().double(), theirs.detach().cpu().double()
    assert a.shape == b.shape, (a.shape, b.shape)
    found = float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
    return found if found == found else float("inf")


def unequal_cluster(world_size: int, backend: str) -> ClusterSpec:
    """As many devices, each half as fast as the one before: what a plan for them is worth is not asked here."""
    devices = "".join(
        f"\n      - {{name: d{r}, tflops: {{float32: {2.0**-r}, float64: {2.0**-r}}}, memory: 8GB, "
        "memory_bandwidth: 900GB/s, launch: 1us}"
        for r in range(world_size)
    )
    return ClusterSpec.from_yaml(
        f"name: check\nbackend: {backend}\nhosts:\n  - name: here\n    link: {{bandwidth: 50GB/s, latency: 5us}}\n"
        f"    devices:{devices}\n"
    )
