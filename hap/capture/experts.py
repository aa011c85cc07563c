"""Experts of a mixture in one spelling: products of rows with a gathered weight each become ``hap.expert_mm``.

    bmm(weight[ids], rows.unsqueeze(2)), bmm(rows.unsqueeze(1), weight[ids])     expert_mm(rows, weight, ids)
    zeros.index_put((ids,), bmm(rows.unsqueeze(2), grads.unsqueeze(1)), True)    expert_mm_weight(rows, grads, ids, E)

with weights transposed, or cast by autocast, on the way or not. The first is what the forward pass and the gradients of
rows are, the second the gradient of the weight. Hugging Face's experts are traced as its ``batched_mm``, which is that,
whatever kernel their configuration asks for: its loop over experts looks at values, and its grouped kernels sort all
tokens of the batch together, so no rank could do its own part of them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from hap.capture.rewrite import Expansion, Rewritten, Spelling, rewrite
from hap.graph import Graph, Node, TensorMeta, Value

_INTERFACE = "transformers.integrations.moe"


@contextlib.contextmanager
def as_batched() -> Iterator[None]:
    """While active, Hugging Face's experts run as batched products."""
    module: Any = sys.modules.get(_INTERFACE)  # what was never imported has no experts
    interface = getattr(module, "ALL_EXPERTS_FUNCTIONS", None)
    if interface is None:  # or runs in no way but its own, which is traced as it is
        yield
        return
    interface.get_interface = lambda implementation, default: module.batched_mm_experts_forward
    try:
        yield
    finally:
        del interface.get_interface  # the class's own again


def canonical_experts(graph: Graph) -> Graph:
    """``hap.expert_mm.default(rows, weight, ids, place)`` and ``hap.expert_mm_weight.default``."""

    def rule(node: Node, done: Rewritten) -> Expansion | tuple[Value, ...] | None:
        match node.op:
            case "aten.bmm.default":
                return _product(node, done)
            case "aten.index_put.default":
                return _weight_gradient(node, done)
            case "aten.squeeze.dim":
                return _before_view(node, done)
        return None

    return rewrite(graph, rule)


class _Table(NamedTuple):
    """``weight[ids]``, cast to ``dtype`` and its last two dims transposed or not."""

    weight: Value
    ids: Value
    dtype: torch.dtype
    transposed: bool


def _product(node: Node, done: Rewritten) -> Expansion | None:
    left, right = node.args
    table, rows, before = _table(left, done), right, True
    if table is None or done.meta(right).shape[2] != 1:
        table, rows, before = _table(right, done), left, False
        if table is None or done.meta(left).shape[1] != 1:
            return None
    spell = Spelling(node)
    weight = _weight(spell, table, done, turned=table.transposed != before)
    meta = node.meta
    flat = TensorMeta((meta.shape[0], max(meta.shape[1:])), meta.dtype)
    args = (_rows(spell, rows, done), weight, table.ids, None)
    found = spell.call("hap.expert_mm.default", args, flat)
    return Expansion(spell.nodes, (spell.call("aten.view.default", (found, meta.shape), meta),))


def _table(value: Value, done: Rewritten) -> _Table | None:
    """What ``value`` (S, a, b) has for every row, if that is one of a few matrices."""
    node, transposed = _unturned(value, done)
    if node.op != "aten.index.Tensor" or len(node.meta.shape) != 3:
        return None
    weight, indices = node.args
    ids, *others = indices
    if ids is None or any(i is not None for i in others) or not _are_few(done.meta(ids), done.meta(weight)):
        return None
    return _Table(weight, ids, done.meta(value).dtype, transposed)


def _unturned(value: Value, done: Rewritten) -> tuple[Node, bool]:
    """What made ``value`` (S, a, b) but for one cast and transposes of its last two dims, and whether they turn it."""
    node, transposed, is_cast = done.producer(value), False, False
    while True:
        match node.op:
            case "aten.transpose.int" if {d % 3 for d in node.args[1:]} == {1, 2}:
                transposed = not transposed
            case "aten._to_copy.default" if not is_cast:  # two may round twice
                is_cast = True
            case _:
                return node, transposed
        node = done.producer(node.args[0])


def _are_few(ids: TensorMeta, weight: TensorMeta) -> bool:
    """Whether these are numbers of matrices, no fewer than there are matrices: each is one product."""
    return len(ids.shape) == 1 and ids.dtype == torch.int64 and weight.shape[0] <= ids.shape[0]


def _weight(spell: Spelling, table: _Table, done: Rewritten, *, turned: bool) -> Value:
    """All matrices, cast as the gathered ones were, with rows to multiply from the left."""
    value, meta = table.weight, done.meta(table.weight)
    if meta.dtype != table.dtype:
        meta = TensorMeta(meta.shape, table.dtype)
        value = spell.call("aten._to_copy.default", (value,), meta, kwargs=(("dtype", table.dtype),))
    if turned:
        experts, a, b = meta.shape
        value = spell.call("aten.transpose.int", (value, 1, 2), TensorMeta((experts, b, a), meta.dtype))
    return value


def _rows(spell: Spelling, value: Value, done: Rewritten) -> Value:
    """A value of (S, 1, k) or (S, k, 1) as (S, k)."""
    meta = done.meta(value)
    flat = TensorMeta((meta.shape[0], max(meta.shape[1:])), meta.dtype)
    node = done.producer(value)
    while node.op in ("aten.unsqueeze.default", "aten.transpose.int"):
        source = node.args[0]
        before = done.meta(source)
        if before == flat:
            return source
        if node.op == "aten.transpose.int" and ({d % 3 for d in node.args[1:]} != {1, 2} or 1 not in before.shape[1:]):
            break  # the order of elements changes
        node = done.producer(source)
    return spell.call("aten.view.default", (value, flat.shape), flat)


def _weight_gradient(node: Node, done: Rewritten) -> Expansion | None:
    into, indices, value = node.args[:3]
    accumulates = len(node.args) > 3 and node.args[3] is True
    zeros, ids = done.producer(into), indices[0]
    if not accumulates or len(indices) != 1 or ids is None or len(node.meta.shape) != 3:
        return None
    if zeros.op != "aten.full.default" or zeros.args[1] != 0 or not _are_few(done.meta(ids), node.meta):
        return None
    product, transposed = _unturned(value, done)
    if product.op != "aten.bmm.default" or done.meta(product.args[0]).shape[2] != 1:
        return None
    spell = Spelling(node)
    left, right = (_rows(spell, v, done) for v in product.args)
    rows, grads = (right, left) if transposed else (left, right)
    meta = TensorMeta(node.meta.shape, product.meta.dtype)
    args = (rows, grads, ids, meta.shape[0], None)
    found = spell.call("hap.expert_mm_weight.default", args, meta)
    if meta != node.meta:
        found = spell.call("aten._to_copy.default", (found,), node.meta, kwargs=(("dtype", node.meta.dtype),))
    return Expansion(spell.nodes, (found,))


def _before_view(node: Node, done: Rewritten) -> tuple[Value, ...] | None:
    """The rows of a product, of which the view made one column or row each."""
    view = done.producer(node.args[0])
    if view.op != "aten.view.default" or done.meta(view.args[0]) != node.meta:
        return None
    return (view.args[0],)
