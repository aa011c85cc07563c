"""A batch norm written as sums over the global batch: the operators of ``hap.batch_norm`` and a few on (C,) tensors."""

from __future__ import annotations

from typing import Any

import torch

from hap.capture.rewrite import Expansion, Rewritten, Spelling, rewrite
from hap.errors import CaptureError
from hap.graph import Graph, Node, TensorMeta, Value

_FORWARD = (
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit_no_training.default",
    "aten._native_batch_norm_legit.no_stats",
    "aten.native_batch_norm.default",
)
_BACKWARD = "aten.native_batch_norm_backward.default"


def spell_batch_norms(graph: Graph) -> Graph:
    """Every batch norm, in training and in evaluation, and its backward."""

    def rule(node: Node, done: Rewritten) -> Expansion | None:
        if node.op in _FORWARD:
            return _forward(node, done)
        if node.op == _BACKWARD:
            return _backward(node, done)
        return None

    return rewrite(graph, rule)


def _forward(node: Node, done: Rewritten) -> Expansion:
    """The outputs are (out, save_mean, save_rstd[, running_mean, running_var])."""
    x, weight, bias, running_mean, running_var, training, momentum, eps = _forward_arguments(node)
    spell = Spelling(node)
    updates: tuple[Value, ...] = ()
    if not training:
        mean = _wide(spell, running_mean, done)
        rstd = _rstd(spell, _wide(spell, running_var, done), eps)
        updates = (running_mean, running_var)
    else:
        meta = done.meta(x)
        channels = meta.shape[1]
        stats = TensorMeta((channels,), _stats_dtype(meta.dtype))
        count = meta.numel // channels
        if count < 2:
            raise CaptureError(f"module {node.module!r}: batch norm over one value a channel has no variance")
        mean = spell.call("aten.div.Tensor", (_channel_sum(spell, x, meta, stats), count), stats)
        squares = spell.call("hap.batch_norm_squares.default", (x, mean), stats)
        var = spell.call("aten.div.Tensor", (squares, count), stats)
        rstd = _rstd(spell, var, eps)
        if running_mean is not None:
            updates = (
                _moved(spell, done.meta(running_mean), running_mean, mean, momentum, 1.0),
                _moved(spell, done.meta(running_var), running_var, var, momentum, count / (count - 1)),
            )
    out = spell.call("hap.batch_norm.default", (x, mean, rstd, weight, bias), done.meta(x))
    return Expansion(spell.nodes, (out, mean, rstd, *updates))


def _forward_arguments(node: Node) -> tuple[Any, ...]:
    """(x, weight, bias, running_mean, running_var, training, momentum, eps) of any spelling."""
    if node.op.endswith("no_stats"):
        x, weight, bias, training, momentum, eps = node.args
        return x, weight, bias, None, None, training, momentum, eps
    if "no_training" in node.op:
        x, weight, bias, running_mean, running_var, momentum, eps = node.args
        return x, weight, bias, running_mean, running_var, False, momentum, eps
    return node.args


def _backward(node: Node, done: Rewritten) -> Expansion:
    """``(grad, x, weight, running_mean, running_var, save_mean, save_rstd, train, eps, mask) -> (dx, dweight, dbias)``.

    In evaluation the statistics are constants: dx is then ``weight * rstd * grad``.
    """
    grad, x, weight, running_mean, running_var, mean, rstd, training, eps, _ = node.args
    spell, meta = Spelling(node), done.meta(x)
    stats = TensorMeta((meta.shape[1],), _stats_dtype(meta.dtype))
    if not training:
        mean = _wide(spell, running_mean, done)
        rstd = _rstd(spell, _wide(spell, running_var, done), eps)
    sums = spell.call("hap.batch_norm_sums.default", (grad, x, mean, rstd), stats, stats)
    dbias, dweight = sums, Value(sums.node, 1)
    if training:
        count = meta.numel // meta.shape[1]
        means = [spell.call("aten.div.Tensor", (total, count), stats) for total in (dbias, dweight)]
    else:
        zero = spell.call("aten.zeros_like.default", (mean,), stats)
        means = [zero, zero]
    dx = spell.call("hap.batch_norm_backward.default", (grad, x, mean, rstd, weight, *means), meta)
    found = []
    for value, expected in zip((dx, dweight, dbias), node.outputs, strict=True):
        found.append(
            value if expected is None or expected == spell.meta(value) else _cast(spell, value, expected.dtype)
        )
    return Expansion(spell.nodes, tuple(found))


def _channel_sum(spell: Spelling, x: Value, meta: TensorMeta, stats: TensorMeta) -> Value:
    dims = tuple(d for d in range(len(meta.shape)) if d != 1)
    kwargs = () if stats.dtype == meta.dtype else (("dtype", stats.dtype),)
    return spell.call("aten.sum.dim_IntList", (x, dims), stats, kwargs=kwargs)


def _rstd(spell: Spelling, var: Value, eps: float) -> Value:
    meta = spell.meta(var)
    return spell.call("aten.rsqrt.default", (spell.call("aten.add.Tensor", (var, eps), meta),), meta)


def _moved(spell: Spelling, meta: TensorMeta, running: Value, new: Value, momentum: float, correction: float) -> Value:
    """``(1 - momentum) * running + momentum * correction * new``, in the running statistic's dtype."""
    new = spell.call("aten.mul.Tensor", (new, momentum * correction), spell.meta(new))
    if spell.meta(new) != meta:
        new = _cast(spell, new, meta.dtype)
    return spell.call("aten.add.Tensor", (spell.call("aten.mul.Tensor", (running, 1 - momentum), meta), new), meta)


def _wide(spell: Spelling, running: Value, done: Rewritten) -> Value:
    meta = done.meta(running)
    spell.metas[running] = meta
    dtype = _stats_dtype(meta.dtype)
    return running if dtype == meta.dtype else _cast(spell, running, dtype)


def _cast(spell: Spelling, value: Value, dtype: torch.dtype) -> Value:
    meta = TensorMeta(spell.meta(value).shape, dtype)
    return spell.call("aten._to_copy.default", (value,), meta, kwargs=(("dtype", dtype),))


def _stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
