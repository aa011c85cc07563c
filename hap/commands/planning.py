"""``hap plan`` and ``hap program``: from a model and a cluster to a plan, and from a plan to its program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hap.commands import shared
from hap.commands.shared import (
    Batch,
    ClusterOption,
    HuggingFace,
    Json,
    ModelArgument,
    Optimizer,
    PlanArgument,
    SequenceLength,
)
from hap.errors import HapError


def plan(
    cluster: ClusterOption,
    model: ModelArgument = None,
    hf: HuggingFace = None,
    batch: Batch = None,
    seq: SequenceLength = None,
    optimizer: Optimizer = "adamw",
    effort: Annotated[
        Literal["quick", "normal", "thorough"],
        typer.Option(help="How long to search, quick: seconds; thorough: and to prove how near the best plan is."),
    ] = "normal",
    method: Annotated[
        Literal["milp", "astar"],
        typer.Option(help="Strategies by an integer program, or synthesised by A*, which takes longer."),
    ] = "milp",
    budget_s: Annotated[
        float | None,
        typer.Option("--budget-s", metavar="SECONDS", help="Take the best plan found by then; not reproducible."),
    ] = None,
    leave_out: Annotated[
        bool, typer.Option("--leave-out", help="Leave out the slowest devices where that is faster.")
    ] = False,
    accumulate: Annotated[
        str,
        typer.Option(
            "--gradient-accumulation-steps",
            metavar="N|best",
            help="Batches of a step, whose gradients are added up; best: as many parts of the batch as are fastest.",
        ),
    ] = "1",
    reduce_dtype: Annotated[
        Literal["bfloat16", "float16"] | None,
        typer.Option("--reduce-dtype", help="Exchange gradients in this dtype; they and updates keep their own."),
    ] = None,
    mesh: Annotated[
        Literal["flat", "hosts", "best"],
        typer.Option(help="One axis over all devices; two, between hosts and inside each; or the faster of both."),
    ] = "flat",
    profile: Annotated[
        Path | None, typer.Option(metavar="PROFILE.json", help="Speeds measured by hap profile on this cluster.")
    ] = None,
    add: Annotated[
        list[str] | None, typer.Option(metavar="8xA100-40GB[@PRICE]", help="What if: one more host with these devices.")
    ] = None,
    without: Annotated[list[str] | None, typer.Option(metavar="HOST", help="What if: this host is gone.")] = None,
    link: Annotated[
        list[str] | None, typer.Option(metavar="HOST-HOST=25Gbit/s", help="What if: this much between two hosts.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="X.plan.json", help="Write the plan here.")] = None,
    as_json: Json = False,
) -> None:
    """Plan a training step for a cluster.

    Needs no GPU, no weights and no process group. The plan is a file to read, diff and review. The search is
    bounded by counts of work (--effort), so that the same inputs give the same plan on any machine. --budget-s bounds
    its seconds, too: a plan that was stopped so says it, and another run may find another.

    Example:  hap plan model.py:build --cluster cluster.yaml -o gpt2.plan.json

    With --leave-out the plan is for fewer devices where a step is shorter without the slowest kinds, or without some
    hosts; it then says which it leaves out, what a step of all would take, and how to start the job on the others.

    With --gradient-accumulation-steps the plan is for a loop that adds up the gradients of so many batches before the
    optimizer steps, all but the last under program.no_sync(); times are of one batch, the mean over a step's. With best
    the batch is what a step has in all, and the plan says in how many parts it is fastest.

    With --reduce-dtype bfloat16 half as much travels for gradients of float32, each rounded to three digits on the way.

    With --mesh hosts the batch is dealt out between the hosts, and each host's part is planned for its devices: worth
    its while where the batch is large and hosts hold several devices. --mesh best plans both and takes the faster.

    With --add, --without or --link nothing is written: the cluster is compared with what it would be, each change alone
    and all of them together, ranked by samples a second and, where hosts have a price_per_hour, by samples per money:
    hap plan --hf gpt2 -c cluster.yaml --add 8xA100-40GB@12.5 --without host3 --link left-right=25Gbit/s
    """
    changes = [*(("add", a) for a in add or ()), *(("without", w) for w in without or ())]
    changes += [("link", entry) for entry in link or ()]
    batches = _batches(accumulate)
    given = {"profile": profile, "budget_s": budget_s, "method": None if method == "milp" else method}
    of_one_axis: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if changes and (of_one_axis or (out, mesh, leave_out) != (None, "flat", False)):
        unfit = "--out, --mesh, --profile, --budget-s, --method and --leave-out"
        raise HapError(f"--add, --without and --link compare clusters; leave out {unfit}")
    if mesh != "flat" and of_one_axis:
        raise HapError(f"--mesh {mesh} goes without --profile, --budget-s and --method")
    shared.check_target(out)
    built = shared.build(model, hf, batch, seq)
    from hap import api
    from hap.cluster import ClusterSpec

    spec = ClusterSpec.load(cluster)
    if changes:
        if batches == "best":
            raise HapError("--add, --without and --link compare clusters for one number of batches; name it")
        from hap.purchases import compare

        with shared.working("planning every variant"):
            ranking = compare(
                built, spec, changes, optimizer=optimizer, effort=effort, batches=batches, reduce_dtype=reduce_dtype
            )
        shared.print_json(ranking.to_json()) if as_json else print(ranking)
        return
    from hap.axes import plan_axes

    with shared.working("planning"):
        found = plan_axes(
            mesh,
            built.model,
            spec,
            example_inputs=built.example_inputs,
            example_targets=built.example_targets,
            loss_fn=built.loss_fn,
            optimizer=optimizer,
            effort=effort,
            leave_out=leave_out,
            gradient_accumulation_steps=batches,
            reduce_dtype=reduce_dtype,
            **of_one_axis,
        )
    from hap.mesh_plan import MeshPlan
    from hap.report.mesh import summarize_mesh
    from hap.report.summary import summarize

    if out is not None:
        shared.write(out, found.to_json())
    if as_json:
        print(found.to_json(), end="")
    elif isinstance(found, MeshPlan):
        print(summarize_mesh(found))
    else:
        sizes = {name: parameter.nbytes for name, parameter in built.model.named_parameters()}
        print(summarize(found, api.planned_part(found, spec), sizes))


def _batches(text: str) -> int | Literal["best"]:
    if text == "best":
        return "best"
    if not text.isdecimal() or int(text) < 1:
        raise HapError(f"--gradient-accumulation-steps {text}: expected a number from 1 on, or best")
    return int(text)


def program(
    plan: PlanArgument,
    model: ModelArgument = None,
    hf: HuggingFace = None,
    batch: Batch = None,
    seq: SequenceLength = None,
    host: Annotated[
        str | None, typer.Option(help="Of a plan of two axes: whose ranks' program; by default the first host's.")
    ] = None,
    out: shared.PythonOut = None,
    as_json: Json = False,
) -> None:
    """Write a plan's program as Python.

    The same program that the ranks run, for a person to read; it runs by itself, but for that of one host of several.
    Needs the plan's model again.

    Example:  hap program gpt2.plan.json model.py:build -o gpt2_program.py
    """
    from hap.mesh_plan import load_plan

    shared.check_target(out)
    loaded = load_plan(plan)
    built = shared.build(model, hf, batch, seq)
    from hap import api

    with shared.working("capturing the model"):
        source = api.python_source(
            built.model,
            loaded,
            host=host,
            example_inputs=built.example_inputs,
            example_targets=built.example_targets,
            loss_fn=built.loss_fn,
        )
    if out is not None:
        shared.write(out, source)
    if as_json:
        written = None if out is None else str(out)
        shared.print_json({"model": loaded.provenance.model, "plan": loaded.checksum, "out": written, "source": source})
    elif out is None:
        print(source, end="")
