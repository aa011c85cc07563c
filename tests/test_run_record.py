"""The folder of records: what is written is read, what is damaged is refused in one line."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hap import run_record
from hap.errors import HapError
from hap.run_record import (
    STATE_BYTES,
    RankRecord,
    RecordError,
    State,
    StateWriter,
    rank_file,
    read_folder,
)
from tests._support.jobs import job, steady, with_probes

RUN = with_probes(job(*steady([0.1, 0.2], steps=3)), np.ones((2, 2)))


def write(folder: Path, ranks: tuple[RankRecord, ...] = RUN.ranks) -> None:
    folder.mkdir(exist_ok=True)
    for rank, record in enumerate(ranks):
        lines = (record.head, *record.kinds.values(), *record.steps, *record.probes)
        rank_file(folder, rank, "jsonl").write_text("".join(line.line() for line in lines))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_folder(tmp_path) == RUN.ranks


def test_a_line_cut_off_with_its_process_is_left_out(tmp_path: Path) -> None:
    write(tmp_path)
    path = rank_file(tmp_path, 1, "jsonl")
    path.write_text(path.read_text()[:-5])
    assert read_folder(tmp_path)[1].probes == () and read_folder(tmp_path)[1].steps == RUN.ranks[1].steps


@settings(max_examples=60, deadline=None)
@given(
    doing=st.integers(0, 3),
    wire=st.booleans(),
    ended=st.integers(0, 3),
    counts=st.tuples(*[st.integers(0, 2**63)] * 3),
    world=st.integers(0, 2**63),
    since=st.floats(0, 4e9),
    alive=st.floats(0, 4e9),
)
def test_a_state_is_what_was_written_last(
    doing: int, wire: bool, ended: int, counts: tuple[int, int, int], world: int, since: float, alive: float
) -> None:
    memory = bytearray(STATE_BYTES)
    writer = StateWriter(memoryview(memory), 5.0)
    assert State.read(bytes(memory), "x") == State(0, 0, 0, 0, 0, 0, 5.0, 5.0)
    writer.now(doing, wire, *counts, since, world)
    writer.alive(alive)
    writer.ended(ended)
    assert State.read(bytes(memory), "x") == State(doing, int(wire), ended, *counts, since, alive, world)


def test_all_states_are_read_before_anything_that_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank gives a sign of life whenever a line is parsed: what is compared is of one time."""
    write(tmp_path)
    given = bytearray(STATE_BYTES)
    writer, parse, now = StateWriter(memoryview(given), 100.0), run_record._parse, [100.0]

    def live(line: str | None = None) -> object:
        now[0] += 60
        writer.alive(now[0])
        for rank in range(2):
            rank_file(tmp_path, rank, "state").write_bytes(bytes(given))
        return None if line is None else parse(line)

    live()
    monkeypatch.setattr(run_record, "_parse", live)
    assert {record.state.alive for record in read_folder(tmp_path) if record.state is not None} == {160.0}


def test_the_clock_says_nothing_of_a_copy(tmp_path: Path) -> None:
    write(tmp_path / "run")
    StateWriter(memoryview(state := bytearray(STATE_BYTES)), 5.0)
    path = rank_file(tmp_path / "run", 1, "state")
    path.write_bytes(state)

    def seen(host: str, inode: int) -> float | None:
        head = RUN.ranks[1].head.model_copy(update={"host": host, "state_inode": inode})
        write(tmp_path / "run", (RUN.ranks[0], RUN.ranks[1]._replace(head=head)))
        return read_folder(tmp_path / "run")[1].seen

    began, here, inode = time.time(), socket.gethostname(), path.stat().st_ino
    assert seen("elsewhere", inode) is None and seen(here, 0) is None
    assert began <= (seen(here, inode) or 0) <= time.time()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert read_folder(tmp_path / "copy")[1].seen is None
    assert read_folder(tmp_path / "run")[0].seen is None  # it has no state


def test_a_folder_without_records_says_how_to_make_some(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"no records of a run .* hap run --record"):
        read_folder(tmp_path)


def test_a_record_that_is_a_folder_is_named(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, "jsonl").mkdir()
    with pytest.raises(RecordError, match=r"rank-0000\.jsonl: cannot be read \(Is a directory\)$"):
        read_folder(tmp_path)


def test_a_rank_without_a_record_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    rank_file(tmp_path, 0, "jsonl").unlink()
    with pytest.raises(RecordError, match=r"1 records of 2 ranks; \[0\] have none"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "cannot be read"),
        ("[1]", "not one tagged object"),
        ('{"nothing": {}}', "unknown 'nothing'"),
        ('{"call": {"number": 1}}', "validation errors for CallKind"),
        ('{"step": {"step": -1}}', "validation errors for StepLine"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str, said: str) -> None:
    write(tmp_path)
    path = rank_file(tmp_path, 0, "jsonl")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(RecordError, match=f"line 7: .*{said}") as caught:
        read_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("calls", [[[1, 0, 5]], [[1, 1, 5, 6, 7]], [[9, 0, 5, 6]], [[]], [[1, 2, 5, 6]]])
def test_calls_without_sense_are_refused(tmp_path: Path, calls: list[list[int]]) -> None:
    write(tmp_path)
    path = rank_file(tmp_path, 0, "jsonl")
    body = json.loads(RUN.ranks[0].steps[0].line())
    body["step"]["calls"] = calls
    path.write_text(path.read_text() + json.dumps(body) + "\n")
    with pytest.raises(RecordError):
        read_folder(tmp_path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_refused_or_makes_no_difference(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of a record or a state written over, cut off or put in."""
    write(tmp_path)
    state = bytearray(STATE_BYTES)
    StateWriter(memoryview(state), 5.0)
    rank_file(tmp_path, 0, "state").write_bytes(bytes(state))
    path = rank_file(tmp_path, 0, data.draw(st.sampled_from(["jsonl", "state"])))
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    match data.draw(st.sampled_from(["over", "cut", "in"])):
        case "over":
            raw[at] = data.draw(st.integers(0, 255))
        case "cut":
            del raw[at:]
        case "in":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=4))
    path.write_bytes(bytes(raw))
    try:
        found = read_folder(tmp_path)
    except HapError as e:
        assert "\n" not in str(e)
    else:
        assert len(found) == 2
