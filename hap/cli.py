"""The ``hap`` command, put together from ``hap/commands/``.

Every ``HapError`` becomes one line on stderr and exit code 2, as a usage error does; any other exception is a bug or
comes from the user's own code, and keeps its traceback. Imports of torch stand inside the commands, so that
``hap --help`` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from hap.commands import advising, clocks, diagnosing, guarding, launching, planning, reading, rules, shared
from hap.commands.launching import launch_arguments
from hap.errors import HapError

__all__ = ["app", "launch_arguments", "main"]

app = typer.Typer(
    name="hap",
    help="Train PyTorch models on GPUs that are not all alike.\n\nExample:  hap plan --hf gpt2 --cluster cluster.yaml",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(planning.plan)
app.command()(reading.explain)
app.command()(reading.diff)
app.command()(reading.report)
app.command()(guarding.check)
app.command()(planning.program)
app.command()(clocks.simulate)
app.command()(clocks.profile)
app.command()(diagnosing.diagnose)
app.command()(advising.advise)
app.add_typer(rules.app, name="rules")
app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})(launching.run)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. Exits with 0, 1 where ``check`` finds a worse plan, 2 for a refusal, or whatever a launched
    program returned."""
    path = list(sys.path)
    try:
        app(args=arguments, prog_name="hap")
    except HapError as e:
        print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        sys.path[:] = path  # commands put there where the user's file is


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    asked: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print HAP's version.")
    ] = False,
) -> None:
    """What goes before a command."""


@app.command()
def version(as_json: shared.Json = False) -> None:
    """Print HAP's version.

    Example:  hap version
    """
    from hap import __version__

    shared.print_json({"version": __version__}) if as_json else print(__version__)
