"""What comes near to the judge's choice, changed last as that is: it may end shorter.

The judge takes the shortest step as run (``judge.finest``), and what is asked next changes that one plan. What it can
change depends on the plan: of one that cuts products between ranks few parameters can be turned, of one that splits the
batch most. So a plan that is some percent behind may lead to a step that is far shorter, and going on from the best
alone never sees it. Here, at the end, the next best that were compared go the same way, each that has other parameters
whole or other ranks left out, as it is and from where its shares lead (``onward``), and the shortest is taken: no plan
is longer for it. Of small graphs, where that takes little: there latencies and bundles decide, and the judge's
candidates lie close together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hap.placement import REPLICATE
from hap.search.found import Found
from hap.search.judge import TIE
from hap.search.onward import onward
from hap.search.problem import Problem

if TYPE_CHECKING:
    from hap.search.planner import Search

NEAR = 1.25  # times the shortest that was compared
MOST, FURTHER = 8, 3  # runners-up, and those of them that are gone on from at their shares


def or_runner_up(search: Search, best: Found, overlapped_s: float | None) -> tuple[Found, float | None]:
    """``best``, or what a runner-up of the judge leads to, if that is shorter as run."""
    compared = sorted(search.chooser.compared, key=lambda one: one[0])  # none of a large graph
    if overlapped_s is None or not compared:
        return best, overlapped_s
    found, found_s = best, overlapped_s
    asked = {_kind(search.problem, best)}
    for seconds, other in compared:
        if seconds > NEAR * compared[0][0] or len(asked) > MOST:
            break
        kind = _kind(search.problem, other)
        if kind in asked or other.recomputed != best.recomputed:
            continue
        asked.add(kind)
        search.progress.say("going on from what comes near")
        ends = [(other, seconds)]
        if len(asked) <= 1 + FURTHER and (further := onward(search.chooser, other, seconds))[0] is not other:
            ends.append(further)
        for end in ends:
            changed, changed_s = search.changed_last(*end)
            if changed_s < found_s * (1 - TIE):
                found, found_s = changed, changed_s
    return found, found_s


def _kind(problem: Problem, found: Found) -> object:
    """What two plans have alike that are changed alike."""
    parameters = problem.choices.graph.sources("parameter")
    whole = tuple(n.name for n in parameters if found.strategies[n.name].outputs[0] == REPLICATE)
    return whole, found.groups, found.left_out
