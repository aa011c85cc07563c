"""Gradients that travel in a narrower dtype than they have: ``reduce_dtype`` as casts of the graph.

    gradient = g                             own dtype
    gradient = widen(narrow(g))              narrow: to ``reduce_dtype``; widen: back
    gradient = widen(narrow(a) + narrow(b))  where g = a + b, as of a weight that two calls read

A cast of a partial sum may stay partial, so ranks may exchange what lies between the two casts, and the search does,
where that takes less. As the casts are the graph's, one device rounds, too: a plan changes in which order a sum is
rounded, and nothing else. The terms of a sum are narrow each, so that each may be sent when it is there
(``hap.search.apart``); of a longer sum the last two, as sums of many narrow terms would lose what is small.

What is cast to ``reduce_dtype`` already, as under ``torch.autocast``, is taken as it was before it was widened: no bit
is lost there.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hap.capture.cleanup import drop_unused, rename_nodes
from hap.errors import PlanError
from hap.graph import CAST, Graph, Node, TensorMeta, Value, verify_graph
from hap.plan import Provenance
from hap.reduce_dtype import read_reduce_dtype, reduce_name

_ADD = "aten.add.Tensor"


def narrowed(graph: Graph, dtype: torch.dtype | None) -> Graph:
    """The step whose gradients are rounded to ``dtype``, those that are floating-point and wider; None: none."""
    if dtype is None:
        return graph
    assert graph.reduce_dtype is None, "the gradients are narrow already"
    writer = _Writer(graph, dtype)
    values = {value: writer.rounded(value) for value in dict.fromkeys(graph.gradients.values())}
    found = replace(
        graph,
        nodes=tuple(made for node in graph.nodes for made in (node, *writer.after.get(node.name, ()))),
        gradients={target: values[value] for target, value in graph.gradients.items()},
        reduce_dtype=dtype,
    )
    found = rename_nodes(drop_unused(found))
    verify_graph(found)
    return found


def as_planned(graph: Graph, made_for: Provenance) -> Graph:
    """The step with gradients in the dtype that a plan exchanges them in. PlanError if ``graph`` was captured for
    another."""
    planned = read_reduce_dtype(made_for.reduce_dtype)
    if graph.reduce_dtype is None:
        return narrowed(graph, planned)
    if graph.reduce_dtype != planned:
        in_plan, given = made_for.reduce_dtype or "their own dtype", reduce_name(graph.reduce_dtype)
        raise PlanError(
            f"the plan exchanges gradients in {in_plan}, and reduce_dtype is {given}; plan again, or leave that out"
        )
    return graph


class _Writer:
    """``after``: the new nodes, by the node that they stand behind."""

    def __init__(self, graph: Graph, dtype: torch.dtype) -> None:
        self.graph, self.dtype = graph, dtype
        self.after: dict[str, list[Node]] = {}
        self.narrow: dict[Value, Value] = {}

    def rounded(self, gradient: Value) -> Value:
        """A gradient, rounded to the dtype and widened again; itself if it is no wider."""
        meta = self.graph.meta(gradient)
        if not meta.dtype.is_floating_point or meta.dtype.itemsize <= self.dtype.itemsize:
            return gradient
        maker, terms = self.graph.by_name[gradient.node], self._terms(gradient)
        if terms is None:
            return self._to(maker, self._cast(gradient), meta)
        narrow = (replace(meta, dtype=self.dtype),)
        added = self._write(maker, replace(maker, args=tuple(map(self._cast, terms)), outputs=narrow))
        return self._to(maker, added, meta)

    def _terms(self, gradient: Value) -> tuple[Value, ...] | None:
        """Of which a gradient is the sum, if it is nothing but that of two of its shape and dtype."""
        maker = self.graph.by_name[gradient.node]
        if maker.op != _ADD or maker.kwargs or len(maker.inputs) != 2 or gradient in self.graph.users:
            return None
        alike = all(self.graph.meta(term) == self.graph.meta(gradient) for term in maker.inputs)
        return maker.inputs if alike else None

    def _cast(self, value: Value) -> Value:
        if value not in self.narrow:
            maker = self.graph.by_name[value.node]
            if maker.op == CAST and self.graph.meta(maker.inputs[0]).dtype == self.dtype:
                self.narrow[value] = maker.inputs[0]
            else:
                self.narrow[value] = self._to(maker, value, replace(self.graph.meta(value), dtype=self.dtype))
        return self.narrow[value]

    def _to(self, maker: Node, value: Value, meta: TensorMeta) -> Value:
        kwargs = (("dtype", meta.dtype),)
        return self._write(maker, Node("", CAST, (value,), kwargs, (meta,), maker.phase, maker.module))

    def _write(self, maker: Node, node: Node) -> Value:
        """``node`` behind ``maker``, under a name of its own."""
        there = self.after.setdefault(maker.name, [])
        there.append(replace(node, name=f"{maker.name}_narrow_{len(there)}"))
        return Value(there[-1].name)
