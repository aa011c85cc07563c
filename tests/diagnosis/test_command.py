"""``hap diagnose``: what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hap.cluster import ClusterSpec
from hap.diagnosis.run import Run
from hap.mesh_plan import load_plan
from hap.report.measured import load_run
from hap.run_record import PLAN, STATE_BYTES, StateWriter, rank_file
from tests._support.jobs import job, plan_of, steady
from tests.report.plans import cluster_of_four, four
from tests.test_cli import invoke
from tests.test_run_record import write

UNEQUAL = (0.30, 0.30, 0.24, 0.27)


def recorded(folder: Path, run: Run) -> str:
    write(folder, run.ranks)
    if run.plan is not None:
        run.plan.save(folder / PLAN)
    return str(folder)


def slow(folder: Path) -> str:
    compute, outside = steady(UNEQUAL)
    compute[15:, 3] *= 2
    plan = plan_of([s + 0.02 for s in UNEQUAL], 0.4, four()[0])
    return recorded(folder, job(compute, outside, plan=plan))


def test_a_healthy_run_is_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = invoke(capsys, "diagnose", recorded(tmp_path, job(*steady(UNEQUAL), plan=plan_of(UNEQUAL, 0.4))))
    assert code == 0 and out.startswith("healthy: 27 steps, 38")


def test_a_copy_cannot_say_whether_ranks_still_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded(tmp_path, job(*steady(UNEQUAL), plan=plan_of(UNEQUAL, 0.4)))
    for rank in range(4):
        StateWriter(memoryview(raw := bytearray(STATE_BYTES)), 5.0).alive(6.0)
        rank_file(tmp_path, rank, "state").write_bytes(raw)
    code, out, _ = invoke(capsys, "diagnose", folder)
    assert code == 0 and "each; whether its ranks still run shows only where they do, not in a copy\n" in out


def test_a_finding_is_1_and_goes_into_a_cluster_and_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, trace = tmp_path / "found.yaml", tmp_path / "trace.json"
    code, out, err = invoke(capsys, "diagnose", slow(tmp_path / "run"), "-o", str(found), "--trace", str(trace))
    assert code == 1
    assert out.startswith("compute straggler: rank 3 (h3/gpu#0) computes 2.0")
    assert "since step 16" in out and "next: " in out
    assert "computes  outside  both x predicted  waited for" in out  # the finding's ratio is of what it computes alone
    assert f"in {found}: small/slow#1: 1/2.0" in err
    before, after = cluster_of_four(), ClusterSpec.load(found)
    rates = [a.tflops["float32"] / b.tflops["float32"] for a, b in zip(after.devices, before.devices, strict=True)]
    assert rates == pytest.approx([1, 1, 1, 0.5], rel=0.05)
    assert len([e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]) > 50


def test_json_has_the_findings_and_the_traffic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = invoke(capsys, "diagnose", slow(tmp_path / "run"), "--collectives", "--json")
    body = json.loads(out)
    assert code == 1 and body["findings"][0]["syndrome"] == "compute straggler"
    assert body["findings"][0]["ranks"] == [3] and body["findings"][0]["since_step"] == 16
    assert len(body["ranks"]) == 4 and body["collectives"]["rows"][0]["kind"] == "all_reduce"


def test_the_report_takes_the_same_folder(tmp_path: Path) -> None:
    slow(tmp_path / "run")
    found = load_run(tmp_path / "run", load_plan(tmp_path / "run" / PLAN))
    assert len(found.steps) == 29 and found.median_s > 0.38


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (None, "no records of a run"),
        ("plan", "cannot be read"),
        ("other plan", "a plan for 2 ranks, and the records are of 4"),
        ("no plan", "the cluster as found needs the run's plan"),
    ],
)
def test_what_cannot_be_told_is_one_line(
    damage: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = []
    if damage is not None:
        slow(tmp_path)
    if damage == "plan":
        (tmp_path / PLAN).write_text("{")
    if damage == "other plan":
        plan_of((0.1, 0.1)).save(tmp_path / "other.json")
        options = ["--plan", str(tmp_path / "other.json")]
    if damage == "no plan":
        (tmp_path / PLAN).unlink()
        options = ["-o", str(tmp_path / "found.yaml")]
    code, _, err = invoke(capsys, "diagnose", str(tmp_path), *options)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert said in err or damage == "plan"
