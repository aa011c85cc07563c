"""Recording jobs on real ranks: what is written, what it costs the numbers (nothing), and what is found when a rank
hangs, dies or raises."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import hap
from hap.diagnosis import hang
from hap.diagnosis.finding import Finding
from hap.diagnosis.run import load_run
from hap.diagnosis.trace import to_trace
from hap.diagnosis.traffic import find_traffic
from hap.diagnosis.verdict import diagnose
from hap.errors import ProgramError
from hap.plan import Plan
from hap.run_record import PLAN, STOPPED, RecordError, read_folder
from hap.runtime import record
from hap.runtime.collectives import Communicator
from hap.runtime.program import HapProgram
from tests._support.jobs import plan_of
from tests._support.ranks import RankError, run_alike
from tests.runtime.test_features_batches import batch, net, net_plans

STEPS = 5
RANKS = 3


def compiled(plan: Plan) -> HapProgram:
    x, y = batch(0)
    return hap.compile(net(), plan=plan, example_inputs=(x,), example_targets=y, loss_fn=nn.functional.cross_entropy)


def train(program: HapProgram, steps: int = STEPS) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = program.shard_batch(*batch(step))
        optimizer.zero_grad()
        program(x, targets=y).backward()
        program.clip_grad_norm_(1.0)
        optimizer.step()
    return [p.detach().clone() for p in program.parameters()]


def both_ways(rank: int, plan: Plan, folder: str) -> bool:
    alone = train(compiled(plan))
    program = compiled(plan)
    with program.record(folder, every=2, probe_every=3):
        recorded = train(program)
    after = train(compiled(plan))  # nothing of the recorder is left
    return all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(alone, recorded, after, strict=True))


@pytest.mark.parametrize("name", [pytest.param("data", marks=pytest.mark.long), "zero", "any"])
def test_a_recorded_job_computes_the_same_and_tells_all(name: str, tmp_path: Path) -> None:
    plan = net_plans()[name]
    assert run_alike(RANKS, both_ways, plan, str(tmp_path)) == [True] * RANKS
    ranks = read_folder(tmp_path)
    assert Plan.load(tmp_path / PLAN).checksum == plan.checksum
    for rank, told in enumerate(ranks):
        assert (told.head.rank, told.head.world_size, told.head.device) == (rank, RANKS, plan.devices[rank])
        assert [s.step for s in told.steps] == [1, 2, 3, 4, 5]
        assert [s.calls is not None for s in told.steps] == [True, False, True, False, True]
        assert [p.step for p in told.probes] == [0, 3]
        assert told.state is not None and told.state.ended == 1 and not told.state.in_wire
        for probe in told.probes:
            assert [s is None for s in probe.seconds] == [r == rank for r in range(RANKS)]
        for line in told.steps:
            assert [part for part, _, _ in line.parts] == ["forward", "backward"]
            assert line.compute_s > 0 and line.wire_s <= line.parts_s <= line.seconds
            assert line.outside_wire_s > 0  # clipping's sum
            marks = [call[2:] for call in line.calls or ()]
            assert all(list(m[:4]) == sorted(m[:4]) for m in marks)
    order = [[(r.kinds[c[0]].kind if c[0] else "", c[1]) for c in r.steps[0].calls or ()] for r in ranks]
    assert order[0] == order[1] == order[2]
    wholes = [sorted((k.kind, k.values, k.nbytes) for k in r.kinds.values()) for r in ranks]
    assert wholes[0] == wholes[1] == wholes[2]
    assert any(len(call) == 8 for r in ranks for call in r.steps[0].calls or ()) or name == "data"
    run = load_run(tmp_path)
    assert run.numbers == (1, 2, 3, 4) and set(run.waits) == {0, 2}  # the last step's end is not known
    assert all((found.world.seconds >= 0).all() and not found.hosts for found in run.waits.values())
    assert len(run.probes) == 2 and np.isnan(np.diag(run.probes[0][2])).all()
    assert find_traffic(run).step == 3 and '"forward"' in to_trace(run)


def evaluate(rank: int, plan: Plan, folder: str) -> None:
    program = compiled(plan)
    with program.record(folder):
        train(program, 2)
        program.eval()
        with torch.no_grad():
            program(program.shard_batch(*batch(9))[0], targets=program.shard_batch(*batch(9))[1])
        program.train()
        with program.no_sync():
            train_one(program, 3)
        train_one(program, 4)


def train_one(program: HapProgram, step: int) -> None:
    x, y = program.shard_batch(*batch(step))
    program(x, targets=y).backward()


def test_evaluation_is_no_training_step_and_no_sync_is_one(tmp_path: Path) -> None:
    run_alike(RANKS, evaluate, net_plans()["zero"], str(tmp_path))
    parts = [[part for part, _, _ in line.parts] for line in read_folder(tmp_path)[0].steps]
    whole = ["forward", "backward"]
    assert parts == [whole, whole, ["evaluation"], whole, whole]
    assert load_run(tmp_path).numbers == (1, 2, 4)


def refusals(rank: int, plan: Plan, folder: str) -> list[str]:
    program, found = compiled(plan), []
    for options in ({"every": 0}, {"probe_every": -1}):
        with pytest.raises(ProgramError) as caught:
            program.record(f"{folder}/none", **options)
        found.append(str(caught.value))
    with program.record(folder):
        with pytest.raises(ProgramError) as caught:
            program.record(f"{folder}/other")
        found.append(str(caught.value))
    with pytest.raises(ProgramError) as caught:
        program.record(folder)
    return [*found, str(caught.value)]


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    for said in run_alike(RANKS, refusals, net_plans()["data"], str(tmp_path)):
        assert "every=0" in said[0] and "probe_every=-1" in said[1]
        assert said[2] == f"record: this job is recorded already, in {tmp_path}"
        assert said[3] == f"record: {tmp_path} has records of another run; name a new folder"


def in_a_file(rank: int, plan: Plan, folder: str) -> str:
    """Of rank 1 alone, as on a host whose disk is another."""
    program, where = compiled(plan), Path(folder) / f"rank {rank}"
    if rank == 1:
        where.write_text("a file")
    with pytest.raises(ProgramError) as caught:
        program.record(where)
    return str(caught.value)


def test_a_folder_that_one_rank_cannot_make_is_refused_on_all(tmp_path: Path) -> None:
    said = run_alike(RANKS, in_a_file, net_plans()["data"], str(tmp_path))
    assert set(said) == {f"record: {tmp_path}/rank 1: cannot make this folder (File exists)"}


# ---- jobs that stop ----


def is_waited_for(folder: str) -> bool:
    """Whether the others have come to a call that rank 1 has not. Ended before, they would look like it."""
    states = [record.state for record in load_run(Path(folder)).ranks]
    own = states.pop(1)
    assert own is not None
    return all(state is not None and state.in_wire and state.entered > own.entered for state in states)


def broken(rank: int, plan: Plan, folder: str, what: str) -> None:
    program = compiled(plan)
    with program.record(folder):
        train(program, 3)
        while rank == 1 and what == "killed" and not is_waited_for(folder):
            time.sleep(0.02)
        if rank == 1 and what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and what == "raises":
            raise ValueError("a broken sample")
        if rank == 1 and what == "stopped":
            raise KeyboardInterrupt
        while rank == 1 and what == "hangs" and not (Path(folder) / "go on").exists():
            time.sleep(0.02)
        train(program, 1)


def test_a_rank_that_never_comes_is_found_while_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "LEAST_S", 1.0)
    folder, found = str(tmp_path), list[Finding]()

    def look() -> None:
        until = time.monotonic() + 60
        while not found and time.monotonic() < until:
            time.sleep(0.1)
            try:
                found.extend(diagnose(load_run(tmp_path)).findings)
            except RecordError:
                continue  # they have not all begun
        (tmp_path / "go on").touch()

    watcher = threading.Thread(target=look)
    watcher.start()
    run_alike(RANKS, broken, net_plans()["data"], folder, "hangs")
    watcher.join()
    assert [(f.syndrome, f.ranks) for f in found] == [("non-communication hang", (1,))]
    assert "between two steps" in found[0].summary
    assert any("rank 0" in line and "in all_" in line for line in found[0].evidence)
    assert not [f for f in diagnose(load_run(tmp_path)).findings if "hang" in f.syndrome]  # it went on


@pytest.mark.parametrize(("what", "syndrome"), [("killed", "lost"), ("raises", "raised")])
def test_a_rank_that_ends_is_found_and_not_those_it_left_alone(
    what: str, syndrome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "SILENT", 0.5)
    with pytest.raises(RankError):  # whoever starts ranks ends the others, too
        run_alike(RANKS, broken, net_plans()["data"], str(tmp_path), what)
    time.sleep(0.6)
    (found,) = diagnose(load_run(tmp_path)).findings
    assert (found.syndrome, found.ranks) == (syndrome, (1,))
    assert what == "killed" or "ValueError: a broken sample" in found.summary


def test_a_job_that_is_stopped_from_outside_has_no_one_to_blame(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_alike(RANKS, broken, net_plans()["data"], str(tmp_path), "stopped")
    run = load_run(tmp_path)
    assert hang.find_hang(run) == ()
    assert run.ranks[1].state is not None and run.ranks[1].state.ended == STOPPED
    assert all(told.seen is not None for told in run.ranks)


# ---- a clock that lags behind, as a GPU's does ----


class LaggingClock:
    """A mark each millisecond, of which those up to ``done`` have passed."""

    def __init__(self) -> None:
        self.now = self.done = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def seconds(self, begin: int, end: int) -> float:
        assert end <= self.done, "asked about what has not passed"
        return (end - begin) / 1e3

    def has_passed(self, mark: int) -> bool:
        return mark <= self.done

    def settle(self) -> None:
        self.done = self.now


def test_steps_are_written_when_the_device_has_come_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LaggingClock()
    monkeypatch.setattr(record, "clock_of", lambda device: clock)
    monkeypatch.setattr(record, "probe", lambda comm: ((None,), 1))
    recorder = record.Recorder(tmp_path, Communicator(None), plan_of((0.1,)))

    def step() -> None:
        with recorder.part("forward"):
            call = recorder.called("all_reduce", [torch.ones(4)], [()], "ring", started=True)
            recorder.leave(recorder.enter(call))
            recorder.moved(call, lambda: None)()
        with recorder.part("backward"):
            recorder.leave(recorder.enter(call))

    def written() -> list[int]:
        return [line.step for line in read_folder(tmp_path)[0].steps]

    step(), step(), step()
    assert written() == []
    clock.done = 14  # when the second step begins
    step()
    assert written() == [1]
    recorder.close()
    assert written() == [1, 2, 3, 4]
    first = read_folder(tmp_path)[0].steps[1]
    assert first.parts == (("forward", 1000, 6000), ("backward", 7000, 10000))
    assert first.calls == ((1, 1, 2000, 3000, 8000, 9000, 4000, 5000),)
    assert (first.seconds, first.wire_s, first.outside_wire_s) == (0.011, 0.002, 0.0)


def test_a_device_that_failed_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``settle`` and ``seconds`` of a clock whose marks have not passed would raise."""
    monkeypatch.setattr(record, "clock_of", lambda device: LaggingClock())
    monkeypatch.setattr(record, "probe", lambda comm: ((None,), 1))
    recorder = record.Recorder(tmp_path, Communicator(None), plan_of((0.1,)))
    with pytest.raises(ValueError, match="the device is gone"), recorder, recorder.part("forward"):
        raise ValueError("the device is gone")
    (found,) = read_folder(tmp_path)
    assert found.steps == () and found.state is not None and found.state.ended == 2
    assert found.error is not None and found.error.endswith("ValueError: the device is gone\n")
