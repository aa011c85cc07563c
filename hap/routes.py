"""The routes of the collectives that HAP builds from point-to-point messages: one tree of ranks for each owner's bytes.

A *decomposition* is written ``name`` or ``name[0,1]`` or ``name[0,1|2,3]``: a way to perform a collective and the ranks
that it is told about, as search chose them. The ways built here send the bytes of owner o down a tree rooted at o:

    pairs                   o -> every other rank
    ring[0,1,3,2]           o -> its successor in that order -> the next ...; without a list, in rank order
    relay[0,1]              a listed (fast) o: as pairs. Any other o -> one listed rank -> everybody else: a slow uplink
                            carries o's bytes once. Without a list: [0]
    owners[0,1]             as pairs; for all_reduce the listed ranks take turns in owning a segment
    two_level[0,1|2,3]      o -> the ranks of its own host, and one rank of each other host -> the rest of that host

An all-gather sends each owner's shard down its tree. A reduce-scatter is the same backwards: partial sums go up the
tree of whoever will own them. An all-reduce cuts the value into segments with an owner each; every segment goes up its
owner's tree and, summed, down again, so that both directions of a link are busy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

SEGMENT_BYTES = 128 << 10  # what a rank passes on at a time; of 64, 128 and 256 KB the largest that cost nothing
ROUTED = ("pairs", "ring", "relay", "owners", "two_level")
_WAY = re.compile(r"([a-z_]+)(?:\[(\d+(?:[,|]\d+)*)\])?")


class Edge(NamedTuple):
    """From ``parent`` to ``child``, which is ``depth`` >= 1 steps from the root."""

    parent: int
    child: int
    depth: int


Tree = tuple[Edge, ...]  # parents before their children; every rank but the root is a child once


@dataclass(frozen=True)
class Way:
    """A parsed decomposition. ``groups`` is empty where no ranks were listed."""

    name: str
    groups: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}[{'|'.join(','.join(map(str, g)) for g in self.groups)}]" if self.groups else self.name

    @classmethod
    def parse(cls, text: str) -> Way:
        """Inverse of ``str``. ValueError if it is not of that form."""
        match = _WAY.fullmatch(text)
        if not match:
            raise ValueError(f"not a decomposition: {text!r}")
        listed = match[2] or ""
        return cls(match[1], tuple(tuple(map(int, g.split(","))) for g in listed.split("|")) if listed else ())

    @property
    def listed(self) -> tuple[int, ...]:
        return tuple(rank for group in self.groups for rank in group)

    def check(self, world_size: int) -> None:
        """ValueError unless the listed ranks make sense in a world of this size."""
        listed = self.listed
        if any(rank >= world_size for rank in listed):
            raise ValueError(f"{self}: only {world_size} ranks")
        if len(self.groups) > 1 and self.name != "two_level":
            raise ValueError(f"{self}: only two_level takes several lists")
        if self.name in ("ring", "two_level") and listed and sorted(listed) != list(range(world_size)):
            raise ValueError(f"{self}: every one of {world_size} ranks must be listed once")
        if self.name == "relay" and len(set(listed)) != len(listed):
            raise ValueError(f"{self}: a rank is listed twice")


def tree(way: Way, root: int, world_size: int) -> Tree:
    """The tree of ``root``'s bytes."""
    others = tuple(r for r in range(world_size) if r != root)
    match way.name:
        case "pairs" | "owners":
            return tuple(Edge(root, r, 1) for r in others)
        case "ring":
            order = way.listed or tuple(range(world_size))
            at = order.index(root)
            path = [*order[at:], *order[:at]]
            return tuple(Edge(path[d], path[d + 1], d + 1) for d in range(world_size - 1))
        case "relay":
            return _relayed(way.listed or (0,), root, others)
        case "two_level":
            return _two_level(way.groups or (tuple(range(world_size)),), root)
    raise AssertionError(f"{way} is not routed by us")


def _relayed(fast: tuple[int, ...], root: int, others: tuple[int, ...]) -> Tree:
    if root in fast:
        return tuple(Edge(root, r, 1) for r in others)
    slow = sorted({root, *others} - set(fast))
    helper = fast[slow.index(root) % len(fast)]
    return (Edge(root, helper, 1), *(Edge(helper, r, 2) for r in others if r != helper))


def _two_level(hosts: tuple[tuple[int, ...], ...], root: int) -> Tree:
    own = next(h for h in hosts if root in h)
    edges = [Edge(root, r, 1) for r in own if r != root]
    for host in hosts:
        if host is own:
            continue
        leader = host[own.index(root) % len(host)]
        edges.append(Edge(root, leader, 1))
        edges += [Edge(leader, r, 2) for r in host if r != leader]
    return tuple(sorted(edges, key=lambda e: e.depth))


def segment_owners(way: Way, world_size: int) -> tuple[int, ...]:
    """Who owns the segments of an all-reduce, in turns; a rank listed twice owns twice as much."""
    if way.name == "owners" and way.listed:
        return way.listed
    return tuple(range(world_size))


def depth(way: Way, world_size: int) -> int:
    """The most steps from an owner to a rank."""
    return max((e.depth for root in range(world_size) for e in tree(way, root, world_size)), default=0)


def verify_tree(edges: Tree, root: int, world_size: int) -> None:
    """Raise AssertionError unless everybody is reached once, parents first."""
    at = {root: 0}
    for edge in edges:
        assert edge.child not in at, f"rank {edge.child} is reached twice"
        assert at[edge.parent] == edge.depth - 1, f"{edge} has the wrong depth"
        at[edge.child] = edge.depth
    assert len(at) == world_size, f"only {len(at)} of {world_size} ranks are reached"


def league(ranks: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Rounds in which everyone (but one, if they are odd) has a partner; every pair meets once."""
    places = [*range(ranks)] if ranks % 2 == 0 else [*range(ranks), -1]
    half = len(places) // 2
    for _ in range(len(places) - 1):
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield tuple((min(pair), max(pair)) for pair in pairs if -1 not in pair)
        places = [places[0], places[-1], *places[1:-1]]
