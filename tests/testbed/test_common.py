"""The frame of the benchmarks: what a run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
    first = Report("links", "Links", parse("links", "x", ["--quick"])).body()
    again = Report("links", "Links", parse("links", "x", []))
    again.figure("error", 0.25)
    again.taken_by(first | {"commit": "of the rows"})
    body = again.body()
    assert (body["command"], body["commit"]) == ("python benchmarks/links.py --quick", "of the rows")
    assert body["machine"] == first["machine"] and body["figures"] == {"error": 0.25}
