"""``fully_shard`` in the race, and what it holds: its collectives are torch's own and told to the pace call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.testbed.pace import Deadline
from hap.build import BuiltModel

RATE = 1e-3


class Fsdp:
    """``fully_shard`` of every layer and of the whole; rank r has ``sizes[r]`` samples. FSDP2 averages gradients over
    the ranks, so the loss has the weight of the samples times the number of ranks."""

    def __init__(self, built: BuiltModel, sizes: Sequence[int]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        rank, start = dist.get_rank(), sum(sizes[: dist.get_rank()])
        self.pace: Deadline | None = None
        self.weight = sizes[rank] / sum(sizes) * dist.get_world_size()
        self.batch = built.example_inputs[start : start + sizes[rank]]
        self.targets = built.example_targets[start : start + sizes[rank]]
        assert built.loss_fn is not None
        self.loss_fn = built.loss_fn
        self.module = built.model
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in _blocks(built.model):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=RATE)

    def step(self) -> float:
        with _paced_calls(self.pace):
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.weight * self.loss_fn(self.module(self.batch), self.targets)
            loss.backward()
        self.optimizer.step()
        return float(loss.detach()) / dist.get_world_size()

    def tensors(self) -> list[torch.Tensor]:
        return [t.to_local() if hasattr(t, "to_local") else t for t in held(self.module, self.optimizer)]


def _blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated layers, or the children of a plain sequence."""
    layers = getattr(model, "layers", None)
    if layers is None:
        return [m for m in model.children() if any(True for _ in m.parameters())]
    return list(getattr(layers, "layers", layers))


class _PacedWork:
    """A torch Work whose waiting is not compute."""

    def __init__(self, work: Any, pace: Deadline) -> None:
        self._work, self._pace = work, pace

    def wait(self, *args: Any) -> Any:
        self._pace.settle()
        done = self._work.wait(*args)
        self._pace.resume()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def _paced_calls(pace: Deadline | None) -> Iterator[None]:
    """torch's collectives that FSDP calls tell the pace."""
    names = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")
    before = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    if pace is None:
        yield
        return

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def paced(*args: Any, **kwargs: Any) -> Any:
            pace.settle()
            work = call(*args, **kwargs)
            pace.resume()
            return None if work is None else _PacedWork(work, pace)

        return paced

    for name, call in before.items():
        setattr(dist, name, wrapped(call))
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(dist, name, call)


def held(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return [*parameters, *gradients, *state]
