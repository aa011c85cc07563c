"""The doors of a mesh of two axes: ``plan_mesh`` (offline), and what ``hap.compile`` does with such a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from hap.capture.inputs import StepInputs, step_inputs
from hap.carry import carry_over
from hap.cluster import ClusterSpec
from hap.codegen.accumulate import find_accumulation
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
from hap.mesh_plan import BATCH, MeshExplanation, MeshPlan
from hap.placement import Shard, Sizes
from hap.plan import Plan, Strategy
from hap.recompile import Recompiler
from hap.report.explanation import cluster_body
from hap.report.words import listed
from hap.rules.choices import choices
from hap.rules.host_graph import batch_group, deal_batch, host_graph, summed
from hap.runtime.collectives import Communicator
from hap.runtime.data import Signature
from hap.runtime.hosts import HostCommunicator
from hap.runtime.mesh import MeshProgram, dealt_to_hosts
from hap.runtime.ragged import Site
from hap.runtime.variants import Built
from hap.same_model import check_model
from hap.search.judge import default_passes, played_events
from hap.search.mesh import host_cluster, of_batch, seconds_of_sums
from hap.search.rounding import round_shares
from hap.search.subsets import without
from hap.together import OTHER, agree_on_program, together
from hap.whatif import explained


def check_mesh_plan(plan: MeshPlan, graph: Graph, cluster: ClusterSpec | None, world_size: int) -> None:
    """PlanError unless the plan was made for this model, this cluster and this many ranks."""
    check_model(plan, graph)
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


def program_of(
    graph: Graph, plan: MeshPlan, host: int, passes_off: Sequence[str] = (), cluster: ClusterSpec | None = None
) -> Outcome:
    """The program of one host's ranks, after its passes, which are those that the plan was judged with where its
    ``cluster`` is given. PlanError where the plan is unsound."""
    return _rewritten(graph_of(graph, plan, host), plan.inside_of(host), passes_off, _of_host(plan, cluster, host))


def _of_host(plan: MeshPlan, cluster: ClusterSpec | None, host: int) -> ClusterSpec | None:
    return None if cluster is None else host_cluster(meshed_part(plan, cluster), host)


def _rewritten(graph: Graph, inside: Plan, off: Sequence[str], part: ClusterSpec | None) -> Outcome:
    """Hosts must make their sums in one order, whatever each one's user reads when: so the loss is never late."""
    program = lower(graph, inside)
    outcome = run_passes(program, default_passes(program, part), off=off)
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
    graph: Graph, plan: MeshPlan, rank: int, passes_off: Sequence[str] = (), cluster: ClusterSpec | None = None
) -> tuple[Outcome, tuple[Site, ...]]:
    """What ``rank`` runs, and the tensors that are summed over hosts. PlanError where the plan is unsound."""
    host, _ = plan.host_of(rank)
    return program_of(graph, plan, host, passes_off, cluster), sites_of(graph, plan, host)


def explained_mesh(plan: MeshPlan, graph: Graph, cluster: ClusterSpec) -> MeshPlan:
    """The plan with its explanation, and those of its hosts' plans."""
    spec, found, sums_s = meshed_part(plan, cluster), list[Plan](), list[list[float]]()
    for number, inside in enumerate(plan.inside):
        host = next(h for h, part in enumerate(plan.hosts) if part.inside == number)
        of_host, devices = graph_of(graph, plan, host), host_cluster(spec, host)
        found.append(explained(inside, of_host, devices, helps=False))
        sums_s.append([float(f"{seconds_of_sums(of_host, inside, d):.4g}") for d in devices.devices])
    by_rank = tuple(s for host in plan.hosts for s in sums_s[host.inside])
    explanation = MeshExplanation(cluster=cluster_body(spec), sums_s=by_rank)
    return plan.model_copy(update={"inside": tuple(found), "explanation": explanation})


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
    again: Recompiler,
    passes_off: Sequence[str],
    cluster: ClusterSpec | None,
) -> MeshProgram:
    """This rank's program as a module. Collective. ProgramError if hosts would make their sums in different orders, or
    ranks of one host have other programs."""
    later = _later(outcome.program, world)
    comm = HostCommunicator(world.group, [h.ranks for h in plan.hosts], sites, world.device, later=later)
    together(world, lambda: agree_on_program(comm, "the program", outcome.program))
    part = _of_host(plan, cluster, comm.host)
    example = step_inputs(example_inputs, example_targets)
    dealt = dealt_to_hosts(graph, strategies_between(plan), plan.sizes, example)

    def rebuild(example: StepInputs, training: bool) -> Built:
        def carried() -> Carried:
            return carry_mesh(plan, graph, again.graph(example, training), example, comm.host, passes_off, part)

        found = together(world, carried)
        together(world, lambda: agree_on_program(comm, OTHER, found.program))  # if not on one host, then nowhere
        return join_hosts(found, comm)

    given = (model, example_inputs, example_targets)
    return MeshProgram(outcome.program, plan, comm, *given, dealt, rebuild, outcome.changes, layouts_of(graph, plan))


def layouts_of(graph: Graph, plan: MeshPlan) -> dict[str, tuple[Layout, ...]]:
    """How each parameter lies in the hosts that have it in shards."""
    found = {}
    for node in graph.sources("parameter"):
        placed = [(inside, inside.strategy(node.name).outputs[0]) for inside in plan.inside if inside.world_size > 1]
        found[node.target] = tuple(Layout.of(p, inside.sizes) for inside, p in placed if isinstance(p, Shard))
    return found


def deferred_sums(program: Program) -> tuple[int, ...]:
    """The sites that under ``no_sync()`` wait for a step's last batch."""
    behind = find_accumulation(program).behind
    calls = (i for i in program.backward if isinstance(i, Call) and i.op == HOSTS_SUM)
    return tuple(c.args[SITE] for c in calls if c.outputs[0] in behind)


def _later(program: Program, world: Communicator) -> list[int]:
    """The sums that on no host anything waits for before the step ends. Collective."""
    order, late = sums_in_order(program)
    world.agree("the order of the sums over hosts", order)
    world.agree("the sums over hosts that wait for a step's last batch", deferred_sums(program))
    everywhere = frozenset.intersection(*map(frozenset, world.gather_objects(late)))
    return [site for site in late if site in everywhere]


# ---- another batch or mode ----


@dataclass(frozen=True)
class Carried:
    """A host's program for another graph of the model. ``sums``: shape and layout of what is summed over hosts."""

    program: Program
    dealt: Signature
    sums: tuple[tuple[tuple[int, ...], Layout | None], ...]


def carry_mesh(
    plan: MeshPlan,
    old: Graph,
    new: Graph,
    example: StepInputs,
    host: int,
    off: Sequence[str],
    on: ClusterSpec | None = None,
) -> Carried:
    """The plan of ``old`` followed for ``new``, the step of ``example``: the batch is dealt out to hosts in the plan's
    proportions, and inside of each everything lies as it does. ``on``: the host, if it is known. PlanError for fewer
    samples than hosts, and for what ``deal_batch`` refuses."""
    possible = choices(new)
    between = {name: of_batch(strategy) for name, strategy in deal_batch(possible).items()}
    sizes = {BATCH: _parts(plan.batch.sizes, batch_group(possible).n)}
    part = host_graph(new, between, sizes, host, plan.hosts[host].ranks)
    inside = carry_over(plan.inside_of(host), graph_of(old, plan, host), part)
    program = _rewritten(part, inside, off, on).program
    placements = [(n.meta.shape, inside.strategy(n.name).inputs[0]) for n in summed(part)]
    sums = tuple((s, Layout.of(p, inside.sizes) if isinstance(p, Shard) else None) for s, p in placements)
    return Carried(program, dealt_to_hosts(new, between, sizes, example), sums)


def join_hosts(carried: Carried, comm: HostCommunicator) -> Built:
    """The programs of all hosts find each other. Collective, of all ranks of the job."""
    world, firsts = comm.everyone, list(accumulate(comm.hosts[:-1], initial=0))
    everyones = world.gather_objects([layout for _, layout in carried.sums])
    sites = [
        Site(shape, tuple(everyones[first][number] for first in firsts))
        for number, (shape, _) in enumerate(carried.sums)
    ]
    return Built(carried.program, comm.on(sites, _later(carried.program, world)), carried.dealt, comm.host)


def _parts(shares: Sizes, n: int) -> Sizes:
    """One sample for each host at least."""
    if n < len(shares):
        raise PlanError(f"a batch of {n} for {len(shares)} hosts: each has to have a part of it; plan on one axis")
    beyond = [max(0.0, n * share / sum(shares) - 1) for share in shares]  # the one that each has
    return tuple(1 + more for more in round_shares(beyond if any(beyond) else shares, n - len(shares)))
