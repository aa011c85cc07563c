"""Random lives of a job: whatever a training loop does to a program, in any order, beside a plain model on one device.

    OMP_NUM_THREADS=1 python -m tests._support.life 0 100      # lives of these seeds, by turns on one axis and on two

After each move the losses are compared, and at times outputs, gradients and states; the first that differs is told with
the moves that led to it.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hap
from benchmarks.zoo_models.reference import SameDraws
from hap.capture import capture
from hap.mesh_plan import MeshPlan
from hap.plan import Plan, Recomputed
from hap.rules.choices import choices
from hap.runtime.mesh import MeshProgram
from hap.runtime.state import whole_tensor
from tests._support.mesh import make_mesh
from tests._support.plans import (
    greedy_strategies,
    make_plan,
    random_postponed,
    random_sizes,
    random_strategies,
    sizes_for,
)
from tests._support.ranks import run_ranks

BATCH, WORDS, WIDTH, LENGTH, TOLERANCE = 8, 11, 6, 5, 1e-8
HOSTS = {2: [(1, 1)], 3: [(2, 1), (1, 2), (1, 1, 1)], 4: [(2, 2), (3, 1), (1, 2, 1)]}
OFTEN = {"train": 5.0, "update": 5.0, "compare": 3.0, "add_up": 2.0, "two_losses": 2.0, "evaluate": 2.0, "resume": 0.5}
Data = dict[str, Any]


class Life(nn.Module):
    """Tied weights, a frozen layer, batch norm, dropout, a buffer of its own; two tasks, a number, a mask at times."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Dropout(0.2), nn.Linear(9, WIDTH, bias=False))
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.head, self.value = nn.Linear(WIDTH, WORDS, bias=False), nn.Linear(WIDTH, 1)
        self.head.weight = self.table.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(
        self, ids: torch.Tensor, task: str = "words", scale: float = 1.0, mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        x = self.norm(self.table(ids))
        if mask is not None:
            x = x * mask[..., None]
        x = x + self.mix(self.fixed(x))
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        if self.training:
            self.seen.add_(x.detach().square().mean())
        if task == "words":
            loss = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        else:
            loss = (self.value(x).squeeze(-1).mean(1) - ids.double().mean(1)).square().mean()
        return {"loss": scale * loss, "out": x}


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Life().double()


def example() -> Data:
    ids = torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "task": "words", "scale": 1.0, "mask": None}


def draw_plan(source: random.Random, world: int, two_axes: bool) -> Plan | MeshPlan:
    """Strategies, sizes and what is computed again, or postponed, at random, or everything cut along its first dim."""
    graph = capture(build(), example(), outputs=("out",))
    if two_axes:
        hosts = source.choice(HOSTS[world])
        cuts = [0, *sorted(source.sample(range(1, BATCH), len(hosts) - 1)), BATCH]
        batches = [after - before for before, after in itertools.pairwise(cuts)]
        return make_mesh(graph, hosts, batches, source.choice([None, source.randrange(1000)]))
    found, regather = choices(graph), source.random() < 0.5
    if source.random() < 0.3:
        rows = {n.target: (0, n.meta.shape[0]) for n in graph.sources("parameter") if n.meta.shape[0] > 1}
        strategies = greedy_strategies(found, rows | {"kwargs.ids": (0, BATCH)})
        sizes = sizes_for(found, (*(source.randint(0, 4) for _ in range(world - 1)), 3))
    else:
        strategies, sizes = random_strategies(found, source), random_sizes(found, world, source)
    forward = [n.name for n in graph.nodes if n.phase == "forward" and not n.is_source]
    again = tuple(name for name in forward if source.random() < 0.7) if source.random() < 0.3 else ()
    recomputed = [Recomputed(block="model", what="all", calls=again)] if again else []
    late = {} if source.random() < 0.5 else random_postponed(graph, source)
    return make_plan(
        found, strategies, sizes, regather=regather, recomputed=recomputed, postponed=late, world_size=world
    )


def compiled(plan: Plan | MeshPlan, seed: int = 0) -> hap.HapProgram:
    return hap.compile(build(seed), plan=plan, example_inputs=example(), outputs=("out",))


def same(found: Any, expected: Any, what: str) -> None:
    found, expected = (torch.as_tensor(t).detach().double() for t in (found, expected))
    assert found.shape == expected.shape, what
    if expected.numel():
        error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
        assert error < TOLERANCE, f"{what}: {error:.1e}"


class Job:
    """A program and the model beside it; each method is a move of both."""

    def __init__(self, source: random.Random, world: int, two_axes: bool, folder: str) -> None:
        self.source, self.world, self.two_axes, self.folder = source, world, two_axes, folder
        self.program, self.model = compiled(draw_plan(source, world, two_axes)), build()
        self.moves: list[object] = []
        self.saved = 0
        self._choose_optimizer()

    def _choose_optimizer(self) -> None:
        kind = self.source.choice(["SGD", "AdamW", "Adam"])
        options = {"momentum": 0.9, "weight_decay": 0.01} if kind == "SGD" else {"amsgrad": kind == "Adam"}
        alone = self.source.random() < 0.5

        def make(module: nn.Module) -> torch.optim.Optimizer:
            named = dict(module.named_parameters())
            biases = [p for name, p in named.items() if alone and name.endswith("bias")]
            rest = [p for name, p in named.items() if not (alone and name.endswith("bias"))]
            groups = [{"params": biases, "weight_decay": 0.0}] if alone else []
            return getattr(torch.optim, kind)([*groups, {"params": rest, "lr": 0.02}], lr=0.05, **options)

        self.make: Callable[[nn.Module], torch.optim.Optimizer] = make
        self.optimizers = [make(self.program), make(self.model)]

    def _losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one call, with a batch and flags of any kind."""
        source, generator = self.source, torch.Generator().manual_seed(self.source.randrange(10**6))
        size = source.choice([BATCH, BATCH, 5, 3])
        data: Data = {"ids": torch.randint(0, WORDS, (size, LENGTH), generator=generator)}
        flags: Data = {}
        if source.random() < 0.2:
            data["mask"] = (torch.rand(size, LENGTH, generator=generator) > 0.3).double()
        if source.random() < 0.4:
            flags["task"] = source.choice(["words", "value"])
        if source.random() < 0.15:
            flags["scale"] = source.choice([1.0, 0.5])
        together = source.random() < 0.5
        self.moves.append((size, sorted(data), flags, together))
        seed = self.program.random_seed
        if together:
            loss = self.program(**self.program.shard_batch({**data, **flags}))
        else:
            loss = self.program(**self.program.shard_batch(data), **flags)
        with SameDraws(seed):
            expected = self.model(**data, **flags)
        same(loss, expected["loss"], "loss")
        if source.random() < 0.3:
            same(self.program.outputs["out"], expected["out"], "output")
        return loss, expected["loss"]

    def train(self) -> None:
        factor = self.source.choice([1.0, 0.3])
        for loss in self._losses():
            (factor * loss).backward()

    def two_losses(self) -> None:
        pairs = list(zip(self._losses(), self._losses(), strict=True))
        how = self.source.randrange(3)
        for first, second in pairs:
            if how == 0:
                (first + second).backward()
            elif how == 1:
                second.backward(), first.backward()
            else:
                (first * second).backward()

    def some_inputs(self) -> None:
        for module, loss in zip((self.program, self.model), self._losses(), strict=True):
            loss.backward(inputs=[module.get_parameter(n) for n in ("norm.weight", "table.weight", "value.bias")])

    def hand_out(self) -> None:
        """``torch.autograd.grad``."""
        names = [n for n, p in self.model.named_parameters() if p.requires_grad]
        found, expected = (
            torch.autograd.grad(loss, [module.get_parameter(n) for n in names], allow_unused=True)
            for module, loss in zip((self.program, self.model), self._losses(), strict=True)
        )
        slots = {slot.name: slot for slot in self.program._tensors.slots}
        for name, ours, theirs in zip(names, found, expected, strict=True):
            assert (ours is None) == (theirs is None), name
            if ours is not None:
                whole = whole_tensor(slots[name], ours, self.program._comm)
                same(whole, theirs, f"torch.autograd.grad of {name}")

    def drop(self) -> None:
        """A loss that nothing is made of."""
        self._losses()

    def add_up(self) -> None:
        if isinstance(self.program, MeshProgram):
            return  # has no ``no_sync()``
        with self.program.no_sync():
            for _ in range(self.source.randint(1, 3)):
                if self.source.random() < 0.3:
                    self.two_losses()
                else:
                    self.train()
            if self.source.random() < 0.2:
                self.hand_out()
        if self.source.random() < 0.2:
            self.hand_out()
        for loss in self._losses():
            loss.backward()

    def evaluate(self) -> None:
        self.program.eval(), self.model.eval()
        mode = self.source.choice([torch.no_grad, torch.inference_mode, torch.enable_grad])
        with mode():
            losses = self._losses()
        if mode is torch.enable_grad:
            for loss in losses:
                loss.backward()
        self.program.train(), self.model.train()

    def no_gradients(self) -> None:
        with torch.no_grad():
            self._losses()

    def clip(self) -> None:
        if any(p.grad is not None for p in self.model.parameters()):
            kind = self.source.choice([2.0, 1.0, float("inf")])
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.1, kind)
            same(self.program.clip_grad_norm_(0.1, kind), norm, "norm")

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        if self.source.random() < 0.8:
            self.forget()

    def forget(self) -> None:
        to_none = self.source.random() < 0.6
        for module in (self.program, self.model):
            module.zero_grad(set_to_none=to_none)

    def forget_one(self) -> None:
        for module in (self.program, self.model):
            module.get_parameter("norm.weight").grad = None

    def write(self) -> None:
        with torch.no_grad():
            for module in (self.program, self.model):
                for parameter in module.parameters():
                    parameter.mul_(0.99)

    def freeze(self) -> None:
        is_trained = self.source.random() < 0.5
        for module in (self.program, self.model):
            module.get_parameter("mix.0.weight").requires_grad_(is_trained)

    def load(self) -> None:
        state = self.program.state_dict()
        self.model.load_state_dict(state)
        self.program.load_state_dict(state)

    def copy(self) -> None:
        """Evaluate a copy, or go on with it."""
        before = self.program, self.model
        self.program, self.model = copy.deepcopy(before)
        self.program.random_seed = before[0].random_seed
        if self.source.random() < 0.5:
            self.evaluate()
            before[0].random_seed = self.program.random_seed
            self.program, self.model = before
        else:
            self._choose_optimizer()

    def resume(self) -> None:
        """Under another plan."""
        self.saved += 1
        folder = f"{self.folder}/{self.saved}"
        self.program.save_checkpoint(folder, self.optimizers[0], extra={"saved": self.saved})
        is_trained = self.model.get_parameter("mix.0.weight").requires_grad
        plan = draw_plan(self.source, self.world, self.two_axes and self.source.random() < 0.6)
        self.program = compiled(plan, seed=1)
        self.program.get_parameter("mix.0.weight").requires_grad_(is_trained)
        self.optimizers[0] = self.make(self.program)
        assert self.program.load_checkpoint(folder, self.optimizers[0]) == {"saved": self.saved}
        self.model.zero_grad()

    def compare(self) -> None:
        gradients = self.program.full_gradients()
        expected = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            same(gradients[name], gradient, f"gradient of {name}")
        state = self.program.state_dict()
        assert list(state) == list(self.model.state_dict())
        for name, value in self.model.state_dict().items():
            same(state[name], value, name)


MOVES = [name for name in vars(Job) if not name.startswith("_")]


def live(rank: int, seed: int, world: int, two_axes: bool, folder: str, moves: int) -> None:
    warnings.simplefilter("ignore")
    source = random.Random(seed)
    job = Job(source, world, two_axes, folder)
    for name in [*source.choices(MOVES, [OFTEN.get(name, 1.0) for name in MOVES], k=moves), "compare"]:
        job.moves.append(name)
        try:
            getattr(job, name)()
        except Exception as error:
            raise AssertionError(f"seed {seed}, after {job.moves[-12:]}") from error


def run(seed: int, two_axes: bool, moves: int = 16) -> None:
    """RankError that says what differed. World sizes by turns."""
    world = 2 + seed % 3 if two_axes else 1 + seed % 4
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(world, live, seed, world, two_axes, folder, moves)


if __name__ == "__main__":
    for seed in range(*map(int, sys.argv[1:3])):
        for two_axes in (False, True):
            run(seed, two_axes)
            print(f"seed {seed}, {'two axes' if two_axes else 'one axis'}: alike", flush=True)
