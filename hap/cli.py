"""The ``hap`` command. Thin: it parses, calls the doors of ``hap.api`` and prints.

Every ``HapError`` becomes one line on stderr and exit code 2, as a usage error does; any other exception is a bug or
comes from the user's own code, and keeps its traceback. Imports of torch stand inside the commands, so that
``hap --help`` is quick.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hap.errors import HapError

if TYPE_CHECKING:
    from hap.build import BuiltModel
    from hap.cluster import ClusterSpec

app = typer.Typer(
    name="hap",
    help="Train PyTorch models on GPUs that are not all alike.\n\nExample:  hap plan --hf gpt2 --cluster cluster.yaml",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="FILE.py:FUNCTION", help="Function returning (model, example_inputs), or a dict of them."),
]
HuggingFace = Annotated[
    str | None, typer.Option("--hf", metavar="NAME|CONFIG.json", help="A Hugging Face causal language model instead.")
]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Global batch size, with --hf.")]
Sequence_ = Annotated[int | None, typer.Option("--seq", min=1, help="Sequence length, with --hf.")]
ClusterOption = Annotated[str, typer.Option("--cluster", "-c", metavar="CLUSTER.yaml", help="The devices and links.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. Exits with 0, 2 for a refusal, or whatever a launched program returned."""
    try:
        app(args=arguments, prog_name="hap")
    except HapError as e:
        print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        raise SystemExit(2) from None


@app.command()
def version() -> None:
    """Print HAP's version.

    Example:  hap version
    """
    from hap import __version__

    print(__version__)


@app.command("plan")
def plan_command(
    cluster: ClusterOption,
    model: ModelArgument = None,
    hf: HuggingFace = None,
    batch: Batch = 8,
    seq: Sequence_ = None,
    optimizer: Annotated[str, typer.Option(help="Whose state counts as memory: adamw, adam, sgd, ...")] = "adamw",
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="X.plan.json", help="Write the plan here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan itself, not its summary.")] = False,
) -> None:
    """Plan a training step for a cluster.

    Needs no GPU, no weights and no process group. The plan is a file to read, diff and review.

    Example:  hap plan train.py:build --cluster cluster.yaml -o gpt2.plan.json
    """
    built = _build(model, hf, batch, seq)
    from hap import api
    from hap.cluster import ClusterSpec
    from hap.report.summary import summarize

    spec = ClusterSpec.load(cluster)
    plan = api.plan(
        built.model,
        spec,
        example_inputs=built.example_inputs,
        example_targets=built.example_targets,
        loss_fn=built.loss_fn,
        optimizer=optimizer,
    )
    if out is not None:
        _write(out, plan.to_json())
    print(plan.to_json() if as_json else summarize(plan, spec), end="" if as_json else "\n")


@app.command()
def explain(
    plan: Annotated[Path, typer.Argument(metavar="X.plan.json", help="A plan written by hap plan.")],
    as_json: Annotated[bool, typer.Option("--json", help="The prediction and the sizes as JSON.")] = False,
) -> None:
    """Say what a plan does, and why.

    Who holds what share, what is sharded, which collectives run, what a step should cost.

    Example:  hap explain gpt2.plan.json
    """
    from hap.plan import Plan
    from hap.report.summary import summarize

    loaded = Plan.load(plan)
    if as_json:
        print(loaded.model_dump_json(include={"provenance", "groups", "predicted", "devices"}, indent=1))
    else:
        print(summarize(loaded))


@app.command()
def program(
    plan: Annotated[Path, typer.Argument(metavar="X.plan.json", help="A plan written by hap plan.")],
    model: ModelArgument = None,
    hf: HuggingFace = None,
    batch: Batch = 8,
    seq: Sequence_ = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="X.py", help="Write here, not to stdout.")] = None,
) -> None:
    """Write a plan's program as Python.

    The same program that the ranks run, for a person to read; it runs by itself. Needs the plan's model again.

    Example:  hap program gpt2.plan.json train.py:build -o gpt2_program.py
    """
    from hap.plan import Plan

    loaded = Plan.load(plan)
    built = _build(model, hf, batch, seq)
    from hap import api

    source = api.python_source(
        built.model,
        loaded,
        example_inputs=built.example_inputs,
        example_targets=built.example_targets,
        loss_fn=built.loss_fn,
    )
    if out is None:
        print(source, end="")
    else:
        _write(out, source)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.py", help="A script that calls hap.compile.")],
    cluster: ClusterOption,
    host: Annotated[str | None, typer.Option(help="This machine's name in the cluster file.")] = None,
    master: Annotated[str | None, typer.Option(metavar="ADDRESS:PORT", help="Where the first host listens.")] = None,
) -> None:
    """Launch a script under torchrun.

    One rank per device of the cluster. Everything after SCRIPT.py is passed on to it, with --cluster.

    Example:  hap run --cluster cluster.yaml train.py --steps 100

    Without --host all ranks start on this machine. With it, run the same command on every host of the cluster file:
    hap run --cluster cluster.yaml --host left --master 10.0.0.1:29500 train.py
    """
    from hap.cluster import ClusterSpec

    if not script.is_file():
        raise HapError(f"{script}: no such file")
    launcher = launch_arguments(ClusterSpec.load(cluster), host, master)
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, str(script), "--cluster", cluster]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # torchrun sets the same, with a warning
    raise typer.Exit(subprocess.run([*command, *context.args], env=environment, check=False).returncode)


def launch_arguments(cluster: ClusterSpec, host: str | None, master: str | None) -> list[str]:
    """torchrun's options for the whole cluster here, or for one host of it. HapError if the host is unknown."""
    if host is None:
        return ["--standalone", "--nproc-per-node", str(cluster.world_size)]
    names = [h.name for h in cluster.hosts]
    if host not in names:
        raise HapError(f"no host {host!r} in the cluster (hosts: {', '.join(names)})")
    if len(names) > 1 and master is None:
        raise HapError("--host needs --master ADDRESS:PORT, the first host's address")
    address, _, port = (master or "localhost:29500").rpartition(":")
    if not address or not port.isdigit():
        raise HapError(f"--master {master!r}: expected ADDRESS:PORT")
    ranks = len(cluster.hosts[names.index(host)].devices)
    place = ["--nnodes", str(len(names)), "--node-rank", str(names.index(host)), "--nproc-per-node", str(ranks)]
    return [*place, "--master-addr", address, "--master-port", port]


def _build(model: str | None, hf: str | None, batch: int, seq: int | None) -> BuiltModel:
    from hap.build import build_from, build_hugging_face

    if (model is None) == (hf is None):
        raise HapError("name one model: either FILE.py:FUNCTION or --hf NAME")
    return build_from(model) if model is not None else build_hugging_face(str(hf), batch, seq)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise HapError(f"{path}: cannot write ({e.strerror})") from None
    print(f"wrote {path}", file=sys.stderr)
