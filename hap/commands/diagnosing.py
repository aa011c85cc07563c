"""``hap diagnose``: what is wrong with a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hap.commands import shared
from hap.commands.shared import Json

if TYPE_CHECKING:
    from hap.diagnosis.verdict import Diagnosis


def diagnose(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="What hap run --record or program.record wrote.")],
    plan: Annotated[
        Path | None, typer.Option(metavar="X.plan.json", help="The run's plan; by default the one in the folder.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="X.yaml", help="Write the cluster as it was found here.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="X.json", help="Write the last steps as a trace for Perfetto here.")
    ] = None,
    collectives: Annotated[
        bool, typer.Option("--collectives", help="What was sent, how large, and how long it was waited for.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what stopped a run, or what makes it slow: which rank, which link, since when.

    Works on the records alone, while the run goes on or afterwards, on any machine: a rank that never comes, one that
    computes more slowly than its plan says or than it did, one that is late between steps, a slow sender, receiver or
    link. Ranks that are slower than others because their devices are is what the plan is for, and no finding. With -o
    the cluster file gets what was found, so that hap plan can plan for it.

    Example:  hap diagnose runs/1

    Records come from hap run --record runs/1 ..., or from program.record("runs/1") in a script. Exits with 1 if
    something was found.
    """
    from hap.diagnosis.run import load_run
    from hap.diagnosis.trace import to_trace
    from hap.diagnosis.traffic import find_traffic
    from hap.diagnosis.verdict import diagnose, told

    shared.check_target(out)
    shared.check_target(trace)
    loaded = load_run(run, plan)
    found = diagnose(loaded)
    traffic = find_traffic(loaded) if collectives else None
    if as_json:
        more = {} if traffic is None else {"collectives": traffic.to_json()}
        shared.print_json({**found.to_json(), **more})
    else:
        print("\n\n".join([told(found), *([] if traffic is None else [str(traffic)])]))
    if trace is not None:
        shared.write(trace, to_trace(loaded))
    for change in [] if out is None else _write_cluster(found, out):
        print(f"in {out}: {change}", file=sys.stderr)
    if found.findings:
        raise typer.Exit(1)


def _write_cluster(found: Diagnosis, out: Path) -> list[str]:
    """What was changed, in words."""
    from hap.diagnosis.mended import as_found
    from hap.errors import PlanError

    cluster = None if found.run.expected is None else found.run.expected.cluster
    if cluster is None:
        raise PlanError("the cluster as found needs the run's plan, which describes the cluster; name it by --plan")
    mended, said = as_found(cluster, found.findings)
    shared.write(out, mended.to_yaml())
    return list(said)
