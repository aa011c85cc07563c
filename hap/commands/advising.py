"""``hap advise``: what would make training faster."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from hap.commands import shared
from hap.commands.shared import Batch, ClusterOption, HuggingFace, Json, ModelArgument, Optimizer, SequenceLength


def advise(
    cluster: ClusterOption,
    model: ModelArgument = None,
    hf: HuggingFace = None,
    batch: Batch = None,
    seq: SequenceLength = None,
    optimizer: Optimizer = "adamw",
    effort: Annotated[
        Literal["quick", "normal"], typer.Option(help="How long to search for each way; normal takes minutes.")
    ] = "quick",
    as_json: Json = False,
) -> None:
    """Say what would make training faster, and how much.

    Every way that goes with this model and cluster is planned and put beside a plain plan: slow devices left out, the
    batch in parts, two axes, gradients in bfloat16, lower precision, larger batches, better hardware. The table says
    what each trains: what one device would, too, the same but for rounding, or something else.

    Example:  hap advise model.py:build --cluster cluster.yaml

    Needs no GPU, no weights and no process group. Predictions are the cost model's; nothing is run.
    """
    from hap.advice import advise
    from hap.cluster import ClusterSpec

    built = shared.build(model, hf, batch, seq)
    spec = ClusterSpec.load(cluster)

    def progress(name: str) -> None:
        if sys.stderr.isatty():
            print(f"planning: {name}", file=sys.stderr)

    found = advise(built, spec, optimizer=optimizer, effort=effort, progress=progress)
    shared.print_json(found.to_json()) if as_json else print(found)
