"""Which gathered parameters stay between the passes, where memory has no room for all of them.

Where a plan fits only if parameters are gathered once for the forward pass and again for the backward pass, there often
is room left for some of the copies, and where calls are repeated there may be made room for more. With P the parameters
that are gathered twice, b[p] the bytes of a copy of p and s[p] the seconds that it takes to gather it,

    maximise  sum of s[p] over the kept p  -  what the repeated calls take
    so that   the ledger's peak fits on every rank

over the subsets of P and the steps of ``recompute``: the fewest steps with which it fits, and more, to the end of every
level. At the end of the forward pass all kept copies are there, so they are taken in the order of s[p] / b[p], of equal
ones the last layers' first, whose copies are freed soonest: as many as the ledger lets in (``_fullest``).

A MILP that gathers every parameter twice does not know that copies may stay: it fills the memory with what saves
collectives otherwise. So it is asked for the same sizes with less memory, too (``LEAN``). Nor does it care whether it
gathers the parameter or a view of it for one pass and the parameter for the other. So for the same homes of the
parameters it is asked once more, gathered once and with no limit to memory: then one copy serves both passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from hap.cost_models.pieces import local_bytes
from hap.placement import GroupSizes
from hap.plan import Recomputed, Strategy
from hap.search.blocks import LEVELS
from hap.search.found import Found, best_of
from hap.search.judge import TIE
from hap.search.problem import Problem
from hap.search.recompute import after_steps, blocks_of, steps_of
from hap.search.tempo import played_s

if TYPE_CHECKING:
    from hap.search.planner import Search

LEAN = (0.75, 0.5)  # of the usable memory
TRIES = 4  # numbers of copies that the ledger is asked about, for one set of repeated calls


def or_keeping(search: Search, best: Found, overlapped_s: float | None) -> tuple[Found, float | None]:
    """``best``, or if it gathers parameters twice and that is faster, the same with some of them gathered once."""
    if not best.regather or not best.fits:
        return best, overlapped_s
    search.progress.say("asking which gathered parameters can stay")
    problem, found = search.problem, best
    leaner = (search.chooser.leaner(best.sizes, part) for part in LEAN)
    met = [best.strategies, *(s for s in leaner if s is not None)]
    once = (_gathering_once(search, best.sizes, strategies) for strategies in met)
    choices = [best.strategies, *(s for s in once if s is not None)]
    for recomputed in _repeated(problem, best):
        for strategies in choices:
            tried = _fullest(problem, replace(best, strategies=strategies, recomputed=recomputed))
            found = best_of((found, tried)) or found
    if found is best or overlapped_s is None:
        return found, overlapped_s
    seconds = played_s(problem, found)
    return (found, seconds) if seconds < overlapped_s * (1 - TIE) else (best, overlapped_s)


def _gathering_once(
    search: Search, sizes: GroupSizes, strategies: Mapping[str, Strategy]
) -> Mapping[str, Strategy] | None:
    """Those for parameters gathered once that lie as by ``strategies``, whatever memory they take."""
    problem = search.problem
    homes = {problem.classes.of[n.name]: n.name for n in problem.choices.graph.sources("parameter")}
    forced = {a: (problem.facts.candidates[name].index(strategies[name]),) for a, name in homes.items()}
    return search.chooser.unlimited(sizes, forced=forced)


def _repeated(problem: Problem, best: Found) -> list[tuple[Recomputed, ...]]:
    """What ``best`` repeats, and more, to the end of every level."""
    blocks = blocks_of(problem)
    steps = steps_of(blocks)
    own = next(count for count in range(len(steps) + 1) if after_steps(blocks, count) == best.recomputed)
    ends = accumulate(sum(what == level for _, what in steps) for level in LEVELS)
    return [best.recomputed, *(after_steps(blocks, count) for count in dict.fromkeys(ends) if count > own)]


def _fullest(problem: Problem, found: Found) -> Found | None:
    """The same with as many copies kept as the ledger lets in, by ``TRIES`` guesses that each are corrected by what was
    left free, or was too much, at the one before. None if it does not fit with none."""
    found = _keeping(problem, found, ())
    if not found.fits:
        return None
    order, held = _worth_most(problem, found)
    totals = np.cumsum(held)
    best, room = found, _free_bytes(found)
    for _ in range(TRIES):
        many = int(np.searchsorted(totals, room, side="right"))
        if len(order[:many]) == len(best.kept):
            break
        tried = _keeping(problem, found, order[:many])
        free = _free_bytes(tried)
        if free >= 0 and tried.cost < best.cost:
            best = tried
        room = totals[many - 1] + free
    return best


def _keeping(problem: Problem, found: Found, kept: Sequence[str]) -> Found:
    evaluator = problem.facts.evaluator
    evaluation = evaluator.evaluate(
        found.strategies, found.sizes, regather=True, kept=frozenset(kept), recomputed=found.repeated
    )
    return replace(found, evaluation=evaluation, kept=frozenset(kept))


def _worth_most(problem: Problem, found: Found) -> tuple[list[str], list[int]]:
    """The parameters that ``found`` gathers twice, those first that save most for their copies' bytes, and these. First
    of all come copies of no bytes."""
    done = {(c.need.value, c.need.target) for c in found.evaluation.conversions if c.need.phase == "forward"}
    seconds, held = dict[str, float](), dict[str, int]()
    graph, n = problem.choices.graph, problem.world_size
    for cost in found.evaluation.conversions:
        need = cost.need
        again = need.phase == "backward" and (need.value, need.target) in done
        if again and graph.by_name[need.value.node].op == "parameter":
            copy = local_bytes(graph.meta(need.value).nbytes, need.target, found.sizes, n)
            seconds[need.value.node] = seconds.get(need.value.node, 0.0) + cost.seconds
            held[need.value.node] = held.get(need.value.node, 0) + int(copy.max())
    position = problem.facts.position
    worth = {name: round(seconds[name] / held[name], 15) if held[name] else math.inf for name in seconds}
    order = sorted(seconds, key=lambda name: (-worth[name], -position[name]))
    return order, [held[name] for name in order]


def _free_bytes(found: Found) -> int:
    """On the rank that has least left; negative if it has too little."""
    pairs = zip(found.evaluation.memory_bytes, found.evaluation.usable_bytes, strict=True)
    return min(usable - used for used, usable in pairs)
