"""The least bound of all clusters that a job may be planned for: below every plan on every one of them.

Of each cluster the relaxation's is known, or the one of computing alone while that shows that it is not the least. As
long as the least of them is far below the plan it is raised, by ``masses`` where other strategies would be cheaper only
because exchanges are free, or case by case over the batch's sizes (``cases``). What was raised for one plan is not
raised again for the next: a search asks about what it sees first, and in the end about its plan. ``proofs`` go on with
the cases of whichever cluster has the least.

Where masses are asked about three clusters or more, it is nearly certain that all of them will be needed, and the half
of them that would come last is asked for in a ``second`` process meanwhile, whatever the others come to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hap.cost_models.sequence import ConversionCost
from hap.search.as_run_bound import as_run_bound_s
from hap.search.beside import Beside, Question
from hap.search.cases import BOXES, SHORT_OF, Cases
from hap.search.classes import Candidates
from hap.search.found import Found
from hap.search.masses import Masses
from hap.search.prices import Facts
from hap.search.relaxation import lower_bound, relaxation

if TYPE_CHECKING:
    from hap.search.planner import Search

MOST_NODES = 3_000  # of a graph for which cases are looked at, and all of its clusters
FAR = 0.7  # of the step: a bound that is less is not raised case by case: not the batch's sizes are missing there ...
LOOSE = 0.88  # ... but by masses one that is less than this of it, ...
CHEAPER = 0.02  # ... if other strategies are cheaper by so much of it, relaxed. Heuristics
MANY = 3  # clusters: from so many on, masses are asked about in two processes
BEGUN = 8  # boxes that are looked at while the next glances are made


class Aim(NamedTuple):
    """The plan that bounds are raised for: the number of its cluster, its step, and what it consists of. ``picks``: of
    every node, which of the candidates it has, as strategies take long to be sent."""

    number: int
    step_s: float
    picks: tuple[int, ...]
    conversions: tuple[ConversionCost, ...]

    @classmethod
    def at(cls, number: int, found: Found, candidates: Candidates) -> Aim:
        return cls(number, found.cost[1], found.picks(candidates), found.evaluation.conversions)


class LeastBound:
    """Of searches, by number: of the first ``kinds``, or of all, and of the one that a plan is for. ``second``: where
    another one of them is at work, whose searches are the same."""

    def __init__(self, searches: Sequence[Search], kinds: int | None = None, second: Beside | None = None) -> None:
        self.searches, self.kinds, self.second, self._masses = searches, kinds, second, Masses()
        self._bound: list[Facts] = []  # of which the relaxation is solved
        self._known: dict[int, float] = {}
        self._by_masses: dict[int, float] = {}
        self._enough: dict[int, float] = {}  # of which no more was asked for
        self._asked: dict[int, tuple[Question, float]] = {}  # of the second: for masses, with what is enough
        self._by_cases: dict[int, Cases | None] = {}

    def bound_s(self, number: int) -> float:
        """Of one of them, by the relaxation."""
        if number not in self._known:
            facts = self.searches[number].problem.facts
            self._known[number] = lower_bound(facts, self._bound).seconds
            self._bound.append(facts)
        return self._known[number]

    def learn(self, number: int, bound_s: float) -> None:
        """What was proved elsewhere in the same way."""
        self._known.setdefault(number, bound_s)

    def least_s(self, number: int) -> float:
        """Below all plans of the searches, if the plan is one of this one's."""
        return self._least(self._rough(number))[1]

    def as_run_s(self, number: int) -> float | None:
        """What the plans of one of them take at least as they are run; None where that is not known."""
        facts = self.searches[number].problem.facts
        return as_run_bound_s(facts) if facts.batches.count == 1 and facts.cluster.world_size > 1 else None

    def begin(self, aim: Aim) -> None:
        """What bounds will be raised by first, as far as what was seen first tells, is begun: masses are made ready if
        they are so far below its step that they still will be below a shorter one; or a few cases are looked at."""
        counted = range(len(self.searches))[: self.kinds]
        least, known_s = self._least({n: self._known.get(n, self.searches[n].floor_s) for n in counted})
        if known_s >= (1 - SHORT_OF) * aim.step_s or not _can_be_raised(self.searches[least]):
            return
        is_dear = least == aim.number and known_s < LOOSE * aim.step_s and self._is_dear(aim)
        if known_s < FAR * aim.step_s or is_dear:
            self._masses.begin(self.searches[least].problem.facts)
        else:
            self._split_s(least, known_s, aim.step_s, most=BEGUN)

    def raised_s(self, aim: Aim) -> float:
        """Below all plans of the searches, raised as long as it is far below this plan's step."""
        rough = self._rough(aim.number)
        raised = {n for n in rough if _can_be_raised(self.searches[n])}
        unlike = {n for n in raised if not self._is_massed(n)}  # by masses they may be raised
        coarse = {n for n in raised if self._by_masses.get(n, 0.0) <= self._known.get(n, 0.0)}  # by cases they may
        while True:
            least, known_s = self._least(rough)
            if known_s >= (1 - SHORT_OF) * aim.step_s:
                return known_s
            if least in unlike and known_s < LOOSE * aim.step_s:
                self._share_out({n: rough[n] for n in unlike}, aim)
                unlike.remove(least)
                if least != aim.number or self._is_dear(aim):
                    settled = (rough[n] for n in rough if n != least and n not in unlike and n not in coarse)
                    enough_s = min([(1 - SHORT_OF) * aim.step_s, *settled])  # the least of all will be no more
                    rough[least] = max(known_s, self.massed_s(least, enough_s))
                    if rough[least] > known_s:  # cases, which know nothing of it, would hardly come to more
                        coarse.discard(least)
            elif known_s < FAR * aim.step_s or least not in coarse:
                return known_s
            else:
                coarse.remove(least)
                rough[least] = self._split_s(least, known_s, aim.step_s)

    def _rough(self, number: int) -> dict[int, float]:
        """What is known so far, or of computing alone, of those that count where the plan is for this one."""
        counted = dict.fromkeys([*range(len(self.searches))[: self.kinds], number])
        found = {n: self._known.get(n, self.searches[n].floor_s) for n in counted}
        for n in found:
            cases = self._by_cases.get(n)
            found[n] = max(found[n], self._by_masses.get(n, 0.0), 0.0 if cases is None else cases.bound_s)
        return found

    def _least(self, known: dict[int, float]) -> tuple[int, float]:
        """The number of the least bound, by the relaxation or raised, and that bound."""
        while True:
            least = min(known, key=known.__getitem__)
            if least in self._known:
                return least, known[least]
            known[least] = max(known[least], self.bound_s(least))

    def _share_out(self, unlike: Mapping[int, float], aim: Aim) -> None:
        """The second is asked about the last half of those that masses will be asked about. ``unlike``: what is known
        of all that may be raised so."""
        far = [n for n in unlike if unlike[n] < LOOSE * aim.step_s and n not in self._by_masses]
        if self.second is None or len(far) < MANY:
            return
        wanted = sorted((n for n in far if n != aim.number or self._is_dear(aim)), key=lambda n: (unlike[n], n))
        enough_s = (1 - SHORT_OF) * aim.step_s
        for number in wanted[(len(wanted) + 1) // 2 :]:
            if number not in self._asked:
                self.second.ask("learn", number, self.bound_s(number))
                self._asked[number] = self.second.ask("massed_s", number, enough_s), enough_s

    def massed_s(self, number: int, enough_s: float) -> float:
        """Of one of them, by masses. Of more than ``enough_s`` no more is proved, unless that is asked for later."""
        if number in self._asked:
            assert self.second is not None
            question, self._enough[number] = self._asked.pop(number)
            self._by_masses[number] = self.second.answer(question)
        known_s = self._by_masses.get(number, 0.0)
        if number not in self._by_masses or self._enough[number] <= known_s < enough_s:
            facts, self._enough[number] = self.searches[number].problem.facts, enough_s
            self._by_masses[number] = self._masses.bound_s(facts, max(known_s, self.bound_s(number)), enough_s)
        return self._by_masses[number]

    def _is_massed(self, number: int) -> bool:
        """Whether all that masses prove is known."""
        return number in self._by_masses and self._by_masses[number] < self._enough[number]

    def _split_s(self, number: int, known_s: float, step_s: float, *, most: int = BOXES) -> float:
        """By cases of the batch, at most so many: those that were looked at for an earlier plan are gone on with."""
        if known_s >= (1 - SHORT_OF) * step_s:
            return known_s
        if number not in self._by_cases:
            self._by_cases[number] = Cases.of(self.searches[number].problem.facts, known_s, alone=True)
        cases = self._by_cases[number]
        return known_s if cases is None else max(known_s, cases.raised_s(step_s, most=most))

    def proofs(self, aim: Aim, most: int) -> Iterator[float]:
        """Raised for this plan, then by all that masses prove, and then after each of at most so many boxes of the
        batch's and other groups' sizes, until it is near the plan's step, or no box is left."""
        yield self.raised_s(aim)
        for number in self._by_masses:
            self.massed_s(number, float("inf"))
        known, cases = self._rough(aim.number), dict[int, Cases | None]()
        yield self._least(known)[1]
        for _ in range(most):
            least, known_s = self._least(known)
            if known_s >= (1 - SHORT_OF) * aim.step_s:
                return
            if least not in cases:
                cases[least] = Cases.of(self.searches[least].problem.facts, self.bound_s(least), alone=False)
            if (own := cases[least]) is None or not own.step(aim.step_s):
                return
            known[least] = max(known_s, own.bound_s)
            yield self._least(known)[1]

    def _is_dear(self, aim: Aim) -> bool:
        """Whether other strategies would be much cheaper than those of the plan, relaxed. If not, what the relaxation
        lets be free hardly matters."""
        facts = self.searches[aim.number].problem.facts
        relaxed_s = relaxation(facts).of_plan_s(aim.picks, aim.conversions)
        return relaxed_s - self.bound_s(aim.number) >= CHEAPER * aim.step_s


def _can_be_raised(search: Search) -> bool:
    """Masses and cases know of steps of one batch."""
    problem = search.problem
    return len(problem.choices.graph.nodes) <= MOST_NODES and problem.facts.batches.count == 1
