"""Tiny graphs and clusters made by hand, with numbers that can be reckoned on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch

from hap.cluster import ClusterSpec
from hap.cost_models.compute import ComputeModel
from hap.cost_models.work import OpClass
from hap.graph import Graph, Node, TensorMeta, Value, verify_graph
from hap.placement import PARTIAL, REPLICATE, Shard
from hap.plan import Strategy

F32 = torch.float32
IDEAL = ComputeModel(dict.fromkeys(get_args(OpClass), 1.0), dict.fromkeys(get_args(OpClass), 1.0))
R, P = REPLICATE, PARTIAL


def node(name: str, op: str, args: Sequence[Any] = (), *shapes: tuple[int, ...] | None, **rest: Any) -> Node:
    dtype = rest.pop("dtype", F32)
    outputs = tuple(None if s is None else TensorMeta(s, dtype) for s in shapes)
    return Node(name, op, tuple(args), tuple(rest.pop("kwargs", {}).items()), outputs, **rest)


def source(name: str, shape: tuple[int, ...], kind: str = "input", dtype: torch.dtype = F32) -> Node:
    return node(name, kind, (), shape, target=name, dtype=dtype)


def loose(*nodes: Node) -> Graph:
    """Nodes to ask about, in a graph with a loss that nobody looks at."""
    return Graph("loose", (*nodes, source("loss", ())), Value("loss"), {})


V = Value


def relu_step() -> Graph:
    """loss = sum(relu(x @ w)), x (8, 4) float32, w (4, 4); with the gradient of w."""
    graph = Graph(
        "relu",
        (
            source("x", (8, 4)),
            source("w", (4, 4), "parameter"),
            node("a", "aten.mm.default", [V("x"), V("w")], (8, 4)),
            node("b", "aten.relu.default", [V("a")], (8, 4)),
            node("loss", "aten.sum.default", [V("b")], ()),
            node("tangent", "tangent", (), (), phase="backward"),
            node("e", "aten.expand.default", [V("tangent"), (8, 4)], (8, 4), phase="backward"),
            node("g", "aten.threshold_backward.default", [V("e"), V("b"), 0], (8, 4), phase="backward"),
            node("xt", "aten.t.default", [V("x")], (4, 8), phase="backward"),
            node("gw", "aten.mm.default", [V("xt"), V("g")], (4, 4), phase="backward"),
        ),
        V("loss"),
        {"w": V("gw")},
    )
    verify_graph(graph)
    return graph


ROWS, COLUMNS = Shard(0, 1, 8, 1, "batch"), Shard(1, 1, 8, 1, "batch")
KEPT = Shard(0, 1, 4, 1, "kept")


def data_parallel(*, sharded_parameter: bool = False) -> Mapping[str, Strategy]:
    """``relu_step`` over its batch of 8; the parameter replicated, or its 4 rows sharded in group ``kept``."""
    home = KEPT if sharded_parameter else R
    return {
        "x": Strategy((), (ROWS,)),
        "w": Strategy((), (home,)),
        "a": Strategy((ROWS, R), (ROWS,)),
        "b": Strategy((ROWS,), (ROWS,)),
        "loss": Strategy((ROWS,), (P,)),
        "tangent": Strategy((), (R,)),
        "e": Strategy((R,), (ROWS,)),
        "g": Strategy((ROWS, ROWS), (ROWS,)),
        "xt": Strategy((ROWS,), (COLUMNS,)),
        "gw": Strategy((COLUMNS, ROWS), (P,)),
    }


def cluster(
    network_mbit_s: Sequence[float],
    *,
    tflops: Sequence[float] | None = None,
    backend: str = "nccl",
    latency: str = "0s",
    memory_bandwidth: str = "1000000TB/s",
    launch: str = "0s",
    names: Sequence[str] | None = None,
) -> ClusterSpec:
    """One device per host; by default memory is so fast that copies cost nothing."""
    count = len(network_mbit_s)
    body = "\n".join(
        f"  - name: {names[i] if names else f'h{i}'}\n"
        f"    devices: [{{tflops: {{float32: {tflops[i] if tflops else 1:.12f}}}, memory: 1GB, "
        f"memory_bandwidth: {memory_bandwidth}, launch: {launch}}}]\n"
        f"    network: {{bandwidth: {network_mbit_s[i]}Mbit/s, latency: {latency}}}"
        for i in range(count)
    )
    return ClusterSpec.from_yaml(f"name: made\nbackend: {backend}\nhosts:\n{body}\n")


def assert_concave(sizes: Sequence[float], seconds: Sequence[float], what: str) -> None:
    """Between any two sizes the straight line is nowhere above the seconds."""
    for i in range(1, len(sizes) - 1):
        line = np.interp(sizes[i], [sizes[i - 1], sizes[i + 1]], [seconds[i - 1], seconds[i + 1]])
        assert line <= seconds[i] * (1 + 1e-9), (what, sizes[i])
