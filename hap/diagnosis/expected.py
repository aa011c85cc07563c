"""What a plan expects of a run, whether it is a plan of one axis or of two."""

from __future__ import annotations

from dataclasses import dataclass

from hap.cluster import ClusterSpec
from hap.mesh_plan import MeshPlan
from hap.plan import Plan
from hap.report.facts import Facts, described


@dataclass(frozen=True)
class Expected:
    """``hosts``: how many ranks run one program, of each host of a mesh of two axes; all of them on one axis.
    ``compute_s``: by rank, what it does by itself in a step, without what it sends; None where the plan does not tell
    these apart. ``step_s``: the step as it is run. ``wire_s``: how long the busiest rank is held up by the wire; None
    where the plan does not tell. ``is_measured``: whether the predictions rest on a profile. ``cluster``: of as many
    devices as there are ranks, so without those that the plan leaves out; None where the plan does not describe it."""

    hosts: tuple[int, ...]
    compute_s: tuple[float, ...] | None
    step_s: float
    wire_s: float | None
    is_measured: bool
    cluster: ClusterSpec | None

    @classmethod
    def of(cls, plan: Plan | MeshPlan) -> Expected:
        """PlanError if the plan describes a cluster of another number of devices."""
        return _of_two_axes(plan) if isinstance(plan, MeshPlan) else _of_one_axis(plan)


def _of_one_axis(plan: Plan) -> Expected:
    played, predicted = None if plan.explanation is None else plan.explanation.as_run, plan.predicted
    wire_s = None
    if played is not None:
        busy = [sum(row[1::2]) - sum(row[::2]) for row in played.busy_s]
        wire_s = max(0.0, played.step_s - max(busy, default=0.0))
    hosts, is_measured = (plan.world_size,), plan.provenance.profile_fingerprint is not None
    return Expected(hosts, predicted.compute_s, predicted.as_run_s, wire_s, is_measured, Facts(plan).cluster)


def _of_two_axes(plan: MeshPlan) -> Expected:
    """What the plans inside predict of ranks has them busy with the sums over hosts, which a run has on the wire."""
    hosts, told, step_s = tuple(host.ranks for host in plan.hosts), plan.explanation, plan.predicted.as_run_s
    is_measured = plan.provenance.profile_fingerprint is not None
    if told is None:
        return Expected(hosts, None, step_s, None, is_measured, None)
    busy = [s for host in range(len(hosts)) for s in plan.inside_of(host).predicted.compute_s]
    compute_s = tuple(max(0.0, own - sums) for own, sums in zip(busy, told.sums_s, strict=True))
    cluster = described(told.cluster, plan.world_size)
    return Expected(hosts, compute_s, step_s, max(0.0, step_s - max(compute_s)), is_measured, cluster)
