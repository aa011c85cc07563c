"""The simplifications that follow capture, in the order of ``PASSES``. Each is ``Graph -> Graph`` and exact.

They remove what tracing leaves behind (aliases, copies, views of views, additions of zero) and give each thing one
spelling, so that later rooms meet few operators: views are ``aten.view.default`` with resolved shapes, slices have a
start and an end inside the dim, attention is ``hap.attention.default``, dropout ``hap.dropout.default``,
random numbers are functions of a seed, and a batch norm is written as sums over the batch.

A graph has no strides, so ``clone`` and ``contiguous`` say nothing; and no aliasing, so a view is a copy. Recomputation
asked for by activation checkpointing is merged with the first computation: what to recompute is the planner's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hap.capture.attention import canonical_attention, causal_masks
from hap.capture.batch_norm import spell_batch_norms
from hap.capture.draws import canonical_draws
from hap.capture.experts import canonical_experts
from hap.capture.names import Names
from hap.capture.own_places import spell_own_places
from hap.capture.rewrite import Rewritten, rewrite
from hap.graph import Graph, Node, Value, with_inputs
from hap.ops import draws_random

Pass = Callable[[Graph], Graph]
_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.view_copy.default")
_ALIASES = (
    "aten.alias.default",
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.detach.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "aten._to_copy.default",
    "aten.expand.default",
    "aten.view.default",
)
_NEW = {"aten.new_zeros.default": 0, "aten.new_ones.default": 1, "aten.new_full.default": None}  # what they hold
_SAME = {  # another name for the same numbers
    "aten._conj.default": "aten.conj_physical.default",  # marked as a conjugate, and what is sent has no marks
    "aten._conj_physical.default": "aten.conj_physical.default",
    "aten._neg_view.default": "aten.neg.default",
    "aten._unsafe_index.Tensor": "aten.index.Tensor",  # which is sure of its bounds: what interpolation looks up
    "aten._unsafe_index_put.default": "aten.index_put.default",
    "aten._efficientzerotensor.default": "aten.zeros.default",  # tangents of what forward mode takes for constant
}
_CONVOLUTIONS = {"aten.convolution.default": 8, "aten.convolution_backward.default": 9}  # where groups are told
_RESOLVED = ("aten.resolve_conj.default", "aten.resolve_neg.default")
_NEUTRAL = {  # operator -> the second argument that changes nothing
    "aten.mul.Tensor": 1,
    "aten.mul.Scalar": 1,
    "aten.div.Tensor": 1,
    "aten.div.Scalar": 1,
    "aten.add.Tensor": 0,
    "aten.add.Scalar": 0,
    "aten.sub.Tensor": 0,
    "aten.sub.Scalar": 0,
}


def clean(graph: Graph) -> Graph:
    """All passes, in order."""
    for one_pass in PASSES:
        graph = one_pass(graph)
    return graph


def spell_views(graph: Graph) -> Graph:
    """View-like operators to one name; sizes -1 to real ones; slice bounds to 0 <= start <= end <= size.

    ``split`` and ``chunk`` name every part's size, and ``squeeze`` its result: on a rank with a share of zero or one
    ``split`` gives fewer parts and ``squeeze`` drops more dims than in the whole.
    """

    def rule(node: Node, done: Rewritten) -> Node | None:
        if node.op in _VIEWS:
            return replace(node, op="aten.view.default", args=(node.args[0], node.meta.shape))
        if node.op == "aten.expand.default":
            return replace(node, args=(node.args[0], node.meta.shape), kwargs=())
        if node.op in ("aten.split.Tensor", "aten.unsafe_split.Tensor", "aten.chunk.default"):
            return _resolved_split(node, done.meta(node.args[0]).shape)
        if node.op == "aten.squeeze.default":
            return replace(node, op="aten.view.default", args=(node.args[0], node.meta.shape))
        if node.op == "aten.slice.Tensor":
            return _resolved_slice(node, done.meta(node.args[0]).shape)
        return None

    return rewrite(graph, rule)


def _resolved_split(node: Node, shape: tuple[int, ...]) -> Node:
    dim = (node.args[2] if len(node.args) > 2 else node.kwarg("dim", 0)) % len(shape)
    sizes = tuple(o.shape[dim] for o in node.outputs if o is not None)
    return replace(node, op="aten.split_with_sizes.default", args=(node.args[0], sizes, dim), kwargs=())


def _resolved_slice(node: Node, shape: tuple[int, ...]) -> Node:
    given = node.args[1:]
    defaults = (0, None, None, 1)
    dim, start, end, step = given + defaults[len(given) :]
    dim %= len(shape)
    start, end, step = slice(start, end, step).indices(shape[dim])
    return replace(node, args=(node.args[0], dim, start, max(start, end), step))


def spell_constants(graph: Graph) -> Graph:
    """``new_zeros`` and its kin as ``full``: only their own size and dtype matter, and so their argument would be
    resharded for nothing."""

    def rule(node: Node, done: Rewritten) -> Node | None:
        if node.op not in _NEW:
            return None
        value = _NEW[node.op]
        if value is None:
            value = node.args[2] if len(node.args) > 2 else node.kwarg("fill_value")
        kwargs = (("dtype", node.meta.dtype),)
        return replace(node, op="aten.full.default", args=(node.meta.shape, value), kwargs=kwargs)

    return rewrite(graph, rule)


def spell_alike(graph: Graph) -> Graph:
    """One name for what has several."""

    def rule(node: Node, done: Rewritten) -> Node | tuple[Value, ...] | None:
        if node.op in _RESOLVED:
            return (node.args[0],)
        return replace(node, op=_SAME[node.op]) if node.op in _SAME else None

    return rewrite(graph, rule)


def spell_grouped(graph: Graph) -> Graph:
    """Convolutions of one image that has many groups, which may be a batch, as ``hap.convolution``."""

    def rule(node: Node, done: Rewritten) -> Node | None:
        if node.op not in _CONVOLUTIONS:
            return None
        is_grouped = node.args[_CONVOLUTIONS[node.op]] > 1 and done.meta(node.args[0]).shape[0] == 1
        return replace(node, op=node.op.replace("aten", "hap")) if is_grouped else None

    return rewrite(graph, rule)


def drop_identities(graph: Graph) -> Graph:
    """Calls whose output is one of their tensors: aliases, copies, casts, expands, slices and views to what it was."""

    def rule(node: Node, done: Rewritten) -> tuple[Value, ...] | None:
        if node.op == "aten.copy.default":  # (destination, source) -> source, in the destination's shape and dtype
            return (node.args[1],) if done.meta(node.args[1]) == node.meta else None
        if not node.args or not isinstance(node.args[0], Value):
            return None
        source = node.args[0]
        if done.meta(source) != node.outputs[0]:
            return None
        return (source,) if _is_identity(node, done) else None

    return rewrite(graph, rule)


def _is_identity(node: Node, done: Rewritten) -> bool:
    """Given that the first argument has the output's shape and dtype."""
    if node.op in _ALIASES:
        return node.kwarg("memory_format") is None
    if node.op in _NEUTRAL:
        other = node.args[1]
        return isinstance(other, (int, float)) and other == _NEUTRAL[node.op]
    return node.op == "aten.slice.Tensor"  # of the same size, hence all of it


def drop_empty_pieces(graph: Graph) -> Graph:
    """``cat`` without its empty pieces (torch accepts a legacy shape (0,) anywhere); of one piece, that piece."""

    def rule(node: Node, done: Rewritten) -> Node | tuple[Value, ...] | None:
        if node.op != "aten.cat.default":
            return None
        pieces = tuple(piece for piece in node.args[0] if done.meta(piece).numel > 0)
        if len(pieces) == 1 and done.meta(pieces[0]) == node.meta:
            return pieces
        if not pieces or len(pieces) == len(node.args[0]):
            return None
        dtypes = {done.meta(piece).dtype for piece in pieces}
        return replace(node, args=(pieces, *node.args[1:])) if dtypes == {node.meta.dtype} else None

    return rewrite(graph, rule)


def compose_views(graph: Graph) -> Graph:
    """A view of a view is one view of the first tensor, or that tensor itself."""

    def rule(node: Node, done: Rewritten) -> Node | tuple[Value, ...] | None:
        if node.op != "aten.view.default":
            return None
        before = done.producer(node.args[0])
        if before.op != "aten.view.default":
            return None
        source = before.args[0]
        if done.meta(source) == node.meta:
            return (source,)
        return replace(node, args=(source, node.args[1]))

    return rewrite(graph, rule)


def cancel_transposes(graph: Graph) -> Graph:
    """``t``, ``transpose`` and ``permute`` that undo the one before."""

    def rule(node: Node, done: Rewritten) -> tuple[Value, ...] | None:
        order = _order(node)
        if order is None:
            return None
        if order == tuple(range(len(order))):
            return (node.args[0],)
        before = done.producer(node.args[0])
        inner = _order(before)
        if inner is not None and tuple(inner[d] for d in order) == tuple(range(len(order))):
            return (before.args[0],)
        return None

    return rewrite(graph, rule)


def _order(node: Node) -> tuple[int, ...] | None:
    """Output dim -> input dim of a transposition, None for any other call."""
    if node.op not in ("aten.t.default", "aten.transpose.int", "aten.permute.default"):
        return None
    rank = len(node.meta.shape)
    if node.op == "aten.permute.default":
        return tuple(d % rank for d in node.args[1])
    order = list(range(rank))
    if rank:
        a, b = (0, rank - 1) if node.op == "aten.t.default" else (node.args[1] % rank, node.args[2] % rank)
        order[a], order[b] = order[b], order[a]
    return tuple(order)


def merge_equal(graph: Graph) -> Graph:
    """Common subexpressions: the same operator on the same arguments, unless it draws random numbers."""
    first: dict[tuple[Any, ...], str] = {}

    def rule(node: Node, done: Rewritten) -> tuple[Value, ...] | None:
        if draws_random(node.op):
            return None
        key = (node.op, repr(node.args), repr(node.kwargs))  # by text: 1, 1.0 and True are equal but not the same
        name = first.setdefault(key, node.name)
        return None if name == node.name else tuple(Value(name, i) for i in range(len(node.outputs)))

    return rewrite(graph, rule)


def drop_unused(graph: Graph) -> Graph:
    """Calls and sources that no result needs. Parameters, inputs and the tangent stay: they are the interface.

    So does a buffer that is written: its update goes where it lies.
    """
    needed = {value.node for value in graph.results}
    needed |= {node.name for node in graph.sources("buffer") if node.target in graph.updates}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in needed or node.op in ("parameter", "input", "tangent"):
            kept.append(node)
            needed.update(value.node for value in node.inputs)
    used = {node.target for node in kept if node.op == "constant"}
    constants = {name: tensor for name, tensor in graph.constants.items() if name in used}
    return replace(graph, nodes=tuple(reversed(kept)), constants=constants)


def rename_nodes(graph: Graph) -> Graph:
    """Sources first, in the order of parameters, buffers, inputs, tangent, constants; calls numbered without gaps."""
    names = Names()
    kinds = ("parameter", "buffer", "input", "tangent", "constant")
    sources = sorted((n for n in graph.nodes if n.is_source), key=lambda n: kinds.index(n.op))
    targets = {n.target: f"constant_{i}" for i, n in enumerate(n for n in sources if n.op == "constant")}
    renamed: dict[str, str] = {}
    nodes: list[Node] = []
    for node in (*sources, *(n for n in graph.nodes if not n.is_source)):
        target = targets[node.target] if node.op == "constant" else node.target
        name = names.source(node.op, target) if node.is_source else names.operator(node.op)
        renamed[node.name] = name
        nodes.append(replace(with_inputs(node, lambda v: Value(renamed[v.node], v.index)), name=name, target=target))

    def value(old: Value) -> Value:
        return Value(renamed[old.node], old.index)

    return replace(
        graph,
        nodes=tuple(nodes),
        loss=value(graph.loss),
        gradients={k: value(v) for k, v in graph.gradients.items()},
        updates={k: value(v) for k, v in graph.updates.items()},
        constants={targets[k]: tensor for k, tensor in graph.constants.items()},
    )


PASSES: tuple[Pass, ...] = (
    spell_views,
    spell_constants,
    spell_alike,
    spell_grouped,
    drop_empty_pieces,
    drop_identities,
    compose_views,
    cancel_transposes,
    canonical_attention,
    canonical_draws,
    canonical_experts,
    spell_batch_norms,
    spell_own_places,
    merge_equal,
    causal_masks,
    drop_unused,
    rename_nodes,
)
