"""``Program`` -> two ``torch.fx.GraphModule`` for one rank: sizes are numbers, collectives are ``comm.<method>`` calls.

    forward(comm, *sources)          -> (loss, updates, saved)     sources in the order of ``program.forward_sources``
    backward(comm, saved, tangent)   -> gradients

``comm`` is a ``Communicator`` (anything with its methods will do); ``updates``, ``gradients`` and ``saved`` are dicts.
The backward takes each saved value out of ``saved`` where it first reads it, and every value is dropped after its last
use (FX writes ``name = None``), so memory falls as the backward proceeds. A loss that may be late is a third module:

    loss(comm, *crossing)            -> loss                       crossing: returned by forward in the loss's place

and of gradients of several batches that travel once there are other backward parts (``hap.codegen.accumulate``):

    backward(comm, saved, tangent)   -> (gradients, local)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from hap.codegen.accumulate import BackwardPart
from hap.codegen.call import bundle_arguments, collective_arguments, map_leaves, returns_many
from hap.codegen.late import LateLoss
from hap.codegen.program import Call, Convert, Instruction, Program, RankDevice, Start, Together, Wait
from hap.graph import Value
from hap.hosts_sum import HOSTS_SUM, SITE
from hap.ops import resolve
from hap.placement import LocalSize


def to_graph_modules(
    program: Program, rank: int, device: torch.device | str = "cpu", *, late: LateLoss | None = None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(forward, backward) of ``rank``, whose factories make tensors on ``device``."""
    assert 0 <= rank < program.world_size, f"rank {rank} of {program.world_size}"
    forward = to_forward_module(program, rank, device, late=late)
    return forward, _backward_module(program, rank, torch.device(device))


def to_forward_module(
    program: Program,
    rank: int,
    device: torch.device | str = "cpu",
    *,
    saving: bool = True,
    late: LateLoss | None = None,
) -> fx.GraphModule:
    """The forward part alone; with ``saving=False`` it keeps nothing for a backward (evaluation). With ``late`` it
    returns, in place of the loss, the list that ``to_loss_module`` takes."""
    emitter = _Emitter(program, rank, torch.device(device))
    for source in program.forward_sources:
        emitter.values[source.name] = emitter.graph.placeholder(source.name)
    emitter.run(program.forward if late is None else late.first)
    kept = program.saved if saving else ()
    saved = {name: emitter.values[name] for name in kept}
    updates = {target: emitter.values[name] for target, name in program.updates.items()}
    loss = emitter.values[program.loss] if late is None else [emitter.values[name] for name in late.crossing]
    return emitter.finish((loss, updates, saved), "Forward")


def to_loss_module(program: Program, late: LateLoss, rank: int, device: torch.device | str = "cpu") -> fx.GraphModule:
    """``forward(comm, *crossing) -> loss``: what is left of the forward part."""
    emitter = _Emitter(program, rank, torch.device(device))
    for name in late.crossing:
        emitter.values[name] = emitter.graph.placeholder(name)
    emitter.run(late.last)
    return emitter.finish(emitter.values[program.loss], "Loss")


def to_part_module(
    program: Program, part: BackwardPart, rank: int, device: torch.device | str = "cpu"
) -> fx.GraphModule:
    """``backward(comm, saved, tangent) -> (gradients, local)`` of another backward part of the program."""
    emitter, gradients = _backward(program, part.instructions, part.gradients, rank, torch.device(device))
    local = {name: emitter.read(made) for name, made in part.local.items()}
    return emitter.finish((gradients, local), "Backward")


def _backward_module(program: Program, rank: int, device: torch.device) -> fx.GraphModule:
    emitter, gradients = _backward(program, program.backward, program.gradients, rank, device)
    return emitter.finish(gradients, "Backward")


def _backward(
    program: Program, part: Sequence[Instruction], gradients: Mapping[str, str], rank: int, device: torch.device
) -> tuple[_Emitter, dict[str, fx.Node]]:
    emitter = _Emitter(program, rank, device)
    emitter.saved = emitter.graph.placeholder("saved")
    tangent = emitter.graph.placeholder("tangent")
    if program.tangent is not None:
        emitter.values[program.tangent] = tangent
    emitter.run(part)
    return emitter, {target: emitter.read(name) for target, name in gradients.items()}


# The same operators through torch's own bindings, which reach the kernel in two thirds of an overload's time (1.4 us
# for torch.add where torch.ops.aten.add.Tensor takes 2.2).
_BOUND: dict[str, Callable[..., Any]] = {
    "aten.add.Tensor": torch.add,
    "aten.addmm.default": torch.addmm,
    "aten.bmm.default": torch.bmm,
    "aten.div.Tensor": torch.div,
    "aten.gather.default": torch.gather,
    "aten.mm.default": torch.mm,
    "aten.mul.Tensor": torch.mul,
    "aten.native_layer_norm.default": torch.native_layer_norm,
    "aten.neg.default": torch.neg,
    "aten.permute.default": torch.permute,
    "aten.relu.default": torch.relu,
    "aten.squeeze.dim": torch.squeeze,
    "aten.sub.Tensor": torch.sub,
    "aten.sum.dim_IntList": torch.sum,
    "aten.t.default": torch.t,
    "aten.transpose.int": torch.transpose,
    "aten.unsqueeze.default": torch.unsqueeze,
    "aten.view.default": torch.reshape,
    "aten.where.self": torch.where,
}


def _bound(op: str) -> Callable[..., Any]:
    return _BOUND.get(op) or resolve(op)


class _Emitter:
    """One FX graph in the making: the node that holds each of the program's names."""

    def __init__(self, program: Program, rank: int, device: torch.device) -> None:
        self.program, self.rank, self.device = program, rank, device
        self.graph = fx.Graph()
        self.comm = self.graph.placeholder("comm")
        self.saved: fx.Node | None = None
        self.values: dict[str, fx.Node] = {}

    def read(self, name: str) -> fx.Node:
        """The node that holds ``name``, taken out of ``saved`` if the backward part has not read it yet."""
        if name not in self.values:
            assert self.saved is not None, f"{name} is not defined"
            self.values[name] = self.graph.create_node("call_method", "pop", (self.saved, name), {}, name)
        return self.values[name]

    def run(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Convert():
                    self._collective(instruction)
                case Together():
                    self._results(self._bundle("together", instruction, None), instruction.outputs)
                case Start():
                    self.values[instruction.handle] = self._bundle("start", instruction.work, instruction.handle)
                case Wait():
                    handle = self.values.pop(instruction.handle)
                    self._results(self.graph.call_method("wait", (self.comm, handle)), instruction.outputs)
                case Call():
                    self._call(instruction)

    def _collective(self, convert: Convert) -> None:
        keywords = collective_arguments(convert, self.program.sizes)
        args = (self.comm, self.read(convert.input))
        self.values[convert.output] = self.graph.create_node(
            "call_method", convert.kind, args, keywords, convert.output
        )

    def _bundle(self, method: str, work: Together, name: str | None) -> fx.Node:
        layouts, decomposition = bundle_arguments(work, self.program.sizes)
        args = (self.comm, work.kind, [self.read(name) for name in work.inputs], layouts, decomposition)
        return self.graph.create_node("call_method", method, args, {}, name)

    def _results(self, results: fx.Node, names: Sequence[str | None]) -> None:
        for index, name in enumerate(names):
            if name is not None:
                item = self.graph.create_node("call_function", operator.getitem, (results, index), {}, name)
                self.values[name] = item

    def _call(self, call: Call) -> None:
        args = tuple(map_leaves(arg, self._leaf) for arg in call.args)
        kwargs = {key: map_leaves(arg, self._leaf) for key, arg in call.kwargs}
        if call.op == HOSTS_SUM:
            name = call.outputs[0]
            given = (self.comm, *args[: SITE + 1])
            summed = self.graph.create_node("call_method", "over_hosts", given, kwargs, name)
            self.values[str(name)] = summed
            return
        if not returns_many(call):
            name = call.outputs[0]
            self.values[str(name)] = self.graph.create_node("call_function", _bound(call.op), args, kwargs, name)
            return
        self._results(self.graph.call_function(_bound(call.op), args, kwargs), call.outputs)

    def finish(self, result: Any, class_name: str) -> fx.GraphModule:
        self.graph.output(result)
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph, class_name)

    def _leaf(self, leaf: Value | LocalSize | RankDevice) -> Any:
        if isinstance(leaf, Value):
            return self.read(leaf.node)
        return leaf.at(self.program.sizes, self.rank) if isinstance(leaf, LocalSize) else self.device
