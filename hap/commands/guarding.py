"""``hap check``: plans kept in a repository, guarded without pytest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hap.commands import shared
from hap.commands.shared import Json


def check(
    folder: Annotated[Path, typer.Argument(metavar="PLANS/", help="A folder with golden plans and a check.yaml.")],
    update: Annotated[bool, typer.Option("--update", help="Write the plans found today over the golden ones.")] = False,
    as_json: Json = False,
) -> None:
    """Plan again and compare with the plans in a folder.

    The folder's check.yaml names for each plan the model, the cluster and what may get worse (docs/ci.md). Exit codes:
    0 all within their limits, 1 a plan got worse or is missing, 2 something could not be read, built or planned; what
    was found of the plans named before that is printed, too.

    Example:  hap check plans/
    """
    from hap.guard import Result, checked

    results: list[Result] = []
    try:
        with shared.working("planning"):
            for result in checked(folder, update=update):
                results.append(result)
    finally:  # where a later one fails, too: what was written, and what is worse
        if as_json and results:
            shared.print_json([r.to_json() for r in results])
        elif results:
            print("\n".join(map(str, results)))
    if not all(r.ok for r in results):
        raise typer.Exit(1)
