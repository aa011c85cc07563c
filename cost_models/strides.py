"""How every value lies in memory on one device: which views must copy, which values are scattered.

A graph has no strides, and a view of it runs as a reshape: where the strides allow no view (a transposed tensor, flat)
it is a copy of its own, and its base may go. Strides are followed from call to call on tensors without data: of a view
or an elementwise call those that torch gives; of attention (batch, position, head, channel) in memory, as its fused
kernels write; of what keeps its first argument's form (``_ALIKE``) that argument's. Anything else is taken to be
contiguous. A rank's pieces lie as the whole does, up to dims of size one; what a collective makes is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hap.cost_models.work import is_view
from hap.graph import Graph, Node, TensorMeta, Value, map_values
from hap.ops import resolve

_ALIKE = ("hap.dropout.default", "hap.batch_norm.default", "hap.batch_norm_backward.default")
_ATTENTION = {"hap.attention.default": 1, "hap.attention_backward.default": 3}  # outputs with heads
Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Strides:
    """``copying``: names of the views that allocate. ``scattered``: values that are not contiguous."""

    copying: frozenset[str]
    scattered: frozenset[Value]


def find_strides(graph: Graph) -> Strides:
    """Once per graph. Equal calls on tensors that lie alike (a layer repeated) are asked about once."""
    lying: dict[Value, torch.Tensor] = {}
    known: dict[str, tuple[Tensors, bool]] = {}
    copying: list[str] = []
    for node in graph.nodes:
        key = repr((node.op, map_values((node.args, node.kwargs), lambda v: _description(lying[v])), node.outputs))
        if key not in known:
            known[key] = _call(node, lying)
        outputs, copies = known[key]
        if copies:
            copying.append(node.name)
        lying.update((Value(node.name, i), t) for i, t in enumerate(outputs) if t is not None)
    return Strides(frozenset(copying), frozenset(v for v, t in lying.items() if not t.is_contiguous()))


def _description(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _call(node: Node, lying: dict[Value, torch.Tensor]) -> tuple[Tensors, bool]:
    """The call's outputs as tensors without data; whether it is a view that copies."""
    if is_view(node):
        base = lying[node.inputs[0]]
        found = _outputs(node, lying)
        return found, not any(t is not None and _shared(t, base) for t in found)
    if node.op in _ATTENTION:
        return tuple(_heads_inside(m) if i < _ATTENTION[node.op] else _flat(m) for i, m in _metas(node)), False
    if node.op in _ALIKE:
        like = lying[node.inputs[0]]
        return tuple(
            torch.empty_like(like) if m and m.shape == like.shape else _flat(m) for _, m in _metas(node)
        ), False
    is_torchs = not node.is_source and node.op.startswith("aten.")
    if is_torchs and torch.Tag.pointwise in getattr(resolve(node.op), "tags", ()):
        return _outputs(node, lying), False
    return tuple(_flat(m) for _, m in _metas(node)), False


def _outputs(node: Node, lying: dict[Value, torch.Tensor]) -> Tensors:
    args = map_values(node.args, lying.__getitem__)
    keywords = {k: map_values(v, lying.__getitem__) for k, v in node.kwargs}
    if not node.inputs:
        keywords["device"] = "meta"
    found = resolve(node.op)(*args, **keywords)
    outputs = (found,) if isinstance(found, torch.Tensor) else tuple(found)
    for meta, tensor in zip(node.outputs, outputs, strict=True):
        assert meta is None or meta.shape == tuple(tensor.shape), f"{node.name}: {meta.shape} is {tuple(tensor.shape)}"
    return outputs


def _metas(node: Node) -> enumerate[TensorMeta | None]:
    return enumerate(node.outputs)


def _flat(meta: TensorMeta | None) -> torch.Tensor | None:
    return None if meta is None else torch.empty(meta.shape, dtype=meta.dtype, device="meta")


def _heads_inside(meta: TensorMeta | None) -> torch.Tensor | None:
    """(batch, head, position, channel) with a position's heads side by side."""
    if meta is None:
        return None
    batch, heads, positions, channels = meta.shape
    return torch.empty((batch, positions, heads, channels), dtype=meta.dtype, device="meta").transpose(1, 2)


def _shared(view: torch.Tensor, base: torch.Tensor) -> bool:
    return view.untyped_storage()._cdata == base.untyped_storage()._cdata
