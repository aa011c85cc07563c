"""Who stores how much of what lies in shards, by the step as run.

The groups that inputs are split in say who works; all others, mostly, only where parameters, their gradients and the
optimizer's state lie. Their shares come from a linear program that adds gathers and sums up with nothing overlapped, so
they are those that are gathered soonest, even ones of alike links. As run, gathers come beside the forward pass and
sums beside the backward pass, and what is left are the update and the packing, which every device does for what it
stores: a slow one as long as a fast one should not. So these are played, too, each for all such groups at once:

    the shares of the batch;  shares in proportion to speed;  even ones

and the shortest is taken if it fits. Strategies stay, so nothing is drafted anew, and one takes little.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hap.fabric import Array
from hap.search.changed import Change
from hap.search.found import Found
from hap.search.problem import Problem
from hap.search.rounding import round_shares
from hap.search.sliding import SAME
from hap.search.tempo import played_s

if TYPE_CHECKING:
    from hap.search.planner import Search


def or_stored(search: Search, best: Found, overlapped_s: float | None) -> tuple[Found, float | None]:
    """``best``, or if it is shorter as run, the same with other shares of what inputs are not split in."""
    problem, found, found_s = search.problem, best, overlapped_s
    free = [name for name in best.groups if name not in problem.of_inputs and name not in problem.fixed]
    if found_s is None or not search.limits.mixtures or not free:
        return best, overlapped_s
    for shares in _shares(problem, best):
        dealt = {name: round_shares(shares.tolist(), problem.choices.groups[name].n) for name in free}
        if all(dealt[name] == tuple(best.sizes[name]) for name in free):
            continue
        search.progress.say("asking who should store how much")
        search.progress.check()
        tried = Change(problem, best, best.strategies, {**best.sizes, **dealt})
        if (tried_s := played_s(problem, tried)) < found_s * (1 - SAME) and tried.found.fits:
            found, found_s = tried.found, tried_s
    return found, found_s


def _shares(problem: Problem, best: Found) -> Iterator[Array]:
    """Those of ranks (N,) that are tried; nothing for a rank that was denied any."""
    allowed = np.array([float(rank not in best.left_out) for rank in range(problem.world_size)])
    batch = next((best.sizes[name] for name in best.groups if name in problem.of_inputs), None)
    if batch is not None:
        yield np.array(batch, dtype=np.float64) / sum(batch)
    for weights in (allowed / problem.whole_s, allowed):
        yield weights / weights.sum()
