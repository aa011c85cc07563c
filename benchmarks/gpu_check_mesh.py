"""Plans of two axes recorded, under ACCO and with gradients exchanged in 16 bits, for ``benchmarks/gpu_check.py``.

Whole numbers all the way come out of gradients in 16 bits as they do in float32, to the last bit. Of others each rank's
part t is rounded once and N - 1 sums of them are, so that an element is off by at most ((1 + u)^N - 1) * sum |t|, where
u is 2^-8 for bfloat16 and the parts of a sum over samples are no larger than the samples' own gradients.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hap
from benchmarks import gpu_check_ranks as ranks
from benchmarks import gpu_check_train as train
from benchmarks.gpu_check_cost import Item, Setting, Verdict
from benchmarks.gpu_check_record import in_words
from hap.diagnosis.run import load_run
from hap.diagnosis.verdict import diagnose
from hap.run_record import SUM_KIND, read_folder
from hap.runtime.collectives import Communicator

LOW = (torch.bfloat16, torch.float16)
TOKENS, WORDS, WIDTH = 12, 7, 4
STEPS, AT, LATE_S = 24, 12, 0.15
ROUNDING = 2.0**-8
LEAST = 0.01  # of what rounding allows: less would be none
MOVED = (2.0**-12, 2.0**-6)  # what ACCO trains with rounded gradients differs by so much of how far it moves
EVEN = {"*": "R", "args.*": "S(0)"}


def check_record(setting: Setting) -> Item:
    setting = _more_ranks(setting)
    last = setting.ranks - 1
    with tempfile.TemporaryDirectory() as folder:
        found = ranks.start_ranks(setting.ranks, bool(setting.gpus), train_recorded, folder)
        named = [f for f in diagnose(load_run(Path(folder))).findings if f.ranks and f.since_step is not None]
    worst = max(found)
    told = bool(named) and (named[0].syndrome, named[0].ranks) == ("late between steps", (last,))
    words = f"{setting.on}, two axes, rank {last} late from step {AT} on: "
    words += ", ".join(map(in_words, named)) or "no rank has become slow"
    words += f"; {worst:.1e} from one device"
    verdict: Verdict = "pass" if told and worst <= ranks.EXACT else "FAIL"
    return Item("mesh-record", verdict, words, {"relative_difference": worst, "found": float(told)})


def check_acco(setting: Setting) -> Item:
    setting = _more_ranks(setting)
    worst = max(ranks.start_ranks(setting.ranks, bool(setting.gpus), train_by_acco))
    words = f"{setting.on}, two axes, recorded: largest relative difference {worst:.1e}"
    verdict: Verdict = "pass" if worst <= ranks.EXACT else "FAIL"
    return Item("mesh-acco", verdict, words, {"relative_difference": worst})


def check_reduce_dtype(setting: Setting) -> Item:
    setting = _more_ranks(setting)
    found = ranks.start_ranks(setting.ranks, bool(setting.gpus), exchange_in_16_bits)
    wrong = sorted({name for rank in found for name in rank["wrong"]})
    rounding = max(rank["rounding"] for rank in found)
    moved = max(ranks.start_ranks(setting.ranks, bool(setting.gpus), train_by_acco_in_16_bits))
    words = (
        f"{setting.on}, one axis and two: whole numbers {'wrong: ' + ', '.join(wrong) if wrong else 'exact'}; others "
        f"within {rounding:.2f} of what rounding allows; under ACCO {moved:.1e} of how far parameters move"
    )
    good = not wrong and LEAST < rounding <= 1 and MOVED[0] < moved < MOVED[1]
    return Item("reduce-dtype", "pass" if good else "FAIL", words, {"rounding": rounding, "acco_rounded": moved})


def _more_ranks(setting: Setting) -> Setting:
    """One rank more than elsewhere, where they share a GPU: two hosts of two. Ranks are started anew for every few
    programs: each has process groups of its own, and of streams a process has 32 before they are given out again."""
    shares = 0 < setting.gpus < setting.ranks
    return replace(setting, ranks=setting.ranks + 1 if shares else max(setting.ranks, 3))


def train_by_acco(device: torch.device) -> float:
    comm = Communicator(dist.group.WORLD, device)
    with tempfile.TemporaryDirectory() as own:
        program = train.hosts_program(device, ranks.tiny(), batches=train.BATCHES // 2)
        with program.record(comm.from_rank_zero(own)):
            worst = train.follow_the_equations(program)
        comm.gather_objects(None)  # until all have written
        if comm.rank == 0:
            ranks.check_records(Path(own), train.BATCHES * train.UPDATES)
        comm.gather_objects(None)
    return worst


def exchange_in_16_bits(device: torch.device) -> dict[str, Any]:
    comm = Communicator(dist.group.WORLD, device)
    return {
        "wrong": [name for dtype in LOW for name in _not_exact(device, dtype)],
        "rounding": max(_over_what_rounding_allows(device, program, comm) for program in _rounding(device)),
    }


def train_recorded(device: torch.device, folder: str) -> float:
    comm = Communicator(dist.group.WORLD, device)
    program = train.hosts_program(device, ranks.tiny())
    late = comm.rank == comm.world_size - 1

    def before(step: int) -> None:
        if late and step >= AT:
            time.sleep(LATE_S)

    with program.record(folder):
        worst = train.train_hosts(program, STEPS, before)
    comm.gather_objects(None)
    if comm.rank == 0:
        ranks.check_records(Path(folder), STEPS)
        for record in read_folder(Path(folder)):
            sums = {kind.scope for kind in record.kinds.values() if kind.kind == SUM_KIND}
            assert sums == {"world"}, f"rank {record.head.rank}: sums over hosts are told of as of {sums or 'none'}"
    return worst


class Whole(nn.Module):
    """Whole numbers, none of them negative, all the way: an embedding that is the last layer, too, and a layer with a
    bias between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(0, 2, parameter.shape, generator=generator))

    def forward(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        x = x + torch.relu(self.layer(x))
        return ((x @ self.words.weight.t()) * wanted).sum()


def whole_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, WORDS, (TOKENS, 1), generator=generator)
    return ids, torch.randint(0, 2, (TOKENS, 1, WORDS), generator=generator).float()


def _not_exact(device: torch.device, dtype: torch.dtype) -> list[str]:
    """The plans and parameters whose gradients are not those of one device, bit for bit."""
    size, wrong = dist.get_world_size(), []
    given: dict[str, Any] = {"example_inputs": whole_batch(), "reduce_dtype": dtype, "device": device}
    cluster = ranks.unequal_cluster(size, "nccl" if device.type == "cuda" else "gloo")
    ratios = tuple(float(size - rank) for rank in range(size))
    model = Whole().to(device)
    model(*(x.to(device) for x in whole_batch())).backward()
    expected = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    assert max(float(gradient.max()) for gradient in expected.values()) <= 256, "whole numbers that bfloat16 has"
    mesh = hap.plan_mesh(
        Whole(),
        train.two_hosts(size, device),
        effort="quick",
        example_inputs=whole_batch(),
        reduce_dtype=dtype,
    )
    programs = {
        "data parallel": hap.compile(Whole(), cluster, pins=hap.Pins(placements=EVEN, ratios=ratios), **given),
        "zero": hap.compile(Whole(), cluster, pins=hap.Pins(placements=EVEN | {"*": "S(0)"}, ratios=ratios), **given),
        "two axes": hap.compile(Whole(), plan=mesh, **given),
    }
    for name, program in programs.items():
        assert program.plan.provenance.reduce_dtype == str(dtype).removeprefix("torch.")
        program(*program.shard_batch(whole_batch())).backward()
        gradients = program.full_gradients()
        wrong += [f"{name} {dtype}: {n}" for n, g in expected.items() if not torch.equal(gradients[n], g)]
    return wrong


def _rounding(device: torch.device) -> list[hap.HapProgram]:
    """The tiny model's programs in float32 with gradients in bfloat16: data parallel on one axis, and on two."""
    size, (ids, targets) = dist.get_world_size(), ranks.tiny_batch(0)
    single = hap.compile(
        ranks.tiny().float(),
        ranks.unequal_cluster(size, "nccl" if device.type == "cuda" else "gloo"),
        example_inputs=(ids,),
        example_targets=targets,
        loss_fn=ranks.token_loss,
        pins=hap.Pins(placements=EVEN, ratios=tuple(float(size - rank) for rank in range(size))),
        effort="quick",
        device=device,
        reduce_dtype=torch.bfloat16,
    )
    return [single, train.hosts_program(device, ranks.tiny().float(), reduce_dtype=torch.bfloat16)]


def _over_what_rounding_allows(device: torch.device, program: hap.HapProgram, comm: Communicator) -> float:
    """The largest of what elements of gradients are off by over what they may be, alike on all ranks."""
    ids, targets = ranks.tiny_batch(0)
    share, my_targets = program.shard_batch((ids,), targets)
    program(*share, targets=my_targets).backward()
    gradients = program.full_gradients()
    digest = hashlib.sha256(b"".join(gradients[name].numpy().tobytes() for name in sorted(gradients)))
    comm.agree("gradients", digest.hexdigest())
    model, total, sizes = ranks.tiny().to(device), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for row, wanted in zip(ids.to(device), targets.to(device), strict=True):
        model.zero_grad()
        (ranks.token_loss(model(row[None]), wanted[None]) / len(ids)).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                own = parameter.grad.cpu()
                total[name], sizes[name] = total.get(name, 0) + own, sizes.get(name, 0) + own.abs()
    worst, allowed = 0.0, (1 + ROUNDING) ** comm.world_size - 1
    for name, gradient in total.items():
        error = (gradients[name].double() - gradient).abs()
        worst = max(worst, float((error / (allowed * sizes[name] + 1e-6 * gradient.abs().max())).max()))
    return worst


def train_by_acco_in_16_bits(device: torch.device) -> float:
    """How far what ACCO trains with gradients in bfloat16, on two axes, is from what it trains without, over how far
    that moves."""
    trained = []
    for reduce_dtype in (None, torch.bfloat16):
        program = train.hosts_program(device, ranks.tiny().float(), batches=1, reduce_dtype=reduce_dtype)
        acco = hap.Acco(program, torch.optim.SGD(program.parameters(), lr=0.1), batches=2)
        for number in range(8):
            ids, targets = ranks.tiny_batch(number)
            share, my_targets = program.shard_batch((ids,), targets)
            acco.step(*share, targets=my_targets)
        acco.finish()
        trained.append(program.state_dict())
    start, (plain, rounded) = ranks.tiny().float().state_dict(), trained
    moved = sum(float((plain[name] - start[name]).norm()) ** 2 for name in start) ** 0.5
    return sum(float((rounded[name] - plain[name]).norm()) ** 2 for name in start) ** 0.5 / moved
