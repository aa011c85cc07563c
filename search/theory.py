"""The background theory of a step: what is true of a distributed tensor, and what each instruction makes true.

After HAP (Zhang et al., EuroSys 2024, arXiv 2401.05965), over this house's rule table instead of a list of operators:

    property     v @ p                     tensor v of the single-device graph lies in placement p  (``Property``)
    triple       {needs} instruction {gives}, with what it costs                                    (``Triple``)
    computing    {v1 @ q1, v2 @ q2, ...}   node, strategy   {w @ p, ...}    one per row that fits   (``Theory.triples``)
    converting   {v @ p}                   p -> q           {v @ q}         one per conversion      (``Theory.triples``)
    goal         loss @ R; every gradient and every update of a buffer @ where its home lies        (``Use``, no reader)

Three things are narrower than in the paper, as a plan (``hap.plan``) says no more: a node is computed once; a tensor
is converted from the placement that it was produced in; and nothing is ever converted to a partial sum. Computing
nodes in the graph's order, and converting when the first reader asks (a result: as soon as it exists), then loses
nothing: a step's cost, under the first two clocks below, is a sum over the triples used, in whatever order.

Three clocks for the same triples; r a rank, T_r the moment at which it is ready:

    "node"    every instruction waits for its slowest rank: T += max_r alone[r] + together    (the MILP's ``barriers``)
    "stage"   only a collective does:   T_r += alone[r];  collective: T_r := max T + together  (the judge's)
    "step"    nobody ever waits:        T_r += alone[r] + together                  (the MILP's without ``barriers``)

and the step's cost is max_r T_r. The same program costs most under the first and least under the last. All prices are
those of the MILP (``hap.search.tables.Coefficients``), and so is memory: bytes at a few moments of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from hap.graph import Graph, Value
from hap.placement import Placement
from hap.search.classes import Candidates, Classes, NodeClass, _together, _value_classes, find_reads
from hap.search.milp import Skeleton
from hap.search.payers import NodePayer
from hap.search.tables import Coefficients, Held, Prices

Clock = Literal["node", "stage", "step"]
Vector = tuple[float, ...]


class Property(NamedTuple):
    """``value`` lies in ``placement``."""

    value: Value
    placement: Placement

    def __str__(self) -> str:
        return f"{self.value} @ {self.placement}"


class Cost(NamedTuple):
    """Seconds in which all ranks are busy together, and of one rank of every kind alone (R,); bytes held, moment by
    moment and kind by kind (M * R,)."""

    together_s: float
    alone_s: Vector
    held_bytes: Vector


@dataclass(frozen=True)
class Triple:
    """{needs} instruction {gives}. ``node`` is a class of nodes and ``option`` its strategy; -1 for a conversion."""

    needs: tuple[Property, ...]
    instruction: str
    gives: tuple[Property, ...]
    cost: Cost
    node: int = -1
    option: int = -1

    def __str__(self) -> str:
        needs, gives = (", ".join(map(str, ps)) for ps in (self.needs, self.gives))
        return f"{{{needs}}} {self.instruction} {{{gives}}}"


@dataclass(frozen=True)
class Use:
    """Who needs a tensor: class ``reader``, under its option i in place ``wants[i]``; None: the step itself. Uses of
    one ``copy`` share their conversions."""

    reader: int | None
    wants: tuple[int, ...]
    copy: str


@dataclass(frozen=True)
class Tensor:
    """A value (or a class of them) whose placements are numbered ``places``. Class ``producer`` makes it in place
    ``gives[i]`` under option i. ``conversions``: (from, to, copy) -> cost; what is not there cannot be done."""

    name: Value
    places: tuple[Placement, ...]
    producer: int
    gives: tuple[int, ...]
    uses: tuple[Use, ...]
    conversions: Mapping[tuple[int, int, str], Cost]


@dataclass(frozen=True, eq=False)
class Theory:
    """All of it, for the nodes of ``classes`` in that order. ``capacity_bytes`` (M * R,) belongs to
    ``Cost.held_bytes``; both are empty where everything fits. ``options[a]``: what class a may choose from."""

    classes: Classes
    costs: tuple[tuple[Cost, ...], ...]
    tensors: tuple[Tensor, ...]
    capacity_bytes: Vector
    options: tuple[tuple[int, ...], ...]
    waits: bool  # a collective lets all ranks catch up: the clock "stage"

    @property
    def ranks(self) -> int:
        return len(self.costs[0][0].alone_s)

    @cached_property
    def read(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Class -> (tensor, use) of what it reads and others make, in the order of its arguments."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.costs]
        for v, tensor in enumerate(self.tensors):
            for k, use in enumerate(tensor.uses):
                if use.reader is not None and use.reader != tensor.producer:
                    found[use.reader].append((v, k))
        return tuple(tuple(sorted(pairs, key=lambda pair: self._place(*pair))) for pairs in found)

    def _place(self, v: int, k: int) -> tuple[int, int]:
        return self.classes.values[v].slots[k].position, v

    @cached_property
    def made(self) -> tuple[tuple[int, ...], ...]:
        """Class -> the tensors that it makes."""
        found: list[list[int]] = [[] for _ in self.costs]
        for v, tensor in enumerate(self.tensors):
            found[tensor.producer].append(v)
        return tuple(map(tuple, found))

    def triples(self) -> Iterator[Triple]:
        """Every triple; what a result must be is a need of the node that it belongs to, as a reader's are."""
        for a, node in enumerate(self.classes.nodes):
            for i in self.options[a]:
                needs = [(v, self.tensors[v].uses[k].wants[i]) for v, k in self.read[a] if not self._is_home(v, k)]
                gives = [(v, self.tensors[v].gives[i]) for v in self.made[a]]
                yield Triple(
                    tuple(dict.fromkeys(self.property(*n) for n in needs)),
                    f"{node.members[0]}/{i}",
                    tuple(self.property(*g) for g in gives),
                    self.costs[a][i],
                    a,
                    i,
                )
        for v, tensor in enumerate(self.tensors):
            for (p, q, copy), cost in tensor.conversions.items():
                before, after = self.property(v, p), self.property(v, q)
                yield Triple((before,), f"convert{copy and ' ' + copy}", (after,), cost)

    def _is_home(self, v: int, k: int) -> bool:
        return self.classes.values[v].slots[k].position < 0

    def property(self, tensor: int, place: int) -> Property:
        return Property(self.tensors[tensor].name, self.tensors[tensor].places[place])


def unmerged(graph: Graph, candidates: Candidates) -> Classes:
    """Every node by itself, in the graph's order: what the clock "stage" needs."""
    of = {node.name: a for a, node in enumerate(graph.nodes)}
    nodes = tuple(NodeClass((node.name,), len(candidates[node.name])) for node in graph.nodes)
    values = _value_classes(candidates, of, find_reads(graph, candidates))
    return Classes(nodes, of, values, _together(graph, candidates, of))


class Bill(Skeleton):
    """A MILP's skeleton as a list of what can be paid for: each payer has one number, and no two have the same. (The
    program itself lets a node's variable pay for a conversion that comes with it.)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.payers = [replace(payer, variables=(i,)) for i, payer in enumerate(self.payers)]
        self.names = [f"pays[{i}]" for i in range(len(self.payers))]


def bill_prices(prices: Prices) -> tuple[Bill, Prices]:
    """What a MILP may choose at some sizes, item by item."""
    skeleton = prices.tables.skeleton
    bill = Bill(skeleton.classes, skeleton.regather)
    return bill, replace(prices, tables=replace(prices.tables, skeleton=bill))


def background_theory(
    skeleton: Bill,
    coefficients: Coefficients,
    clock: Clock = "node",
    *,
    forced: Mapping[int, tuple[int, ...]] | None = None,
) -> Theory:
    """The theory of a bill at the prices of its items. ``forced``: class -> the only options it has."""
    classes = skeleton.classes
    assert clock != "stage" or all(len(c.members) == 1 for c in classes.nodes), "stages follow single nodes"
    if not _binds(skeleton, coefficients):
        coefficients = coefficients._replace(held=Held(coefficients.held_bytes[:0]))
    costs: list[list[Cost]] = [[] for _ in classes.nodes]
    converting: dict[tuple[Value, Placement, Placement, str], Cost] = {}
    for payer in skeleton.payers:
        cost = _cost(coefficients, payer.variables[0], clock)
        if isinstance(payer, NodePayer):
            costs[payer.node_class].append(cost)
        else:
            converting[payer.values[0], payer.sources[0], payer.targets[0], payer.copy] = cost
    options = [tuple(range(c.options)) for c in classes.nodes]
    for a, allowed in (forced or {}).items():
        options[a] = tuple(i for i in options[a] if i in allowed)
    return Theory(
        classes,
        tuple(map(tuple, costs)),
        tuple(_tensor(skeleton, number, converting) for number in range(len(classes.values))),
        tuple(float(c) for _ in coefficients.held_bytes for c in coefficients.capacity_bytes),
        tuple(options),
        clock == "stage",
    )


def _binds(skeleton: Bill, coefficients: Coefficients) -> bool:
    """Whether the largest option of every class and all conversions together do not fit."""
    held = coefficients.held_bytes
    options: list[list[int]] = [[] for _ in skeleton.classes.nodes]
    converting: list[int] = []
    for number, payer in enumerate(skeleton.payers):
        (options[payer.node_class] if isinstance(payer, NodePayer) else converting).append(number)
    largest = held[:, :, converting].sum(axis=2) + sum(held[:, :, numbers].max(axis=2) for numbers in options)
    return bool((largest > coefficients.capacity_bytes).any())


def _cost(coefficients: Coefficients, variable: int, clock: Clock) -> Cost:
    alone = coefficients.compute_s[:, variable]
    held = tuple(coefficients.held_bytes[:, :, variable].ravel().tolist())
    if clock == "node":
        alone = alone.max(initial=0.0, keepdims=True)
    return Cost(float(coefficients.together_s[variable]), tuple(alone.tolist()), held)


def _tensor(skeleton: Bill, number: int, converting: Mapping[tuple[Value, Placement, Placement, str], Cost]) -> Tensor:
    found = skeleton.classes.values[number]
    produced, needed, name = found.produced[0], found.needed[0], found.members[0]
    places = tuple(dict.fromkeys([*produced, *(p for need in needed for p in need)]))
    place = {p: i for i, p in enumerate(places)}
    uses: list[Use] = []
    conversions: dict[tuple[int, int, str], Cost] = {}
    for slot, need in zip(found.slots, needed, strict=True):
        copy = slot.phase if skeleton.regather[number] else ""
        uses.append(Use(slot.reader, tuple(place[q] for q in need), copy))
        for p in dict.fromkeys(produced):
            for q in dict.fromkeys(need):
                if (name, p, q, copy) in converting:
                    conversions[place[p], place[q], copy] = converting[name, p, q, copy]
    return Tensor(name, places, found.producer, tuple(place[p] for p in produced), tuple(uses), conversions)
