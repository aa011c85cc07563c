"""Whether a job would better run without the slowest kinds of devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from hap.cluster import ClusterSpec
from hap.search.limits import HASTY, Limits
from hap.search.problem import Problem
from hap.search.starts import EVERYTHING
from hap.search.subsets import Advice, slowest_kinds, without

WORTH_SAYING = 0.03  # of the step, that devices cost by taking part


def advise(
    problem: Problem, step_s: float, as_run: bool, glance: Callable[[Problem, Limits], float | None]
) -> Advice | None:
    """The best of the clusters without the slowest kinds of devices, if a job would run clearly faster there than in
    the ``step_s`` of the plan for all. ``glance``: the step of what a quick search finds, by the same clock: ``as_run``
    or with nothing overlapped; None where nothing fits."""
    if problem.pins.sizes or problem.pins.ratios is not None or type(problem.cluster) is not ClusterSpec:
        return None
    found: list[tuple[float, tuple[int, ...]]] = []
    for ranks in slowest_kinds(problem.cluster.devices, problem.whole_s.tolist()):
        kept = np.ones(problem.world_size, dtype=bool)
        kept[list(ranks)] = False
        if float(1.0 / (1.0 / problem.whole_s[kept]).sum()) * EVERYTHING > step_s * (1 - WORTH_SAYING):
            break
        alone_s = glance(problem.on(without(problem.cluster, ranks)), HASTY)
        if alone_s is None:
            break
        found.append((alone_s, ranks))
    least_s, ranks = min(found, default=(float("inf"), ()))
    if least_s > step_s * (1 - WORTH_SAYING):
        return None
    kinds = Counter(problem.cluster.devices[r].gpu for r in ranks)
    return Advice(ranks, tuple(kinds.items()), least_s, step_s, as_run)
