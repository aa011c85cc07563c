"""Attention in one spelling: every kernel's operator, forward and backward, becomes ``hap.attention``.

What a kernel returns beside output and logsumexp (random state, sequence offsets) is for its own backward only; a call
that drops out, or whose extra outputs are read elsewhere (the gradient of a bias), keeps its name, and rules refuse it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from hap.attention import sums_dtype
from hap.capture.interpret import run_node
from hap.capture.rewrite import Rewritten, rewrite
from hap.graph import Graph, Node, TensorMeta, Value
from hap.ops import draws_random, resolve

_FORWARD = (
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
)
_BACKWARD = tuple(op.replace(".default", "_backward.default") for op in _FORWARD)
_OWN = ("hap.attention.default", "hap.attention_backward.default")
MaskKind = Literal["causal", "open"] | None
_LARGEST_MASK = 1 << 26  # elements of a mask that is worked out at capture: 8192 queries by 8192 keys


def canonical_attention(graph: Graph) -> Graph:
    """``hap.attention.default(q, k, v, mask, is_causal, scale)`` and its backward, for every kernel's spelling."""
    foreign = _kept_foreign(graph)

    def rule(node: Node, done: Rewritten) -> Node | None:
        if node.op in _FORWARD and node.name not in foreign:
            return _forward(node, done)
        if node.op in _BACKWARD and node.name not in foreign:
            return _backward(node, done)
        return None

    return rewrite(graph, rule)


def _kept_foreign(graph: Graph) -> frozenset[str]:
    """Names of the attention calls that must keep their kernel's spelling, a forward together with its backwards."""
    kept: set[str] = set()
    for node in graph.nodes:
        if node.op not in _FORWARD:
            continue
        readers = [(user, v) for v in _outputs(node) for user, _ in graph.users.get(v, ())]
        backwards = {user.name: user for user, _ in readers if user.op in _BACKWARD}
        private = all(user.op in _BACKWARD for user, value in readers if value.index > 1)
        extra = any(v.index > 2 and v in graph.users for b in backwards.values() for v in _outputs(b))
        if _arguments(node)["dropout_p"] != 0 or not private or extra:
            kept.update((node.name, *backwards))
    return frozenset(kept)


def _outputs(node: Node) -> tuple[Value, ...]:
    return tuple(Value(node.name, i) for i in range(len(node.outputs)))


def _forward(node: Node, done: Rewritten) -> Node:
    a = _arguments(node)
    q = done.meta(a["query"])
    return replace(
        node,
        op=_OWN[0],
        args=(a["query"], a["key"], a["value"], _mask(a), a["is_causal"], _scale(a["scale"], q)),
        kwargs=(),
        outputs=(node.outputs[0], TensorMeta(q.shape[:3], sums_dtype(q.dtype))),
    )


def _backward(node: Node, done: Rewritten) -> Node:
    a = _arguments(node)
    scale = _scale(a["scale"], done.meta(a["query"]))
    grad = a["grad_out"] if "grad_out" in a else a["grad_out_"]
    qkv = (a["query"], a["key"], a["value"])
    return replace(
        node,
        op=_OWN[1],
        args=(grad, *qkv, _mask(a), a["out"], a["logsumexp"], a["is_causal"], scale),
        kwargs=(),
        outputs=node.outputs[:3],
    )


def _arguments(node: Node) -> Mapping[str, Any]:
    """The call's arguments by the schema's names, defaults included."""
    given = dict(node.kwargs)
    named = {}
    for position, argument in enumerate(resolve(node.op)._schema.arguments):  # type: ignore[attr-defined]
        default = argument.default_value if argument.has_default_value() else None
        in_order = not argument.kwarg_only and position < len(node.args)
        named[argument.name] = node.args[position] if in_order else given.get(argument.name, default)
    return named


def _mask(arguments: Mapping[str, Any]) -> Value | None:
    mask: Value | None = arguments.get("attn_mask", arguments.get("attn_bias"))
    return mask


def _scale(scale: float | None, q: TensorMeta) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def causal_masks(graph: Graph) -> Graph:
    """Masks that no input reaches are worked out: a causal one becomes ``is_causal``, one that hides nothing goes.

    Libraries build the causal mask from ``arange`` while they are traced, which costs the kernels their causal path and
    a batch of square masks in memory.
    """
    positions = {node.name: i for i, node in enumerate(graph.nodes)}
    kinds: dict[tuple[Value, int, int], MaskKind] = {}

    def kind(mask: Value, queries: int, keys: int) -> MaskKind:
        key = (mask, queries, keys)
        if key not in kinds:
            tensor = constant_value(graph, positions, mask)
            kinds[key] = None if tensor is None else _mask_kind(tensor, queries, keys)
        return kinds[key]

    def rule(node: Node, done: Rewritten) -> Node | None:
        if node.op not in _OWN:
            return None
        q_at = _OWN.index(node.op)  # the backward call has the gradient first
        q, k, _, mask = node.args[q_at : q_at + 4]
        is_causal, scale = node.args[-2:]
        if mask is None or is_causal:
            return None
        found = kind(mask, done.meta(q).shape[2], done.meta(k).shape[2])
        if found is None:
            return None
        rest = node.args[q_at + 4 : -2]
        return replace(node, args=(*node.args[: q_at + 3], None, *rest, found == "causal", scale))

    return rewrite(graph, rule)


def _mask_kind(mask: torch.Tensor, queries: int, keys: int) -> MaskKind:
    """``hidden`` counts the lowest finite number too: beside a seen key, its probability is zero as well."""
    if not mask.dtype.is_floating_point:
        return None
    mask = mask.expand(torch.broadcast_shapes(mask.shape, (queries, keys)))
    seen, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min
    if bool(seen.all()):
        return "open"
    causal = torch.ones(queries, keys, dtype=torch.bool).tril()
    return "causal" if bool((seen == causal).all() and (hidden == ~causal).all()) else None


def constant_value(graph: Graph, positions: Mapping[str, int], value: Value) -> torch.Tensor | None:
    """The value, on the CPU, if it follows from constants alone and is small enough, else None.

    A dim along which all is alike has one element here, so that a batch of equal masks is one mask; what is not
    elementwise is given whole tensors.
    """
    values: dict[Value, torch.Tensor] = {}
    for node in _ancestors(graph, positions, value):
        output = Value(node.name)
        if node.op == "constant":
            values[output] = graph.constants[node.target]
        elif node.is_source or draws_random(node.op):
            return None
        elif node.op == "aten.expand.default":
            tensor = values[node.args[0]]
            values[output] = tensor.reshape((1,) * (len(node.meta.shape) - tensor.dim()) + tensor.shape)
        elif torch.Tag.pointwise in getattr(resolve(node.op), "tags", ()):
            if math.prod(torch.broadcast_shapes(*(values[v].shape for v in node.inputs))) > _LARGEST_MASK:
                return None
            values.update(run_node(node, values, torch.device("cpu")))
        else:
            metas = (*(graph.meta(v) for v in node.inputs), *(m for m in node.outputs if m is not None))
            if max(m.numel for m in metas) > _LARGEST_MASK:
                return None
            whole = {v: values[v].expand(graph.meta(v).shape) for v in node.inputs}
            values.update(
                (v, _without_repeats(found)) for v, found in run_node(node, whole, torch.device("cpu")).items()
            )
    return values[value]


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """One element of each dim along which all are alike."""
    for dim in range(tensor.dim()):
        first = tensor.narrow(dim, 0, 1) if tensor.shape[dim] > 1 else tensor
        if first is not tensor and bool((tensor == first).all()):
            tensor = first
    return tensor


def _ancestors(graph: Graph, positions: Mapping[str, int], value: Value) -> list[Node]:
    """What ``value`` depends on, itself included, in program order."""
    found: set[str] = set()
    waiting = [value.node]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(v.node for v in graph.by_name[name].inputs)
    return [graph.by_name[name] for name in sorted(found, key=positions.__getitem__)]
