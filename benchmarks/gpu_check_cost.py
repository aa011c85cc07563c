"""What a step costs on a GPU, for ``benchmarks/gpu_check.py``: seconds beside eager's and torch.compile's, waits of the
host, bytes, and what the cost model says of all of it.

Timings are taken in turns, there and back, so that a clock that drifts meets all of them, whatever they come after.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

import hap
from benchmarks import gpu_check_ranks as ranks
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.cost_models.compute import parts_seconds, split_work
from hap.cost_models.fit import Timing
from hap.cost_models.work import node_work
from hap.runtime.collectives import Communicator
from hap.runtime.discover import discover
from hap.runtime.profile import measure
from hap.runtime.profile_ops import Clock, distinct_calls, time_calls
from hap.runtime.profile_step import whole_calls

MOST_OVERHEAD = 0.02
CURVES_WITHIN = 2.0  # a class that takes a noticeable part of a step is predicted within this factor
NOTICEABLE = 0.05
STEP_WITHIN = 0.1  # predicted from a profile
MEMORY_WITHIN = 0.1
WORST = 12  # calls told of

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
    """Where and how large. ``gpus`` is 0 in a rehearsal, where no timing is judged. ``ranks`` may share a GPU."""

    gpus: int
    ranks: int
    batch: int
    sequence: int
    rounds: int

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.gpus else torch.device("cpu")

    @property
    def on(self) -> str:
        shared = f" that share {self.gpus} GPU{'s' * (self.gpus > 1)}" if 0 < self.gpus < self.ranks else ""
        return f"{self.ranks} ranks{shared}"

    def judge(self, good: bool) -> Verdict:
        """Of a timing."""
        return ("pass" if good else "FAIL") if self.gpus else "ran"


def check_overhead(setting: Setting) -> list[Item]:
    """The emitted program, eager and torch.compile, in turns."""
    model, inputs = _gpt2(setting, dropout=0.0)
    with alone(setting):
        steps: dict[str, Callable[[], None]] = {"program": _step(_compiled(model, inputs, setting), inputs)}
        eager = model.to(setting.device)
        steps["eager"] = _step(eager, inputs)
        backend = "inductor" if setting.gpus else "eager"  # a rehearsal waits for no C++ compiler
        steps["compiled"] = _step(torch.compile(eager, backend=backend), inputs)
        fast = _compiled(model, inputs, setting)
        fast.compile(backend=backend)
        steps["program.compile()"] = _step(fast, inputs)
        absent = _warm(steps)
        clock = Clock(setting.device)
        samples: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(setting.rounds):  # what comes after a hotter step is slower: each does, in turns
            for name in list(steps)[:: 1 if number % 2 else -1]:
                samples[name].append(clock.once(steps[name]))
    torch._dynamo.reset()
    plain = _beside(setting, "overhead", samples, ("program", "eager"), MOST_OVERHEAD)
    if absent:
        return [plain, *(Item(name, "left out", absent) for name in ("compiled", "both"))]
    one = _beside(setting, "compiled", samples, ("program", "compiled"), None)
    return [plain, one, _beside(setting, "both", samples, ("program.compile()", "compiled"), None)]


def _warm(steps: dict[str, Callable[[], None]]) -> str:
    """Run each three times. Why there is no torch.compile here, if there is none; what needs it is then no longer in
    ``steps``."""
    for name in ("program", "eager"):
        for _ in range(3):
            steps[name]()
    try:
        for _ in range(3):
            steps["compiled"]()
    except torch._dynamo.exc.TorchDynamoException as e:  # no compiler, no triton: a matter of the machine
        del steps["compiled"], steps["program.compile()"]
        return f"torch.compile does not work here ({type(e).__name__}: {str(e).strip().splitlines()[0][:160]})"
    for _ in range(3):  # what goes wrong here is ours
        steps["program.compile()"]()
    return ""


def _beside(
    setting: Setting, name: str, samples: dict[str, list[float]], pair: tuple[str, str], most: float | None
) -> Item:
    """The median over rounds of how much longer the first of a pair took than the other in the same round."""
    ours, other = pair
    more = [a / b - 1 for a, b in zip(samples[ours], samples[other], strict=True)]
    middle = statistics.median(more)
    low, *_, high = statistics.quantiles(more, n=10)
    program, theirs = (statistics.median(samples[k]) for k in pair)
    words = (
        f"{ours} {1e3 * program:.2f} ms, {other} {1e3 * theirs:.2f} ms: {middle:+.1%} (80% of {len(more)} rounds "
        f"{low:+.1%} to {high:+.1%})"
    )
    figures = {"program_s": program, f"{other}_s": theirs, "overhead": middle, "low": low, "high": high}
    return Item(name, "ran" if most is None else setting.judge(middle <= most), words, figures)


def check_no_sync(setting: Setting) -> Item:
    """One warm step with dropout, clipping and AdamW, under the mode in which every wait of the host is an error."""
    model, inputs = _gpt2(setting, dropout=0.1)
    with alone(setting):
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
    """Every distinct call of the model timed on its own, as often as the model makes it, against the roofline of the
    catalogue's numbers. The calls that are furthest from it go to stderr."""
    model, inputs = _gpt2(setting, dropout=0.0)
    comm = Communicator(None, setting.device)
    cluster = discover(comm)
    graph = capture(model, inputs)
    plan = hap.plan(model, cluster, example_inputs=inputs, effort="quick")
    candidates = {node.name: (plan.strategy(node.name),) for node in graph.nodes}
    parts = {call: found for call, (_, _, found) in distinct_calls(graph, candidates).items()}
    device = cluster.devices[0]
    made = Counter(split_work(node_work(graph, n), plan.strategy(n.name)).call for n in graph.nodes if not n.is_source)
    measured, predicted = dict[str, float](), dict[str, float]()
    worst: list[tuple[float, str]] = []
    for timing in time_calls(graph, candidates, Clock(setting.device), shares=(1.0,)):
        kind, count = timing.op_class, made[timing.call]
        seconds = parts_seconds(parts[timing.call], timing.share, device)
        measured[kind] = measured.get(kind, 0.0) + count * timing.seconds
        predicted[kind] = predicted.get(kind, 0.0) + count * seconds
        worst.append((count * abs(timing.seconds - seconds), _told(count, timing, seconds)))
    print("\n".join(words for _, words in sorted(worst, reverse=True)[:WORST]), file=sys.stderr)
    ratios = {kind: predicted[kind] / measured[kind] for kind in measured}
    total = sum(measured.values())
    judged = {kind: r for kind, r in ratios.items() if measured[kind] >= NOTICEABLE * total}
    good = all(1 / CURVES_WITHIN <= r <= CURVES_WITHIN for r in judged.values())
    listed = cluster.hosts[0].devices[0].gpu is not None
    words = f"predicted / measured of {device.gpu} ({'catalogue' if listed else 'not in the catalogue'}): "
    words += ", ".join(f"{kind} {r:.2f}" for kind, r in sorted(ratios.items()))
    figures = {f"{kind}_ratio": r for kind, r in ratios.items()} | {f"{k}_s": s for k, s in measured.items()}
    return Item("curves", setting.judge(good), words, figures)


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
def alone(setting: Setting) -> Iterator[None]:
    """A process group of this process alone, on NCCL where there are GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        ranks.join(0, 1, bool(setting.gpus), folder)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _told(count: int, timing: Timing, predicted_s: float) -> str:
    return f"{count:4} x {1e6 * timing.seconds:8.1f} us, predicted {1e6 * predicted_s:8.1f}: {timing.call[:150]}"


def check_memory(setting: Setting) -> Item:
    """Of the second step, when the optimizer has its state. The allocator's bytes, not the pages that it keeps."""
    model, inputs = _gpt2(setting, dropout=0.0)
    with alone(setting):
        program = _compiled(model, inputs, setting)
        step = _trained(program, inputs)
        step()
        if setting.gpus:
            torch.cuda.reset_peak_memory_stats(setting.device)
            step()
            measured = torch.cuda.max_memory_allocated(setting.device)
        else:
            step()
            return Item("memory", "ran", "the CPU's allocator does not say")
    predicted = program.plan.predicted.memory_bytes[0]
    error = predicted / measured - 1
    words = f"predicted {predicted / 1e9:.2f} GB, measured {measured / 1e9:.2f} GB: {error:+.1%}"
    figures = {"predicted": float(predicted), "measured": float(measured), "error": error}
    return Item("memory", setting.judge(abs(error) <= MEMORY_WITHIN), words, figures)


def check_step(setting: Setting) -> Item:
    """Forward, backward and AdamW, beside what a plan predicts from a profile made here, and from the catalogue."""
    model, inputs = _gpt2(setting, dropout=0.0)
    with alone(setting):
        comm = Communicator(None, setting.device)
        cluster = discover(comm)
        graph = capture(model, inputs)
        profile = measure(cluster, comm, [(graph, whole_calls(graph))], optimizers=("adamw",))
        plan = hap.plan(model, cluster, example_inputs=inputs, effort="quick", profile=profile)
        listed = hap.plan(model, cluster, example_inputs=inputs, effort="quick").predicted.as_run_s
        step = _trained(_compiled(model, inputs, setting), inputs)
        for _ in range(3):
            step()
        clock = Clock(setting.device)
        measured = statistics.median(clock.once(step) for _ in range(setting.rounds))
    predicted = plan.predicted.as_run_s
    error, by_catalogue = predicted / measured - 1, listed / measured - 1
    words = (
        f"measured {1e3 * measured:.2f} ms, predicted from a profile {1e3 * predicted:.2f} ms ({error:+.1%}), from the "
        f"catalogue {1e3 * listed:.2f} ms ({by_catalogue:+.1%})"
    )
    figures = {"measured_s": measured, "predicted_s": predicted, "error": error, "catalogue_error": by_catalogue}
    return Item("step", setting.judge(abs(error) <= STEP_WITHIN), words, figures)


def _trained(program: hap.HapProgram, inputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """A step with its update."""
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-4)
    run = _step(program, inputs)

    def step() -> None:
        run(clear=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
