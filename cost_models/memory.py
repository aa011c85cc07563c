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
source goes when nobody else reads it. Where a step of the optimizer has several batches, gradients are there
throughout, and so is what is local of those that ranks exchange once (``hap.deferral``). What is summed over hosts
beside the backward pass stays to its end. The last moment is the optimizer's update, with the tensors that it makes of
all parameters at once (``update_bytes``). Operators that are several kernels hold intermediate tensors while they run
(``steps``), attention by formulas on those devices that have no kernel for it. Python and the allocator add
fragmentation, the CUDA context and library workspaces: ``RESERVE_FRACTION`` of every device is left for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hap.conversion import Need, collective_kind, required_results
from hap.cost_models.optimizers import optimizer_state_bytes, update_bytes
from hap.cost_models.pieces import many_local_bytes
from hap.cost_models.staging import UNASKED, Staging, staged_bytes
from hap.cost_models.steps import ALL, Generation, Step, find_steps, generations
from hap.cost_models.strides import Strides, find_strides
from hap.deferral import ONE, Batches
from hap.fabric import Array
from hap.graph import Graph, Node, Phase, Value
from hap.hosts import Device
from hap.hosts_sum import HOSTS_SUM, SUM_LANES, bundle_bytes
from hap.order import NONE, Postponed
from hap.placement import REPLICATE, GroupSizes, Placement, Shard
from hap.plan import Strategy

KINDS = ("parameters", "optimizer", "gradients", "activations", "gathered", "temporary")
RESERVE_FRACTION = 0.1  # of a device's memory, assumed


@dataclass(frozen=True)
class MemoryUse:
    """``by_kind[rank][kind]`` bytes at that rank's peak; ``peak_bytes[rank]`` their sum."""

    by_kind: tuple[dict[str, int], ...]

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(sum(kinds.values()) for kinds in self.by_kind)


def usable_bytes(memory_bytes: int) -> int:
    """What a plan may use of a device's memory."""
    return int(memory_bytes * (1 - RESERVE_FRACTION))


def memory_use(
    graph: Graph,
    strategies: Mapping[str, Strategy],
    sizes: GroupSizes,
    needs: Sequence[Need],
    world_size: int,
    optimizer: str,
    *,
    ranks: int | None = None,
    decompositions: Sequence[str] | None = None,
    again: Mapping[str, Sequence[Node]] = MappingProxyType({}),
    batches: Batches = ONE,
    postponed: Postponed = NONE,
    backend: str = "gloo",
    devices: Sequence[Device] = (),
) -> MemoryUse:
    """Peak memory of every rank, by kind. ``needs`` are those of ``find_needs`` for the same strategies, performed by
    ``decompositions`` (None: by what a communicator does unasked). Of a folded cluster ``world_size`` is the number of
    classes and ``ranks`` that of ranks. ``again``: the calls that are repeated before a call (``order.repeats``).
    ``batches``: of a step of the optimizer. ``postponed``: see ``order``. ``backend`` and ``devices`` (one
    for each rank or class, if known): on which the optimizer's temporary tensors and those of ``steps`` depend."""
    strides = find_strides(graph)
    steps = find_steps(graph, strides, postponed)
    walk = Walk(graph, strategies, needs, steps=steps, strides=strides, again=again, batches=batches)
    return walk.use(
        sizes,
        world_size,
        optimizer,
        ranks=ranks,
        decompositions=decompositions,
        backend=backend,
        devices=devices,
    )


@dataclass(slots=True)
class _Storage:
    """One allocation: there from moment ``born`` to moment ``last``; of bytes ``times`` those of row ``piece``."""

    kind: str
    piece: int
    times: int
    born: int
    last: int


class Walk:
    """Allocations met on a walk through the program, whatever the sizes and the ways of the conversions ``needs``.
    Every call and every conversion is a moment of its own. The other arguments: see ``memory_use``."""

    def __init__(
        self,
        graph: Graph,
        strategies: Mapping[str, Strategy],
        needs: Sequence[Need],
        *,
        steps: Mapping[str, Step] | None = None,
        strides: Strides | None = None,
        again: Mapping[str, Sequence[Node]] = MappingProxyType({}),
        batches: Batches = ONE,
    ) -> None:
        """``steps`` and ``strides`` are the graph's, if known. ``batches``: of a step of the optimizer."""
        self.graph, self.strategies, self.needs = graph, strategies, needs
        self.strides = find_strides(graph) if strides is None else strides
        self.steps = find_steps(graph, self.strides) if steps is None else steps
        self.again, self.batches = again, batches
        self.exchanged: set[Value] = set()  # gradients, or what those are made of, that are made once a step
        self.local: dict[tuple[Value, Placement], _Storage] = {}  # what earlier batches left for exchanges
        self.number = {(n.value, n.target, n.phase): i for i, n in enumerate(needs)}
        self.pieces: dict[tuple[int, Placement, frozenset[Generation]], int] = {}  # of the whole, how, on what -> row
        self._rows: dict[tuple[int, int, frozenset[Generation]], int] = {}  # the same by the placement's id
        self.storages: list[_Storage] = []
        self.stagings: list[tuple[int, int, int]] = []  # moment, number of the conversion, of what it packs
        self.packed: dict[Staging, int] = {}
        self.of: dict[Value, _Storage] = {}
        self.made: dict[Value, Placement] = {}
        self.copies: dict[tuple[Value, Placement, Phase], _Storage] = {}
        self.moments: dict[str, int] = {}  # of the calls
        self.summed: dict[str, _Storage] = {}  # what sums over hosts read
        self.placed: dict[Value, Placement] = {}  # results, as they are handed out
        self.end = -1  # the latest moment
        self._walk()

    def _walk(self) -> None:
        results: dict[str, list[tuple[Value, Placement]]] = {}
        for value, target in required_results(self.graph, self.strategies):
            results.setdefault(value.node, []).append((value, target))
        for name, step in self.steps.items():
            if name in self.again:
                for repeated in self.again[name]:
                    self._call(self.steps[repeated.name], "backward")
            self._call(step, step.node.phase)
            self.moments[name] = self.end
            if name in results:
                for value, target in results[name]:
                    self._held_as(value, target, step.node.phase)
        self._keep_results()

    def _call(self, step: Step, phase: Phase) -> None:
        node, strategy, made, of = step.node, self.strategies[step.node.name], self.made, self.of
        read = [
            of[value] if target is made[value] or target == made[value] else self._held_as(value, target, phase)
            for value, target in zip(node.inputs, strategy.inputs, strict=True)
        ]
        self.end += 1
        for storage in read:
            storage.last = self.end
        if node.op == HOSTS_SUM:
            self.summed[node.name] = read[0]
        shares = step.is_view and not (step.is_copying and strategy.inputs[0] == made[node.inputs[0]])
        kind = "parameters" if node.is_source else "activations"
        is_late = bool(self.batches.once) and any(
            value in self.exchanged or self._is_exchanged(value, target)
            for value, target in zip(node.inputs, strategy.inputs, strict=True)
        )
        if node.op == HOSTS_SUM and not is_late and node.inputs[0] in self.batches.once:
            assert strategy.inputs[0] is not None
            self._leave(node.inputs[0], strategy.inputs[0])
            is_late = True
        for i, value, nbytes in step.makes:
            placement = strategy.outputs[i]
            if placement is None:
                continue
            made[value] = placement
            if is_late and value in self.batches.once:
                self.exchanged.add(value)
            of[value] = read[0] if shares else self._allocate(kind, nbytes, placement)
        for nbytes, slot, on in step.inner:
            dealt = REPLICATE if slot is None else (*strategy.inputs, *strategy.outputs)[slot]
            assert dealt is not None
            self._allocate("temporary", nbytes, dealt, on=on)

    def _allocate(
        self, kind: str, nbytes: int, placement: Placement, times: int = 1, on: frozenset[Generation] = ALL
    ) -> _Storage:
        key = (nbytes, id(placement), on)  # to hash a placement takes longer; they are kept by the strategies and needs
        if (piece := self._rows.get(key)) is None:
            piece = self._rows[key] = self.pieces.setdefault((nbytes, placement, on), len(self.pieces))
        storage = _Storage(kind, piece, times, self.end, self.end)
        self.storages.append(storage)
        return storage

    def _convert(self, number: int) -> _Storage:
        need = self.needs[number]
        self.end += 1
        source = self.of[need.value]
        source.last = self.end
        is_flat = need.value not in self.strides.scattered
        if need.collective == "slice" and is_flat and self._in_order(need.value, need.target):
            return source  # a range of its memory
        nbytes = self.graph.meta(need.value).nbytes
        if self._is_exchanged(need.value, need.target) and need.value not in self.exchanged:
            self._leave(need.value, need.source)
        packed = self.packed.setdefault(self._staging(need, nbytes), len(self.packed))
        self.stagings.append((self.end, number, packed))
        return self._allocate("gathered" if need.collective == "all_gather" else "activations", nbytes, need.target)

    def _leave(self, value: Value, placement: Placement) -> None:
        """There is what earlier batches left of a value for an exchange."""
        if (value, placement) not in self.local:
            left = self.batches.left_bytes(value, self.graph.meta(value))
            self.local[value, placement] = self._allocate("gradients", left, placement)

    def _staging(self, need: Need, nbytes: int) -> Staging:
        value, source, target = need.value, need.source, need.target
        same_dim = isinstance(source, Shard) and isinstance(target, Shard) and source.dim == target.dim
        cut = same_dim or (need.collective == "all_gather" and value in self.strides.scattered)
        across = same_dim or (isinstance(source, Shard) and not self._in_order(value, source))
        return Staging(need.collective, nbytes, source, target, cut, across)

    def _in_order(self, value: Value, placement: Placement) -> bool:
        """The ranks' pieces, one after another in memory, are the whole value (if that is contiguous)."""
        assert isinstance(placement, Shard)
        return placement.outer == 1 and math.prod(self.graph.meta(value).shape[: placement.dim]) == 1

    def _held_as(self, value: Value, target: Placement, phase: Phase) -> _Storage:
        """Where the value lies in a placement, converted now if it has not been."""
        made = self.made[value]
        if target is made or target == made:
            return self.of[value]
        key = (value, target, phase) if (value, target, phase) in self.number else (value, target, "forward")
        if key not in self.copies:
            self.copies[key] = self._convert(self.number[key])
        return self.copies[key]

    def _keep_results(self) -> None:
        """Sources and results outlive the step, to the optimizer's update; a gradient is one from when it is final."""
        self.end += 1
        for storage in self.storages:
            if storage.kind == "parameters":
                storage.born, storage.last = 0, self.end
        gradients = frozenset(self.graph.gradients.values())
        for value, target in required_results(self.graph, self.strategies):
            phase = self.graph.by_name[value.node].phase
            self.placed[value] = target
            storage = self._held_as(value, target, phase)
            storage.last = self.end
            if value in gradients and storage.kind != "parameters":
                storage.kind = "gradients"
                if self.batches.count > 1:
                    self._keep_earlier(value, target, storage)
        self._keep_summed()

    def _keep_earlier(self, value: Value, target: Placement, storage: _Storage) -> None:
        """What earlier batches left of a gradient is there throughout: the gradient, to which another is added unless
        it is made once, and what is local of it until then; neither of these in the update."""
        born, storage.born = storage.born, 0
        if value not in self.exchanged and not self._is_exchanged(value, target):
            added = self._allocate("gradients", self.graph.meta(value).nbytes, target)
            added.born, added.last = born, self.end - 1
        for local in self.local.values():
            local.born, local.last = 0, self.end - 1

    def _is_exchanged(self, value: Value, target: Placement) -> bool:
        """Whether ranks exchange what they have of it once a step."""
        if value not in self.batches.once or target == self.made[value]:
            return False
        return collective_kind(self.made[value], target) != "slice"

    def _keep_summed(self) -> None:
        """What is summed over hosts beside the backward pass may be there until the update, if the network is slow, and
        so may be what two bundles of it send and receive."""
        gradients = frozenset(self.graph.gradients.values())
        late = [n for n in self.summed if (v := Value(n)) in gradients and v not in self.graph.users]
        late = [n for n in late if self.strategies[n].outputs[0] == self.placed[Value(n)]]
        for name in late:
            self.summed[name].last = self.end - 1
        if late:
            whole = sum(self.graph.meta(Value(name)).nbytes for name in late)
            sent = self._allocate("temporary", min(whole, SUM_LANES * bundle_bytes(whole)), REPLICATE, 2)
            sent.born, sent.last = min(self.moments[name] for name in late), self.end - 1

    @cached_property
    def _table(self) -> tuple[NDArray[np.intp], Array, NDArray[np.intp], NDArray[np.intp]]:
        """Of every storage: row of its piece, how many times, and where it comes and goes among all kinds' moments."""
        kinds = np.array([KINDS.index(s.kind) for s in self.storages]) * (self.end + 2)
        pieces, times, born, last = np.array([(s.piece, s.times, s.born, s.last) for s in self.storages]).T
        return pieces, times.astype(np.float64), kinds + born, kinds + last + 1

    def held(
        self,
        sizes: GroupSizes,
        world_size: int,
        optimizer: str,
        *,
        ranks: int | None = None,
        decompositions: Sequence[str] | None = None,
        backend: str = "gloo",
        devices: Sequence[Device] = (),
    ) -> dict[str, Array]:
        """Kind -> bytes (moments, N). See ``memory_use``."""
        moments = self.end + 2
        own = many_local_bytes(((nbytes, placement) for nbytes, placement, _ in self.pieces), sizes, world_size)
        if self._partly:
            found = generations(devices, backend, world_size)
            for piece, on in self._partly:
                own[piece] *= [generation in on for generation in found]
        pieces, times, born, gone = self._table
        alike: dict[bytes, int] = {}  # what a rank holds of every piece -> its row
        of = [alike.setdefault(column.tobytes(), len(alike)) for column in np.ascontiguousarray(own.T)]
        changes = np.zeros((len(alike), len(KINDS) * moments))
        for row, column in zip(changes, alike, strict=True):
            amounts = np.frombuffer(column)[pieces] * times
            row += np.bincount(born, amounts, len(row)) - np.bincount(gone, amounts, len(row))
        of_ranks = changes[of].reshape(world_size, len(KINDS), moments)
        if self.stagings:
            at, packed = self._staged(sizes, world_size, world_size if ranks is None else ranks, decompositions)
            temporary = of_ranks[:, KINDS.index("temporary")]
            temporary[:, at + 1] -= packed.T  # every conversion is a moment of its own
            temporary[:, at] += packed.T
        if self._trained:
            trained = own[self._trained].sum(axis=0)
            of_ranks[:, KINDS.index("optimizer"), 0] += trained * optimizer_state_bytes(optimizer, 1)
            of_ranks[:, KINDS.index("temporary"), self.end] += trained * update_bytes(optimizer, backend, 1)
        there = of_ranks.cumsum(axis=2)[:, :, : self.end + 1]
        return dict(zip(KINDS, there.transpose(1, 2, 0), strict=True))

    @cached_property
    def _partly(self) -> list[tuple[int, frozenset[Generation]]]:
        """Rows of the pieces that only some devices hold, and which."""
        return [(row, on) for (_, _, on), row in self.pieces.items() if on is not ALL]

    @cached_property
    def _trained(self) -> list[int]:
        """Rows of the pieces of all parameters that are trained."""
        graph = self.graph
        return [self.of[Value(n.name)].piece for n in graph.sources("parameter") if n.target in graph.gradients]

    def _staged(
        self, sizes: GroupSizes, world_size: int, ranks: int, decompositions: Sequence[str] | None
    ) -> tuple[NDArray[np.intp], Array]:
        """Moments (S,) and bytes (S, N) of what is packed and unpacked."""
        ways = [UNASKED[n.collective] for n in self.needs] if decompositions is None else decompositions
        distinct, rows, known = list(self.packed), list[Array](), dict[tuple[int, str], int]()
        order = []
        for _, number, packed in self.stagings:
            key = (packed, ways[number])
            if key not in known:
                known[key] = len(rows)
                rows.append(staged_bytes(distinct[packed], key[1], sizes, world_size, ranks))
            order.append(known[key])
        return np.array([moment for moment, _, _ in self.stagings]), np.array(rows)[order]

    def use(
        self,
        sizes: GroupSizes,
        world_size: int,
        optimizer: str,
        *,
        ranks: int | None = None,
        decompositions: Sequence[str] | None = None,
        backend: str = "gloo",
        devices: Sequence[Device] = (),
    ) -> MemoryUse:
        """See ``memory_use``."""
        held = self.held(
            sizes,
            world_size,
            optimizer,
            ranks=ranks,
            decompositions=decompositions,
            backend=backend,
            devices=devices,
        )
        peak = sum(held.values()).argmax(axis=0)  # type: ignore[union-attr]
        return MemoryUse(tuple({k: int(held[k][peak[r], r]) for k in KINDS} for r in range(world_size)))
