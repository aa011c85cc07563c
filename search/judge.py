"""The step of a plan's program as it is run by default, collectives bundled and beside compute; the plan with the best.

``evaluate`` adds a step up with nothing overlapped. A program that went through the passes does better, and not every
plan gains alike: an all-reduce per gradient, bundled and sent while the backward pass goes on, is nearly free on a
fast link, while a parameter that the first layer needs is waited for. So the planner's candidates are compared again,
each lowered, rewritten and played (``played``):

    a call        its node's seconds on every rank; a product that its bias was folded into is the product
    a conversion  packing and joining are compute: the bytes copied, and the calls made (``_CALLS`` for each collective,
                  one for each value, or one for each rank's piece of it, assumed); the wire is one stream for all, in
                  the order of issue
    a bundle      one collective of all its bytes, by the way that is fastest for them

The candidates are those the search has met, what it would choose if collectives had their plainest form only, and the
data-parallel family, which are points of the same space that a bulk-synchronous view passes by: whole or sharded
parameters, each with the batch split by speed and evenly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from hap.cluster import ClusterSpec
from hap.codegen.lowering import draft
from hap.codegen.passes.runner import Pass, run_passes, standard_passes
from hap.codegen.passes.windows import work_of
from hap.codegen.program import Call, Convert, Instruction, Program, Start, Together, Wait
from hap.cost_models.collective import best_decomposition, collective_coefficients, shares
from hap.cost_models.compute import Calls, ComputeTable, Parts
from hap.cost_models.evaluate import update_seconds
from hap.cost_models.fold import Cluster
from hap.cost_models.profile import MeasuredDevice
from hap.cost_models.sequence import Local
from hap.cost_models.timeline import Await, Event, Issue, Timeline, play
from hap.fabric import Array
from hap.graph import Graph
from hap.placement import REPLICATE, GroupSizes, Shard
from hap.plan import GroupPlan, Plan, Strategy
from hap.search.assemble import used_groups
from hap.search.found import Found
from hap.search.problem import Problem, chosen
from hap.search.refine import INPUT_TOLERANCE, at_sizes, deal_out_inputs, reshare
from hap.search.starts import EVERYTHING
from hap.search.strategies import Chooser

MOST = 5  # candidates that the search has met, shortest bulk-synchronous step first
LEANEST = 0.95  # of the busiest rank's compute: no program of the same strategies takes less, whatever folds into what
TIE = 0.01  # of the step: no cost model tells apart what lies closer
LIKE = 1e-3  # of the step
FAR = 1.6  # times the shortest bulk-synchronous step: what bundling and overlap do not make up for
_FOLDED = ("hap.addmm.default", "aten.addmm.default")
_CALLS = 10
COPY_EFFICIENCY = 0.8  # of memory bandwidth, as in ``hap.cost_models.collective``


def default_passes(program: Program, cluster: ClusterSpec | None) -> tuple[Pass, ...]:
    """The passes that ``hap.compile`` runs. A bundle goes the way that is fastest on the cluster for its bytes, where
    that is known."""

    def choose(largest: Convert, nbytes: int) -> str:
        if cluster is None:
            return largest.decomposition
        return best_decomposition(largest.kind, nbytes, largest.source, largest.target, program.sizes, cluster)[0]

    return standard_passes(choose=choose)


def played(graph: Graph, plan: Plan, program: Program, cluster: ClusterSpec, *, off: Sequence[str] = ()) -> Timeline:
    """One step of ``program``, which ``lower`` made of ``plan``, after the passes but those named in ``off``."""
    rewritten = run_passes(program, default_passes(program, cluster), off=off).program
    strategies = {node.name: plan.strategy(node.name) for node in graph.nodes}
    optimizer = plan.provenance.optimizer
    events = _Events(graph, strategies, optimizer, rewritten, cluster, program.sizes, Calls(graph))
    return play(events.all(), tuple(d.name for d in cluster.devices))


def finest(chooser: Chooser, best: Found, met: Sequence[Found]) -> tuple[Found, float]:
    """Of ``best``, what else the search ``met`` and the data-parallel family: the one whose program has the shortest
    step as it is run, and that step in seconds; of those as good as equal the one with the fewest conversions, then the
    one with the shorter bulk-synchronous step. Its inputs are dealt out where that costs next to nothing."""
    watch = _Stopwatch(chooser)
    found = {_key(f): f for f in (best, *sorted(met, key=lambda f: f.cost)) if f.fits}
    watch.look(f for f in list(found.values())[: 1 + MOST] if f.cost[1] <= FAR * best.cost[1])
    watch.look(f for f in _plainly(chooser, met[0] if met else best) if f.fits)
    watch.look(f for f in _family(chooser, watch.least_s) if f.fits)
    near = [t for t in watch.timed if t.seconds <= watch.least_s * (1 + TIE)]
    first = min(near, key=lambda t: (len(t.found.evaluation.conversions), t.seconds, t.found.cost))
    dealt = deal_out_inputs(chooser, first.found)
    if dealt is not first.found and (dealt_s := watch.seconds(dealt)) <= first.seconds * (1 + INPUT_TOLERANCE):
        return dealt, dealt_s
    return first.found, first.seconds


def as_run_s(chooser: Chooser, found: Found) -> float:
    """The step of the plan's program as it is run."""
    return _Stopwatch(chooser).seconds(found)


def first_look_s(chooser: Chooser, found: Found) -> float:
    """The shortest step, as it is run, of ``found`` and of what of the data-parallel family is found quickly."""
    watch = _Stopwatch(chooser)
    watch.look([found])
    watch.look(f for f in _family(chooser, watch.least_s, throughout=(True,)) if f.fits)
    return watch.least_s


def _key(found: Found) -> tuple[object, ...]:
    return chosen(found.strategies), tuple(found.sizes.items()), found.regather


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
        for f in sorted(different, key=lambda f: max(f.evaluation.compute_s)):
            if max(f.evaluation.compute_s) * LEANEST > self.least_s:
                break
            self.chooser.check()
            self.timed.append(_Timed(f, self.seconds(f)))

    def seconds(self, found: Found) -> float:
        """As ``played`` of the plan's program has it."""
        known = self.chooser.played
        if (key := _key(found)) not in known:
            known[key] = played_s(self.problem, found)
        return known[key]


def played_s(problem: Problem, found: Found) -> float:
    """The step in seconds of the plan's program as it is run: as ``played`` has it, to rounding, and quicker."""
    graph, evaluator = problem.choices.graph, problem.facts.evaluator
    sizes = {name: tuple(found.sizes[name]) for name in used_groups(found.strategies.values())}
    groups = {n: GroupPlan.model_construct(n=sum(s), label=n, sizes=s) for n, s in sizes.items()}
    ways = [(c.need, c.decomposition) for c in found.evaluation.conversions]
    program = draft(graph, groups, problem.world_size, found.strategies, ways, problem.drafted)
    program = replace(program, recomputed=found.repeated)

    def choose(largest: Convert, nbytes: int) -> str:
        return evaluator.forms.best(largest.kind, nbytes, largest.source, largest.target, sizes)[0]

    rewritten = run_passes(program, standard_passes(choose=choose), verify=False).program
    folded = evaluator.folds.find(dict.fromkeys(sizes.values()))
    cluster, here = (problem.cluster, sizes) if folded is None else (folded, folded.take(sizes))
    events = _Events(graph, found.strategies, problem.optimizer, rewritten, cluster, here, problem.facts.calls)
    return _step_s(events.all(), cluster.world_size)


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


def _step_s(events: Iterable[Event], width: int) -> float:
    """``play(events).step_s``, and nothing else of it: the clocks alone, of all ranks at once."""
    free, wire, ends = np.zeros(width), 0.0, dict[str, float]()
    for event in events:
        match event:
            case Local():
                free = free + event.seconds
            case Issue():
                wire = ends[event.handle] = max(float(free.max()), wire) + event.seconds
            case Await(handle=handle):
                free = np.maximum(free, ends.pop(handle))
    return max(float(free.max(initial=0.0)), wire)


def _plainly(chooser: Chooser, first: Found) -> Iterator[Found]:
    """The strategies at the sizes of ``first`` for collectives in their plainest form, with their shares dealt out
    anew. Bundled and beside compute, collectives gain little from other forms, and a choice that counts on them may
    lose."""
    found = chooser.strategies(first.sizes, first.regather, first.left_out, plain=True)
    if found is not None:
        yield _dealt_out(chooser, found)


def _dealt_out(chooser: Chooser, found: Found) -> Found:
    """Its shares dealt out anew; of the same plan once."""
    known = chooser.dealt_out
    if (key := _key(found)) not in known:
        known[key] = reshare(chooser.problem, found)
    return known[key]


def _family(chooser: Chooser, least_s: float, throughout: Sequence[bool] = (False, True)) -> Iterator[Found]:
    """The batch split by speed and evenly, and parameters whole (data parallel) or sharded (ZeRO): where pins allow.
    Each as the solver would have it, and with all calls on the batch's pieces that can be: a solver that counts every
    collective's latency and no overlap joins the ranks in mid-step to save gradients that a bundle takes along. No
    split with which some rank computes for longer than ``least_s``, whatever the strategies. ``throughout``: with all
    calls that can be, or without asking for that, or first the one and then the other."""
    problem = chooser.problem
    batch = next((g for n in problem.choices.graph.sources("input") for g in _first_dims(problem, n.name)), None)
    if batch is None or problem.world_size == 1:
        return
    speeds = (1.0 / problem.whole_s, np.ones(problem.world_size))
    vectors = dict.fromkeys(tuple(np.round(s / s.sum(), 12).tolist()) for s in speeds)
    split = [v for v in vectors if float((problem.whole_s * v).max()) * EVERYTHING <= least_s]
    dealt_out: set[tuple[int, ...]] = set()
    for sharded, every_call in itertools.product((False, True), throughout):
        forced = _forced(problem, batch, sharded, every_call)
        found: Found | None = None
        for vector in split:
            sizes = problem.round({}, vector, vector)
            if every_call and found is not None:  # little is left to choose, and that hardly depends on sizes
                found = at_sizes(problem, found, sizes)
            else:
                found = chooser.strategies(sizes, False, (), forced=forced)
            if found is None:
                continue
            yield found
            if (key := chosen(found.strategies)) not in dealt_out:
                dealt_out.add(key)
                yield _dealt_out(chooser, found)


def _forced(problem: Problem, batch: str, sharded: bool, throughout: bool) -> dict[int, tuple[int, ...]]:
    """Class of a parameter or an input, ``throughout`` of a call, too -> the options that the family leaves it."""
    found: dict[int, tuple[int, ...]] = {}
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


@dataclass(frozen=True)
class _Wire:
    """One collective: seconds on the wire, and of packing and joining on every rank (N,)."""

    seconds: float
    packing: Array


@dataclass
class _Events:
    """A program's instructions as events."""

    graph: Graph
    strategies: Mapping[str, Strategy]
    optimizer: str
    program: Program
    cluster: Cluster
    sizes: GroupSizes
    calls: Calls
    _known: dict[tuple[object, ...], _Wire] = field(default_factory=dict)

    def all(self) -> Iterator[Event]:
        calls = self._call_seconds()
        around = [d.kind.step_s * d.factor if isinstance(d, MeasuredDevice) else 0.0 for d in self.cluster.devices]
        yield Local("step", "forward", np.array(around))
        for phase, part in (("forward", self.program.forward), ("backward", self.program.backward)):
            for number, instruction in enumerate(part):
                yield from self._instruction(instruction, f"{phase} {number}", phase, calls)
        update = update_seconds(self.graph, self.strategies, self.sizes, self.cluster, self.optimizer)
        yield Local("optimizer", "update", update)

    def _instruction(
        self, instruction: Instruction, place: str, phase: str, calls: Mapping[str, Array]
    ) -> Iterator[Event]:
        match instruction:
            case Call():
                name = self._product(instruction) if instruction.op in _FOLDED else self._node(instruction)
                if name in calls:
                    yield Local(name, phase, calls[name])
            case Convert(kind="slice"):
                yield Local(
                    f"slice {instruction.output}", "slice", self._wire(Together((instruction,), "local")).packing
                )
            case Convert() | Together():
                work = work_of(instruction)
                assert work is not None
                yield from self._start(place, work)
                yield from self._wait(place, work)
            case Start(handle=handle, work=work):
                yield from self._start(handle, work)
            case Wait(handle=handle, work=work):
                yield from self._wait(handle, work)

    def _node(self, call: Call) -> str:
        return next(self.program.held[name].value.node for name in call.outputs if name is not None)

    def _product(self, call: Call) -> str:
        """The node of the product that went into ``call``: the last one before its own."""
        node = self.graph.by_name[self._node(call)]
        while node.op != "aten.mm.default":
            node = self.graph.by_name[node.inputs[0].node]
        return node.name

    def _start(self, handle: str, work: Together) -> Iterator[Event]:
        found = self._wire(work)
        yield Local(f"pack {handle}", work.kind, found.packing / 2)
        yield Issue(handle, ", ".join(work.outputs), work.kind, found.seconds)

    def _wait(self, handle: str, work: Together) -> Iterator[Event]:
        yield Await(handle)
        yield Local(f"join {handle}", work.kind, self._wire(work).packing / 2)

    def _wire(self, work: Together) -> _Wire:
        nbytes = [self.program.held[m.input].meta.nbytes for m in work.members]
        largest = max(range(len(nbytes)), key=nbytes.__getitem__)
        source, target = work.members[largest].source, work.members[largest].target
        key = (work.kind, work.decomposition, len(nbytes), sum(nbytes), source, target)
        if key not in self._known:
            sizes, n, ranks = self.sizes, self.cluster.world_size, self.cluster.fabric.world_size
            form = collective_coefficients(
                work.kind, work.decomposition, sum(nbytes), source, target, self.cluster, sizes=sizes
            )
            rho, sigma = shares(source, sizes, n), shares(target, sizes, n)
            packing, seconds = np.zeros(n), form.constant_s
            for stage in form.stages:
                if stage.in_memory:
                    packing = packing + stage.rows(rho, sigma)
                else:
                    seconds += stage.seconds(rho, sigma)
            if work.kind == "all_reduce" and ranks > 1:
                bandwidth = np.array([d.memory_bandwidth_bytes_per_s for d in self.cluster.devices])
                packing = packing + 2 * sum(nbytes) / (COPY_EFFICIENCY * bandwidth)
            if work.kind != "slice" and ranks > 1:
                calls = _CALLS + len(nbytes) * (1 if work.kind == "all_reduce" else ranks)
                packing = packing + calls * np.array([d.launch_s for d in self.cluster.devices])
            self._known[key] = _Wire(seconds, packing)
        return self._known[key]

    def _call_seconds(self) -> dict[str, Array]:
        """Node -> seconds on every rank (N,), where it takes any. Calls that are equal but for their names once."""
        table, rows, known = ComputeTable(self.cluster.devices), dict[int, int](), list[Parts]()
        calls = [node.name for node in self.graph.nodes if not node.is_source]
        kinds = [self.calls.kind(name, self.strategies[name], measured=table.is_measured) for name in calls]
        for name, kind in zip(calls, kinds, strict=True):
            if kind not in rows:
                rows[kind] = len(rows)
                known.append(self.calls.parts(name, self.strategies[name]))
        if not known:
            return {}
        atoms = {group: np.array(s, dtype=np.float64) for group, s in self.sizes.items()}
        ones = np.ones(self.cluster.world_size)
        shares = np.array([ones if p.group is None else atoms[p.group] / p.n for p in known])
        seconds = table.of_many(known, shares)
        busy = {kind: seconds[row] for kind, row in rows.items() if seconds[row].any()}
        return {name: busy[kind] for name, kind in zip(calls, kinds, strict=True) if kind in busy}
