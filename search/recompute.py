"""How much of the forward pass is repeated in the backward pass: nothing where all fits; else as little as will do.

Steps, in order: of the first, second, ... last block what is cheap to repeat; block by block again, products, too;
then all (``blocks``). Early blocks come first: what the last one drops is made again at once, when memory is fullest.
A plan takes the fewest steps with which it fits (``thinned``), by bisection with the ledger as the judge.

Two moments ask for it. Nothing fits: the whole search is made again for the step in which all steps are taken, memory
and repeated calls counted in its program (``run_or_repeat``). Something fits, but memory is full, or would be if the
batch were dealt out and parameters kept whole: then a plan that repeats calls may be faster than one that cuts or
gathers more to save memory. The best that a few programs find is played as the others were, and taken where it is
faster (``or_repeating``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from hap.cost_models.memory import usable_bytes
from hap.errors import InfeasibleError
from hap.plan import Recomputed
from hap.search.blocks import LEVELS, Block, What, find_blocks
from hap.search.found import Found, best_of
from hap.search.infeasible import state_bytes, updated_bytes
from hap.search.judge import TIE, first_look, inputs_dealt_out
from hap.search.problem import Problem
from hap.search.refine import reshare
from hap.search.tempo import played_s

if TYPE_CHECKING:
    from hap.search.planner import Search

FULL = 0.9  # of usable memory
WORTH = 0.15  # of the step: where the bound says that less can be gained, nothing is asked
MOST_NODES = 3_000  # of a graph for which a plan that repeats is looked for beside one that fits


def steps_of(blocks: tuple[Block, ...]) -> tuple[tuple[int, What], ...]:
    """(number of a block, what of it is repeated from this step on), in order."""
    return tuple((i, what) for what in LEVELS for i, block in enumerate(blocks) if what in block.calls)


def after_steps(blocks: tuple[Block, ...], count: int) -> tuple[Recomputed, ...]:
    """What is repeated once the first ``count`` steps are taken."""
    level = dict(steps_of(blocks)[:count])
    return tuple(
        Recomputed(block=blocks[i].label, what=level[i], calls=blocks[i].calls[level[i]]) for i in sorted(level)
    )


def run_or_repeat(search: Search) -> tuple[Search, Found]:
    """The search that found a plan, and its best: ``search``, or where nothing fits that is not dear one that repeats
    all it may, or one to which nothing is too dear. InfeasibleError if that does not help either."""
    try:
        return search, search.run()
    except InfeasibleError as e:
        if not _state_fits(search.problem):
            raise
        refused = str(e)
    last, again = search, _repeating(search)
    if again is not None:
        last, again.met = again, search.met  # where an interrupted search looks for the best so far
        search.progress.say("nothing fits; trying with activations computed again in the backward pass")
        try:
            found = again.run()
            return _cheaper(search, found) or (again, found)
        except InfeasibleError as e:
            refused = f"{e}; activations are computed again in the backward pass already"
    if last.chooser.dear == np.inf:
        raise InfeasibleError(refused)
    search.progress.say("nothing fits that is not dear; trying whatever it costs")
    last = _anew(last, np.inf)
    try:
        return last, last.run()
    except InfeasibleError:
        raise InfeasibleError(refused) from None


def _anew(search: Search, dear: float) -> Search:
    """The same search, to which nothing is dear that costs less than so many times the step without memory's limits."""
    other = replace(search, rounds=0, starts=0)
    other.met, other.chooser.dear = search.met, dear
    return other


def _cheaper(search: Search, found: Found) -> tuple[Search, Found] | None:
    """What repeats nothing and takes less than ``found``, where that was too dear to be looked for before."""
    dear = found.cost[1] / search.chooser.least_s
    if dear <= search.chooser.dear:
        return None
    search.progress.say("trying without computing anything again")
    other = _anew(search, dear)
    try:
        cheaper = other.run()
    except InfeasibleError:
        return None
    return (other, cheaper) if cheaper.cost < found.cost else None


def or_repeating(search: Search, best: Found, overlapped_s: float | None) -> tuple[Found, float | None]:
    """``best``, with as little repeated as it needs; or one that repeats calls and is faster."""
    if best.recomputed:
        best = thinned(search.problem, best)
        return best, None if overlapped_s is None else played_s(search.problem, best)
    if overlapped_s is None or not _may_gain(search, best):
        return best, overlapped_s
    again = _repeating(search)
    first = None if again is None else _first(again, best)
    if again is None or first is None:
        return best, overlapped_s
    found, _ = inputs_dealt_out(again.chooser, *first_look(again.chooser, first))
    found = thinned(again.problem, found)
    seconds = played_s(again.problem, found)
    return (found, seconds) if seconds < overlapped_s * (1 - TIE) else (best, overlapped_s)


def _first(again: Search, best: Found) -> Found | None:
    """What a few programs find of plans that repeat calls: ``best`` itself, its shares dealt out anew, then its
    strategies, with parameters gathered once, too, where it gathers them twice. None if nothing fits."""
    problem = again.problem
    evaluation = problem.judge(best.strategies, best.sizes, best.regather)
    same = replace(best, evaluation=evaluation, recomputed=problem.recomputed)
    dealt = reshare(problem, same)
    again.met += [same, dealt]
    for regather in dict.fromkeys((best.regather, False)):
        chosen = again.chooser.strategies(dealt.sizes, regather, best.left_out)
        if chosen is not None:
            again.met += [chosen, reshare(problem, chosen)]
    return best_of(f for f in again.met if f.fits)


def if_kept(problem: Problem, found: Found) -> dict[str, list[int]]:
    """What the plan's provenance says of a plan that repeats calls: bytes of every rank if it did not."""
    if not found.recomputed:
        return {}
    evaluator = problem.facts.evaluator
    evaluation = evaluator.evaluate(found.strategies, found.sizes, regather=found.regather, kept=found.kept)
    return {"kept_memory_bytes": list(evaluation.memory_bytes)}


def thinned(problem: Problem, found: Found) -> Found:
    """The same strategies and sizes with the fewest steps that fit; ``found`` itself fits with all of them."""
    assert found.fits
    blocks, evaluator = blocks_of(problem), problem.facts.evaluator
    too_few, enough, best = -1, len(steps_of(blocks)), None
    while enough - too_few > 1:
        count = (too_few + enough) // 2
        recomputed = after_steps(blocks, count)
        names = [name for r in recomputed for name in r.calls]
        prepared = evaluator.prepare(found.strategies, regather=found.regather, recomputed=names)
        if evaluator.fits(prepared, found.sizes):
            enough, best = count, (prepared, recomputed)
        else:
            too_few = count
    if best is None:
        return found
    prepared, recomputed = best
    return replace(found, evaluation=evaluator.at_sizes(prepared, found.sizes), recomputed=recomputed)


def _repeating(search: Search) -> Search | None:
    """The same search where every step is taken; None if there is none."""
    blocks = blocks_of(search.problem)
    everything = after_steps(blocks, len(steps_of(blocks)))
    if not everything or search.problem.recomputed:
        return None
    other = replace(search, problem=search.problem.repeating(everything), rounds=0, starts=0)
    if "bound_s" in search.__dict__:  # repeating calls makes no step shorter
        other.__dict__["bound_s"] = search.bound_s
    return other


def blocks_of(problem: Problem) -> tuple[Block, ...]:
    """Of its forward pass, what may be repeated."""
    known = problem.facts.found
    if "blocks" not in known:
        known["blocks"] = find_blocks(problem.choices.graph, problem.facts.evaluator.strides)
    return cast(tuple[Block, ...], known["blocks"])


def _state_fits(problem: Problem) -> bool:
    """Parameters, gradients, the optimizer's state and what its update makes, dealt out."""
    needed = updated_bytes(problem.choices.graph, problem.optimizer, problem.cluster.backend)
    return needed <= sum(usable_bytes(d.memory_bytes) for d in problem.cluster.devices)


def _may_gain(search: Search, best: Found) -> bool:
    """Whether memory may be what keeps ``best`` from being clearly faster, and it is not too dear to ask."""
    small = len(search.problem.choices.graph.nodes) <= MOST_NODES
    near = best.cost[1] * (1 - WORTH) <= search.bound_s
    return small and not near and (_is_full(best) or _is_pressed(search, best) or _is_crowded(search.problem))


def _is_pressed(search: Search, best: Found) -> bool:
    """Whether something was met that is shorter and does not fit."""
    return any(f.cost[1] < best.cost[1] * (1 - TIE) for f in search.met if not f.fits)


def _is_full(found: Found) -> bool:
    pairs = zip(found.evaluation.memory_bytes, found.evaluation.usable_bytes, strict=True)
    return any(used > FULL * usable for used, usable in pairs)


def _is_crowded(problem: Problem) -> bool:
    """Whether whole parameters and a batch dealt by speed do not fit, but would if all were repeated that can be."""
    devices, state = problem.cluster.devices, state_bytes(problem.choices.graph, problem.optimizer)
    blocks = blocks_of(problem)
    plain = sum(b.plain_bytes for b in blocks)
    least = sum(min(b.kept_bytes.values()) for b in blocks) + max((b.plain_bytes for b in blocks), default=0)
    room = np.array([usable_bytes(d.memory_bytes) for d in devices], dtype=np.float64) - state
    share = 1.0 / problem.whole_s
    share = share / share.sum()
    return bool((share * plain > room).any() and (share * least <= room).all())
