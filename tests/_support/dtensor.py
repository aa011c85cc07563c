"""PyTorch's DTensor as a second opinion on the rule table: which placements its tables have over one mesh axis.

    python -m tests._support.dtensor [OPERATOR]

prints, for every operator of ``hap/rules/instances.json``, how many rows both have, only HAP and only DTensor. The only
module outside ``hap/capture/torch_private.py`` with private torch imports; HAP itself never asks DTensor.

Not compared: reductions other than the sum and sums of booleans or of masked rows (HAP's partial values are plain sums
of numbers), strided shards (HAP's atoms), and shards of dims of size one. A row of DTensor's that kills a kernel, as a
piece may be empty, counts as refuted.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as SpecMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
from torch.testing._internal.distributed.fake_pg import FakeStore

from hap.graph import TensorMeta, map_values
from hap.ops import resolve
from hap.rules.discover import in_child
from hap.rules.instances import load_calls
from hap.rules.notation import Call, Dim, Row, Slot
from hap.rules.propose import holds
from hap.rules.table import call_rows

WORLD_SIZE = 2
_REFUSALS = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)  # of calls it has no table for
Form = tuple[tuple[Any, ...], tuple[Any, ...]]  # slots of the arguments, slots of the outputs: "R", "P" or a dim


@dataclass(frozen=True)
class Compared:
    """One operator over its calls: rows as forms. ``refuted``: of DTensor's, those that our prover refutes."""

    op: str
    both: frozenset[Form]
    ours: frozenset[Form]
    theirs: frozenset[Form]
    refuted: frozenset[Form]

    def __str__(self) -> str:
        verdict = "differ" if self.ours or self.theirs or self.refuted else "agree"
        counts = f"{len(self.both)} both, {len(self.ours)} ours only, {len(self.theirs)} theirs only"
        return f"{verdict:7} {self.op:48} {counts}, {len(self.refuted)} of theirs refuted"


@contextlib.contextmanager
def fake_mesh() -> Iterator[DeviceMesh]:
    """Two ranks of which only this one exists."""
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (WORLD_SIZE,))
    finally:
        dist.destroy_process_group()


def dtensor_forms(call: Call, mesh: DeviceMesh) -> frozenset[Form] | None:
    """What DTensor's table has for the call; None if it has nothing for the operator, or not for such a call."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    op: Any = resolve(call.node.op)
    if op in propagator.op_single_dim_strategy_funcs:
        args, kwargs = _with(call, _spec_meta)
        try:
            combinations = propagator.op_single_dim_strategy_funcs[op](op, args, kwargs)
        except _REFUSALS:
            return None
        count = len(call.outputs)
        found = ((combo[count : count + len(call.inputs)], combo[:count]) for combo in combinations)
    elif op in propagator.op_strategy_funcs:
        args, kwargs = _with(call, lambda meta: _every_placement(meta, mesh))
        try:
            strategy = propagator.op_strategy_funcs[op](OpSchema(op, args, kwargs))
        except _REFUSALS:
            return None
        found = _placements(strategy, len(call.outputs))
    else:
        return None
    forms = (_form(call, inputs, outputs) for inputs, outputs in found)
    return frozenset(form for form in forms if form is not None)


def _with(call: Call, replaced: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with its tensors ``replaced``; lists as lists, as DTensor has them."""
    metas = iter(call.inputs)

    def lists(tree: Any) -> Any:
        return [lists(item) for item in tree] if type(tree) is tuple else tree

    args = map_values(call.node.args, lambda _: _Held(replaced(next(metas))))
    kwargs = {k: map_values(v, lambda _: _Held(replaced(next(metas)))) for k, v in call.node.kwargs}
    return tuple(_freed(lists(a)) for a in args), {k: _freed(lists(v)) for k, v in kwargs.items()}


@dataclass(frozen=True)
class _Held:
    """Keeps a named tuple from being taken for an argument list."""

    what: Any


def _freed(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_freed(item) for item in tree]
    return tree.what if isinstance(tree, _Held) else tree


def _spec_meta(meta: TensorMeta) -> SpecMeta:
    stride = torch.empty(meta.shape, device="meta").stride()
    return SpecMeta(torch.Size(meta.shape), stride, meta.dtype)


def _every_placement(meta: TensorMeta, mesh: DeviceMesh) -> OpStrategy:
    placements = (Replicate(), *(Shard(dim) for dim in range(len(meta.shape))), Partial())
    specs = (DTensorSpec(mesh, (p,), tensor_meta=_spec_meta(meta)) for p in placements)
    return OpStrategy([OpSpec(output_specs=spec, input_specs=()) for spec in specs])


def _placements(strategy: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """(placements of the arguments, of the outputs) of each of an operator's strategies."""
    if not isinstance(strategy, OpStrategy):
        return
    for spec in strategy.strategies:
        if spec.input_specs is None:
            continue
        outputs = spec.output_specs if isinstance(spec.output_specs, tuple) else (spec.output_specs,) * count
        yield (
            [s.placements[0] for s in spec.input_specs],
            [None if s is None else s.placements[0] for s in outputs],
        )


def _form(call: Call, inputs: Any, outputs: Any) -> Form | None:
    """None where it is all replicated, or has what is not compared."""
    if len(inputs) != len(call.inputs) or len(outputs) != len(call.outputs):
        return None
    slots = []
    for placement, meta in zip((*inputs, *outputs), (*call.inputs, *call.outputs), strict=True):
        if meta is None:
            slots.append(None)
        elif isinstance(placement, Replicate):
            slots.append("R")
        elif type(placement) is Partial and placement.reduce_op == "sum" and meta.dtype != torch.bool:
            slots.append("P")
        elif isinstance(placement, (Shard, _ShardingPlaceholder)) and type(placement).__name__ != "_StridedShard":
            dim = placement.dim % max(1, len(meta.shape))
            if dim >= len(meta.shape) or meta.shape[dim] < 2:
                return None
            slots.append(dim)
        else:
            return None
    if all(slot in ("R", None) for slot in slots):
        return None
    return tuple(slots[: len(inputs)]), tuple(slots[len(inputs) :])


def our_forms(call: Call) -> frozenset[Form]:
    return frozenset(map(form_of, call_rows(call)))


def form_of(row: Row) -> Form:
    return tuple(_plain(s) for s in row.inputs), tuple(_plain(s) for s in row.outputs)


def _plain(slot: Slot | None) -> Any:
    return slot.dim if isinstance(slot, Dim) else slot


def row_of(form: Form) -> Row:
    """A form as the row that it is if all its dims are of one size."""
    inputs, outputs = ([Dim(s) if isinstance(s, int) else s for s in side] for side in form)
    return Row(tuple(inputs), tuple(outputs))


def compare(calls: Iterable[Call], mesh: DeviceMesh) -> tuple[Compared, ...]:
    """Every operator for which DTensor has a table, in order of name."""
    found: dict[str, tuple[set[Form], set[Form], set[Form], set[Form]]] = {}
    for call in calls:
        theirs = dtensor_forms(call, mesh)
        if theirs is None:
            continue
        ours = our_forms(call)
        both, mine, others, refuted = found.setdefault(call.node.op, (set(), set(), set(), set()))
        both |= ours & theirs
        mine |= ours - theirs
        more = theirs - ours
        wrong = {form for form in more if in_child(lambda f=form, c=call: holds(row_of(f), c), 30.0) is not True}
        refuted |= wrong
        others |= more - wrong
    return tuple(Compared(op, *map(frozenset, found[op])) for op in sorted(found))


def main(only: str | None = None) -> None:
    calls = [c for c in load_calls() if only in (None, c.node.op)]
    with fake_mesh() as mesh:
        compared = compare(calls, mesh)
    for c in compared:
        print(c)
        for form in sorted(c.theirs, key=str):
            print(f"          theirs: {form}")
    differ = sum(bool(c.ours or c.theirs or c.refuted) for c in compared)
    silent = len({c.node.op for c in calls}) - len(compared)
    print(f"{len(compared) - differ} agree, {differ} differ, {silent} without a table of DTensor's")


if __name__ == "__main__":
    main(*sys.argv[1:2])
