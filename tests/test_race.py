"""The race's tables and picture of all who took part, and whom one keeps who throws devices out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.common import RESULTS, parse
from benchmarks.race import ALONE, BASELINES, CasesReport, cluster, write
from benchmarks.race_rank import fast_hosts


def test_what_is_told_of_all_who_took_part(tmp_path: Path) -> None:
    """Also of cases that some did not take part in; cases are kept before the race has ended."""
    shutil.copy(RESULTS / "race.json", tmp_path)
    report = CasesReport("race", "The race", parse("race", "Of a test.", ["--out", str(tmp_path)]))
    cases = list(report.cases.values())
    assert {name for case in cases for name in case.entries} >= {*BASELINES}
    before = [case.name for case in cases if ALONE not in case.entries]
    del report.cases[cases[0].name]
    report.keep()
    kept = json.loads((tmp_path / "race.json").read_text())["cases"]
    assert [f"{case['model']}, {case['cluster']}" for case in kept] == [case.name for case in cases[1:]]
    write(report, cases)
    text = (tmp_path / "race.md").read_text()
    assert text.count(f": {ALONE} ") == len(cases) - len(before)
    assert ("Raced before one device alone" in text) == bool(before)
    assert (tmp_path / "race.png").stat().st_size


@pytest.mark.parametrize(
    ("name", "ranks"), [("compute", (0, 1)), ("links", (0, 1)), ("both", (0, 1)), ("weak host", (0, 1, 2))]
)
def test_the_fast_hosts_have_the_fastest_devices_behind_the_fastest_networks(name: str, ranks: tuple[int, ...]) -> None:
    assert fast_hosts(cluster(name)) == ranks
    assert fast_hosts(cluster("equal")) == (0, 1, 2, 3)
