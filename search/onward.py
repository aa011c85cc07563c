"""On from the plan that was chosen: its strategies chosen anew at its sizes, and their shares dealt out anew.

The planner's rounds begin from guessed shares and follow the step in which nothing overlaps. What the judge takes, the
shortest step as run, is often none of theirs but one of the data-parallel family, or a choice for collectives in their
plainest form, and no round ever began from its sizes. So one more is made from there,

    sizes' = those of the plan; groups that it does not use are dealt out like its batch
    MILP at sizes', for collectives as they are and in their plainest form; LP for the shares of either choice

and if that is shorter as run, the plan is it; and again, while a round gains more than ``judge.TIE``.
A MILP sees a group at one vector of shares. By one that is good for storing no product is ever cut, and a group that no
strategy uses has kept the guess of its start: hence like the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hap.placement import GroupSizes
from hap.search.found import Found
from hap.search.judge import LEANEST, TIE, are_alike, as_run_s, inputs_dealt_out
from hap.search.problem import Problem
from hap.search.refine import reshare
from hap.search.strategies import BEHIND, Chooser

if TYPE_CHECKING:
    from hap.search.planner import Search


def onward(chooser: Chooser, found: Found, seconds: float) -> tuple[Found, float]:
    """``found``, whose step as run is ``seconds``, or what is found from there and is shorter, and its step. Inputs are
    dealt out where that costs next to nothing."""
    best, best_s = found, seconds
    while True:
        reached = [(as_run_s(chooser, f), i, f) for i, f in enumerate(_from_here(chooser, best, best_s))]
        shorter_s, _, shorter = min(reached, default=(best_s, 0, best))
        if shorter_s >= best_s:
            break
        gained = shorter_s < best_s * (1 - TIE)
        best, best_s = shorter, shorter_s
        if not gained:
            break
    best, best_s = inputs_dealt_out(chooser, best, best_s)
    return (best, best_s) if best_s < seconds else (found, seconds)


def or_onward(search: Search, best: Found, overlapped_s: float | None) -> tuple[Found, float | None]:
    """The same of a quick search, which is asked first whether to repeat calls: on from a plan that does, no round is
    made."""
    if not search.at_a_glance or overlapped_s is None or best.recomputed:
        return best, overlapped_s
    return onward(search.chooser, best, overlapped_s)


def _from_here(chooser: Chooser, found: Found, seconds: float) -> Iterator[Found]:
    """What one round finds that fits, differs and may be shorter than ``seconds``; of a choice the better of its own
    shares and those dealt out anew."""
    sizes = like_the_batch(chooser.problem, found)
    for plain in (False, True):
        chosen = chooser.strategies(sizes, found.regather, found.left_out, best=found, plain=plain)
        if chosen is None or chosen.cost > (0, found.cost[1] * BEHIND):
            continue
        better = min(chosen, reshare(chooser.problem, chosen), key=lambda f: f.cost)
        same = are_alike(better, found) and not plain  # the other form's ways differ in what they leave to overlap
        if not same and max(better.evaluation.compute_s) * LEANEST < seconds:
            yield better


def like_the_batch(problem: Problem, found: Found) -> GroupSizes:
    """The sizes of ``found``; groups that it does not use by the mean shares of those that its inputs are split in, or
    by speed if none is."""
    used = set(found.groups)
    known = [found.sizes[name] for name in found.sizes if name in used and name in problem.of_inputs]
    ratios = [np.array(sizes, dtype=np.float64) / sum(sizes) for sizes in known] or [1.0 / problem.whole_s]
    shares = tuple(np.mean(ratios, axis=0).tolist())
    free = problem.round({}, shares, shares)
    return {name: sizes if name in used else free[name] for name, sizes in found.sizes.items()}
