"""Other ways to train than step by step on one axis, for ``benchmarks/gpu_check.py``: ACCO, and a mesh of two axes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import hap
from benchmarks.gpu_check_ranks import relative, tiny, tiny_batch, tiny_program, token_loss
from hap.cluster import ClusterSpec

BATCHES, UPDATES, MAX_NORM = 4, 3, 0.5
STEPS = 3


def train_by_acco(device: torch.device, pins: dict[str, str]) -> float:
    """The largest relative difference, of losses and of parameters after the last update, from the paper's equations on
    one device (arXiv 2406.02613, section 3), with clipping."""
    return follow_the_equations(tiny_program(device, pins, BATCHES // 2))


def follow_the_equations(program: hap.HapProgram) -> float:
    """``train_by_acco``, of any program of the tiny model."""
    device = program.device
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-3)
    acco = hap.Acco(program, optimizer, batches=BATCHES, max_norm=MAX_NORM)
    theirs, worst = _Equations(device), 0.0
    for number in range(BATCHES * UPDATES):
        ids, targets = tiny_batch(number)
        mine, my_targets = program.shard_batch((ids,), targets)
        loss = acco.step(*mine, targets=my_targets)
        worst = max(worst, relative(loss, theirs.step(ids.to(device), targets.to(device))))
    acco.finish()
    state = program.state_dict()
    return max(worst, *(relative(state[name], p) for name, p in theirs.model.state_dict().items()))


class _Equations:
    """``model`` is x; ``now`` is what the batches of this half are computed at, ``after`` those of the next."""

    def __init__(self, device: torch.device) -> None:
        self.model = tiny().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.now, self.after = copy.deepcopy(self.model), copy.deepcopy(self.model)
        self.first: list[torch.Tensor] | None = None
        self.count = 0

    def step(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = token_loss(self.now(ids), targets)
        (loss / BATCHES).backward()
        self.count += 1
        if self.count % (BATCHES // 2) == 0:
            self._half([p.grad.clone() for p in self.now.parameters() if p.grad is not None])
        return loss.detach()

    def _half(self, found: list[torch.Tensor]) -> None:
        self.now = self.after
        if self.first is None:
            guess = copy.deepcopy(self.model)
            optimizer = torch.optim.AdamW(guess.parameters(), lr=1e-3)
            optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
            _update(guess, optimizer, [2 * gradient for gradient in found])
            self.first, self.after = found, guess
        else:
            _update(self.model, self.optimizer, [a + b for a, b in zip(self.first, found, strict=True)])
            self.first, self.after = None, copy.deepcopy(self.model)


def _update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def train_over_hosts(device: torch.device) -> float:
    """A plan of two axes, for two hosts with half of the ranks each: the largest relative difference of losses,
    gradients and parameters from one device."""
    return train_hosts(hosts_program(device, tiny()), STEPS)


def hosts_program(
    device: torch.device, model: torch.nn.Module, *, batches: int = 1, reduce_dtype: torch.dtype | None = None
) -> hap.HapProgram:
    """The tiny model's, of two axes, planned for so many batches a step."""
    ids, targets = tiny_batch(0)
    given: dict[str, Any] = {"example_inputs": (ids,), "example_targets": targets, "loss_fn": token_loss}
    plan = hap.plan_mesh(
        model,
        two_hosts(dist.get_world_size(), device),
        effort="quick",
        gradient_accumulation_steps=batches,
        reduce_dtype=reduce_dtype,
        **given,
    )
    return hap.compile(model, plan=plan, device=device, **given)


def train_hosts(program: hap.HapProgram, steps: int, before: Callable[[int], None] = lambda step: None) -> float:
    """The largest relative difference of losses, gradients and parameters from one device. ``before`` each step."""
    device = program.device
    model, worst = tiny().to(device), 0.0
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (program, model))
    for step in range(steps):
        before(step)
        ids, targets = tiny_batch(step)
        mine, my_targets = program.shard_batch((ids,), targets)
        loss, reference = program(*mine, targets=my_targets), token_loss(model(ids.to(device)), targets.to(device))
        loss.backward()
        reference.backward()
        gradients = program.full_gradients()
        worst = max(worst, relative(loss, reference))
        worst = max(worst, *(relative(gradients[n], p.grad) for n, p in model.named_parameters() if p.grad is not None))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    state = program.state_dict()
    return max(worst, *(relative(state[name], p) for name, p in model.state_dict().items()))


def two_hosts(ranks: int, device: torch.device) -> ClusterSpec:
    """The second of slower devices."""
    hosts = "".join(
        f"\n  - name: h{number}\n    link: {{bandwidth: 50GB/s, latency: 5us}}\n    network: {{bandwidth: 1GB/s, "
        f"latency: 20us}}\n    devices: [{', '.join([_device(number)] * count)}]"
        for number, count in enumerate((ranks - ranks // 2, ranks // 2))
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    return ClusterSpec.from_yaml(f"name: hosts\nbackend: {backend}\nhosts:{hosts}\n")


def _device(host: int) -> str:
    return f"{{tflops: {{float32: {2.0**-host}, float64: {2.0**-host}}}, memory: 8GB, memory_bandwidth: 900GB/s}}"
