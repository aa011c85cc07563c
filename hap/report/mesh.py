"""A plan of a mesh of two axes in few lines: the hosts' parts, then each plan inside a host as ``summary`` says it."""

from __future__ import annotations

from typing import Any

from hap.mesh_plan import MeshPlan
from hap.plan import Plan
from hap.report.summary import summarize
from hap.report.words import counted, listed, percent, quantity, seconds, table


def summarize_mesh(plan: MeshPlan) -> str:
    """Plain text: who gets how much of the batch, what is summed between hosts, then every plan inside."""
    predicted, made = plan.predicted, plan.provenance
    head = (
        f"{made.model}: {quantity(made.parameters)} parameters on {made.cluster}: "
        f"{counted(len(plan.hosts), 'host')}, {counted(plan.world_size, 'rank')}, a mesh of two axes"
    )
    times = "\n".join(
        [
            f"predicted step: {seconds(predicted.as_run_s)} as it is run",
            f"nothing overlapped: {seconds(predicted.step_s)}, of it sums over hosts {seconds(predicted.sums_s)}; no "
            f"plan of these two axes can take less than {seconds(predicted.lower_bound_s)} (proved, gap "
            f"{predicted.gap:.1%})",
        ]
    )
    rows = [["host", "ranks", "batch", "step", "plan"]]
    for number, host in enumerate(plan.hosts):
        share = f"{host.batch} of {plan.batch.n} ({percent(host.batch, plan.batch.n)})"
        step = seconds(plan.inside_of(number).predicted.step_s)
        rows.append([host.name, str(host.ranks), share, step, str(host.inside)])
    stopped = "the search was interrupted: another run may find another plan" if made.solver.get("stopped") else ""
    left_out = f"left out: {listed(plan.left_out)}; start the job on the other hosts" if plan.left_out else ""
    blocks = ["\n".join(filter(None, [head, times, stopped, left_out])), "\n".join(table(rows, right=(1, 2, 3, 4)))]
    for number, inside in enumerate(plan.inside):
        names = [h.name for h in plan.hosts if h.inside == number]
        title = f"--- plan {number}, inside {listed(names)} ---"
        blocks.append(f"{title}\n\n{summarize(_without_bound(inside))}")
    return "\n\n".join(blocks)


def mesh_to_json(plan: MeshPlan) -> dict[str, Any]:
    """What ``summarize_mesh`` says of the hosts, for programs."""
    return plan.model_dump(mode="json", include={"provenance", "hosts", "batch", "predicted", "left_out"})


def _without_bound(plan: Plan) -> Plan:
    """A host's bound is for its part alone: how far the whole is from the best, it does not say."""
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"lower_bound_s": None})})
