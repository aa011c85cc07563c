"""``plan_graph``: strategies and sizes together, by alternation from several starts.

One round solves the MILP for the strategies at fixed sizes (``strategies``), then the LP for the shares at fixed
strategies (``refine.reshare``), rounds them (``rounding``), and goes on while the step gets shorter. The rounds start
from shares in proportion to speed, from equal ones, from shares in proportion to memory, and from speed without each
slower kind of device (``starts``). Every candidate is judged by ``Problem.judge``, the one truth; the best that fits in
memory wins, and is then improved by moving single atoms (``refine``). Everything is limited by counts of work
(``limits``), never by the clock, so a plan is the same every time; unless the caller gives a budget of seconds, and the
plan says so where the budget ended the search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from hap.cluster import ClusterSpec
from hap.cost_models.evaluate import Evaluation
from hap.deferral import Batches
from hap.errors import InfeasibleError, PlanError
from hap.garbage import uncollected
from hap.placement import GroupSizes
from hap.plan import Plan
from hap.rules.choices import Choices
from hap.search.advice import advise
from hap.search.apart import or_apart
from hap.search.assemble import assemble_plan
from hap.search.bound import weighted_bound
from hap.search.fewer import Planned, Tried
from hap.search.found import Found, best_of
from hap.search.gathers import all_gathered, or_gathered
from hap.search.infeasible import why_infeasible
from hap.search.judge import as_run_s, finest, first_look
from hap.search.keeping import or_keeping
from hap.search.limits import LIMITS, SMALL, Effort, Limits, Method, check_asked
from hap.search.mixing import or_mixed
from hap.search.nested import plan_nested
from hap.search.onward import onward, or_onward
from hap.search.pins import Pins
from hap.search.postponing import or_postponed
from hap.search.problem import Problem
from hap.search.progress import OutOfTime, Progress
from hap.search.recompute import if_kept, or_repeating, run_or_repeat, thinned
from hap.search.refine import deal_out_inputs, polish, reshare, without_barriers
from hap.search.relaxation import lower_bound
from hap.search.runners_up import or_runner_up
from hap.search.sliding import or_slid
from hap.search.starts import Start, find_starts, is_hopeless
from hap.search.storing import or_stored
from hap.search.strategies import BEHIND, Chooser
from hap.search.subsets import Advice
from hap.search.synthesis import Synthesiser
from hap.units import format_time

__all__ = ["Effort", "Search", "plan_graph"]

CLOSE = 0.005  # of the bound: no further start is made
NEARLY_FULL = 0.9  # of usable memory: from here on, dropping and regathering parameters is tried ...
TOO_FULL = 1.1  # ... and from here on, moving single atoms hardly makes it fit


@uncollected()
def plan_graph(
    choices: Choices,
    cluster: ClusterSpec,
    *,
    optimizer: str = "adamw",
    pins: Pins | None = None,
    model_name: str | None = None,
    effort: Effort = "normal",
    budget_s: float | None = None,
    method: Method = "milp",
    leave_out: bool = False,
    batches: int = 1,
) -> Plan:
    """The best plan found for one training step of ``choices.graph`` on ``cluster``.

    ``method``: strategies are chosen by an integer program, or synthesised by A* (``synthesis``): both are exact at
    given sizes, but for large programs where memory binds (``warm``), so plans cost alike, but A* takes longer.
    ``leave_out``: where a job is faster, as it is run, without the slowest devices, the plan is for a cluster of the
    others (``nested``), and its bound is below all plans with them, without their kinds, and for the others.
    ``batches``: of a step of the optimizer, all but the last under ``no_sync()``; times are then those of one batch,
    the mean over a step's. On a terminal a line tells how far it is, if it takes long. Ctrl-C returns the best plan
    that was found until then, if there is one, and so do ``budget_s`` seconds, looked at between two pieces of work;
    ``provenance.solver`` then says ``stopped``, and names the budget if that was it. InfeasibleError if nothing fits,
    with the numbers; PlanError for a pin or a budget that makes no sense, or if the budget ended before a plan was
    found.
    """
    progress = Progress(budget_s=budget_s)
    check_asked(effort, method, batches)
    problem = Problem.state(choices, cluster, optimizer, pins or Pins(), Batches.of(choices.graph, batches))
    tried = Tried([Search(problem, LIMITS[effort], progress=progress, method=method)])
    advice: Advice | None = None
    stopped: dict[str, Any] = {}
    lower_bound_s: float | None = None
    bound_as_run_s: float | None = None
    try:
        if leave_out:
            tried.nest()
            plan_nested(tried, partial(_plan_whole, tried))
            if tried.is_raised:
                progress.say("raising the lower bound")
        else:
            tried.prove_beside()
            tried.foresee_as_run(0)
            _plan_whole(tried, 0)
            if effort != "quick":
                progress.say("asking whether fewer devices would do")
                search, _, overlapped_s = planned = tried.planned[0]
                as_run = overlapped_s is not None
                advice = advise(search.problem, planned.as_run_s, as_run, partial(search.alone_s, as_run=as_run))
        lower_bound_s = tried.raised_bound_s()
        bound_as_run_s = tried.as_run_bound_s()
        for proved_s in tried.proofs() if batches == 1 else ():  # cases know of one batch
            lower_bound_s = max(proved_s, lower_bound_s or 0.0)
            progress.say(partial(_proved, lower_bound_s, tried.best()))
            progress.check()
    except (KeyboardInterrupt, OutOfTime) as e:
        if tried.best() is None and isinstance(e, OutOfTime):
            raise PlanError(
                f"no plan was found within the budget of {format_time(budget_s or 0.0)}; give more, or no budget"
            ) from None
        if tried.best() is None:
            raise
        stopped = {"stopped": True, **({"budget_s": budget_s} if isinstance(e, OutOfTime) else {})}
    finally:
        tried.close()
        progress.done()
    chosen = tried.best()
    assert chosen is not None, "a search ends with a plan, or raises"
    number, (search, best, overlapped_s) = chosen
    return assemble_plan(
        search.problem.choices,
        search.problem.cluster,
        best.strategies,
        best.sizes,
        best.evaluation,
        optimizer=optimizer,
        model_name=model_name or choices.graph.name,
        lower_bound_s=tried.least_bound.least_s(number) if lower_bound_s is None else lower_bound_s,
        solver={**search.statistics(best), **if_kept(search.problem, best), **_if_shorter(tried, best), **stopped},
        advice=tried.left_out(number) or advice,
        overlapped_s=overlapped_s,
        overlapped_bound_s=bound_as_run_s,
        recomputed=best.recomputed,
        batches=batches,
        postponed=best.postponed,
    )


def _if_shorter(tried: Tried, best: Found) -> dict[str, float]:
    """The shortest step with nothing overlapped that was found, where another plan was chosen by its step as run."""
    least_s = tried.least_step_s()
    return {"least_step_s": least_s} if least_s < best.cost[1] * (1 - CLOSE) else {}


def _proved(bound_s: float, best: tuple[int, Planned] | None) -> str:
    assert best is not None
    return f"raising the lower bound, at most {1 - bound_s / best[1].best.cost[1]:.1%} from the best"


def _plan_whole(tried: Tried, number: int) -> None:
    """From the search of one cluster to its plan. ``tried.planned`` always has the best so far."""
    search, best = run_or_repeat(tried.searches[number])
    tried.planned[number] = Planned(search, best, None)
    overlapped_s = None
    if len(search.problem.choices.graph.nodes) <= search.limits.played:
        search.progress.say("comparing programs as they run")
        if search.at_a_glance:
            best, overlapped_s = first_look(search.chooser, best)
        else:
            best, overlapped_s = onward(search.chooser, *finest(search.chooser, best, search.met))
        tried.planned[number] = Planned(search, best, overlapped_s)
    tried.foresee(number, best)
    for move in (or_repeating, or_onward, or_mixed, or_gathered, or_keeping, or_apart, or_slid, or_postponed):
        search.met.append(best)  # by the clock with nothing overlapped it may be shorter than what takes its place
        best, overlapped_s = move(search, best, overlapped_s)
        tried.planned[number] = Planned(search, best, overlapped_s)
    for again in (or_mixed, or_postponed) if best.postponed else ():  # which are whole was asked of another order
        search.met.append(best)
        before, (best, overlapped_s) = best, again(search, best, overlapped_s)
        tried.planned[number] = Planned(search, best, overlapped_s)
        if best is before:
            break  # the order of these was asked of before
    for move in (or_runner_up, or_stored):
        search.met.append(best)
        best, overlapped_s = move(search, best, overlapped_s)
        tried.planned[number] = Planned(search, best, overlapped_s)


@dataclass
class Search:
    """The state of one search: the problem, and what was asked of it."""

    problem: Problem
    limits: Limits
    rounds: int = 0
    starts: int = 0
    progress: Progress = field(default_factory=Progress)
    method: Method = "milp"
    asked: Callable[[], float] | None = None  # where ``bound_s`` is found beside the search

    def __post_init__(self) -> None:
        kind = Synthesiser if self.method == "astar" else Chooser
        self.chooser = kind(self.problem, self.limits, check=self.progress.check)
        self.met: list[Found] = []
        self._first: tuple[Found | None] | None = None

    @property
    def at_a_glance(self) -> bool:
        """Whether the first look's plan is kept. Not of a small graph, for which others are found at once; and many of
        them are shorter, as latencies count there. Nor of one that is too large to be played: nothing is changed there
        that would make up for a first choice."""
        return self.limits.at_a_glance and SMALL < len(self.problem.choices.graph.nodes) <= self.limits.played

    @cached_property
    def bound_s(self) -> float:
        return lower_bound(self.problem.facts).seconds if self.asked is None else self.asked()

    @cached_property
    def floor_s(self) -> float:
        """Like ``bound_s``, of computing alone: found more quickly."""
        bound, weights = weighted_bound(self.problem.facts)
        return bound.seconds(weights)

    def look(self, found: Found) -> tuple[Found, float] | None:
        """``found``, or what is found as quickly and is shorter as run, and its step as run; None for a graph that is
        too large to be played."""
        if len(self.problem.choices.graph.nodes) > self.limits.played:
            return None
        return all_gathered(self, *first_look(self.chooser, found))

    def look_closer_s(self, found: Found, seconds: float) -> float:
        """The step as run, ``seconds`` so far, once what is changed last is changed in ``found``, too: mostly near what
        a whole search leads to, and found in a part of its time."""
        return self.changed_last(found, seconds)[1]

    def changed_last(self, found: Found, seconds: float) -> tuple[Found, float]:
        """``found``, whose step as run is ``seconds``, once what is changed last is changed; and its step."""
        changed_s: float | None = seconds
        for move in (or_mixed, or_apart, or_postponed):
            found, changed_s = move(self, found, changed_s)
        assert changed_s is not None, "what was played still is"
        return found, changed_s

    def run(self) -> Found:
        """The best plan that fits. InfeasibleError if there is none."""
        starts = find_starts(self.problem)
        best = self.glance()
        if best is not None and best.fits and self.at_a_glance:
            return best
        if best is None or not best.fits:
            best = self._try(starts[:1], best, regather=True)
        regather = best is not None and best.fits and best.regather
        best = self._try(starts[1:], best, regather=regather)
        if best is None or not best.fits:
            best = self._try(starts[1:], best, regather=True)
        elif not regather and _fullness(best.evaluation) > NEARLY_FULL:
            best = self._rounds(best.sizes, best.left_out, best, regather=True)
        if best is not None and best.fits:
            best = deal_out_inputs(self.chooser, without_barriers(self.chooser, best))
        if best is not None and _fullness(best.evaluation) < TOO_FULL:
            best = polish(self.problem, best, self.limits)
        if best is None or not best.fits:
            closest = min((f.evaluation for f in self.met), key=_fullness, default=None)
            raise InfeasibleError(why_infeasible(self.problem.facts, closest, pinned=self.problem.pins != Pins()))
        return best

    def glance(self) -> Found | None:
        """What the first start leads to, whether it fits or not. A search begins with it."""
        if self._first is None:
            starts = find_starts(self.problem)[:1]
            first = self._try(starts, None, regather=False)
            if self.at_a_glance and (first is None or not first.fits):
                first = self._try(starts, first, regather=True)
            self._first = (first,)
        return self._first[0]

    def alone_s(self, problem: Problem, limits: Limits, *, as_run: bool) -> float | None:
        """The step of what a search of its own for another problem finds at first glance, if that fits; nothing is said
        on the terminal."""
        self.progress.check()
        other = Search(problem, limits, progress=Progress(after_s=float("inf"), asked=self.progress.check))
        found = other.glance()
        if found is None or not found.fits:
            return None
        if found.recomputed:  # as the plan that it is compared with
            found = thinned(problem, found)
        return as_run_s(other.chooser, found) if as_run else found.cost[1]

    def _try(self, starts: Sequence[Start], best: Found | None, *, regather: bool) -> Found | None:
        """The best of ``best`` and what the rounds from so many starts find, or from more while nothing fits."""
        for start in starts:
            if best is not None and best.fits:
                if self.starts >= self.limits.starts:
                    break
                if best.cost[1] * (1 - CLOSE) <= self.bound_s:
                    break
                if is_hopeless(self.problem, start, best.cost[1]):
                    continue
            self.starts += 1
            best = self._rounds(self.problem.round({}, *start), start.left_out, best, regather=regather)
        return best

    def _rounds(
        self, sizes: GroupSizes, left_out: tuple[int, ...], best: Found | None, *, regather: bool
    ) -> Found | None:
        """MILP and LP in turn, until neither helps. What does not fit is dealt out anew, too, before the MILP is asked
        for what does. Returns the best of ``best`` and what was met on the way."""
        reached: tuple[float, float] | None = None
        for _ in range(self.limits.rounds):
            self.rounds += 1
            self.progress.say(partial(self._so_far, best))
            chosen = self.chooser.strategies(sizes, regather, left_out, limited=False)
            if chosen is not None and not chosen.fits:
                self.met += [chosen, reshare(self.problem, chosen)]
                best = best_of((best, self.met[-1]))
                chosen = self.chooser.strategies(sizes, regather, left_out, best=best)
            if chosen is None:
                break
            self.met.append(chosen)
            if best is not None and chosen.choice.objective_s > BEHIND * best.choice.objective_s:
                best = best_of((best, chosen))
                break
            reshared = reshare(self.problem, chosen)
            self.met.append(reshared)
            cost = min(chosen.cost, reshared.cost)
            best = best_of((best, chosen, reshared))
            assert best is not None
            behind = cost > (best.cost[0], best.cost[1] * BEHIND)
            if behind or reshared.sizes == sizes or (reached is not None and cost >= reached):
                break
            sizes, reached = reshared.sizes, cost
        return best

    def _so_far(self, best: Found | None) -> str:
        where = f"start {self.starts}, round {self.rounds}"
        if best is None or not best.fits:
            return f"{where}, nothing fits yet"
        gap = f", at most {1 - self.bound_s / best.cost[1]:.1%} from the best"
        return f"{where}, step {format_time(best.cost[1])}{gap}"

    def statistics(self, best: Found) -> dict[str, Any]:
        """What the solver did, in numbers that are the same every time."""
        choice = best.choice
        return {
            "variables": choice.variables,
            "rows": choice.rows,
            "status": choice.status,
            "mip_gap": round(choice.gap, 9),
            "starts": self.starts,
            "rounds": self.rounds,
            "milps": self.chooser.milps,
            "node_classes": len(self.problem.classes.nodes),
            "regather": best.regather,
            **({"kept_parameters": len(best.kept)} if best.kept else {}),
            **({} if self.method == "milp" else {"method": self.method}),
        }


def _fullness(evaluation: Evaluation) -> float:
    """The part of the usable memory that is taken on the rank where most of it is."""
    pairs = zip(evaluation.memory_bytes, evaluation.usable_bytes, strict=True)
    return max(used / usable for used, usable in pairs)
