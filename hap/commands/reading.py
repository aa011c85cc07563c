"""``hap explain``, ``hap diff`` and ``hap report``: what a plan says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hap.commands import shared
from hap.commands.shared import Batch, HuggingFace, Json, ModelArgument, PlanArgument, SequenceLength
from hap.errors import HapError

if TYPE_CHECKING:
    from hap.build import BuiltModel
    from hap.plan import Plan


def explain(
    plan: PlanArgument,
    model: ModelArgument = None,
    hf: HuggingFace = None,
    batch: Batch = None,
    seq: SequenceLength = None,
    node: Annotated[
        str | None, typer.Option(metavar="NAME", help="Why this node or parameter lies so; needs the plan's model.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a plan does, and why.

    First a paragraph: what was chosen, how fast, what limits it, what would help most. Then who holds what share, which
    collectives run, what each layer costs. With --node every placement that one operator call, parameter or input could
    have, with what a step would then cost.

    Example:  hap explain gpt2.plan.json

    With --node, name the plan's model as it was planned:
    hap explain gpt2.plan.json --hf gpt2 --batch 32 --seq 512 --node transformer.h.0.attn.c_attn.weight
    """
    from hap.errors import PlanError
    from hap.mesh_plan import MeshPlan, load_plan
    from hap.report.explain import explain, paragraph
    from hap.report.facts import Facts
    from hap.report.mesh import mesh_to_json, summarize_mesh

    if node is None and (model, hf, batch, seq) != (None, None, None, None):
        raise HapError(
            "FILE.py:FUNCTION, --hf, --batch and --seq go with --node; a plan says the rest without its model"
        )
    either = load_plan(plan)
    if isinstance(either, MeshPlan):
        if node is not None:
            raise PlanError("--node asks about a plan of one axis, and this one is of two")
        shared.print_json(mesh_to_json(either)) if as_json else print(summarize_mesh(either))
        return
    loaded = either
    if node is not None:
        _explain_node(loaded, shared.build(model, hf, batch, seq), node, as_json)
    elif as_json:
        body = loaded.model_dump(mode="json", include={"provenance", "groups", "predicted", "devices"})
        facts = Facts(loaded)
        shared.print_json({"paragraph": paragraph(facts), **body, **facts.to_json()})
    else:
        print(explain(loaded))


def _explain_node(plan: Plan, built: BuiltModel, name: str, as_json: bool) -> None:
    from hap.capture import capture
    from hap.capture.narrow import as_planned
    from hap.errors import PlanError
    from hap.report.facts import Facts
    from hap.report.node import explain_node, find_node
    from hap.rules.choices import choices
    from hap.same_model import check_model

    with shared.working("capturing the model"):
        graph = capture(built.model, built.example_inputs, loss_fn=built.loss_fn, example_targets=built.example_targets)
    graph = as_planned(graph, plan.provenance)
    check_model(plan, graph)
    cluster = Facts(plan).cluster
    if cluster is None:
        raise PlanError("the plan was made by an older HAP and describes no cluster; plan again")
    found = choices(graph)
    strategies = found.strategies[find_node(graph, name).name]
    with shared.working("judging the alternatives"):
        report = explain_node(plan, graph, cluster, strategies, name)
    shared.print_json(report.to_json()) if as_json else print(report)


def diff(
    before: Annotated[Path, typer.Argument(metavar="A.plan.json", help="The older plan.")],
    after: Annotated[Path, typer.Argument(metavar="B.plan.json", help="The newer one.")],
    as_json: Json = False,
) -> None:
    """Say what changed from one plan to another.

    What they were made for, times, memory and traffic before and after, and which decisions are not the same.

    Example:  hap diff old.plan.json new.plan.json
    """
    from hap.mesh_plan import load_plan
    from hap.report.diff import diff

    found = diff(load_plan(before), load_plan(after))
    shared.print_json(found.to_json()) if as_json else print(found)


def report(
    plan: PlanArgument,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="What a run measured (steps.csv), beside the prediction."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="X.html", help="Where; by default the plan's name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a plan as one HTML page.

    Timeline, memory, traffic between devices and where every layer's work lies, on one self-contained page that needs
    no network. With --run, measured steps stand beside the prediction.

    Example:  hap report gpt2.plan.json -o gpt2.html
    """
    from hap.mesh_plan import MeshPlan, load_plan
    from hap.report.mesh_page import render_mesh_page
    from hap.report.page import load_run, render_page

    loaded = load_plan(plan)
    name = plan.name.removesuffix(".json").removesuffix(".plan")
    target = out or plan.with_name(f"{name}.html")
    shared.check_target(target)
    measured = None if run is None else load_run(run, loaded)
    if measured is not None and measured.other_plan is not None:
        print(f"{run}: a run of another plan than {plan}", file=sys.stderr)
    with shared.working("drawing"):
        text = render_mesh_page(loaded, measured) if isinstance(loaded, MeshPlan) else render_page(loaded, measured)
    shared.write(target, text)
    if as_json:
        shared.print_json({"report": str(target), "characters": len(text)})
