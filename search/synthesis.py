"""``Synthesiser``: strategies synthesised by A* instead of chosen by the MILP, where ``plan_graph`` is asked for that.

Everything else is the same: starts, shares, rounding, the judge. Both are exact at fixed sizes, so plans cost alike;
A* needs no solver of integer programs, and its potentials come from one linear program (``hap.search.potentials``).
"""

from __future__ import annotations

from collections.abc import Mapping

from hap.search import astar
from hap.search.limits import MIP_GAP
from hap.search.milp import Choice
from hap.search.strategies import Chooser
from hap.search.tables import Prices

STATES = 20_000  # expanded by one search


class Synthesiser(Chooser):
    """A ``Chooser`` that asks A*."""

    def _solve(
        self, prices: Prices, forced: Mapping[int, tuple[int, ...]], barriers: bool, below_s: float
    ) -> Choice | None:
        return astar.choose(
            prices,
            forced=forced,
            barriers=barriers,
            nodes=STATES,
            gap=MIP_GAP,
            below_s=below_s,
            check=self.check,
        )
