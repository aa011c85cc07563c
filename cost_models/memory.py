"""Bytes that every rank holds, followed through the step in program order.

Kinds: ``parameters`` (with buffers, constants and inputs; there from the first node to the last), ``optimizer`` (its
state, always there), ``gradients`` (each from the moment it exists to the end), ``activations`` (any other value, from
its node to its last reader; what the backward pass reads is saved simply by being read late), ``gathered`` (whole
copies of sharded values), ``temporary`` (what a collective packs and unpacks, while it runs: ``staging``). A view holds
its base and no bytes of its own, unless it must copy (``strides``). The kinds are reported at the moment at which the
rank's total is largest: they sum to the peak.

Calls run in the program's order (``order``). What a call makes that is made ``again`` lives twice: to its last reader
in the forward part, and from just before its first one in the backward part. A conversion happens just before its
first reader, that of a result as soon as the value exists; its copy lives to the last reader that shares it, and the
source goes when nobody else reads it. Operators that are several kernels hold intermediate tensors while they run
(``_INNER``). Python and the allocator add fragmentation, the CUDA context and library workspaces: ``RESERVE_FRACTION``
of every device is left for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from hap.conversion import Need, required_results
from hap.cost_models.order import program_order
from hap.cost_models.staging import UNASKED, Pieces, staging_bytes
from hap.cost_models.strides import Strides, find_strides
from hap.cost_models.work import is_view
from hap.fabric import Array
from hap.graph import Graph, Node, Phase, Value
from hap.placement import REPLICATE, GroupSizes, Placement, Shard
from hap.plan import Strategy

KINDS = ("parameters", "optimizer", "gradients", "activations", "gathered", "temporary")
# Intermediate tensors of the first output's size that an operator of ours holds at its peak (hap/batch_norm.py).
_INNER = {"batch_norm": 1, "batch_norm_backward": 2}
RESERVE_FRACTION = 0.1  # of a device's memory, assumed
_STATES = {"sgd": 0, "sgd+momentum": 1, "adam": 2, "adamw": 2}  # tensors of the parameter's size and dtype


@dataclass(frozen=True)
class MemoryUse:
    """``by_kind[rank][kind]`` bytes at that rank's peak; ``peak_bytes[rank]`` their sum."""

    by_kind: tuple[dict[str, int], ...]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(sum(kinds.values()) for kinds in self.by_kind)


def optimizer_state_bytes(optimizer: str, nbytes: int) -> int:
    """State for a parameter of ``nbytes``: nothing for sgd, one copy for sgd+momentum, two for adam and adamw. No
    master copies. ValueError for any other name."""
    if optimizer not in _STATES:
        raise ValueError(f"unknown optimizer {optimizer!r} (known: {', '.join(_STATES)})")
    return _STATES[optimizer] * nbytes


def usable_bytes(memory_bytes: int) -> int:
    """What a plan may use of a device's memory."""
    return int(memory_bytes * (1 - RESERVE_FRACTION))


def local_bytes(nbytes: int, placement: Placement, sizes: GroupSizes, world_size: int) -> Array:
    """Bytes of every rank's piece of a value of ``nbytes`` (N,)."""
    if isinstance(placement, Shard):
        return np.array(sizes[placement.group], dtype=np.float64) * (nbytes // placement.n)
    return np.full(world_size, float(nbytes))


def memory_use(
    graph: Graph,
    strategies: Mapping[str, Strategy],
    sizes: GroupSizes,
    needs: Sequence[Need],
    world_size: int,
    optimizer: str,
    *,
    ranks: int | None = None,
    order: Sequence[Node] | None = None,
    strides: Strides | None = None,
    decompositions: Sequence[str] | None = None,
    again: Mapping[str, Sequence[Node]] = MappingProxyType({}),
) -> MemoryUse:
    """Peak memory of every rank, by kind. ``needs`` are those of ``find_needs`` for the same strategies, performed by
    ``decompositions`` (None: by what a communicator does unasked). Of a folded cluster ``world_size`` is the number of
    classes and ``ranks`` that of ranks. ``order`` and ``strides`` are the graph's, if known. ``again``: the calls
    that are repeated before a call (``order.repeats``)."""
    ledger = _Ledger(graph, strategies, sizes, world_size, ranks, order, strides, again)
    ledger.walk(needs, decompositions)
    held = ledger.held(optimizer)
    peak = sum(held.values()).argmax(axis=0)  # type: ignore[union-attr]
    return MemoryUse(tuple({k: int(held[k][peak[r], r]) for k in KINDS} for r in range(world_size)))


@dataclass
class _Storage:
    """One allocation: there from moment ``born`` to moment ``last``."""

    kind: str
    nbytes: Array
    born: int
    last: int


class _Ledger:
    """Allocations met on a walk through the program. Every call and every conversion is a moment of its own."""

    def __init__(
        self,
        graph: Graph,
        strategies: Mapping[str, Strategy],
        sizes: GroupSizes,
        world_size: int,
        ranks: int | None = None,
        order: Sequence[Node] | None = None,
        strides: Strides | None = None,
        again: Mapping[str, Sequence[Node]] = MappingProxyType({}),
    ) -> None:
        self.graph, self.strategies, self.sizes, self.world_size = graph, strategies, sizes, world_size
        self.ranks = world_size if ranks is None else ranks
        self.storages: list[_Storage] = []
        self.of: dict[Value, _Storage] = {}
        self.copies: dict[tuple[Value, Placement, Phase], _Storage] = {}
        self.needs: dict[tuple[Value, Placement, Phase], tuple[Need, str]] = {}
        self.order = program_order(graph) if order is None else order
        self.strides = find_strides(graph) if strides is None else strides
        self.again = again
        self.moments: dict[str, int] = {}  # of the calls
        self.end = -1  # the latest moment

    def walk(self, needs: Sequence[Need], decompositions: Sequence[str] | None = None) -> None:
        if decompositions is None:
            decompositions = [UNASKED[n.collective] for n in needs]
        self.needs = {(n.value, n.target, n.phase): (n, how) for n, how in zip(needs, decompositions, strict=True)}
        results: dict[str, list[tuple[Value, Placement]]] = {}
        for value, target in required_results(self.graph, self.strategies):
            results.setdefault(value.node, []).append((value, target))
        for node in self.order:
            for repeated in self.again.get(node.name, ()):
                self._call(repeated, "backward")
            self._call(node, node.phase)
            self.moments[node.name] = self.end
            for value, target in results.get(node.name, ()):
                self._held_as(value, target, node.phase)
        self._keep_results()

    def _call(self, node: Node, phase: Phase) -> None:
        read = [self._storage_read(node, i, phase) for i in range(len(node.inputs))]
        self.end += 1
        for storage in read:
            storage.last = self.end
        self._produce(node, read)

    def _bytes(self, value: Value, placement: Placement) -> Array:
        return local_bytes(self.graph.meta(value).nbytes, placement, self.sizes, self.world_size)

    def _allocate(self, kind: str, nbytes: Array) -> _Storage:
        self.storages.append(_Storage(kind, nbytes, self.end, self.end))
        return self.storages[-1]

    def _convert(self, need: Need, decomposition: str) -> _Storage:
        self.end += 1
        source = self.of[need.value]
        source.last = self.end
        if need.collective == "slice" and self._in_order(need.value, need.target):
            return source  # a range of its memory
        kind = "gathered" if need.collective == "all_gather" else "activations"
        copy = self._allocate(kind, self._bytes(need.value, need.target))
        self._allocate("temporary", staging_bytes(need.collective, decomposition, self._pieces(need)))
        return copy

    def _pieces(self, need: Need) -> Pieces:
        value, source, target = need.value, need.source, need.target
        same_dim = isinstance(source, Shard) and isinstance(target, Shard) and source.dim == target.dim
        cut = value in self.strides.scattered
        return Pieces(
            source=self._bytes(value, source),
            target=self._bytes(value, target),
            whole=self._bytes(value, REPLICATE),
            cut=cut or same_dim or (isinstance(target, Shard) and not self._in_order(value, target)),
            across=isinstance(source, Shard) and not self._in_order(value, source),
            ranks=self.ranks,
        )

    def _in_order(self, value: Value, placement: Placement) -> bool:
        """The ranks' pieces, one after another in memory, are the whole value (if that is contiguous)."""
        assert isinstance(placement, Shard)
        return placement.outer == 1 and math.prod(self.graph.meta(value).shape[: placement.dim]) == 1

    def _storage_read(self, node: Node, position: int, phase: Phase) -> _Storage:
        value, target = node.inputs[position], self.strategies[node.name].inputs[position]
        return self._held_as(value, target, phase)

    def _held_as(self, value: Value, target: Placement, phase: Phase) -> _Storage:
        """Where the value lies in a placement, converted now if it has not been."""
        if target == self.strategies[value.node].outputs[value.index]:
            return self.of[value]
        key = (value, target, phase) if (value, target, phase) in self.needs else (value, target, "forward")
        if key not in self.copies:
            self.copies[key] = self._convert(*self.needs[key])
        return self.copies[key]

    def _produce(self, node: Node, read: Sequence[_Storage]) -> None:
        shares = is_view(node) and not self._copies(node)
        for i, (meta, placement) in enumerate(zip(node.outputs, self.strategies[node.name].outputs, strict=True)):
            value = Value(node.name, i)
            if meta is None or placement is None:
                continue
            if i == 0 and (inner := _INNER.get(node.op.split(".")[-2] if "." in node.op else "", 0)):
                self._allocate("temporary", inner * self._bytes(value, placement))
            if shares:
                self.of[value] = read[0]
            else:
                kind = "parameters" if node.is_source else "activations"
                self.of[value] = self._allocate(kind, self._bytes(value, placement))

    def _copies(self, node: Node) -> bool:
        """A view that must copy; what was converted for it is contiguous."""
        value, wanted = node.inputs[0], self.strategies[node.name].inputs[0]
        return node.name in self.strides.copying and wanted == self.strategies[value.node].outputs[value.index]

    def _keep_results(self) -> None:
        """Sources and results outlive the step; a gradient is one from the moment it is final."""
        for storage in self.storages:
            if storage.kind == "parameters":
                storage.born, storage.last = 0, self.end
        gradients = frozenset(self.graph.gradients.values())
        for value, target in required_results(self.graph, self.strategies):
            phase = self.graph.by_name[value.node].phase
            storage = self._held_as(value, target, phase)
            storage.last = self.end
            if value in gradients and storage.kind != "parameters":
                storage.kind = "gradients"

    def held(self, optimizer: str) -> dict[str, Array]:
        """Kind -> bytes (moments, N)."""
        changes = {k: np.zeros((self.end + 2, self.world_size)) for k in KINDS}
        for s in self.storages:
            changes[s.kind][s.born] += s.nbytes
            changes[s.kind][s.last + 1] -= s.nbytes
        for node in self.graph.sources("parameter"):
            if node.target in self.graph.gradients:
                changes["optimizer"][0] += self.of[Value(node.name)].nbytes * optimizer_state_bytes(optimizer, 1)
        return {k: c.cumsum(axis=0)[: self.end + 1] for k, c in changes.items()}
