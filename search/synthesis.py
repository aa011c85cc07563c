"""``plan_by_synthesis``: ``plan_graph`` with its strategies synthesised by A* instead of chosen by the MILP.

Everything else is the same: starts, shares, rounding, the judge. Both are exact at fixed sizes, so plans cost alike;
A* needs no solver of integer programs, and its potentials come from one linear program (``hap.search.potentials``).
"""

from __future__ import annotations

from collections.abc import Mapping

from hap.cluster import ClusterSpec
from hap.fabric import Array
from hap.placement import GroupSizes
from hap.plan import Plan
from hap.rules.choices import Choices
from hap.search import astar
from hap.search.assemble import assemble_plan
from hap.search.judge import finest
from hap.search.limits import LIMITS, MIP_GAP, Effort
from hap.search.milp import Choice
from hap.search.pins import Pins
from hap.search.planner import Search
from hap.search.problem import Problem
from hap.search.strategies import SHORTER, Chooser
from hap.search.tables import Prices

STATES = 20_000  # expanded by one search


class Synthesiser(Chooser):
    """A ``Chooser`` that asks A*."""

    def _choose(
        self,
        sizes: GroupSizes,
        regather: bool,
        capacity: Array,
        forced: Mapping[int, tuple[int, ...]],
        barriers: bool,
    ) -> Choice | None:
        key = (tuple(sizes.items()), regather, tuple(capacity.tolist()), tuple(forced.items()), barriers)
        if key not in self.solved:
            self.milps += 1
            prices = Prices(self.problem.tables(regather), sizes, capacity, SHORTER * self.problem.scale_s)
            self.solved[key] = astar.choose(prices, forced=forced, barriers=barriers, nodes=STATES, gap=MIP_GAP)
        return self.solved[key]


def plan_by_synthesis(
    choices: Choices,
    cluster: ClusterSpec,
    *,
    optimizer: str = "adamw",
    pins: Pins | None = None,
    model_name: str | None = None,
    effort: Effort = "normal",
) -> Plan:
    """The best plan found, as ``hap.search.plan_graph`` finds it, without its advice. InfeasibleError if nothing fits,
    PlanError for a pin that makes no sense."""
    search = Search(Problem.state(choices, cluster, optimizer, pins or Pins()), LIMITS[effort])
    search.chooser = Synthesiser(search.problem, LIMITS[effort])
    best, overlapped_s = finest(search.chooser, search.run(), search.met)
    return assemble_plan(
        choices,
        cluster,
        best.strategies,
        best.sizes,
        best.evaluation,
        optimizer=optimizer,
        model_name=model_name or choices.graph.name,
        lower_bound_s=search.bound_s,
        solver={**search.statistics(best), "method": "astar"},
        overlapped_s=overlapped_s,
    )
