"""A plan of a mesh of two axes in few lines: the hosts' parts, then each plan inside a host as ``summary`` says it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hap.mesh_plan import MeshPlan
from hap.plan import Plan
from hap.report.facts import Facts
from hap.report.summary import batches_in_words, summarize
from hap.report.words import counted, listed, percent, quantity, seconds, table


def summarize_mesh(plan: MeshPlan) -> str:
    """Plain text: who gets how much of the batch, what is summed between hosts, then every plan inside."""
    blocks = ["\n".join(head_lines(plan)), "\n".join(table(host_rows(plan), right=(1, 2, 3, 4)))]
    for number, inside, names in plans_inside(plan):
        title = f"--- plan {number}, inside {listed(names)}; what ranks are busy with includes the sums over hosts ---"
        ranks = [list(same) for same in zip(*(_ranks_of(plan, name) for name in names), strict=True)]
        blocks.append(f"{title}\n\n{summarize(inside, Facts(inside).cluster, ranks=ranks)}")
    return "\n\n".join(blocks)


def _ranks_of(plan: MeshPlan, name: str) -> range:
    """The job's ranks on a host."""
    number = next(i for i, host in enumerate(plan.hosts) if host.name == name)
    first = sum(host.ranks for host in plan.hosts[:number])
    return range(first, first + plan.hosts[number].ranks)


def head_lines(plan: MeshPlan) -> Iterator[str]:
    """What is said of the whole plan before its hosts."""
    made, predicted = plan.provenance, plan.predicted
    yield (
        f"{made.model}: {quantity(made.parameters)} parameters on {made.cluster}: "
        f"{counted(len(plan.hosts), 'host')}, {counted(plan.world_size, 'rank')}, a mesh of two axes"
    )
    yield from batches_in_words(plan.gradient_accumulation_steps)
    yield f"predicted step: {seconds(predicted.as_run_s)} as it is run"
    yield (
        f"nothing overlapped: {seconds(predicted.step_s)} of the slowest host, played alone, of it sums over hosts "
        f"{seconds(predicted.sums_s)}; no plan of these two axes can take less than {seconds(predicted.lower_bound_s)} "
        f"(proved, gap {predicted.gap:.1%})"
    )
    if made.solver.get("stopped"):
        yield "the search was interrupted: another run may find another plan"
    if plan.left_out:
        yield f"left out: {listed(plan.left_out)}; start the job on the other hosts"


def host_rows(plan: MeshPlan) -> list[list[str]]:
    """A table, the head first. The last column says which of ``plans_inside`` a host runs."""
    first = {name: number for number, _, names in plans_inside(plan) for name in names}
    rows = [["host", "ranks", "batch", "step", "plan"]]
    for number, host in enumerate(plan.hosts):
        share = f"{host.batch} of {plan.batch.n} ({percent(host.batch, plan.batch.n)})"
        step = seconds(plan.inside_of(number).predicted.step_s)
        rows.append([host.name, str(host.ranks), share, step, str(first[host.name])])
    return rows


def plans_inside(plan: MeshPlan) -> list[tuple[int, Plan, list[str]]]:
    """The plans that tell their readers something new, numbered, each with the hosts that run it, or one that differs
    from it in nothing but the host's place in the batch. Without their bounds, which say nothing about the whole."""
    found: dict[str, tuple[Plan, list[str]]] = {}
    for number, host in enumerate(plan.hosts):
        inside = plan.inside_of(number)
        decisions = inside.model_dump_json(exclude={"provenance", "explanation"})
        found.setdefault(decisions, (_without_bound(inside), []))[1].append(host.name)
    return [(number, inside, names) for number, (inside, names) in enumerate(found.values())]


def mesh_to_json(plan: MeshPlan) -> dict[str, Any]:
    """What ``summarize_mesh`` says of the hosts, for programs."""
    body = plan.model_dump(mode="json", include={"provenance", "hosts", "batch", "predicted", "left_out"})
    return {**body, "gradient_accumulation_steps": plan.gradient_accumulation_steps}


def _without_bound(plan: Plan) -> Plan:
    """A host's bound is for its part alone: how far the whole is from the best, it does not say."""
    unproved = {"lower_bound_s": None, "overlapped_bound_s": None}
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update=unproved)})
