"""What one operator call does on a single device: floating-point operations and bytes moved.

    mm, bmm (.., M, K) x (.., K, N)    2 M K N per matrix
    products with experts              2 S K N; a rank's share of the experts has that share of the rows, assumed; rows
                                       move thrice, as they are sorted by expert (``hap.experts``)
    attention forward                  2 B H S T (D + E), half of it if causal (4 B H S T D when D = E)
    attention backward                 2.5 times the forward (5 matmuls for 2: FlashAttention-2, Dao 2023, section 3.1)
    convolution                        2 x outputs x weights per output; backward the same for each gradient asked for
    everything else                    elements x ``_FLOPS_PER_ELEMENT`` (1 unless listed), elements being those of the
                                       largest tensor read or written

Views cost nothing: no work and no launch. Bytes are counted once per tensor argument and per output, from the values'
own sizes; a tensor that an ``expand`` repeats is read at its size before the repetition, and lookups
(``embedding``, ``gather``, ...) read only the rows they fetch. A sum over hosts (``hap.hosts_sum``) does its two rounds
on the wire: they stand for arithmetic, and what passes the host's way out for bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from hap.graph import Graph, Node, TensorMeta, Value, map_values
from hap.hosts_sum import HOSTS_SUM

ROUNDS = 2.0  # of messages, of a sum over hosts
OpClass = Literal["matmul", "attention", "conv", "elementwise", "reduction", "index", "view", "hosts"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VIEWS = _names(
    "view _unsafe_view reshape _reshape_alias view_as t transpose permute movedim expand expand_as unsqueeze squeeze "
    "slice select split split_with_sizes chunk unbind narrow diagonal as_strided alias detach lift lift_fresh "
    "lift_fresh_copy unfold swapaxes flatten unflatten empty empty_like new_empty new_empty_strided "
    "view_as_complex view_as_real"
)
_MATMULS = {  # name -> position of the left factor among the tensor arguments
    **dict.fromkeys(_names("mm bmm matmul linear mv dot _grouped_mm expert_mm expert_mm_weight"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), 1),
}
_LOOKUPS = _names("embedding gather index index_select take")
_INDEXING = _LOOKUPS | _names(
    "embedding_dense_backward index_put index_add scatter scatter_add scatter_reduce select_backward slice_backward "
    "select_scatter slice_scatter index_copy masked_scatter sort topk one_hot roll flip cat stack constant_pad_nd "
    "kthvalue median mode bucketize searchsorted index_reduce diagonal_scatter max_unpool2d max_unpool3d "
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d "
    "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward "
    "replication_pad2d_backward replication_pad3d_backward grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d "
    "grid_sampler_3d_backward"
)
_REDUCTIONS = _names(
    "sum mean amax amin max min argmax argmin prod any all std var var_mean norm linalg_vector_norm logsumexp cumsum "
    "cumprod _softmax _safe_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data native_layer_norm "
    "native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward native_batch_norm native_batch_norm_backward "
    "_native_batch_norm_legit_functional batch_norm_backward native_group_norm native_group_norm_backward "
    "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d "
    "_adaptive_avg_pool2d_backward count_nonzero max_pool3d_with_indices max_pool3d_with_indices_backward avg_pool3d "
    "avg_pool3d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward adaptive_max_pool2d adaptive_max_pool3d "
    "adaptive_max_pool2d_backward adaptive_max_pool3d_backward fractional_max_pool2d fractional_max_pool2d_backward "
    "fractional_max_pool3d fractional_max_pool3d_backward cummax cummin logcumsumexp"
)
# Operations per element, assumed: transcendental functions as polynomials of about ten terms, norms and softmaxes as
# passes over their input. They matter little: such operators are limited by memory bandwidth.
_FLOPS_PER_ELEMENT = {
    **dict.fromkeys(_names("clone copy _to_copy cat stack full zeros ones full_like zeros_like ones_like arange"), 0),
    **dict.fromkeys(_names("exp log tanh sigmoid sin cos sqrt rsqrt erf log1p expm1 pow div"), 10),
    **dict.fromkeys(_names("gelu gelu_backward silu silu_backward"), 15),
    **dict.fromkeys(
        _names("_softmax _safe_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data"), 12
    ),
    **dict.fromkeys(_names("native_layer_norm native_group_norm native_batch_norm var_mean _fused_rms_norm"), 8),
    **dict.fromkeys(_names("native_layer_norm_backward native_group_norm_backward native_batch_norm_backward"), 14),
}

_SORTING = {"expert_mm": (0,), "expert_mm_weight": (0, 1)}  # rows that are put in the order of their experts, and back
_THRICE = 3  # read and written before the product reads them; written by the product, read, and put in their places


@dataclass(frozen=True)
class Work:
    """One call on whole tensors. ``read[i]`` bytes belong to tensor argument i, ``written[j]`` to output j;
    ``fetched_bytes`` are rows read from a table, which follow the outputs and not the table. ``dtype`` is what the
    arithmetic runs in. ``call`` is the call itself in words, for looking up what was measured of it."""

    op_class: OpClass
    flops: float
    read: tuple[int, ...]
    written: tuple[int, ...]
    fetched_bytes: int
    dtype: torch.dtype
    node: Node | None = field(default=None, compare=False, repr=False)
    metas: tuple[TensorMeta, ...] = field(default=(), compare=False, repr=False)

    @cached_property
    def call(self) -> str:
        """Such as ``aten.mm.default(float32[8, 4], float32[4, 4])``: equal for calls that do the same."""
        if self.node is None:
            return ""
        described = iter([f"{str(m.dtype).removeprefix('torch.')}{list(m.shape)}" for m in self.metas])
        parts = [_describe(map_values(a, lambda _: next(described))) for a in self.node.args]
        parts += [f"{k}={_describe(map_values(a, lambda _: next(described)))}" for k, a in self.node.kwargs]
        return f"{self.node.op}({', '.join(parts)})"

    @property
    def bytes_read(self) -> int:
        return sum(self.read) + self.fetched_bytes

    @property
    def bytes_written(self) -> int:
        return sum(self.written)


def op_class(op: str) -> OpClass:
    """The class of ``namespace.name.overload``; an operator that nobody listed is elementwise."""
    name = op.split(".")[1]
    if name in _VIEWS:
        return "view"
    if op == HOSTS_SUM:
        return "hosts"
    if name in _MATMULS:
        return "matmul"
    if name in ("attention", "attention_backward"):
        return "attention"
    if name in ("convolution", "convolution_backward"):
        return "conv"
    if name in _INDEXING:
        return "index"
    return "reduction" if name in _REDUCTIONS else "elementwise"


def is_view(node: Node) -> bool:
    """The node's outputs are its first argument's memory."""
    return not node.is_source and bool(node.inputs) and op_class(node.op) == "view"


def node_work(graph: Graph, node: Node) -> Work:
    """The work of one call. Sources and views do none."""
    metas = tuple(graph.meta(v) for v in node.inputs)
    outputs = tuple(m for m in node.outputs if m is not None)
    dtype = _arithmetic_dtype(metas, outputs)
    kind: OpClass = "view" if node.is_source else op_class(node.op)
    if kind == "view":
        return Work("view", 0.0, (0,) * len(metas), (0,) * len(node.outputs), 0, dtype)
    if kind == "hosts":
        return Work(kind, ROUNDS, (0,), (node.meta.nbytes,), 0, dtype, node, metas)
    read = [_stored_bytes(graph, v) for v in node.inputs]
    written = tuple(0 if m is None else m.nbytes for m in node.outputs)
    name, fetched = node.op.split(".")[1], 0
    if name in _LOOKUPS:
        read[0], fetched = 0, node.meta.nbytes
    if name in _SORTING:
        read = [_THRICE * n if i in _SORTING[name] else n for i, n in enumerate(read)]
    if name == "expert_mm":
        written = (_THRICE * node.meta.nbytes,)
    if name.endswith("_like") or name.startswith("new_"):
        read = [0] * len(read)  # only the shape is looked at
    return Work(kind, _flops(kind, name, node, metas, outputs), tuple(read), written, fetched, dtype, node, metas)


def _describe(argument: Any) -> str:
    return argument if isinstance(argument, str) else str(argument).replace("'", "")


def _flops(
    kind: OpClass, name: str, node: Node, metas: tuple[TensorMeta, ...], outputs: tuple[TensorMeta, ...]
) -> float:
    if name == "expert_mm_weight":
        return 2.0 * metas[0].numel * metas[1].shape[-1]
    if kind == "matmul":
        return 2.0 * outputs[0].numel * metas[_MATMULS[name]].shape[-1]
    if kind == "attention":
        return _attention_flops(name, node, metas)
    if kind == "conv":
        return _convolution_flops(name, node, metas)
    elements = max((m.numel for m in (*metas, *outputs)), default=0)
    if name in _LOOKUPS:
        return 0.0
    return float(elements * _FLOPS_PER_ELEMENT.get(name, 1))


def _attention_flops(name: str, node: Node, metas: tuple[TensorMeta, ...]) -> float:
    """The argument lists of ``hap.attention``; the one spelling that capture leaves."""
    backward = name == "attention_backward"
    q, k, v = metas[1:4] if backward else metas[0:3]
    causal = bool(node.args[7 if backward else 4])
    forward = 2.0 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    return forward * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)


def _convolution_flops(name: str, node: Node, metas: tuple[TensorMeta, ...]) -> float:
    """``convolution(x, w, bias, stride, padding, dilation, transposed, ...)``; its backward has the gradient first.
    A weight is (out, in / groups, ...), or (in, out / groups, ...) when transposed."""
    backward = name == "convolution_backward"
    wide, x, w = (metas[0], metas[1], metas[2]) if backward else (node.meta, metas[0], metas[1])
    transposed = bool(node.args[7 if backward else 6])
    pixels = x if transposed else wide
    once = 2.0 * pixels.numel * w.numel / w.shape[0]
    if not backward:
        return once
    return once * sum(m is not None for m in node.outputs[:2])


def _arithmetic_dtype(metas: tuple[TensorMeta, ...], outputs: tuple[TensorMeta, ...]) -> torch.dtype:
    """That of the first floating-point output, else input; integers and booleans are counted as float32."""
    floating = (m.dtype for m in (*outputs, *metas) if m.dtype.is_floating_point)
    return next(floating, torch.float32)


def _stored_bytes(graph: Graph, value: Value) -> int:
    """The bytes behind a value: an expanded tensor has those of what was expanded."""
    stored = graph.meta(value).nbytes
    node = graph.by_name[value.node]
    while node.inputs and is_view(node):
        if node.op.split(".")[1] in ("expand", "expand_as"):
            stored = min(stored, graph.meta(node.inputs[0]).nbytes)
        node = graph.by_name[node.inputs[0].node]
    return stored
