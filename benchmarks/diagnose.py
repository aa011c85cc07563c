"""Does ``hap diagnose`` find what is wrong with a job, and nothing where nothing is?

    python benchmarks/diagnose.py [--quick] [--only "GPT-2@both,VGG@links"]

The race's models and clusters, on a bed of four ranks with enforced links; a profile of each cluster is measured first,
and the plan made from it. A job of 40 recorded steps is run for each thing that can go wrong, and for none: a device
that becomes slower in the middle or was from the start, data that come late, a link that becomes slower one way, a rank
that never comes, is stopped, is killed or raises, a link that is cut. The diagnosis is made from the records alone:
of what hangs while it hangs, each second until there is one. It is right if its first finding has the syndrome, and the
rank; or the rank as the right end of a slow link, where one peer alone shows it; or, of a link that is cut, the rank
among others. These three are counted apart. All else that it finds is counted as false.

What recording costs is measured apart: the recorder alone, on calls as a program makes them; and two ranks without
emulated speeds that compute all the time, blocks of steps with and without in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import hap
from benchmarks.common import Report, Spread, parse
from benchmarks.diagnose_rank import AT, REPAIRED, Fault, costs, job, recorder_us
from benchmarks.race import CLUSTERS, chosen, cluster, profiled
from benchmarks.race_models import MODELS, build
from benchmarks.testbed import RankError, Testbed
from hap.cluster import ClusterSpec
from hap.cost_models.profile import CalibratedCluster
from hap.diagnosis.run import Run, load_run
from hap.diagnosis.verdict import Diagnosis, diagnose
from hap.plan import Plan
from hap.run_record import RecordError, State, rank_file
from hap.runtime.emulate import measure_host

NAME = "diagnose"
CASES = ("GPT-2@both", "VGG@links", "BERT@weak host")
POLL_S = 0.2
ASKED_S = 1.0
PATIENCE_S = 60.0  # for a hang
CUT = 2000.0  # bytes/s of a link that is cut: Gloo's connections live, nothing comes through
SYNDROMES = {
    "none": "",
    "computes slowly": "compute straggler",
    "late": "late between steps",
    "sends slowly": "slow sender",
    "receives slowly": "slow receiver",
    "never comes": "non-communication hang",
    "stopped": "lost",
    "killed": "lost",
    "raises": "raised",
    "link cut": "communication hang",
}
TWO = """
name: two
backend: gloo
hosts:
  - name: one
    devices: [{name: c, count: 2, tflops: {float32: 1}, memory: 4GB, memory_bandwidth: 10GB/s}]
    link: {bandwidth: 2GB/s, latency: 20us}
"""
ENDS = {"sends slowly": 0, "receives slowly": 1}  # which of a link's
FAULTS = (
    Fault("none"),
    Fault("none"),
    Fault("computes slowly", 1, 1.5),
    Fault("computes slowly", 3, 2.0),
    Fault("computes slowly", 2, 1.5, 0),
    Fault("late", 2, 0.3),
    Fault("sends slowly", 1, 4.0),
    Fault("sends slowly", 2, 4.0),
    Fault("receives slowly", 0, 4.0),
    Fault("receives slowly", 3, 4.0),
    Fault("never comes", 1),
    Fault("stopped", 2),
    Fault("killed", 3),
    Fault("raises", 0),
    Fault("link cut", 2),
)
QUICK = (Fault("none"), Fault("computes slowly", 1, 1.5), Fault("sends slowly", 2, 4.0), Fault("never comes", 1))


@dataclass(frozen=True)
class Row:
    """``after_s``: of a hang, from when it began to when it was told of."""

    case: str
    fault: Fault
    found: tuple[str, ...]
    ranks: tuple[int, ...]
    factor: float | None
    after_s: float | None

    @property
    def right(self) -> bool:
        expected = SYNDROMES[self.fault.what]
        if not expected:
            return not self.found
        if not self.found:
            return False
        if self.fault.what in ENDS and self.found[0] == "slow link":  # where only one peer is quick enough to show it
            return self.ranks[ENDS[self.fault.what]] == self.fault.rank
        if self.found[0] != expected:
            return False
        return self.fault.rank in self.ranks if self.fault.what == "link cut" else self.ranks == (self.fault.rank,)

    @property
    def names(self) -> str:
        """What a right finding of a fault names: "rank", that one alone, "link", it and the other end, or "several", of
        which it is one; "" if it is not right."""
        if not self.right:
            return ""
        return "rank" if self.ranks == (self.fault.rank,) else "link" if self.found[0] == "slow link" else "several"

    @property
    def false(self) -> int:
        """Findings that are none."""
        return max(0, len(self.found) - 1) if self.right and self.found else len(self.found)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help=f"models at clusters of the race; default: {', '.join(CASES)}")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="copy each job's records into a folder of its own here"
    )
    options = parse(NAME, "What hap diagnose finds of what is wrong.", argv, parser, ("--only",))
    report = Report(NAME, "What hap diagnose finds in jobs in which something goes wrong", options)
    known = {f"{model}@{name}": (model, name) for model in MODELS for name in CLUSTERS}
    call_s, rows = measure_host().launch_s, []
    wanted = chosen(options.extra.only, known, CASES[:1] if options.quick else CASES)
    for case in CASES:
        if case not in wanted:
            report.missing(case, "this job was not run")
    for case in wanted:
        model, name = known[case]
        told = profiled(name, call_s, (model,))
        plan = planned(model, told)
        for number, fault in enumerate(QUICK if options.quick else FAULTS):
            keep = options.extra.keep and options.extra.keep / f"{case}, {number} {fault.what}"
            rows.append(run(case, model, name, told, plan, fault, keep))
            print(rows[-1], "right" if rows[-1].right else "WRONG", flush=True)
    write(report, rows, cost(4 if options.quick else 12))


def planned(model: str, told: CalibratedCluster) -> Plan:
    built = build(model)
    given = {"loss_fn": built.loss_fn, "example_targets": built.example_targets}
    return hap.plan(built.model, told.described, example_inputs=built.example_inputs, profile=told.profile, **given)


def run(case: str, model: str, name: str, told: CalibratedCluster, plan: Plan, fault: Fault, keep: Path | None) -> Row:
    """One job, and what is told of it. ``keep``: where its records are copied to."""
    given = (model, plan.to_json(), told.described.to_yaml(), told.profile.model_dump_json())
    with tempfile.TemporaryDirectory() as folder, Testbed(cluster(name)) as bed:
        watcher = Watcher(Path(folder), bed, fault)
        watcher.start()
        try:
            bed.run(job, *given, folder, asdict(fault), timeout=150.0)
        except RankError as e:
            if fault.what not in ("killed", "raises"):
                raise
            print(f"({str(e).splitlines()[0]})")
        finally:
            watcher.over.set()
            watcher.join()
        found = watcher.found or diagnose(load_run(Path(folder)))
        if keep is not None:
            shutil.copytree(folder, keep, dirs_exist_ok=True)
    first = found.findings[0] if found.findings else None
    return Row(
        case,
        fault,
        tuple(f.syndrome for f in found.findings),
        () if first is None else first.ranks,
        None if first is None else first.factor,
        watcher.after_s,
    )


class Watcher(threading.Thread):
    """Beside the job: does to the bed what goes wrong there, and asks for a diagnosis while a job hangs, as somebody at
    a terminal would. Then it lets the job go on."""

    def __init__(self, folder: Path, bed: Testbed, fault: Fault) -> None:
        super().__init__(daemon=True)
        self.folder, self.bed, self.fault = folder, bed, fault
        self.over = threading.Event()
        self.found: Diagnosis | None = None
        self.after_s: float | None = None

    def run(self) -> None:
        fault = self.fault
        if fault.what not in ("sends slowly", "receives slowly", "link cut", "never comes", "stopped"):
            return
        if not self._until(lambda: self._state().step >= fault.at - 1):
            return
        host = self.bed.cluster.host_of(fault.rank)
        rates = self.bed.cluster.network(host)
        assert rates is not None
        up, down = rates
        begun = time.monotonic()
        if fault.what == "sends slowly":
            self.bed.set_rate(host, "up", up / fault.factor)
        elif fault.what == "receives slowly":
            self.bed.set_rate(host, "down", down / fault.factor)
        else:
            if fault.what == "link cut":
                self.bed.set_rate(host, "up", CUT)
            self._until(self._told, PATIENCE_S)
            self.after_s = time.monotonic() - begun
            self.bed.set_rate(host, "up", up)
            if fault.what == "stopped":
                os.kill(self._run().ranks[fault.rank].head.pid, signal.SIGCONT)
            (self.folder / REPAIRED).touch()

    def _state(self) -> State:
        path = rank_file(self.folder, self.fault.rank, "state")
        return State.read(path.read_bytes(), str(path))

    def _run(self) -> Run:
        return load_run(self.folder)

    def _told(self) -> bool:
        time.sleep(ASKED_S)
        found = diagnose(self._run())
        if any(f.syndrome in ("lost", "raised") or f.syndrome.endswith("hang") for f in found.findings):
            self.found = found
        return self.found is not None

    def _until(self, true: Callable[[], bool], patience_s: float = 1e9) -> bool:
        """Wait for it; False if the job is over first."""
        began = time.monotonic()
        while not self.over.is_set() and time.monotonic() - began < patience_s:
            try:
                if true():
                    return True
            except (OSError, RecordError):
                pass  # not all ranks have begun to write
            time.sleep(POLL_S)
        return False


@dataclass(frozen=True)
class Cost:
    """``alone_us``: CPU microseconds of each collective, its part of the step's line included; ``wall`` and ``cpu``: of
    a step while it is recorded over without, block by block, of ``calls`` collectives."""

    alone_us: Spread
    wall: Spread
    cpu: Spread
    calls: int


def cost(blocks: int) -> Cost:
    two = ClusterSpec.from_yaml(TWO)
    with tempfile.TemporaryDirectory() as folder, Testbed(two, enforced=False, load=2.0) as bed:
        ranks = bed.run(costs, two.to_yaml(), folder, blocks, timeout=300.0)
    walls = [max(r[i][0] for r in ranks) / max(r[i][1] for r in ranks) for i in range(blocks)]
    cpus = [sum(r[i][2] for r in ranks) / sum(r[i][3] for r in ranks) for i in range(blocks)]
    return Cost(Spread.of(recorder_us(blocks)), Spread.of(walls), Spread.of(cpus), ranks[0][0][4])


def write(report: Report, rows: Sequence[Row], cost: Cost) -> None:
    count(report, rows)
    measured = [row for row in rows if row.right and row.fault.what == "computes slowly"]
    if errors := [abs(row.factor / row.fault.factor - 1) for row in measured if row.factor is not None]:
        report.figure("worst_error_of_factor", max(errors))
    if after := [row.after_s for row in rows if row.after_s is not None]:
        report.figure("seconds_to_tell_a_hang", max(after), Spread.of(after))
    report.figure("recording_us_of_a_collective", cost.alone_us.median, cost.alone_us)
    report.figure("recorded_over_not_wall", cost.wall.median, cost.wall)
    report.figure("recorded_over_not_cpu", cost.cpu.median, cost.cpu)
    report.figure("collectives_of_a_step_recorded", cost.calls)
    show(report, rows)
    path = report.write(None)
    body = json.loads(path.read_text(encoding="utf-8"))
    body["cases"] = [asdict(row) for row in rows]
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def count(report: Report, rows: Sequence[Row]) -> None:
    faulty = [row for row in rows if row.fault.what != "none"]
    report.figure("jobs", len(rows))
    report.figure("faults", len(faulty))
    report.figure("faults_found", sum(row.right for row in faulty))
    report.figure("faults_found_with_the_rank", sum(row.names == "rank" for row in faulty))
    report.figure("faults_found_with_a_link", sum(row.names == "link" for row in faulty))
    report.figure("faults_found_with_several_ranks", sum(row.names == "several" for row in faulty))
    report.figure("healthy_jobs", len(rows) - len(faulty))
    report.figure("healthy_jobs_with_findings", sum(not row.right for row in rows if row.fault.what == "none"))
    report.figure("false_findings", sum(row.false for row in rows))


def show(report: Report, rows: Sequence[Row]) -> None:
    cells = [
        (
            row.case,
            row.fault.what,
            "" if row.fault.what == "none" else row.fault.rank,
            f"{row.fault.factor:g}" if row.fault.factor != 1 else "",
            "start" if row.fault.at == 0 else "" if row.fault.what == "none" else f"step {AT}",
            "; ".join(row.found) or "healthy",
            ", ".join(map(str, row.ranks)),
            "" if row.factor is None else f"{row.factor:.2f}",
            "" if row.after_s is None else f"{row.after_s:.0f}",
            "yes" if row.right else "**no**",
        )
        for row in rows
    ]
    columns = ["job", "what goes wrong", "rank", "times", "from", "found", "ranks", "times", "after s", "right"]
    report.table("Each job, and what is told of it", columns, cells)
    report.text(
        "Emulated speeds, real bytes: compute is this machine's CPU, stretched to a device's speed by deadline; links "
        "are shaped by the kernel. *Late* is a part of a step. *After*: from when a job stood still to the verdict, "
        "asked for every second. A slow sender or receiver with one peer alone that is quick enough to show it cannot "
        "be told from a slow link, of which both ends are named; a link that is cut holds up all, and all are named."
    )


if __name__ == "__main__":
    main()
