"""``hap rules check``: every operator's sharding rule, proved by running the operator on uneven pieces."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from hap.commands import shared
from hap.commands.shared import Batch, HuggingFace, Json, ModelArgument, SequenceLength
from hap.errors import HapError

app = typer.Typer(
    help="The sharding rules of operators.\n\nExample:  hap rules check --op aten.mm.default",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def rules() -> None:
    """The sharding rules of operators.

    Example:  hap rules check --op aten.mm.default
    """


@app.command()
def check(
    model: ModelArgument = None,
    hf: HuggingFace = None,
    batch: Batch = 8,
    seq: SequenceLength = None,
    op: Annotated[str | None, typer.Option("--op", metavar="NAME", help="This operator only.")] = None,
    as_json: Json = False,
) -> None:
    """Prove the rules: run each operator on pieces cut every way, unevenly and with an empty one, and compare.

    Over the calls of one model, or without one over the calls of HAP's own zoo. Prints proved, wrong and missing per
    operator; exits with 1 if anything is wrong or missing.

    Example:  hap rules check --op aten.mm.default
    """
    from hap.capture import capture
    from hap.rules.check import check_calls, describe, graph_calls
    from hap.rules.instances import load_calls

    if model is None and hf is None:
        calls = load_calls()
    else:
        built = shared.build(model, hf, batch, seq)
        graph = capture(built.model, built.example_inputs, loss_fn=built.loss_fn, example_targets=built.example_targets)
        calls = graph_calls([graph])
    with shared.working("proving"):
        found = check_calls(calls, op)
    if not found:
        raise HapError(f"no call of {op!r} among {len(calls)}" if op else "the model calls no operator")
    if as_json:
        shared.print_json([{"verdict": c.verdict, **asdict(c)} for c in found])
    else:
        print("\n".join(describe(found)))
    if any(c.wrong or c.missing for c in found):
        raise typer.Exit(1)
