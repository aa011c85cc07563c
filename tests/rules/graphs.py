"""Hand-built graphs and calls: the input of most tests of this room."""

from typing import Any

import torch

from hap.graph import Graph, Node, TensorMeta, Value, values_in, verify_graph
from hap.rules.notation import Call

FLOAT = torch.float64


def meta(*shape: int, dtype: torch.dtype = FLOAT) -> TensorMeta:
    return TensorMeta(shape, dtype)


def integers(*shape: int) -> TensorMeta:
    return meta(*shape, dtype=torch.int64)


def booleans(*shape: int) -> TensorMeta:
    return meta(*shape, dtype=torch.bool)


def call(op: str, *args: Any, out: Any, **kwargs: Any) -> Call:
    """A call whose tensor arguments are given as metas, anywhere in ``args``; ``out`` is a meta or a tuple of them."""
    inputs: list[TensorMeta] = []

    def value(tree: Any) -> Any:
        if isinstance(tree, TensorMeta):
            inputs.append(tree)
            return Value(f"x{len(inputs) - 1}")
        return tuple(map(value, tree)) if isinstance(tree, tuple) else tree

    node_args = tuple(map(value, args))
    node_kwargs = tuple((k, value(v)) for k, v in kwargs.items())
    return Call(Node("call", op, node_args, node_kwargs, out if isinstance(out, tuple) else (out,)), tuple(inputs))


class GraphBuilder:
    """Sources and calls in order; ``finish`` sums a value into the loss."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def source(self, kind: str, name: str, *shape: int, dtype: torch.dtype = FLOAT) -> Value:
        target = f"args.{name}" if kind == "input" else name
        self.nodes.append(Node(name, kind, outputs=(meta(*shape, dtype=dtype),), target=target))
        return Value(name)

    def call(self, name: str, op: str, *args: Any, out: Any, module: str = "") -> Value:
        outputs = out if isinstance(out, tuple) else (out,)
        self.nodes.append(Node(name, op, args, outputs=outputs, module=module))
        assert all(isinstance(v, Value) for v in values_in(args))
        return Value(name)

    def finish(self, value: Value, gradients: dict[str, Value] | None = None) -> Graph:
        loss = self.call("loss", "aten.sum.default", value, out=meta())
        graph = Graph("hand-built", tuple(self.nodes), loss, gradients or {})
        verify_graph(graph)
        return graph


def fused_projection() -> Graph:
    """x (8, 10, 48) -> rows (80, 48) @ w (48, 144) -> (8, 10, 144) -> q, k, v (8, 10, 48) -> q (8, 10, 6 heads, 8)."""
    b = GraphBuilder()
    x, w = b.source("input", "x", 8, 10, 48), b.source("parameter", "w", 48, 144)
    rows = b.call("rows", "aten.view.default", x, (80, 48), out=meta(80, 48))
    product = b.call("product", "aten.mm.default", rows, w, out=meta(80, 144))
    fused = b.call("fused", "aten.view.default", product, (8, 10, 144), out=meta(8, 10, 144))
    b.call("parts", "aten.split_with_sizes.default", fused, (48, 48, 48), 2, out=(meta(8, 10, 48),) * 3)
    heads = b.call("heads", "aten.view.default", Value("parts", 0), (8, 10, 6, 8), out=meta(8, 10, 6, 8), module="attn")
    return b.finish(heads)


def linear() -> Graph:
    """x (8, 4) @ w (4, 6), summed; with the gradient of w: x^T (4, 8) @ dy (8, 6)."""
    b = GraphBuilder()
    x, w = b.source("input", "x", 8, 4), b.source("parameter", "w", 4, 6)
    tangent = b.source("tangent", "tangent")
    y = b.call("y", "aten.mm.default", x, w, out=meta(8, 6))
    dy = b.call("dy", "aten.expand.default", tangent, (8, 6), out=meta(8, 6))
    xt = b.call("xt", "aten.t.default", x, out=meta(4, 8))
    dw = b.call("dw", "aten.mm.default", xt, dy, out=meta(4, 6))
    return b.finish(y, {"w": dw})
