"""Options of groups twice: as if the group's mass were spread, and as if it were together (``masses``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hap.conversion import collective_kind
from hap.placement import Placement, Shard
from hap.plan import Strategy
from hap.search.cases import find_shared
from hap.search.classes import find_colours
from hap.search.flows import RADIUS, Flows, Paid
from hap.search.prices import Facts

SPREAD, TOGETHER, ANYWHERE = "spread", "together", "anywhere"


@dataclass(frozen=True)
class Doubled:
    """Every option of a group twice. ``where``: of every option of the doubled candidates which option it is, and where
    the mass of its group lies; ``shared``: the groups that mean the same everywhere."""

    candidates: Mapping[str, tuple[Strategy, ...]]
    where: Mapping[str, tuple[tuple[int, str], ...]]
    colours: tuple[Mapping[str, int], ...]
    shared: frozenset[str]
    found: dict[str, object] = field(default_factory=dict)  # of these candidates, on any cluster

    @classmethod
    def of(cls, facts: Facts) -> Doubled:
        """Found once for a graph and its candidates."""
        found = facts.found.get("doubled")
        if found is None:
            found = facts.found["doubled"] = cls._find(facts)
        assert isinstance(found, Doubled)
        return found

    @classmethod
    def _find(cls, facts: Facts) -> Doubled:
        shared, lying = find_shared(facts, facts.colours[RADIUS]), _Lying()
        where: dict[str, tuple[tuple[int, str], ...]] = {}
        candidates: dict[str, tuple[Strategy, ...]] = {}
        for name, options in facts.candidates.items():
            pairs = [(i, w) for i, option in enumerate(options) for w in places_of(option)]
            where[name] = tuple(pairs)
            candidates[name] = tuple(lying.strategy(options[i], w) for i, w in pairs)
        colours = find_colours(facts.graph, candidates, radius=RADIUS)
        return cls(candidates, where, colours, frozenset(shared))


def places_of(option: Strategy) -> tuple[str, ...]:
    groups = {p.group for p in (*option.inputs, *option.outputs) if isinstance(p, Shard)}
    assert len(groups) <= 1, "a strategy is of one mesh axis"
    return (SPREAD, TOGETHER) if groups else (ANYWHERE,)


class _Lying(dict[tuple[Placement | None, str], Placement | None]):
    """Placements with the group's name saying where its mass lies."""

    def __missing__(self, key: tuple[Placement | None, str]) -> Placement | None:
        placement, where = key
        found = placement._replace(group=f"{placement.group}@{where}") if isinstance(placement, Shard) else placement
        return self.setdefault(key, found)

    def strategy(self, option: Strategy, where: str) -> Strategy:
        inputs = tuple(p for p in (self[p, where] for p in option.inputs) if p is not None)
        return Strategy(inputs, tuple(self[p, where] for p in option.outputs))


class DoubledFlows(Flows):
    """A group does not move: what is spread stays so, and what is together."""

    def pairs(self, produced: Mapping[int, Placement | None], wanted: Mapping[int, Placement]) -> list[tuple[int, int]]:
        there, here = (
            {number: taken_apart(p) for number, p in ends.items() if isinstance(p, Shard)}
            for ends in (produced, wanted)
        )
        moved = {(p, q) for p, (g, at) in there.items() for q, (h, to) in here.items() if g == h and at != to}
        return [pair for pair in super().pairs(produced, wanted) if pair not in moved]

    def is_free(self, source: Placement, target: Placement) -> bool:
        """Cutting a piece out is compute."""
        return collective_kind(source, target) == "slice"

    def price_of(self, paid: Paid) -> object:
        return super().price_of(paid), crosses(paid.source, paid.target)


def crosses(source: Placement, target: Placement) -> bool:
    """Whether what one group deals out goes to another one that lies elsewhere, and not range by range."""
    if not isinstance(source, Shard) or not isinstance(target, Shard) or same_ranges(source, target):
        return False
    (g, here), (h, there) = (taken_apart(p) for p in (source, target))
    return g != h and SPREAD in (here, there)


def same_ranges(source: Placement | None, target: Placement | None) -> bool:
    """Whether both cut the same dim into ranges: then what goes from one to the other may hardly leave its rank."""
    if not isinstance(source, Shard) or not isinstance(target, Shard):
        return False
    return source.dim == target.dim and source.outer == target.outer


def taken_apart(placement: Shard) -> tuple[str, str]:
    group, where = placement.group.rsplit("@", 1)
    return group, where


class Renamed(dict[str, str]):
    """Names of groups, with where their mass lies, for one of alike calls: what every layer has of its own is numbered
    as it appears, so that it is called the same in all of them."""

    def __init__(self, shared: Collection[str]) -> None:
        super().__init__()
        self.shared, self.numbers = shared, dict[str, int]()

    def __missing__(self, name: str) -> str:
        group, where = name.rsplit("@", 1)
        if group not in self.shared:
            group = f"own {self.numbers.setdefault(group, len(self.numbers))}"
        return self.setdefault(name, f"{group}@{where}")

    def all_of(self, placements: Iterable[Placement | None]) -> list[Placement | None]:
        return [p._replace(group=self[p.group]) if isinstance(p, Shard) else p for p in placements]


def ends_of(placements: Sequence[Placement | None], numbers: Collection[int]) -> dict[int, tuple[str, int]]:
    """Of some of the placements, by number: where the mass of the group lies, and the number of the same placement with
    it together, if it is spread, or else its own."""
    number, found = {placements[p]: p for p in numbers}, dict[int, tuple[str, int]]()
    for p in numbers:
        placement, where = placements[p], ANYWHERE
        if isinstance(placement, Shard):
            group, where = taken_apart(placement)
            if where == SPREAD:
                placement = placement._replace(group=f"{group}@{TOGETHER}")
        found[p] = where, number[placement]
    return found
