"""``hap profile`` and ``hap simulate``: what time is, measured and played."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hap.commands import shared
from hap.commands.launching import environment, launch_arguments, launched
from hap.commands.shared import Batch, ClusterOption, HuggingFace, ModelArgument, PlanArgument, SequenceLength
from hap.errors import HapError

if TYPE_CHECKING:
    from hap.cluster import ClusterSpec
    from hap.cost_models.profile import Profile
    from hap.cost_models.timeline import Timeline
    from hap.runtime.collectives import Communicator

SHOWN = 8  # entries of the critical path


def profile(
    model: ModelArgument = None,
    hf: HuggingFace = None,
    batch: Batch = None,
    seq: SequenceLength = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", metavar="CLUSTER.yaml", help="Without it, it is discovered.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="X.json", help="Write the profile here.")] = Path(
        "profile.json"
    ),
    cluster_out: Annotated[
        Path | None,
        typer.Option(metavar="X.yaml", help="Write the discovered cluster here; by default cluster.yaml."),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="Whose update is measured: adamw, adam, sgd, sgd+momentum, muon, adafactor.")
    ] = "adamw",
    emulate: Annotated[bool, typer.Option("--emulate", help="CPU ranks play the cluster's unequal devices.")] = False,
    testbed: Annotated[
        bool, typer.Option("--testbed", help="On benchmarks/testbed, from a checkout, as root.")
    ] = False,
    as_json: shared.Json = False,
) -> None:
    """Measure the devices, links and collectives of a running job.

    Plans made with the profile (hap.plan(..., profile=...)) are predicted from what was measured. With a model, its own
    operator calls are measured, which is most exact; without, those of small reference models.

    Example:  hap profile --cluster cluster.yaml -o profile.json

    So all ranks start on this machine. For several hosts, start it as you start training: torchrun ... -m hap profile
    --cluster cluster.yaml. Under torchrun without --cluster, a description of what is there is written, too.
    """
    shared.check_sizes(hf, batch, seq)
    if cluster is not None and cluster_out is not None:
        raise HapError("--cluster-out is where a discovered cluster goes, and --cluster names one that is known")
    if testbed and emulate:
        raise HapError("--testbed plays the cluster's devices itself: leave out --emulate")
    found_at = cluster_out or Path("cluster.yaml")
    if os.environ.get("RANK", "0") == "0":  # the rank that writes
        shared.check_target(out)
        shared.check_target(found_at if cluster is None else None)
    if testbed or "RANK" not in os.environ:
        if cluster is None:
            raise HapError("hap profile needs --cluster, or a job under torchrun whose cluster it can discover")
        from hap.cluster import ClusterSpec

        spec = ClusterSpec.load(cluster)
        _check_named(model, hf, batch, seq, optimizer)
        if testbed:
            tell(_on_testbed(spec, model, hf, batch, seq, optimizer), out, as_json)
        else:
            raise typer.Exit(_launch(spec))
        return
    _on_ranks(model, hf, batch, seq, cluster, out, found_at, optimizer, emulate, as_json)


def _check_named(model: str | None, hf: str | None, batch: int | None, seq: int | None, optimizer: str) -> None:
    """HapError here, in one line, for what every rank would refuse."""
    from hap.cost_models.optimizers import kind_of

    kind_of(optimizer)
    if (model, hf) != (None, None):
        shared.build(model, hf, batch, seq)


def _launch(spec: ClusterSpec) -> int:
    """The same command once more, on a rank for each device."""
    command = [sys.executable, "-m", "torch.distributed.run", *launch_arguments(spec, None, None), "-m", "hap"]
    return launched([*command, *sys.argv[1:]], environment(spec))


def _on_ranks(
    model: str | None,
    hf: str | None,
    batch: int | None,
    seq: int | None,
    cluster: str | None,
    out: Path,
    cluster_out: Path,
    optimizer: str,
    emulate: bool,
    as_json: bool,
) -> None:
    """What every rank does."""
    import torch
    import torch.distributed as dist

    from hap.cluster import ClusterSpec
    from hap.runtime.discover import discover
    from hap.runtime.emulate import NOTICE, slowdowns
    from hap.together import join

    spec = None if cluster is None else ClusterSpec.load(cluster)
    comm = join(None if spec is None else spec.backend, None)
    slowdown, said = None, []
    if emulate:
        if spec is None:
            raise HapError("--emulate needs --cluster, the cluster to be played")
        torch.set_num_threads(1)
        slowdown, said = slowdowns(spec)[comm.rank], [NOTICE]
    if spec is None:
        spec = discover(comm)
        if comm.rank == 0:
            shared.write(cluster_out, spec.to_yaml())
    found = measure_on(comm, spec, (model, hf, batch, seq), optimizer, slowdown, said)
    if comm.rank == 0:
        tell(found, out, as_json)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def measure_on(
    comm: Communicator,
    spec: ClusterSpec,
    named: tuple[str | None, str | None, int | None, int | None],
    optimizer: str,
    slowdown: float | None,
    said: list[str],
) -> Profile:
    """The profile, on every rank. ``named``: the model's arguments; none means the reference models."""
    from hap.capture import capture
    from hap.rules.choices import choices
    from hap.runtime.profile import measure
    from hap.runtime.profile_reference import reference_graphs

    if named[0] is None and named[1] is None:
        graphs = list(reference_graphs())
    else:
        built = shared.build(*named)
        graphs = [
            capture(built.model, built.example_inputs, loss_fn=built.loss_fn, example_targets=built.example_targets)
        ]
    able = [(graph, choices(graph).strategies) for graph in graphs]
    return measure(spec, comm, able, optimizers=(optimizer,), slowdown=slowdown, conditions=said)


def _on_testbed(
    spec: ClusterSpec, model: str | None, hf: str | None, batch: int | None, seq: int | None, optimizer: str
) -> Profile:
    sys.path.append(os.getcwd())  # the hap command, unlike python -m hap, does not look where it is run
    try:
        from benchmarks.testbed import RankError, Testbed
    except ModuleNotFoundError:
        raise HapError("--testbed needs a checkout: run it where benchmarks/ is") from None
    from hap.cost_models.profile import Profile

    try:
        with Testbed(spec) as bed:
            found = bed.run(_bed_rank, spec.to_yaml(), (model, hf, batch, seq), optimizer, timeout=300.0)
    except RankError as e:
        said = [line for line in str(e).splitlines() if line and not line.startswith(("(", " "))]
        raise HapError(f"rank {e.rank}: {said[-1] if said else e}") from e
    return Profile.model_validate_json(found[0])


def _bed_rank(
    rank: int, text: str, named: tuple[str | None, str | None, int | None, int | None], optimizer: str
) -> str:
    import torch
    import torch.distributed as dist

    from hap.cluster import ClusterSpec
    from hap.runtime.collectives import Communicator

    torch.set_num_threads(1)
    slowdown = float(os.environ["HAP_TESTBED_SLOWDOWN"])
    said = ["testbed, deadline mode: compute is CPU time x slow-down"]
    spec = ClusterSpec.from_yaml(text)
    found = measure_on(Communicator(dist.group.WORLD), spec, named, optimizer, slowdown, said)
    return str(found.model_dump_json())


def tell(found: Profile, out: Path, as_json: bool) -> None:
    """Save the profile, and print its summary: a few lines, or under --json what they are made of."""
    found.save(out)
    print(f"wrote {out}", file=sys.stderr)
    if not as_json:
        print(summary(found))
        return
    ranks = [{"device": r.device, "spread": r.spread, "calls": len(found.kinds[r.kind].calls)} for r in found.ranks]
    shared.print_json(
        {
            "out": str(out),
            "cluster": found.cluster,
            "fingerprint": found.fingerprint,
            "seconds_taken": found.seconds_taken,
            "conditions": found.conditions,
            "ranks": ranks,
            "links": [link.model_dump(mode="json") for link in found.links],
        }
    )


def summary(found: Profile) -> str:
    """A few lines: how long, how noisy, how well it fits."""
    lines = [f"profile of {found.cluster}, {len(found.ranks)} ranks, in {found.seconds_taken:.0f} s"]
    lines += found.conditions
    for rank in found.ranks:
        kind = found.kinds[rank.kind]
        residual = max((fit.residual for name, fit in kind.fits.items() if "." not in name), default=0.0)
        lines.append(
            f"{rank.device}: {len(kind.calls)} calls, spread {rank.spread:.1%}, class fits within {residual:.0%}, "
            f"in a step {kind.in_step:.2f} times as long"
        )
    for link in found.links:
        rate = f"{link.bytes_per_s * 8 / 1e6:.0f} Mbit/s, {link.latency_s * 1e6:.0f} us, spread {link.spread:.1%}"
        lines.append(f"rank {link.source} to {link.target}: {rate}")
    for one in found.collectives:
        lines.append(f"{one.kind} by {one.decomposition}: fits within {one.residual:.0%}, spread {one.spread:.0%}")
    return "\n".join(lines)


def simulate(
    plan: PlanArgument,
    cluster: ClusterOption,
    model: ModelArgument = None,
    hf: HuggingFace = None,
    batch: Batch = None,
    seq: SequenceLength = None,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", metavar="X.json", help="Measured speeds, by hap profile.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="X.json", help="Write a trace for Perfetto here.")
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """Play one step of a plan: who computes, who waits, what the critical path is. Of a step of several batches it is
    the last one, which exchanges what all of them left, and the update.

    The trace opens in ui.perfetto.dev or chrome://tracing. Needs the plan's model and cluster again, and its profile
    where it was made with one; a line says where other speeds are played.

    Example:  hap simulate gpt2.plan.json model.py:build --cluster cluster.yaml -o trace.json
    """
    from hap import api
    from hap.mesh_plan import load_plan

    shared.check_target(out)
    loaded = load_plan(plan)
    built = shared.build(model, hf, batch, seq)
    with shared.working("capturing the model"):
        timeline = api.simulate(
            built.model,
            loaded,
            cluster,
            example_inputs=built.example_inputs,
            example_targets=built.example_targets,
            loss_fn=built.loss_fn,
            profile=profile_file,
        )
    if said := other_speeds(loaded.provenance.profile_fingerprint, profile_file):
        print(f"{plan}: {said}", file=sys.stderr)
    if out is not None:
        from hap.report.trace import to_trace

        shared.write(out, to_trace(timeline, loaded.provenance.model))
    if as_json:
        shared.print_json(as_data(timeline))
    else:
        batches = loaded.gradient_accumulation_steps
        print(told(timeline) if batches == 1 else f"of a step of {batches} batches the last:\n{told(timeline)}")


def other_speeds(planned: str | None, given: Path | None) -> str:
    """What to say where a plan is played by other speeds than those that it was made with; nothing where it is not.
    ``planned``: the fingerprint of the plan's profile."""
    from hap.cost_models.profile import Profile

    if planned is not None and given is None:
        return f"made with a profile ({planned[:12]}), and played by the description: give --profile for measured ones"
    played = None if given is None else Profile.load(given).fingerprint
    if played == planned:
        return ""
    made = "without a profile" if planned is None else f"with another profile ({planned[:12]})"
    return f"made {made}, and played by that of {given}"


def as_data(timeline: Timeline) -> dict[str, object]:
    """What a script wants to know."""
    return {
        "step_s": timeline.step_s,
        "devices": timeline.devices,
        "busy_s": timeline.busy_s,
        "exposed_s": timeline.exposed_s,
        "idle_s": timeline.idle_s,
        "critical_path": [
            {"rank": s.rank, "name": s.name, "kind": s.kind, "start_s": s.start_s, "end_s": s.end_s}
            for s in timeline.critical_path
        ],
    }


def told(timeline: Timeline) -> str:
    """Each rank's time, and the longest parts of the critical path."""
    lines = [f"step {1e3 * timeline.step_s:.2f} ms"]
    rows = zip(timeline.devices, timeline.busy_s, timeline.exposed_s, timeline.idle_s, strict=True)
    for device, *seconds in rows:
        busy, exposed, idle = (f"{1e3 * s:.2f} ms ({s / timeline.step_s:.0%})" for s in seconds)
        lines.append(f"{device}: computes {busy}, communicates {exposed}, waits for others {idle}")
    path = timeline.critical_path
    shared_s = sum(s.seconds for s in path if s.stream == "communication")
    lines.append(f"critical path: {len(path)} spans, {shared_s / timeline.step_s:.0%} of it collectives; the longest:")
    for span in sorted(path, key=lambda s: -s.seconds)[:SHOWN]:
        where = "all ranks" if span.rank is None else timeline.devices[span.rank]
        lines.append(f"  {1e3 * span.seconds:.3f} ms  {span.kind} {span.name} ({where})")
    return "\n".join(lines)
