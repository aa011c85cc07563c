"""One rank's compiled step as an autograd function: forward part, backward part, and what crosses between them.

``loss.backward()`` runs the backward part with the incoming tangent, so scaled losses and gradient accumulation work;
where gradients are summed over the ranks once for several batches it runs another (``hap.codegen.accumulate``).
Values that cross are held in a dict that the backward part empties, so memory falls as it proceeds; a second backward
through the same step is therefore refused. Parameters, buffers and inputs that cross are checked not to have been
written in between, and so are values that the loss, or an output, lies in the memory of. What the step itself writes,
the buffers that it updates, is read before: what crosses, or is handed out, and lies in the memory of one is a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from hap.capture.convert import OUTPUT
from hap.capture.torch_private import is_added_to_grad
from hap.codegen.accumulate import Accumulation, find_accumulation
from hap.codegen.fx import to_forward_module, to_graph_modules, to_loss_module, to_part_module
from hap.codegen.late import late_loss
from hap.codegen.program import Program
from hap.errors import ProgramError
from hap.runtime.collectives import Communicator
from hap.runtime.late import LateTensor
from hap.runtime.pieces import compiled_pieces

Tensors = Mapping[str, torch.Tensor]
PartName = Literal["first", "further", "together", "remainder"]
Kept = frozenset[str] | None  # gradients that a backward pass adds to ``.grad``; None: it hands them out
Backward = Callable[["Step", dict[str, torch.Tensor], torch.Tensor, Callable[[], Kept]], dict[str, torch.Tensor]]


class Step:
    """The graph modules of one rank, bound to its communicator. Not an ``nn.Module``: it owns no state."""

    def __init__(self, program: Program, comm: Communicator) -> None:
        self.program, self.comm = program, comm
        waits = comm.group is not None and comm.device.type == "cpu"  # on a GPU no host waits for a sum, only a stream
        self._late = late_loss(program) if waits and program.loss_may_be_late else None
        modules = to_graph_modules(program, comm.rank, comm.device, late=self._late)
        self.forward_module, self.backward_module = modules
        self._loss_module = None if self._late is None else to_loss_module(program, self._late, comm.rank, comm.device)
        self._evaluation: fx.GraphModule | None = None
        self._parts: dict[str, fx.GraphModule] = {}  # backward parts for gradients that several batches have
        self._options: Mapping[str, Any] | None = None  # torch.compile's
        self._fast: dict[int, Callable[..., Any]] = {}  # of modules, by id
        self._shared: dict[str, tuple[str, ...]] = {}  # part -> gradients that it hands out in memory not their own
        written = (*program.sources_of("parameter"), *program.sources_of("buffer"))
        self._updated = frozenset(s.name for s in written if s.target in program.updates)
        self._lying: dict[str, tuple[str, ...]] = {}  # part -> values of it that lie where others may be written
        self._sources = [s.name for s in program.forward_sources]
        self.kept_sources = [name for name in program.saved if name in set(self._sources)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        """Itself, as it owns no state."""
        return self

    def compile(self, options: Mapping[str, Any]) -> None:
        """From now on modules run by ``torch.compile``, piece by piece (``pieces``)."""
        self._options, self._fast = options, {}

    def _call(self, module: fx.GraphModule, comm: Communicator, *args: Any) -> Any:
        if self._options is None:
            return module(comm, *args)
        fast = self._fast.get(id(module))
        if fast is None:
            fast = self._fast[id(module)] = compiled_pieces(module, self._options)
        return fast(comm, *args)

    def evaluate(self, sources: Tensors) -> tuple[torch.Tensor, Tensors]:
        """(loss, buffer updates), keeping nothing for a backward."""
        if self._evaluation is None:
            self._evaluation = to_forward_module(self.program, self.comm.rank, self.comm.device, saving=False)
        with self.comm.part("evaluation"), self._uncast():
            loss, updates, _ = self._call(self._evaluation, self.comm, *(sources[name] for name in self._sources))
        self._save_from_updates("evaluation", sources, updates)
        return loss, updates

    def forward(self, sources: Tensors) -> tuple[torch.Tensor, Tensors, dict[str, torch.Tensor]]:
        """(loss, buffer updates, saved values), none of them where an update will be written. The loss may be a
        ``LateTensor``."""
        with self.comm.part("forward"), self._uncast():
            given = (sources[name] for name in self._sources)
            loss, updates, saved = self._call(self.forward_module, self.comm, *given)
        self._save_from_updates("updates", sources, updates)
        self._save_from_updates("saved", sources, saved)
        if self._loss_module is not None:
            crossing = {str(place): value for place, value in enumerate(loss) if isinstance(value, torch.Tensor)}
            self._save_from_updates("crossing", sources, crossing)
            for name in self._in_outputs("crossing, of outputs", updates, crossing):
                crossing[name] = crossing[name].clone()
            loss = [crossing.get(str(place), value) for place, value in enumerate(loss)]
            meta = self.program.held[self.program.loss].meta
            loss = LateTensor.of(meta.shape, meta.dtype, partial(self._arrive, loss))
        if self.program.loss in saved:  # the loss will hold what is saved: not the other way round, too
            saved[self.program.loss] = loss.detach()
        return loss, updates, saved

    def _save_from_updates(self, part: str, sources: Tensors, found: dict[str, torch.Tensor]) -> None:
        """Copies in the place of what lies in the memory of a buffer that the step updates: itself, views of it, pieces
        cut out of it. They are the same ones in every step, since the program lays its results out in the same way."""
        if not self._updated:
            return
        if part not in self._lying or self._options is not None:
            self._lying[part] = _lying_in((sources[name] for name in self._updated), found)
        for name in self._lying[part]:
            found[name] = found[name].clone()

    def _in_outputs(self, part: str, updates: Tensors, found: Tensors) -> tuple[str, ...]:
        """What lies in the memory of an output that is handed out: the same ones in every step, as above."""
        if part not in self._lying or self._options is not None:
            self._lying[part] = _lying_in((v for t, v in updates.items() if t.startswith(OUTPUT)), found)
        return self._lying[part]

    def _arrive(self, crossing: list[object]) -> torch.Tensor:
        assert self._loss_module is not None
        with self._uncast():
            loss: torch.Tensor = self._call(self._loss_module, self.comm, *crossing)
        return loss

    def backward(
        self,
        saved: dict[str, torch.Tensor],
        tangent: torch.Tensor,
        earlier: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Gradient of this rank's share of each trainable parameter, each in memory of its own. ``earlier``: what
        earlier batches left."""
        if earlier:
            saved |= {self.accumulation.earlier[name]: found for name, found in earlier.items()}
            gradients, _ = self._run("together", saved, tangent)
            return gradients
        with self.comm.part("backward"), self._uncast():
            gradients = self._call(self.backward_module, self.comm, saved, tangent)
            self.comm.finish()
        return self._alone("whole", gradients)

    @cached_property
    def accumulation(self) -> Accumulation:
        """How gradients of several batches are summed over the ranks once."""
        return find_accumulation(self.program)

    def backward_apart(
        self, saved: dict[str, torch.Tensor], tangent: torch.Tensor, earlier: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(gradients but for the deferred ones, what is local of those, added to ``earlier``, in its memory)."""
        if earlier is None:
            gradients, local = self._run("first", saved, tangent)
            made = {}
            for name in list(local):  # one by one, as each may be the last that holds what it is
                made[name] = local.pop(name).to(self.accumulation.local[name], copy=True)
            return gradients, made
        saved |= {self.accumulation.earlier[name]: found for name, found in earlier.items()}
        return self._run("further", saved, tangent)

    def sum_up(self, earlier: Mapping[str, torch.Tensor], comm: Communicator | None = None) -> dict[str, torch.Tensor]:
        """The deferred gradients, of what earlier batches left alone; by another communicator in another thread."""
        gradients, _ = self._run("remainder", dict(earlier), None, comm)
        return gradients

    def _run(
        self,
        part: PartName,
        saved: dict[str, torch.Tensor],
        tangent: torch.Tensor | None,
        comm: Communicator | None = None,
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        comm = comm or self.comm
        if part not in self._parts:
            made = getattr(self.accumulation, part)
            self._parts[part] = to_part_module(self.program, made, self.comm.rank, self.comm.device)
        with comm.part("backward"), self._uncast():
            gradients, local = self._call(self._parts[part], comm, saved, tangent)
            if part in ("together", "remainder"):  # the others leave out what a step may leave under way
                comm.finish()
        return self._alone(part, gradients), local

    def _alone(self, part: str, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if part not in self._shared or self._options is not None:  # which may lay them out anew
            self._shared[part] = _not_alone(gradients)
        for name in self._shared[part]:
            gradients[name] = gradients[name].clone(memory_format=torch.contiguous_format)
        return gradients

    def _uncast(self) -> contextlib.AbstractContextManager[None]:
        """No autocast may touch calls whose dtypes were fixed at capture."""
        kind = self.comm.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()

    def versions(self, updates: Tensors, saved: Tensors) -> dict[str, int]:
        """How often each value that crosses, and that others may write, has been written so far."""
        loss = self.program.loss
        others = {name: value for name, value in saved.items() if name != loss}  # who looks where it lies waits for it
        held = {*self.kept_sources, *self._in_outputs("saved, of outputs", updates, others)} - self._updated
        if loss in saved:
            held.add(loss)
        return {name: saved[name]._version for name in held}


class RunStep(torch.autograd.Function):
    """``apply(step, sources, updates, names, backward, *trainable shares) -> loss``; buffer updates are put into
    ``updates``. ``backward(step, saved, tangent, kept)`` makes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Step,
        sources: Tensors,
        updates: dict[str, torch.Tensor],
        names: tuple[str, ...],
        backward: Backward,
        *trainable: torch.Tensor,
    ) -> torch.Tensor:
        loss, found, saved = step.forward(sources)
        updates.update(found)
        ctx.step, ctx.saved, ctx.names, ctx.make, ctx.trainable = step, saved, names, backward, trainable
        ctx.versions = step.versions(found, saved)
        ctx.arrival = loss.arrival if isinstance(loss, LateTensor) else None
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, ctx.saved = ctx.saved, None
        if saved is None:
            raise ProgramError("backward through the same step a second time: its saved values are gone")
        for name, version in ctx.versions.items():
            if saved[name]._version != version:
                what = name if name in ctx.step.kept_sources else f"{name} (the loss, or an output)"
                raise ProgramError(f"{what} was written between the step's forward and its backward")
        gradients = ctx.make(ctx.step, saved, tangent, partial(_kept, ctx))
        if ctx.arrival is not None:
            ctx.arrival.value()  # it is here by now; nothing is left under way when a step ends
        return (None, None, None, None, None, *(gradients.get(name) for name in ctx.names))


def _kept(ctx: Any) -> Kept:
    """Not those of parameters that were frozen since they were compiled, nor of such as ``backward(inputs=...)`` leaves
    out."""
    found = set()
    for name, share, (node, _) in zip(ctx.names, ctx.trainable, ctx.next_functions[-len(ctx.names) :], strict=True):
        if node is not None and share.requires_grad:
            added = is_added_to_grad(node)
            if added is None:
                return None
            if added:
                found.add(name)
    return frozenset(found)


def _lying_in(others: Iterable[torch.Tensor], found: Tensors) -> tuple[str, ...]:
    """Of what is found, what lies in the memory of others."""
    places = {other.untyped_storage().data_ptr() for other in others if other.numel()}
    if not places:
        return ()
    return tuple(n for n, value in found.items() if value.numel() and value.untyped_storage().data_ptr() in places)


def _not_alone(gradients: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Those that overlap another or keep something larger alive: to be copied, in every step, since the program lays
    its results out in the same way each time.

    Autograd keeps what it is given as ``.grad``, and clipping writes there. The gradients of one bundle stand side by
    side in its memory and stay there.
    """
    used: dict[int, int] = {}  # storage -> bytes of it that gradients are
    for gradient in gradients.values():
        storage = gradient.untyped_storage()
        used[storage.data_ptr()] = used.get(storage.data_ptr(), 0) + gradient.numel() * gradient.itemsize
    taken: dict[int, list[tuple[int, int]]] = {}
    found: list[str] = []
    for name, gradient in gradients.items():
        storage = gradient.untyped_storage()
        start = int(gradient.storage_offset()) * gradient.itemsize
        stop = start + gradient.numel() * gradient.itemsize
        ranges = taken.setdefault(storage.data_ptr(), [])
        alone = gradient.is_contiguous() and all(stop <= a or b <= start for a, b in ranges)
        if gradient.numel() and not (alone and used[storage.data_ptr()] == storage.nbytes()):
            found.append(name)
        else:
            ranges.append((start, stop))
    return tuple(found)
