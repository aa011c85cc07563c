"""The messages of a routed collective: who sends which part of a flat buffer to whom, and in which order.

Every rank holds a buffer of the same length. A message copies a part of the sender's buffer into the same part of the
receiver's, or adds it there. Messages stand in one order on all ranks, (round, segment); messages of one round do not
depend on each other, and a message depends on those of earlier rounds that brought the same segment to its sender. So
a rank may send each part as soon as it has it, or all may go round by round.

A segment s of an owner whose tree has depth D goes up in rounds s .. s+D-1 and down in the D rounds that follow: while
one rank passes segment s on it already receives s+1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from hap.routes import SEGMENT_BYTES, Way, depth, segment_owners, tree


class Message(NamedTuple):
    """Elements ``start <= i < stop`` from ``src`` to ``dst``; ``segment`` names that part."""

    round: int
    segment: int
    src: int
    dst: int
    start: int
    stop: int
    adds: bool


class _Part(NamedTuple):
    owner: int
    turn: int  # of this owner's parts
    start: int
    stop: int


def gather_messages(way: Way, lengths: Sequence[int], itemsize: int) -> tuple[Message, ...]:
    """Rank r's ``lengths[r]`` elements, at their place in the buffer, go to everybody."""
    return _messages(way, _shards(way, lengths, itemsize), len(lengths), up=False, down=True)


def scatter_messages(way: Way, lengths: Sequence[int], itemsize: int) -> tuple[Message, ...]:
    """Everybody's buffer is summed; afterwards rank r has the sum of its own ``lengths[r]`` elements."""
    return _messages(way, _shards(way, lengths, itemsize), len(lengths), up=True, down=False)


def reduce_messages(way: Way, length: int, world_size: int, itemsize: int) -> tuple[Message, ...]:
    """Everybody's buffer is summed; afterwards all have the sum."""
    owners = segment_owners(way, world_size)
    turns = max(1, -(-length * itemsize // (SEGMENT_BYTES * len(owners))))
    cuts = _cuts(length, turns * len(owners))
    parts = [_Part(owners[i % len(owners)], i // len(owners), a, b) for i, (a, b) in enumerate(cuts)]
    return _messages(way, parts, world_size, up=True, down=True)


def _shards(way: Way, lengths: Sequence[int], itemsize: int) -> list[_Part]:
    """Each owner's part of the buffer, cut into segments where somebody passes them on."""
    passed_on = depth(way, len(lengths)) > 1
    parts = []
    for owner, (length, end) in enumerate(zip(lengths, accumulate(lengths), strict=True)):
        turns = max(1, -(-length * itemsize // SEGMENT_BYTES)) if passed_on else 1
        for turn, (a, b) in enumerate(_cuts(length, turns)):
            parts.append(_Part(owner, turn, end - length + a, end - length + b))
    return parts


def _cuts(length: int, count: int) -> list[tuple[int, int]]:
    """``count`` ranges of nearly equal length that make up ``range(length)``."""
    ends = [length * i // count for i in range(count + 1)]
    return list(pairwise(ends))


def _messages(way: Way, parts: Sequence[_Part], world_size: int, *, up: bool, down: bool) -> tuple[Message, ...]:
    trees = [tree(way, root, world_size) for root in range(world_size)]
    found = []
    for segment, (owner, turn, start, stop) in enumerate(parts):
        if start == stop:
            continue
        deepest = max((e.depth for e in trees[owner]), default=0)
        for edge in trees[owner] if up else ():
            when = turn + deepest - edge.depth
            found.append(Message(when, segment, edge.child, edge.parent, start, stop, True))
        for edge in trees[owner] if down else ():
            when = turn + (deepest if up else 0) + edge.depth - 1
            found.append(Message(when, segment, edge.parent, edge.child, start, stop, False))
    return tuple(sorted(found, key=lambda m: (m.round, m.segment)))
