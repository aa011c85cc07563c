"""A search that may leave out devices: which of several nested clusters to plan for.

Without its slowest kind of device, its two slowest, ... a cluster leaves other, smaller ones, and between these lie
some without a part of the hosts that have a kind (``subsets``). Each is a problem of its own with a proved bound of
its own. Two clocks tell how long its plans take: the step with nothing overlapped, which bounds are for, and the step
as the plan's program is run (``judge``), by which plans are chosen. A first glance gives a plan of either, but which
step as run a whole search leads to, only it can tell. As run, a step is never shorter than the devices' compute,
perfectly dealt out, rarely shorter than ``AT_BEST`` of that at first glance, where memory does not make it longer, nor
the fastest devices do nearly everything, which fewer devices do better; and rarely than ``OVERLAP`` of the one with
nothing overlapped. What a search changes last (which parameters are whole, readers apart, calls postponed) makes most
of the difference, and can be asked of what a glance found: a closer look, of which the step is rarely shorter than
``LIKELY``. It is taken where that decides, but not by a quick search, which goes by ``NEARLY_AS_GOOD`` instead; one
that probably will decide is offered to the process beside (``closer``) while another plan is made. In which order they
are glanced at and planned, ``nested`` says. Where graphs are too large to be played (``Limits.played``), plans are
compared with nothing overlapped. The least of all bounds is below every plan for all devices, for those without whole
kinds, and for those that the plan is for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hap.errors import PlanError
from hap.search.beside import Beside, Question
from hap.search.cases import SHORT_OF
from hap.search.closer import Helper, Sent
from hap.search.found import Found, best_of
from hap.search.judge import LEANEST
from hap.search.least_bound import MANY, MOST_NODES, Aim, LeastBound
from hap.search.starts import least_compute_s
from hap.search.subsets import LeftOut, beyond, fewer_hosts, kinds_of, paces, slowest_kinds, without

if TYPE_CHECKING:
    from hap.search.planner import Search

OVERLAP = 0.5  # of a step with nothing overlapped, as run: the longer of computing and sending is half of both or more
AT_BEST = 0.85  # of the step as run at first glance, which a whole search leads to; mostly, and by a closer look, ...
LIKELY = 0.95  # ... of it
NEARLY_AS_GOOD = 0.9  # of the step as run at first glance: where a quick search plans for other devices, too
NEARLY = 0.8  # of a step: from so much compute on it is asked whether launches make up for the rest
FEWEST_NODES = 500  # of a graph whose bounds are worth a second process


class Planned(NamedTuple):
    """A plan, the search that found it, and its step as run, where it was played."""

    search: Search
    best: Found
    overlapped_s: float | None

    @property
    def as_run_s(self) -> float:
        """Nothing overlapped, where it was not played: never too little."""
        return self.best.cost[1] if self.overlapped_s is None else self.overlapped_s


@dataclass
class Tried:
    """The searches of one job and what they have come to: that of the whole cluster first, with ``nest`` those of what
    is left without ``ranks``; the first ``kinds`` of them miss whole kinds of devices, the others some hosts of a
    kind, too. ``order``: their numbers, from all devices to the fewest. ``glances``: what fitted at first glance;
    ``seen``: their steps as run, where they were played, and ``looks``, what has them; ``closer``: where these were
    looked at more closely. ``beside``: the process that works on bounds, and ``second``
    the one that it asks for some of them."""

    searches: list[Search]
    ranks: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    order: list[int] = field(default_factory=list)
    glances: dict[int, Found] = field(default_factory=dict)
    seen: dict[int, float] = field(default_factory=dict)
    looks: dict[int, Found] = field(default_factory=dict)
    closer: set[int] = field(default_factory=set)
    offered: tuple[int, Question] | None = None  # a closer look, to the process beside
    planned: dict[int, Planned] = field(default_factory=dict)
    kinds: int = field(init=False)
    least_bound: LeastBound = field(init=False)
    beside: Beside | None = None
    second: Beside | None = None
    _asked: dict[int, Question] = field(default_factory=dict)  # for bounds
    _as_run: dict[int, Question] = field(default_factory=dict)  # for those of steps as run

    def __post_init__(self) -> None:
        self.least_bound, self.kinds = LeastBound(self.searches), len(self.searches)
        self._prove_here()

    def _prove_here(self) -> None:
        """Bounds are asked of ``least_bound``, which proves each of them once. It knows the searches, so they hold it
        weakly: all that they found can then go at once, and takes longer to be found as garbage."""
        for number, search in enumerate(self.searches):
            search.asked = partial(_bound_s, weakref.ref(self.least_bound), number)

    @property
    def is_quick(self) -> bool:
        """Whether glances decide: none is looked at more closely, and no bound is raised."""
        return self.searches[0].limits.at_a_glance

    @property
    def is_raised(self) -> bool:
        """Whether the bound of nested clusters is raised beside the search, and once it ends."""
        return self.is_nested and not self.is_quick

    @property
    def is_large(self) -> bool:
        """Whether a second process is worth it, for bounds."""
        return len(self.searches[0].problem.choices.graph.nodes) >= FEWEST_NODES

    @property
    def is_nested(self) -> bool:
        return len(self.searches) > 1

    @property
    def glanced(self) -> dict[int, float]:
        """Steps with nothing overlapped at first glance."""
        return {n: found.cost[1] for n, found in self.glances.items()}

    def close(self) -> None:
        """Nothing works beside the searches any more. What is asked of their bounds from now on is proved here."""
        try:
            if self.beside is not None:
                for number, question in self._asked.items():
                    known = self.beside.answered(question)
                    if known is not None:
                        self.least_bound.learn(number, known)
                self._prove_here()
                self.beside.close()
        finally:
            if self.second is not None:  # which may be there alone, where the other could not be made
                self.second.close()  # behind the one that asks it

    def prove_beside(self) -> None:
        """From now on bounds are proved in a second process, where that is worth it."""
        nodes = len(self.searches[0].problem.choices.graph.nodes)
        if self.is_large and nodes <= MOST_NODES and self.kinds >= MANY and self.is_raised:
            self.second = Beside(LeastBound(self.searches, self.kinds), apart=True)
        self.least_bound = Helper(self.searches, self.kinds, self.second)
        self.beside = Beside(self.least_bound, apart=self.is_large, check=self.searches[0].progress.check)
        for number in (*range(1, self.kinds), 0):  # what is asked first in plan_nested is asked first here
            self._asked[number] = self.beside.ask("bound_s", number)
            self.searches[number].asked = partial(self.beside.answer, self._asked[number])
        for number in range(self.kinds, len(self.searches)):  # less than the bound, and nobody waits for it
            self.searches[number].asked = partial(_floor_s, weakref.ref(self.least_bound), number)

    def nest(self) -> None:
        """The smaller clusters are tried, too, and bounds proved beside. PlanError where shares are pinned to ranks."""
        search = self.searches[0]
        problem = search.problem
        if problem.pins.sizes or problem.pins.ratios is not None:
            raise PlanError("shares are pinned to ranks; no device can be left out of the plan")
        pace = paces(problem.cluster, problem.whole_s.tolist())
        kinds = list(slowest_kinds(problem.cluster.devices, pace))
        nested = fewer_hosts(problem.cluster.devices, pace)
        for ranks in [*kinds, *(some for some in nested if some not in kinds)]:
            self.ranks.append(ranks)
            self.searches.append(replace(search, problem=problem.on(without(problem.cluster, ranks))))
        self.order = [0, *map(self.ranks.index, nested)]
        self.kinds = 1 + len(kinds)
        self.prove_beside()

    def best(self) -> tuple[int, Planned] | None:
        """The shortest plan and the number of its cluster; where none is ready, the best that fits of all that the
        searches have met, if there is one."""
        if self.planned:
            return min(self.planned.items(), key=lambda item: (item[1].as_run_s, item[0]))
        met = [(n, one, best_of(f for f in one.met if f.fits)) for n, one in enumerate(self.searches)]
        fitting = [(n, Planned(one, found, None)) for n, one, found in met if found is not None]
        return min(fitting, key=lambda item: (item[1].best.cost, item[0]), default=None)

    def left_out(self, number: int) -> LeftOut | None:
        """What a plan of that cluster says of the devices that are not in it."""
        ranks, whole = self.ranks[number], self.searches[0]
        if not ranks:
            return None
        cluster, all_of_them = whole.problem.cluster, self.planned.get(0)
        return LeftOut(
            ranks,
            kinds_of(cluster, ranks),
            devices=tuple(cluster.devices[r].name for r in ranks),
            at_least_s=whole.bound_s,
            with_all_s=self.glanced.get(0) if all_of_them is None else all_of_them.best.cost[1],
            overlapped_s=self.seen.get(0) if all_of_them is None else all_of_them.overlapped_s,
            glanced=all_of_them is None and 0 in self.glanced,
        )

    def foresee(self, number: int, found: Found) -> None:
        """The bounds are raised for this plan of that cluster, as long as nothing better is known."""
        if self.beside is not None and self.is_raised:
            self.beside.ask("raised_s", self._aim(number, found))

    def raised_bound_s(self) -> float:
        """Below all plans on every one of the clusters, as near to the best of them as is looked for."""
        chosen = self.best()
        assert chosen is not None and self.beside is not None, "asked of what is planned, after ``prove_beside``"
        number, planned = chosen
        if self.offered is not None:  # clusters are looked at no more, and the answer would wait
            self.beside.drop(self.offered[1])
        if self.is_raised:
            question = self.beside.ask("raised_s", self._aim(number, planned.best))
        else:
            question = self.beside.ask("least_s", number)
        found: float = self.beside.answer(question)
        return found

    def foresee_as_run(self, number: int) -> None:
        """The bound of steps as they are run is found beside the search for a plan of that cluster."""
        if self.beside is not None:
            self._as_run[number] = self.beside.ask("as_run_s", number)

    def as_run_bound_s(self) -> float | None:
        """No plan for the devices of the best one is run in less; None where that one was not played, or nothing is
        known."""
        chosen = self.best()
        assert chosen is not None, "asked of what is planned"
        number, planned = chosen
        if planned.overlapped_s is None:
            return None
        if self.beside is None or number not in self._as_run:
            return self.least_bound.as_run_s(number)
        found: float | None = self.beside.answer(self._as_run[number])
        return found

    def _aim(self, number: int, found: Found) -> Aim:
        """Where another plan that was met is shorter, no bound can be above that: there its step is near enough."""
        aim = Aim.at(number, found, self.searches[number].problem.facts.candidates)
        return aim._replace(step_s=min(aim.step_s, self.least_step_s() / (1 - SHORT_OF)))

    def least_step_s(self) -> float:
        """The shortest step with nothing overlapped of all plans that were found and fit, on any of the clusters."""
        met = [f.cost[1] for one in self.searches for f in one.met if f.fits]
        return min([*met, *(planned.best.cost[1] for planned in self.planned.values())], default=np.inf)

    def proofs(self) -> Iterator[float]:
        """Bounds below all plans on every one of the clusters, each at least as near to the best plan as the last; none
        where no more is asked for than there is."""
        chosen, most = self.best(), self.searches[0].limits.boxes
        assert chosen is not None, "asked of what is planned"
        number, planned = chosen
        if most:  # from the beginning: what was asked before, and where, is not seen in what is found
            yield from LeastBound(self.searches, self.kinds).proofs(self._aim(number, planned.best), most)

    def compute_s(self, number: int) -> float:
        """What the cluster's devices compute for, perfectly dealt out."""
        return least_compute_s(self.searches[0].problem, self.ranks[number])

    def takes_longer(self, number: int) -> bool:
        """Whether no plan of that cluster is shorter than what was seen at first glance: as run, if that was played. By
        what is asked most quickly."""
        known = [self.known_s(n) for n in {*self.glanced, *self.planned}]
        if not known:
            return False
        least_s = min(known)
        if not self.is_played:
            return self._computes(number, least_s) or self.searches[number].bound_s >= least_s
        return self._computes(number, least_s / LEANEST) or self.searches[number].bound_s >= least_s / OVERLAP

    def _computes(self, number: int, seconds: float) -> bool:
        """Whether that cluster computes for so long, whatever its plan."""
        compute_s = self.compute_s(number)
        return compute_s >= seconds or (compute_s >= NEARLY * seconds and self.searches[number].floor_s >= seconds)

    def glance(self, number: int) -> bool:
        """At one of the clusters; whether anything fits."""
        search = self.searches[number]
        found = search.glance()
        if found is None or not found.fits:
            return False
        if not self.glances and self.is_raised and self.beside is not None and self.is_large:
            self.beside.ask("begin", self._aim(number, found))  # which bounds depend on, wherever that is done
        self.glances[number] = found
        look = search.look(found)
        if look is not None:
            self.looks[number], self.seen[number] = look
        return True

    def may_take_less(self, number: int, than_s: float) -> bool:
        """Whether that cluster's plan may have a shorter step than this, by a closer look where that decides."""
        if self.least_s(number) < than_s:
            return True
        if number not in self.seen or number in self.closer:
            return False
        if self.is_quick:  # planning it takes hardly longer than a closer look
            return max(self.compute_s(number), NEARLY_AS_GOOD * self.looks_s(number)) < than_s
        if max(self.compute_s(number), AT_BEST * self.looks_s(number)) >= than_s:
            return False
        self.closer.add(number)
        self.seen[number] = self._closer_s(number)
        return self.least_s(number) < than_s

    def _closer_s(self, number: int) -> float:
        offered, question = self.offered or (-1, None)
        if offered == number and question is not None and self.beside is not None and self.beside.is_taken(question):
            found: float = self.beside.answer(question)
            return found
        return self.searches[number].look_closer_s(self.looks[number], self.seen[number])

    def offer_closer(self, numbers: Sequence[int], than_s: float) -> None:
        """A closer look is offered at the first of these clusters of which it will decide, if the plan that is made
        meanwhile, whose cluster looks like ``than_s``, is as short as can be expected."""
        beside = self.beside
        if beside is None or self.is_quick:
            return
        for number in numbers:
            is_open = number in self.seen and number not in self.closer and self.least_s(number) >= LIKELY * than_s
            if is_open and max(self.compute_s(number), AT_BEST * self.looks_s(number)) < LIKELY * than_s:
                sent = Sent.of(self.searches[number].problem, self.looks[number])
                question = beside.offer("closer_s", number, sent, self.seen[number])
                self.offered = None if question is None else (number, question)
                return

    def near(self, number: int) -> list[int]:
        """The next smaller cluster and the next larger one, where hosts alone are missing there."""
        beside = (beyond(self.order, range(self.kinds), number, step) for step in (1, -1))
        return [n for n in beside if n is not None]

    @property
    def is_played(self) -> bool:
        """Whether some plan or glance was."""
        return bool(self.seen) or any(one.overlapped_s is not None for one in self.planned.values())

    def known_s(self, number: int) -> float:
        """The shortest step of that cluster that is known, as run where that is."""
        if number in self.planned:
            return self.planned[number].as_run_s
        return self.seen.get(number, self.glanced.get(number, np.inf))

    def looks_s(self, number: int) -> float:
        """The step of a cluster where something fits, as it looks at first glance: as run, if that is known, and as a
        part of that what the shortest one met is of the one that fits. Making calls again, or other shares, may lead
        from a plan that memory made longer to one that is nearly as short."""
        shortest_s = min(f.cost[1] for f in self.searches[number].met)
        return self.known_s(number) * min(1.0, shortest_s / self.glanced[number])

    def is_promising(self, number: int) -> bool:
        """Whether a smaller cluster's step at first glance is shorter than the whole's, by either clock."""
        return self.glanced[number] < self.glanced.get(0, np.inf) or self.known_s(number) < self.known_s(0)

    def least_s(self, number: int) -> float:
        """What that cluster's plan is expected to take at best, as it is run."""
        if number in self.seen:
            likely_s = LIKELY * self.looks_s(number)
        elif (self.glanced or self.planned) and not self.is_played:
            likely_s = self.searches[number].bound_s  # with nothing overlapped no step is shorter
        else:
            likely_s = OVERLAP * (self.glanced[number] if number in self.glanced else self.searches[number].bound_s)
        return max(self.compute_s(number), likely_s)


def _floor_s(held: weakref.ref[LeastBound], number: int) -> float:
    least_bound = held()
    assert least_bound is not None, "asked after the job"
    return least_bound.searches[number].floor_s


def _bound_s(held: weakref.ref[LeastBound], number: int) -> float:
    least_bound = held()
    assert least_bound is not None, "asked after the job"
    return least_bound.bound_s(number)
