"""Bytes that every rank holds, followed through the step in program order.

Kinds: ``parameters`` (with buffers, constants and inputs; there from the first node to the last), ``optimizer`` (its
state, always there), ``gradients`` (each from the moment it exists to the end), ``activations`` (any other value, from
its node to its last reader; what the backward pass reads is saved simply by being read late), ``gathered`` (whole
copies of sharded values), ``temporary`` (what a collective packs and unpacks, while it runs). A view holds its base and
no bytes of its own. The kinds are reported at the moment at which the rank's total is largest: they sum to the peak.

A conversion happens just before its first reader, that of a result as soon as the value exists; its copy lives to the
last reader that shares it, and the source goes when nobody else reads it. Python and the allocator add fragmentation,
the CUDA context and library workspaces: ``RESERVE_FRACTION`` of every device is left for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hap.conversion import Need, required_results
from hap.cost_models.work import is_view
from hap.fabric import Array
from hap.graph import Graph, Node, Phase, Value
from hap.placement import REPLICATE, GroupSizes, Placement, Shard
from hap.plan import Strategy

KINDS = ("parameters", "optimizer", "gradients", "activations", "gathered", "temporary")
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
) -> MemoryUse:
    """Peak memory of every rank, by kind. ``needs`` are those of ``find_needs`` for the same strategies."""
    ledger = _Ledger(graph, strategies, sizes, world_size)
    ledger.walk(needs)
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
    """Allocations met on a walk through the program. Moment t is the call of node t with the conversions before it."""

    def __init__(self, graph: Graph, strategies: Mapping[str, Strategy], sizes: GroupSizes, world_size: int) -> None:
        self.graph, self.strategies, self.sizes, self.world_size = graph, strategies, sizes, world_size
        self.storages: list[_Storage] = []
        self.of: dict[Value, _Storage] = {}
        self.copies: dict[tuple[Value, Placement, Phase], _Storage] = {}
        self.end = len(graph.nodes) - 1

    def walk(self, needs: Sequence[Need]) -> None:
        before: dict[str, list[Need]] = {}
        for need in needs:
            before.setdefault(need.before or f"after {need.value.node}", []).append(need)
        for t, node in enumerate(self.graph.nodes):
            for need in before.get(node.name, ()):
                self._convert(need, t)
            read = [self._storage_read(node, i) for i in range(len(node.inputs))]
            for storage in read:
                storage.last = max(storage.last, t)
            self._produce(node, read, t)
            for need in before.get(f"after {node.name}", ()):
                self._convert(need, t)
        self._keep_results()

    def _bytes(self, value: Value, placement: Placement) -> Array:
        return local_bytes(self.graph.meta(value).nbytes, placement, self.sizes, self.world_size)

    def _allocate(self, kind: str, nbytes: Array, t: int) -> _Storage:
        self.storages.append(_Storage(kind, nbytes, t, t))
        return self.storages[-1]

    def _convert(self, need: Need, t: int) -> None:
        source = self.of[need.value]
        source.last = max(source.last, t)
        kind = "gathered" if need.collective == "all_gather" else "activations"
        self.copies[need.value, need.target, need.phase] = self._allocate(kind, self._bytes(need.value, need.target), t)
        self._allocate("temporary", self._staging(need), t)

    def _staging(self, need: Need) -> Array:
        """The flat buffer that a collective receives into, and the one it packs what it sends into."""
        match need.collective:
            case "all_gather":
                return self._bytes(need.value, REPLICATE)
            case "reduce_scatter":
                return self._bytes(need.value, REPLICATE) + self.world_size * self._bytes(need.value, need.target)
            case "all_to_all":
                return self._bytes(need.value, need.source) + self._bytes(need.value, need.target)
        return np.zeros(self.world_size)

    def _storage_read(self, node: Node, position: int) -> _Storage:
        value, target = node.inputs[position], self.strategies[node.name].inputs[position]
        if target == self.strategies[value.node].outputs[value.index]:
            return self.of[value]
        own = self.copies.get((value, target, node.phase))
        return own or self.copies[value, target, "forward"]

    def _produce(self, node: Node, read: Sequence[_Storage], t: int) -> None:
        for i, (meta, placement) in enumerate(zip(node.outputs, self.strategies[node.name].outputs, strict=True)):
            value = Value(node.name, i)
            if meta is None or placement is None:
                continue
            if is_view(node):
                self.of[value] = read[0]
            else:
                kind = "parameters" if node.is_source else "activations"
                self.of[value] = self._allocate(kind, self._bytes(value, placement), t)

    def _keep_results(self) -> None:
        """Sources and results outlive the step; a gradient is one from the moment it is final."""
        for storage in self.storages:
            if storage.kind == "parameters":
                storage.born, storage.last = 0, self.end
        gradients = frozenset(self.graph.gradients.values())
        for value, target in required_results(self.graph, self.strategies):
            storage = self._final(value, target)
            storage.last = self.end
            if value in gradients and storage.kind != "parameters":
                storage.kind = "gradients"

    def _final(self, value: Value, target: Placement) -> _Storage:
        if target == self.strategies[value.node].outputs[value.index]:
            return self.of[value]
        own = self.copies.get((value, target, self.graph.by_name[value.node].phase))
        return own or self.copies[value, target, "forward"]

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
