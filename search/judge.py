"""The step of a plan's program as it is run by default, collectives bundled and beside compute; the plan with the best.

``evaluate`` adds a step up with nothing overlapped. A program that went through the passes does better, and not every
plan gains alike: an all-reduce per gradient, bundled and sent while the backward pass goes on, is nearly free on a
fast link, while a parameter that the first layer needs is waited for. So the planner's candidates are compared again,
each lowered, rewritten and played (``score``); of the same strategies a program is drafted and rewritten once.

The candidates are those the search has met, what it would choose if collectives had their plainest form only, and
points of the same space that a bulk-synchronous view, or a start from other shares, passes by: the data-parallel
family, whole or sharded parameters with the batch split by speed and evenly, and all calls on its pieces; either with
calls as the solver would have them; of a small model everything on every rank. Of a small graph all of them, and more
beginnings, are kept for ``runners_up``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np

from hap.cluster import ClusterSpec
from hap.codegen.accumulate import find_accumulation
from hap.codegen.passes.runner import Pass, run_passes, standard_passes
from hap.codegen.program import Convert, Program
from hap.cost_models.collective import best_decomposition
from hap.cost_models.compute import Calls, ComputeTable
from hap.cost_models.evaluate import update_seconds
from hap.cost_models.timeline import Event, Timeline, play
from hap.fabric import Array
from hap.graph import Graph
from hap.placement import REPLICATE, Shard
from hap.plan import Plan
from hap.rules.choices import replicated
from hap.search.found import Found
from hap.search.limits import SMALL
from hap.search.problem import Problem, chosen
from hap.search.refine import INPUT_TOLERANCE, at_sizes, deal_out_inputs, reshare
from hap.search.score import Times, adding_seconds, score_of
from hap.search.starts import EVERYTHING, Start, find_starts, is_hopeless
from hap.search.strategies import Chooser
from hap.search.tempo import played_s, program_key

MOST = 5  # candidates that the search has met, shortest bulk-synchronous step first
LEANEST = 0.95  # of the busiest rank's compute: no program of the same strategies takes less, whatever folds into what
TIE = 0.01  # of the step: no cost model tells apart what lies closer
LIKE = 1e-3  # of the step
FAR = 1.6  # times the shortest bulk-synchronous step: what bundling and overlap do not make up for


def default_passes(program: Program, cluster: ClusterSpec | None) -> tuple[Pass, ...]:
    """The passes that ``hap.compile`` runs. A bundle goes the way that is fastest on the cluster for its bytes, where
    that is known."""

    def choose(largest: Convert, nbytes: int) -> str:
        if cluster is None:
            return largest.decomposition
        return best_decomposition(largest.kind, nbytes, largest.source, largest.target, program.sizes, cluster)[0]

    return standard_passes(choose=choose)


def played(graph: Graph, plan: Plan, program: Program, cluster: ClusterSpec, *, off: Sequence[str] = ()) -> Timeline:
    """One step of ``program``, which ``lower`` made of ``plan``, after the passes but those named in ``off``; of a step
    of several batches the last one's part, with the update, and what is deferred to it."""
    return play(played_events(graph, plan, program, cluster, off=off), tuple(d.name for d in cluster.devices))


def played_events(
    graph: Graph, plan: Plan, program: Program, cluster: ClusterSpec, *, off: Sequence[str] = ()
) -> Iterator[Event]:
    """What happens in that step, in order."""
    rewritten = run_passes(program, default_passes(program, cluster), off=off).program
    return _events(graph, plan, rewritten, cluster, _update_s(graph, plan, cluster))


def batches_events(
    graph: Graph, plan: Plan, program: Program, cluster: ClusterSpec
) -> tuple[list[Event], list[Event] | None]:
    """What happens in a step's last batch and, if there are such, in one before it, with what it takes to add up."""
    rewritten = run_passes(program, default_passes(program, cluster), verify=False).program
    update_s = _update_s(graph, plan, cluster)
    if plan.gradient_accumulation_steps == 1:
        return list(_events(graph, plan, rewritten, cluster, update_s)), None
    first, held = find_accumulation(rewritten).first, rewritten.held
    before = replace(rewritten, backward=first.instructions, gradients=first.gradients)
    local = tuple((held[n].meta.nbytes, held[n].placement) for n in first.local)
    adding_s = adding_seconds(local, cluster, program.sizes)
    last = _events(graph, plan, rewritten, cluster, adding_s + update_s)
    return list(last), list(_events(graph, plan, before, cluster, adding_s))


def _update_s(graph: Graph, plan: Plan, cluster: ClusterSpec) -> Array:
    strategies = {node.name: plan.strategy(node.name) for node in graph.nodes}
    return update_seconds(graph, strategies, plan.sizes, cluster, plan.provenance.optimizer)


def _events(graph: Graph, plan: Plan, rewritten: Program, cluster: ClusterSpec, ending_s: Array) -> Iterator[Event]:
    strategies = {node.name: plan.strategy(node.name) for node in graph.nodes}
    score = score_of(rewritten, graph, strategies, Calls(graph), measured=ComputeTable(cluster.devices).is_measured)
    times = Times.of(score, [w.decomposition for w in score.works], cluster, rewritten.sizes, ending_s)
    return score.events(times)


def finest(chooser: Chooser, best: Found, met: Sequence[Found]) -> tuple[Found, float]:
    """Of ``best``, what else the search ``met`` and the other candidates: the one whose program has the shortest step
    as it is run, and that step in seconds; of those as good as equal the one with the fewest conversions, then the
    one with the shorter bulk-synchronous step. Its inputs are dealt out where that costs next to nothing."""
    watch = _Stopwatch(chooser)
    found = {_key(f): f for f in (best, *sorted(met, key=lambda f: f.cost)) if f.fits}
    watch.look(f for f in list(found.values())[: 1 + MOST] if f.cost[1] <= FAR * best.cost[1])
    watch.look(f for f in _plainly(chooser, met[0] if met else best, best) if f.fits)
    least_s = watch.least_s
    family = (f for sharded in (False, True) for f in _family(chooser, least_s, sharded=sharded))
    is_small = len(chooser.problem.choices.graph.nodes) <= SMALL
    free = (f for sharded in ((True, False) if is_small else (True,)) for f in _calls_free(chooser, sharded=sharded))
    watch.look(f for f in (*family, *free) if f.fits)
    watch.look(f for f in _everywhere(chooser, watch.least_s) if f.fits)
    near = [t for t in watch.timed if t.seconds <= watch.least_s * (1 + TIE)]
    first = min(near, key=lambda t: (len(t.found.evaluation.conversions), t.seconds, t.found.cost))
    if is_small:
        watch.look(f for f in _beginnings(chooser, watch.least_s) if f.fits)
        chooser.compared = [(t.seconds, t.found) for t in watch.timed]
    return inputs_dealt_out(chooser, *first)


def inputs_dealt_out(chooser: Chooser, found: Found, seconds: float) -> tuple[Found, float]:
    """``found``, whose step as run is ``seconds``, with its inputs dealt out, where that costs next to nothing."""
    dealt = deal_out_inputs(chooser, found)
    if dealt is not found and (dealt_s := as_run_s(chooser, dealt)) <= seconds * (1 + INPUT_TOLERANCE):
        return dealt, dealt_s
    return found, seconds


def as_run_s(chooser: Chooser, found: Found) -> float:
    """The step of the plan's program as it is run."""
    return _Stopwatch(chooser).seconds(found)


def first_look(chooser: Chooser, found: Found) -> tuple[Found, float]:
    """Of ``found`` and of what of the data-parallel family, and of everything on every rank, is found quickly the one
    with the shortest step as it is run, and that step: parameters in shards only where whole ones do not fit, as they
    take about as long."""
    watch = _Stopwatch(chooser)
    watch.look([found])
    for sharded in (False, True):
        family = [f for f in _family(chooser, watch.least_s, sharded=sharded) if f.fits]
        watch.look(family)
        if family:
            break
    watch.look(f for f in _everywhere(chooser, watch.least_s) if f.fits)
    shortest = min(watch.timed, key=lambda t: t.seconds)
    return shortest.found, shortest.seconds


def _key(found: Found) -> tuple[object, ...]:
    return program_key(found), tuple(found.sizes.items())


class _Timed(NamedTuple):
    found: Found
    seconds: float


@dataclass(eq=False)
class _Stopwatch:
    """The step of one candidate after another."""

    chooser: Chooser
    timed: list[_Timed] = field(default_factory=list)

    @property
    def problem(self) -> Problem:
        return self.chooser.problem

    @property
    def least_s(self) -> float:
        return min((t.seconds for t in self.timed), default=math.inf)

    def look(self, candidates: Iterable[Found]) -> None:
        """Of those with the same strategies only the cheapest, of those as good as the same only the one with the
        fewest conversions, and none that can not be the fastest."""
        programs: dict[object, Found] = {}
        for f in sorted(candidates, key=lambda f: f.cost):
            programs.setdefault((chosen(f.strategies), f.regather), f)
        fewest = sorted(programs.values(), key=lambda f: (len(f.evaluation.conversions), f.cost))
        different: list[Found] = []
        for f in fewest:
            if not any(are_alike(f, other) for other in (*different, *(t.found for t in self.timed))):
                different.append(f)
        for f in sorted(different, key=self._computing_s):
            if self._computing_s(f) * LEANEST > self.least_s:
                break
            self.chooser.check()
            self.timed.append(_Timed(f, self.seconds(f)))

    def _computing_s(self, found: Found) -> float:
        """Of the busiest rank, sums over hosts left out."""
        return max(found.evaluation.compute_s) - self.problem.sums_s(found.strategies)

    def seconds(self, found: Found) -> float:
        """As ``played`` of the plan's program has it."""
        known = self.chooser.played
        if (key := _key(found)) not in known:
            known[key] = played_s(self.problem, found)
        return known[key]


def are_alike(one: Found, other: Found) -> bool:
    """Whether they take so much the same, and the same of everything, that they are not told apart."""
    ours, theirs = one.evaluation, other.evaluation
    nearly = LIKE * theirs.step_s
    return (
        one.regather == other.regather
        and abs(ours.step_s - theirs.step_s) < nearly
        and abs(ours.communication_s - theirs.communication_s) < nearly
        and abs(max(ours.compute_s) - max(theirs.compute_s)) < nearly
    )


def _plainly(chooser: Chooser, first: Found, best: Found) -> Iterator[Found]:
    """The strategies at the sizes of ``first`` for collectives in their plainest form, with their shares dealt out
    anew. Bundled and beside compute, collectives gain little from other forms, and a choice that counts on them may
    lose. Where memory makes it far longer than ``best``, it is not looked for."""
    found = chooser.strategies(first.sizes, first.regather, first.left_out, best=best, plain=True)
    if found is not None:
        yield _dealt_out(chooser, found)


def _dealt_out(chooser: Chooser, found: Found) -> Found:
    """Its shares dealt out anew; of the same plan once."""
    known = chooser.dealt_out
    if (key := _key(found)) not in known:
        known[key] = reshare(chooser.problem, found)
    return known[key]


def _family(chooser: Chooser, least_s: float, *, sharded: bool) -> Iterator[Found]:
    """The batch split by speed and evenly, and parameters whole (data parallel) or ``sharded`` (ZeRO), with all calls
    on the batch's pieces that can be: where pins allow. A solver that counts every collective's latency and no overlap
    joins the ranks in mid-step to save gradients that a bundle takes along. No split with which some rank computes for
    longer than ``least_s``, whatever the strategies."""
    problem, batch = chooser.problem, _batch(chooser.problem)
    if batch is None:
        return
    speeds = (1.0 / problem.whole_s, np.ones(problem.world_size))
    vectors = dict.fromkeys(tuple(np.round(s / s.sum(), 12).tolist()) for s in speeds)
    split = [v for v in vectors if float((problem.whole_s * v).max()) * EVERYTHING <= least_s]
    dealt_out: set[tuple[int, ...]] = set()
    found: Found | None = None
    for vector in split:
        sizes = problem.round({}, vector, vector)
        if found is None:
            forced = _forced(problem, batch, sharded=sharded, throughout=True)
            found = chooser.strategies(sizes, False, (), forced=forced, limited=False)
        else:  # little is left to choose, and that hardly depends on sizes
            found = at_sizes(problem, found, sizes)
        if found is None:
            continue
        yield found
        if (key := chosen(found.strategies)) not in dealt_out:
            dealt_out.add(key)
            yield _dealt_out(chooser, found)


def _calls_free(chooser: Chooser, *, sharded: bool) -> Iterator[Found]:
    """The batch split by speed and parameters in shards, or whole, but calls as the solver would have them, and their
    shares then dealt out anew: a beginning that the search's rounds do not have. Of a mixture of experts on many unlike
    hosts they may miss a much shorter step without it."""
    problem, batch = chooser.problem, _batch(chooser.problem)
    if batch is not None:
        speeds = tuple((1.0 / problem.whole_s / (1.0 / problem.whole_s).sum()).tolist())
        forced = _forced(problem, batch, sharded=sharded, throughout=False)
        found = chooser.strategies(problem.round({}, speeds, speeds), False, (), forced=forced, limited=False)
        if found is not None:
            yield found
            yield _dealt_out(chooser, found)


def _beginnings(chooser: Chooser, least_s: float) -> Iterator[Found]:
    """Of a small graph: parameters of several dims in shards of the first, or of the second, and all else as the solver
    would have it, so that vectors, which hold little and cost a collective each, are mostly whole; and whole parameters
    on a part of the ranks, where these may take less than ``least_s``. At the shares of a start, and with those dealt
    out anew."""
    problem = chooser.problem
    if problem.world_size == 1:
        return
    starts = find_starts(problem)
    wishes: list[tuple[Start, int | None]] = [(starts[0], 0), (starts[0], 1)]  # the dim that is sharded, None: whole
    wishes += [(s, None) for s in starts if s.left_out and not is_hopeless(problem, s, least_s)]
    for start, dim in wishes:
        forced: dict[int, tuple[int, ...]] = {}
        for node in problem.choices.graph.sources("parameter"):
            placed = [s.outputs[0] for s in problem.facts.candidates[node.name]]
            if dim is None:
                options = tuple(i for i, p in enumerate(placed) if p == REPLICATE)
            else:
                options = tuple(i for i, p in enumerate(placed) if isinstance(p, Shard) and p.dim == dim)
            if options and (dim is None or len(node.meta.shape) > 1):
                forced[problem.classes.of[node.name]] = options
        sizes = problem.round({}, *start)
        found = chooser.strategies(sizes, False, start.left_out, forced=forced, limited=False) if forced else None
        if found is not None:
            yield found
            yield _dealt_out(chooser, found)


def _batch(problem: Problem) -> str | None:
    """The group that inputs' first dim can be sharded in; None on one device."""
    if problem.world_size == 1:
        return None
    return next((g for n in problem.choices.graph.sources("input") for g in _first_dims(problem, n.name)), None)


def _everywhere(chooser: Chooser, least_s: float) -> Iterator[Found]:
    """Every call on every rank, where that may take less than ``least_s``: what a small model gains by being dealt out
    it may lose to the launches of its collectives, which only a program that is played shows."""
    problem = chooser.problem
    if problem.world_size == 1 or float(problem.whole_s.max()) * LEANEST > least_s:
        return
    forced: dict[int, tuple[int, ...]] = {}
    for number, alike in enumerate(problem.classes.nodes):
        name = alike.members[0]
        whole = replicated(problem.choices.graph.by_name[name])
        forced[number] = tuple(i for i, s in enumerate(problem.facts.candidates[name]) if s == whole)
    if all(forced.values()):
        even = (1.0 / problem.world_size,) * problem.world_size
        found = chooser.strategies(problem.round({}, even, even), False, (), forced=forced, limited=False)
        if found is not None:
            yield found


def _forced(problem: Problem, batch: str, *, sharded: bool, throughout: bool) -> dict[int, tuple[int, ...]]:
    """Class of a parameter or an input, ``throughout`` of a call, too -> the options that the family leaves it."""
    key = f"family by {batch}, {sharded}, {throughout}"
    if key in problem.facts.found:
        return cast(dict[int, tuple[int, ...]], problem.facts.found[key])
    problem.facts.found[key] = found = dict[int, tuple[int, ...]]()
    for node in problem.choices.graph.nodes:
        options = problem.facts.candidates[node.name]
        if node.op == "parameter":
            fitting = [isinstance(s.outputs[0], Shard) if sharded else s.outputs[0] == REPLICATE for s in options]
        elif node.op == "input" or (throughout and not node.is_source):
            fitting = [any(isinstance(p, Shard) and p.group == batch for p in (*s.inputs, *s.outputs)) for s in options]
        else:
            continue
        if any(fitting):
            found[problem.classes.of[node.name]] = tuple(i for i, fits in enumerate(fitting) if fits)
    return found


def _first_dims(problem: Problem, name: str) -> Iterator[str]:
    """The groups that an input's first dim can be sharded in."""
    for strategy in problem.facts.candidates[name]:
        placement = strategy.outputs[0]
        if isinstance(placement, Shard) and placement.dim == 0:
            yield placement.group
