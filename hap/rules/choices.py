"""From a graph to everything a plan may choose: candidate placements, dimension groups, strategies of every node.

**Candidates.** A candidate is ``(value, dim, outer, n, unit)``: this value may be sharded so. Seeds are every dim of
parameters, buffers and inputs, the dims that views split off, and the batch and heads of attention. A row that fits a
candidate in one slot implies one candidate in each of its other sharded slots; the set is closed under that, forward
and backward, by a worklist in which every candidate is looked at once.

**Groups.** The candidates of one fitted row must be cut alike, so they are joined (union-find); so are the dims of the
inputs that hold the batch, and a parameter with its gradient. A group has one ``n`` and, in a plan, one vector of
sizes.

**Strategies.** For a node: all replicated, then its rows without a sharded dim, then each fitted row. A strategy that
needs a partial argument which no strategy of its producer gives is left out, as nothing is ever converted to partial.
A parameter may be stored whole or by any of its candidates, an input whole or by its batch, the tangent, buffers and
constants only whole.

Worked by hand: ``x (8, 4)``, ``w (4, 6)``, ``mm(x, w)``. Seeds: x dim 0 (batch, 8), x dim 1 and w dim 0 (4, joined by
the contraction), w dim 1 (6). mm has 4 strategies: replicated; rows of x; columns of w; the contraction, which gives P.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hap.garbage import uncollected
from hap.graph import Graph, Node, Value
from hap.placement import PARTIAL, REPLICATE, Placement, Shard
from hap.plan import Strategy
from hap.rules.notation import Atom, Dim, Row, base_atom, call_key, make_call, scale_atom
from hap.rules.table import DEFAULT_TABLE, RuleTable, call_rows
from hap.rules.view import is_split_off

_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_ATTENTION = ("hap.attention.default", "hap.attention_backward.default")


@dataclass(frozen=True)
class Group:
    """Dims that are cut alike: ``n`` atoms, and in words what they are."""

    name: str
    n: int
    label: str


@dataclass(frozen=True)
class Choices:
    """What a plan of ``graph`` may choose. For every node the first strategy is all-replicated."""

    graph: Graph
    groups: Mapping[str, Group]
    strategies: Mapping[str, tuple[Strategy, ...]]


class Candidate(NamedTuple):
    """``value`` may be sharded along ``dim`` as ``atom``."""

    value: Value
    dim: int
    atom: Atom


@uncollected()
def choices(graph: Graph, table: RuleTable = DEFAULT_TABLE) -> Choices:
    """Close the candidates of ``graph`` under the rules. MissingRuleError if an operator has no rule."""
    closure = _Closure(graph, table)
    for candidate, label, priority in _seeds(graph):
        closure.add(candidate)
        closure.name(candidate, label, priority)
    closure.tie_batch()
    closure.run()
    return closure.finish()


def batch_size(graph: Graph) -> int | None:
    """The global batch, of the shapes of all inputs. None if no input has dims."""
    return batch_of(n.meta.shape for n in graph.sources("input"))


def batch_of(shapes: Iterable[Sequence[int]]) -> int | None:
    """The size of dim 0 of the first that has one; or one that more of them have, with more elements, as the weights of
    classes may come first."""
    found: dict[int, tuple[int, int]] = {}  # size -> how many have it, and their elements
    for shape in filter(len, shapes):
        tensors, elements = found.get(shape[0], (0, 0))
        found[shape[0]] = tensors + 1, elements + math.prod(shape)
    first = next(iter(found), None)
    if first is None:
        return None
    more = [size for size, of in found.items() if all(a > b for a, b in zip(of, found[first], strict=True))]
    return max(more, key=found.__getitem__, default=first)


def _seeds(graph: Graph) -> Iterator[tuple[Candidate, str, int]]:
    """(candidate, what it is in words, how good a name that is: lower wins)."""
    batch = batch_size(graph)
    for node in graph.nodes:
        if node.op in ("parameter", "buffer", "input"):
            for dim, size in enumerate(node.meta.shape):
                is_batch = node.op == "input" and dim == 0 and size == batch
                label = "batch" if is_batch else f"{node.target} dim {dim}"
                yield from _seed(node, dim, size, label, 0 if is_batch else 2 if node.op == "parameter" else 3)
        elif node.op in _VIEWS:
            source = graph.meta(node.inputs[0]).shape
            for dim, size in enumerate(node.meta.shape):
                if is_split_off(source, node.meta.shape, dim):
                    yield from _seed(node, dim, size, f"split of {node.module or node.name}", 4)
        elif node.op in _ATTENTION:
            for dim, label in enumerate(("batch", "heads")):
                yield from _seed(node, dim, node.meta.shape[dim], f"{label} of {node.module}".strip(), 1)


def _seed(node: Node, dim: int, size: int, label: str, priority: int) -> Iterator[tuple[Candidate, str, int]]:
    if size > 1:
        yield Candidate(Value(node.name), dim, Atom(1, size, 1)), label, priority


@dataclass
class _Closure:
    """The worklist. ``fits[node]`` holds, by row number and base atom, the candidates of each slot of a fitted row."""

    graph: Graph
    table: RuleTable
    rows: dict[str, tuple[Row, ...]] = field(default_factory=dict)
    by_slot: dict[str, dict[tuple[int, int], list[int]]] = field(default_factory=dict)
    twins: dict[Value, list[Value]] = field(default_factory=dict)
    found: dict[Candidate, int] = field(default_factory=dict)
    parent: list[int] = field(default_factory=list)
    pending: list[Candidate] = field(default_factory=list)
    fits: dict[str, dict[tuple[int, Atom], tuple[Candidate | None, ...]]] = field(default_factory=dict)
    names: dict[Candidate, tuple[int, int, str]] = field(default_factory=dict)
    candidates_of: dict[Value, list[Candidate]] = field(default_factory=dict)  # of parameters
    values: dict[str, tuple[tuple[Value, tuple[int, ...]], ...]] = field(default_factory=dict)  # of slots; their shapes

    def __post_init__(self) -> None:
        shared: dict[object, tuple[tuple[Row, ...], dict[tuple[int, int], list[int]]]] = {}
        for node in self.graph.nodes:
            if node.is_source:
                continue
            call = make_call(node, self.graph)
            key = call_key(call)
            if key not in shared:
                node_rows = call_rows(call, self.table)
                shared[key] = node_rows, _index_slots(node_rows)
            self.rows[node.name], self.by_slot[node.name] = shared[key]
            self.fits[node.name] = {}
        homes = {n.target: Value(n.name) for n in self.graph.sources("parameter")}
        for target, gradient in self.graph.gradients.items():
            self.twins.setdefault(homes[target], []).append(gradient)
            self.twins.setdefault(gradient, []).append(homes[target])

    def add(self, candidate: Candidate) -> int:
        number = self.found.get(candidate)
        if number is None:
            number = self.found[candidate] = len(self.parent)
            self.parent.append(number)
            self.pending.append(candidate)
        return number

    def name(self, candidate: Candidate, label: str, priority: int) -> None:
        self.names[candidate] = (priority, len(self.names), label)

    def root(self, number: int) -> int:
        while self.parent[number] != number:
            self.parent[number] = self.parent[self.parent[number]]
            number = self.parent[number]
        return number

    def tie(self, a: Candidate, b: Candidate) -> None:
        assert a.atom.n == b.atom.n, f"{a} and {b} cannot be cut alike"
        first, second = self.root(self.add(a)), self.root(self.add(b))
        if first != second:
            self.parent[max(first, second)] = min(first, second)

    def tie_batch(self) -> None:
        """Inputs whose dim 0 is the batch are cut alike."""
        batch = batch_size(self.graph)
        if batch is None or batch < 2:
            return
        inputs = [n for n in self.graph.sources("input") if n.meta.shape[:1] == (batch,)]
        for node in inputs[1:]:
            self.tie(*(Candidate(Value(n.name), 0, Atom(1, batch, 1)) for n in (inputs[0], node)))

    def run(self) -> None:
        while self.pending:
            candidate = self.pending.pop()
            for twin in self.twins.get(candidate.value, ()):
                self.tie(candidate, candidate._replace(value=twin))
            producer = self.graph.by_name[candidate.value.node]
            if not producer.is_source:
                self.fit(producer, len(producer.inputs) + candidate.value.index, candidate)
            for user, position in self.graph.users.get(candidate.value, ()):
                self.fit(user, position, candidate)

    def fit(self, node: Node, position: int, candidate: Candidate) -> None:
        """Find the rows of ``node`` that have ``candidate`` in slot ``position`` and add what they imply."""
        rows, fits = self.rows[node.name], self.fits[node.name]
        for number in self.by_slot[node.name].get((position, candidate.dim), ()):
            slot = rows[number].slots[position]
            assert isinstance(slot, Dim)
            base = base_atom(slot, candidate.atom)
            if base is None or (number, base) in fits:
                continue
            placed = self.place(node, rows[number], base)
            if placed is None:
                continue
            fits[number, base] = placed
            for other in placed:
                if other is not None:
                    self.tie(candidate, other)

    def place(self, node: Node, row: Row, base: Atom) -> tuple[Candidate | None, ...] | None:
        """The candidate in each slot, None where it is not sharded; None if the row does not fit the atom."""
        placed: list[Candidate | None] = []
        if node.name not in self.values:
            self.values[node.name] = tuple(self._slotted(node))
        for (value, shape), slot in zip(self.values[node.name], row.slots, strict=True):
            if not isinstance(slot, Dim):
                placed.append(None)
                continue
            atom = scale_atom(slot, base, shape[slot.dim])
            if atom is None:
                return None
            placed.append(Candidate(value, slot.dim, atom))
        return tuple(placed)

    def _slotted(self, node: Node) -> Iterator[tuple[Value, tuple[int, ...]]]:
        """The value of each slot, and its shape, () where it is no tensor."""
        for value in (*node.inputs, *(Value(node.name, i) for i in range(len(node.outputs)))):
            meta = self.graph.by_name[value.node].outputs[value.index]
            yield value, () if meta is None else tuple(meta.shape)

    def finish(self) -> Choices:
        for candidate in sorted(self.found):
            if self.graph.by_name[candidate.value.node].op == "parameter":
                self.candidates_of.setdefault(candidate.value, []).append(candidate)
        namer = _Namer(self)
        strategies = {node.name: _strategies(node, self, namer) for node in self.graph.nodes}
        return Choices(self.graph, namer.groups(), _without_idle_partials(self.graph, strategies))


@dataclass
class _Namer:
    """Names groups g0, g1, ... in the order in which strategies first mention them."""

    closure: _Closure
    numbers: dict[int, str] = field(default_factory=dict)  # root -> name
    lengths: dict[str, int] = field(default_factory=dict)
    shards: dict[Candidate, Shard] = field(default_factory=dict)

    def shard(self, candidate: Candidate) -> Shard:
        found = self.shards.get(candidate)
        if found is None:
            root = self.closure.root(self.closure.found[candidate])
            name = self.numbers.setdefault(root, f"g{len(self.numbers)}")
            self.lengths[name] = candidate.atom.n
            found = self.shards[candidate] = Shard(candidate.dim, *candidate.atom, name)
        return found

    def groups(self) -> dict[str, Group]:
        best: dict[int, tuple[int, int, str]] = {}
        for candidate, rank in self.closure.names.items():
            root = self.closure.root(self.closure.found[candidate])
            best[root] = min(rank, best.get(root, rank))
        return {name: Group(name, self.lengths[name], best[root][2]) for root, name in self.numbers.items()}


def _index_slots(rows: tuple[Row, ...]) -> dict[tuple[int, int], list[int]]:
    """(slot position, dim) -> the numbers of the rows that shard that dim there."""
    index: dict[tuple[int, int], list[int]] = {}
    for number, row in enumerate(rows):
        for position, slot in enumerate(row.slots):
            if isinstance(slot, Dim):
                index.setdefault((position, slot.dim), []).append(number)
    return index


def replicated(node: Node) -> Strategy:
    """The strategy every node has."""
    return Strategy((REPLICATE,) * len(node.inputs), tuple(None if o is None else REPLICATE for o in node.outputs))


def _strategies(node: Node, closure: _Closure, namer: _Namer) -> tuple[Strategy, ...]:
    if node.is_source:
        return (replicated(node), *(Strategy((), (shard,)) for shard in _storable(node, closure, namer)))
    found = [replicated(node)]
    rows = closure.rows[node.name]
    for row in rows:
        if not any(isinstance(slot, Dim) for slot in row.slots):
            found.append(_strategy(row, (None,) * len(row.slots), namer))
    for (number, _), placed in sorted(closure.fits[node.name].items(), key=lambda item: item[0]):
        found.append(_strategy(rows[number], placed, namer))
    return tuple(dict.fromkeys(found))


def _storable(node: Node, closure: _Closure, namer: _Namer) -> Iterator[Shard]:
    """How a source may lie: a parameter by any of its candidates, an input by its batch."""
    value = Value(node.name)
    if node.op == "parameter":
        for candidate in closure.candidates_of.get(value, ()):
            yield namer.shard(candidate)
    elif node.op == "input" and node.meta.shape[:1] == (batch_size(closure.graph),) and node.meta.shape[0] > 1:
        yield namer.shard(Candidate(value, 0, Atom(1, node.meta.shape[0], 1)))


def _strategy(row: Row, placed: tuple[Candidate | None, ...], namer: _Namer) -> Strategy:
    placements: list[Placement | None] = []
    for slot, candidate in zip(row.slots, placed, strict=True):
        if candidate is not None:
            placements.append(namer.shard(candidate))
        else:
            placements.append(None if slot is None else PARTIAL if slot == "P" else REPLICATE)
    count = len(row.inputs)
    inputs = tuple(p for p in placements[:count] if p is not None)
    assert len(inputs) == count, "every tensor argument has a placement"
    return Strategy(inputs, tuple(placements[count:]))


def _without_idle_partials(
    graph: Graph, strategies: Mapping[str, tuple[Strategy, ...]]
) -> dict[str, tuple[Strategy, ...]]:
    """Without the strategies that need a partial argument which nothing produces; in graph order, so once is enough."""
    kept: dict[str, tuple[Strategy, ...]] = {}
    producible: dict[Value, bool] = {}
    for node in graph.nodes:
        kept[node.name] = tuple(
            s
            for s in strategies[node.name]
            if PARTIAL not in s.inputs
            or all(p != PARTIAL or producible[v] for v, p in zip(node.inputs, s.inputs, strict=True))
        )
        for index in range(len(node.outputs)):
            producible[Value(node.name, index)] = any(s.outputs[index] is PARTIAL for s in kept[node.name])
    return kept
