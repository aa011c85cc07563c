"""The frame of the benchmarks: what a run leaves."""

from __future__ import annotations

import argparse
import json
import pickle
from pathlib import Path

import pytest

from benchmarks import common, zoo
from benchmarks.common import Report, Spread, drawing, markdown_table, parse


def test_spread_is_range_over_median() -> None:
    spread = Spread.of([2.0, 4.0, 5.0])
    assert (spread.n, spread.least, spread.median, spread.most) == (3, 2.0, 4.0, 5.0)
    assert spread.relative == 0.75


def test_a_spread_of_something_not_finite_is_refused() -> None:
    with pytest.raises(AssertionError):
        Spread.of([1.0, float("nan")])


def test_the_command_can_be_typed_again_and_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    options = parse("links", "x", ["--quick", "--out", str(tmp_path)])
    assert options.command == "python benchmarks/links.py --quick"
    assert (options.quick, options.out) == (True, tmp_path)


def test_the_command_names_no_folder_that_another_option_gives() -> None:
    given = ["--keep", "/mine", "--rows=/mine", "--only", "a"]
    assert common.without_folders(given) == ["--only", "a"]


def test_a_quick_run_needs_a_folder_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("links", "x", ["--quick"])
    assert "--quick: a few cases do not stand for all" in capsys.readouterr().err.splitlines()[-1]


def test_some_cases_replace_no_result_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But their own, and in another folder any."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)

    def ask(*given: str) -> Report:
        parser = argparse.ArgumentParser()
        parser.add_argument("--only")
        return Report("links", "Links", parse("links", "x", given, parser, ("--only",)))

    ask("--only", "a").write(None)
    ask("--only", "a").write(None)
    with pytest.raises(SystemExit, match=r"links.json of `python benchmarks/links.py --only a` in .*; --out DIR"):
        ask("--only=b")
    ask("--only=b", "--out", str(tmp_path / "other")).write(None)
    ask().write(None)


def test_the_commit_is_that_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = iter(("loaded", "made meanwhile"))
    monkeypatch.setattr(common, "commit", lambda: next(commits))
    report = Report("links", "Links", parse("links", "x", ["--out", str(tmp_path)]))
    assert report.body()["commit"] == report.commit == "loaded"


def test_tables_are_aligned() -> None:
    assert markdown_table(["link", "ms"], [("a", "1.0"), ("long", "12.5")]) == (
        "| link |   ms |\n| ---- | ---: |\n| a    |  1.0 |\n| long | 12.5 |"
    )


def test_a_run_leaves_json_markdown_and_a_picture(tmp_path: Path) -> None:
    report = Report("links", "Links", parse("links", "x", ["--out", str(tmp_path)]))
    report.figure("error", 0.25, Spread.of([1.0, 2.0]))
    report.missing("gpu_error", "no GPU on this machine")
    report.table("Links", ["link", "ms"], [("a", "1.0")])
    with drawing(1, 1) as (figure, axes):
        axes[0].plot([1, 2], [1, 2])
        report.write(figure)
    body = json.loads((tmp_path / "links.json").read_text())
    assert set(body) == {"command", "commit", "machine", "spread", "figures", "absent"}
    assert body["figures"] == {"error": 0.25}
    assert body["spread"]["error"]["n"] == 2
    assert body["absent"] == {"gpu_error": "no GPU on this machine"}
    assert {"cpu", "cores", "kernel", "load_before", "steal"} <= set(body["machine"])
    text = (tmp_path / "links.md").read_text()
    assert "![Links](links.png)" in text and "Not measured: `gpu_error`: no GPU on this machine." in text
    assert (tmp_path / "links.png").stat().st_size > 1000


def test_tables_made_again_say_what_run_their_rows_are_of(tmp_path: Path) -> None:
    first = Report("links", "Links", parse("links", "x", ["--quick", "--out", str(tmp_path)])).body()
    again = Report("links", "Links", parse("links", "x", []))
    again.figure("error", 0.25)
    again.taken_by(first | {"commit": "of the rows"})
    body = again.body()
    assert (body["command"], body["commit"]) == ("python benchmarks/links.py --quick", "of the rows")
    assert body["machine"] == first["machine"] and body["figures"] == {"error": 0.25}


def test_a_model_s_row_is_taken_again_only_at_its_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = ("gpt2", zoo.Planned(), zoo.Proved(0, ()), None)
    (tmp_path / "gpt2.pickle").write_bytes(pickle.dumps({"commit": "abc", "row": row}))
    assert zoo._kept(tmp_path, "gpt2", "abc") == row
    with pytest.raises(SystemExit, match=r"gpt2.pickle in --rows is of abc, this code is of def: remove it"):
        zoo._kept(tmp_path, "gpt2", "def")
    (tmp_path / "gpt2.pickle").write_bytes(pickle.dumps(row))
    with pytest.raises(SystemExit, match="of a commit that it does not tell"):
        zoo._kept(tmp_path, "gpt2", "abc")
    with pytest.raises(SystemExit):
        zoo.main(["--only", "gpt9", "--out", str(tmp_path)])
    assert "--only: no such model: gpt9" in capsys.readouterr().err.splitlines()[-1]
