"""Calls that can be done at once become one call: a product, its view and its bias; zeros and what goes among them; a
sum over hosts and the cast of it.

Capture takes ``addmm`` apart, so that a partial product can be summed before the bias is added. Where nothing came in
between, they are put together again: ``view(mm(a, b), size) + bias`` is ``hap.addmm(bias, a, b, size)``. One result is
made where there were two. ``scatter(zeros_like(x), dim, index, source)``, the gradient of a gather, copies the zeros,
which are as large as all logits: it is ``hap.scatter_into_zeros(x, dim, index, source)`` where nothing else reads them.
A sum over hosts that only a widening cast reads gives what the cast would: so that of a gradient which travels in a
narrower dtype (``hap.capture.narrow``) nothing is left to do when the sum is there, and none waits for it before the
step ends. All else is local, so shares do not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch

from hap.codegen.program import Call, Instruction, Program, RankDevice
from hap.graph import CAST, Value
from hap.hosts_sum import HOSTS_SUM

_ADD, _SCATTER = "aten.add.Tensor", "aten.scatter.src"
_ENDS = frozenset({_ADD, _SCATTER, CAST})  # calls that others may become one with


def fuse_calls(program: Program) -> Program:
    """The pass."""
    reads = Counter(chain.from_iterable(i.inputs for i in (*program.forward, *program.backward)))
    kept = (program.loss, *program.updates.values(), *program.gradients.values(), *program.saved)
    reads.update(kept)
    return replace(
        program, forward=_fused(program, program.forward, reads), backward=_fused(program, program.backward, reads)
    )


def _fused(program: Program, part: Sequence[Instruction], reads: Counter[str]) -> tuple[Instruction, ...]:
    made = {name: i for i in part if isinstance(i, Call) for name in i.outputs if name is not None}
    gone: set[int] = set()  # ids of calls that went into another
    instead: dict[int, Call] = {}
    for instruction in part:
        if not isinstance(instruction, Call) or instruction.op not in _ENDS:
            continue
        if summed := _sum_of_cast(program, instruction, made, reads):
            dtype = program.held[str(instruction.outputs[0])].meta.dtype
            instead[id(summed)] = replace(summed, outputs=instruction.outputs, kwargs=(("dtype", dtype),))
            gone.add(id(instruction))
            continue
        found = _product_with_bias(program, instruction, made, reads) or _among_zeros(instruction, made, reads)
        if found:
            whole, *folded = found
            instead[id(instruction)] = whole
            gone.update(map(id, folded))
    return tuple(instead.get(id(i), i) for i in part if id(i) not in gone)


def _product_with_bias(
    program: Program, add: Call, made: dict[str, Call], reads: Counter[str]
) -> tuple[Call, ...] | None:
    """(the call instead, the calls that go), if ``add`` adds a bias to a product that nothing else reads."""
    if add.op != _ADD or add.kwargs or len(add.inputs) != 2:
        return None
    product, bias = add.inputs
    folded: list[Call] = []
    call = made.get(product)
    if call is not None and call.op == "aten.view.default" and reads[product] == 1:
        folded.append(call)
        call = made.get(call.inputs[0])
    if call is None or call.op != "aten.mm.default" or reads[str(call.outputs[0])] != 1:
        return None
    result, summed = program.held[str(call.outputs[0])].meta, program.held[str(add.outputs[0])].meta
    if program.held[bias].meta.shape != result.shape[1:] or summed.shape[-1:] != result.shape[1:]:
        return None
    if not (program.held[bias].meta.dtype == result.dtype == summed.dtype):
        return None
    folded.append(call)
    if len(folded) == 1:
        args = (Value(bias), *call.args)
        return replace(add, op="aten.addmm.default", args=args), *folded
    _, size = folded[0].args
    return replace(add, op="hap.addmm.default", args=(Value(bias), *call.args, size)), *folded


def _among_zeros(scatter: Call, made: dict[str, Call], reads: Counter[str]) -> tuple[Call, ...] | None:
    """(the call instead, the call that goes), if ``scatter`` writes among zeros that nothing else reads."""
    if scatter.op != _SCATTER or scatter.kwargs:
        return None
    into, *rest = scatter.args
    zeros = made.get(scatter.inputs[0])
    if zeros is None or zeros.op != "aten.zeros_like.default" or len(zeros.args) != 1:
        return None
    if reads[scatter.inputs[0]] != 1 or any(key != "device" for key, _ in zeros.kwargs):  # the rank's, as x's is
        return None
    assert into == Value(scatter.inputs[0])
    return replace(scatter, op="hap.scatter_into_zeros.default", args=(*zeros.args, *rest)), zeros


def _sum_of_cast(program: Program, cast: Call, made: dict[str, Call], reads: Counter[str]) -> Call | None:
    """The sum over hosts that ``cast`` alone reads, if it is widened there and nothing else: a sum that is made in a
    narrower dtype would not be the one that is cast to it."""
    if cast.op != CAST:
        return None
    given = dict(cast.kwargs)
    if given.keys() - {"device"} != {"dtype"} or given.get("device") not in (None, RankDevice()):
        return None
    narrow, wide = (program.held[str(name)].meta.dtype for name in (cast.inputs[0], cast.outputs[0]))
    if not (narrow.is_floating_point and wide.is_floating_point and torch.promote_types(narrow, wide) == wide):
        return None
    summed = made.get(cast.inputs[0])
    return summed if summed is not None and summed.op == HOSTS_SUM and reads[cast.inputs[0]] == 1 else None
