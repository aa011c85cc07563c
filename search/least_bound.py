"""The least bound of all clusters that a job may be planned for: below every plan on every one of them.

Of each cluster the relaxation's is known, or the one of computing alone while that shows that it is not the least. As
long as the least of them is far below the plan it is raised, by ``masses`` where other strategies would be cheaper only
because exchanges are free, or case by case over the batch's sizes (``cases``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hap.search.cases import bound_by_cases
from hap.search.found import Found
from hap.search.masses import Masses
from hap.search.relaxation import relaxation

if TYPE_CHECKING:
    from hap.search.planner import Search

MOST_NODES = 3_000  # of a graph for which cases are looked at, and all of its clusters
NEAR = 0.005  # of the step: a bound as near as that is not raised ...
FAR = 0.8  # ... nor, case by case, one that is less than this of it: not the batch's sizes are missing there ...
LOOSE = 0.88  # ... but by masses one that is less than this of it, ...
CHEAPER = 0.02  # ... if other strategies are cheaper by so much of it, relaxed. Heuristics


class LeastBound:
    """Of searches, by number."""

    def __init__(self, searches: Sequence[Search]) -> None:
        self.searches, self._masses = searches, Masses()

    def seconds(self, found: tuple[int, Found] | None = None) -> float:
        """Below all plans of all searches. With ``found``, the plan and the number of its search, the least bound is
        raised as long as it is the least."""
        rough = {n for n, one in enumerate(self.searches) if "bound_s" not in one.__dict__ and len(self.searches) > 1}
        known = [one.floor_s if n in rough else one.bound_s for n, one in enumerate(self.searches)]
        left = {n for n, one in enumerate(self.searches) if _is_small(one)}
        loose = set(left)
        while True:
            least = min(range(len(known)), key=known.__getitem__)
            if least in rough:
                rough.remove(least)
                known[least] = self.searches[least].bound_s
                continue
            if found is None or known[least] >= (1 - NEAR) * found[1].cost[1]:
                return known[least]
            facts, step_s = self.searches[least].problem.facts, found[1].cost[1]
            if least in loose and known[least] < LOOSE * step_s:
                loose.remove(least)
                if least != found[0] or self._is_dear(*found):
                    known[least] = self._masses.bound_s(facts, known[least])
                    if known[least] >= LOOSE * step_s:  # cases, which know nothing of it, would hardly come to more
                        left.discard(least)
            elif known[least] < FAR * step_s or least not in left:
                return known[least]
            else:
                left.remove(least)
                known[least] = bound_by_cases(facts, known[least], step_s)

    def _is_dear(self, number: int, found: Found) -> bool:
        """Whether other strategies would be much cheaper than those of the plan, relaxed. If not, what the relaxation
        lets be free hardly matters."""
        search, step_s = self.searches[number], found.cost[1]
        relaxed_s = relaxation(search.problem.facts).of_plan_s(found.strategies, found.evaluation.conversions)
        return relaxed_s - search.bound_s >= CHEAPER * step_s


def _is_small(search: Search) -> bool:
    return len(search.problem.choices.graph.nodes) <= MOST_NODES
