"""Rules of attention as one operator: the batch and the heads may be sharded, each head needs all queries and keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hap.rules.notation import Call, Dim, Row, Rule, Slot, partial_rows

_BATCH_AND_HEADS = (0, 1)


def attention(call: Call) -> Iterator[Row]:
    """``(q, k, v, mask | None, is_causal, scale) -> (out, logsumexp)``; q, k, v of (B, H, S, D)."""
    for dim in _shared(call, 3):
        yield Row(_inputs(call, dim, mask_position=3), (Dim(dim), Dim(dim)))


def attention_backward(call: Call) -> Iterator[Row]:
    """``(grad, q, k, v, mask | None, out, logsumexp, is_causal, scale) -> (dq, dk, dv)``; linear in grad."""
    for dim in _shared(call, 4):
        yield Row(_inputs(call, dim, mask_position=4), (Dim(dim),) * 3)
    yield from partial_rows(call, ("P" + "R" * (len(call.inputs) - 1),))


def _shared(call: Call, count: int) -> Iterator[int]:
    """The dims among batch and heads in which the first ``count`` arguments agree."""
    for dim in _BATCH_AND_HEADS:
        if len({meta.shape[dim] for meta in call.inputs[:count]}) == 1:
            yield dim


def _inputs(call: Call, dim: int, mask_position: int) -> tuple[Slot, ...]:
    slots: list[Slot] = [Dim(dim) for _ in call.inputs]
    if call.node.args[mask_position] is not None:
        slots[mask_position] = _mask_slot(call.inputs[mask_position].shape, call.inputs[0].shape, dim)
    return tuple(slots)


def _mask_slot(mask: tuple[int, ...], q: tuple[int, ...], dim: int) -> Slot:
    """A mask broadcast along the dim (missing or of size 1) is whole."""
    own = dim - (4 - len(mask))
    return Dim(own) if own >= 0 and mask[own] == q[dim] else "R"


RULES: Mapping[str, Rule] = {
    "hap.attention.default": attention,
    "hap.attention_backward.default": attention_backward,
}
