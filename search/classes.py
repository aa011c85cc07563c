"""Which nodes are the same: structural de-duplication by colour refinement, so that identical layers are solved once.

A node's first colour is its operator, literals, output shapes, phase, role as a result, and its strategies with
their groups renamed in order of appearance; nodes of one colour therefore have strategies that correspond *by index*.
Each of ``RADIUS`` rounds then refines a colour by the colours of what the node reads and of what reads it
(Weisfeiler-Lehman). Nodes of one final colour form a ``NodeClass`` and get one common
decision: the index of a strategy. Layers need not be matched, and the first and last ones stay free. So do steps in
time that were unrolled: which of many pieces one of them reads or makes is a serial number, if the pieces are alike.

A tied decision is never an approximation of the cost: the values of a class fall into ``ValueClass`` es, values whose
producer and consumers have the same pattern of equal and different placements, and a cost of a class is the sum over
its members of what each really costs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hap.graph import Graph, Node, Phase, Value, map_values
from hap.hosts_sum import HOSTS_SUM, SITE
from hap.placement import REPLICATE, Placement, Shard
from hap.plan import Strategy

K = TypeVar("K")
RADIUS = 4
# (operator, argument): a serial number, or where something begins or ends, which costs nothing
NUMBERED = frozenset(
    {("hap.dropout.default", 3), ("hap.rand.default", 2), ("hap.randn.default", 2), ("hap.randint.default", 4)}
    | {("hap.bernoulli.default", 3)}
    | {(HOSTS_SUM, SITE), ("aten.select.int", 2)}
    | {("aten.slice.Tensor", argument) for argument in (2, 3)}
)
JOINING = frozenset({"aten.cat.default", "aten.stack.default"})  # whose inputs are alike but for their order
MANY = 8  # pieces; of fewer each may play a part of its own
HOME = -1  # position of a need that is the placement of a parameter's or buffer's own output
Candidates = Mapping[str, Sequence[Strategy]]  # node -> its strategies, after pins


@dataclass(frozen=True)
class NodeClass:
    """Nodes that take the same decision. ``options`` is the number of strategies of each of them."""

    members: tuple[str, ...]
    options: int


@dataclass(frozen=True)
class Slot:
    """One reader of a value: class ``reader`` at tensor argument ``position`` (``HOME``: it must end where that source
    lives). ``reader`` is None for the loss, which must end replicated."""

    reader: int | None
    position: int
    phase: Phase


@dataclass(frozen=True)
class ValueClass:
    """Values produced alike and read alike.

    ``members[m]`` is a value; ``produced[m][i]`` its placement under option i of class ``producer``;
    ``needed[m][k][j]`` the placement that slot k wants under option j of its reader. Which of these placements are
    equal does not depend on m.
    """

    producer: int
    slots: tuple[Slot, ...]
    members: tuple[Value, ...]
    produced: tuple[tuple[Placement, ...], ...]
    needed: tuple[tuple[tuple[Placement, ...], ...], ...]


@dataclass(frozen=True)
class Classes:
    """The partition of a graph: ``of[node]`` is an index into ``nodes``. Each entry of ``together`` is about one group:
    the classes of inputs that can be sharded in it, with the options that do so; all of them or none will be."""

    nodes: tuple[NodeClass, ...]
    of: Mapping[str, int]
    values: tuple[ValueClass, ...]
    together: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]

    def expand(self, picks: Sequence[int], candidates: Candidates) -> dict[str, Strategy]:
        """One strategy per node from one option index per class."""
        return {name: candidates[name][picks[c]] for name, c in self.of.items()}


def find_classes(
    graph: Graph,
    candidates: Candidates,
    *,
    radius: int = RADIUS,
    colours: Sequence[Mapping[str, int]] | None = None,
    reads: Reads | None = None,
) -> Classes:
    """The node and value classes of a graph under its candidates. Deterministic: first appearance orders all.
    ``colours`` and ``reads``: those of ``find_colours`` and ``find_reads``, if known."""
    reads = find_reads(graph, candidates) if reads is None else reads
    of = (colours or find_colours(graph, candidates, radius=radius, reads=reads))[-1]
    members: dict[int, list[str]] = {}
    for node in graph.nodes:
        members.setdefault(of[node.name], []).append(node.name)
    nodes = tuple(NodeClass(tuple(m), len(candidates[m[0]])) for _, m in sorted(members.items()))
    return Classes(nodes, of, _value_classes(candidates, of, reads), _together(graph, candidates, of))


def read_again(classes: Classes, nodes: Collection[str], calls: Collection[str]) -> Classes:
    """The same where each of ``calls`` that reads in the forward phase what ``nodes`` make reads it in the backward
    phase once more."""
    again = frozenset(a for a, c in enumerate(classes.nodes) if any(name in calls for name in c.members))

    def twice(v: ValueClass) -> ValueClass:
        if v.members[0].node not in nodes:
            return v
        more = [k for k, slot in enumerate(v.slots) if slot.reader in again and slot.phase == "forward"]
        slots = (replace(v.slots[k], phase="backward") for k in more)
        needed = tuple((*of_member, *(of_member[k] for k in more)) for of_member in v.needed)
        return replace(v, slots=(*v.slots, *slots), needed=needed)

    return replace(classes, values=tuple(map(twice, classes.values))) if again else classes


@dataclass(frozen=True)
class Read:
    """``value`` is read by ``reader`` at a tensor argument, or must end where that source lives (``HOME``), or is the
    loss (no reader), in one of the placements ``wants``. ``number``: which of the value's distinct wants this is.
    ``index``: of the outputs of its producer that are like the value, the first; ``position`` likewise."""

    value: Value
    index: int
    reader: str | None
    position: int
    phase: Phase
    wants: tuple[Placement, ...]
    number: int


Reads = Mapping[Value, tuple[Read, ...]]


def find_reads(graph: Graph, candidates: Candidates) -> Reads:
    """Every read of every value, in program order; those of results last."""
    found: dict[Value, list[tuple[str | None, int, Phase, tuple[Placement, ...]]]] = {}
    firsts: dict[str, tuple[int, ...]] = {}
    for node in graph.nodes:
        firsts[node.name] = _first_outputs(node, candidates[node.name])
        positions = _first_inputs(graph, node, candidates[node.name])
        for position, value in enumerate(node.inputs):
            wants = tuple(s.inputs[position] for s in candidates[node.name])
            found.setdefault(value, []).append((node.name, positions[position], node.phase, wants))
    homes = {n.target: n.name for n in graph.nodes if n.op in ("parameter", "buffer")}
    found.setdefault(graph.loss, []).append((None, HOME, graph.by_name[graph.loss.node].phase, (REPLICATE,)))
    for target, value in (*graph.gradients.items(), *graph.updates.items()):
        wants = tuple(s.outputs[0] for s in candidates[homes[target]])  # type: ignore[misc]
        found.setdefault(value, []).append((homes[target], HOME, graph.by_name[value.node].phase, wants))
    reads: dict[Value, tuple[Read, ...]] = {}
    for value, users in found.items():
        numbers: dict[object, int] = {}
        index = firsts[value.node][value.index]
        reads[value] = tuple(Read(value, index, *user, numbers.setdefault(user[3], len(numbers))) for user in users)
    return reads


def who_reads(graph: Graph, reads: Sequence[Read], colour: Mapping[str, int]) -> tuple[tuple[int, int, int], ...]:
    """Of the reads of a value that is one of many: the readers' colours, where they read it, which of its wants they
    have. Of others nothing: which output they are says more."""
    if len(graph.by_name[reads[0].value.node].outputs) < MANY:
        return ()
    return tuple(sorted((-1 if r.reader is None else colour[r.reader], r.position, r.number) for r in reads))


def _first_outputs(node: Node, options: Sequence[Strategy]) -> tuple[int, ...]:
    """For each output the first that is like it, if there are many."""
    if len(node.outputs) < MANY:
        return tuple(range(len(node.outputs)))
    return _firsts([(repr(m), *(s.outputs[i] for s in options)) for i, m in enumerate(node.outputs)])


def _first_inputs(graph: Graph, node: Node, options: Sequence[Strategy]) -> tuple[int, ...]:
    """For each input of a call that joins many the first that is like it."""
    if node.op not in JOINING or len(node.inputs) < MANY:
        return tuple(range(len(node.inputs)))
    return _firsts([(repr(graph.meta(v)), *(s.inputs[i] for s in options)) for i, v in enumerate(node.inputs)])


def _firsts(keys: Sequence[object]) -> tuple[int, ...]:
    """For each the position of its first equal."""
    first: dict[object, int] = {}
    return tuple(first.setdefault(key, i) for i, key in enumerate(keys))


def find_colours(
    graph: Graph, candidates: Candidates, *, radius: int = RADIUS, reads: Reads | None = None
) -> tuple[Mapping[str, int], ...]:
    """Node -> colour, after 0, 1, ..., ``radius`` rounds of refinement; after each, a colour says the colours of the
    round before of all that a node reads and is read by, and which of the placements on the way are equal. Of a value
    that is one of many, it says who else reads it, too: all else does not tell it from the others. ``reads``: those of
    ``find_reads``, if known."""
    reads = find_reads(graph, candidates) if reads is None else reads
    labels = _number((v, (_pattern(candidates, v, r), r[0].index)) for v, r in reads.items())
    inputs: dict[str, list[tuple[Value, int, int, int]]] = {n.name: [] for n in graph.nodes}
    readers: dict[str, list[tuple[str, Value, int, int, int]]] = {n.name: [] for n in graph.nodes}
    for value, users in reads.items():
        for read in users:
            if read.reader is not None:
                inputs[read.reader].append((value, read.position, labels[value], read.number))
                readers[value.node].append((read.reader, value, read.position, labels[value], read.number))
    colour = _number((n.name, _first_colour(graph, n, candidates[n.name])) for n in graph.nodes)
    rounds = [colour]
    for _ in range(radius):
        who = {value: who_reads(graph, users, colour) for value, users in reads.items()}
        colour = _number(
            (
                n.name,
                (
                    colour[n.name],
                    tuple(sorted((colour[v.node], *edge, who[v]) for v, *edge in inputs[n.name])),
                    tuple(sorted((colour[r], *edge, who[v]) for r, v, *edge in readers[n.name])),
                ),
            )
            for n in graph.nodes
        )
        rounds.append(colour)
    return tuple(rounds)


def _pattern(candidates: Candidates, value: Value, reads: Sequence[Read]) -> object:
    """The placements that a value can be produced in and those that it is wanted in, groups renamed."""
    produced = [s.outputs[value.index] for s in candidates[value.node]]
    wanted = {read.number: read.wants for read in reads}
    flat = [*produced, *(p for number in sorted(wanted) for p in wanted[number])]
    return rename_groups(flat), tuple(len(w) for w in wanted.values())


def _first_colour(graph: Graph, node: Node, strategies: Sequence[Strategy]) -> object:
    args = tuple("site" if (node.op, i) in NUMBERED else a for i, a in enumerate(node.args))
    literals = repr(
        (map_values(args, lambda v: "value"), [(k, map_values(a, lambda v: "value")) for k, a in node.kwargs])
    )
    is_loss = graph.loss.node == node.name
    return node.op, literals, repr(node.outputs), node.phase, is_loss, rename_groups(_placements(strategies))


def _placements(strategies: Sequence[Strategy]) -> list[Placement | None]:
    found: list[Placement | None] = []
    for s in strategies:
        found += [*s.inputs, *s.outputs]
    return found


def rename_groups(placements: Iterable[Placement | None]) -> tuple[object, ...]:
    """The same placements with groups numbered in order of appearance: equal for corresponding candidates. A shard as
    (dim, outer, n, unit, number)."""
    numbers: dict[str, int] = {}
    return tuple(
        [
            (*p[:-1], numbers.setdefault(p.group, len(numbers))) if isinstance(p, Shard) else p
            for p in placements
        ]
    )


def _number(keyed: Iterable[tuple[K, object]]) -> dict[K, int]:
    numbers: dict[object, int] = {}
    return {name: numbers.setdefault(key, len(numbers)) for name, key in keyed}


def _together(
    graph: Graph, candidates: Candidates, of: Mapping[str, int]
) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
    found: dict[str, dict[int, tuple[int, ...]]] = {}
    for node in graph.sources("input"):
        placements = [s.outputs[0] for s in candidates[node.name]]
        for group in dict.fromkeys(p.group for p in placements if isinstance(p, Shard)):
            options = tuple(i for i, p in enumerate(placements) if isinstance(p, Shard) and p.group == group)
            found.setdefault(group, {})[of[node.name]] = options
    return tuple(tuple(inputs.items()) for inputs in found.values() if len(inputs) > 1)


def _value_classes(candidates: Candidates, of: Mapping[str, int], all_reads: Reads) -> tuple[ValueClass, ...]:
    found: dict[object, list[tuple[Value, tuple[Placement, ...], tuple[tuple[Placement, ...], ...]]]] = {}
    shape: dict[object, tuple[int, tuple[Slot, ...]]] = {}
    for value, users in all_reads.items():
        reads = _slots(users, of)
        produced = tuple(s.outputs[value.index] for s in candidates[value.node])
        assert None not in produced, f"{value} has no placement"
        slots, needed = tuple(slot for slot, _ in reads), tuple(need for _, need in reads)
        flat = [*produced, *(p for need in needed for p in need)]
        key = (of[value.node], users[0].index, slots, tuple(map(len, needed)), rename_groups(flat))
        shape[key] = (of[value.node], slots)
        found.setdefault(key, []).append((value, produced, needed))  # type: ignore[arg-type]
    return tuple(
        ValueClass(*shape[key], tuple(m[0] for m in ms), tuple(m[1] for m in ms), tuple(m[2] for m in ms))
        for key, ms in found.items()
    )


def _slots(reads: Sequence[Read], of: Mapping[str, int]) -> list[tuple[Slot, tuple[Placement, ...]]]:
    """A value's distinct slots with the placements they want, sorted by slot, ties in program order."""
    found: dict[tuple[Slot, tuple[Placement, ...]], None] = {}
    for read in reads:
        reader = None if read.reader is None else of[read.reader]
        found[Slot(reader, read.position, read.phase), read.wants] = None

    def order(entry: tuple[Slot, tuple[Placement, ...]]) -> tuple[int, int, str]:
        slot = entry[0]
        return (-1 if slot.reader is None else slot.reader, slot.position, slot.phase)

    return sorted(found, key=order)


def find_bundles(classes: Classes, candidates: Candidates) -> tuple[tuple[str, ...], ...]:
    """Groups that correspond in nodes of one class: they get one common size vector. First appearance orders all."""
    parent: dict[str, str] = {}
    tied: set[tuple[str, str]] = set()

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    for node_class in classes.nodes:
        first = _placements(candidates[node_class.members[0]])
        for member in node_class.members:
            for one, other in zip(first, _placements(candidates[member]), strict=True):
                if not (isinstance(one, Shard) and isinstance(other, Shard)):
                    continue
                if (one.group, other.group) not in tied:
                    tied.add((one.group, other.group))
                    parent[root(other.group)] = root(one.group)
    bundles: dict[str, list[str]] = {}
    for name in parent:
        bundles.setdefault(root(name), []).append(name)
    return tuple(tuple(b) for b in bundles.values())
