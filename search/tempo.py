"""How long the program of a candidate takes as it is run: drafted once, rewritten by the passes, played at its sizes.

What ``judge`` has for a finished plan, to rounding, and quicker: of the same strategies a program is drafted and
rewritten once, and only scored anew at other sizes (``score``). Ranks that are alike and hold alike have one clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from hap.codegen.accumulate import find_accumulation
from hap.codegen.lowering import draft
from hap.codegen.passes.runner import Outcome, run_passes, standard_passes
from hap.codegen.program import Program
from hap.cost_models.evaluate import update_seconds
from hap.cost_models.fold import Cluster, FoldedCluster
from hap.cost_models.sequence import ConversionCost
from hap.fabric import Array
from hap.order import Postponed
from hap.placement import GroupSizes, Sizes
from hap.plan import GroupPlan, Strategy
from hap.search.problem import Problem, chosen
from hap.search.score import Apart, Score, Times, Work, score_of

PLACING = "bucket"  # the first pass that places collectives
KEPT = 16  # programs


class Playable(Protocol):
    """What of a plan is played: of one that is judged (``Found``), or not yet (``changed.Change``)."""

    @property
    def strategies(self) -> Mapping[str, Strategy]: ...
    @property
    def sizes(self) -> GroupSizes: ...
    @property
    def groups(self) -> tuple[str, ...]: ...
    @property
    def regather(self) -> bool: ...
    @property
    def kept(self) -> frozenset[str]: ...
    @property
    def repeated(self) -> tuple[str, ...]: ...
    @property
    def postponed(self) -> Postponed: ...
    @property
    def conversions(self) -> tuple[ConversionCost, ...]: ...


def played_s(problem: Problem, found: Playable) -> float:
    """The step in seconds of the plan's program as it is run: as ``played`` has it, to rounding, and quicker."""
    tempo = Tempo(problem, found)
    whole, apart = _scores(problem, found, tempo.sizes)
    if apart is None:
        return whole.step_s(tempo.times(whole, tempo.update_s))
    count, adding_s = problem.facts.batches.count, apart.adding_s(tempo.cluster, tempo.here)
    before_s = apart.score.step_s(tempo.times(apart.score, adding_s))
    return ((count - 1) * before_s + whole.step_s(tempo.times(whole, adding_s + tempo.update_s))) / count


def played_wire_s(problem: Problem, found: Playable) -> float:
    """Seconds of the wire in that step, its collectives bundled: of many small ones far less than they take alone."""
    tempo = Tempo(problem, found)
    whole, apart = _scores(problem, found, tempo.sizes)
    last_s = whole.wire_s(tempo.times(whole, tempo.update_s))
    if apart is None:
        return last_s
    count = problem.facts.batches.count
    before_s = apart.score.wire_s(tempo.times(apart.score, tempo.update_s))
    return ((count - 1) * before_s + last_s) / count


@dataclass(frozen=True, eq=False)
class Tempo:
    """How long what a plan's program does takes: at the plan's ``sizes``, on classes of ranks that are alike where
    there are such (``cluster``, with the sizes ``here``)."""

    problem: Problem
    found: Playable

    @cached_property
    def sizes(self) -> dict[str, Sizes]:
        return {name: tuple(self.found.sizes[name]) for name in self.found.groups}

    @cached_property
    def folded(self) -> FoldedCluster | None:
        return self.problem.facts.evaluator.folds.find(dict.fromkeys(self.sizes.values()))

    @property
    def cluster(self) -> Cluster:
        return self.problem.cluster if self.folded is None else self.folded

    @property
    def here(self) -> GroupSizes:
        return self.sizes if self.folded is None else self.folded.take(self.sizes)

    @cached_property
    def update_s(self) -> Array:
        graph, problem = self.problem.choices.graph, self.problem
        return update_seconds(graph, self.found.strategies, self.here, self.cluster, problem.optimizer)

    @cached_property
    def _ways(self) -> dict[object, str]:
        conversions = self.found.conversions
        return {(c.need.value, c.need.target, c.need.phase): c.decomposition for c in conversions}

    def _way(self, work: Work) -> str:
        if work.need is not None:
            return self._ways[work.need]
        best = self.problem.facts.evaluator.forms.best
        return best(work.kind, work.nbytes, work.source, work.target, self.sizes)[0]

    def times(self, score: Score, ending_s: Array) -> Times:
        return Times.of(score, [self._way(work) for work in score.works], self.cluster, self.here, ending_s)


def _scores(problem: Problem, found: Playable, sizes: GroupSizes) -> tuple[Score, Apart | None]:
    """Of the plan's program, drafted at these sizes of the groups that it uses, and of what batches before a step's
    last run of it, if there are such; of the same strategies once."""
    key = program_key(found)
    if key not in problem.scores:
        graph = problem.choices.graph
        rewritten = _rewritten(problem, found, sizes).program
        measured = problem.facts.compute.is_measured

        def score(program: Program) -> Score:
            return score_of(program, graph, found.strategies, problem.facts.calls.of_the_last, measured=measured)

        apart = None
        if problem.facts.batches.count > 1:
            first, held = find_accumulation(rewritten).first, rewritten.held
            before = replace(rewritten, backward=first.instructions, gradients=first.gradients)
            apart = Apart(score(before), tuple((held[n].meta.nbytes, held[n].placement) for n in first.local))
        problem.scores[key] = score(rewritten), apart
    return problem.scores[key]


def unplaced(problem: Problem, found: Playable, sizes: GroupSizes) -> Program:
    """The plan's program before the passes that place its collectives. Of the last few that were played it is the one
    that was made then, at whatever sizes: collectives may go other ways in it."""
    program = problem.unplaced.get(program_key(found))
    return before_placing(_rewritten(problem, found, sizes)) if program is None else program


def before_placing(outcome: Outcome) -> Program:
    return outcome.stages[outcome.names.index(PLACING)]


def program_key(found: Playable) -> object:
    """What its program depends on, but for sizes."""
    return chosen(found.strategies), found.regather, found.kept, found.repeated, tuple(found.postponed.items())


def _rewritten(problem: Problem, found: Playable, sizes: GroupSizes) -> Outcome:
    outcome = run_passes(drafted(problem, found, sizes), standard_passes(), verify=False)
    problem.unplaced[program_key(found)] = before_placing(outcome)
    for old in list(problem.unplaced)[:-KEPT]:
        del problem.unplaced[old]
    return outcome


def drafted(problem: Problem, found: Playable, sizes: GroupSizes) -> Program:
    """The plan's program before its passes, to be timed."""
    groups = {n: GroupPlan.model_construct(n=sum(s), label=n, sizes=s) for n, s in sizes.items()}
    ways = [(c.need, c.decomposition) for c in found.conversions]
    graph, ranks = problem.choices.graph, problem.world_size
    program = draft(graph, groups, ranks, found.strategies, ways, problem.drafted, found.postponed)
    return replace(program, recomputed=found.repeated)
