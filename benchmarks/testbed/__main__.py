"""``python -m benchmarks.testbed up|run|down|status``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from benchmarks.testbed import cgroup, network
from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.errors import RankError, TestbedError
from benchmarks.testbed.layout import PREFIX
from benchmarks.testbed.record import Record, clean, records, unrecorded
from hap.cluster import ClusterSpec
from hap.errors import HapError
from hap.units import format_rate


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 if a rank failed, 2 for what this machine cannot do."""
    given = _parser().parse_args(arguments)
    try:
        return int(given.function(given))
    except HapError as e:
        print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except RankError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


def up(given: argparse.Namespace) -> int:
    """Build a bed that stands until ``down``."""
    bed = Testbed(ClusterSpec.load(given.cluster), given.mode)
    bed.up(owned=False)
    _describe(bed)
    print(f"bed {bed.layout.bed_id} stands; `python -m benchmarks.testbed down` removes it")
    return 0


def run(given: argparse.Namespace) -> int:
    """Run a command as every rank: on the bed that ``up`` made for this cluster, or on one of its own."""
    if not given.command:
        raise TestbedError("no command: python -m benchmarks.testbed run --cluster FILE -- python train.py")
    cluster = ClusterSpec.load(given.cluster)
    standing = [
        r for r in records() if r.owner is None and (r.fingerprint, r.mode) == (cluster.fingerprint, given.mode)
    ]
    reason = network.missing()
    if reason is not None:
        print(f"testbed: {reason}; running without it", file=sys.stderr)
        bed = Testbed(cluster, given.mode, enforced=False)
    elif standing:
        bed = Testbed.attach(cluster, standing[-1])
    else:
        bed = Testbed(cluster, given.mode)
        bed.up()
    try:
        _describe(bed)
        before = bed.counters()
        bed.run(given.command, timeout=given.timeout, echo=sys.stdout)
        went = bed.counters() - before
        print(
            f"testbed: {went.drops} drops, {went.timeouts} timeouts, {went.retransmits} segments sent again, "
            f"steal {went.steal_share:.1%}",
            file=sys.stderr,
        )
    finally:
        bed.down()
    return 0


def down(given: argparse.Namespace) -> int:
    """Remove beds that ``up`` made and whatever killed runs left, or only those named. Running ones are left alone."""
    if os.geteuid() != 0 and (records() or network.existing()):
        raise TestbedError("needs root (it removes network namespaces): run it with sudo")
    removed = 0
    named = set(given.beds)
    for record in records():
        if named and record.bed_id not in named:
            continue
        if record.owner is None or record.leftover:
            clean(record.bed_id, record.controller)
            removed += 1
        else:
            print(f"bed {record.bed_id} is in use by process {record.owner.pid}; left alone")
    for bed_id in unrecorded():
        if named and bed_id not in named:
            continue
        clean(bed_id, cgroup.find())
        removed += 1
    print(f"removed {removed} bed{'' if removed == 1 else 's'}" if removed else "nothing to remove")
    return 0


def status(given: argparse.Namespace) -> int:
    """What beds there are, and whether this machine can make one."""
    for record in records():
        _show(record)
    for bed_id in unrecorded():
        print(f"bed {bed_id}: left over, without a record; `down` removes it")
    if not records() and not unrecorded():
        print("no beds")
    reason = network.missing()
    controller = cgroup.find()
    print(f"network namespaces: {'yes' if reason is None else reason}")
    group = f"v{controller.version}, a quota holds the {controller.holds}" if controller else "none that it can write"
    print(f"cpu cgroup: {group}")
    return 0


def _show(record: Record) -> None:
    if record.owner is None:
        state = "standing"
    else:
        state = f"left over by process {record.owner.pid}" if record.leftover else f"in use by {record.owner.pid}"
    names = [n for n in network.existing() if n.startswith(f"{PREFIX}{record.bed_id}-")]
    inside = sum(len(network.processes(n)) for n in names)
    print(f"bed {record.bed_id}: {record.cluster}, {record.mode}, {state}, {len(names)} namespaces, {inside} processes")


def _describe(bed: Testbed) -> None:
    for host in bed.layout.hosts if bed.enforced else ():
        rates = "no network"
        if host.up_bytes_per_s is not None and host.down_bytes_per_s is not None:
            rates = f"up {format_rate(host.up_bytes_per_s)}, down {format_rate(host.down_bytes_per_s)}"
        ranks = ", ".join(f"{r} (core {bed.layout.ranks[r].core})" for r in host.ranks)
        print(f"testbed: {host.name} {host.namespace} {host.address}: {rates}; ranks {ranks}", file=sys.stderr)
    factors = " ".join(f"{r.slowdown:.3g}" for r in bed.layout.ranks)
    print(f"testbed: slow-downs {factors}; {bed.holds}", file=sys.stderr)
    if bed.mode == "deadline":
        print("testbed: a command keeps its deadline through benchmarks.testbed.deadline()", file=sys.stderr)
    for sentence in bed.not_enforced:
        print(f"testbed: not enforced: {sentence}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.testbed", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="up|run|down|status")
    for name, function in (("up", up), ("run", run), ("down", down), ("status", status)):
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.set_defaults(function=function)
        if name in ("up", "run"):
            command.add_argument("--cluster", required=True, metavar="FILE", help="a cluster description (YAML)")
            command.add_argument("--mode", choices=("deadline", "quota"), default="deadline")
        if name == "down":
            command.add_argument("beds", nargs="*", metavar="BED", help="ids, as status shows them")
        if name == "run":
            command.add_argument("--timeout", type=float, metavar="SECONDS", help="end it after this long")
            command.add_argument("command", nargs="*", metavar="-- COMMAND", help="run as every rank")
    return parser


if __name__ == "__main__":
    sys.exit(main())
