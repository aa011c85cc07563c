"""The doors: ``plan`` (offline), ``compile`` (on every rank, under torchrun) and ``python_source``.

Every rank captures the model itself; rank 0 plans and sends the plan's text; all compare fingerprints, so that no rank
runs something else. An error on one rank is raised on all of them, in the same words, and nobody waits in a collective.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

from hap.batching import best_batches
from hap.capture import capture
from hap.capture.inputs import StepInputs, step_inputs
from hap.capture.narrow import as_planned
from hap.cluster import ClusterSpec
from hap.codegen.lowering import lower
from hap.codegen.passes.recompute import recompute_calls
from hap.codegen.passes.runner import Outcome, run_passes
from hap.codegen.program import Program
from hap.codegen.source import to_python
from hap.cost_models.profile import CalibratedCluster, Profile
from hap.cost_models.timeline import Timeline
from hap.errors import ClusterError, PlanError
from hap.graph import Graph
from hap.mesh import (
    check_mesh_plan,
    explained_mesh,
    host_program,
    host_source,
    mesh_program,
    play_mesh,
)
from hap.mesh_plan import MeshPlan, load_plan, parse_plan
from hap.plan import Plan
from hap.recompile import Recompiler
from hap.reduce_dtype import ReduceDtype
from hap.rules.choices import choices
from hap.rules.whole import find_forced
from hap.run_record import VARIABLE as RECORD_VARIABLE
from hap.runtime.program import HapProgram
from hap.runtime.variants import Built
from hap.same_model import check_model
from hap.search.assemble import ASSUMPTIONS
from hap.search.judge import default_passes, played
from hap.search.limits import Method, check_asked
from hap.search.mesh import plan_mesh as search_mesh
from hap.search.pins import Pins, check_pins
from hap.search.planner import Effort, plan_graph
from hap.search.subsets import without
from hap.starting import left_out, refusal
from hap.together import OTHER, agree, agree_on_program, join, together
from hap.whatif import explained

T = TypeVar("T")
NOT_MEASURED = ASSUMPTIONS[0]
SCALED = "collectives of the devices that are left take what was measured of all devices, scaled to their number"
Cluster = ClusterSpec | str | os.PathLike[str]
ProfileLike = Profile | str | os.PathLike[str]
LossFn = Callable[..., torch.Tensor]


def plan(
    model: torch.nn.Module,
    cluster: Cluster,
    *,
    example_inputs: Any,
    example_targets: Any = None,
    loss_fn: LossFn | None = None,
    outputs: Sequence[str] = (),
    optimizer: str = "adamw",
    pins: Pins | None = None,
    effort: Effort = "normal",
    budget_s: float | None = None,
    profile: ProfileLike | None = None,
    method: Method = "milp",
    leave_out: bool = False,
    gradient_accumulation_steps: int | Literal["best"] = 1,
    reduce_dtype: ReduceDtype = None,
) -> Plan:
    """Plan one training step of ``model`` on ``cluster``, without GPUs, process group or weights (``meta`` will do).

    ``example_inputs``: one *global* batch: a tensor, a tuple or list of positionals, a dict of keywords, or
    ``((args...), {kwargs})``. The loss is ``loss_fn(model(...), *example_targets)``, or the model's own without one.
    ``outputs`` names tensors that the model returns beside the loss (``("logits",)``), which ``program.outputs`` then
    has, whole, after each step. ``optimizer`` (``adamw``, ``sgd``, ...) is whose state must fit in memory; for ``muon``
    and ``adafactor`` what an update is made from is in no shards. ``pins`` fixes decisions, ``effort`` says how long to
    search: ``quick``, ``normal``, or ``thorough``, which finds what ``normal`` does and proves more of it. Under
    ``torch.autocast`` its casts are part of the step. ``profile`` (a ``Profile`` or a file that ``hap profile`` wrote
    on this cluster) replaces the description's speeds by measured ones. ``budget_s``: seconds of search after which the
    best plan so far is taken; the plan then says so, and is not reproducible, which a plan that the budget did not stop
    is. ``method``: ``milp``, or ``astar`` to have the strategies synthesised, which takes longer. ``leave_out``: the
    slowest devices may be left out, host by host, where a step is shorter without them; the plan is then for the
    others, on which the job is to be started (``hap.starting``), and names those that it leaves out.
    ``gradient_accumulation_steps``: so many batches like the example have their gradients added up before the optimizer
    steps, all but the last under ``program.no_sync()``; what is predicted is then of one batch, the mean over a step's.
    With ``best`` the example is what a step has in all, and the plan for the first so many rows of every tensor with as
    many as the batch has: as many batches (``plan.gradient_accumulation_steps``) as make the step shortest.
    ``reduce_dtype``: ``torch.bfloat16`` or ``torch.float16``, in which gradients are exchanged, where they are wider.
    Parameters, gradients and updates keep their dtype; what one device computes then is rounded alike.

    ClusterError, CaptureError, MissingRuleError, InfeasibleError, PlanError: one line each that says what to change.
    """
    check_asked(effort, method, gradient_accumulation_steps, "best")
    spec = _cluster(cluster, profile)

    def decide(inputs: Any, targets: Any, batches: int) -> Plan:
        graph = capture(
            model, inputs, loss_fn=loss_fn, example_targets=targets, outputs=outputs, reduce_dtype=reduce_dtype
        )
        return _decide(graph, spec, optimizer, pins, effort, budget_s, method, leave_out, batches)

    if gradient_accumulation_steps != "best":
        return decide(example_inputs, example_targets, gradient_accumulation_steps)
    return best_batches(step_inputs(example_inputs, example_targets), _of_a_batch(decide))


def plan_mesh(
    model: torch.nn.Module,
    cluster: Cluster,
    *,
    example_inputs: Any,
    example_targets: Any = None,
    loss_fn: LossFn | None = None,
    outputs: Sequence[str] = (),
    optimizer: str = "adamw",
    effort: Effort = "normal",
    leave_out: bool = False,
    gradient_accumulation_steps: int | Literal["best"] = 1,
    reduce_dtype: ReduceDtype = None,
) -> MeshPlan:
    """As ``plan``, on a mesh of two axes: the batch is dealt out between hosts, and each host's part is planned for its
    devices (``hap.search.mesh``). Worth its while where the batch is large and hosts hold several devices, which
    together hold what one cannot. ``leave_out``: hosts with the slowest networks may be left out.
    ``gradient_accumulation_steps`` and ``reduce_dtype``: as of ``plan``. ``compile`` takes the plan, or the file it was
    saved to.

    PlanError, too, for a cluster of one host, less than one sample a host, or a step that mixes samples.
    """
    check_asked(effort, "milp", gradient_accumulation_steps, "best")
    spec = _cluster(cluster)

    def decide(inputs: Any, targets: Any, batches: int) -> MeshPlan:
        graph = capture(
            model, inputs, loss_fn=loss_fn, example_targets=targets, outputs=outputs, reduce_dtype=reduce_dtype
        )
        possible = choices(graph)
        found = search_mesh(possible, spec, optimizer=optimizer, effort=effort, leave_out=leave_out, batches=batches)
        return explained_mesh(found, graph, spec)

    if gradient_accumulation_steps != "best":
        return decide(example_inputs, example_targets, gradient_accumulation_steps)
    return best_batches(step_inputs(example_inputs, example_targets), _of_a_batch(decide))


def compile(
    model: torch.nn.Module,
    cluster: Cluster | None = None,
    *,
    example_inputs: Any,
    example_targets: Any = None,
    loss_fn: LossFn | None = None,
    outputs: Sequence[str] = (),
    plan: Plan | MeshPlan | str | os.PathLike[str] | None = None,
    optimizer: str | None = None,
    pins: Pins | None = None,
    effort: Effort = "normal",
    budget_s: float | None = None,
    device: torch.device | str | None = None,
    profile: ProfileLike | None = None,
    gradient_accumulation_steps: int | None = None,
    reduce_dtype: ReduceDtype = None,
    passes_off: Sequence[str] = (),
) -> HapProgram:
    """This rank's program for ``model``: an ``nn.Module`` that takes its share of a batch and returns the global loss.

    Call it on every rank under ``torchrun``; it joins a process group if there is none. One device needs neither. With
    ``plan`` (a ``Plan`` or a file) nothing is searched, and the plan must be for this model, this many ranks and, if
    ``cluster`` is given, this cluster, or what is left of it without the devices that the plan leaves out. Parameters
    start from rank 0's values of ``model``; a model on ``meta`` needs ``load_state_dict`` before the first step.
    ``device`` defaults to this rank's GPU under NCCL, else the CPU, where a cluster of ``backend: nccl`` runs only if
    that is named here. ``passes_off`` names passes (``hap.codegen.passes.runner``) to leave out, ``("bucket",
    "overlap")`` for one. With ``plan`` gradients are exchanged as it says, and a ``reduce_dtype``, an ``optimizer``,
    ``gradient_accumulation_steps`` and ``pins`` must be its own where they are given; what is planned without them is
    for ``adamw`` and steps of one batch. The rest is as of ``hap.plan``, errors too; ProgramError if ranks disagree.
    """
    if cluster is None and plan is None:
        raise ClusterError("hap.compile needs a cluster, or a plan that was made for one")
    spec = None if cluster is None else _cluster(cluster, profile)
    comm = join(None if spec is None else spec.backend, device)
    if spec is not None and plan is None:
        spec.check_world_size(comm.world_size)
    graph = together(
        comm,
        lambda: capture(
            model,
            example_inputs,
            loss_fn=loss_fn,
            example_targets=example_targets,
            outputs=outputs,
            reduce_dtype=reduce_dtype,
        ),
    )
    agree(comm, "the model", graph.fingerprint)
    agree(comm, "the plan", plan.checksum if isinstance(plan, (Plan, MeshPlan)) else None)

    def decide() -> str:
        if comm.rank != 0:
            return ""
        if plan is not None:
            return (plan if isinstance(plan, (Plan, MeshPlan)) else load_plan(plan)).to_json()
        assert spec is not None
        state_of = "adamw" if optimizer is None else optimizer
        batches = 1 if gradient_accumulation_steps is None else gradient_accumulation_steps
        check_asked(effort, "milp", batches)
        return _decide(graph, spec, state_of, pins, effort, budget_s, batches=batches).to_json()

    decided = parse_plan(comm.from_rank_zero(together(comm, decide)), "the plan of rank 0")
    agree(comm, "the plan", decided.checksum)
    given_pins = None if plan is None else pins
    together(comm, lambda: _check_given(decided, optimizer, gradient_accumulation_steps, given_pins))
    graph = as_planned(graph, decided.provenance)
    if isinstance(decided, MeshPlan):
        check_mesh_plan(decided, graph, spec, comm.world_size)
        outcome, sites = together(comm, lambda: host_program(graph, decided, comm.rank, passes_off, spec))
        again = Recompiler(model, loss_fn, graph, decided, outputs)
        given = (model, example_inputs, example_targets)
        return _recorded(mesh_program(graph, decided, outcome, sites, comm, *given, again, passes_off, spec), graph)
    if left_out(decided) and comm.world_size != decided.world_size:
        raise PlanError(refusal(decided, comm.world_size))
    spec = None if spec is None else planned_part(decided, spec)
    if spec is not None:
        spec.check_world_size(comm.world_size)
    _check_plan(decided, graph, spec, comm.world_size)
    together(comm, lambda: check_pins(decided, graph, given_pins))
    outcome = together(comm, lambda: _rewritten(lower(graph, decided), spec, passes_off))
    program = outcome.program
    agree_on_program(comm, "the program", program)
    again = Recompiler(model, loss_fn, graph, decided, outputs)

    def rebuild(example: StepInputs, training: bool) -> Built:
        found = together(comm, lambda: _rewritten(again.program(example, training), spec, passes_off).program)
        agree_on_program(comm, OTHER, found)
        return Built(found, comm)

    made = HapProgram(program, decided, comm, model, example_inputs, example_targets, rebuild, outcome.changes)
    return _recorded(made, graph)


def python_source(
    model: torch.nn.Module,
    plan: Plan | MeshPlan,
    *,
    host: str | None = None,
    example_inputs: Any,
    example_targets: Any = None,
    loss_fn: LossFn | None = None,
    outputs: Sequence[str] = (),
) -> str:
    """The program of ``plan`` as one Python file that runs under torchrun; of a plan of two axes that of ``host``'s
    ranks (by default the first's), to be read. PlanError if it is for another model, or has no such host."""
    graph = capture(model, example_inputs, loss_fn=loss_fn, example_targets=example_targets, outputs=outputs)
    graph = as_planned(graph, plan.provenance)
    if isinstance(plan, MeshPlan):
        return host_source(graph, plan, host)
    if host is not None:
        raise PlanError(f"the plan is of one axis: one program goes for all ranks, not one for host {host!r}")
    return to_python(recompute_calls(lower(graph, plan)), plan)


def simulate(
    model: torch.nn.Module,
    plan: Plan | MeshPlan,
    cluster: Cluster,
    *,
    example_inputs: Any,
    example_targets: Any = None,
    loss_fn: LossFn | None = None,
    outputs: Sequence[str] = (),
    profile: ProfileLike | None = None,
) -> Timeline:
    """Play one step of ``plan``'s program on its cluster as it is run, collectives bundled and beside compute: spans of
    every rank, waiting, the critical path. Of a step of several batches it is the last one.

    Speeds are those of ``profile``, or else the description's. Devices of ``cluster`` that the plan leaves out do not
    play. PlanError if it is for another model or cluster, or of two axes and to be played with a profile.
    """
    graph = capture(model, example_inputs, loss_fn=loss_fn, example_targets=example_targets, outputs=outputs)
    graph = as_planned(graph, plan.provenance)
    if isinstance(plan, MeshPlan):
        if profile is not None:
            raise PlanError("a plan of two axes was made from a description; play it without a profile")
        return play_mesh(graph, plan, _cluster(cluster))
    spec = planned_part(plan, _cluster(cluster, profile))
    _check_plan(plan, graph, spec, spec.world_size)
    return played(graph, plan, lower(graph, plan), spec)


def _of_a_batch(decide: Callable[[Any, Any, int], T]) -> Callable[[StepInputs, int], T]:
    return lambda one, count: decide((one.args, one.kwargs), one.targets or None, count)


def _decide(
    graph: Graph,
    cluster: ClusterSpec,
    optimizer: str,
    pins: Pins | None,
    effort: Effort,
    budget_s: float | None,
    method: Method = "milp",
    leave_out: bool = False,
    batches: int = 1,
) -> Plan:
    """The plan with its explanation: the same bytes, and so the same checksum, from ``plan`` and from ``compile``."""
    possible = choices(graph)
    found = plan_graph(
        possible,
        cluster,
        optimizer=optimizer,
        pins=pins,
        effort=effort,
        budget_s=budget_s,
        method=method,
        leave_out=leave_out,
        batches=batches,
    )
    if isinstance(cluster, CalibratedCluster):
        found = _measured(found, cluster)
    cluster = planned_part(found, cluster)
    if forced := tuple(map(str, find_forced(possible))):
        made = found.provenance.model_copy(update={"assumptions": (*found.provenance.assumptions, *forced)})
        found = found.model_copy(update={"provenance": made})
    return explained(found, graph, cluster, helps=effort != "quick" and not found.provenance.solver.get("stopped"))


def _rewritten(program: Program, cluster: ClusterSpec | None, off: Sequence[str]) -> Outcome:
    """Of the passes, which are those that the plan was judged with."""
    return run_passes(program, default_passes(program, cluster), off=off)


def _measured(plan: Plan, cluster: CalibratedCluster) -> Plan:
    """The plan with its profile's fingerprint in place of the assumption that nothing was measured."""
    kept = tuple(a for a in plan.provenance.assumptions if a != NOT_MEASURED)
    advised = plan.world_size - len(plan.provenance.solver.get("leave_out", ()))  # of a plan for all
    if (left_out(plan) and plan.world_size > 1) or 1 < advised < plan.world_size:
        kept = (*kept, SCALED)
    made = plan.provenance.model_copy(update={"profile_fingerprint": cluster.profile.fingerprint, "assumptions": kept})
    return plan.model_copy(update={"provenance": made})


def _cluster(cluster: Cluster, profile: ProfileLike | None = None) -> ClusterSpec:
    spec = cluster if isinstance(cluster, ClusterSpec) else ClusterSpec.load(cluster)
    if profile is None:
        return spec
    return (profile if isinstance(profile, Profile) else Profile.load(profile)).calibrate(spec)


def planned_part(plan: Plan, cluster: ClusterSpec) -> ClusterSpec:
    """The part of ``cluster`` that the plan is for, if it leaves out devices of this cluster; else ``cluster``."""
    missing = left_out(plan)
    whole = cluster.world_size == plan.world_size + len(missing)
    if not missing or not whole:
        return cluster
    part = without(cluster, tuple(missing))
    return part if part.fingerprint == plan.provenance.cluster_fingerprint else cluster


def _check_plan(plan: Plan, graph: Graph, cluster: ClusterSpec | None, world_size: int) -> None:
    """PlanError unless the plan was made for this model, this cluster and this many ranks."""
    made_for = plan.provenance
    check_model(plan, graph)
    if cluster is not None:
        made_for.check_cluster(cluster.name, cluster.fingerprint)
    if made_for.world_size != world_size:
        raise PlanError(f"the plan is for {made_for.world_size} ranks, this job has {world_size}")


def _check_given(plan: Plan | MeshPlan, optimizer: str | None, batches: int | None, pins: Pins | None) -> None:
    """PlanError for an optimizer or a number of batches that is given and not the plan's, or pins where none can be."""
    if pins is not None and isinstance(plan, MeshPlan):
        raise PlanError("pins are for plans of one axis, and this one is of two; leave them out")
    made, count = plan.provenance.optimizer, plan.gradient_accumulation_steps
    if optimizer not in (None, made):
        raise PlanError(f"the plan is for {made}, and optimizer is {optimizer}; plan again, or leave that out")
    if batches not in (None, count):
        raise PlanError(
            f"the plan's gradient_accumulation_steps are {count}, not {batches}; plan again, or leave them out"
        )


def _recorded(program: HapProgram, graph: Graph) -> HapProgram:
    """The program, which minds where its graph's constants come from, recorded until the process ends where
    ``hap run --record`` asked for it: of a job the first one."""
    program.forgotten.follow(graph.origins)
    if folder := os.environ.pop(RECORD_VARIABLE, ""):
        program.record(folder).close_at_exit()
    return program
