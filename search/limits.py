"""How much work a search may do. Counts of work and never the clock, so that a plan is the same every time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from hap.errors import PlanError

Effort = Literal["quick", "normal", "thorough"]
Method = Literal["milp", "astar"]  # who chooses the strategies


@dataclass(frozen=True)
class Limits:
    """How much work: starts, rounds per start, branch-and-bound nodes per MILP, evaluations of single moves (and
    those times nodes of the graph), whether the estimate without barriers is asked too, and of how many nodes a graph
    may be for its programs to be lowered and played; how many mixtures of whole parameters and shards are played; how
    many boxes the bound is raised by once the plan is there. ``at_a_glance``: what the first look at a cluster finds is
    kept, but for what a search changes last, unless the graph is small; and no bound is raised."""

    starts: int
    rounds: int
    nodes: int
    moves: int
    work: int
    both_estimates: bool
    played: int
    mixtures: int = 0
    boxes: int = 0
    at_a_glance: bool = False


HASTY = Limits(1, 2, 200, 0, 0, False, 0)  # for what a smaller cluster would do
LIMITS: Mapping[Effort, Limits] = {
    "quick": Limits(1, 2, 200, 0, 0, False, 3_000, 16, at_a_glance=True),
    "normal": Limits(3, 3, 1000, 60, 20_000, True, 10_000, 16),
    "thorough": Limits(3, 3, 1000, 60, 20_000, True, 10_000, 16, boxes=500),
}
SMALL = 500  # nodes of a graph: latencies and bundles decide there, and a search takes little
MIP_GAP = 1e-4  # relative; the judge's own error is far larger


def check_asked(effort: str, method: str, batches: int | str, best: str = "") -> None:
    """PlanError for an effort, a method or a number of batches a step that is none; ``best``: what it may be, too."""
    for name, given, known in (("effort", effort, get_args(Effort)), ("method", method, get_args(Method))):
        if given not in known:
            raise PlanError(f"{name} {given!r} is none of {', '.join(known)}")
    if isinstance(batches, str) and batches == best:
        return
    if not isinstance(batches, int):
        raise PlanError(f"a step has a whole number of batches, not {batches!r}; hap.plan finds the best one")
    if batches < 1:
        raise PlanError(f"a step has at least one batch, not {batches}")
