"""Options that several commands take, in the same words, and what all do alike: build a model, write a file, print
JSON, show that work is under way."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hap.errors import HapError

if TYPE_CHECKING:
    from hap.build import BuiltModel

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="FILE.py:FUNCTION", help="Function returning (model, example_inputs), or a dict of them."),
]
PlanArgument = Annotated[Path, typer.Argument(metavar="X.plan.json", help="A plan written by hap plan.")]
HuggingFace = Annotated[
    str | None, typer.Option("--hf", metavar="NAME|CONFIG.json", help="A Hugging Face causal language model instead.")
]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Global batch size, with --hf; by default 8.")]
SequenceLength = Annotated[int | None, typer.Option("--seq", min=1, help="Sequence length, with --hf.")]
ClusterOption = Annotated[str, typer.Option("--cluster", "-c", metavar="CLUSTER.yaml", help="The devices and links.")]
Optimizer = Annotated[
    str, typer.Option(help="Whose state counts as memory: adamw, adam, sgd, sgd+momentum, muon, adafactor.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PythonOut = Annotated[Path | None, typer.Option("--out", "-o", metavar="X.py", help="Write here, not to stdout.")]


def check_sizes(hf: str | None, batch: int | None, seq: int | None) -> None:
    """HapError for sizes that no model is built with."""
    if hf is None and (batch, seq) != (None, None):
        raise HapError("--batch and --seq go with --hf; FILE.py:FUNCTION returns its own example inputs")


def build(model: str | None, hf: str | None, batch: int | None, seq: int | None) -> BuiltModel:
    """The one model that the arguments name. HapError if they name none or two, or sizes that it is not built with."""
    from hap.build import build_from, build_hugging_face, folder_of

    if (model is None) == (hf is None):
        raise HapError("name one model: either FILE.py:FUNCTION or --hf NAME")
    check_sizes(hf, batch, seq)
    if model is None:
        return build_hugging_face(str(hf), batch, seq)
    built = build_from(model)
    sys.path.insert(0, str(folder_of(model)))  # until the command ends: a model may import more when it is first called
    return built


def check_target(path: Path | None) -> None:
    """HapError if no file can be written there: before work that takes long, whose outcome would be lost."""
    if path is None:
        return
    if os.path.isdir(path):
        raise HapError(f"{path}: cannot write (a folder)")
    target = Path(os.path.realpath(path))
    if not os.path.isdir(target.parent):
        raise HapError(f"{path}: cannot write (no folder {path.parent})")
    if not os.access(target if os.path.exists(target) else target.parent, os.W_OK):
        raise HapError(f"{path}: cannot write (no permission)")


def write(path: Path, text: str) -> None:
    """Write a text file and say so on stderr. HapError if it cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise HapError(f"{path}: cannot write ({e.strerror})") from None
    print(f"wrote {path}", file=sys.stderr)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


@contextmanager
def working(on: str) -> Iterator[None]:
    """A line with a spinner on stderr while the body runs, where somebody is looking; silent in pipes and CI."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"{on} ..."):
        yield
