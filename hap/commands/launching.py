"""``hap run``: a user's script on every device of a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from hap.commands.shared import ClusterOption, Json, print_json
from hap.errors import HapError

if TYPE_CHECKING:
    from hap.cluster import ClusterSpec

# On CPUs, for glibc: what a step frees stays with the process, as in a GPU's caching allocator. Given back to the
# kernel, every step faults it in anew, page by page.
KEEPS_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.py", help="A script that calls hap.compile.")],
    cluster: ClusterOption,
    plan: Annotated[
        Path | None, typer.Option(metavar="X.plan.json", help="No ranks on devices that this plan leaves out.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="This machine's name in the cluster file.")] = None,
    master: Annotated[str | None, typer.Option(metavar="ADDRESS:PORT", help="Where the first host listens.")] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Each rank writes there what it does, for hap diagnose.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Launch a script under torchrun.

    One rank per device of the cluster, or with --plan of those that the plan is for. Everything after SCRIPT.py is the
    script's own; it also gets --cluster, and --plan where that was given.

    Example:  hap run --cluster cluster.yaml train.py --steps 100

    Without --host all ranks start on this machine. With it, run the same command on every host of the cluster file:
    hap run --cluster cluster.yaml --host left --master 10.0.0.1:29500 train.py

    Ranks on CPUs keep the memory that a step frees, for the next one (glibc's MALLOC_ variables, if they are not set).

    Exits with what torchrun returned; Ctrl-C and SIGTERM end the ranks, too. With --json the script's own output goes
    to stderr, and stdout has the command, its exit code and its seconds.
    """
    from hap.cluster import ClusterSpec
    from hap.run_record import VARIABLE, make_folder, used

    if not script.is_file():
        raise HapError(f"{script}: no such file")
    part, own = ClusterSpec.load(cluster), dict[str, str]()
    if plan is not None:
        part, own = _planned(plan, part, host)
    launcher = launch_arguments(part, host, master)
    if record is not None:
        own = {**own, VARIABLE: str(record.absolute())}
        make_folder(record)
        if host is None and any(record.glob("rank-*.jsonl")):  # else another host may be quicker
            raise used(record)
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "--", str(script), "--cluster", cluster]
    command += [] if plan is None else ["--plan", str(plan)]
    command += context.args
    started = time.monotonic()
    out = sys.stderr if as_json else None
    code = launched(command, environment(part) | own, out)
    if as_json:
        print_json({"command": command, "exit_code": code, "seconds": time.monotonic() - started})
    raise typer.Exit(code)


def launched(command: list[str], environment: dict[str, str], stdout: TextIO | None = None) -> int:
    """Run torchrun to its end: what it returned, or 128 and the number of the signal that ended it.

    Ranks are in sessions of their own, and nobody but torchrun ends them. So it is told of what would end this process,
    and has the time that it takes; once, in a process group of its own: told again it would stop ending them."""
    told: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: object) -> None:
        if number not in told:
            told.append(number)
            if process is not None:
                process.send_signal(number)

    before = {number: signal.getsignal(number) for number in PASSED_ON}
    before = {number: was for number, was in before.items() if was not in (signal.SIG_IGN, None)}  # nohup ignores one
    try:
        for number in before:
            signal.signal(number, pass_on)
        process = subprocess.Popen(command, env=environment, stdout=stdout, process_group=0)
        for earlier in told:
            process.send_signal(earlier)
        code = process.wait()
    finally:
        for number, was in before.items():
            signal.signal(number, was)
    return 128 + told[0] if told and code else code


def environment(cluster: ClusterSpec) -> dict[str, str]:
    """Of the ranks: this process's, which decides where it says something, with what is missing there."""
    kept = KEEPS_MEMORY if cluster.backend == "gloo" else {}
    return {"OMP_NUM_THREADS": "1", **kept, **os.environ}  # torchrun sets the first, with a warning


def _planned(path: Path, cluster: ClusterSpec, host: str | None) -> tuple[ClusterSpec, dict[str, str]]:
    """The part of the cluster that a plan is for, and what the environment says there. HapError for a host without any
    of its devices."""
    from hap.api import planned_part
    from hap.mesh import meshed_part
    from hap.mesh_plan import MeshPlan, load_plan
    from hap.starting import visible

    plan = load_plan(path)
    if isinstance(plan, MeshPlan):
        part = meshed_part(plan, cluster)
        if host in plan.left_out:
            raise HapError(f"the plan leaves out host {host!r}: start nothing there")
        return part, {}
    part = planned_part(plan, cluster)
    plan.provenance.check_cluster(part.name, part.fingerprint)
    known, left = ([h.name for h in c.hosts] for c in (cluster, part))
    if host in known and host not in left:
        raise HapError(f"the plan leaves out all devices of host {host!r}: start nothing there")
    return part, visible(plan, host)


def launch_arguments(cluster: ClusterSpec, host: str | None, master: str | None) -> list[str]:
    """torchrun's options for the whole cluster here, or for one host of it. HapError if the host is unknown."""
    if host is None:
        if master is not None:
            raise HapError("--master goes with --host")
        return ["--standalone", "--nproc-per-node", str(cluster.world_size)]
    names = [h.name for h in cluster.hosts]
    if host not in names:
        raise HapError(f"no host {host!r} in the cluster (hosts: {', '.join(names)})")
    if len(names) > 1 and master is None:
        raise HapError("--host needs --master ADDRESS:PORT, the first host's address")
    address, _, port = (master or "localhost:29500").rpartition(":")
    if not address or not port.isdigit():
        raise HapError(f"--master {master!r}: expected ADDRESS:PORT")
    ranks = cluster.hosts[names.index(host)].size
    place = ["--nnodes", str(len(names)), "--node-rank", str(names.index(host)), "--nproc-per-node", str(ranks)]
    return [*place, "--master-addr", address, "--master-port", port]
