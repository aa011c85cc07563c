"""Does HAP do on GPUs what it does on CPUs? Run it on a machine with one GPU, better with two or more:

    python benchmarks/gpu_check.py            # a verdict per item, and gpu_check.json in benchmarks/results
    python benchmarks/gpu_check.py --cpu      # rehearsal: the same code on Gloo and tiny sizes, no limits on timings

    one-rank       training on a one-rank NCCL group, stopped and gone on with, equals plain PyTorch, float64, 1e-10
    collectives    every collective in every decomposition, unequal and zero shares, equals the plain result exactly
    ranks          data parallel, ZeRO and tensor parallel with unequal shares equal one device, with one batch a step
                   and with three, whose gradients are exchanged once (2 GPUs or more)
    random         random numbers and dropout's masks on the GPU are those on the CPU
    overhead       forward and backward of the emitted program beside eager's, GPT-2 medium, bfloat16: at most 2% more
    compiled       the same beside torch.compile (no limit: the figure is printed)
    no-sync        no operation of a step makes the host wait for the GPU (torch.cuda.set_sync_debug_mode)
    curves         seconds of every op class of that model, measured, beside what the catalogue of GPUs predicts

Exit code: 0 every item passed or had to be left out, 1 an item failed, 2 bad arguments, 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import nn

import hap
from benchmarks import gpu_check_ranks as ranks
from benchmarks.common import RESULTS, commit, machine
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.cost_models.compute import parts_seconds
from hap.runtime.collectives import Communicator
from hap.runtime.discover import discover
from hap.runtime.profile_ops import Clock, distinct_calls, time_calls

NO_GPU = 3
MOST_OVERHEAD = 0.02
CURVES_WITHIN = 2.0  # a class that takes a noticeable part of a step is predicted within this factor
NOTICEABLE = 0.05
PLANS: dict[str, dict[str, str]] = {
    "data parallel": {"*": "R", "args.0": "S(0)"},
    "zero": {"*": "S(0)", "args.0": "S(0)"},
    "tensor parallel": {"*": "R", "wide.*.weight": "S(0)", "narrow.*.weight": "S(1)", "args.0": "R"},
}

Verdict = Literal["pass", "FAIL", "left out", "ran"]


@dataclass(frozen=True)
class Item:
    """One line of the result. ``ran``: done, with no limit to judge by."""

    name: str
    verdict: Verdict
    words: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """Where and how large. ``gpus`` is 0 in a rehearsal, where no timing is judged."""

    gpus: int
    batch: int
    sequence: int
    rounds: int

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.gpus else torch.device("cpu")

    def judge(self, good: bool) -> Verdict:
        """Of a timing."""
        return ("pass" if good else "FAIL") if self.gpus else "ran"


# ------------------------------------------------------------------------------------------------ the same numbers


def check_one_rank(setting: Setting) -> Item:
    with _alone(setting):
        worst = ranks.train_like_one_device(setting.device, {"one rank": {}})["one rank"]
    verdict: Verdict = "pass" if worst <= ranks.EXACT else "FAIL"
    return Item("one-rank", verdict, f"largest relative difference {worst:.1e}", {"relative_difference": worst})


def check_collectives(setting: Setting) -> Item:
    world_size = setting.gpus or 2
    found = ranks.start_ranks(world_size, bool(setting.gpus), ranks.compare_collectives, 5)
    wrong = sorted({kind for rank in found for kind in rank} - {"compared"})
    compared = sum(rank["compared"] for rank in found)
    words = f"{compared} results on {world_size} ranks" + (f"; wrong: {', '.join(wrong)}" if wrong else ", all exact")
    return Item("collectives", "FAIL" if wrong else "pass", words, {"compared": compared, "wrong": len(wrong)})


def check_ranks(setting: Setting) -> Item:
    if setting.gpus == 1:
        return Item("ranks", "left out", "needs two GPUs")
    world_size = setting.gpus or 2
    found = ranks.start_ranks(world_size, bool(setting.gpus), ranks.train_like_one_device, PLANS)
    worst = {name: max(rank[name] for rank in found) for name in PLANS}
    words = ", ".join(f"{name} {difference:.1e}" for name, difference in worst.items())
    good = all(difference <= ranks.EXACT for difference in worst.values())
    return Item("ranks", "pass" if good else "FAIL", f"{world_size} ranks: {words}", worst)


def check_random(setting: Setting) -> Item:
    found = ranks.random_numbers(setting.device)
    good = all(difference <= (1e-12 if name == "randn" else 0.0) for name, difference in found.items())
    words = ", ".join(f"{name} {difference:.1e}" for name, difference in found.items())
    return Item("random", "pass" if good else "FAIL", f"largest difference from the CPU's: {words}", found)


# ------------------------------------------------------------------------------------------------ time


def check_overhead(setting: Setting) -> list[Item]:
    """The emitted program, eager and torch.compile in turns, so that a clock that drifts meets all of them."""
    model, inputs = _gpt2(setting, dropout=0.0)
    with _alone(setting):
        steps: dict[str, Callable[[], None]] = {"program": _step(_compiled(model, inputs, setting), inputs)}
        eager = model.to(setting.device)
        steps["eager"] = _step(eager, inputs)
        backend = "inductor" if setting.gpus else "eager"  # a rehearsal waits for no C++ compiler
        steps["compiled"] = _step(torch.compile(eager, backend=backend), inputs)
        absent = _warm(steps)
        clock = Clock(setting.device)
        samples: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(setting.rounds):
            for name, step in steps.items():
                samples[name].append(clock.once(step))
    torch._dynamo.reset()
    return [
        _beside(setting, "overhead", samples, "eager", MOST_OVERHEAD),
        Item("compiled", "left out", absent) if absent else _beside(setting, "compiled", samples, "compiled", None),
    ]


def _warm(steps: dict[str, Callable[[], None]]) -> str:
    """Run each three times. Why there is no torch.compile here, if there is none; it then is no longer in ``steps``."""
    for name in ("program", "eager"):
        for _ in range(3):
            steps[name]()
    try:
        for _ in range(3):
            steps["compiled"]()
    except torch._dynamo.exc.TorchDynamoException as e:  # no compiler, no triton: a matter of the machine
        del steps["compiled"]
        return f"torch.compile does not work here ({type(e).__name__}: {str(e).strip().splitlines()[0][:160]})"
    return ""


def _beside(setting: Setting, name: str, samples: dict[str, list[float]], other: str, most: float | None) -> Item:
    """The median over rounds of how much longer the program took than ``other`` in the same round."""
    more = [a / b - 1 for a, b in zip(samples["program"], samples[other], strict=True)]
    middle = statistics.median(more)
    low, *_, high = statistics.quantiles(more, n=10)
    program, theirs = (statistics.median(samples[k]) for k in ("program", other))
    words = (
        f"program {1e3 * program:.2f} ms, {other} {1e3 * theirs:.2f} ms: {middle:+.1%} (80% of {len(more)} rounds "
        f"{low:+.1%} to {high:+.1%})"
    )
    figures = {"program_s": program, f"{other}_s": theirs, "overhead": middle, "low": low, "high": high}
    return Item(name, "ran" if most is None else setting.judge(middle <= most), words, figures)


def check_no_sync(setting: Setting) -> Item:
    """One warm step with dropout, clipping and AdamW, under the mode in which every wait of the host is an error."""
    model, inputs = _gpt2(setting, dropout=0.1)
    with _alone(setting):
        program = _compiled(model, inputs, setting)
        optimizer = torch.optim.AdamW(program.parameters(), lr=1e-4)
        run = _step(program, inputs)

        def step() -> None:
            run(clear=False)
            program.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for _ in range(3):
            step()
        try:
            with _no_sync(setting.device):
                step()
        except RuntimeError as e:
            if "synchroniz" not in str(e):
                raise
            frames = [f for f in traceback.extract_tb(e.__traceback__) if "/torch/" not in f.filename]
            where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].line}"
            return Item("no-sync", "FAIL", f"the host waits for the GPU at {where}")
    return Item("no-sync", "pass" if setting.gpus else "ran", "forward, backward, clipping and AdamW, with dropout")


@contextlib.contextmanager
def _no_sync(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_curves(setting: Setting) -> Item:
    """Every distinct call of the model timed on its own, against the roofline of the catalogue's numbers."""
    model, inputs = _gpt2(setting, dropout=0.0)
    comm = Communicator(None, setting.device)
    cluster = discover(comm)
    graph = capture(model, inputs)
    plan = hap.plan(model, cluster, example_inputs=inputs, effort="quick")
    candidates = {node.name: (plan.strategy(node.name),) for node in graph.nodes}
    parts = {call: found for call, (_, _, found) in distinct_calls(graph, candidates).items()}
    device = cluster.devices[0]
    measured, predicted = dict[str, float](), dict[str, float]()
    for timing in time_calls(graph, candidates, Clock(setting.device), shares=(1.0,)):
        kind = timing.op_class
        measured[kind] = measured.get(kind, 0.0) + timing.seconds
        predicted[kind] = predicted.get(kind, 0.0) + parts_seconds(parts[timing.call], timing.share, device)
    ratios = {kind: predicted[kind] / measured[kind] for kind in measured}
    total = sum(measured.values())
    judged = {kind: r for kind, r in ratios.items() if measured[kind] >= NOTICEABLE * total}
    good = all(1 / CURVES_WITHIN <= r <= CURVES_WITHIN for r in judged.values())
    listed = cluster.hosts[0].devices[0].gpu is not None
    words = f"predicted / measured of {device.gpu} ({'catalogue' if listed else 'not in the catalogue'}): "
    words += ", ".join(f"{kind} {r:.2f}" for kind, r in sorted(ratios.items()))
    figures = {f"{kind}_ratio": r for kind, r in ratios.items()} | {f"{k}_s": s for k, s in measured.items()}
    return Item("curves", setting.judge(good), words, figures)


# ------------------------------------------------------------------------------------------------ what they run


def _gpt2(setting: Setting, dropout: float) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 medium in bfloat16 (a toy of two layers in a rehearsal) and a batch, both on the CPU."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_embd": 1024, "n_layer": 24, "n_head": 16} if setting.gpus else {"n_embd": 32, "n_layer": 2, "n_head": 2}
    vocabulary = 50257 if setting.gpus else 97
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=setting.sequence,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        **size,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to(torch.bfloat16).train()
    model.loss_type = "ForCausalLM"  # what transformers falls back to, with a warning
    ids = torch.randint(0, vocabulary, (setting.batch, setting.sequence))
    return model, {"input_ids": ids, "labels": ids}


def _compiled(model: nn.Module, inputs: dict[str, torch.Tensor], setting: Setting) -> hap.HapProgram:
    cluster = ClusterSpec.from_yaml(
        "name: one\nhosts: [{name: here, devices: [{name: d, tflops: {float32: 20, bfloat16: 200}, memory: 1000GB, "
        "memory_bandwidth: 1000GB/s}]}]\nbackend: " + ("nccl" if setting.gpus else "gloo")
    )
    return hap.compile(model, cluster, example_inputs=inputs, effort="quick", device=setting.device)


def _step(module: Any, inputs: dict[str, torch.Tensor]) -> Callable[..., None]:
    """Forward and backward. The batch is on the device before anything is timed."""
    device = next(module.parameters()).device
    batch = {name: value.to(device) for name, value in inputs.items()}

    def run(clear: bool = True) -> None:
        out = module(**batch)
        (out if isinstance(out, torch.Tensor) else out.loss).backward()
        if clear:
            for parameter in module.parameters():
                parameter.grad = None

    return run


@contextlib.contextmanager
def _alone(setting: Setting) -> Iterator[None]:
    """A process group of this process alone, on NCCL where there are GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        ranks.join(0, 1, bool(setting.gpus), folder)
        try:
            yield
        finally:
            dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------ the frame

CHECKS: dict[str, Callable[[Setting], Item | list[Item]]] = {
    "one-rank": check_one_rank,
    "collectives": check_collectives,
    "ranks": check_ranks,
    "random": check_random,
    "overhead": check_overhead,
    "no-sync": check_no_sync,
    "curves": check_curves,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="rehearse on the CPU: Gloo, tiny sizes, timings not judged")
    parser.add_argument("--only", action="append", choices=CHECKS, help="this item (again for more)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 512 tokens in the timed batch")
    parser.add_argument("--rounds", type=int, default=30, help="repetitions of what is timed")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="default: benchmarks/results")
    given = parser.parse_args(argv)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and not given.cpu:
        print("no GPU here: nothing was checked (--cpu rehearses the same code on this machine's CPU)", file=sys.stderr)
        return NO_GPU
    setting = Setting(0, 4, 16, 3) if given.cpu else Setting(gpus, given.batch, 512, given.rounds)
    where = "rehearsal on the CPU" if given.cpu else f"{gpus} x {torch.cuda.get_device_name(0)}"
    print(f"{where}, torch {torch.__version__}")
    items: list[Item] = []
    for name, check in CHECKS.items():
        if given.only and name not in given.only:
            continue
        for item in _guarded(name, check, setting):
            print(f"{item.verdict:>8}  {item.name:<12} {item.words}", flush=True)
            items.append(item)
    body = {
        "command": " ".join(["python", "benchmarks/gpu_check.py", *(["--cpu"] if given.cpu else [])]),
        "commit": commit(),
        "machine": machine(),
        "nccl": list(torch.cuda.nccl.version()) if gpus else None,
        "items": [asdict(item) for item in items],
    }
    given.out.mkdir(parents=True, exist_ok=True)
    name = "gpu_check_rehearsal.json" if given.cpu else "gpu_check.json"
    (given.out / name).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {name}")
    return 1 if any(item.verdict == "FAIL" for item in items) else 0


def _guarded(name: str, check: Callable[[Setting], Item | list[Item]], setting: Setting) -> list[Item]:
    """What the check found. One that breaks has failed, its traceback on stderr, and the others are still run."""
    started = time.monotonic()
    try:
        found = check(setting)
    except Exception as e:
        traceback.print_exc()
        words = f"broke after {time.monotonic() - started:.0f} s: {type(e).__name__}: {' '.join(str(e).split())[:300]}"
        return [Item(name, "FAIL", words)]
    finally:
        if setting.gpus:
            torch.cuda.empty_cache()
    return found if isinstance(found, list) else [found]


if __name__ == "__main__":
    raise SystemExit(main())
