"""Whether a job would better run without the slowest devices."""

from __future__ import annotations

from collections.abc import Callable

from hap.search.limits import HASTY, Limits
from hap.search.problem import Problem
from hap.search.starts import least_compute_s
from hap.search.subsets import Advice, fewer_hosts, kinds_of, look_beside, paces, slowest_kinds, without

WORTH_SAYING = 0.03  # of the step, that devices cost by taking part


def advise(
    problem: Problem, step_s: float, as_run: bool, glance: Callable[[Problem, Limits], float | None]
) -> Advice | None:
    """The best of the clusters without the slowest kinds of devices, or without some of their hosts alone, if a job
    would run clearly faster there than in the ``step_s`` of the plan for all. ``glance``: the step of what a quick
    search finds, by the same clock: ``as_run`` or with nothing overlapped; None where nothing fits."""
    if problem.pins.sizes or problem.pins.ratios is not None:
        return None
    pace = paces(problem.cluster, problem.whole_s.tolist())
    kinds = list(slowest_kinds(problem.cluster.devices, pace))
    nested = [(), *fewer_hosts(problem.cluster.devices, pace)]
    found: dict[tuple[int, ...], float] = {(): step_s}

    def looked_at(ranks: tuple[int, ...]) -> bool:
        """Whether these may be left out: the others hold the model, and do not compute for too long."""
        if least_compute_s(problem, ranks) > step_s * (1 - WORTH_SAYING):
            return False
        alone_s = glance(problem.on(without(problem.cluster, ranks)), HASTY)
        if alone_s is not None:
            found[ranks] = alone_s
        return alone_s is not None

    def best() -> tuple[int, ...]:
        return min(found, key=lambda ranks: (found[ranks], ranks))

    for ranks in kinds:
        if not looked_at(ranks):
            break
    look_beside(nested, kinds, best, lambda ranks: best() == ranks if ranks in found or looked_at(ranks) else None)
    least_s = found[best()]
    if least_s > step_s * (1 - WORTH_SAYING):
        return None
    return Advice(best(), kinds_of(problem.cluster, best()), least_s, step_s, as_run)
