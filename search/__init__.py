"""``Choices`` + ``ClusterSpec`` -> ``Plan``: strategies by a MILP, shares by an LP, whole sizes by one rounding, a
bound.

``plan_graph`` is the door; ``Pins`` takes decisions out of its hands.
"""

from hap.search.pins import Pins
from hap.search.planner import plan_graph

__all__ = ["Pins", "plan_graph"]
