"""Train a small GPT-2 on unequal devices: an ordinary PyTorch loop around ``hap.compile``.

    torchrun --nproc-per-node 4 examples/train_gpt2.py --cluster examples/cluster-4.yaml

The model is Hugging Face's GPT-2 with random weights; the text is the Python language reference that ships inside
Python (``pydoc_data.topics``), read character by character. With a GPU for every rank it runs on NCCL; otherwise on
Gloo, with the devices' speeds emulated (``hap/runtime/emulate.py``). At the end rank 0 repeats the first steps alone,
as one device would, and prints the largest difference. Predictions are better with what was measured before:

    hap profile examples/train_gpt2.py:build --cluster examples/cluster-4.yaml --emulate -o profile.json
    torchrun --nproc-per-node 4 examples/train_gpt2.py --cluster examples/cluster-4.yaml --profile profile.json

``--plan`` takes a plan of ``hap plan examples/train_gpt2.py:build`` for this cluster, which must be for NCCL on GPUs.
Without a profile what is emulated is another cluster, measured when the job starts: no plan is for it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.utils.data import DataLoader, Dataset, default_collate
from transformers import GPT2Config, GPT2LMHeadModel

import hap
from hap.cluster import ClusterSpec
from hap.report.measured import StepLog
from hap.report.summary import summarize
from hap.report.words import quantity, seconds
from hap.runtime import emulate
from hap.runtime.data import ShareSampler
from hap.runtime.emulate import Throttle
from hap.runtime.program import HapProgram


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--profile", metavar="X.json", help="what hap profile measured on this cluster")
    parser.add_argument("--plan", metavar="X.plan.json", help="the plan to run, instead of a search; see above")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16, help="global batch size")
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--keep", metavar="DIR", help="write the measured steps there, for hap report --run DIR")
    parser.add_argument("--check", type=int, default=3, help="steps to repeat on one device and compare")
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser()
    arguments = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("start me with torchrun, one process per device: see --help")
    if arguments.plan is not None and arguments.profile is None and not gpu_for_every_rank():
        parser.error("--plan without a GPU for every rank needs the --profile it was made with: see --help")
    if arguments.check < 1 or arguments.steps < arguments.check + 3:
        parser.error("--check needs at least 1 step, and --steps 3 more than that: those are timed")
    return arguments


def gpu_for_every_rank() -> bool:
    return torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])


class Characters(Dataset[dict[str, torch.Tensor]]):
    """Windows of the text, one after another, as ids of its distinct characters."""

    def __init__(self, text: str, length: int) -> None:
        self.alphabet = sorted(set(text))
        ids = {c: i for i, c in enumerate(self.alphabet)}
        self.windows = torch.tensor([ids[c] for c in text[: len(text) // length * length]]).view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def build_model(arguments: argparse.Namespace, vocabulary: int) -> GPT2LMHeadModel:
    """The same random weights on every rank. Dropout is off, so that one device computes the same loss."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=arguments.sequence,
        n_embd=arguments.width,
        n_layer=arguments.layers,
        n_head=arguments.heads,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what transformers falls back to, with a warning
    return model


def read_text(arguments: argparse.Namespace) -> Characters:
    return Characters("\n".join(topics.values()), arguments.sequence)


def example_of(data: Characters, arguments: argparse.Namespace) -> dict[str, torch.Tensor]:
    """A global batch."""
    batch: dict[str, torch.Tensor] = default_collate([data[0]] * arguments.batch)
    return batch


def build() -> tuple[GPT2LMHeadModel, dict[str, torch.Tensor]]:
    """The model and a batch as they are by default: for ``hap profile`` and ``hap plan``."""
    arguments = argument_parser().parse_args(["--cluster", "the same for any"])
    data = read_text(arguments)
    return build_model(arguments, len(data.alphabet)), example_of(data, arguments)


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Linear warm-up over the first tenth."""
    warm = max(1, steps // 10)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))


class Trainer:
    """One training step, written once: HAP's program and the single device run the same lines."""

    def __init__(self, module: torch.nn.Module, clip: Callable[[float], object], arguments: argparse.Namespace) -> None:
        self.module, self.clip = module, clip
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=arguments.learning_rate)
        self.scheduler = schedule(self.optimizer, arguments.steps)

    def gradients(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Fill the gradients; the loss of the *global* batch."""
        self.optimizer.zero_grad(set_to_none=True)
        out = self.module(**batch)
        loss: torch.Tensor = out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.clip(1.0)
        self.optimizer.step()
        self.scheduler.step()


@dataclass
class Record:
    """What a run leaves behind. ``gradients`` are whole, of the steps to compare; ``seconds`` leaves those out."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)


def train(program: HapProgram, data: Characters, arguments: argparse.Namespace, throttle: Throttle | None) -> Record:
    """The loop, on every rank. Rank 0 shows the progress."""
    sampler = program.batch_sampler(len(data), shuffle=True, seed=0)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=program.collate)
    trainer = Trainer(program, program.clip_grad_norm_, arguments)
    record = Record()
    with progress_bar(arguments.steps) as show:
        for step, batch in zip(range(arguments.steps), forever(loader, sampler), strict=False):
            if step == arguments.check and throttle is not None:
                throttle.resume()
                program.set_pace(throttle)  # not before: a first step imports and allocates what later ones have
            start = time.perf_counter()
            loss = trainer.gradients({k: v.to(program.device) for k, v in batch.items()})
            if step < arguments.check:
                record.gradients.append(program.full_gradients())
            trainer.update()
            if throttle is not None and step >= arguments.check:
                throttle.settle()
            record.losses.append(loss.item())
            if step > arguments.check:
                record.seconds.append(time.perf_counter() - start)
            show(record.losses)
    return record


def forever(loader: DataLoader[Any], sampler: ShareSampler) -> Iterator[dict[str, torch.Tensor]]:
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


@contextmanager
def progress_bar(steps: int) -> Iterator[Callable[[list[float]], None]]:
    """Shown by rank 0: a bar, and a line with the mean loss of every tenth of the run."""
    if dist.get_rank() != 0:
        yield lambda losses: None
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns) as bar:
        task, tenth = bar.add_task("", total=steps), max(1, steps // 10)

        def show(losses: list[float]) -> None:
            bar.update(task, advance=1, description=f"loss {losses[-1]:.3f}")
            if len(losses) % tenth == 0:
                bar.console.print(f"  step {len(losses):4d}   loss {statistics.fmean(losses[-tenth:]):.3f}")

        yield show


def one_device(data: Characters, arguments: argparse.Namespace, device: torch.device) -> Record:
    """The first steps once more, by plain PyTorch on whole batches."""
    model = build_model(arguments, len(data.alphabet)).to(device)
    trainer = Trainer(model, lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm), arguments)
    order = ShareSampler(len(data), arguments.batch, None, 0, shuffle=True, seed=0)
    record = Record()
    for indices in itertools.islice(order, arguments.check):
        batch = default_collate([data[i] for i in indices])
        loss = trainer.gradients({k: v.to(device) for k, v in batch.items()})
        record.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        record.losses.append(loss.item())
        trainer.update()
    return record


def largest_difference(ours: Record, theirs: Record) -> tuple[float, float]:
    """(of the loss, of any gradient), relative: a gradient's difference to the largest entry of that gradient."""
    loss = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=False))
    gradient = 0.0
    for mine, reference in zip(ours.gradients, theirs.gradients, strict=True):
        for name, whole in reference.items():
            scale = float(whole.abs().max().clamp(min=1e-12))
            gradient = max(gradient, float((mine[name].cpu() - whole.cpu()).abs().max()) / scale)
    return loss, gradient


def report(program: HapProgram, record: Record, reference: Record) -> None:
    predicted, measured = program.plan.predicted.as_run_s, statistics.median(record.seconds)
    tenths = statistics.quantiles(record.seconds, n=10)
    loss, gradient = largest_difference(record, reference)
    print(f"loss       {record.losses[0]:.3f} at the first step, {statistics.fmean(record.losses[-5:]):.3f} at the end")
    print(
        f"step time  predicted {seconds(predicted)}, measured {seconds(measured)} (median; 80% of steps took "
        f"{seconds(tenths[0])} to {seconds(tenths[-1])}); predicted / measured = {predicted / measured:.2f}"
    )
    print(
        f"one device repeats the first {len(reference.losses)} steps in float32: largest relative difference "
        f"{loss:.1e} of the loss, {gradient:.1e} of a gradient"
    )


def keep(folder: str, program: HapProgram, record: Record) -> None:
    """The plan and the measured steps: ``hap report DIR/run.plan.json --run DIR``."""
    log = StepLog(folder)
    for step, taken in enumerate(record.seconds):
        log.add(step, taken)
    program.plan.save(f"{folder}/run.plan.json")
    print(f"kept in {folder}: hap report {folder}/run.plan.json --run {folder}")


def main() -> None:
    arguments = parse_arguments()
    world_size, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    on_gpus = gpu_for_every_rank()
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    say = print if dist.get_rank() == 0 else lambda _: None

    cluster, throttle = ClusterSpec.load(arguments.cluster), None
    if arguments.plan is None:  # which may leave out devices
        cluster.check_world_size(world_size)
    if on_gpus:
        cluster = cluster.model_copy(update={"backend": "nccl"})
    else:
        played, throttle = emulate.play(cluster)
        cluster = played if arguments.profile is None else cluster
        say(f"no GPU for every rank: {emulate.NOTICE}")

    data = read_text(arguments)
    say(f"text: the Python language reference, {quantity(data.windows.numel())} characters")
    model = build_model(arguments, len(data.alphabet))
    example = example_of(data, arguments)
    started = time.perf_counter()
    program = hap.compile(
        model, cluster, example_inputs=example, plan=arguments.plan, profile=arguments.profile, device=device
    )
    say(f"planned and compiled in {seconds(time.perf_counter() - started)}\n")
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    say(f"{summarize(program.plan, cluster if arguments.plan is None else None, sizes)}\n")
    record = train(program, data, arguments, throttle)
    if dist.get_rank() == 0:
        report(program, record, one_device(data, arguments, device))
        if arguments.keep is not None:
            keep(arguments.keep, program, record)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
