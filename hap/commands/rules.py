"""``hap rules``: every operator's sharding rule, proved by running it on uneven pieces; rules found the same way."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from hap.commands import shared
from hap.commands.shared import Batch, HuggingFace, Json, ModelArgument, SequenceLength
from hap.errors import HapError

if TYPE_CHECKING:
    from hap.rules.notation import Call

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
    batch: Batch = None,
    seq: SequenceLength = None,
    op: Annotated[str | None, typer.Option("--op", metavar="NAME", help="This operator only.")] = None,
    as_json: Json = False,
) -> None:
    """Prove the rules: run each operator on pieces cut every way, unevenly and with an empty one, and compare.

    Over the calls of one model, or without one over the calls of HAP's own zoo. Prints proved, wrong and missing per
    operator; exits with 1 if anything is wrong or missing.

    Example:  hap rules check --op aten.mm.default
    """
    from hap.rules.check import check_calls, describe

    calls = _calls(model, hf, batch, seq)
    with shared.working("proving"):
        found = check_calls(calls, op)
    if not found:
        raise _nothing(op, model or hf)
    if as_json:
        shared.print_json([{"verdict": c.verdict, **asdict(c)} for c in found])
    else:
        print("\n".join(describe(found)))
    if any(c.wrong or c.missing for c in found):
        raise typer.Exit(1)


@app.command()
def discover(
    model: ModelArgument = None,
    hf: HuggingFace = None,
    batch: Batch = None,
    seq: SequenceLength = None,
    op: Annotated[str | None, typer.Option("--op", metavar="NAME", help="This operator, known or not.")] = None,
    as_json: Json = False,
) -> None:
    """Find rules by running operators on small tensors cut every way, and keep what is proved.

    For the operators of one model that have no rule, or for one operator. Prints what was found for each kind of call,
    and the line that lets a model use it. An operator may kill its process: that is found out, too.

    Example:  hap rules discover --op aten.topk.default
    """
    from hap.rules.check import discover_calls

    calls = _calls(model, hf, batch, seq)
    with shared.working("discovering"):
        found = discover_calls(calls, op)
    if not found and op is not None:
        raise _nothing(op, model or hf)
    if as_json:
        shared.print_json([{"op": d.op, "outcome": d.outcome, "rows": d.forms, "detail": d.detail} for d in found])
        return
    for d in found:
        print(f"{d.outcome:9}{d.op}: {d.detail}")
        for form in d.forms:
            print(f"         {form}")
    unknown = dict.fromkeys(d.op for d in found if d.wanted)
    for name in unknown:
        print(f'to use it: hap.discover_rule("{name}")')
    if not found:
        print("every operator has a rule")


def _calls(model: str | None, hf: str | None, batch: int | None, seq: int | None) -> tuple[Call, ...]:
    """Of the model that is named, or else of HAP's zoo."""
    from hap.capture import capture
    from hap.rules.check import graph_calls
    from hap.rules.instances import load_calls

    if model is None and hf is None:
        shared.check_sizes(hf, batch, seq)
        return load_calls()
    built = shared.build(model, hf, batch, seq)
    graph = capture(built.model, built.example_inputs, loss_fn=built.loss_fn, example_targets=built.example_targets)
    return graph_calls([graph])


def _nothing(op: str | None, model: str | None) -> HapError:
    if op is None:
        return HapError("the model calls no operator")
    if model is not None:
        return HapError(f"{model} does not call {op!r} (names are like aten.mm.default)")
    return HapError(f"no model of HAP's zoo calls {op!r} (names are like aten.mm.default): name a model that does")
