"""The doors of a mesh of two axes: ``plan_mesh`` (offline), and what ``hap.compile`` does with such a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hap.capture.inputs import step_inputs
from hap.cluster import ClusterSpec
from hap.codegen.layout import Layout
from hap.codegen.lowering import lower
from hap.codegen.passes.recompute import recompute_calls
from hap.codegen.passes.runner import Outcome, run_passes
from hap.codegen.program import Call, Program, gradients_alone
from hap.codegen.source import to_python
from hap.cost_models.timeline import Timeline
from hap.cost_models.together import play_together
from hap.errors import PlanError
from hap.graph import Graph
from hap.hosts_sum import HOSTS_SUM, SITE
from hap.mesh_plan import MeshPlan
from hap.placement import Shard
from hap.plan import Plan, Strategy
from hap.report.words import listed
from hap.rules.host_graph import host_graph, summed
from hap.runtime.collectives import Communicator
from hap.runtime.hosts import HostCommunicator
from hap.runtime.mesh import MeshProgram, dealt_to_hosts
from hap.runtime.ragged import Site
from hap.search.judge import default_passes, played_events
from hap.search.mesh import host_cluster
from hap.search.subsets import without
from hap.whatif import explained


def check_mesh_plan(plan: MeshPlan, graph: Graph, cluster: ClusterSpec | None, world_size: int) -> None:
    """PlanError unless the plan was made for this model, this cluster and this many ranks."""
    plan.provenance.check_model(graph.name, graph.fingerprint)
    if set(plan.between) != set(graph.by_name):
        raise PlanError("the plan between hosts has not the nodes of this model; plan again")
    if cluster is not None:
        meshed_part(plan, cluster)
    if plan.world_size != world_size:
        only = f", on {listed([h.name for h in plan.hosts])} only" if plan.left_out else ""
        raise PlanError(f"the plan is for {plan.world_size} ranks{only}; this job has {world_size}")


def meshed_part(plan: MeshPlan, cluster: ClusterSpec) -> ClusterSpec:
    """The cluster without the hosts that the plan leaves out. PlanError unless the plan was made for it."""
    gone = [d.rank for d in cluster.devices if d.host in plan.left_out]
    part = without(cluster, gone) if gone and len(gone) < cluster.world_size else cluster
    plan.provenance.check_cluster(part.name, part.fingerprint)
    return part


def strategies_between(plan: MeshPlan) -> dict[str, Strategy]:
    return {name: Strategy.parse(text) for name, text in plan.between.items()}


def graph_of(graph: Graph, plan: MeshPlan, host: int) -> Graph:
    """The step of one host."""
    return host_graph(graph, strategies_between(plan), plan.sizes, host, plan.hosts[host].ranks)


def program_of(graph: Graph, plan: MeshPlan, host: int, passes_off: Sequence[str] = ()) -> Outcome:
    """The program of one host's ranks, after its passes. PlanError where the plan is unsound.

    Hosts must make their sums in one order, whatever each one's user reads when: so the loss is never late.
    """
    program = lower(graph_of(graph, plan, host), plan.inside_of(host))
    outcome = run_passes(program, default_passes(program, None), off=passes_off)
    return replace(outcome, stages=(*outcome.stages[:-1], replace(outcome.program, loss_may_be_late=False)))


def sites_of(graph: Graph, plan: MeshPlan, host: int) -> tuple[Site, ...]:
    """The tensors that are summed over hosts, as each host's plan has them lie."""
    found = []
    for node in summed(graph_of(graph, plan, host)):
        layouts = []
        for number in range(len(plan.hosts)):
            inside = plan.inside_of(number)
            placement = inside.strategy(node.name).inputs[0]
            layouts.append(Layout.of(placement, inside.sizes) if isinstance(placement, Shard) else None)
        found.append(Site(node.meta.shape, tuple(layouts)))
    return tuple(found)


def sums_in_order(program: Program) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sites in the program's order; those of gradients that nothing reads before the step ends."""
    calls = [i for i in (*program.forward, *program.backward) if isinstance(i, Call) and i.op == HOSTS_SUM]
    alone = gradients_alone(program)
    late = [c for c in calls if c.outputs[0] in alone]
    return tuple(c.args[SITE] for c in calls), tuple(c.args[SITE] for c in late)


def host_program(
    graph: Graph, plan: MeshPlan, rank: int, passes_off: Sequence[str] = ()
) -> tuple[Outcome, tuple[Site, ...]]:
    """What ``rank`` runs, and the tensors that are summed over hosts. PlanError where the plan is unsound."""
    host, _ = plan.host_of(rank)
    return program_of(graph, plan, host, passes_off), sites_of(graph, plan, host)


def explained_mesh(plan: MeshPlan, graph: Graph, cluster: ClusterSpec) -> MeshPlan:
    """The plan with the explanations of its hosts' plans."""
    spec, found = meshed_part(plan, cluster), list[Plan]()
    for number, inside in enumerate(plan.inside):
        host = next(h for h, part in enumerate(plan.hosts) if part.inside == number)
        found.append(explained(inside, graph_of(graph, plan, host), host_cluster(spec, host), helps=False))
    return plan.model_copy(update={"inside": tuple(found)})


def play_mesh(graph: Graph, plan: MeshPlan, cluster: ClusterSpec) -> Timeline:
    """One step of all hosts as it is run. PlanError if the plan is for another model or cluster."""
    spec = meshed_part(plan, cluster)
    check_mesh_plan(plan, graph, cluster, spec.world_size)
    graphs = [graph_of(graph, plan, h) for h in range(len(plan.hosts))]
    events = [
        list(played_events(of_host, inside, lower(of_host, inside), host_cluster(spec, h)))
        for h, of_host in enumerate(graphs)
        for inside in (plan.inside_of(h),)
    ]
    names = [tuple(d.name for d in spec.devices if d.host == host.name) for host in plan.hosts]
    return play_together(events, names, frozenset(node.name for node in summed(graphs[0])))


def host_source(graph: Graph, plan: MeshPlan, host: str | None) -> str:
    """The program of one host's ranks as Python, before its passes."""
    check_mesh_plan(plan, graph, None, plan.world_size)
    names = [h.name for h in plan.hosts]
    if host is not None and host not in names:
        raise PlanError(f"the plan has no host {host!r} (hosts: {', '.join(names)})")
    number = 0 if host is None else names.index(host)
    inside = plan.inside_of(number)
    return to_python(recompute_calls(lower(graph_of(graph, plan, number), inside)), inside)


def mesh_program(
    graph: Graph,
    plan: MeshPlan,
    outcome: Outcome,
    sites: Sequence[Site],
    world: Communicator,
    model: torch.nn.Module,
    example_inputs: Any,
    example_targets: Any,
) -> MeshProgram:
    """This rank's program as a module. Collective. ProgramError if hosts would make their sums in different orders."""
    order, late = sums_in_order(outcome.program)
    world.agree("the order of the sums over hosts", order)
    everywhere = frozenset.intersection(*map(frozenset, world.gather_objects(late)))
    later = [site for site in late if site in everywhere]
    comm = HostCommunicator(world.group, [h.ranks for h in plan.hosts], sites, world.device, later=later)
    dealt = dealt_to_hosts(graph, strategies_between(plan), plan, step_inputs(example_inputs, example_targets))
    return MeshProgram(outcome.program, plan, comm, model, example_inputs, example_targets, dealt, outcome.changes)
