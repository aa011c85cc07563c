"""The shortest step that ``benchmarks/planning.py`` compares a plan with: of all clusters that its bound is for."""

from benchmarks.planning import _shortest_s
from hap.search import plan_graph
from tests.search.models import cluster, mlp


def test_one_of_fewer_devices_is_found_where_the_plan_is_for_all() -> None:
    """A device that is slow and far away lengthens a plan for all devices."""
    found, spec = mlp(batch=64, width=512), cluster((50, "16GB"), (0.001, "16GB"), network="0.01GB/s")
    plan, alone = plan_graph(found, spec), plan_graph(found, cluster((50, "16GB"), network="0.01GB/s"))
    assert alone.predicted.step_s < 0.9 * plan.predicted.step_s
    assert _shortest_s(found, spec, plan, apart=False) is None
    assert _shortest_s(found, spec, plan, apart=True) == alone.predicted.step_s
    assert _shortest_s(found, spec, plan_graph(found, spec, leave_out=True), apart=True) is None
