"""What is done with one plan: its shares dealt out anew, its inputs dealt out, single atoms moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hap.placement import REPLICATE, GroupSizes, Shard
from hap.search.changed import changed
from hap.search.found import Found, best_of
from hap.search.limits import Limits
from hap.search.problem import Problem
from hap.search.ratios import Shares, best_shares
from hap.search.rounding import improve
from hap.search.starts import Start
from hap.search.strategies import Chooser
from hap.search.tempo import program_key

INPUT_TOLERANCE = 0.02  # of the step: what dealing out the inputs may cost
COARSE = 16  # atoms per rank: below, single ones are moved
WAITING = 0.05  # of the step, in which the busiest rank waits for others: from here on, the other estimate is asked


def reshare(problem: Problem, found: Found) -> Found:
    """The same strategies with the LP's shares, rounded; the LP's groups only, the others follow their mean."""
    key = (program_key(found), tuple(found.sizes.items()), found.left_out)
    if key not in problem.shared:
        problem.shared[key] = _shares(problem, found)
    shares = problem.shared[key]
    if not shares:
        return found
    return at_sizes(problem, found, problem.round(shares, *_means(problem, shares, found.sizes)))


def _shares(problem: Problem, found: Found) -> Mapping[str, Shares] | None:
    assert found.recomputed == problem.recomputed, "the linear program repeats what the problem repeats"
    used = set(found.groups)
    return best_shares(
        problem.facts,
        found.strategies,
        found.sizes,
        found.evaluation,
        bundles=[b for b in problem.bundles if used.intersection(b)],
        fixed=problem.fixed,
        left_out=found.left_out,
        regather=found.regather,
        stages=None if found.kept else problem.prepared(found.strategies, found.regather).stages,
    )


def at_sizes(problem: Problem, found: Found, sizes: GroupSizes) -> Found:
    """The same strategies at other sizes; what is kept, repeated and postponed stays."""
    if found.kept or found.postponed or found.recomputed != problem.recomputed:
        return changed(problem, replace(found, sizes=sizes), {})
    evaluation = problem.judge(found.strategies, sizes, found.regather)
    return replace(found, sizes=sizes, evaluation=evaluation)


def _means(problem: Problem, shares: Mapping[str, Shares], sizes: GroupSizes) -> Start:
    """For the groups that the LP did not see: the mean of those it did, of either kind; else what they had."""
    kinds = []
    for working in (True, False):
        known = [s for name, s in shares.items() if (name in problem.of_inputs) == working]
        known = known or [s for name, s in sizes.items() if (name in problem.of_inputs) == working]
        known = known or list(shares.values())
        ratios = [np.array(s, dtype=np.float64) / sum(s) for s in known]
        kinds.append(tuple(np.mean(ratios, axis=0).tolist()))
    return Start(*kinds)


def without_barriers(chooser: Chooser, best: Found) -> Found:
    """The other estimate's choice at the same sizes, where the judge prefers it."""
    waiting = best.evaluation.stages_s + best.evaluation.update_s - max(best.evaluation.compute_s)
    if not chooser.limits.both_estimates or waiting < WAITING * best.evaluation.step_s:
        return best
    other = chooser.strategies(best.sizes, best.regather, best.left_out, best=best, barriers=False)
    return best_of((best, other)) or best


def deal_out_inputs(chooser: Chooser, best: Found) -> Found:
    """The same with the inputs split like the batch inside, if that costs next to nothing.

    Whole inputs on every rank are sometimes a little faster, as a count over the labels then needs no collective;
    but loading and decoding data, which the cost model leaves out, is then done by every rank.
    """
    forced = _whole_inputs(chooser.problem, best)
    if not forced:
        return best
    chosen = chooser.strategies(best.sizes, best.regather, best.left_out, forced=forced, best=best)
    if chosen is None or chosen.cost > (0, best.cost[1] * (1 + INPUT_TOLERANCE)):
        return best
    return chosen


def _whole_inputs(problem: Problem, best: Found) -> dict[int, tuple[int, ...]]:
    """Class of an input that is whole, though it could be sharded in a group in use -> the options that do so."""
    used, found = best.groups, {}
    for node in problem.choices.graph.sources("input"):
        placements = [s.outputs[0] for s in problem.facts.candidates[node.name]]
        options = tuple(i for i, p in enumerate(placements) if isinstance(p, Shard) and p.group in used)
        if options and best.strategies[node.name].outputs[0] == REPLICATE:
            found[problem.classes.of[node.name]] = options
    return found


def polish(problem: Problem, found: Found, limits: Limits) -> Found:
    """Single atoms moved between ranks, in the groups that are used and free."""
    used = set(found.groups)
    coarse = COARSE * problem.world_size
    bundles = [b for b in problem.bundles if used.intersection(b) and problem.choices.groups[b[0]].n < coarse]
    moves = min(limits.moves, limits.work // (len(problem.choices.graph.nodes) * max(1, problem.world_size // 8)))
    if not bundles or not moves:
        return found

    judged = {tuple(found.sizes.items()): found}

    def at(sizes: GroupSizes) -> Found:
        key = tuple(sizes.items())
        if key not in judged:
            judged[key] = at_sizes(problem, found, sizes)
        return judged[key]

    return at(improve(found.sizes, bundles, lambda sizes: at(sizes).cost, evaluations=moves))
