"""How the records of a rank end: with its script, by a stop from outside, or because a disk is full."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TextIO

import pytest
import torch

from hap.diagnosis.run import load_run
from hap.plan import Plan
from hap.run_record import DONE, RAISED, STOPPED, State, rank_file, read_folder
from hap.runtime import record
from hap.runtime.collectives import Communicator
from tests._support.jobs import plan_of
from tests._support.ranks import run_alike
from tests.runtime.test_features_batches import net_plans
from tests.runtime.test_record import RANKS, STEPS, compiled, train, train_one


def alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> record.Recorder:
    """Of a job of one rank."""
    monkeypatch.setattr(record, "probe", lambda comm: ((None,), 1))
    return record.Recorder(folder, Communicator(None), plan_of((0.1,)))


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (None, DONE),
        (ValueError("a broken sample"), RAISED),
        (SystemExit(3), RAISED),
        (SystemExit("no data"), RAISED),
        (SystemExit(0), STOPPED),
        (SystemExit(), STOPPED),
        (KeyboardInterrupt(), STOPPED),
    ],
)
def test_a_stop_from_outside_is_no_failure(
    error: BaseException | None, ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(tmp_path, monkeypatch).close(error)
    (found,) = read_folder(tmp_path)
    assert found.state is not None and found.state.ended == ended


EXITS = """
import sys
from hap.runtime import record
from hap.runtime.collectives import Communicator
from tests._support.jobs import plan_of
recorder = record.Recorder(sys.argv[1], Communicator(None), plan_of((0.1,)))
recorder.close_at_exit()
with recorder.part("forward"):
    pass
"""


@pytest.mark.parametrize(
    ("ends", "ended"),
    [
        ("raise KeyboardInterrupt", STOPPED),
        ("with recorder.part('backward'): sys.exit(1)", STOPPED),
    ],
)
def test_how_a_script_ends_that_does_not_know_that_it_is_recorded(ends: str, ended: int, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", EXITS + ends, str(tmp_path)], check=False, capture_output=True)
    (found,) = read_folder(tmp_path)
    assert found.state is not None and found.state.ended == ended


# ---- disks that are full


def full() -> TextIO:
    return Path("/dev/full").open("w", encoding="utf-8", buffering=1)


def on_full_disk(rank: int, plan: Plan, folder: str) -> tuple[bool, list[str]]:
    """Whether the job is the same, and what was warned of. The disk of rank 1 has no more room after three steps."""
    alone = train(compiled(plan))
    program = compiled(plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder = program.record(folder, probe_every=2)
        with recorder:
            for step in range(STEPS):
                if step == 3 and rank == 1:
                    recorder._file = full()
                train_one(program, step)
        program = compiled(plan)
        with program.record(f"{folder}/again") as again:
            if rank == 1:
                again._file = full()
            recorded = train(program)
    said = [str(w.message) for w in caught if "record" in str(w.message)]
    return all(torch.equal(a, b) for a, b in zip(alone, recorded, strict=True)), said


def test_a_full_disk_ends_the_records_of_a_rank_and_not_its_job(tmp_path: Path) -> None:
    found = run_alike(RANKS, on_full_disk, net_plans()["zero"], str(tmp_path))
    assert [same for same, _ in found] == [True] * RANKS
    assert [len(said) for _, said in found] == [0, 2, 0]
    first = found[1][1][0]
    assert first.startswith("record: rank 1 writes no more records from step ") and "No space" in first
    ranks = read_folder(tmp_path)
    assert [[line.step for line in told.steps] for told in ranks] == [[1, 2, 3, 4, 5], [1, 2], [1, 2, 3, 4, 5]]
    assert [told.state.ended for told in ranks if told.state is not None] == [DONE] * RANKS
    assert all(told.state is not None for told in read_folder(tmp_path / "again"))  # nor is a call's kind unknown
    assert load_run(tmp_path).numbers == (1,)


def test_signs_of_life_go_on_where_stacks_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "STILL_S", 0.0)
    monkeypatch.setattr(record, "HEARTBEAT_S", 0.02)
    (tmp_path / "rank-0000.stack").mkdir()
    (tmp_path / "rank-0000.error").mkdir()
    with pytest.warns(UserWarning, match="rank 0 writes no more records") as told:
        recorder = alone(tmp_path, monkeypatch)
        until = time.monotonic() + 20
        while not recorder._failed and time.monotonic() < until:
            time.sleep(0.02)
        first = State.read(rank_file(tmp_path, 0, "state").read_bytes(), "").alive
        while State.read(rank_file(tmp_path, 0, "state").read_bytes(), "").alive == first:
            assert time.monotonic() < until
            time.sleep(0.02)
        recorder.close(ValueError("a broken sample"))
    assert len(told) == 1
    assert State.read(rank_file(tmp_path, 0, "state").read_bytes(), "").ended == RAISED
