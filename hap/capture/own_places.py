"""``x[torch.arange(n)[:, None], places]``: of each row what its own places say, as ``gather`` and ``scatter``.

An index counts from the global start, so a tensor that is indexed is whole in its indexed dims, and so is what is
written to by index. Rows that are each their own are no such dim: batches of masked autoencoders, or of sequences that
are read at their last token, would be gathered from all ranks for nothing. What follows from constants alone, as masks
do, is as it was written.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hap.capture.attention import constant_value
from hap.capture.rewrite import Expansion, Rewritten, Spelling, rewrite
from hap.graph import Graph, Node, TensorMeta, Value

_READS, _WRITES = "aten.index.Tensor", "aten.index_put.default"


def spell_own_places(graph: Graph) -> Graph:
    """Two indices at adjacent dims, the first of which counts the rows of its dim, in the first dim of both."""
    positions, given = {node.name: i for i, node in enumerate(graph.nodes)}, set[str]()
    for node in graph.nodes:
        if (node.is_source and node.op != "constant") or any(v.node in given for v in node.inputs):
            given.add(node.name)

    def rule(node: Node, done: Rewritten) -> Expansion | None:
        if node.op not in (_READS, _WRITES) or node.name not in given:
            return None
        x, indices, *rest = node.args
        at = [i for i, index in enumerate(indices) if index is not None]
        if len(at) != 2 or at[1] != at[0] + 1:
            return None
        first, (rows, places) = at[0], (indices[i] for i in at)
        shape, common = done.meta(x).shape, torch.broadcast_shapes(done.meta(rows).shape, done.meta(places).shape)
        if common[:1] != shape[first : first + 1] or done.meta(places).dtype != torch.int64:
            return None
        counted = constant_value(graph, positions, rows) if rows.node in positions else None
        if counted is None or not _counts(counted, common):
            return None
        written = (*shape[:first], *common, *shape[first + 2 :])
        flat = (*shape[:first], common[0], math.prod(common[1:]), *shape[first + 2 :])
        spelling = Spelling(node)
        spelling.metas.update({v: done.meta(v) for v in node.inputs})
        size, meta = shape[first + 1], done.meta(places)
        known = constant_value(graph, positions, places) if places.node in positions else None
        if node.op == _READS and known is not None and _counts_through(known, meta, common, size):
            return Expansion(spelling.nodes, (_shaped(spelling, x, written),))
        index = _index(spelling, places, common, first, size, flat)
        if node.op == _READS:
            read = spelling.call("aten.gather.default", (x, first + 1, index), TensorMeta(flat, node.meta.dtype))
            return Expansion(spelling.nodes, (_shaped(spelling, read, written),))
        values, accumulates = rest[0], bool(rest[1]) if len(rest) > 1 else node.kwarg("accumulate", False)
        values = _shaped(spelling, _expanded(spelling, values, written), flat)
        op = "aten.scatter_add.default" if accumulates else "aten.scatter.src"
        return Expansion(spelling.nodes, (spelling.call(op, (x, first + 1, index, values), node.meta),))

    return rewrite(graph, rule)


def _counts(rows: torch.Tensor, common: tuple[int, ...]) -> bool:
    count = torch.arange(common[0]).view(-1, *(1,) * (len(common) - 1))
    return rows.dtype == torch.int64 and torch.equal(*torch.broadcast_tensors(rows, count))


def _counts_through(places: torch.Tensor, meta: TensorMeta, common: tuple[int, ...], size: int) -> bool:
    """Whether they are all places of each row in order, as in the masks of Hugging Face's transformers."""
    alike = meta.shape if len(meta.shape) == len(common) else (1, *meta.shape)
    if alike[0] != 1 or math.prod(common[1:]) != size:
        return False
    return torch.equal(places.expand(meta.shape).broadcast_to((1, *common[1:])).reshape(-1), torch.arange(size))


def _index(spelling: Spelling, places: Value, common: Any, first: int, size: int, flat: tuple[int, ...]) -> Value:
    """In the shape of what is read; places below zero count from the end, which gather does not know."""
    meta = spelling.meta(places)
    is_below = spelling.call("aten.lt.Scalar", (places, 0), TensorMeta(meta.shape, torch.bool))
    from_end = spelling.call("aten.add.Tensor", (places, size), meta)
    index = spelling.call("aten.where.self", (is_below, from_end, places), meta)
    index = _expanded(spelling, index, common)
    behind = (1,) * (len(flat) - first - 2)
    index = _shaped(spelling, index, (*(1,) * first, *flat[first : first + 2], *behind))
    return _expanded(spelling, index, flat)


def _shaped(spelling: Spelling, value: Value, shape: tuple[int, ...]) -> Value:
    meta = spelling.meta(value)
    if meta.shape == shape:
        return value
    return spelling.call("aten.view.default", (value, shape), TensorMeta(shape, meta.dtype))


def _expanded(spelling: Spelling, value: Value, shape: tuple[int, ...]) -> Value:
    meta = spelling.meta(value)
    if meta.shape == shape:
        return value
    return spelling.call("aten.expand.default", (value, shape), TensorMeta(shape, meta.dtype))
