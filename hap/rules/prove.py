"""Proof of strategies by running the operator: what the pieces give, put together, is what the whole gives.

For every strategy the whole arguments are dealt to ranks as its input placements say, in several uneven ways that
include a rank with nothing and a rank with everything; a partial argument is dealt as random parts that sum to it. Each
rank's call runs with its localised literals, and its outputs must be the piece (``Shard``), the whole (``Replicate``)
or, summed over ranks, the whole (``Partial``). Uneven pieces are what refutes wrong rules: with even ones a mean of
means is right.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from hap.errors import HapError
from hap.graph import Graph, Node, TensorMeta, map_values
from hap.ops import resolve
from hap.placement import PARTIAL, REPLICATE, LocalSize, Partial, Placement, Shard, take_shard
from hap.plan import Strategy
from hap.rules.choices import Choices
from hap.rules.localize import localize_call
from hap.rules.notation import Atom, Call, Dim, Row, Slot, base_atom, call_key, make_call, scale_atom
from hap.rules.samples import Sampler, in_float64, sample_inputs, size_vectors, split_sum
from hap.rules.table import DEFAULT_TABLE, RuleTable

TOLERANCE = 1e-10  # relative to the largest element, in float64
LARGEST = 4_000_000  # elements of one call's arguments and outputs


@dataclass(frozen=True)
class Verdict:
    """Whether ``strategy`` of ``op`` held; ``worst_error`` is relative, infinite where the call failed (``detail``)."""

    op: str
    strategy: str
    ok: bool
    worst_error: float
    detail: str = ""


@dataclass(frozen=True)
class Proof:
    """How to prove: ranks, seed, whether in a child process, which a kernel may kill, and on which arguments."""

    world_size: int = 3
    seed: int = 0
    isolated: bool = False
    table: RuleTable = field(default_factory=lambda: DEFAULT_TABLE)
    sample: Sampler = sample_inputs
    tolerance: float = TOLERANCE


def prove_node(node: Node, strategies: Sequence[Strategy], graph: Graph, proof: Proof = Proof()) -> list[Verdict]:
    """One verdict for each of ``strategies`` of ``node``."""
    return prove_call(make_call(node, graph), strategies, proof)


def prove_call(call: Call, strategies: Sequence[Strategy], proof: Proof = Proof()) -> list[Verdict]:
    """``prove_node`` of an operator call whose metas are at hand."""
    elements = call_elements(call)
    if elements > LARGEST:
        detail = f"not run: {elements} elements, at most {LARGEST} are"
        return [Verdict(call.node.op, str(s), False, float("inf"), detail) for s in strategies]
    if proof.isolated:
        return _in_child(call, strategies, proof)
    return [_prove(call, strategy, proof) for strategy in strategies]


def call_elements(call: Call) -> int:
    """Elements of all its arguments and outputs together."""
    return sum(m.numel for m in (*call.inputs, *call.outputs) if m is not None)


def prove_graph(choices: Choices, proof: Proof = Proof()) -> list[Verdict]:
    """Every strategy of every distinct operator call, each once however often it repeats."""
    return [v for call, strategies in distinct_calls(choices) for v in prove_call(call, strategies, proof)]


def distinct_calls(choices: Choices) -> Iterator[tuple[Call, tuple[Strategy, ...]]]:
    """Each kind of call with the strategies that any of its nodes has; group names do not distinguish strategies."""
    found: dict[Any, tuple[Call, dict[Strategy, None]]] = {}
    for node in choices.graph.nodes:
        if node.is_source:
            continue
        call = make_call(node, choices.graph)
        _, strategies = found.setdefault(call_key(call), (call, {}))
        strategies.update(dict.fromkeys(_nameless(s) for s in choices.strategies[node.name]))
    for call, strategies in found.values():
        yield call, tuple(strategies)


def row_strategies(row: Row, call: Call) -> Iterator[Strategy]:
    """The row fitted to every atom of two or more parts that it fits; a row without a sharded dim as it is."""
    metas = (*call.inputs, *call.outputs)
    first = next((i for i, slot in enumerate(row.slots) if isinstance(slot, Dim)), None)
    if first is None:
        yield _fitted(row, call, None)
        return
    slot, meta = row.slots[first], metas[first]
    assert isinstance(slot, Dim) and meta is not None
    size = meta.shape[slot.dim]
    for outer in _divisors(size):
        for n in _divisors(size // outer)[1:]:
            base = base_atom(slot, Atom(outer, n, size // (outer * n)))
            if base is not None and fits(row, base, metas):
                yield _fitted(row, call, base)


def _divisors(n: int) -> list[int]:
    """Ascending; none of zero."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def fits(row: Row, base: Atom, metas: Sequence[TensorMeta | None]) -> bool:
    """Whether every sharded slot of the row can hold the atom."""
    return all(
        not isinstance(slot, Dim) or (meta is not None and scale_atom(slot, base, meta.shape[slot.dim]) is not None)
        for slot, meta in zip(row.slots, metas, strict=True)
    )


def _fitted(row: Row, call: Call, base: Atom | None) -> Strategy:
    def place(slot: Slot | None, meta: TensorMeta | None) -> Any:
        if not isinstance(slot, Dim):
            return None if slot is None else PARTIAL if slot == "P" else REPLICATE
        assert base is not None and meta is not None
        atom = scale_atom(slot, base, meta.shape[slot.dim])
        assert atom is not None
        return Shard(slot.dim, *atom, "g")

    inputs = tuple(place(s, m) for s, m in zip(row.inputs, call.inputs, strict=True))
    return Strategy(inputs, tuple(place(s, m) for s, m in zip(row.outputs, call.outputs, strict=True)))


def _nameless(strategy: Strategy) -> Strategy:
    def strip(placement: Any) -> Any:
        if isinstance(placement, Shard):
            return Shard(placement.dim, placement.outer, placement.n, placement.unit, "g")
        return placement

    return Strategy(tuple(map(strip, strategy.inputs)), tuple(map(strip, strategy.outputs)))


def _prove(call: Call, strategy: Strategy, proof: Proof) -> Verdict:
    """Run the whole and every dealing of it. An operator may raise anything: that refutes the strategy."""
    generator = torch.Generator().manual_seed(proof.seed)
    op = resolve(call.node.op)
    worst = 0.0
    try:
        arguments = localize_call(call, strategy, proof.table)
        inputs = proof.sample(call, generator)
        whole = run_whole(call, inputs)
        for sizes in _dealings(strategy, proof.world_size):
            dealt = [
                deal_input(x, placement, sizes, proof.world_size, generator)
                for x, placement in zip(inputs, strategy.inputs, strict=True)
            ]
            pieces = [
                outputs_of(_run(op, arguments, [d[rank] for d in dealt], sizes, rank))
                for rank in range(proof.world_size)
            ]
            for index, placement in enumerate(strategy.outputs):
                if placement is not None:
                    error = mismatch([p[index] for p in pieces], whole[index], placement, sizes)
                    if not error <= proof.tolerance:
                        return Verdict(call.node.op, str(strategy), False, error, f"output {index} at sizes {sizes}")
                    worst = max(worst, error)
    except HapError as e:
        return Verdict(call.node.op, str(strategy), False, float("inf"), str(e))
    except Exception as e:  # whatever a kernel raises on a piece
        return Verdict(call.node.op, str(strategy), False, float("inf"), f"{type(e).__name__}: {e}".splitlines()[0])
    return Verdict(call.node.op, str(strategy), True, worst)


def _dealings(strategy: Strategy, world_size: int) -> tuple[tuple[int, ...], ...]:
    shard = next((p for p in (*strategy.inputs, *strategy.outputs) if isinstance(p, Shard)), None)
    return ((),) if shard is None else size_vectors(shard.n, world_size)


def deal_input(
    x: torch.Tensor, placement: Placement, sizes: tuple[int, ...], world_size: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """What each rank holds of ``x``."""
    match placement:
        case Shard() as shard:
            return [take_shard(x, shard, sizes, rank) for rank in range(world_size)]
        case Partial():
            return split_sum(x, world_size, generator)
    return [x] * world_size


def _run(
    op: Callable[..., Any], arguments: Any, inputs: Sequence[torch.Tensor], sizes: tuple[int, ...], rank: int
) -> Any:
    """The call with its values replaced by ``inputs`` in order and its local sizes by rank's."""
    remaining = iter(inputs)

    def concrete(tree: Any) -> Any:
        if isinstance(tree, LocalSize):
            return tree.at({tree.group: sizes}, rank)
        return tuple(map(concrete, tree)) if isinstance(tree, tuple) else in_float64(tree)

    args, kwargs = arguments
    args = map_values(args, lambda _: next(remaining))
    kwargs = map_values(kwargs, lambda _: next(remaining))
    return op(*map(concrete, args), **{k: concrete(v) for k, v in kwargs})


def run_whole(call: Call, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The outputs of the call on one device."""
    return outputs_of(_run(resolve(call.node.op), (call.node.args, call.node.kwargs), inputs, (), 0))


def outputs_of(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def mismatch(pieces: list[torch.Tensor], whole: torch.Tensor, placement: Placement, sizes: tuple[int, ...]) -> float:
    """The largest error of the pieces, relative to the whole's largest element; infinite if a shape or dtype is off."""
    match placement:
        case Shard() as shard:
            pairs = [(piece, take_shard(whole, shard, sizes, rank)) for rank, piece in enumerate(pieces)]
        case Partial():
            pairs = [(torch.stack(pieces).sum(0, dtype=whole.dtype), whole)]
        case _:
            pairs = [(piece, whole) for piece in pieces]
    return max(_error(piece, expected, whole) for piece, expected in pairs)


def _error(piece: torch.Tensor, expected: torch.Tensor, whole: torch.Tensor) -> float:
    if piece.shape != expected.shape or piece.dtype != expected.dtype:
        return float("inf")
    if piece.numel() == 0 or torch.equal(piece, expected):
        return 0.0
    if not (piece.dtype.is_floating_point or piece.dtype.is_complex):
        return float("inf")
    difference = torch.where(piece == expected, 0.0, (piece - expected).abs())
    finite = whole[whole.isfinite()]
    scale = max(1.0, finite.abs().max().item() if finite.numel() else 0.0)
    error = difference.max().item() / scale
    return error if error == error else float("inf")


def _in_child(call: Call, strategies: Sequence[Strategy], proof: Proof) -> list[Verdict]:
    """One child per strategy, so that the one that kills a kernel is named."""
    return [_prove_in_child(call, strategy, proof) for strategy in strategies]


def _prove_in_child(call: Call, strategy: Strategy, proof: Proof) -> Verdict:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(sender, call, strategy, proof))
    child.start()
    sender.close()
    try:
        verdict: Verdict = receiver.recv()
    except EOFError:
        child.join()
        detail = f"the operator killed its process (exit code {child.exitcode})"
        return Verdict(call.node.op, str(strategy), False, float("inf"), detail)
    child.join()
    return verdict


def _child(sender: Connection, call: Call, strategy: Strategy, proof: Proof) -> None:
    torch.set_num_threads(1)
    sender.send(_prove(call, strategy, proof))
