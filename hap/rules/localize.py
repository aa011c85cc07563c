"""From a strategy back to its row: the soundness check of a loaded plan, and the literals that the row makes local."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hap.errors import PlanError
from hap.graph import Graph, Node, TensorMeta
from hap.placement import PARTIAL, REPLICATE, LocalSize, LocalStart, Placement, Shard, local_shape
from hap.plan import Strategy
from hap.rules.choices import batch_size, replicated
from hap.rules.notation import Atom, Call, Dim, Place, Row, Scale, Shape, Slot, base_atom, make_call, scale_atom
from hap.rules.table import DEFAULT_TABLE, RuleTable, call_rows

Arguments = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]


def localize(node: Node, strategy: Strategy, graph: Graph, table: RuleTable = DEFAULT_TABLE) -> Arguments:
    """``(args, kwargs)`` as a rank runs them under ``strategy``: literals that shrink are ``LocalSize``, values stay.

    Raises PlanError unless the strategy is all-replicated, a row of the operator's rule fitted to its shapes, or, for a
    source, a way it may be stored.
    """
    if node.is_source:
        _check_source(node, strategy, graph)
        return node.args, node.kwargs
    return localize_call(make_call(node, graph), strategy, table)


def localize_call(call: Call, strategy: Strategy, table: RuleTable = DEFAULT_TABLE) -> Arguments:
    """``localize`` of an operator call whose metas are at hand."""
    node = call.node
    if strategy == replicated(node):
        return node.args, node.kwargs
    shard = next((p for p in (*strategy.inputs, *strategy.outputs) if isinstance(p, Shard)), None)
    for row in call_rows(call, table):
        if _is_row(row, strategy, call):
            return _edited(call, row, strategy, shard)
    raise PlanError(f"{node.name} ({node.op}): no sharding rule allows {strategy}; plan again")


def _check_source(node: Node, strategy: Strategy, graph: Graph) -> None:
    if strategy.inputs or len(strategy.outputs) != 1:
        raise PlanError(f"{node.name} ({node.op}): {strategy} is not a placement of a source")
    match strategy.outputs[0]:
        case placement if placement == REPLICATE:
            return
        case Shard() as shard if node.op == "parameter" and _fills(shard, node.meta):
            return
        case Shard(0, 1, n, 1) if node.op == "input" and node.meta.shape[:1] == (n,) and n == batch_size(graph):
            return
    raise PlanError(f"{node.target or node.name} ({node.op}) cannot be stored as {strategy.outputs[0]}")


def _fills(shard: Shard, meta: TensorMeta) -> bool:
    return shard.dim < len(meta.shape) and shard.extent == meta.shape[shard.dim]


def _is_row(row: Row, strategy: Strategy, call: Call) -> bool:
    """Whether the strategy is the row, with one base atom and one group throughout."""
    placements, metas = (*strategy.inputs, *strategy.outputs), (*call.inputs, *call.outputs)
    if len(strategy.inputs) != len(row.inputs) or len(placements) != len(row.slots):
        return False
    base: Atom | None = None
    group: str | None = None
    for slot, placement, meta in zip(row.slots, placements, metas, strict=True):
        if not isinstance(slot, Dim):
            if placement != _plain(slot):
                return False
            continue
        if not isinstance(placement, Shard) or placement.dim != slot.dim or meta is None:
            return False
        atom = Atom(placement.outer, placement.n, placement.unit)
        base = base_atom(slot, atom) if base is None else base
        group = placement.group if group is None else group
        if base is None or placement.group != group or scale_atom(slot, base, meta.shape[slot.dim]) != atom:
            return False
    return True


def _plain(slot: Slot | None) -> Placement | None:
    return None if slot is None else PARTIAL if slot == "P" else REPLICATE


def _edited(call: Call, row: Row, strategy: Strategy, shard: Shard | None) -> Arguments:
    args, kwargs = list(call.node.args), dict(call.node.kwargs)

    def put(where: int | str, value: Any) -> None:
        if isinstance(where, int):
            args[where] = value
        else:
            kwargs[where] = value

    for edit in row.edits:
        match edit:
            case Shape(where, output):
                meta, placement = call.outputs[output], strategy.outputs[output]
                assert meta is not None and placement is not None
                put(where, local_shape(meta.shape, placement))
            case Place(where, of_input):
                piece = strategy.outputs[0] if of_input is None else strategy.inputs[of_input]
                assert isinstance(piece, Shard), f"{call.node.op}: {row} places what is not sharded"
                before = args[where] or ()  # which piece of a whole this call's own whole is
                put(where, (*before, piece.dim, piece.outer, piece.n, piece.unit, LocalStart(piece.group, 1)))
            case Scale(where):
                assert shard is not None, f"{call.node.op}: {row} scales without a sharded dim"
                old = args[where] if isinstance(where, int) else kwargs[where]
                put(where, _scaled(old, shard))
    return tuple(args), tuple((k, kwargs[k]) for k, _ in call.node.kwargs)


def _scaled(literal: int | Sequence[int], shard: Shard) -> Any:
    """A literal that counts elements in whole atoms, or each of a list, as a local size."""
    if not isinstance(literal, int):
        return tuple(_scaled(item, shard) for item in literal)
    assert literal % shard.n == 0, f"{literal} is no whole number of {shard.n} atoms"
    return LocalSize(shard.group, literal // shard.n) if literal else 0
