"""Feeding a program: what a step takes, this rank's share of a batch, and a sampler that deals unequal shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import Sampler, default_collate

from hap.capture.inputs import StepInputs, step_inputs
from hap.capture.seed import SEED
from hap.codegen.layout import Layout
from hap.codegen.program import Program
from hap.errors import ProgramError
from hap.placement import Shard


@dataclass(frozen=True)
class Feed:
    """One input of a step: its whole shape, dtype and layout. ``name`` is None if the program does not read it."""

    path: str
    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return self.shape if self.layout is None else self.layout.local_shape(self.shape, rank)


@dataclass(frozen=True)
class Signature:
    """What a step is called with. ``example`` is in its accepted form, its tensors on ``meta``; ``pinned``: whether
    placements can be, which is on one axis."""

    feeds: Mapping[str, Feed]
    example: StepInputs
    pinned: bool = True

    @classmethod
    def of(cls, program: Program, example: StepInputs, pinned: bool = True) -> Signature:
        """Match the program's inputs with the example it was captured from."""
        read = {s.target: s.name for s in program.sources_of("input") if s.target != SEED}
        feeds: dict[str, Feed] = {}
        for path, tensor in example.named:
            placement = program.held[read[path]].placement if path in read else None
            layout = Layout.of(placement, program.sizes) if isinstance(placement, Shard) else None
            feeds[path] = Feed(path, read.get(path), tuple(tensor.shape), tensor.dtype, layout)
        if unknown := [path for path in read if path not in feeds]:
            raise ProgramError(f"the program reads input {unknown[0]}, which the example inputs do not have")
        return cls(feeds, example.rebuild([t.detach().to("meta") for _, t in example.named]), pinned)

    def call(self, args: tuple[Any, ...], targets: Any, kwargs: Mapping[str, Any]) -> StepInputs:
        """Of a program that is called so; a model's own ``targets=`` keyword is one where the loss takes none."""
        if targets is not None and not any(path.startswith("targets.") for path in self.feeds):
            return StepInputs(args, {**kwargs, "targets": targets}, ())
        loss_args = targets if isinstance(targets, (tuple, list)) else () if targets is None else (targets,)
        return StepInputs(args, kwargs, tuple(loss_args))

    def read(self, call: StepInputs, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Program name -> local tensor, checked, and brought to ``device`` if it is on the CPU. ProgramError says what
        is wrong with the first that is."""
        given = dict(call.named)
        for path in given:
            if path not in self.feeds:
                raise unexpected(path, self.feeds)
        self._check_constants(call)
        found: dict[str, torch.Tensor] = {}
        for path, feed in self.feeds.items():
            if feed.name is None:
                continue
            if path not in given:
                raise ProgramError(f"input {path} is missing; the program takes {', '.join(self.feeds)}")
            tensor, expected = given[path], feed.local_shape(rank)
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ProgramError(f"input {path} requires grad; programs have gradients of parameters only: detach it")
            if tuple(tensor.shape) != expected:
                raise ProgramError(
                    f"input {path}: rank {rank}'s share of {feed.shape} is {expected}, got {tuple(tensor.shape)}; "
                    "see shard_batch and batch_sampler"
                )
            if tensor.dtype != feed.dtype:
                raise ProgramError(f"input {path} must be {feed.dtype}, got {tensor.dtype}")
            if tensor.device.type == "cpu":
                tensor = tensor.to(device, non_blocking=True)
            elif tensor.device.type != device.type:
                raise ProgramError(f"input {path} is on {tensor.device}, the program runs on {device}")
            found[feed.name] = tensor.contiguous()
        return found

    def _check_constants(self, call: StepInputs) -> None:
        """What is no tensor is part of the program: it may be left out, or None where the example did not have it."""
        known = self.example.constants
        for path, value in call.constants.items():
            if path in self.feeds or (path not in known and value is None):
                continue  # a tensor that is missing is named below
            if path not in known:
                raise unexpected(path, self.feeds)
            if known[path] != value and not (known[path] != known[path] and value != value):
                raise ProgramError(
                    f"{path} is {value!r}, and the program was compiled with {known[path]!r}: what changes from step "
                    "to step must be a tensor"
                )

    def part(self, rank: int) -> StepInputs:
        """Rank's share of the example, on ``meta``."""
        return self.example.rebuild([t.new_empty(self.feeds[p].local_shape(rank)) for p, t in self.example.named])

    def shares(self, batch: Any, targets: Any, rank: int, device: torch.device) -> Any:
        """Rank's share of a global batch in the batch's own form; with targets, the pair of both."""
        whole = step_inputs(batch, targets)
        pieces = []
        for path, tensor in whole.named:
            feed = self.feeds.get(path)
            if feed is None:
                raise unexpected(path, self.feeds)
            if tuple(tensor.shape) != feed.shape:
                raise ProgramError(f"input {path}: the global batch is {feed.shape}, got {tuple(tensor.shape)}")
            piece = tensor if feed.layout is None else feed.layout.take(tensor, rank)
            pieces.append(piece.to(device, non_blocking=True))
        return in_form(whole.rebuild(pieces), batch, targets)

    def local_shapes(self, rank: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """``(path, shape)`` of rank's share of every input that the program reads."""
        return tuple((f.path, f.local_shape(rank)) for f in self.feeds.values() if f.name is not None)

    def nothing(self, rank: int) -> StepInputs:
        """The share of a rank that holds none of the batch: the example's form with empty tensors."""
        empties = [torch.empty(self.feeds[p].local_shape(rank), dtype=t.dtype) for p, t in self.example.named]
        return self.example.rebuild(empties)

    @property
    def batch(self) -> tuple[int, Layout | None]:
        """(global batch size, its layout). ProgramError if the inputs do not share one batch dim cut one way."""
        batched = [feed for feed in self.feeds.values() if feed.name is not None and feed.shape]
        if not batched:
            raise ProgramError("the program takes no input with a batch dim")
        size, layouts = batched[0].shape[0], [feed.layout for feed in batched]
        for feed in batched:
            if feed.shape[0] != size or feed.layout != layouts[0] or (feed.layout and feed.layout.dim != 0):
                alike = all(f.shape[0] == size for f in batched)  # else no placements make a batch dim of dim 0
                raise ProgramError(
                    f"inputs {batched[0].path} and {feed.path} are dealt differently, so no sampler serves both; "
                    f"use shard_batch{', or pin their placements' if self.pinned and alike else ' on whole batches'}"
                )
        return size, layouts[0]


def in_form(call: StepInputs, batch: Any, targets: Any) -> Any:
    """``call`` in the form that ``batch`` (and ``targets``) had: see ``hap.capture.inputs.step_inputs``."""
    if isinstance(batch, Mapping):
        shaped: Any = dict(call.kwargs)
    elif isinstance(batch, (tuple, list)):
        pair = len(batch) == 2 and isinstance(batch[0], (tuple, list)) and isinstance(batch[1], Mapping)
        shaped = (call.args, dict(call.kwargs)) if pair else _like(batch, call.args)
    else:
        shaped = call.args[0] if call.args else None
    if targets is None:
        return shaped
    return shaped, (_like(targets, call.targets) if isinstance(targets, (tuple, list)) else call.targets[0])


def _like(sequence: Any, items: Iterable[Any]) -> Any:
    """These in a tuple or list of the other's type, a namedtuple's too."""
    return sequence._make(items) if hasattr(sequence, "_make") else type(sequence)(items)


class Collate:
    """``default_collate``, and for a rank that holds none of the batch its empty share: ``program.collate``.

    The empty share has the form of the example inputs; with example targets it is the pair of both. Pickled, for
    workers of a ``DataLoader`` that are no forks, it is one for the shapes that were compiled for by then.
    """

    def __init__(self, nothing: Callable[[], StepInputs], batch: Any, targets: Any = None) -> None:
        """``nothing``: makes an empty share; ``batch`` and ``targets``: what has its form."""
        self._nothing, self._form = nothing, (batch, targets)

    def __call__(self, samples: Sequence[Any]) -> Any:
        return default_collate(list(samples)) if samples else in_form(self._nothing(), *self._form)

    def __reduce__(self) -> tuple[Any, ...]:
        share = self._nothing()
        share = share.rebuild([tensor.to("meta") for _, tensor in share.named])
        shaped = in_form(share, *self._form)
        return Collate, (partial(_on_cpu, share), *((shaped, None) if self._form[1] is None else shaped))


def _on_cpu(share: StepInputs) -> StepInputs:
    return share.rebuild([torch.empty_like(tensor, device="cpu") for _, tensor in share.named])


class ShareSampler(Sampler[list[int]]):
    """This rank's indices of every global batch: ``DataLoader(data, batch_sampler=..., collate_fn=program.collate)``.

    All ranks draw the same order (from ``seed + epoch``) and each takes its own rows of every global batch, so that
    together they cover the data exactly once an epoch. ``last`` deals the last, smaller batch; without it that batch is
    dropped. ``set_epoch`` changes the order.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        layout: Layout | None,
        rank: int,
        *,
        shuffle: bool,
        seed: int,
        last: tuple[int, Layout | None, Layout | None] | None = None,
        hosts: Layout | None = None,
        host: int = 0,
    ) -> None:
        """``layout``: how the ranks of a host, this one number ``rank``, have its part of a batch; ``hosts``: how
        hosts, this one number ``host``, have the batch, if there are several; ``last``: so many samples, by both."""
        self.length, self.batch_size = length, batch_size
        self.layouts, self.place = (hosts, layout), (host, rank)
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.last = last

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length // self.batch_size + (self.last is not None)

    def __iter__(self) -> Iterator[list[int]]:
        if self.shuffle:
            generator = torch.Generator("cpu").manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator, device="cpu")
        else:
            order = torch.arange(self.length)
        for batch in order.split(self.batch_size):
            if len(batch) == self.batch_size:
                yield self._mine(batch, self.layouts)
            elif self.last is not None:
                yield self._mine(batch, self.last[1:])

    def _mine(self, batch: torch.Tensor, layouts: Sequence[Layout | None]) -> list[int]:
        for layout, number in zip(layouts, self.place, strict=True):
            if layout is not None:
                batch = layout.take(batch, number)
        mine: list[int] = batch.tolist()
        return mine


def unexpected(path: str, takes: Iterable[str]) -> ProgramError:
    """Of an argument that the example inputs did not have."""
    return ProgramError(
        f"unexpected input {path}; the program takes {', '.join(takes)}, as its example inputs had it: what only some "
        "calls have must be in them as None"
    )
